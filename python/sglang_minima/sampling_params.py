"""Sampling parameters of one request: the fields SGLang programs send, checked once at the door.

Every check raises `InvalidRequest` with one clear sentence, which the HTTP layer answers as 400.
"""

from __future__ import annotations

import math
import re
from typing import Any

import msgspec
import regex

from sglang_minima.grammar.spec import KINDS, Grammar
from sglang_minima.parsers.answer import AnswerFormat

GREEDY_TEMPERATURE = 1e-6
MAX_STOPS = 32
MAX_STOP_LENGTH = 4096
MAX_STOP_TOKEN_IDS = 1024
MAX_STOP_REGEX_LENGTH = 256
MAX_STOP_REGEX_REPEATS = 10_000
"""Counted repeats are unrolled when a pattern is compiled: nested ones could take for ever."""
MAX_N = 128
MAX_NEW_TOKENS = 1 << 20
MAX_TOP_K = 1 << 31


class InvalidRequest(ValueError):
    """A request that cannot be served as it stands; the message is shown to the client (400)."""


class SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Parameters of one request, already normalised (no `None` where a default exists)."""

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: list[str] = []
    stop_token_ids: list[int] = []
    stop_regex: list[str] = []
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    logit_bias: dict[int, float] = {}
    sampling_seed: int | None = None
    n: int = 1
    stream_interval: int = 1
    grammar: Grammar | None = None
    """What the output must match: `json_schema`, `regex`, `ebnf` or `structural_tag`."""
    until_calls: AnswerFormat | None = None
    """The sequence ends with the last tool call that such an answer may have. Set by the chat
    routes; no field of a request."""

    @property
    def greedy(self) -> bool:
        """True when the most likely token is taken at every step."""
        return self.temperature < GREEDY_TEMPERATURE or self.top_k == 1

    @classmethod
    def from_dict(cls, raw: Any, vocab_size: int) -> SamplingParams:
        """Parses the JSON object of a request.

        Args:
            raw: the decoded `sampling_params` value (an object or null).
            vocab_size: token ids must lie in [0, vocab_size).

        Raises:
            InvalidRequest: unknown key, wrong type, or value out of range.
        """
        if raw is None:
            raw = {}
        if not isinstance(raw, dict):
            raise InvalidRequest("sampling_params must be an object")
        values: dict[str, Any] = {}
        for key, value in raw.items():
            if key in _UNSUPPORTED:
                if value in (None, "", [], {}):
                    continue
                # We must not ignore it silently.
                raise InvalidRequest(f"sampling_params.{key} is not supported by this server")
            if key not in PARAMETER_NAMES:
                raise InvalidRequest(
                    f"unknown sampling parameter {key!r}, expected one of: "
                    f"{', '.join(PARAMETER_NAMES)}"
                )
            if value is None:
                continue
            values[key] = value
        values["grammar"] = _take_grammar(values)
        for key in ("stop", "stop_regex"):
            if isinstance(values.get(key), str):
                values[key] = [values[key]]
        if isinstance(values.get("stop_token_ids"), int):
            values["stop_token_ids"] = [values["stop_token_ids"]]
        for key in _INTEGERS:
            value = values.get(key)
            if isinstance(value, float) and value.is_integer():
                values[key] = int(value)
        try:
            # strict=False turns the string keys of logit_bias into ints; numbers are checked above.
            _reject_strings(values)
            params = msgspec.convert(values, cls, strict=False)
        except msgspec.ValidationError as error:
            raise InvalidRequest(f"sampling_params: {error}") from None
        params.verify(vocab_size)
        return params

    def with_grammar(self, grammar: Grammar | None) -> SamplingParams:
        """These parameters with a grammar that another field of the request asks for.

        Raises:
            InvalidRequest: there is one already.
        """
        if grammar is None:
            return self
        if self.grammar is not None:
            raise InvalidRequest(
                f"the output cannot follow two grammars: {self.grammar.kind} and {grammar.kind}"
            )
        return msgspec.structs.replace(self, grammar=grammar)

    def verify(self, vocab_size: int) -> None:
        """Checks every range; see `from_dict`."""
        _need(
            0 <= self.max_new_tokens <= MAX_NEW_TOKENS,
            "max_new_tokens",
            f"in [0, {MAX_NEW_TOKENS}]",
        )
        _need(
            0 <= self.min_new_tokens <= self.max_new_tokens,
            "min_new_tokens",
            f"in [0, max_new_tokens={self.max_new_tokens}]",
        )
        _need(_finite(self.temperature) and self.temperature >= 0, "temperature", "non-negative")
        _need(0 < self.top_p <= 1, "top_p", "in (0, 1]")
        _need(self.top_k == -1 or 1 <= self.top_k <= MAX_TOP_K, "top_k", "-1 (off) or in [1, 2^31]")
        _need(0 <= self.min_p <= 1, "min_p", "in [0, 1]")
        _need(-2 <= self.frequency_penalty <= 2, "frequency_penalty", "in [-2, 2]")
        _need(-2 <= self.presence_penalty <= 2, "presence_penalty", "in [-2, 2]")
        _need(0.01 <= self.repetition_penalty <= 2, "repetition_penalty", "in [0.01, 2]")
        _need(1 <= self.n <= MAX_N, "n", f"in [1, {MAX_N}]")
        _need(
            1 <= self.stream_interval <= MAX_NEW_TOKENS,
            "stream_interval",
            f"in [1, {MAX_NEW_TOKENS}]",
        )
        _need(len(self.stop) <= MAX_STOPS, "stop", f"at most {MAX_STOPS} strings")
        _need(
            all(0 < len(stop) <= MAX_STOP_LENGTH for stop in self.stop),
            "stop",
            f"strings of 1 to {MAX_STOP_LENGTH} characters",
        )
        _need(
            len(self.stop_token_ids) <= MAX_STOP_TOKEN_IDS,
            "stop_token_ids",
            f"at most {MAX_STOP_TOKEN_IDS} ids",
        )
        _need(len(self.stop_regex) <= MAX_STOPS, "stop_regex", f"at most {MAX_STOPS} patterns")
        for pattern in self.stop_regex:
            _need(
                0 < len(pattern) <= MAX_STOP_REGEX_LENGTH,
                "stop_regex",
                f"patterns of 1 to {MAX_STOP_REGEX_LENGTH} characters",
            )
            counts = (int(count) or 1 for count in _REPEAT.findall(pattern))
            _need(
                math.prod(counts) <= MAX_STOP_REGEX_REPEATS,
                "stop_regex",
                f"patterns whose repeat counts multiply to at most {MAX_STOP_REGEX_REPEATS}",
            )
            try:
                regex.compile(pattern)
            except Exception as error:  # odd patterns make the library raise almost anything
                raise InvalidRequest(f"stop_regex is not a valid pattern: {error}") from None
        for token in (*self.stop_token_ids, *self.logit_bias):
            _need(
                0 <= token < vocab_size, "stop_token_ids and logit_bias", f"ids below {vocab_size}"
            )
        for bias in self.logit_bias.values():
            _need(-100 <= bias <= 100, "logit_bias", "values in [-100, 100]")
        if self.sampling_seed is not None:
            _need(abs(self.sampling_seed) < 1 << 63, "sampling_seed", "a 64-bit integer")


_REPEAT = re.compile(r"\{\s*(\d+)\s*(?:,\s*\d*\s*)?\}")
_UNSUPPORTED = frozenset({"beam_width", "custom_params"})
_INTERNAL = frozenset({"grammar", "until_calls"})
PARAMETER_NAMES = (
    *(name for name in SamplingParams.__struct_fields__ if name not in _INTERNAL),
    *KINDS,
)
"""Keys that `SamplingParams.from_dict` takes."""
_INTEGERS = (
    "max_new_tokens",
    "min_new_tokens",
    "top_k",
    "n",
    "sampling_seed",
    "stream_interval",
)
_NUMBERS = (
    *_INTEGERS,
    "temperature",
    "top_p",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
)
_BOOLEANS = ("ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim")


def _take_grammar(values: dict[str, Any]) -> Grammar | None:
    """Removes the grammar from the values of a request; an empty one means none."""
    given = {kind: values.pop(kind, "") for kind in KINDS}
    kinds = [kind for kind in KINDS if given[kind] != ""]
    if not kinds:
        return None
    if len(kinds) > 1:
        raise InvalidRequest(f"give at most one of {', '.join(KINDS)}")
    try:
        return Grammar.make(kinds[0], given[kinds[0]])
    except ValueError as error:
        raise InvalidRequest(f"sampling_params.{error}") from None


def _reject_strings(values: dict[str, Any]) -> None:
    """Lax conversion would read "1" as 1 and true as 1; a client that sends those is mistaken."""
    for key in _NUMBERS:
        value = values.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise InvalidRequest(f"sampling_params.{key} must be a number")
    for key in _BOOLEANS:
        if key in values and not isinstance(values[key], bool):
            raise InvalidRequest(f"sampling_params.{key} must be true or false")
    for key in ("stop", "stop_regex"):
        value = values.get(key)
        if value is not None and not (
            isinstance(value, list) and all(isinstance(item, str) for item in value)
        ):
            raise InvalidRequest(f"sampling_params.{key} must be a string or a list of strings")
    ids = values.get("stop_token_ids")
    if ids is not None and not (isinstance(ids, list) and all(type(item) is int for item in ids)):
        raise InvalidRequest("sampling_params.stop_token_ids must be a list of token ids")
    bias = values.get("logit_bias")
    if bias is not None:
        if not isinstance(bias, dict):
            raise InvalidRequest("sampling_params.logit_bias must map token ids to numbers")
        for key, value in bias.items():
            text = str(key)
            if not text.isascii() or not text.isdigit():
                raise InvalidRequest("sampling_params.logit_bias keys must be token ids")
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise InvalidRequest("sampling_params.logit_bias values must be numbers")


def _finite(value: float) -> bool:
    return math.isfinite(value)


def _need(condition: bool, name: str, expected: str) -> None:
    if not condition:
        raise InvalidRequest(f"{name} must be {expected}")
