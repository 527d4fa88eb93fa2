"""Decode steps on a GPU that are launched before the tokens of the step before them are known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_kit import EngineKit, make_args

from sglang_minima.cache.prefix_cache import PrefixCache
from sglang_minima.runner.model_runner import ModelRunner
from sglang_minima.scheduler.overlap import Flight, Overlap

PROMPTS = [[1000 + (7 * i + j * j) % 20000 for j in range(length)] for i, length in
           enumerate((60, 127, 200, 700))]  # fmt: skip
SAMPLING: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "sampling_seed": 1},
    {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "sampling_seed": 2},
    {},
]


def args_of(**settings: Any) -> Any:
    return make_args(device="cuda", dtype="bfloat16", max_total_tokens=1 << 14, **settings)


@pytest.fixture(scope="module")
def runner(model_dir: Path) -> ModelRunner:
    return ModelRunner(args_of(), str(model_dir))


def kit_of(runner: ModelRunner, graphs: bool, **settings: Any) -> EngineKit:
    kit = EngineKit(args_of(**settings), runner)
    if graphs:
        runner.capture_graphs(4)
    return kit


def tokens_of(kit: EngineKit) -> list[list[int]]:
    """Two rounds, the second from compressed pages; nobody ends in the same step as another."""
    found = []
    for _ in range(2):
        rids = [
            kit.submit(prompt, max_new_tokens=30 + 17 * i, ignore_eos=True, **how)
            for i, (prompt, how) in enumerate(zip(PROMPTS, SAMPLING, strict=True))
        ]
        kit.drain()
        found += [kit.tokens(rid) for rid in rids]
        kit.settle()
    kit.check_idle()
    return found


@pytest.mark.parametrize("graphs", [True, False])
def test_tokens_are_those_of_steps_one_by_one(runner: ModelRunner, graphs: bool) -> None:
    plain = kit_of(runner, graphs, disable_overlap_schedule=True)
    assert not plain.scheduler._overlap.enabled
    expected = tokens_of(plain)
    kit = kit_of(runner, graphs)
    assert kit.scheduler._overlap.enabled
    assert tokens_of(kit) == expected
    measured = [one.scheduler.statistics.idle for one in (plain, kit)]
    for name, idle in zip(("one by one", "overlapped"), measured, strict=True):
        assert idle.steps > 100
        busy, waiting = idle.busy_seconds / idle.steps, idle.idle_seconds / idle.steps
        print(f"{name}, graphs {graphs}: {1e3 * busy:.3f} ms busy, {1e3 * waiting:.3f} ms idle")
        assert 0 < busy < 1
        assert waiting >= 0


@pytest.mark.parametrize("graphs", [True, False])
def test_nothing_waits_before_the_tokens_are_wanted(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, graphs: bool
) -> None:
    """Neither the launch behind a step in flight nor a conversion synchronises with the GPU.

    Without graphs a step is laid out as one of more rows than any graph has.
    """
    kit = kit_of(runner, graphs)
    launches = 0
    follow, convert = Overlap.follow, PrefixCache.convert

    def strict_follow(self: Overlap, *args: Any) -> Flight | None:
        nonlocal launches
        torch.cuda.set_sync_debug_mode("error")
        try:
            flight = follow(self, *args)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        launches += flight is not None
        return flight

    def strict_convert(self: PrefixCache, *args: Any) -> None:
        torch.cuda.set_sync_debug_mode("error")
        try:
            convert(self, *args)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(Overlap, "follow", strict_follow)
    monkeypatch.setattr(PrefixCache, "convert", strict_convert)
    tokens_of(kit)
    assert launches > 100
    assert kit.cache.lifecycle.counters.retiered_pages["fp8", "tq3"] > 3


def test_abort_in_flight(runner: ModelRunner) -> None:
    kit = kit_of(runner, True)
    rids = [kit.submit(prompt, max_new_tokens=60, ignore_eos=True) for prompt in PROMPTS]
    for _ in range(12):
        kit.step()
    assert kit.scheduler._flight is not None
    kit.scheduler.abort(rids[2])
    kit.drain(verify=True)
    kit.check_idle()
    finishes = [kit.last(rid).finish for rid in rids]
    assert [finish.type for finish in finishes if finish] == ["length", "length", "abort", "length"]
