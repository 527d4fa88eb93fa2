"""The window of a finished request: compressed in idle time and before eviction, never sooner."""

from __future__ import annotations

import random

import pytest
from engine_kit import EngineKit, make_args

from minima_radix import check
from sglang_minima.cache import controller
from sglang_minima.cache.prefix_cache import PrefixCache
from sglang_minima.runner.model_runner import ModelRunner

PAGE = 16


def kit_of(runner: ModelRunner, **settings: object) -> EngineKit:
    chosen = {"max_total_tokens": 4096, "recent_window": 64, "anchor_tokens": 16, **settings}
    return EngineKit(make_args(page_size=PAGE, **chosen), runner)


def ids(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 512) for _ in range(count)]


def kinds_of(cache: PrefixCache, tokens: list[int]) -> list[str]:
    assert cache.tree is not None
    namespace = next(node.namespace for node in cache.tree.walk())
    return [cache.pool.kind_of(page) for page in cache.tree.match(namespace, tokens).pages]


def test_idle_time_compresses_it_after_a_while(
    tiny_runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit = kit_of(tiny_runner)
    prompt = ids(1, 200)
    kit.submit(prompt, max_new_tokens=1)
    kit.drain()
    kit.settle()
    assert kinds_of(kit.cache, prompt) == ["fp8"] + ["tq3"] * 7 + ["fp8"] * 4
    assert kit.cache.controller.backlog == 4 and not kit.cache.controller.due
    assert not kit.scheduler.step()  # a next turn may still come
    monkeypatch.setattr(controller, "_QUIET", 0.0)
    assert kit.cache.controller.due and kit.scheduler.step()
    assert kinds_of(kit.cache, prompt) == ["fp8"] + ["tq3"] * 11
    assert kit.cache.controller.backlog == 0 and not kit.scheduler.step()
    kit.check_idle()


def test_the_window_of_a_running_request_stays(
    tiny_runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever finished with the same pages, and whoever left them behind."""
    monkeypatch.setattr(controller, "_QUIET", 0.0)
    kit = kit_of(tiny_runner)
    prompt = ids(2, 160)
    kit.submit(prompt, max_new_tokens=1)
    kit.drain()
    kit.submit([*prompt, 5], max_new_tokens=40, ignore_eos=True)
    # This one leaves the first pages of the other's window behind.
    long = kit.submit(prompt + ids(3, 200), max_new_tokens=2, ignore_eos=True)
    for _ in range(6):
        kit.step()
    assert kit.last(long).finish is not None and kit.scheduler.running == 1
    kit.cache.controller.compress_left(64)
    kit.settle()
    assert kinds_of(kit.cache, prompt) == ["fp8"] + ["tq3"] * 5 + ["fp8"] * 4
    kit.drain()
    while kit.scheduler.step():
        check(kit.cache.lifecycle)
    assert kinds_of(kit.cache, prompt) == ["fp8"] + ["tq3"] * 9
    kit.check_idle()


def test_it_is_compressed_before_anything_is_evicted(tiny_runner: ModelRunner) -> None:
    """Finished requests whose windows fill the arena: all of them stay cached."""
    kit = kit_of(tiny_runner, max_total_tokens=2048, recent_window=128, anchor_tokens=0)
    prompts = [ids(10 + i, 129) for i in range(20)]
    for prompt in prompts:
        kit.submit(prompt, max_new_tokens=1)
        kit.drain()
    # 20 x 8 pages; as FP8 only 128 of them fit.
    assert kit.cache.lifecycle.counters.evicted_pages == 0
    assert kit.cache.tree is not None and kit.cache.tree.total_pages == 160
    kit.check_idle()


def test_pages_that_have_gone_are_left_alone(
    tiny_runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evicted windows, and addresses that are another request's by now."""
    kit = kit_of(tiny_runner)
    kit.submit(ids(4, 200), max_new_tokens=1)
    kit.drain()
    kit.cache.flush()
    prompt = ids(5, 100)
    kit.submit(prompt, max_new_tokens=60, ignore_eos=True)
    kit.step()
    before = kinds_of(kit.cache, prompt)
    kit.cache.controller.compress_left(64)
    assert kinds_of(kit.cache, prompt) == before
    check(kit.cache.lifecycle)
    kit.drain()
    kit.check_idle()
    monkeypatch.setattr(controller, "_QUIET", 0.0)
    while kit.scheduler.step():
        pass
    assert kinds_of(kit.cache, prompt) == ["fp8"] + ["tq3"] * 5


def test_the_deterministic_mode_leaves_formats_to_positions(tiny_runner: ModelRunner) -> None:
    kit = kit_of(tiny_runner, deterministic_cache=True)
    prompt = ids(6, 100)
    kit.submit(prompt, max_new_tokens=1)
    kit.drain()
    assert kit.cache.controller.backlog == 0
    assert kinds_of(kit.cache, prompt) == ["fp8"] + ["tq3"] * 5
