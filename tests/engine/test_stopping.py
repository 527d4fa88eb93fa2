"""When a sequence ends: stop ids, strings across tokens, patterns, lengths."""

from __future__ import annotations

from array import array

import pytest

from sglang_minima.messages import FinishReason
from sglang_minima.parsers.answer import AnswerFormat
from sglang_minima.sampling_params import SamplingParams
from sglang_minima.scheduler.stopping import StopMatcher
from sglang_minima.tokenization.tokenizer import Tokenizer


def run(tokenizer: Tokenizer, text: str, sampling: SamplingParams) -> tuple[str, FinishReason]:
    """Feeds the tokens of a text one by one; returns what was produced and why it ended."""
    prompt = tokenizer.encode("Say it:")
    tokens = array("i", prompt)
    matcher = StopMatcher(sampling, tokenizer.eos_token_ids, tokenizer)
    for token in tokenizer.encode(text):
        tokens.append(token)
        finish = matcher.check(tokens, len(prompt))
        if finish is not None:
            return tokenizer.decode(list(tokens[len(prompt) :])), finish
    raise AssertionError("nothing ended the sequence")


@pytest.mark.parametrize(
    ("settings", "kind", "matched"),
    [
        ({"stop": ["brown fox"]}, "stop", "brown fox"),
        ({"stop": ["zebra", "fox ju"]}, "stop", "fox ju"),
        ({"stop_regex": [r"j\w+s"]}, "stop", "jumps"),
        ({"stop_regex": [r"z*", r"o\w+"]}, "stop", "own"),
        ({"stop_regex": [r"q?"]}, "stop", "q"),
        ({"max_new_tokens": 3}, "length", 3),
        # What was complete before the minimum ends nothing; the next one does.
        ({"stop": ["quick"], "min_new_tokens": 4, "max_new_tokens": 6}, "length", 6),
        ({"stop": ["quick"], "min_new_tokens": 4}, "stop", "quick"),
        ({"stop": ["the lazy"], "min_new_tokens": 8}, "stop", "the lazy"),
        ({"stop_regex": ["qu.ck"], "min_new_tokens": 4, "max_new_tokens": 6}, "length", 6),
        ({"stop_regex": [r"q\w+|l\w+y"], "min_new_tokens": 4}, "stop", "lazy"),
    ],
)
def test_what_ends_it(
    tokenizer: Tokenizer, settings: dict[str, object], kind: str, matched: object
) -> None:
    text = " the quick brown fox jumps over the lazy dog" * 2
    produced, finish = run(tokenizer, text, SamplingParams(**settings))
    assert (finish.type, finish.matched) == (kind, matched)
    if kind == "stop":
        assert str(matched) in produced


CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "}"}}'
TWO_CALLS = f"Well.\n{CALL}\n</tool_call>\n{CALL}\n</tool_call>\n" * 2


@pytest.mark.parametrize(
    ("answer", "settings", "calls"),
    [
        (AnswerFormat("hermes", ("f",), max_calls=1), {}, 1),
        (AnswerFormat("hermes", ("f",), max_calls=3), {}, 3),
        (AnswerFormat("hermes", ("f",), max_calls=1, reasoning=True), {}, 1),
        (AnswerFormat("hermes", ("f",), max_calls=1, reasoning=True, reasons_first=True), {}, 0),
        (AnswerFormat("hermes", ("f",)), {}, 0),
        (AnswerFormat("hermes", ("f",), max_calls=1), {"stop": ["Well"]}, 0),
    ],
)
def test_the_last_call_ends_it(
    tokenizer: Tokenizer, answer: AnswerFormat, settings: dict[str, object], calls: int
) -> None:
    limit = len(tokenizer.encode(TWO_CALLS))
    sampling = SamplingParams(until_calls=answer, max_new_tokens=limit, **settings)
    produced, finish = run(tokenizer, TWO_CALLS, sampling)
    if calls:
        assert finish == FinishReason("stop")
        assert produced.count('"}}') == calls
        # Nothing comes behind the token that ends the call.
        assert produced.rstrip().endswith("}")
    elif settings:
        assert (produced, finish.matched) == ("Well", "Well")
    else:
        assert finish.type == "length"


def test_a_minimum_of_tokens_outlives_the_last_call(tokenizer: Tokenizer) -> None:
    first = len(tokenizer.encode("Well.\n" + CALL))
    sampling = SamplingParams(
        until_calls=AnswerFormat("hermes", ("f",), max_calls=1), min_new_tokens=first + 5
    )
    produced, finish = run(tokenizer, TWO_CALLS, sampling)
    assert finish == FinishReason("stop")
    assert len(tokenizer.encode(produced)) >= first + 5
    assert produced.count('"}}') == 1


def test_end_of_sequence_and_ignore_eos(tokenizer: Tokenizer) -> None:
    eos = next(iter(tokenizer.eos_token_ids))
    tokens = array("i", [100, 200, eos])
    assert StopMatcher(SamplingParams(), tokenizer.eos_token_ids, None).check(tokens, 2) == (
        FinishReason("stop", eos)
    )
    ignoring = SamplingParams(ignore_eos=True)
    assert StopMatcher(ignoring, tokenizer.eos_token_ids, None).check(tokens, 2) is None


def test_a_pattern_that_takes_for_ever_ends_the_request(tokenizer: Tokenizer) -> None:
    _, finish = run(
        tokenizer,
        " " + "a" * 4000 + "!",
        SamplingParams(stop_regex=["(a|aa)+[!?]{2}"], max_new_tokens=10_000),
    )
    assert finish.type == "abort" and finish.status_code == 400
