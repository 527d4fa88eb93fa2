"""Tokenizers rebuilt from GGUF tables give the ids of the tokenizers the tables were taken from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gguf_support import bpe_tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import AutoTokenizer, Qwen2Tokenizer

from sglang_minima.models import ModelLoadError, UnsupportedModel
from sglang_minima.models.gguf_tokenizer import convert_tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog, 1234567890 times; it's what they'll do.",
    "def add(a, b):\n    return a + b  # naïve café, 你好世界, Привет мир\n\n\n",
    "日本語のテキスト 2024年 — “quotes” … I'VE we're 3.14159 x1y22z333",
] * 4
TEXTS = st.text(max_size=60) | st.lists(
    st.sampled_from(
        ["the", " fox", "'ll", "'VE", "12", "3456", " ", "  ", "\n", "\r\n", "\t", "é", "e\u0301",
         "你好", "😀", "👩‍👩‍👧", "...", "!", "<|im_start|>", "<tool>", "x", "_", "١٢٣", "½"]
    ),
    max_size=14,
).map("".join)  # fmt: skip


def prefixed(tokens: dict[str, Any]) -> dict[str, Any]:
    return {f"tokenizer.ggml.{key}": value for key, value in tokens.items()}


def trained(pre_tokenizer: Any) -> Tokenizer:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=500,
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        ),
    )
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    return tokenizer


GPT2 = trained(pre_tokenizers.ByteLevel(add_prefix_space=False))
SMOLLM = trained(
    pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
)


@pytest.mark.parametrize(
    ("pre", "source"), [("default", GPT2), ("gpt-2", GPT2), ("smollm", SMOLLM)]
)
def test_ids_equal_the_source(pre: str, source: Tokenizer) -> None:
    mine = convert_tokenizer(prefixed(bpe_tokens(source, pre, eos_token_id=2))).tokenizer

    @settings(max_examples=150)
    @given(TEXTS)
    def same(text: str) -> None:
        ids = mine.encode(text).ids
        assert ids == source.encode(text).ids
        assert mine.decode(ids, skip_special_tokens=False) == text

    same()


def test_qwen2_splits_like_transformers() -> None:
    mine = convert_tokenizer(prefixed(bpe_tokens(GPT2, "qwen2"))).tokenizer
    theirs = Qwen2Tokenizer(vocab={"a": 0}, merges=[]).backend_tokenizer

    @settings(max_examples=200)
    @given(TEXTS)
    def same(text: str) -> None:
        text = theirs.normalizer.normalize_str(text)
        assert mine.normalizer.normalize_str(text) == text
        assert mine.pre_tokenizer.pre_tokenize_str(text) == theirs.pre_tokenizer.pre_tokenize_str(
            text
        )

    same()


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("1234567", ["123", "456", "7"]),
        ("I'LL go", ["I", "'LL", "Ġgo"]),
        ("a  b", ["a", "Ġ", "Ġb"]),
        ("x=1\n\n  y", ["x", "=", "1", "ĊĊ", "Ġ", "Ġy"]),
        ("hi!!\nyes", ["hi", "!!Ċ", "yes"]),
        ("(foo)", ["(foo", ")"]),
    ],
)
def test_llama3_splits(text: str, pieces: list[str]) -> None:
    mine = convert_tokenizer(prefixed(bpe_tokens(GPT2, "llama-bpe"))).tokenizer
    assert [piece for piece, _ in mine.pre_tokenizer.pre_tokenize_str(text)] == pieces


def test_llama3_takes_whole_words_of_the_vocabulary() -> None:
    # "Ġfoxes" has no merges leading to it; tiktoken-style BPE still finds it as a whole.
    tokens = bpe_tokens(GPT2, "llama-bpe")
    tokens["tokens"].append("Ġfoxes")
    tokens["token_type"].append(1)
    mine = convert_tokenizer(prefixed(tokens)).tokenizer
    assert mine.encode(" foxes").ids == [len(tokens["tokens"]) - 1]


@pytest.mark.parametrize(
    ("pre", "changes", "expected"),
    [
        ("llama-bpe", {}, True),
        ("llama-bpe", {"add_bos_token": False}, False),
        ("qwen2", {}, False),
        ("qwen2", {"add_bos_token": True}, True),
    ],
)
def test_bos(pre: str, changes: dict[str, Any], expected: bool) -> None:
    tokens = prefixed(bpe_tokens(GPT2, pre, bos_token_id=1, eos_token_id=2, **changes))
    converted = convert_tokenizer(tokens)
    ids = converted.tokenizer.encode("fox").ids
    assert (ids[0] == 1) == expected
    assert converted.tokenizer.encode("fox", add_special_tokens=False).ids == ids[expected:]
    assert converted.config["bos_token"] == "<|im_start|>"


def test_ends_by_name_and_by_key() -> None:
    tokens = prefixed(bpe_tokens(GPT2, "qwen2", eos_token_id=2, eot_token_id=7))
    assert convert_tokenizer(tokens).eos_token_ids == [0, 2, 7]


def sentencepiece_tables() -> dict[str, Any]:
    pieces = ["▁", "a", "b", "c", "h", "i", "ab", "▁a", "▁ab", "bc", "hi", "▁hi", "▁▁"]
    scores = {"ab": -1.0, "bc": -2.0, "▁a": -3.0, "▁ab": -4.0, "hi": -5.0, "▁hi": -6.0, "▁▁": -7.0}
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *pieces]
    return prefixed(
        {
            "model": "llama",
            "tokens": tokens,
            "scores": [scores.get(token, -20.0) for token in tokens],
            "token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
            "bos_token_id": 1,
            "eos_token_id": 2,
            "unknown_token_id": 0,
        }
    )


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("abc", ["▁ab", "c"]),  # ab (best) first, then ▁ + ab; bc never gets its chance
        ("hi hi", ["▁hi", "▁hi"]),
        ("abcbc", ["▁ab", "c", "bc"]),
        ("é", ["▁", "<0xC3>", "<0xA9>"]),
        ("a</s>b", ["▁a", "</s>", "▁", "b"]),
    ],
)
def test_sentencepiece(text: str, pieces: list[str]) -> None:
    converted = convert_tokenizer(sentencepiece_tables())
    encoding = converted.tokenizer.encode(text)
    assert encoding.tokens == ["<s>", *pieces]
    if "</s>" not in text:
        assert converted.tokenizer.decode(encoding.ids) == text
    assert converted.eos_token_ids == [2]


def test_sentencepiece_without_prefix() -> None:
    tables = {**sentencepiece_tables(), "tokenizer.ggml.add_space_prefix": False}
    tokenizer = convert_tokenizer(tables).tokenizer
    assert tokenizer.encode("abc").tokens == ["<s>", "ab", "c"]
    assert tokenizer.decode(tokenizer.encode(" abc").ids) == " abc"


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"tokenizer.ggml.pre": "gpt-4o"}, UnsupportedModel, "gpt-4o .*smollm"),
        ({"tokenizer.ggml.model": "t5"}, UnsupportedModel, "t5"),
        ({"tokenizer.ggml.token_type": [1]}, ModelLoadError, "token table"),
        ({"tokenizer.ggml.merges": ["zzz yyy"]}, ModelLoadError, "broken"),
        ({"tokenizer.ggml.merges": ["a"]}, ModelLoadError, "broken"),
        ({"tokenizer.ggml.bos_token_id": 1 << 20}, ModelLoadError, "broken"),
    ],
)
def test_bad_tables(changes: dict[str, Any], error: type[Exception], words: str) -> None:
    tokens = prefixed(bpe_tokens(GPT2, "llama-bpe")) | changes
    with pytest.raises(error, match=words):
        convert_tokenizer(tokens)


def test_files_load_in_transformers(tmp_path: Path) -> None:
    converted = convert_tokenizer(prefixed(bpe_tokens(SMOLLM, "smollm", eos_token_id=2)))
    converted.tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(converted.config))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.eos_token_id == 2
    assert tokenizer.encode("the fox 123") == SMOLLM.encode("the fox 123").ids
