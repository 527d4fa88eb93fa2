"""Messages between the processes: `msgspec` structs in MessagePack over zmq (see `channels`).

    HTTP server + tokenizer  --ToScheduler-->  scheduler  --TokenBatch-->  detokenizer
              ^                                    |                            |
              +-------------- ControlReply --------+---------- TextBatch -------+

A struct is a fact that one process tells another; nothing here has behaviour.
"""

from __future__ import annotations

from typing import Any

import msgspec

from sglang_minima.sampling_params import SamplingParams

LogProb = tuple[float, int]
"""(log-probability, token id)"""


class GenerateRequest(msgspec.Struct, tag=True, array_like=True):
    """One sequence to generate (batches and n > 1 are fanned out before this)."""

    rid: str
    input_ids: list[int]
    sampling: SamplingParams
    salt: str | None = None
    """Namespace of the prefix cache: prompts with different salts never share pages."""
    lora: str | None = None
    priority: int = 0
    return_logprob: bool = False
    logprob_start_len: int = -1
    """First prompt position whose log-probability is asked for; -1 = output tokens only."""
    top_logprobs_num: int = 0
    token_ids_logprob: list[int] | None = None
    seed_offset: int = 0
    """Index of this sample among the n samples of a prompt; makes seeded samples differ."""


class AbortRequest(msgspec.Struct, tag=True, array_like=True):
    """Stop a request, wherever it is. Unknown rids are ignored (the request has just finished)."""

    rid: str


class ControlRequest(msgspec.Struct, tag=True, array_like=True):
    """Asks the scheduler for something other than generation; answered by one `ControlReply`."""

    id: str
    method: str
    """"flush_cache", "info", "load", "check" (of all invariants, between two steps), "ping", or for
    the dashboard "survey" (of the tree; answered when it is complete) or "probe" (of a prompt)."""
    arguments: dict[str, Any] = {}


class Wake(msgspec.Struct, tag=True, array_like=True):
    """From a thread of the scheduler process itself: there is something to look at."""


ToScheduler = GenerateRequest | AbortRequest | ControlRequest | Wake


class ControlReply(msgspec.Struct, tag=True, array_like=True):
    """Answer to a `ControlRequest`."""

    id: str
    ok: bool
    value: Any = None


class FinishReason(msgspec.Struct, array_like=True):
    """Why a sequence ended."""

    type: str
    """"stop", "length" or "abort"."""
    matched: int | str | None = None
    """The stop token id, stop string or stop pattern that ended it."""
    message: str = ""
    status_code: int = 0
    """HTTP status for "abort"."""


class LogProbs(msgspec.Struct, array_like=True):
    """Log-probabilities of consecutive tokens; all lists have one entry a token."""

    tokens: list[tuple[float | None, int]]
    """(log-probability of this token, its id); None where nothing precedes the token."""
    top: list[list[LogProb] | None] | None = None
    chosen: list[list[LogProb] | None] | None = None
    """For the ids of `token_ids_logprob`."""


class TokenOutput(msgspec.Struct, array_like=True):
    """What one step (or the end) of a request produced."""

    rid: str
    new_ids: list[int]
    finish: FinishReason | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    cached_by_tier: dict[str, int] = {}
    """Cached tokens of the prompt by page kind, e.g. {"fp8": 64, "tq3": 1408}."""
    preemptions: int = 0
    input_logprobs: LogProbs | None = None
    """Sent once, with the first output."""
    output_logprobs: LogProbs | None = None
    """For `new_ids`."""
    prompt_tail: list[int] | None = None
    """With the first output: the last prompt ids, as context for incremental decoding."""
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    first_token_time: float = 0.0
    """time.time() when the first token was sampled (0 before)."""
    queue_seconds: float | None = None
    """Time from arrival at the scheduler to the first admission; None before."""
    prefill_seconds: float | None = None
    """Time from there to the first token; None before."""
    stop: list[str] = []
    """With the first output: the stop strings, whose possible beginnings are not streamed."""


class TokenBatch(msgspec.Struct, tag=True, array_like=True):
    """Scheduler to detokenizer."""

    outputs: list[TokenOutput]


class TextOutput(msgspec.Struct, array_like=True):
    """Detokenizer to the HTTP process: the token output with its text delta."""

    text: str
    """New text since the last output of this rid (never half a character)."""
    output: TokenOutput
    trim: int = 0
    """Characters to take back from the end of the earlier text before `text` is added: a match of
    a stop pattern may begin in text that has already been sent."""


class TextBatch(msgspec.Struct, tag=True, array_like=True):
    outputs: list[TextOutput]


ToFrontend = TextBatch | ControlReply
