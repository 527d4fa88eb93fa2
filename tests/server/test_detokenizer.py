"""The detokenizer's text: stops cut, possible stops held back, patterns taken back."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_minima.messages import FinishReason, TextOutput, TokenOutput
from sglang_minima.tokenization.detokenizer import Detokenizer, held_back
from sglang_minima.tokenization.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.load(model_dir)


def outputs(
    tokenizer: Tokenizer, pieces: list[str], finish: FinishReason, stop: list[str]
) -> list[TokenOutput]:
    """One output a piece; the last one carries `finish`."""
    made = []
    for index, piece in enumerate(pieces):
        last = index == len(pieces) - 1
        made.append(
            TokenOutput(
                rid="r",
                new_ids=tokenizer.encode(piece),
                finish=finish if last else None,
                prompt_tokens=1,
                completion_tokens=1,
                cached_tokens=0,
                prompt_tail=[40] if index == 0 else None,
                stop=stop if index == 0 else [],
            )
        )
    return made


def read(updates: list[TextOutput]) -> list[str]:
    """The cumulative text after each update, as the frontend builds it."""
    texts, text = [], ""
    for update in updates:
        text = text[: len(text) - update.trim] + update.text
        texts.append(text)
    return texts


def naive_held(text: str, stops: list[str]) -> int:
    sizes = [
        size
        for stop in stops
        for size in range(1, len(stop))
        if stop.startswith(text[len(text) - size :]) and size <= len(text)
    ]
    return max(sizes, default=0)


@given(st.text("ab", max_size=8), st.lists(st.text("ab", min_size=1, max_size=5), max_size=3))
def test_held_back(text: str, stops: list[str]) -> None:
    assert held_back(text, stops) == naive_held(text, stops)


@settings(max_examples=150)
@given(
    pieces=st.lists(st.text("ab🙂", max_size=4), min_size=1, max_size=8),
    stops=st.lists(st.text("ab🙂", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_streams_agree_with_the_whole_text(
    tokenizer: Tokenizer, pieces: list[str], stops: list[str]
) -> None:
    """The pieces end where a stop first appears, as the scheduler's do."""
    text, used, matched = "", [], None
    for piece in pieces:
        text += piece
        used.append(piece)
        matched = next((stop for stop in stops if stop in text), None)
        if matched is not None:
            break
    finish = FinishReason("length") if matched is None else FinishReason("stop", matched)
    detokenizer = Detokenizer(tokenizer)
    texts = read([detokenizer.decode(o) for o in outputs(tokenizer, used, finish, stops)])
    expected = text if matched is None else text[: text.index(matched)]
    assert texts[-1] == expected
    # What a client has seen never has to be taken back.
    assert all(expected.startswith(seen) for seen in texts)


def test_pattern_match_is_taken_back(tokenizer: Tokenizer) -> None:
    finish = FinishReason("stop", "b12;")
    detokenizer = Detokenizer(tokenizer)
    updates = [
        detokenizer.decode(output)
        for output in outputs(tokenizer, ["ab", "1", "2", ";x"], finish, [])
    ]
    assert read(updates) == ["ab", "ab1", "ab12", "a"]
    assert updates[-1].trim == 3


def test_no_stop_trim(tokenizer: Tokenizer) -> None:
    made = outputs(tokenizer, ["ab", "cd"], FinishReason("stop", "cd"), ["cd"])
    for output in made:
        output.no_stop_trim = True
    detokenizer = Detokenizer(tokenizer)
    assert read([detokenizer.decode(output) for output in made]) == ["ab", "abcd"]


def test_half_a_character_at_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a🙂")[:-1]
    output = outputs(tokenizer, ["a"], FinishReason("length"), [])[0]
    output.new_ids = ids
    assert Detokenizer(tokenizer).decode(output).text == tokenizer.decode(ids)


def test_stops_go_no_further(tokenizer: Tokenizer) -> None:
    """The HTTP process has no use for them, and a client may have sent many."""
    detokenizer = Detokenizer(tokenizer)
    made = outputs(tokenizer, ["aq", "q", "b"], FinishReason("length"), ["qqq"])
    updates = [detokenizer.decode(output) for output in made]
    assert [update.output.stop for update in updates] == [[], [], []]
    assert read(updates) == ["a", "a", "aqqb"]
