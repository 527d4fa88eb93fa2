"""What the entrypoints hand to the tokenizer manager."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from sglang_minima.sampling_params import InvalidRequest, SamplingParams

MAX_KEY_LENGTH = 1024
"""Characters of `extra_key` and of `cache_salt`: each travels with every sequence of a call."""


class Bounds(NamedTuple):
    """What no call can exceed; compared with the lengths of its lists before anything is made of
    them, because a body may hold millions of entries."""

    sequences: int
    """That the server takes at a time."""
    context: int
    """Tokens of a sequence."""

    def check(self, body: dict[str, Any]) -> None:
        """Raises `InvalidRequest` for a body with too many prompts, token ids or messages."""
        for name in ("text", "input_ids", "prompt"):
            value = body.get(name)
            if not isinstance(value, list) or not value:
                continue
            if isinstance(value[0], int):
                self._check_ids(value)
                continue
            if len(value) > self.sequences:
                raise InvalidRequest(too_many_sequences(len(value), self.sequences))
            for item in value:
                if isinstance(item, list):
                    self._check_ids(item)
        messages = body.get("messages")
        if isinstance(messages, list) and len(messages) > self.context:
            # Each takes a token at least.
            raise InvalidRequest(
                f"messages has {len(messages)} entries, the context holds {self.context} tokens"
            )

    def _check_ids(self, ids: list[Any]) -> None:
        if len(ids) >= self.context:
            raise InvalidRequest(prompt_too_long(str(len(ids)), self.context))


def too_many_sequences(count: int, limit: int) -> str:
    """The sentence about a call of more sequences than the server takes."""
    return f"the call asks for {count} sequences, the server takes {limit} at a time"


def prompt_too_long(tokens: str, context: int) -> str:
    """The sentence about a prompt that leaves no room for an output."""
    return (
        f"the prompt has {tokens} tokens, but the context holds {context} tokens together with "
        "the output"
    )


@dataclass(frozen=True)
class PromptInput:
    """One prompt of a call, before it is tokenised and fanned out to its n samples."""

    prompt: str | list[int]
    """Text, or token ids."""
    sampling: SamplingParams
    rid: str | None = None
    salt: str | None = None
    priority: int = 0
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    token_ids_logprob: list[int] | None = None
    return_text_in_logprobs: bool = False


def namespace_of(extra_key: str | None, cache_salt: str | None) -> str | None:
    """The prefix-cache namespace of a request; different pairs never give the same one."""
    if extra_key is None and cache_salt is None:
        return None
    for name, key in (("extra_key", extra_key), ("cache_salt", cache_salt)):
        if key is not None and len(key) > MAX_KEY_LENGTH:
            raise InvalidRequest(f"{name} must have at most {MAX_KEY_LENGTH} characters")
    return msgspec.json.encode([extra_key, cache_salt]).decode()


def check_token_ids(ids: list[int], vocab_size: int, name: str) -> None:
    """Raises `InvalidRequest` when an id is outside the vocabulary."""
    for token in ids:
        if not 0 <= token < vocab_size:
            raise InvalidRequest(f"{name} holds {token}, which is not in [0, {vocab_size})")
