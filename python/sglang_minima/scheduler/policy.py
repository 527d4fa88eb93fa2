"""Which waiting request is admitted next, and which must wait for a twin."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from sglang_minima.scheduler.request import Request

_LPM_LIMIT = 128
"""With more requests waiting, order by arrival: matching all of them every step would cost more
than the better order saves."""


def order_waiting(
    waiting: Iterable[Request], policy: str, match_length: Callable[[Request], int]
) -> list[Request]:
    """Waiting requests in the order of admission.

    Preempted requests come first (their users have already seen tokens), then higher priority,
    then the policy: `lpm` = longest cached prefix, `fcfs` = arrival.
    """
    requests = list(waiting)
    lpm = policy == "lpm" and len(requests) <= _LPM_LIMIT

    def key(request: Request) -> tuple[bool, int, int, float]:
        cached = match_length(request) if lpm else 0
        return (request.preemptions == 0, -request.message.priority, -cached, request.arrival)

    return sorted(requests, key=key)


def twin_ahead(
    request: Request, prefilling: Iterable[Request], cached: int, page_size: int
) -> bool:
    """True when a request now in prefill is about to seal the next page that `request` needs.

    `fork()` and shared system prompts send the same prefix several times at once, before any of
    it is cached. The first one computes it; the others wait and then find it in the tree.

    Args:
        request: a waiting request.
        prefilling: admitted requests whose prompt is not computed to its end.
        cached: tokens of `request` that whole cached pages cover now.
        page_size: tokens in a page.
    """
    end = cached // page_size * page_size + page_size
    if end > request.reuse_limit:
        return False
    wanted = request.tokens[:end]
    for other in prefilling:
        # `written` is what the tree has already got from it; only pages to come are worth a wait.
        if (
            other.namespace == request.namespace
            and other.written < end <= len(other.tokens)
            and other.tokens[:end] == wanted
        ):
            return True
    return False
