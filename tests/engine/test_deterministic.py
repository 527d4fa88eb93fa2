"""--deterministic-cache: greedy output is the same tokens with a cold and with a warm cache."""

from __future__ import annotations

import random

from engine_kit import deterministic_kit

from sglang_minima.runner.model_runner import ModelRunner

PAGE = 16


def test_fifty_prompts_cold_and_warm(embedded_runner: ModelRunner) -> None:
    rng = random.Random(3)
    prompts = [
        [rng.randrange(100, 40000) for _ in range(rng.randrange(PAGE + 2, 52))] for _ in range(50)
    ]
    warm = deterministic_kit(embedded_runner, max_total_tokens=32768)
    cold_tokens = []
    for prompt in prompts:
        rid = warm.submit(prompt, max_new_tokens=4, ignore_eos=True)
        warm.drain()
        assert warm.last(rid).cached_tokens == 0
        cold_tokens.append(warm.tokens(rid))
    # Warm, and eight at a time: neither the hit nor the batch may show.
    for first in range(0, 50, 8):
        group = prompts[first : first + 8]
        rids = [warm.submit(prompt, max_new_tokens=4, ignore_eos=True) for prompt in group]
        warm.drain()
        for rid, prompt, tokens in zip(rids, group, cold_tokens[first : first + 8], strict=True):
            assert warm.last(rid).cached_tokens >= (len(prompt) - 1) // PAGE * PAGE > 0
            assert warm.tokens(rid) == tokens
    stale = warm.cache.pool.stats().kinds["tq3"].pages_used
    assert stale > 40, "the warm runs must have read compressed pages"
    warm.check_idle()


def test_pages_filled_by_decoding_are_those_that_prefill_makes(
    tiny_runner: ModelRunner,
) -> None:
    """Turn two of a conversation, over pages that turn one's decode steps filled."""
    rng = random.Random(4)
    for _ in range(8):
        prompt = [rng.randrange(3, 512) for _ in range(rng.randrange(5, 60))]
        warm = deterministic_kit(tiny_runner)
        answer = warm.generate([prompt], max_new_tokens=50, ignore_eos=True)[0]
        second = prompt + answer + [rng.randrange(3, 512) for _ in range(10)]
        rid = warm.submit(second, max_new_tokens=20, ignore_eos=True)
        warm.drain()
        assert warm.last(rid).cached_tokens >= (len(prompt) + 48) // PAGE * PAGE
        cold = deterministic_kit(tiny_runner)
        assert cold.generate([second], max_new_tokens=20, ignore_eos=True)[0] == warm.tokens(rid)


def test_preemption_does_not_show(tiny_runner: ModelRunner) -> None:
    rng = random.Random(6)
    prompts = [[rng.randrange(3, 512) for _ in range(rng.randrange(20, 100))] for _ in range(24)]
    roomy = deterministic_kit(tiny_runner)
    expected = [
        roomy.generate([prompt], max_new_tokens=40, ignore_eos=True)[0] for prompt in prompts
    ]
    tight = deterministic_kit(tiny_runner, max_total_tokens=768)
    assert tight.generate(prompts, max_new_tokens=40, ignore_eos=True) == expected
    assert tight.scheduler.statistics.preemptions > 0
    tight.check_idle()
