"""The calls into xgrammar: everything that knows its interface, except for the matchers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import msgspec
import xgrammar

from sglang_minima.grammar.json_strings import (
    foreign_reference,
    json_contents,
    unsafe_pattern,
    with_sound_strings,
)
from sglang_minima.grammar.spec import Grammar
from sglang_minima.tokenization.tokenizer import Tokenizer

_NOISE = re.compile(r"^(\[[\d:]+\] )?(\S+:\d+: )?(Check failed: \(.*?\) is false: )?")
"""What xgrammar puts before its sentence: time, place in its sources, the failed condition."""
_LONGEST_MESSAGE = 300

MAX_SPACE = 32
"""White space between two parts of a JSON text, in characters: enough for a line break and deep
indentation. Without a bound, a weak model may write nothing else until its limit."""


class GrammarError(ValueError):
    """The grammar cannot be used; one sentence for the client."""


def vocabulary(tokenizer: Tokenizer, eos_ids: frozenset[int]) -> xgrammar.TokenizerInfo:
    """The tokens of a model as xgrammar sees them.

    Special tokens have no text here: otherwise the letters of "<|im_end|>" inside a string could
    come from the token of that name, which decodes to nothing.
    """
    found = xgrammar.TokenizerInfo.from_huggingface(
        tokenizer.hugging_face, vocab_size=tokenizer.vocab_size, stop_token_ids=sorted(eos_ids)
    )
    texts = list(found.decoded_vocab)
    for token in tokenizer.special_ids:
        if token < len(texts):
            texts[token] = b""
    return xgrammar.TokenizerInfo(
        texts,
        xgrammar.VocabType.RAW,
        vocab_size=tokenizer.vocab_size,
        stop_token_ids=sorted(eos_ids),
        add_prefix_space=found.add_prefix_space,
    )


class GrammarCompiler:
    """Compiles the grammars of one model, one at a time, on the calling thread."""

    def __init__(self, info: xgrammar.TokenizerInfo) -> None:
        self.info = info
        self._inner = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, grammar: Grammar) -> xgrammar.CompiledGrammar:
        """
        Raises:
            GrammarError: the grammar is invalid, or needs more memory than there is.
        """
        try:
            return self._compile(grammar)
        except GrammarError:
            raise
        except MemoryError:
            raise GrammarError(f"{grammar.kind} needs too much memory") from None
        # xgrammar raises RuntimeError and subclasses of it, ValueError and TypeError.
        except Exception as error:
            raise GrammarError(f"{grammar.kind} is invalid: {_sentence(error)}") from None

    def _compile(self, grammar: Grammar) -> xgrammar.CompiledGrammar:
        if grammar.kind == "regex":
            return self._inner.compile_regex(grammar.text)
        if grammar.kind == "ebnf":
            return self._inner.compile_grammar(grammar.text)
        if grammar.kind == "json_schema":
            _check_schemas([msgspec.json.decode(grammar.text)])
            parsed = xgrammar.Grammar.from_json_schema(
                grammar.text, strict_mode=grammar.strict, max_whitespace_cnt=MAX_SPACE
            )
        else:
            tag = msgspec.json.decode(grammar.text)
            contents = list(json_contents(tag))
            _check_schemas(content["json_schema"] for content in contents)
            for content in contents:
                if content.get("max_whitespace_cnt") is None:
                    content["max_whitespace_cnt"] = MAX_SPACE
            text = msgspec.json.encode(tag).decode()
            parsed = xgrammar.Grammar.from_structural_tag(text)
        sound = with_sound_strings(str(parsed))
        return self._inner.compile_grammar(parsed if sound is None else sound)


def _check_schemas(schemas: Iterable[Any]) -> None:
    for schema in schemas:
        reference = foreign_reference(schema)
        if reference is not None:
            raise GrammarError(
                f"the $ref {reference!r} leads out of the schema: only '#' and '#/...' are followed"
            )
        pattern = unsafe_pattern(schema)
        if pattern is not None:
            raise GrammarError(
                f"the pattern {pattern!r} spells a quote, backslash or control character, which "
                "is not supported in JSON strings"
            )


def _sentence(error: Exception) -> str:
    text = " ".join(str(error).split())
    if "bad_alloc" in text:
        return "it needs too much memory"
    text = _NOISE.sub("", text)
    return text if len(text) <= _LONGEST_MESSAGE else text[:_LONGEST_MESSAGE] + "..."
