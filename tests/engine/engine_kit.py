"""An engine in the test's own process: real model, cache and scheduler, no sockets."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minima_radix import check
from sglang_minima.cache.prefix_cache import PrefixCache
from sglang_minima.messages import GenerateRequest, TokenOutput
from sglang_minima.runner.model_runner import ModelRunner
from sglang_minima.sampling_params import SamplingParams
from sglang_minima.scheduler.scheduler import Scheduler
from sglang_minima.server_args import ServerArgs
from sglang_minima.tokenization.tokenizer import Tokenizer


@dataclass
class EngineKit:
    """Drives a scheduler step by step."""

    args: ServerArgs
    runner: ModelRunner
    tokenizer: Tokenizer | None = None
    outputs: dict[str, list[TokenOutput]] = field(default_factory=dict)
    _count: int = 0

    def __post_init__(self) -> None:
        arena = self.runner.allocate(self.args)
        # Whatever is read without having been written must show.
        arena.buffer.fill_(0xFF)
        self.runner.attach(arena)
        self.cache = PrefixCache(self.args, arena)
        eos = frozenset() if self.tokenizer is None else self.tokenizer.eos_token_ids
        self.scheduler = Scheduler(
            self.args, self.runner, self.cache, self.tokenizer, eos, self._collect
        )

    def _collect(self, batch: list[TokenOutput]) -> None:
        for output in batch:
            self.outputs.setdefault(output.rid, []).append(output)

    def submit(
        self, ids: list[int], *, message: dict[str, Any] | None = None, **sampling: Any
    ) -> str:
        """Queues one greedy request (unless a temperature is given); returns its id."""
        self._count += 1
        rid = f"r{self._count}"
        params = SamplingParams(**{"temperature": 0.0, **sampling})
        self.scheduler.add(GenerateRequest(rid, list(ids), params, **(message or {})))
        return rid

    def step(self) -> None:
        # The sampler of one kit must see its own arena when several kits share a runner.
        self.runner.attach(self.cache.arena)
        self.scheduler.step()

    def drain(self, verify: bool = False) -> None:
        """Steps until nothing runs or waits."""
        steps = 0
        while self.scheduler.busy:
            self.step()
            if verify:
                check(self.cache.lifecycle)
            steps += 1
            assert steps < 200_000, "the scheduler makes no progress"

    def preempt_last(self) -> None:
        """Takes the pages of the running request that was admitted last."""
        scheduler = self.scheduler
        scheduler._reservations.preempt(scheduler._queues.running[-1])

    def settle(self) -> None:
        """Works the retier backlog off."""
        while self.cache.controller.step(64):
            pass

    def tokens(self, rid: str) -> list[int]:
        return [token for output in self.outputs[rid] for token in output.new_ids]

    def last(self, rid: str) -> TokenOutput:
        return self.outputs[rid][-1]

    def generate(self, prompts: list[list[int]], **sampling: Any) -> list[list[int]]:
        """Runs prompts together to the end; returns their output ids."""
        rids = [self.submit(prompt, **sampling) for prompt in prompts]
        self.drain()
        return [self.tokens(rid) for rid in rids]

    def check_idle(self) -> None:
        """All invariants, and: every page in use is in the tree."""
        assert not self.scheduler.busy
        check(self.cache.lifecycle)
        in_use = sum(kind.pages_used for kind in self.cache.pool.stats().kinds.values())
        in_tree = 0 if self.cache.tree is None else self.cache.tree.total_pages
        assert in_use == in_tree


def make_args(**settings: Any) -> ServerArgs:
    return ServerArgs(**{"dtype": "float32", "quantization": "none", "random_seed": 1, **settings})


def make_runner(model_dir: Path | str) -> ModelRunner:
    return ModelRunner(make_args(), str(model_dir))


def deterministic_kit(runner: ModelRunner, **settings: Any) -> EngineKit:
    """A cache of small pages, most of them Stale, in which nothing may show in the output."""
    small = {"page_size": 16, "recent_window": 32, "anchor_tokens": 16, "max_total_tokens": 8192}
    return EngineKit(make_args(deterministic_cache=True, **(small | settings)), runner)
