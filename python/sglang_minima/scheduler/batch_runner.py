"""Runs a batch to its end: when that returns, its tokens are known and sent."""

from __future__ import annotations

import torch

from sglang_minima.cache.prefix_cache import PrefixCache
from sglang_minima.messages import FinishReason
from sglang_minima.runner.batch import Work
from sglang_minima.runner.model_runner import ModelRunner
from sglang_minima.scheduler.launcher import Launcher, decode_rows
from sglang_minima.scheduler.logprobs import draw_tokens, record_prompt_rows
from sglang_minima.scheduler.outputs import Outputs
from sglang_minima.scheduler.request import Request


class BatchRunner:
    """Runs prompts and decode steps; `Overlap` is for decode steps that nobody waits for."""

    def __init__(
        self, cache: PrefixCache, runner: ModelRunner, launcher: Launcher, outputs: Outputs
    ) -> None:
        self._cache = cache
        self._runner = runner
        self._launcher = launcher
        self._outputs = outputs

    def run(self, works: list[tuple[Request, Work]], decodes: list[Request]) -> None:
        """Runs one batch, seals the pages that it filled, samples and sends.

        Args:
            works: several tokens each.
            decodes: the first pending token of each.
        """
        cache, logits = self._cache, self._runner.logits
        plain = not works and all(request.prefilled for request in decodes)
        output = self._launcher.run([work for _, work in works], decode_rows(decodes), plain)
        self._launcher.statistics.idle.end(plain)
        hidden = output.hidden
        last_rows: list[int] = []
        sampling: list[Request] = []
        row = 0
        for request, work in works:
            count = len(work.token_ids)
            if not request.prefilled and request.wants_input_logprobs:
                record_prompt_rows(request, logits, work.start, hidden[row : row + count])
            row += count
            cache.commit(request, count)
            if request.pending == 0:
                last_rows.append(row - 1)
                sampling.append(request)
        for request in decodes:
            if not request.prefilled and request.wants_input_logprobs:
                record_prompt_rows(request, logits, request.written, hidden[row : row + 1])
            if request.written + 1 == len(request.tokens):
                last_rows.append(row)
                sampling.append(request)
            row += 1
        cache.commit_rows(decodes)
        if sampling:
            self._sample(sampling, output.logits(last_rows))

    def _sample(self, requests: list[Request], logits: torch.Tensor) -> None:
        """Draws a token for each request, but for those that only wanted their prompt computed.

        Args:
            logits: float32 [len(requests), vocab].
        """
        drawing = [r for r in requests if r.prefilled or r.message.sampling.max_new_tokens > 0]
        if len(drawing) < len(requests):
            drawn = set(drawing)
            logits = logits[[i for i, r in enumerate(requests) if r in drawn]]
            for request in requests:
                if request not in drawn:
                    request.prefilled = True
                    self._outputs.end(request, FinishReason("length", 0))
        if drawing:
            self._outputs.take(list(zip(drawing, draw_tokens(drawing, logits), strict=True)))
