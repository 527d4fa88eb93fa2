"""An engine under grammars in the test's own process, and what its outputs must match."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine_kit import EngineKit, make_args

from sglang_minima.grammar.loader import GrammarLoader
from sglang_minima.grammar.spec import Grammar
from sglang_minima.messages import FinishReason
from sglang_minima.runner.model_runner import ModelRunner
from sglang_minima.scheduler.scheduler import Scheduler
from sglang_minima.tokenization.tokenizer import Tokenizer

SMALL = {"page_size": 16, "recent_window": 32, "anchor_tokens": 16, "max_total_tokens": 4096}


def make_runner(model_dir: Path) -> ModelRunner:
    return ModelRunner(make_args(load_format="dummy", **SMALL), str(model_dir))


@dataclass
class GrammarKit(EngineKit):
    """An `EngineKit` whose scheduler follows grammars."""

    loader: GrammarLoader = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        assert self.tokenizer is not None
        eos = self.tokenizer.eos_token_ids
        self.loader = GrammarLoader(self.tokenizer, eos, wake=lambda: None)
        self.scheduler = Scheduler(
            self.args, self.runner, self.cache, self.tokenizer, eos, self._collect, self.loader
        )

    @classmethod
    def start(cls, runner: Any, model_dir: Path, **settings: Any) -> GrammarKit:
        args = make_args(load_format="dummy", **(SMALL | settings))
        return cls(args, runner, Tokenizer.load(model_dir))

    def ask(self, grammar: Grammar | None, prompt: str = "Say it:", **sampling: Any) -> str:
        """Queues a sampled request; returns its id."""
        assert self.tokenizer is not None
        defaults = {"temperature": 1.0, "max_new_tokens": 400, "grammar": grammar}
        return self.submit(self.tokenizer.encode(prompt), **(defaults | sampling))

    def drain(self, verify: bool = False) -> None:
        """Steps until nothing runs, waits for room, or waits for a grammar."""
        while self.scheduler.running or self.scheduler.waiting:
            if not self.scheduler.busy:
                time.sleep(0.001)
            self.step()

    def text(self, rid: str) -> str:
        """What a finished request wrote, without the token that ended it."""
        assert self.tokenizer is not None
        return self.tokenizer.decode(self.tokens(rid), skip_special_tokens=True)

    def finish(self, rid: str) -> FinishReason:
        finish = self.last(rid).finish
        assert finish is not None
        return finish
