"""Requests that wait for their grammar to be compiled, while the others run."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sglang_minima.grammar.loader import GrammarLoader
from sglang_minima.grammar.spec import Grammar
from sglang_minima.scheduler.request import Request

if TYPE_CHECKING:
    from sglang_minima.grammar.constraint import Constraint


class Parked:
    """Keeps requests until `take` finds their grammar; they hold nothing and cost nothing.

    Args:
        grammars: compiles grammars; None where none are followed.
    """

    def __init__(self, grammars: GrammarLoader | None) -> None:
        self._grammars = grammars
        self._requests: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def add(self, request: Request) -> None:
        """Takes a request in, whose sampling parameters have a grammar."""
        self._requests[request.rid] = request

    def remove(self, request: Request) -> None:
        """Forgets a request, if it is here."""
        self._requests.pop(request.rid, None)

    def take(
        self, run: Callable[[Request], None], refuse: Callable[[Request, str, int], None]
    ) -> None:
        """Gives away the requests whose grammar is there.

        Args:
            run: gets those that can start.
            refuse: gets those that cannot run at all, a sentence that says why, and the status.
        """
        for request in list(self._requests.values()):
            grammar = request.message.sampling.grammar
            assert grammar is not None
            try:
                constraint = self._constraint(grammar, request.stop.stop_ids)
            except ValueError as error:
                self.remove(request)
                refuse(request, str(error), 400)
                continue
            if constraint is not None:
                self.remove(request)
                request.follow(constraint)
                run(request)

    def _constraint(self, grammar: Grammar, stop_ids: frozenset[int]) -> Constraint | None:
        if self._grammars is None:
            raise ValueError("this engine follows no grammars")
        return self._grammars.constraint(grammar, stop_ids)
