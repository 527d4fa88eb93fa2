"""Which requests there are, and where each stands: parked, waiting or running."""

from __future__ import annotations

from sglang_minima.grammar.loader import GrammarLoader
from sglang_minima.scheduler.parked import Parked
from sglang_minima.scheduler.request import Request


class Queues:
    """Every request of a scheduler, in one of three places.

    Holds no pages: who moves a running request out of here releases what it holds.

    Args:
        grammars: compiles grammars; None where none are followed.
    """

    def __init__(self, grammars: GrammarLoader | None) -> None:
        self._requests: dict[str, Request] = {}
        self.parked = Parked(grammars)
        """Wait for their grammar."""
        self.waiting: dict[str, Request] = {}
        """Wait for room, by request id."""
        self.running: list[Request] = []
        """Hold pages; in order of admission."""
        self.refused_room: int | None = None
        """Tokens of room with which the first of the waiting was refused; None: not known, or a
        request has come or gone since."""

    def find(self, rid: str) -> Request | None:
        """The request of an id; None when there is none (any more)."""
        return self._requests.get(rid)

    def add(self, request: Request) -> None:
        """Takes in a new request."""
        self._requests[request.rid] = request
        if request.message.sampling.grammar is None:
            self.wait(request)
        else:
            self.parked.add(request)

    def wait(self, request: Request) -> None:
        """Puts a request that runs nowhere among those that wait for room."""
        self.waiting[request.rid] = request
        self.refused_room = None

    def start(self, request: Request) -> None:
        """A waiting request has been admitted."""
        del self.waiting[request.rid]
        self.running.append(request)

    def suspend(self, request: Request) -> None:
        """A running request has to wait again."""
        self.running.remove(request)
        self.wait(request)

    def remove(self, request: Request) -> None:
        """Forgets a request, wherever it is."""
        if request.table is not None:
            self.running.remove(request)
        self.waiting.pop(request.rid, None)
        self.parked.remove(request)
        self.refused_room = None
        del self._requests[request.rid]
