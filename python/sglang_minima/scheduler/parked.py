"""Requests that wait for their grammar to be compiled, while the others run."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from sglang_minima.grammar.loader import GrammarLoader
from sglang_minima.grammar.spec import Grammar
from sglang_minima.scheduler.request import Request

if TYPE_CHECKING:
    from sglang_minima.grammar.constraint import Constraint

logger = logging.getLogger(__name__)


class Parked:
    """Keeps requests until `take` finds their grammar; they hold nothing and cost nothing.

    Args:
        grammars: compiles grammars; None where none are followed.
    """

    def __init__(self, grammars: GrammarLoader | None) -> None:
        self._grammars = grammars
        self._requests: dict[str, Request] = {}
        self._waiting: Counter[Grammar] = Counter()
        """Requests that wait for each grammar."""

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: Request) -> None:
        """Takes a request in, whose sampling parameters have a grammar."""
        self._requests[request.rid] = request
        self._waiting[_grammar(request)] += 1

    def remove(self, request: Request) -> None:
        """Forgets a request, if it is here, and its grammar if it alone waits for that."""
        if self._requests.pop(request.rid, None) is None:
            return
        grammar = _grammar(request)
        self._waiting[grammar] -= 1
        if not self._waiting[grammar]:
            del self._waiting[grammar]
            if self._grammars is not None:
                self._grammars.leave(grammar)

    def take(
        self, run: Callable[[Request], None], refuse: Callable[[Request, str, int], None]
    ) -> None:
        """Gives away the requests whose grammar is there.

        Args:
            run: gets those that can start.
            refuse: gets those that cannot run at all, a sentence that says why, and the status.
        """
        for request in list(self._requests.values()):
            try:
                constraint = self._constraint(_grammar(request), request.stop.stop_ids)
            except ValueError as error:
                self.remove(request)
                refuse(request, str(error), 400)
                continue
            except Exception as error:
                # Nothing in a grammar may end the scheduler, and no other request.
                logger.exception("request %s: its grammar cannot be loaded", request.rid)
                self.remove(request)
                name = type(error).__name__
                refuse(request, f"the grammar cannot be loaded on this server: {name}", 500)
                continue
            if constraint is not None:
                self.remove(request)
                request.follow(constraint)
                run(request)
        if self._grammars is not None:
            self._grammars.collect()

    def _constraint(self, grammar: Grammar, stop_ids: frozenset[int]) -> Constraint | None:
        if self._grammars is None:
            raise ValueError("this engine follows no grammars")
        return self._grammars.constraint(grammar, stop_ids)


def _grammar(request: Request) -> Grammar:
    grammar = request.message.sampling.grammar
    assert grammar is not None
    return grammar
