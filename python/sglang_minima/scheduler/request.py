"""One sequence on its way through the scheduler."""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from minima_radix import Namespace, RequestTable
from sglang_minima.messages import FinishReason, GenerateRequest, LogProbs, TokenOutput
from sglang_minima.runner.sampling import SamplingRow
from sglang_minima.scheduler.stopping import StopMatcher

if TYPE_CHECKING:
    from sglang_minima.grammar.constraint import Constraint


@dataclass(eq=False)
class Request:
    """State of one sequence.

    Token counts: `tokens` are the prompt and all sampled tokens. `written` of them have their KV
    in the pages of `table`; the rest (`pending`) must still run through the model. A decode step
    has exactly one pending token: the one sampled last.
    """

    message: GenerateRequest
    holder: int
    """The id under which the page pool knows this request."""
    namespace: Namespace
    stop: StopMatcher
    sampling_seed: int
    tokens: array[int] = field(init=False)
    prompt_len: int = field(init=False)
    row: SamplingRow = field(init=False)
    table: RequestTable | None = None
    """The block table while the request holds pages (running), else None (waiting)."""
    written: int = 0
    room: int = 0
    """Tokens that the pages of `table` hold."""
    retier_cursor: int = 0
    """Pages before this position have been handed to the tier controller."""
    observe_at: int = 0
    """The tier controller has nothing to see before this many tokens are written."""
    cached_tokens: int = 0
    """Prompt tokens that came from the cache at the first admission."""
    cached_by_tier: dict[str, int] = field(default_factory=dict)
    prefilled: bool = False
    """True once the prompt has been computed to its end (a first token exists)."""
    preemptions: int = 0
    overtaken: int = 0
    """Later requests of its priority that were admitted while it waited."""
    stalls: int = 0
    """Times it found no room although it was alone."""
    finish: FinishReason | None = None
    arrival: float = field(default_factory=time.time)
    queue_seconds: float | None = None
    """Time from arrival to the first admission."""
    first_token_time: float = 0.0
    # What the next message to the detokenizer carries.
    unsent: list[int] = field(default_factory=list)
    unsent_logprobs: LogProbs | None = None
    input_logprobs: LogProbs | None = None
    reply: TokenOutput | None = None
    """What its messages have in common, once the first of them is made."""
    interval: int = field(init=False)
    """Tokens of a message while it streams."""

    def __post_init__(self) -> None:
        self.tokens = array("i", self.message.input_ids)
        self.prompt_len = len(self.tokens)
        self.interval = self.message.sampling.stream_interval
        self.row = SamplingRow(
            self.message.sampling,
            self.sampling_seed,
            self.tokens,
            self.prompt_len,
            self.stop.stop_ids,
        )

    def follow(self, constraint: Constraint) -> None:
        """Puts the sequence under a grammar, before its first token."""
        self.row.constraint = self.stop.constraint = constraint

    @property
    def rid(self) -> str:
        return self.message.rid

    @property
    def held_table(self) -> RequestTable:
        """The block table of a running request."""
        assert self.table is not None, f"request {self.rid} holds no pages"
        return self.table

    @property
    def output_len(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def pending(self) -> int:
        return len(self.tokens) - self.written

    @property
    def wants_input_logprobs(self) -> bool:
        return self.message.return_logprob and self.message.logprob_start_len >= 0

    @property
    def reuse_limit(self) -> int:
        """Most tokens the prefix match may cover, so that every logit asked for is computed."""
        limit = len(self.tokens) - 1
        # The log-probability of a token comes from the position before it.
        wanted = self.next_input_logprob
        return limit if wanted is None else min(limit, max(0, wanted - 1))

    @property
    def next_input_logprob(self) -> int | None:
        """Position of the first prompt token whose log-probability is asked for and not known
        yet; None when there is none. A preemption may have left some known and others not."""
        if not self.wants_input_logprobs:
            return None
        known = 0 if self.input_logprobs is None else len(self.input_logprobs.tokens)
        wanted = self.message.logprob_start_len + known
        return wanted if wanted < self.prompt_len else None
