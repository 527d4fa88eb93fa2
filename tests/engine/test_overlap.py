"""Decode steps launched before the tokens of the step before them are known.

A CPU has finished a step when it is launched, so everything here runs as on a GPU but for the
waiting: tokens are taken one step late, and what had ended by then is dropped.
"""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from engine_kit import EngineKit, make_args
from hypothesis import given, settings
from hypothesis import strategies as st

from minima_radix import check
from sglang_minima.messages import ControlRequest, FinishReason
from sglang_minima.runner import idle
from sglang_minima.runner.batch import ForwardBatch
from sglang_minima.runner.drawn import DrawnTokens
from sglang_minima.runner.idle import IdleMeter
from sglang_minima.runner.model_runner import ForwardOutput, ModelRunner
from sglang_minima.runner.sampling import NO_TOKEN, SamplingRow, draw, sample
from sglang_minima.sampling_params import SamplingParams
from sglang_minima.scheduler import overlap
from sglang_minima.scheduler.launcher import Launcher
from sglang_minima.scheduler.overlap import Overlap
from sglang_minima.scheduler.process import SchedulerProcess
from sglang_minima.tokenization.tokenizer import Tokenizer

VOCAB, PAGE = 512, 16
SMALL = {"page_size": PAGE, "recent_window": 32, "anchor_tokens": 16, "max_total_tokens": 8192}


def kit_of(
    runner: ModelRunner, overlaps: bool, tokenizer: Tokenizer | None = None, **changed: Any
) -> EngineKit:
    kit = EngineKit(make_args(**{**SMALL, **changed}), runner, tokenizer)
    assert not kit.scheduler._overlap.enabled  # a CPU gains nothing by it
    kit.scheduler._overlap.enabled = overlaps
    return kit


def prompts_of(seed: int, count: int) -> list[list[int]]:
    """Prompts of many lengths; half of them share a prefix of some pages."""
    rng = random.Random(seed)
    prefix = [rng.randrange(3, VOCAB) for _ in range(3 * PAGE + 5)]
    return [
        (prefix if i % 2 else []) + [rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 60))]
        for i in range(count)
    ]


def sampled(i: int) -> dict[str, Any]:
    """Greedy, seeded, and seeded with every cut of the distribution."""
    return (
        {},
        {"temperature": 1.0, "sampling_seed": i},
        {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "sampling_seed": i},
    )[i % 3]


@dataclass
class Watch:
    """In which order batches are launched and tokens awaited."""

    events: list[str]

    @property
    def ahead(self) -> int:
        """Launches before the tokens of the step before were taken."""
        flying = most = count = 0
        for event in self.events:
            flying += {"start": 1, "wait": -1}.get(event, 0)
            count += event == "start" and flying == 2
            most = max(most, flying)
        assert most <= 2
        return count


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    """Watches steps in flight."""
    watched = Watch([])
    forward, wait = ModelRunner.forward, DrawnTokens.wait

    def watched_draw(*args: Any) -> torch.Tensor:
        watched.events.append("start")
        return draw(*args)

    def watched_forward(runner: ModelRunner, batch: ForwardBatch) -> ForwardOutput:
        watched.events.append("forward")
        return forward(runner, batch)

    def watched_wait(drawn: DrawnTokens) -> list[int]:
        watched.events.append("wait")
        return wait(drawn)

    monkeypatch.setattr(overlap, "draw", watched_draw)
    monkeypatch.setattr(ModelRunner, "forward", watched_forward)
    monkeypatch.setattr(DrawnTokens, "wait", watched_wait)
    return watched


def finished(kit: EngineKit, rids: list[str]) -> list[tuple[list[int], FinishReason | None]]:
    kit.drain(verify=True)
    kit.check_idle()
    assert not kit.cache.pool.open_leases()
    return [(kit.tokens(rid), kit.last(rid).finish) for rid in rids]


def test_the_next_step_is_launched_before_tokens_are_awaited(
    tiny_runner: ModelRunner, watch: Watch
) -> None:
    kit = kit_of(tiny_runner, True)
    kit.generate([[5, 6, 7]], max_new_tokens=5, ignore_eos=True)
    flights = ["forward", "start", *["forward", "start", "wait"] * 3, "wait"]
    assert watch.events == ["forward", *flights]
    assert not kit.scheduler.step()
    kit.check_idle()


@pytest.mark.parametrize("profile", ["minima", "bf16"])
def test_tokens_are_those_of_steps_one_by_one(
    tiny_runner: ModelRunner, watch: Watch, profile: str
) -> None:
    """Ends by length and stop ids; pages filled, shared and compressed on the way.

    A shared page in the window of a sequence that ends is compressed a step later than it would
    be otherwise, which may show: under that profile these share none.
    """
    prompts, results = prompts_of(1, 14)[:: 2 if profile == "minima" else 1], []
    for overlaps in (False, True):
        kit = kit_of(tiny_runner, overlaps, kv_profile=profile)
        for _ in range(2):
            rids = [
                kit.submit(
                    prompt,
                    max_new_tokens=20 + 90 * i % 170,
                    stop_token_ids=list(range(7 * i, 7 * i + 4)),
                    **sampled(i),
                )
                for i, prompt in enumerate(prompts)
            ]
            results.append(finished(kit, rids))
        if profile == "minima":
            assert sum(kit.cache.lifecycle.counters.retiered_pages.values()) > 12
    assert results[2:] == results[:2]
    assert {finish.type for _, finish in results[0] if finish} == {"length", "stop"}
    assert watch.ahead > 100


def test_sequences_end_at_any_token_in_flight(tiny_runner: ModelRunner) -> None:
    """Each token in turn serves as EOS."""
    prompt = prompts_of(2, 2)[1]
    plain = kit_of(tiny_runner, False, kv_profile="bf16")
    tokens = plain.generate([prompt], temperature=1.0, sampling_seed=3, max_new_tokens=36)[0]
    for length in range(1, len(tokens) + 1):
        if tokens[length - 1] in tokens[: length - 1]:
            continue
        kit = kit_of(tiny_runner, True, kv_profile="bf16")
        other = kit.submit(prompt[::-1], max_new_tokens=12)
        rid = kit.submit(
            prompt, temperature=1.0, sampling_seed=3, stop_token_ids=[tokens[length - 1]]
        )
        (_, long), (found, finish) = finished(kit, [other, rid])
        assert found == tokens[:length]
        assert finish == FinishReason("stop", tokens[length - 1])
        assert long is not None and long.type in ("length", "stop")


def test_stop_strings_end_sequences_in_flight(
    tiny_runner: ModelRunner, tokenizer: Tokenizer, watch: Watch
) -> None:
    results = []
    for overlaps in (False, True):
        kit = kit_of(tiny_runner, overlaps, tokenizer, kv_profile="bf16")
        rids = [
            kit.submit(prompt, max_new_tokens=100, stop=[stop], **sampled(i + 1))
            for i, (prompt, stop) in enumerate(zip(prompts_of(3, 4), "aeiu", strict=True))
        ]
        results.append(finished(kit, rids))
    assert results[0] == results[1]
    assert sum(finish.matched in "aeiu" for _, finish in results[0] if finish) >= 3
    assert watch.ahead


@pytest.mark.parametrize("after", [4, 5, 16, 17, 33])
def test_aborts_in_flight(tiny_runner: ModelRunner, after: int) -> None:
    """One is aborted while its next token is on its way; the others do not notice."""
    prompts = prompts_of(4, 4)
    expected = kit_of(tiny_runner, False).generate(prompts, max_new_tokens=40, ignore_eos=True)
    kit = kit_of(tiny_runner, True)
    rids = [kit.submit(prompt, max_new_tokens=40, ignore_eos=True) for prompt in prompts]
    for _ in range(after):
        kit.step()
    assert kit.scheduler._flight is not None
    kit.scheduler.abort(rids[1])
    check(kit.cache.lifecycle)
    results = finished(kit, rids)
    assert [tokens for tokens, _ in results[:1] + results[2:]] == expected[:1] + expected[2:]
    tokens, finish = results[1]
    assert finish is not None and finish.type == "abort"
    assert tokens == expected[1][: len(tokens)]


def test_abort_of_all_in_flight_leaves_nothing(tiny_runner: ModelRunner) -> None:
    kit = kit_of(tiny_runner, True)
    rids = [kit.submit(prompt, max_new_tokens=40) for prompt in prompts_of(5, 3)]
    for _ in range(4):
        kit.step()
    for rid in rids:
        kit.scheduler.abort(rid)
    assert kit.scheduler.busy  # until the step in flight has come home
    kit.step()
    assert not kit.scheduler.busy
    kit.check_idle()


def test_the_cache_is_flushed_right_after_an_abort(tiny_runner: ModelRunner) -> None:
    """A step in flight of requests that are no more does not count as one that runs."""
    prompt = prompts_of(5, 2)[1]
    expected = kit_of(tiny_runner, False).generate([prompt], max_new_tokens=40)
    kit = kit_of(tiny_runner, True)
    process = SchedulerProcess.__new__(SchedulerProcess)
    process.scheduler, process.cache = kit.scheduler, kit.cache
    flush = ControlRequest("c", "flush_cache")
    rid = kit.submit(prompt, max_new_tokens=40)
    for _ in range(4):
        kit.step()
    refused = process._control(flush)
    assert refused is not None and not refused.ok
    kit.scheduler.abort(rid)
    assert kit.scheduler._flight is not None
    flushed = process._control(flush)
    assert flushed is not None and flushed.ok
    assert kit.cache.tree is not None and kit.cache.tree.total_pages == 0
    check(kit.cache.lifecycle)
    # The pages go to the next request while the step is still to come home.
    assert kit.generate([prompt], max_new_tokens=40) == expected
    kit.check_idle()


def test_preemption_in_a_pool_that_is_too_small(tiny_runner: ModelRunner, watch: Watch) -> None:
    """With uncompressed float32 pages nothing of it shows in the output."""
    prompts = prompts_of(6, 24)
    expected = kit_of(tiny_runner, False, kv_profile="bf16", max_total_tokens=65536).generate(
        prompts, max_new_tokens=70, ignore_eos=True
    )
    kit = kit_of(tiny_runner, True, kv_profile="bf16", max_total_tokens=1024)
    rids = [kit.submit(prompt, max_new_tokens=70, ignore_eos=True) for prompt in prompts]
    assert [tokens for tokens, _ in finished(kit, rids)] == expected
    assert kit.scheduler.statistics.preemptions > 0
    assert kit.cache.lifecycle.counters.evicted_pages > 0
    assert watch.ahead > 50


@pytest.mark.parametrize(
    ("message", "sampling"),
    [
        ({"return_logprob": True}, {}),
        ({}, {"repetition_penalty": 1.2}),
        ({}, {"logit_bias": {7: 2.0}}),
        ({}, {"min_new_tokens": 5}),
    ],
)
def test_steps_that_need_the_host_run_one_by_one(
    tiny_runner: ModelRunner, watch: Watch, message: dict[str, Any], sampling: dict[str, Any]
) -> None:
    """Such a request lands what is in flight; without it steps overlap again."""
    prompts, results = prompts_of(7, 2), []
    for overlaps in (False, True):
        kit = kit_of(tiny_runner, overlaps)
        first = kit.submit(prompts[0], max_new_tokens=40, ignore_eos=True)
        for _ in range(5):
            kit.step()
        assert (kit.scheduler._flight is not None) == overlaps
        second = kit.submit(
            prompts[1], message=message, max_new_tokens=9, ignore_eos=True, **sampling
        )
        while second not in kit.outputs or kit.last(second).finish is None:
            kit.step()
            assert kit.scheduler._flight is None or second not in kit.outputs
        watch.events.clear()
        results.append(finished(kit, [first, second]))
    assert results[0] == results[1]
    assert watch.ahead > 10


def test_a_row_without_a_token_fails_alone(
    tiny_runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step behind it is launched before anybody knows, and must not stumble over it."""
    prompts = prompts_of(8, 3)
    expected = kit_of(tiny_runner, False).generate(prompts, max_new_tokens=20, ignore_eos=True)
    kit = kit_of(tiny_runner, True)
    rids = [kit.submit(prompt, max_new_tokens=20, ignore_eos=True) for prompt in prompts]
    for _ in range(5):
        kit.step()

    def broken(*args: Any) -> torch.Tensor:
        tokens = draw(*args)
        tokens[1] = NO_TOKEN
        return tokens

    monkeypatch.setattr(overlap, "draw", broken)
    kit.step()
    monkeypatch.setattr(overlap, "draw", draw)
    results = finished(kit, rids)
    assert [results[0][0], results[2][0]] == [expected[0], expected[2]]
    finish = results[1][1]
    assert finish is not None and (finish.type, finish.status_code) == ("abort", 500)
    assert results[1][0] == expected[1][: len(results[1][0])]


@pytest.mark.parametrize(
    ("device", "changed", "enabled"),
    [
        ("cuda", {}, True),
        ("cpu", {}, False),
        ("cuda", {"disable_overlap_schedule": True}, False),
        ("cuda", {"deterministic_cache": True}, False),
    ],
)
def test_where_steps_overlap(
    tiny_runner: ModelRunner, device: str, changed: dict[str, Any], enabled: bool
) -> None:
    kit = kit_of(tiny_runner, False, **changed)
    launcher = Launcher(kit.cache, tiny_runner, kit.scheduler.statistics)
    launcher.device = torch.device(device)
    assert Overlap(kit.args, kit.cache, launcher, 100).enabled == enabled


def test_a_draw_does_not_depend_on_its_neighbours() -> None:
    """The rows of each kind get what they get alone, also where nothing is awaited."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(12, VOCAB, generator=generator)
    rows = [
        SamplingRow(
            SamplingParams(**{"temperature": 0.0, **sampled(i)}), i, array("i", [1, 2]), 1,
            frozenset(),
        )
        for i in range(12)
    ]  # fmt: skip
    together = draw(logits, rows, 3)
    for i, row in enumerate(rows):
        row.tokens.extend([0, 0, 0])
        assert sample(logits[i : i + 1], [row]) == [together[i]]


# --- any order of events -------------------------------------------------------------------------

_PROMPTS = prompts_of(9, 6)
_SUBMIT = st.tuples(
    st.just("submit"), st.integers(0, 5), st.integers(0, 2), st.sampled_from([1, 2, 17, 40])
)
_ACTIONS = st.lists(
    st.one_of(
        _SUBMIT,
        st.tuples(st.just("abort"), st.integers(0, 30)),
        st.tuples(st.just("step"), st.integers(1, 12)),
        st.tuples(st.just("lone"), st.integers(0, 5)),
    ),
    min_size=4,
    max_size=24,
)
_ALONE: dict[tuple[int, int, int], list[int]] = {}


def alone(runner: ModelRunner, prompt: int, how: int, length: int) -> list[int]:
    """What a request gets that runs alone, one step after the other."""
    key = prompt, how, length
    if key not in _ALONE:
        kit = kit_of(runner, False, kv_profile="bf16")
        _ALONE[key] = kit.generate(
            [_PROMPTS[prompt]], max_new_tokens=length, stop_token_ids=[11, 12], **sampled(how)
        )[0]
    return _ALONE[key]


@given(_ACTIONS, st.sampled_from([320, 640, 4096]))
@settings(max_examples=40, deadline=None)
def test_any_order_of_requests_aborts_and_steps(
    tiny_runner: ModelRunner, actions: list[tuple[Any, ...]], tokens: int
) -> None:
    kit = kit_of(
        tiny_runner, True, kv_profile="bf16", max_total_tokens=tokens, chunked_prefill_size=48
    )
    kinds: dict[str, tuple[int, int, int]] = {}
    aborted: set[str] = set()
    for action, *values in actions:
        if action == "submit":
            prompt, how, length = values
            rid = kit.submit(
                _PROMPTS[prompt], max_new_tokens=length, stop_token_ids=[11, 12], **sampled(how)
            )
            kinds[rid] = prompt, how, length
        elif action == "lone":
            kit.submit(_PROMPTS[values[0]], max_new_tokens=3, repetition_penalty=1.1)
        elif action == "abort":
            rid = f"r{values[0]}"
            if rid in kinds and not (rid in kit.outputs and kit.last(rid).finish):
                aborted.add(rid)
                kit.scheduler.abort(rid)
        else:
            for _ in range(values[0]):
                kit.step()
                check(kit.cache.lifecycle)
    kit.drain(verify=True)
    kit.check_idle()
    assert not kit.cache.pool.open_leases()
    for rid, kind in kinds.items():
        expected, found = alone(tiny_runner, *kind), kit.tokens(rid)
        assert found == (expected[: len(found)] if rid in aborted else expected)


# --- how idle the device is ----------------------------------------------------------------------


class FakeEvent:
    """An event at a time that the test sets."""

    now = 0.0

    def __init__(self) -> None:
        self.at = FakeEvent.now

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: FakeEvent) -> float:
        return (other.at - self.at) * 1000


def test_idle_time_is_between_decode_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle, "_record", FakeEvent)
    meter = IdleMeter(torch.device("cuda"))

    def step(begin: float, end: float, follows: bool, decodes: bool) -> None:
        FakeEvent.now = begin
        meter.begin(follows)
        FakeEvent.now = end
        meter.end(decodes)

    step(0, 1, False, False)  # a prompt
    step(2, 4, True, True)  # nothing before it to compare with
    step(5, 8, True, True)
    step(8.5, 9, True, True)
    step(20, 21, False, True)  # a request that came after a pause
    step(22, 24, True, True)
    assert (meter.idle_seconds, meter.busy_seconds) == (2.5, 5.5)


def test_nothing_is_measured_on_a_cpu() -> None:
    meter = IdleMeter(torch.device("cpu"))
    for _ in range(3):
        meter.begin(True)
        meter.end(True)
    assert meter.idle_seconds == meter.busy_seconds == 0
