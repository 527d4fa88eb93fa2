"""`IncrementalDecoder`: the pieces are the whole text, however the tokens arrive."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE

from sglang_minima.models.gguf_tokenizer import convert_tokenizer
from sglang_minima.tokenization.incremental import IncrementalDecoder

SPECIALS = ["<|endoftext|>", "<|im_end|>"]
FFFD = "\ufffd"


class Wrapped:
    """A tokenizer of the tokenizers package with the interface of ours, counting its work."""

    def __init__(self, inner: Tokenizer, fallback: bool) -> None:
        self.inner = inner
        self.decoded = 0
        self.bytes = {i: b for b, i in enumerate(FALLBACK)} if fallback else {}

    def decode(
        self,
        ids: list[int],
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        self.decoded += len(ids)
        text: str = self.inner.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def byte_value(self, token: int) -> int | None:
        return self.bytes.get(token)


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        ["the fox and the dog", "naïve café 你好世界 😀😃👩‍👩‍👧", "e\u0301a\u0308"] * 3,
        trainers.BpeTrainer(
            vocab_size=340,
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=SPECIALS,
        ),
    )
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    return tokenizer


def byte_fallback() -> Tokenizer:
    pieces = ["▁", *"abcehotux", "▁the", "▁a", "th", "▁th", "▁▁", "é"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *pieces]
    tables = {
        "model": "llama",
        "tokens": tokens,
        "scores": [-float(i) for i in range(len(tokens))],
        "token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return convert_tokenizer({f"tokenizer.ggml.{k}": v for k, v in tables.items()}).tokenizer


BYTE_LEVEL, BYTE_FALLBACK = byte_level(), byte_fallback()
ALPHABET = [BYTE_LEVEL.token_to_id(c) for c in sorted(pre_tokenizers.ByteLevel.alphabet())]
"""Ids of the 256 one-byte tokens (in no particular order)."""
FALLBACK = [BYTE_FALLBACK.token_to_id(f"<0x{byte:02X}>") for byte in range(256)]
TEXTS = st.lists(
    st.sampled_from(
        ["the", " fox", "é", "e\u0301", "你好", "😀", "👩‍👩‍👧", " ", "a", FFFD, "<tool>", *SPECIALS]
    )
    | st.text(max_size=4),
    max_size=25,
).map("".join)  # fmt: skip


def pieces(
    tokenizer: Tokenizer, ids: list[int], cuts: list[int], prompt: list[int], skip: bool
) -> list[str]:
    """Pushes ids[0:cut], ids[cut:next cut], ..."""
    decoder = IncrementalDecoder(wrap(tokenizer), prompt, skip)
    bounds = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    parts = [decoder.push(ids[a:b]) for a, b in pairwise(bounds)]
    return [*parts, decoder.flush()]


def any_ids(tokenizer: Tokenizer, raw: list[int]) -> st.SearchStrategy[list[int]]:
    """Encoded texts, random ids, and runs of bytes, mixed."""
    size = tokenizer.get_vocab_size() + 5
    chunks = (
        TEXTS.map(lambda text: tokenizer.encode(text, add_special_tokens=False).ids)
        | st.lists(st.integers(0, size - 1), max_size=12)
        | st.lists(st.sampled_from(raw), max_size=100)
    )
    return st.lists(chunks, max_size=4).map(lambda parts: [i for part in parts for i in part])


def wrap(tokenizer: Tokenizer) -> Wrapped:
    return Wrapped(tokenizer, fallback=tokenizer is BYTE_FALLBACK)


CUTS = st.lists(st.integers(0, 300), max_size=6)


@settings(max_examples=400)
@given(any_ids(BYTE_LEVEL, ALPHABET), CUTS, st.booleans())
def test_pieces_are_the_whole_text(ids: list[int], cuts: list[int], skip: bool) -> None:
    parts = pieces(BYTE_LEVEL, ids, cuts, [], skip)
    assert "".join(parts) == BYTE_LEVEL.decode(ids, skip_special_tokens=skip)


@settings(max_examples=300)
@given(any_ids(BYTE_LEVEL, ALPHABET), TEXTS, CUTS, st.booleans())
def test_prompt_is_context_and_not_output(
    ids: list[int], prompt: str, cuts: list[int], skip: bool
) -> None:
    tail = BYTE_LEVEL.encode(prompt).ids[-5:]
    whole = BYTE_LEVEL.decode(tail + ids, skip_special_tokens=skip)
    before = BYTE_LEVEL.decode(tail, skip_special_tokens=skip)
    parts = pieces(BYTE_LEVEL, ids, cuts, tail, skip)
    if whole.startswith(before):
        assert "".join(parts) == whole[len(before) :]
    else:
        # The prompt ended inside a character, and the new tokens completed it.
        assert before.endswith(FFFD)
        assert whole == before.rstrip(FFFD) + "".join(parts) or FFFD in prompt


@settings(max_examples=300)
@given(any_ids(BYTE_FALLBACK, FALLBACK), CUTS, CUTS, st.booleans())
def test_splits_do_not_matter(
    ids: list[int], cuts: list[int], others: list[int], skip: bool
) -> None:
    first = "".join(pieces(BYTE_FALLBACK, ids, cuts, [], skip))
    assert first == "".join(pieces(BYTE_FALLBACK, ids, others, [], skip))


@settings(max_examples=300)
@given(TEXTS, TEXTS, CUTS)
def test_byte_fallback_of_valid_text(prompt: str, text: str, cuts: list[int]) -> None:
    tail = BYTE_FALLBACK.encode(prompt, add_special_tokens=False).ids
    ids = BYTE_FALLBACK.encode(prompt + text, add_special_tokens=False).ids
    if ids[: len(tail)] != tail:  # the text merged with the prompt's end
        return
    parts = pieces(BYTE_FALLBACK, ids[len(tail) :], cuts, tail[-6:] if tail else [], True)
    if len(tail) <= 6:
        whole, before = (BYTE_FALLBACK.decode(x, skip_special_tokens=True) for x in (ids, tail))
        if FFFD not in whole:
            assert "".join(parts) == whole[len(before) :]


@settings(max_examples=200)
@given(TEXTS.filter(lambda text: FFFD not in text))
def test_no_piece_has_half_a_character(text: str) -> None:
    ids = BYTE_LEVEL.encode(text).ids
    parts = pieces(BYTE_LEVEL, ids, list(range(len(ids))), [], False)
    assert FFFD not in "".join(parts)


def byte_ids(data: bytes) -> list[int]:
    return [FALLBACK[byte] for byte in data]


def level_ids(data: bytes) -> list[int]:
    """One token a byte, whatever merges there are."""
    alphabet = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    [(mapped, _)] = alphabet.pre_tokenize_str(data.decode())
    return [BYTE_LEVEL.token_to_id(c) for c in mapped]


def stream(tokenizer: Tokenizer, ids: list[int], prompt: list[int] | None = None) -> str:
    return "".join(pieces(tokenizer, ids, list(range(len(ids))), prompt or [], True))


def test_characters_arrive_whole() -> None:
    decoder = IncrementalDecoder(wrap(BYTE_FALLBACK), [])
    assert [decoder.push([i]) for i in byte_ids("é😀".encode())] == ["", "é", "", "", "", "😀"]
    assert decoder.flush() == ""


def test_flush_gives_the_broken_end() -> None:
    decoder = IncrementalDecoder(wrap(BYTE_LEVEL), [])
    euro = BYTE_LEVEL.encode("a€").ids
    assert decoder.push(euro[:-1]) == "a"
    assert decoder.flush() == FFFD
    assert decoder.flush() == ""


def test_space_after_a_prompt_is_kept() -> None:
    # sentencepiece drops the first space of a text; "▁the" after a prompt is " the".
    the, a = (BYTE_FALLBACK.token_to_id(token) for token in ("▁the", "▁a"))
    assert IncrementalDecoder(wrap(BYTE_FALLBACK), [a]).push([the]) == " the"
    assert IncrementalDecoder(wrap(BYTE_FALLBACK), []).push([the]) == "the"
    # ... also when the prompt's tail ends in special tokens, and after a cut of the window.
    decoder = IncrementalDecoder(wrap(BYTE_FALLBACK), [a, 2, 1])
    assert decoder.push([the] * 200) == " the" * 200


def test_byte_runs() -> None:
    the = BYTE_FALLBACK.token_to_id("▁the")
    family = "👩‍👩‍👧é".encode()  # characters that share one run of byte tokens
    assert stream(BYTE_FALLBACK, byte_ids(family)) == family.decode()
    assert stream(BYTE_FALLBACK, [*byte_ids("é".encode()), the]) == "é the"
    invalid = byte_ids("é".encode() + b"\xff" + "€".encode() + b"\xe2\x82")
    assert stream(BYTE_FALLBACK, [*invalid, the]) == f"é{FFFD}€{FFFD} the"
    assert stream(BYTE_FALLBACK, [the, *invalid]) == f"theé{FFFD}€{FFFD}"


def test_prompt_that_ends_inside_a_character() -> None:
    for tokenizer, ids in ((BYTE_FALLBACK, byte_ids), (BYTE_LEVEL, level_ids)):
        euro, a = ids("€".encode()), tokenizer.token_to_id("a")
        assert stream(tokenizer, euro[1:], prompt=euro[:1]) == "€"
        assert stream(tokenizer, [a], prompt=euro[:1]) == "a"
        assert stream(tokenizer, [], prompt=euro[:2]) == ""


@pytest.mark.parametrize("invalid", range(55, 75))
def test_cut_inside_a_character(invalid: int) -> None:
    # The window of a text that is never complete is cut somewhere; not through the character.
    ids = level_ids("é".encode())[1:] * invalid + level_ids("😀".encode())
    assert stream(BYTE_LEVEL, ids) == FFFD * invalid + "😀"
    # Invisible tokens push the open character out of the window: it can only be broken.
    ids = [*level_ids("aé".encode())[:2], *[0] * (2 * invalid), BYTE_LEVEL.token_to_id("a")]
    assert stream(BYTE_LEVEL, ids) == f"a{FFFD}a"


def test_space_token_that_decodes_to_nothing_is_context() -> None:
    space, the = (BYTE_FALLBACK.token_to_id(token) for token in ("▁", "▁the"))
    assert stream(BYTE_FALLBACK, [space, the]) == BYTE_FALLBACK.decode([space, the]) == " the"


@pytest.mark.parametrize(
    ("tokenizer", "ids", "bound"),
    [
        (BYTE_LEVEL, BYTE_LEVEL.encode("the fox " * 1000).ids, 30),
        (BYTE_LEVEL, [BYTE_LEVEL.token_to_id("Ģ")] * 1000, 70),
        (BYTE_LEVEL, [0] * 1000, 70),
        (BYTE_FALLBACK, [FALLBACK[0x80]] * 1000, 0),
    ],
    ids=["text", "invalid bytes", "invisible", "byte tokens"],
)
def test_work_per_token_is_bounded(tokenizer: Tokenizer, ids: list[int], bound: int) -> None:
    wrapped = wrap(tokenizer)
    text = IncrementalDecoder(wrapped, []).push(ids)
    assert wrapped.decoded <= bound * len(ids)
    assert len(text) >= 999 or ids[0] == 0
