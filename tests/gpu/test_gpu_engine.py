"""The engine on a GPU: exact control profile, compressed pages, determinism."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_kit import EngineKit, make_args

from sglang_minima.cache.accounting import report
from sglang_minima.runner.model_runner import ModelRunner

PROMPTS = [[1000 + (7 * i + j * j) % 20000 for j in range(length)] for i, length in
           enumerate((20, 64, 65, 200, 700))]  # fmt: skip


@pytest.fixture(scope="module")
def runner(model_dir: Path) -> ModelRunner:
    return ModelRunner(make_args(device="cuda"), str(model_dir))


def test_greedy_tokens_equal_transformers(runner: ModelRunner, model_dir: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).cuda()
    kit = EngineKit(make_args(device="cuda", kv_profile="bf16", max_total_tokens=16384), runner)
    for prompt in PROMPTS:
        ids = torch.tensor([prompt], device="cuda")
        generated = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=24,
            max_new_tokens=24,
            eos_token_id=None,
            pad_token_id=0,
        )
        expected = generated[0, len(prompt) :].tolist()
        for _ in range(2):
            rid = kit.submit(prompt, max_new_tokens=24, ignore_eos=True)
            kit.drain()
            assert kit.tokens(rid) == expected
    kit.check_idle()


def test_minima_profile_serves_from_compressed_pages(runner: ModelRunner) -> None:
    kit = EngineKit(make_args(device="cuda", max_total_tokens=16384), runner)
    first = kit.generate(PROMPTS, max_new_tokens=16, ignore_eos=True)
    kit.settle()
    rids = [kit.submit(prompt, max_new_tokens=16, ignore_eos=True) for prompt in PROMPTS]
    kit.drain()
    assert kit.last(rids[-1]).cached_by_tier["tq3"] >= 5 * 64
    assert len(first) == len(PROMPTS)
    assert report(kit.cache)["tiers"]["stale"]["pages"] >= 5
    kit.check_idle()


def test_cold_equals_warm_in_deterministic_mode(runner: ModelRunner) -> None:
    kit = EngineKit(
        make_args(device="cuda", max_total_tokens=16384, deterministic_cache=True), runner
    )
    for prompt in PROMPTS:
        cold = kit.generate([prompt], max_new_tokens=16, ignore_eos=True)
        assert kit.generate([prompt], max_new_tokens=16, ignore_eos=True) == cold
    kit.check_idle()
