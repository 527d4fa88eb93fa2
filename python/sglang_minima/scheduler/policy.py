"""Who comes next: which waiting request, which must wait for a twin, and who has to give way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from sglang_minima.cache.prefix_cache import PrefixCache
from sglang_minima.scheduler.request import Request

_LPM_LIMIT = 128
"""With more requests waiting, order by arrival: matching all of them every step would cost more
than the better order saves."""

_PATIENCE = 32
"""Requests that may be admitted before one that came earlier, because more of them is cached.
Without a bound a flood of prompts that share a prefix would keep another one out for ever."""

_CPU_CHUNK, _GPU_CHUNK = 512, 8192


def prefill_budget(chunked_prefill_size: int | None, device: str) -> int:
    """Prompt tokens of a step at most, by `--chunked-prefill-size`.

    By default as many as keep the device busy: more would only make decode steps wait longer.
    """
    if chunked_prefill_size is None:
        return _CPU_CHUNK if device == "cpu" else _GPU_CHUNK
    return chunked_prefill_size if chunked_prefill_size > 0 else 1 << 60


def order_waiting(
    waiting: Iterable[Request], policy: str, match_length: Callable[[Request], int]
) -> list[Request]:
    """Waiting requests in the order of admission.

    Preempted requests come first (their users have already seen tokens), then higher priority,
    then the policy: `lpm` = longest cached prefix, but by arrival those that were overtaken too
    often; `fcfs` = arrival.
    """
    requests = list(waiting)
    lpm = policy == "lpm" and len(requests) <= _LPM_LIMIT

    def key(request: Request) -> tuple[bool, int, bool, int, float]:
        patient = lpm and request.overtaken < _PATIENCE
        cached = match_length(request) if patient else 0
        return (
            request.preemptions == 0,
            -request.message.priority,
            patient,
            -cached,
            request.arrival,
        )

    return sorted(requests, key=key)


def note_overtaking(admitted: Request, waiting: Iterable[Request]) -> None:
    """Counts for those still waiting that a later one of their priority was admitted."""
    for request in waiting:
        if (
            request.arrival < admitted.arrival
            and request.message.priority == admitted.message.priority
        ):
            request.overtaken += 1


def next_victim(running: Sequence[Request]) -> Request:
    """Who is preempted when memory is short: the lowest priority, of those the last admitted."""
    return min(reversed(running), key=_priority)


def _priority(request: Request) -> int:
    return request.message.priority


def one_slow(running: list[Request]) -> list[Request]:
    """The running requests (a new list), of those with slow grammars only the first.

    Each of these may take much of a second for a token, and ends when it has used up its budget:
    together in one step, they would hold up all others for the sum of their times.
    """
    slow = [r for r in running if r.row.constraint is not None and r.row.constraint.slow]
    if len(slow) < 2:
        return running.copy()
    later = set(slow[1:])
    return [request for request in running if request not in later]


def next_chunk(request: Request, budget: int, cache: PrefixCache) -> int:
    """How many pending tokens of an admitted request run in the next step."""
    count = request.pending
    if not cache.deterministic:
        return count if count == 1 else min(count, budget)
    # Chunks on the page grid: page p is always computed as one chunk that reads the pages before
    # it in their sealed form, whoever computes it. A page that decode steps filled is computed
    # once more as such a chunk before it is sealed.
    committed, page_size = request.held_table.committed, cache.page_size
    if request.written - committed >= page_size:
        request.written = committed
    start = request.written
    end = start - start % page_size + page_size
    if request.prompt_len < end and len(request.tokens) <= end:
        # An open page that decoding fills: after a preemption token by token again.
        end = max(request.prompt_len, start + 1)
    return min(request.pending, end - start)


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
