"""Settings that do not go with the model or the machine, and an arena that is as large as asked."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import get_args, get_type_hints

import psutil
import pytest
import torch
from engine_kit import EngineKit, make_args

from minima_kernels import ROUTES, transfer
from minima_kernels.cuda.build import variants
from minima_kernels.cuda.variants import Variant
from minima_radix import POLICIES
from sglang_minima.entrypoints.engine import Engine
from sglang_minima.runner import model_runner
from sglang_minima.runner.model_runner import ForwardOutput, ModelRunner
from sglang_minima.scheduler.process import check_settings
from sglang_minima.server_args import ServerArgs
from sglang_minima.settings import ArgumentError, flag_name


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stale_format": "tq99"}, "--stale-format: unknown page format"),
        ({"stale_fp8_layers": "5"}, "--stale-fp8-layers: the model has no layer 5"),
        ({"kv_cache_memory": 1 << 50}, r"--kv-cache-memory: a KV arena of 1048576.0 GiB does not"),
        ({"max_total_tokens": 1 << 50}, r"--max-total-tokens: a KV arena of .* GiB of memory that"),
    ],
)
def test_refused_before_the_weights_are_read(
    tiny_dir: Path, settings: dict[str, object], message: str
) -> None:
    with pytest.raises(ArgumentError, match=message):
        check_settings(make_args(**settings), tiny_dir)
    free = psutil.virtual_memory().available
    check_settings(make_args(kv_cache_memory=free // 2), tiny_dir)


def test_context_longer_than_the_models(tiny_dir: Path) -> None:
    with pytest.raises(ArgumentError, match=r"--context-length 8193: the model's own .* 8192"):
        ModelRunner(make_args(context_length=8193), str(tiny_dir))


@pytest.mark.parametrize("profile", ["minima", "bf16"])
@pytest.mark.parametrize("tokens", [256, 1000, 1024, 5000, 8192])
def test_as_many_tokens_fit_as_asked_for(
    tiny_runner: ModelRunner, profile: str, tokens: int
) -> None:
    kit = EngineKit(make_args(kv_profile=profile, max_total_tokens=tokens), tiny_runner)
    assert tokens <= kit.cache.capacity_tokens
    assert kit.cache.capacity_tokens <= max(1.25 * tokens, tokens + 4 * kit.cache.page_size)


def test_rows_that_a_gpus_kernel_does_not_append_are_counted_with_the_reason(
    tiny_runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = "broken TileLang 0.1.15"
    monkeypatch.setattr(ModelRunner, "kernels_reason", lambda runner, arena: reason)
    monkeypatch.setattr(transfer, "fallback_reason", lambda *_: "")  # what it is on a GPU
    kit = EngineKit(make_args(max_total_tokens=1024), tiny_runner)
    before = ROUTES.snapshot()
    kit.generate([[5, 6, 7]], max_new_tokens=2)
    used = {route for route, count in ROUTES.snapshot().items() if count > before.get(route, 0)}
    assert ("append", "torch", reason) in used
    assert ("append", "torch", "") not in used


def test_compiling_kernels_is_announced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A start that takes a while says why, one that does not says nothing."""
    monkeypatch.setenv("SGLANG_MINIMA_CACHE", str(tmp_path))
    monkeypatch.setattr(model_runner, "compile_all", lambda needed, jobs: [])
    needed = variants(["fp8"], [64], dtypes=[])
    with caplog.at_level(logging.INFO):
        ModelRunner._compile(needed)
        [line] = [record.getMessage() for record in caplog.records]
        assert line.startswith(f"Compiling {len(needed)} CUDA kernels") and str(tmp_path) in line
        caplog.clear()
        monkeypatch.setattr(Variant, "is_compiled", True)
        ModelRunner._compile(needed)
        assert not caplog.records


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_no_token_is_made_up(
    tiny_runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, value: float, temperature: float
) -> None:
    """The request whose logits are no numbers ends with an error; the others go on."""
    kit = EngineKit(make_args(max_total_tokens=4096), tiny_runner)
    logits_of = ForwardOutput.logits
    good = kit.submit([5, 6, 7], max_new_tokens=6)
    bad = kit.submit(
        [9, 10, 11],
        max_new_tokens=6,
        temperature=temperature,
        top_k=20,
        message={"return_logprob": True},
    )

    def spoilt(output: ForwardOutput, rows: list[int]) -> torch.Tensor:
        logits = logits_of(output, rows).clone()
        if len(rows) == 2:
            logits[1, 100] = value
        return logits

    monkeypatch.setattr(ForwardOutput, "logits", spoilt)
    kit.drain(verify=True)
    finish = kit.last(bad).finish
    assert finish is not None
    assert (finish.type, finish.status_code) == ("abort", 500)
    assert finish.message == "the model computed values that are no numbers"
    assert kit.tokens(bad) == []
    assert len(kit.tokens(good)) == 6
    kit.check_idle()


def test_settings_of_a_program_are_checked() -> None:
    """Each with a value that no type or list of choices allows: one sentence that names it."""
    for entry in dataclasses.fields(ServerArgs):
        with pytest.raises(ArgumentError, match=f"^{flag_name(entry.name)}: .* is not"):
            ServerArgs(**{entry.name: object()})
    for name, value in (("device", "gpu"), ("kv_profile", "x"), ("page_size", "64"), ("dtype", 8)):
        with pytest.raises(ArgumentError, match=flag_name(name)):
            ServerArgs(**{name: value})
    args = ServerArgs(kv_cache_memory="1g", mem_fraction_static=1, chunked_prefill_size="2k")
    assert (args.kv_cache_memory, args.chunked_prefill_size) == (1 << 30, 2048)
    with pytest.raises(ArgumentError, match="no setting 'kv_profil'; did you mean kv_profile"):
        Engine(kv_profil="fp8")


def test_the_server_offers_every_eviction_policy() -> None:
    offered = get_args(get_type_hints(ServerArgs)["radix_eviction_policy"])
    assert set(offered) == set(POLICIES)
