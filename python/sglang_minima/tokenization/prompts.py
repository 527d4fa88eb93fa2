"""From the prompts of a call to what is sent for each of their sequences."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from sglang_minima.messages import GenerateRequest
from sglang_minima.sampling_params import InvalidRequest, SamplingParams
from sglang_minima.tokenization.inputs import PromptInput, check_token_ids, prompt_too_long
from sglang_minima.tokenization.state import RequestState
from sglang_minima.tokenization.tokenizer import Tokenizer

T = TypeVar("T")

_THREAD_CHARACTERS = 4096
"""Shorter texts are tokenised in the event loop: that takes less than a thread switch is worth."""
_PROBE_CHARACTERS_PER_TOKEN = 32
"""A text longer than the context by this factor is judged by its beginning first."""


@dataclass(frozen=True)
class ModelLimits:
    """What the HTTP process must know of the model."""

    vocab_size: int
    context_length: int
    max_total_tokens: int

    @property
    def longest_sequence(self) -> int:
        """Tokens that one sequence may have: the context, or what of it the arena holds."""
        return min(self.context_length, self.max_total_tokens)

    @classmethod
    def from_info(cls, info: dict[str, Any]) -> ModelLimits:
        """From what the scheduler reports when it is ready."""
        return cls(info["vocab_size"], info["context_length"], info["max_total_num_tokens"])


class Prompts:
    """Tokenises prompts, checks them against what the model can take, and fans them out."""

    def __init__(self, limits: ModelLimits, tokenizer: Tokenizer) -> None:
        self._limits = limits
        self._tokenizer = tokenizer
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="tokenize")

    def close(self) -> None:
        """Work that has not begun is given up."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def in_thread(self, characters: int, work: Callable[[], T]) -> T:
        """Runs tokenizer work: at once when it is short, else without blocking the loop."""
        if characters < _THREAD_CHARACTERS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def check(self, prompts: Sequence[PromptInput]) -> None:
        """Checks what needs no tokenizer.

        Raises:
            InvalidRequest: of the first prompt that cannot be served as it stands.
        """
        for prompt in prompts:
            if prompt.token_ids_logprob:
                check_token_ids(
                    prompt.token_ids_logprob, self._limits.vocab_size, "token_ids_logprob"
                )

    async def tokenize(self, prompts: Sequence[PromptInput]) -> list[list[int]]:
        """The token ids of each prompt.

        Raises:
            InvalidRequest: a prompt is empty, or has unknown ids, or too many of them.
        """
        return await self.in_thread(
            sum(len(prompt.prompt) for prompt in prompts),
            lambda: [self._token_ids(prompt.prompt) for prompt in prompts],
        )

    def refuse_overlong(self, text: str) -> None:
        """Judges a text of many megabytes by its beginning: it must not occupy the tokenizer only
        to be refused.

        Raises:
            InvalidRequest: the beginning alone fills the context.
        """
        probe = self._limits.context_length * _PROBE_CHARACTERS_PER_TOKEN
        if len(text) > 2 * probe:
            seen = len(self._tokenizer.encode(text[:probe]))
            if seen > self._limits.context_length:
                self._check_length(seen, "at least ")

    def samples(self, prompt: PromptInput, ids: list[int], group: str | None) -> list[RequestState]:
        """The n sequences of one prompt.

        Args:
            ids: of the prompt.
            group: the rid that a client gave to the whole batch.

        Raises:
            InvalidRequest: the prompt does not go with what is asked for.
        """
        sampling = self._clip(prompt.sampling, len(ids))
        start = prompt.logprob_start_len
        if prompt.return_logprob and start == -1 and sampling.max_new_tokens == 0:
            # Without output tokens, only the prompt's log-probabilities can be meant.
            start = 0
        if start > len(ids):
            raise InvalidRequest(
                f"logprob_start_len is {start}, but the prompt has {len(ids)} tokens"
            )
        decode_each = self._tokenizer.decode_each if prompt.return_text_in_logprobs else None
        states = []
        for sample in range(sampling.n):
            if prompt.rid is None:
                rid = uuid.uuid4().hex
            else:
                rid = prompt.rid if sampling.n == 1 else f"{prompt.rid}_{sample}"
            request = GenerateRequest(
                rid=rid,
                input_ids=ids,
                sampling=sampling,
                salt=prompt.salt,
                priority=prompt.priority,
                return_logprob=prompt.return_logprob,
                logprob_start_len=start,
                top_logprobs_num=prompt.top_logprobs_num,
                token_ids_logprob=prompt.token_ids_logprob,
                seed_offset=sample,
            )
            states.append(RequestState(request, group or prompt.rid, decode_each))
        return states

    def _clip(self, sampling: SamplingParams, prompt_tokens: int) -> SamplingParams:
        """Output limits that fit into the context after the prompt."""
        room = self._limits.context_length - prompt_tokens
        if sampling.max_new_tokens <= room:
            return sampling
        return msgspec.structs.replace(
            sampling, max_new_tokens=room, min_new_tokens=min(sampling.min_new_tokens, room)
        )

    def _token_ids(self, prompt: str | list[int]) -> list[int]:
        """Tokenises and checks one prompt."""
        if not isinstance(prompt, str):
            check_token_ids(prompt, self._limits.vocab_size, "input_ids")
            ids = prompt
        else:
            self.refuse_overlong(prompt)
            ids = self._tokenizer.encode(prompt)
        if not ids:
            raise InvalidRequest("the prompt is empty")
        self._check_length(len(ids))
        return ids

    def _check_length(self, tokens: int, precision: str = "") -> None:
        if tokens >= self._limits.context_length:
            raise InvalidRequest(
                prompt_too_long(f"{precision}{tokens}", self._limits.context_length)
            )
        if tokens > self._limits.max_total_tokens:
            raise InvalidRequest(
                f"the prompt has {tokens} tokens, but the KV arena holds "
                f"{self._limits.max_total_tokens} tokens"
            )
