"""`GrammarLoader`: compiles accepted grammars in the scheduler process, beside its batches."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from sglang_minima.durations import Durations
from sglang_minima.grammar.failed import AMBIGUOUS, FailedGrammars
from sglang_minima.grammar.spec import Grammar
from sglang_minima.tokenization.tokenizer import Tokenizer

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar

    from sglang_minima.grammar.compiler import GrammarCompiler
    from sglang_minima.grammar.constraint import Constraint

MAX_ENTRIES = 256
MAX_BYTES = 256 << 20
_NICENESS = 10
"""The model goes first: where cores are few, a grammar waits for it and not the other way."""


class GrammarLoader:
    """A cache of compiled grammars, filled by one thread. `GrammarChecker` has accepted what comes
    here, so the work is bounded.

    Args:
        tokenizer: of the model.
        eos_ids: tokens that end a sequence.
        wake: called in the thread when a grammar is there, to wake a scheduler that has nothing
            else to do.
    """

    def __init__(
        self, tokenizer: Tokenizer, eos_ids: frozenset[int], wake: Callable[[], None]
    ) -> None:
        self._tokenizer = tokenizer
        self._eos_ids = eos_ids
        self._wake = wake
        self._compiled: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()
        self._bytes = 0
        self._loading: dict[Grammar, Future[CompiledGrammar]] = {}
        self._failed = FailedGrammars()
        self._thread = ThreadPoolExecutor(1, "grammar", initializer=_give_way)
        self._compiler: GrammarCompiler | None = None
        self.followed = 0
        """Sequences that got a grammar."""
        self.found = 0
        """... for which nothing had to be compiled."""
        self.compilations = Durations()

    def constraint(self, grammar: Grammar, stop_ids: frozenset[int]) -> Constraint | None:
        """A new constraint at the start of a grammar; None while the thread compiles that.

        Args:
            grammar: what the sequence must match.
            stop_ids: tokens at which the request ends. Special ones of them may also end the
                grammar, as EOS may; ordinary ones are text, which only the grammar allows.

        Raises:
            ValueError: it cannot be compiled, or was too slow to follow before.
        """
        if grammar in self._failed:
            raise ValueError(AMBIGUOUS)
        known = grammar in self._compiled
        compiled = self._get(grammar)
        if compiled is None:
            return None
        self.followed += 1
        self.found += known
        from sglang_minima.grammar.constraint import Constraint

        stops = self._eos_ids | (stop_ids & self._tokenizer.special_ids)
        return Constraint(compiled, stops, grammar, self._failed)

    def leave(self, grammar: Grammar) -> None:
        """Nobody waits for a grammar any more: it is not compiled, unless that has begun."""
        future = self._loading.get(grammar)
        if future is not None and future.cancel():
            del self._loading[grammar]

    def collect(self) -> None:
        """Keeps what was compiled for requests that have left meanwhile, within the bounds of the
        cache, and drops what failed."""
        for grammar, future in list(self._loading.items()):
            if future.done():
                del self._loading[grammar]
                if future.exception() is None:
                    self._keep(grammar, future.result())

    def snapshot(self) -> dict[str, Any]:
        """Counters by name."""
        return {
            "followed": self.followed,
            "found": self.found,
            "compilations": self.compilations.snapshot(),
        }

    def _get(self, grammar: Grammar) -> CompiledGrammar | None:
        compiled = self._compiled.get(grammar)
        if compiled is not None:
            self._compiled.move_to_end(grammar)
            return compiled
        future = self._loading.get(grammar)
        if future is None:
            self._loading[grammar] = future = self._thread.submit(self._load, grammar)
            future.add_done_callback(self._loaded)
        if not future.done():
            return None
        del self._loading[grammar]
        compiled = future.result()
        self._keep(grammar, compiled)
        return compiled

    def _loaded(self, future: Future[CompiledGrammar]) -> None:
        if not future.cancelled():
            self._wake()

    def _load(self, grammar: Grammar) -> CompiledGrammar:
        # Imported here: most servers never need it, and it takes a second.
        from sglang_minima.grammar.compiler import GrammarCompiler, vocabulary

        if self._compiler is None:
            self._compiler = GrammarCompiler(vocabulary(self._tokenizer, self._eos_ids))
        started = time.perf_counter()
        try:
            return self._compiler.compile(grammar)
        finally:
            self.compilations.observe(time.perf_counter() - started)

    def _keep(self, grammar: Grammar, compiled: CompiledGrammar) -> None:
        """Adds an entry; the oldest ones go. Sequences that follow them keep them alive."""
        self._compiled[grammar] = compiled
        self._bytes += compiled.memory_size_bytes
        while len(self._compiled) > MAX_ENTRIES or self._bytes > MAX_BYTES:
            _, dropped = self._compiled.popitem(last=False)
            self._bytes -= dropped.memory_size_bytes


def _give_way() -> None:
    if sys.platform == "linux":
        # Linux has a niceness for every thread.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
