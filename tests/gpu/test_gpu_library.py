"""FlashInfer in the place of torch: the same norms, activations, attention and tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from pathlib import Path

import pytest
import torch
from engine_kit import EngineKit, make_args

from minima_kernels.cuda import library
from minima_kernels.cuda.extend import attend_new
from minima_kernels.cuda.library import library_off
from minima_kernels.cuda.ragged import RaggedPrefill
from minima_kernels.routes import ROUTES
from sglang_minima.models.layer_ops import FlashInferOps, TorchOps, layer_ops
from sglang_minima.runner.cut import Cut, draw_cut
from sglang_minima.runner.model_runner import ModelRunner

DEVICE = torch.device("cuda", 0)
HALVES = [torch.bfloat16, torch.float16]
TOLERANCE = {torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
SIZES = {"llama": 64, "qwen2": 64, "qwen3": 128}
"""Head dim of the random models."""


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    reason = library.layers_reason(DEVICE, torch.bfloat16)
    if reason == library.MISSING:
        pytest.skip(reason)
    # Installed and not working is a failure.
    assert reason is None, reason


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("rows", [1, 7, 300])
def test_norms_and_activations(rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    ops, exact = FlashInferOps(), TorchOps()
    near = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    x, residual = torch.randn(2, rows, 1024, dtype=dtype, device=DEVICE).unbind()
    weight = torch.rand(1024, dtype=dtype, device=DEVICE) + 0.5
    wide = x.float(), residual.float()
    torch.testing.assert_close(
        ops.rms_norm(x, weight, 1e-5).float(), exact.rms_norm(wide[0], weight.float(), 1e-5), **near
    )
    heads = torch.randn(rows, 12, 128, dtype=dtype, device=DEVICE)
    for part in heads.split((8, 2, 2), dim=1):  # rows with gaps, as those of a joint product
        normed = ops.rms_norm(part, weight[:128].contiguous(), 1e-6)
        assert normed[0].is_contiguous()
        expected = exact.rms_norm(part.float(), weight[:128].float(), 1e-6)
        torch.testing.assert_close(normed.float(), expected, **near)
    torch.testing.assert_close(ops.silu_and_mul(x).float(), exact.silu_and_mul(wide[0]), **near)
    total = wide[0] + wide[1]
    added = ops.add_rms_norm(x, residual, weight, 1e-5)
    torch.testing.assert_close(residual.float(), total, **near)
    expected = exact.rms_norm(total, weight.float(), 1e-5)
    torch.testing.assert_close(added.float(), expected, **near)


def test_kernels_can_be_captured() -> None:
    ops = FlashInferOps()
    x, residual = torch.randn(2, 3, 512, dtype=torch.bfloat16, device=DEVICE).unbind()
    weight = torch.ones(512, dtype=torch.bfloat16, device=DEVICE)
    fixed = x.clone(), residual.clone()

    def run() -> torch.Tensor:
        return ops.silu_and_mul(ops.add_rms_norm(*fixed, weight, 1e-6))

    eager = run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    fixed[0].copy_(x)
    fixed[1].copy_(residual)
    graph.replay()
    assert torch.equal(captured, eager)


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, q_indptr: Sequence[int], scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention in float64: out [N, Hq, D], lse [N, Hq]."""
    group = q.shape[1] // k.shape[1]
    outs, sums = [], []
    for start, stop in pairwise(q_indptr):
        parts = (q[start:stop], k[start:stop].repeat_interleave(group, 1),
                 v[start:stop].repeat_interleave(group, 1))  # fmt: skip
        one, keys, values = (x.double().transpose(0, 1) for x in parts)
        scores = one @ keys.mT * scale
        future = torch.ones_like(scores[0], dtype=torch.bool).triu(1)
        scores.masked_fill_(future, -torch.inf)
        outs.append((scores.softmax(-1) @ values).transpose(0, 1))
        sums.append(scores.logsumexp(-1).T)
    return torch.cat(outs), torch.cat(sums)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_causal_attention(dim: int, dtype: torch.dtype) -> None:
    heads, kv_heads = 6, 2
    reason = library.prefill_reason(DEVICE, dtype, heads, kv_heads, dim)
    if reason is not None and "JIT" in reason:
        pytest.skip(f"not among the compiled kernels: {reason}")
    assert reason is None, reason
    torch.manual_seed(0)
    q_indptr = (0, 1, 1, 131, 140, 700)
    rows = torch.randn(700, heads + 2 * kv_heads, dim, dtype=dtype, device=DEVICE)
    q, k, v = rows.split((heads, kv_heads, kv_heads), dim=1)
    q, k, scale = q.contiguous(), k.contiguous(), dim**-0.5
    prefill = RaggedPrefill(DEVICE, dim)
    step = object()
    found = prefill.attend(step, q, k, v, q_indptr, scale)
    out, lse = reference(q, k, v, q_indptr, scale)
    torch.testing.assert_close(found.lse.double(), lse, atol=2e-3, rtol=1e-3)
    error = (found.out.double() - out).norm() / out.norm()
    assert error < TOLERANCE[dtype] / 2
    # The second layer of a step uses the plan of the first, and torch's route says the same.
    again = prefill.attend(step, q, k, v, q_indptr, scale)
    assert torch.equal(again.out, found.out)
    other = attend_new(q, k, v, q_indptr, scale)
    assert (other.out.double() - out).norm() / out.norm() < TOLERANCE[dtype] / 2
    # A request's rows have the same bits in a step of its own.
    alone = prefill.attend(object(), q[140:], k[140:], v[140:], (0, 560), scale)
    assert torch.equal(alone.out, found.out[140:])
    assert torch.equal(alone.lse, found.lse[140:])


def cuts(count: int) -> Iterator[Cut]:
    kinds = [(-1, 1.0, 0.0), (-1, 0.9, 0.0), (20, 0.95, 0.0), (-1, 0.5, 0.02), (3000, 0.99, 0.0),
             (-1, 1.0, 0.1), (50, 1.0, 0.0)]  # fmt: skip
    for i in range(count):
        yield Cut(0.6 + 0.1 * (i % 7), (i * 0.6180339887) % 1.0, *kinds[i % len(kinds)])


@pytest.mark.parametrize("scale", [1.0, 6.0])
def test_tokens_of_sampling(scale: float) -> None:
    """Those of the CPU, with the library and without, in one batch and alone."""
    torch.manual_seed(0)
    logits = (torch.randn(42, 128256) * scale).bfloat16().float()
    chosen = list(cuts(len(logits)))
    expected = torch.tensor([draw_cut(logits[i : i + 1], [chosen[i]]).item() for i in range(42)])
    on_gpu = logits.to(DEVICE)
    draw_cut(on_gpu, chosen)
    torch.cuda.set_sync_debug_mode("error")  # nothing waits for the device
    try:
        together = draw_cut(on_gpu, chosen)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with library_off():
        by_torch = draw_cut(on_gpu, chosen)
    # A border that lies between two roundings may be crossed; the mass there is nearly none.
    assert (together.cpu() != expected).sum() <= 1
    assert (together != by_torch).sum() <= 1
    alone = [draw_cut(on_gpu[i : i + 1], [chosen[i]]).item() for i in range(42)]
    assert together.tolist() == alone
    backwards = draw_cut(on_gpu.flip(0), chosen[::-1])
    assert backwards.flip(0).tolist() == alone


def test_shares_of_sampling() -> None:
    """Ties at the end of top-p fall to the first of the vocabulary; the rest by their weights."""
    logits = torch.full((1, 8192), -20.0, device=DEVICE)
    logits[0, [5, 900, 901, 902, 4000]] = torch.tensor([2.0, 1.0, 1.0, 1.0, 0.0], device=DEVICE)
    count = 2000
    points = [Cut(1.0, (i + 0.5) / count, -1, 0.75, 0.0) for i in range(count)]
    tokens = draw_cut(logits.expand(count, -1).contiguous(), points).bincount(minlength=8192)
    weights = torch.zeros(8192, dtype=torch.float64)
    # exp(2) + 2 exp(1) of the 16.54 are less than 0.75; the third of the equals is not needed.
    weights[[5, 900, 901]] = torch.tensor([2.0, 1.0, 1.0], dtype=torch.float64).exp()
    assert (tokens.cpu() / count - weights / weights.sum()).abs().max() <= 1.5 / count


def model_dir_of(folder: Path, family: str) -> Path:
    config = {
        "architectures": [f"{family.capitalize()}ForCausalLM"],
        "model_type": family,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": SIZES[family],
        "num_hidden_layers": 3,
        "vocab_size": 6000,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def equal_share(one: list[list[int]], other: list[list[int]]) -> float:
    pairs = list(zip(chain(*one), chain(*other), strict=True))
    return sum(a == b for a, b in pairs) / len(pairs)


@pytest.mark.parametrize("family", list(SIZES))
def test_models_with_and_without(family: str, tmp_path: Path) -> None:
    """A random model: its tokens are the same, or as likely, and the routes tell who computed."""
    args = make_args(
        device="cuda", dtype="bfloat16", load_format="dummy", max_total_tokens=8192,
        kv_profile="bf16",
    )  # fmt: skip
    folder = model_dir_of(tmp_path, family)
    torch.manual_seed(0)
    runner = ModelRunner(args, str(folder))
    assert isinstance(runner.model.model.norm.ops, FlashInferOps)
    prompts = [[(31 * i + j * j) % 5990 + 3 for j in range(size)] for i, size in
               enumerate((5, 64, 300))]  # fmt: skip
    kit = EngineKit(args, runner)
    runner.capture_graphs(4)
    before = ROUTES.snapshot()
    settings = {"max_new_tokens": 12, "ignore_eos": True}
    tokens = kit.generate(prompts, **settings)
    sampled = kit.generate(prompts, temperature=0.9, top_p=0.9, sampling_seed=5, **settings)
    used = {
        (route.operation, route.route)
        for route, count in ROUTES.snapshot().items()
        if count > before.get(route, 0)
    }
    assert {("norm", "flashinfer"), ("prefill", "flashinfer"), ("top_p", "flashinfer")} <= used
    assert not {("norm", "torch"), ("prefill", "flash"), ("top_p", "torch")} & used
    alone = [
        kit.generate([prompt], temperature=0.9, top_p=0.9, sampling_seed=5, **settings)[0]
        for prompt in prompts
    ]
    assert equal_share(sampled, alone) >= 0.6  # products round by batch size
    kit.check_idle()
    with library_off():
        runner.model.use(layer_ops(runner.device, runner.dtype))
        assert isinstance(runner.model.model.norm.ops, TorchOps)
        kit = EngineKit(args, runner)
        plain = kit.generate(prompts, **settings)
    assert equal_share(tokens, plain) >= 0.6  # one near tie changes all that follows
    firsts = [(a[0], b[0]) for a, b in zip(tokens, plain, strict=True)]
    assert sum(a == b for a, b in firsts) >= 2
