"""What the entrypoints hand to the tokenizer manager."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from sglang_minima.sampling_params import InvalidRequest, SamplingParams


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
    return msgspec.json.encode([extra_key, cache_salt]).decode()


def check_token_ids(ids: list[int], vocab_size: int, name: str) -> None:
    """Raises `InvalidRequest` when an id is outside the vocabulary."""
    for token in ids:
        if not 0 <= token < vocab_size:
            raise InvalidRequest(f"{name} holds {token}, which is not in [0, {vocab_size})")
