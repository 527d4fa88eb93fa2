"""Who is admitted next, who gives way, and what room an admission takes."""

from __future__ import annotations

import random

from engine_kit import EngineKit, make_args

from minima_radix import Namespace
from sglang_minima.cache.accounting import report
from sglang_minima.messages import GenerateRequest
from sglang_minima.runner.model_runner import ModelRunner
from sglang_minima.sampling_params import SamplingParams
from sglang_minima.scheduler import policy
from sglang_minima.scheduler.policy import (
    next_victim,
    note_overtaking,
    order_waiting,
    prefill_budget,
)
from sglang_minima.scheduler.request import Request
from sglang_minima.scheduler.stopping import StopMatcher

PAGE = 16


def request_of(name: str, arrival: float, priority: int = 0) -> Request:
    sampling = SamplingParams()
    message = GenerateRequest(name, [1, 2, 3], sampling, priority=priority)
    stop = StopMatcher(sampling, frozenset(), None)
    return Request(message, 1, Namespace(None, None, "p"), stop, 0, arrival=arrival)


def test_the_lowest_priority_gives_way_then_the_last_admitted() -> None:
    running = [request_of(*facts) for facts in (("a", 0, 1), ("b", 0), ("c", 0), ("d", 0, 2))]
    assert next_victim(running).rid == "c"
    assert next_victim(running[:2]).rid == "b"
    assert next_victim([running[3], running[0]]).rid == "a"
    assert next_victim([request_of(name, 0.0) for name in "xyz"]).rid == "z"


def test_better_matches_pass_a_request_only_so_often() -> None:
    cached = {"old": 0, "other": 0}
    waiting = [request_of("old", 0.0), request_of("other", 0.5)]
    admitted: list[str] = []
    for number in range(3 * policy._PATIENCE):
        fresh = request_of(f"hit{number}", 1.0 + number)
        cached[fresh.rid] = 100
        waiting.append(fresh)
        chosen = order_waiting(waiting, "lpm", lambda request: cached[request.rid])[0]
        waiting.remove(chosen)
        note_overtaking(chosen, waiting)
        admitted.append(chosen.rid)
    assert admitted.index("old") == policy._PATIENCE
    assert admitted.index("other") <= policy._PATIENCE + 1
    # An important request overtakes without end: that is what its priority means.
    low, high = request_of("low", 0.0), request_of("high", 1.0, priority=1)
    note_overtaking(high, [low])
    assert low.overtaken == 0


def kit_of(runner: ModelRunner, **settings: object) -> EngineKit:
    return EngineKit(
        make_args(**{"page_size": PAGE, "kv_profile": "bf16", "max_total_tokens": 640, **settings}),
        runner,
    )


def test_preemption_spares_the_higher_priority(tiny_runner: ModelRunner) -> None:
    """The important one was admitted last, and is not the one that goes."""
    rng = random.Random(3)
    kit = kit_of(tiny_runner)
    prompts = [[rng.randrange(3, 512) for _ in range(200)] for _ in range(2)]
    low = kit.submit(prompts[0], max_new_tokens=180, ignore_eos=True)
    kit.step()
    high = kit.submit(prompts[1], max_new_tokens=180, ignore_eos=True, message={"priority": 3})
    kit.drain()
    assert kit.last(low).preemptions > 0 and kit.last(high).preemptions == 0
    assert len(kit.tokens(low)) == len(kit.tokens(high)) == 180
    kit.check_idle()


def test_an_admission_pays_for_the_cached_pages_it_locks(tiny_runner: ModelRunner) -> None:
    """The pages of its prefix count as obtainable only until it uses them itself."""
    rng = random.Random(4)
    kit = kit_of(tiny_runner)
    shared = [rng.randrange(3, 512) for _ in range(400)]
    kit.submit(shared, max_new_tokens=1)
    kit.drain()
    assert kit.cache.obtainable_tokens() == 640
    kit.submit([rng.randrange(3, 512) for _ in range(150)], max_new_tokens=100, ignore_eos=True)
    kit.step()
    # 400 of its 480 tokens are cached and 480 tokens of room obtainable, but 400 of those are the
    # very pages that it needs.
    late = kit.submit(shared + [5] * 80, max_new_tokens=60, ignore_eos=True)
    kit.step()
    assert kit.scheduler.running == 1 and kit.scheduler.waiting == 1
    kit.drain()
    assert kit.last(late).preemptions == 0 and kit.scheduler.statistics.preemptions == 0
    kit.check_idle()


def test_anchors_are_counted_not_searched(tiny_runner: ModelRunner) -> None:
    rng = random.Random(5)
    kit = kit_of(tiny_runner, kv_profile="minima", anchor_tokens=32, max_total_tokens=4096)
    first = [rng.randrange(3, 512) for _ in range(100)]
    for prompt in (first, first[:20] + [7] * 60, [9] * 17):
        kit.submit(prompt, max_new_tokens=1)
    kit.drain()
    # Two pages of the first; the second page of the second; one of the third.
    assert report(kit.cache)["tiers"]["anchor"]["pages"] == 4
    kit.check_idle()  # recounts them
    kit.cache.flush()
    assert report(kit.cache)["tiers"]["anchor"]["pages"] == 0


def test_prefill_budget() -> None:
    assert prefill_budget(None, "cpu") == 512
    assert prefill_budget(None, "cuda") == 8192
    assert prefill_budget(96, "cuda") == prefill_budget(96, "cpu") == 96
    assert prefill_budget(-1, "cuda") > 1 << 40
