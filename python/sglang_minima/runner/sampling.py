"""Samples the next token of every row of a batch, vectorised over the rows.

Each row draws one uniform number from a counter-based hash of (its seed, its output position), so
a sample depends neither on the batch around it nor on preemptions: the same seed gives the same
tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from minima_kernels.upload import upload
from sglang_minima.messages import LogProb, LogProbs
from sglang_minima.runner.cut import NO_TOKEN as NO_TOKEN
from sglang_minima.runner.cut import Cut, draw_cut
from sglang_minima.runner.token_masks import apply_masks, fill_masks
from sglang_minima.sampling_params import SamplingParams

if TYPE_CHECKING:
    from sglang_minima.grammar.constraint import Constraint

_MASK = (1 << 64) - 1


@dataclass(eq=False)
class SamplingRow:
    """What sampling must know about one sequence; one object for its whole life.

    It sees the sequence grow: nothing is copied for the tokens of which only the logits matter.
    """

    params: SamplingParams
    seed: int
    tokens: array[int]
    """Prompt and sampled ids."""
    prompt_len: int
    stop_ids: frozenset[int]
    """Ids that may not be sampled before min_new_tokens."""
    constraint: Constraint | None = None
    """The grammar that the sequence follows."""
    greedy: bool = field(init=False)
    penalised: bool = field(init=False)
    adjusted: bool = field(init=False)
    """Whether the logits of this row may have to be changed."""

    def __post_init__(self) -> None:
        params = self.params
        self.greedy = params.greedy
        self.penalised = bool(
            params.frequency_penalty or params.presence_penalty or params.repetition_penalty != 1
        )
        self.adjusted = bool(self.penalised or params.logit_bias or params.min_new_tokens)

    @property
    def plain(self) -> bool:
        """Whether a token is drawn from its logits as they are, whatever came before."""
        return not self.adjusted and self.constraint is None

    @property
    def output_len(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def output_ids(self) -> np.ndarray:
        """int32 ids sampled so far, a copy."""
        return np.array(self.tokens[self.prompt_len :], dtype=np.int32)

    @property
    def banned(self) -> frozenset[int]:
        """Ids that may not be sampled now."""
        early = self.output_len < self.params.min_new_tokens
        if self.constraint is None:
            return self.stop_ids if early else frozenset()
        # Where a grammar is complete but could go on, ignore_eos asks to go on.
        ends = self.constraint.stop_ids if self.params.ignore_eos else frozenset()
        return ends | self.stop_ids if early else ends


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends only on its arguments (SplitMix64 finaliser)."""
    value = (seed * 0x9E3779B97F4A7C15 + (position + 1) * 0xD1B54A32D192ED03) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return ((value ^ (value >> 31)) >> 11) / (1 << 53)


def sample(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    """Samples one token a row, and waits for it.

    Args:
        logits: float32 [len(rows), vocab]; not modified.
        rows: the sequences, in the order of the logits.

    Returns:
        Token ids, one a row; `NO_TOKEN` for rows with a NaN, or whose greatest logit is infinite.
    """
    tokens: list[int] = draw(_adjust(logits, rows), rows).tolist()
    return tokens


def draw(logits: torch.Tensor, rows: Sequence[SamplingRow], ahead: int = 0) -> torch.Tensor:
    """Samples one token a row from logits as they are; waits for nothing.

    Args:
        logits: float32 [len(rows), vocab]; not modified.
        ahead: tokens that each sequence has beyond those its row knows of.

    Returns:
        int64 [len(rows)] on the device of the logits, as `sample`.
    """
    random_rows = [i for i, row in enumerate(rows) if not row.greedy]
    cuts = [_cut(rows[i], ahead) for i in random_rows]
    if len(random_rows) == len(rows):
        return draw_cut(logits, cuts)
    tokens = _argmax(logits)
    if random_rows:
        index = upload(random_rows, torch.int64, logits.device)
        tokens.index_copy_(0, index, draw_cut(logits.index_select(0, index), cuts))
    return tokens


def _cut(row: SamplingRow, ahead: int) -> Cut:
    params = row.params
    point = uniform(row.seed, row.output_len + ahead)
    return Cut(params.temperature, point, params.top_k, params.top_p, params.min_p)


def _argmax(logits: torch.Tensor) -> torch.Tensor:
    """The first of the greatest logits of each row; what is no number counts as the greatest."""
    if logits.device.type == "cpu":
        # torch goes through a row one by one: 7x slower than numpy on AVX2.
        values = logits.numpy()
        first = values.argmax(-1)
        greatest = np.take_along_axis(values, first[:, None], -1)[:, 0]
        return torch.from_numpy(np.where(np.isfinite(greatest), first, NO_TOKEN))
    top = logits.max(dim=-1)
    return top.indices.masked_fill(~top.values.isfinite(), NO_TOKEN)


def _adjust(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Penalties, biases, bans and grammars; copies the logits only when a row needs a change."""
    device = logits.device
    constrained = [i for i, row in enumerate(rows) if row.constraint is not None]
    changed = bool(constrained)
    if changed:
        logits = logits.clone()
    for i, row in enumerate(rows):
        if not row.adjusted:
            continue
        params = row.params
        # A grammar bans them itself, unless nothing else is left.
        banned = row.banned if row.constraint is None else frozenset()
        if not (row.penalised or params.logit_bias or banned):
            continue
        if not changed:
            logits = logits.clone()
            changed = True
        if row.penalised:
            _penalise(logits[i], row)
        if params.logit_bias:
            ids = upload(list(params.logit_bias), torch.int64, device)
            logits[i, ids] += upload(list(params.logit_bias.values()), logits.dtype, device)
        if banned:
            logits[i].index_fill_(0, upload(sorted(banned), torch.int64, device), -torch.inf)
    if constrained:
        sources = [row.constraint for row in rows if row.constraint is not None]
        words = fill_masks(sources, [rows[i].banned for i in constrained], logits.shape[-1])
        apply_masks(logits, constrained, words)
    return logits


def _penalise(logits: torch.Tensor, row: SamplingRow) -> None:
    """Applies the three penalties to one row [vocab] in place (definitions as in OpenAI's API)."""
    params = row.params
    if params.repetition_penalty != 1:
        ids = upload(np.unique(np.array(row.tokens)), torch.int64, logits.device)
        values = logits[ids]
        penalty = params.repetition_penalty
        logits[ids] = torch.where(values > 0, values / penalty, values * penalty)
    if params.frequency_penalty or params.presence_penalty:
        seen, counts = np.unique(row.output_ids, return_counts=True)
        ids = upload(seen, torch.int64, logits.device)
        count = upload(counts, logits.dtype, logits.device)
        logits[ids] -= params.frequency_penalty * count + params.presence_penalty


def log_probs_of(
    logits: torch.Tensor,
    targets: Sequence[int | None],
    top: int,
    chosen: Sequence[int] | None,
) -> LogProbs:
    """Log-probabilities under the model's own distribution (temperature 1, no penalties).

    Args:
        logits: float32 [n, vocab].
        targets: the token that follows each row.
        top: how many of the likeliest tokens to list.
        chosen: ids whose log-probability is wanted at every row.

    Returns:
        One entry a row.
    """
    logp = torch.log_softmax(logits, dim=-1)
    ids = upload([t or 0 for t in targets], torch.int64, logits.device).unsqueeze(-1)
    picked = logp.gather(-1, ids).squeeze(-1).tolist()
    tokens: list[tuple[float | None, int]] = [
        (value, int(target or 0)) for value, target in zip(picked, targets, strict=True)
    ]
    tops: list[list[LogProb] | None] | None = None
    if top:
        values, indices = logp.topk(min(top, logp.shape[-1]), dim=-1)
        tops = [
            list(zip(v, i, strict=True))
            for v, i in zip(values.tolist(), indices.tolist(), strict=True)
        ]
    chosens: list[list[LogProb] | None] | None = None
    if chosen:
        wanted = upload(chosen, torch.int64, logits.device)
        chosens = [
            list(zip(v, chosen, strict=True)) for v in logp.index_select(-1, wanted).tolist()
        ]
    return LogProbs(tokens, tops, chosens)
