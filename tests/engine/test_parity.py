"""Profile bf16 in float32 compute is exact: token for token what transformers generates."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_kit import EngineKit, make_args

from sglang_minima.runner.model_runner import ModelRunner
from sglang_minima.tokenization.tokenizer import Tokenizer

NEW_TOKENS = 8
ALONE = 4
"""New tokens of prompts that run alone, which take longest."""

TOPICS = [
    "the capital of France", "how rain forms", "a cat that learned to sail", "prime numbers",
    "the history of bread", "why the sky is blue", "sorting a list in Python", "a haiku on autumn",
    "the rules of chess", "how vaccines work", "the moon landing", "growing tomatoes",
    "a letter to a friend", "photosynthesis", "the Roman road network", "making good coffee",
    "what a compiler does", "a dragon who was afraid", "the tides", "learning to play the violin",
]  # fmt: skip


@pytest.fixture(scope="module")
def prompts(tokenizer: Tokenizer) -> list[list[int]]:
    """20 prompts of 20 to 1,500 tokens."""
    filler = (
        "The committee met on a grey morning and went through the list of open questions, one by "
        "one, until the clerk had written everything down. "
    )
    result = []
    for index, topic in enumerate(TOPICS):
        text = f"Tell me about {topic}."
        ids = tokenizer.encode(f"Note {index}. " + filler * 60)
        length = 20 + round((1500 - 20) * (index / 19) ** 10)
        question = tokenizer.encode(text)
        result.append((ids[: max(length - len(question), 0)] + question)[-length:])
    assert min(map(len, result)) <= 20
    assert max(map(len, result)) == 1500
    return result


@pytest.fixture(scope="module")
def expected(embedded_dir: Path, prompts: list[list[int]]) -> list[list[int]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(embedded_dir, dtype=torch.float32)
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        generated = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=NEW_TOKENS,
            max_new_tokens=NEW_TOKENS,
            eos_token_id=None,
            pad_token_id=0,
        )
        outputs.append(generated[0, len(prompt) :].tolist())
    return outputs


def test_alone_cold_and_warm(
    embedded_runner: ModelRunner, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    kit = EngineKit(
        make_args(kv_profile="bf16", max_total_tokens=16384, chunked_prefill_size=-1),
        embedded_runner,
    )
    for prompt, tokens in zip(prompts, expected, strict=True):
        for warm in (False, True):
            rid = kit.submit(prompt, max_new_tokens=ALONE, ignore_eos=True)
            kit.drain()
            assert kit.tokens(rid) == tokens[:ALONE], f"{len(prompt)} tokens, warm={warm}"
            if warm:
                assert kit.last(rid).cached_tokens >= (len(prompt) - 1) // 64 * 64
    kit.check_idle()


def test_batches_of_8_in_chunks_cold_and_warm(
    embedded_runner: ModelRunner, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    kit = EngineKit(
        make_args(kv_profile="bf16", max_total_tokens=16384, chunked_prefill_size=200),
        embedded_runner,
    )
    for _ in range(2):
        for first in range(0, len(prompts), 8):
            got = kit.generate(
                prompts[first : first + 8], max_new_tokens=NEW_TOKENS, ignore_eos=True
            )
            assert got == expected[first : first + 8]
    kit.check_idle()
