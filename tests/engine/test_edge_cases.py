"""Edges where parts meet: preemption, twins, tight pools and the deterministic mode."""

from __future__ import annotations

import gc
import random

import pytest
from engine_kit import EngineKit, deterministic_kit, make_args

from minima_radix import Namespace
from sglang_minima.messages import LogProbs
from sglang_minima.runner.model_runner import ModelRunner

PAGE = 16
LOGPROBS = {"return_logprob": True}


def random_ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(3, 512) for _ in range(count)]


def output_logprobs(kit: EngineKit, rid: str) -> list[tuple[float | None, int]]:
    parts = [output.output_logprobs for output in kit.outputs[rid]]
    return [token for part in parts if part is not None for token in part.tokens]


def input_logprobs(kit: EngineKit, rid: str) -> LogProbs:
    parts = [output.input_logprobs for output in kit.outputs[rid]]
    found: list[LogProbs] = [part for part in parts if part is not None]
    assert len(found) == 1
    return found[0]


# --- prompt log-probabilities ------------------------------------------------------------------


def test_prompt_logprobs_when_a_twin_got_ahead_during_a_preemption(
    tiny_runner: ModelRunner,
) -> None:
    """A prompt preempted half way finds pages cached whose log-probabilities it still needs."""

    def kit_of() -> EngineKit:
        return EngineKit(
            make_args(page_size=PAGE, kv_profile="bf16", max_total_tokens=4096),
            tiny_runner,
        )

    prompt = random_ids(random.Random(1), 1300)
    message = {**LOGPROBS, "logprob_start_len": 100, "top_logprobs_num": 2}
    alone = kit_of()
    expected_rid = alone.submit(prompt, message=message, max_new_tokens=1)
    alone.drain()
    expected = input_logprobs(alone, expected_rid)

    kit = kit_of()
    kit.submit(prompt, max_new_tokens=16, ignore_eos=True)
    rid = kit.submit(prompt, message=message, max_new_tokens=1)
    while kit.scheduler.running < 2:
        kit.step()
    kit.preempt_last()
    kit.drain(verify=True)
    assert kit.last(rid).preemptions == 1
    found = input_logprobs(kit, rid)
    assert [token for _, token in found.tokens] == prompt[100:]
    assert found.top is not None and len(found.top) == len(found.tokens)
    for (ours, _), (theirs, _) in zip(found.tokens, expected.tokens, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-3)
    kit.check_idle()


# --- deterministic mode ------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, PAGE - 1, PAGE, PAGE + 1, 4 * PAGE + 6])
def test_deterministic_log_probabilities_survive_a_preemption(
    tiny_runner: ModelRunner, length: int
) -> None:
    """Whatever the sequence had reached: the very same numbers, not only the same tokens."""
    prompt = random_ids(random.Random(length), length)

    def start() -> tuple[EngineKit, str]:
        kit = deterministic_kit(tiny_runner)
        return kit, kit.submit(prompt, message=LOGPROBS, max_new_tokens=20, ignore_eos=True)

    whole, rid = start()
    whole.drain()
    expected = output_logprobs(whole, rid)
    for outputs in range(1, 20):
        kit, rid = start()
        while len(kit.outputs.get(rid, [])) < outputs:
            kit.step()
        kit.preempt_last()
        kit.drain()
        assert kit.last(rid).preemptions == 1
        assert output_logprobs(kit, rid) == expected, f"preempted after {outputs} tokens"


def test_deterministic_log_probabilities_do_not_depend_on_the_tree(
    tiny_runner: ModelRunner,
) -> None:
    """Other prompts cut the prefix into other nodes; there may also be no tree at all."""
    rng = random.Random(2)
    prompt = random_ids(rng, 7 * PAGE + 5)
    results = []
    for neighbours, tree in (((), True), ((3, 5), True), ((1, 2, 6), True), ((), False)):
        kit = deterministic_kit(tiny_runner, disable_radix_cache=not tree)
        for pages in neighbours:
            kit.generate([prompt[: pages * PAGE] + random_ids(rng, PAGE)], max_new_tokens=1)
        rid = kit.submit(prompt, message=LOGPROBS, max_new_tokens=20, ignore_eos=True)
        kit.drain()
        results.append(output_logprobs(kit, rid))
    assert results[1:] == results[:1] * 3


def test_a_page_without_room_for_its_format_is_not_read_before_it_has_it(
    tiny_runner: ModelRunner,
) -> None:
    """Sealed, cached, and left in the Recent format for want of room: the next reader waits."""
    rng = random.Random(3)
    prompt = random_ids(rng, 5 * PAGE + 3)
    cold = deterministic_kit(tiny_runner)
    cold_rid = cold.submit(prompt, message=LOGPROBS, max_new_tokens=4, ignore_eos=True)
    cold.drain()

    kit = deterministic_kit(tiny_runner)
    kit.submit(random_ids(rng, 5), max_new_tokens=10, ignore_eos=True)
    rid = kit.submit(prompt, message=LOGPROBS, max_new_tokens=4, ignore_eos=True)
    kit.step()
    # Somebody takes all free slabs for Recent pages: Stale pages cannot be had any more.
    lifecycle, taken = kit.cache.lifecycle, 0
    one, rest = 1 << 40, 1 << 41
    for holder in (one, rest):
        lifecycle.admit(holder, Namespace(None, None, "minima"), [], 0)
    lifecycle.reserve(one, PAGE)
    while kit.cache.pool.available("tq3"):
        taken += PAGE
        lifecycle.reserve(rest, taken)
    lifecycle.release(one)
    kit.step()
    kit.step()
    lifecycle.release(rest)
    kit.drain()
    assert kit.last(rid).preemptions > 0
    assert output_logprobs(kit, rid) == output_logprobs(cold, cold_rid)
    kit.check_idle()


# --- memory ------------------------------------------------------------------------------------


def test_a_request_leaves_no_cycle_behind(tiny_runner: ModelRunner) -> None:
    """The scheduler process makes no full collections: what they would find would stay for ever."""
    kit = EngineKit(make_args(page_size=PAGE, max_total_tokens=512), tiny_runner)
    rng = random.Random(8)

    def some_requests() -> None:
        for _ in range(3):  # the cache is too small: eviction, preemption, compaction
            for _ in range(6):
                kit.submit(random_ids(rng, 120), max_new_tokens=120, ignore_eos=True)
            kit.submit(random_ids(rng, 20), max_new_tokens=9, message=LOGPROBS)
            kit.scheduler.abort(kit.submit(random_ids(rng, 20)))
            kit.drain()

    some_requests()
    gc.collect()
    gc.disable()
    try:
        gc.set_debug(gc.DEBUG_SAVEALL)
        some_requests()
        gc.collect()
        found = [thing for thing in gc.garbage if "sglang" in type(thing).__module__]
        found += [thing for thing in gc.garbage if "minima" in type(thing).__module__]
        number = len(gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert kit.scheduler.statistics.preemptions > 0
    assert not found and number < 20, number
