"""Load that must not break the books: too small pools, aborts at any moment, trees of prompts."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from engine_kit import EngineKit, make_args

from minima_radix import check
from sglang_minima.runner.model_runner import ModelRunner

VOCAB = 512


def tree_prompts(count: int, rng: random.Random) -> list[list[int]]:
    """Prompts that are paths of a random tree: each extends a prefix of an earlier one."""
    prompts: list[list[int]] = [[rng.randrange(3, VOCAB) for _ in range(80)]]
    while len(prompts) < count:
        base = rng.choice(prompts[-40:])
        keep = rng.randrange(len(base) + 1)
        grown = base[:keep] + [rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 120))]
        prompts.append(grown[:400])
    return prompts


@pytest.mark.parametrize(
    ("page_size", "profile", "count", "longest"),
    [(16, "minima", 400, 200), (16, "bf16", 32, 400), (64, "minima", 32, 400)],
)
def test_pool_too_small_for_the_load(
    tiny_runner: ModelRunner, page_size: int, profile: str, count: int, longest: int
) -> None:
    rng = random.Random(page_size)
    prompts = tree_prompts(count, rng)
    if count == 400:
        assert sum(map(len, prompts)) > 20_000
    kit = EngineKit(
        make_args(
            page_size=page_size,
            kv_profile=profile,
            max_total_tokens=1024,
            recent_window=32,
            anchor_tokens=16,
            max_running_requests=48,
            chunked_prefill_size=256,
        ),
        tiny_runner,
    )
    # Every eighth answer is long: running requests outgrow what they were admitted with.
    lengths = [longest if i % 8 == 0 else rng.randrange(1, 16) for i in range(count)]
    rids = [
        kit.submit(prompt, max_new_tokens=length, ignore_eos=True)
        for prompt, length in zip(prompts, lengths, strict=True)
    ]
    kit.drain()
    for rid in rids:
        finish = kit.last(rid).finish
        assert finish is not None and finish.type == "length", finish
        assert len(kit.tokens(rid)) == finish.matched
    assert kit.scheduler.statistics.preemptions > 0
    kit.check_idle()


def test_preempted_sequences_get_the_same_tokens(tiny_runner: ModelRunner) -> None:
    """With uncompressed float32 pages a preemption must not show in the output."""
    rng = random.Random(5)
    prompts = tree_prompts(60, rng)
    roomy = EngineKit(
        make_args(
            page_size=16, kv_profile="bf16", disable_radix_cache=True, max_total_tokens=65536
        ),
        tiny_runner,
    )
    expected = roomy.generate(prompts, max_new_tokens=24, ignore_eos=True)
    tight = EngineKit(
        make_args(page_size=16, kv_profile="bf16", max_total_tokens=1024), tiny_runner
    )
    assert tight.generate(prompts, max_new_tokens=24, ignore_eos=True) == expected
    assert tight.scheduler.statistics.preemptions > 0
    tight.check_idle()
    roomy.check_idle()


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("deterministic", [False, True])
def test_aborts_at_any_moment_leak_nothing(
    tiny_runner: ModelRunner, page_size: int, deterministic: bool
) -> None:
    rng = random.Random(page_size + deterministic)
    # A deterministic run takes one step per page: keep it short where pages are small.
    count = {(16, False): 300, (1, True): 15, (16, True): 60}.get((page_size, deterministic), 100)
    kit = EngineKit(
        make_args(
            page_size=page_size,
            max_total_tokens=4096,
            recent_window=32,
            anchor_tokens=16,
            deterministic_cache=deterministic,
            chunked_prefill_size=128,
        ),
        tiny_runner,
    )
    prompts = [prompt[:60] for prompt in tree_prompts(count, rng)]
    alive: list[str] = []
    aborted = 0
    submitted = iter(prompts)
    left = count
    while left or kit.scheduler.busy:
        for _ in range(rng.randrange(4)):
            prompt = next(submitted, None)
            if prompt is not None:
                left -= 1
                salt = rng.choice([None, "tenant"])
                alive.append(
                    kit.submit(
                        prompt,
                        message={"salt": salt},
                        max_new_tokens=rng.randrange(10),
                        ignore_eos=True,
                    )
                )
        kit.step()
        if alive and rng.random() < 0.5:
            kit.scheduler.abort(alive.pop(rng.randrange(len(alive))))
            aborted += 1
        if rng.random() < 0.05:
            check(kit.cache.lifecycle)
    assert aborted > count // 8
    for outputs in kit.outputs.values():
        assert [output.finish is not None for output in outputs].count(True) == 1
    kit.check_idle()
    kit.cache.flush()
    stats = kit.cache.pool.stats()
    assert all(kind.pages_used == 0 for kind in stats.kinds.values())


def test_a_request_that_cannot_fit_is_ended_and_the_server_goes_on(tiny_dir: Path) -> None:
    from engine_kit import make_runner

    kit = EngineKit(make_args(page_size=16, max_total_tokens=128), make_runner(tiny_dir))
    too_long = kit.submit(list(range(3, 403)), max_new_tokens=4)
    fine = kit.submit(list(range(3, 23)), max_new_tokens=4, ignore_eos=True)
    kit.drain()
    finish = kit.last(too_long).finish
    assert finish is not None and finish.type == "abort" and finish.status_code == 507
    assert len(kit.tokens(fine)) == 4
    kit.check_idle()
