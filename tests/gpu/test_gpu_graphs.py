"""The engine over the CUDA kernels, embedded model: graphs, routes, memory, answers."""

from __future__ import annotations

import gc
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_kit import EngineKit, make_args

from minima_kernels.routes import ROUTES, Route
from sglang_minima.runner.model_runner import ModelRunner
from sglang_minima.server_args import ServerArgs

PROMPTS = [[1000 + (7 * i + j * j) % 20000 for j in range(length)] for i, length in
           enumerate((64, 65, 200, 700))]  # fmt: skip
ROOM = 1 << 14


def args_of(**settings: Any) -> ServerArgs:
    return make_args(device="cuda", dtype="bfloat16", max_total_tokens=ROOM, **settings)


@pytest.fixture(scope="module")
def runner(model_dir: Path) -> ModelRunner:
    return ModelRunner(args_of(), str(model_dir))


def kit_of(runner: ModelRunner, rows: int = 0, **settings: Any) -> EngineKit:
    """An engine; with ``rows`` its decode steps of up to so many are captured."""
    kit = EngineKit(args_of(**settings), runner)
    if rows:
        runner.capture_graphs(rows)
    return kit


def counted(before: dict[Route, int]) -> Counter[Route]:
    return Counter(ROUTES.snapshot()) - Counter(before)


@pytest.mark.parametrize("profile", ["bf16", "fp8", "minima"])
def test_replayed_steps_equal_eager_ones(runner: ModelRunner, profile: str) -> None:
    tokens = []
    for rows in (0, 4):
        kit = kit_of(runner, rows, kv_profile=profile)
        before = ROUTES.snapshot()
        first = kit.generate(PROMPTS, max_new_tokens=40, ignore_eos=True)
        kit.settle()
        again = kit.generate(PROMPTS, max_new_tokens=40, ignore_eos=True)
        tokens.append((first, again))
        kit.check_idle()
        replays = counted(before)[Route("graph", "replay", "")]
        assert replays >= 60 if rows else not replays
    assert tokens[0] == tokens[1]


def test_padded_rows_change_little(runner: ModelRunner) -> None:
    """Three rows run as four; each gets what it gets alone, but for rounding."""
    kit = kit_of(runner, 4, kv_profile="bf16")
    together = kit.generate(PROMPTS[:3], max_new_tokens=8, ignore_eos=True)
    alone = [kit.generate([prompt], max_new_tokens=8, ignore_eos=True)[0] for prompt in PROMPTS[:3]]
    pairs = [pair for rows in zip(together, alone, strict=True) for pair in zip(*rows, strict=True)]
    same = sum(a == b for a, b in pairs)
    assert same >= 18
    kit.check_idle()


def test_no_fallbacks_and_no_dense_copy(runner: ModelRunner) -> None:
    kit = kit_of(runner, 4)
    before = ROUTES.snapshot()
    kit.generate(PROMPTS, max_new_tokens=40, ignore_eos=True)
    kit.settle()
    kit.generate(PROMPTS, max_new_tokens=8, ignore_eos=True)
    used = counted(before)
    layers = runner.config.num_layers
    routes = {(route.operation, route.route) for route in used}
    assert routes <= {
        ("decode", "cuda"), ("append", "cuda"), ("extend", "stacked"),
        ("extend", "flash"), ("retier", "cuda"),
        ("expand", "cuda"), ("graph", "replay"), ("graph", "eager"), ("norm", "flashinfer"),
        ("norm", "torch"),
        ("prefill", "flashinfer"), ("prefill", "flash"),
    }  # fmt: skip
    eager = {route.reason for route in used if (route.operation, route.route) == ("graph", "eager")}
    assert eager <= {"prefill in the batch"}
    assert used[Route("decode", "cuda", "")] >= 40 * layers
    del kit.outputs
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    weights = sum(p.nbytes for p in runner.model.parameters())
    declared = weights + kit.cache.arena.num_bytes + runner.scratch_bytes
    extra = torch.cuda.memory_allocated() - declared
    print(f"allocated beyond arena, weights and declared scratch: {extra / 1e6:.1f} MB")
    assert extra < 64e6  # outputs of the graphs, tables; KV as bf16 would be 377 MB


def test_cold_equals_warm_in_deterministic_mode(runner: ModelRunner) -> None:
    kit = kit_of(runner, 1, deterministic_cache=True)
    for prompt in PROMPTS:
        cold = kit.generate([prompt], max_new_tokens=16, ignore_eos=True)
        rid = kit.submit(prompt, max_new_tokens=16, ignore_eos=True)
        kit.drain()
        assert [kit.tokens(rid)] == cold
        assert kit.last(rid).cached_tokens >= (len(prompt) - 1) // 64 * 64
    kit.check_idle()


def test_tokens_are_those_of_transformers(runner: ModelRunner, model_dir: Path) -> None:
    """Every token sampled is the likeliest, or as good as, under transformers in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).cuda()
    kit = kit_of(runner, 4, kv_profile="bf16")
    for prompt, tokens in zip(
        PROMPTS, kit.generate(PROMPTS, max_new_tokens=32, ignore_eos=True), strict=True
    ):
        ids = torch.tensor([[*prompt, *tokens]], device="cuda")
        with torch.inference_mode():
            logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
        chosen = logits.gather(1, torch.tensor(tokens, device="cuda")[:, None])[:, 0]
        assert (logits.amax(-1) - chosen).max() < 0.5
        assert (logits.argmax(-1) == torch.tensor(tokens, device="cuda")).float().mean() > 0.9
    kit.check_idle()
