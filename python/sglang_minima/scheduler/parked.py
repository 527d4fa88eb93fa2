"""Requests that wait for their grammar to be compiled, while the others run."""

from __future__ import annotations

from collections.abc import Iterator

from sglang_minima.grammar.loader import GrammarLoader
from sglang_minima.scheduler.request import Request


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

    def take(self) -> Iterator[tuple[Request, str | None]]:
        """Requests that can run now, at the start of their grammar; with a sentence that says why
        they cannot run at all, if so."""
        for request in list(self._requests.values()):
            problem = self._begin(request)
            if problem is not None or request.row.constraint is not None:
                self.remove(request)
                yield request, problem

    def _begin(self, request: Request) -> str | None:
        grammar = request.message.sampling.grammar
        assert grammar is not None
        if self._grammars is None:
            return "this engine follows no grammars"
        try:
            request.row.constraint = self._grammars.constraint(grammar, request.stop.stop_ids)
        except ValueError as error:
            return str(error)
        return None
