"""A decode step in one native call against the same layers call by call."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from engine_kit import EngineKit, make_args
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from minima_kernels.cpu.library import native_library
from minima_kernels.cpu.route import torch_only
from minima_kernels.routes import ROUTES
from sglang_minima.models.fused import FusedDecoder
from sglang_minima.runner.attention import PagedAttention
from sglang_minima.runner.model_runner import ForwardOutput, ModelRunner

pytestmark = pytest.mark.skipif(native_library() is None, reason="no native kernels")

SIZES = {
    "vocab_size": 512,
    "hidden_size": 96,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "attention_bias": True,
}
LAYERS = SIZES["num_hidden_layers"]


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    torch.manual_seed(3)
    if request.param == "llama":
        model: torch.nn.Module = LlamaForCausalLM(LlamaConfig(**SIZES, initializer_range=0.15))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**SIZES, initializer_range=0.15))
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, mean=0.5, std=0.3)
    path = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(path)
    return ModelRunner(make_args(quantization="int8"), str(path))


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


class Recorder:
    """Keeps the hidden states of every step of a kit."""

    def __init__(self, runner: ModelRunner, profile: str, patch: pytest.MonkeyPatch) -> None:
        self.hidden: list[torch.Tensor] = []
        forward = type(runner).forward

        def record(batch: object) -> ForwardOutput:
            output = forward(runner, batch)  # type: ignore[arg-type]
            self.hidden.append(output.hidden.clone())
            return output

        patch.setattr(runner, "forward", record)
        self._kit = EngineKit(
            make_args(quantization="int8", kv_profile=profile, max_total_tokens=8192), runner
        )

    def run(self) -> list[list[int]]:
        """Three sequences, two of which share a sealed prefix; mixed steps and pure decodes."""
        shared = [5 + i % 300 for i in range(130)]
        prompts = [shared, [*shared, 7, 8, 9], [3, 4]]
        return self._kit.generate(prompts, max_new_tokens=12, ignore_eos=True)


def no_step(_: PagedAttention) -> None:
    return None


@pytest.mark.parametrize("profile", ["bf16", "minima"])
def test_same_bits_as_layer_by_layer(
    runner: ModelRunner, threads: None, profile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(runner.model.model, FusedDecoder)
    before = ROUTES.snapshot()
    with monkeypatch.context() as patch:
        whole = Recorder(runner, profile, patch)
        tokens = whole.run()
    middle = ROUTES.snapshot()
    with monkeypatch.context() as patch:
        patch.setattr(PagedAttention, "decode_step", no_step)
        parts = Recorder(runner, profile, patch)
        assert parts.run() == tokens
    after = ROUTES.snapshot()
    # Seeded samples must not depend on what else was in a step.
    for ours, theirs in zip(whole.hidden, parts.hidden, strict=True):
        assert torch.equal(ours, theirs)
    # Both are counted alike.
    for route, count in after.items():
        old = middle.get(route, 0)
        assert count - old == old - before.get(route, 0), route


def test_switched_off_kernels_are_not_called(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        native = Recorder(runner, "bf16", patch)
        tokens = native.run()
    before = ROUTES.snapshot()
    with monkeypatch.context() as patch, torch_only():
        reference = Recorder(runner, "bf16", patch)
        assert reference.run() == tokens
    new = {route for route, count in ROUTES.snapshot().items() if count > before.get(route, 0)}
    assert {route.route for route in new if route.operation in ("decode", "append")} == {"torch"}
    for ours, theirs in zip(native.hidden, reference.hidden, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)


def test_bad_shapes_are_refused(runner: ModelRunner) -> None:
    decoder = runner.model.model
    assert isinstance(decoder, FusedDecoder)
    stack = decoder.stack
    kit = EngineKit(make_args(quantization="int8", max_total_tokens=2048), runner)
    seen = []

    def keep(step, x, positions):  # type: ignore[no-untyped-def]
        seen.append((step, x, positions))
        return type(stack).run(stack, step, x, positions)

    stack.run = keep  # type: ignore[method-assign]
    try:
        kit.generate([[3, 4, 5]], max_new_tokens=3, ignore_eos=True)
    finally:
        del stack.run
    step, x, positions = seen[0]
    with pytest.raises(ValueError, match="expected"):
        stack.run(step, x[:, 1:], positions)
    with pytest.raises(ValueError, match="expected"):
        stack.run(step, x.double(), positions)
    with pytest.raises(ValueError, match="expected"):
        stack.run(step, x, positions[1:])
    with pytest.raises(ValueError, match="expected"):
        stack.run(step._replace(slots=step.slots.int()), x, positions)
    geometry = replace(step.plan.geometry, num_layers=LAYERS + 1)
    with pytest.raises(ValueError, match="layers for pages"):
        stack.run(step._replace(plan=step.plan._replace(geometry=geometry)), x, positions)
