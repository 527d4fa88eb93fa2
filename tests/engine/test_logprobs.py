"""Log-probabilities against transformers' own, and of the prefill path against the decode path."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_kit import EngineKit, make_args
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_minima.messages import LogProbs
from sglang_minima.runner.model_runner import ModelRunner
from sglang_minima.tokenization.tokenizer import Tokenizer

PAGE = 16
PROMPT = [random.Random(5).randrange(3, 512) for _ in range(150)]
CHOSEN = [7, 99]


def kit_of(runner: ModelRunner, **options: Any) -> EngineKit:
    return EngineKit(
        make_args(**{"page_size": PAGE, "kv_profile": "bf16", "max_total_tokens": 4096, **options}),
        runner,
    )


def gather(kit: EngineKit, rid: str, which: str) -> LogProbs:
    """All log-probabilities of a request, in order."""
    whole = LogProbs([], [], [])
    for output in kit.outputs[rid]:
        part = getattr(output, which)
        if part is not None:
            whole.tokens += part.tokens
            whole.top += part.top or []
            whole.chosen += part.chosen or []
    return whole


@pytest.fixture(scope="module")
def reference(tiny_dir: Path) -> torch.Tensor:
    """float32 [150, 512]: row i is the distribution of token i + 1."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_dir, dtype=torch.float32)
    with torch.inference_mode():
        return torch.log_softmax(model(torch.tensor([PROMPT])).logits[0], dim=-1)


@pytest.fixture(scope="module")
def kits(tiny_runner: ModelRunner) -> dict[int, EngineKit]:
    """By chunk size. Their caches fill up as the tests go on: cold and warm requests mix."""
    return {size: kit_of(tiny_runner, chunked_prefill_size=size) for size in (7, 64, -1)}


@settings(max_examples=40)
@given(
    chunk=st.sampled_from([7, 64, -1]),
    length=st.integers(1, len(PROMPT)),
    data=st.data(),
    top=st.sampled_from([0, 3]),
    new_tokens=st.sampled_from([0, 1]),
    flush=st.booleans(),
)
def test_prompt_logprobs_equal_the_reference(
    reference: torch.Tensor,
    kits: dict[int, EngineKit],
    chunk: int,
    length: int,
    data: st.DataObject,
    top: int,
    new_tokens: int,
    flush: bool,
) -> None:
    """Whatever the chunks, the start and the cache: one entry a token, each the model's own."""
    start = data.draw(st.integers(0, length))
    kit, prompt = kits[chunk], PROMPT[:length]
    if flush:
        kit.cache.flush()
    message = {
        "return_logprob": True,
        "logprob_start_len": start,
        "top_logprobs_num": top,
        "token_ids_logprob": CHOSEN,
    }
    # Another request of the same prompt shares the steps, and asks for less.
    kit.submit(prompt, message={"return_logprob": True}, max_new_tokens=2)
    rid = kit.submit(prompt, message=message, max_new_tokens=new_tokens)
    kit.drain(verify=True)
    found = gather(kit, rid, "input_logprobs")
    assert [token for _, token in found.tokens] == prompt[start:]
    assert len(found.chosen or []) == length - start
    assert len(found.top or []) == (length - start if top else 0)
    for offset, (value, token) in enumerate(found.tokens):
        position = start + offset
        row = found.chosen[offset] if found.chosen else None
        if position == 0:
            assert value is None and row is None
            continue
        expected = reference[position - 1]
        assert value == pytest.approx(expected[token].item(), abs=1e-4)
        assert row is not None and [token for _, token in row] == CHOSEN
        assert [value for value, _ in row] == pytest.approx(expected[CHOSEN].tolist(), abs=1e-4)
        if top:
            best = found.top[offset] if found.top else None
            assert best is not None
            values, ids = expected.topk(top)
            assert [token for _, token in best] == ids.tolist()
            assert [value for value, _ in best] == pytest.approx(values.tolist(), abs=1e-4)
    made = gather(kit, rid, "output_logprobs")
    assert len(made.tokens) == new_tokens
    for value, token in made.tokens:
        assert value == pytest.approx(reference[length - 1][token].item(), abs=1e-4)


def test_the_match_is_capped_so_that_the_logits_exist(tiny_runner: ModelRunner) -> None:
    kit = kit_of(tiny_runner)
    kit.generate([PROMPT], max_new_tokens=1)
    for start, least in ((len(PROMPT), 128), (100, 96), (64, 48), (17, 16), (0, 0)):
        message = {"return_logprob": True, "logprob_start_len": start}
        rid = kit.submit(PROMPT, message=message, max_new_tokens=1)
        kit.drain()
        cached = kit.last(rid).cached_tokens
        assert least <= cached <= max(0, min(start, len(PROMPT)) - 1)
        assert len(gather(kit, rid, "input_logprobs").tokens) == len(PROMPT) - start
    kit.check_idle()


def paths(kit: EngineKit, prompt: list[int], count: int) -> list[tuple[float, float]]:
    """(decode path, prefill path) of each token that greedy decoding gives."""
    rid = kit.submit(prompt, message={"return_logprob": True}, max_new_tokens=count)
    kit.drain()
    decoded = gather(kit, rid, "output_logprobs").tokens
    ids = [token for _, token in decoded]
    assert ids == kit.tokens(rid)
    message = {"return_logprob": True, "logprob_start_len": len(prompt)}
    again = kit.submit([*prompt, *ids], message=message, max_new_tokens=0)
    kit.drain()
    prefilled = gather(kit, again, "input_logprobs").tokens
    assert [token for _, token in prefilled] == ids
    pairs = zip(decoded, prefilled, strict=True)
    return [(one, two) for (one, _), (two, _) in pairs if one is not None and two is not None]


@pytest.mark.parametrize("chunk", [5, -1])
def test_prefill_and_decode_agree_on_a_tiny_model(tiny_runner: ModelRunner, chunk: int) -> None:
    kit = kit_of(tiny_runner, chunked_prefill_size=chunk)
    pairs = paths(kit, PROMPT[:70], 60)
    assert len(pairs) == 60
    assert max(abs(one - two) for one, two in pairs) < 1e-3


def test_prefill_and_decode_agree_on_the_embedded_model(
    embedded_runner: ModelRunner, tokenizer: Tokenizer
) -> None:
    kit = EngineKit(make_args(kv_profile="bf16", max_total_tokens=1024), embedded_runner)
    pairs = paths(kit, tokenizer.encode("The three largest cities of Italy are"), 40)
    assert len(pairs) == 40
    assert max(abs(one - two) for one, two in pairs) < 1e-3
