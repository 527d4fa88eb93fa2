"""GGUF token tables -> `tokenizer.json` and `tokenizer_config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    normalizers,
    pre_tokenizers,
    processors,
)
from tokenizers.models import BPE

from sglang_minima.models.errors import ModelLoadError, UnsupportedModel

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
_SPACE = "▁"  # sentencepiece's visible space

_GPT4_LIKE = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_FAMILIES = {
    "default": "gpt2",
    "gpt-2": "gpt2",
    "smollm": "smollm",
    "llama-bpe": "llama3",
    "llama3": "llama3",
    "llama-v3": "llama3",
    "qwen2": "qwen2",
    "deepseek-r1-qwen": "qwen2",
}
_END_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
_END_NAMES = ("<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "<|endoftext|>", "</s>")


class ConvertedTokenizer(NamedTuple):
    """What the files of a Hugging Face directory need."""

    tokenizer: Tokenizer
    config: dict[str, Any]
    """`tokenizer_config.json`."""
    eos_token_ids: list[int]
    """Every token that ends a turn or a text; GGUF metadata often names only one of them."""


def convert_tokenizer(metadata: Mapping[str, Any]) -> ConvertedTokenizer:
    """Rebuilds the tokenizer of a GGUF file.

    Raises:
        UnsupportedModel: a kind of tokenizer other than gpt2-BPE (GPT-2, SmolLM, Llama 3 or Qwen2
            pre-tokenizer) and sentencepiece-BPE.
        ModelLoadError: the token tables are missing or contradict each other.
    """
    try:
        return _convert(metadata)
    except ModelLoadError:
        raise
    # tokenizers raises bare Exception for tables that contradict each other.
    except Exception as error:
        raise ModelLoadError(f"The GGUF file's token tables are broken: {error}.") from None


def _convert(metadata: Mapping[str, Any]) -> ConvertedTokenizer:
    kind = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    types = metadata.get("tokenizer.ggml.token_type")
    if tokens is None or types is None or len(tokens) != len(types):
        raise ModelLoadError("The GGUF file has no complete token table.")
    if kind == "gpt2":
        tokenizer, add_bos = _byte_level_bpe(metadata, tokens)
    elif kind == "llama":
        tokenizer, add_bos = _sentencepiece_bpe(metadata, tokens, types)
    else:
        raise UnsupportedModel(
            f"GGUF tokenizer {kind} is not supported; supported are gpt2 and llama."
        )
    _add_tokens(tokenizer, tokens, types)
    _set_template(tokenizer, metadata, tokens, add_bos)
    ends = {metadata[key] for key in _END_KEYS if key in metadata}
    ends |= {i for i, text in enumerate(tokens) if types[i] == _CONTROL and text in _END_NAMES}
    return ConvertedTokenizer(tokenizer, _config(metadata, tokens), sorted(ends))


def _byte_level_bpe(metadata: Mapping[str, Any], tokens: list[str]) -> tuple[Tokenizer, bool]:
    """GPT-2's byte-level BPE; returns it and whether texts start with BOS by default."""
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in _FAMILIES:
        raise UnsupportedModel(
            f"GGUF pre-tokenizer {pre} is not supported; supported are {', '.join(_FAMILIES)}."
        )
    family = _FAMILIES[pre]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(vocabulary, merges, ignore_merges=family == "llama3"))
    tokenizer.decoder = decoders.ByteLevel()
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if family == "gpt2":
        tokenizer.pre_tokenizer = gpt2
    elif family == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, gpt2])
    else:
        number = r"\p{N}{1,3}" if family == "llama3" else r"\p{N}"
        pattern = Regex(_GPT4_LIKE.format(digits=number))
        split = pre_tokenizers.Split(pattern, behavior="isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, plain])
    if family == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer, family == "llama3"


def _sentencepiece_bpe(
    metadata: Mapping[str, Any], tokens: list[str], types: list[int]
) -> tuple[Tokenizer, bool]:
    """Sentencepiece's BPE with byte fallback (Llama 2); texts start with BOS by default."""
    scores = metadata["tokenizer.ggml.scores"]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    unknown = tokens[metadata.get("tokenizer.ggml.unknown_token_id", 0)]
    merges = _merges(vocabulary, scores, types)
    tokenizer = Tokenizer(
        BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    replace = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend(_SPACE), replace]) if prefix else replace
    )
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer, True


def _merges(
    vocabulary: dict[str, int], scores: list[float], types: list[int]
) -> list[tuple[str, str]]:
    """Sentencepiece keeps no merge list: a pair may merge if its whole is a token, best first."""
    ranked = []
    for token, index in vocabulary.items():
        if types[index] != _NORMAL:
            continue
        for cut in range(1, len(token)):
            left, right = vocabulary.get(token[:cut]), vocabulary.get(token[cut:])
            if left is not None and right is not None:
                ranked.append((-scores[index], index, left, token[:cut], token[cut:]))
    ranked.sort(key=lambda item: item[:3])
    return [(left, right) for *_, left, right in ranked]


def _add_tokens(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Control and user-defined tokens are matched in text before BPE sees it."""
    for special, kind in ((True, _CONTROL), (False, _USER_DEFINED)):
        added = [
            AddedToken(text, special=special, normalized=False)
            for text, token_kind in zip(tokens, types, strict=True)
            if token_kind == kind
        ]
        if special:
            tokenizer.add_special_tokens(added)
        else:
            tokenizer.add_tokens(added)


def _set_template(
    tokenizer: Tokenizer, metadata: Mapping[str, Any], tokens: list[str], add_bos: bool
) -> None:
    single = ["$A"]
    special = {}
    for side, default in (("bos", add_bos), ("eos", False)):
        index = metadata.get(f"tokenizer.ggml.{side}_token_id")
        if index is None or not metadata.get(f"tokenizer.ggml.add_{side}_token", default):
            continue
        special[tokens[index]] = index
        single = [tokens[index], *single] if side == "bos" else [*single, tokens[index]]
    if special:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=single, special_tokens=list(special.items())
        )


def _config(metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, Any]:
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    named = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    for name, key in named.items():
        index = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if index is not None:
            config[f"{name}_token"] = tokens[index]
    template = metadata.get("tokenizer.chat_template")
    if template is not None:
        config["chat_template"] = template
    return config
