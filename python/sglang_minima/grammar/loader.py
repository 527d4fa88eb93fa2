"""`GrammarLoader`: compiles accepted grammars in the scheduler process, beside the running batch."""

from __future__ import annotations

import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from sglang_minima.grammar.spec import Grammar
from sglang_minima.tokenization.tokenizer import Tokenizer

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar

    from sglang_minima.grammar.compiler import GrammarCompiler

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
        self._thread = ThreadPoolExecutor(1, "grammar", initializer=_give_way)
        self._compiler: GrammarCompiler | None = None

    def get(self, grammar: Grammar) -> CompiledGrammar | None:
        """The compiled grammar; None while the thread is at work on it.

        Raises:
            GrammarError: it cannot be compiled.
        """
        compiled = self._compiled.get(grammar)
        if compiled is not None:
            self._compiled.move_to_end(grammar)
            return compiled
        future = self._loading.get(grammar)
        if future is None:
            self._loading[grammar] = future = self._thread.submit(self._load, grammar)
            future.add_done_callback(lambda _: self._wake())
        if not future.done():
            return None
        del self._loading[grammar]
        compiled = future.result()
        self._keep(grammar, compiled)
        return compiled

    def _load(self, grammar: Grammar) -> CompiledGrammar:
        # Imported here: most servers never need it, and it takes a second.
        from sglang_minima.grammar.compiler import GrammarCompiler, vocabulary

        if self._compiler is None:
            self._compiler = GrammarCompiler(vocabulary(self._tokenizer, self._eos_ids))
        return self._compiler.compile(grammar)

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
