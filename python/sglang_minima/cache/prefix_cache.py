"""The engine's cache: page ownership (`minima_radix`) joined to page bytes (`minima_kernels`)."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from minima_kernels import PageKind
from minima_kernels.transfer import copy_tokens
from minima_radix import (
    OutOfPages,
    PageKindSpec,
    PageLifecycle,
    PagePool,
    RadixTree,
    Sealed,
)
from sglang_minima.cache.arena import KVArena
from sglang_minima.cache.controller import TierController
from sglang_minima.durations import Durations
from sglang_minima.scheduler.request import Request
from sglang_minima.server_args import ServerArgs

MIN_COPY_TOKENS = 4
"""Copy-on-write touches every layer of a page; below this recomputing the tokens is cheaper."""


class PrefixCache:
    """Admits requests onto cached prefixes, gives them pages, seals and releases them."""

    def __init__(self, args: ServerArgs, arena: KVArena) -> None:
        geometry, profile = arena.geometry, arena.profile
        self.arena = arena
        self.page_size = geometry.page_size
        self.profile = profile
        specs = [PageKindSpec(kind.name, kind.granules(geometry)) for kind in profile.kinds]
        self.pool = PagePool(specs, arena.granules)
        self._slab_kinds: npt.NDArray[np.int8] = np.frombuffer(self.pool.slab_kinds, dtype=np.int8)
        self.tree = (
            None
            if args.disable_radix_cache
            else RadixTree(
                geometry.page_size, args.radix_eviction_policy, head_pages=profile.anchor_pages
            )
        )
        self.lifecycle = PageLifecycle(
            self.pool,
            self.tree,
            geometry.page_size,
            profile.recent.name,
            durable_quota_granules=int(args.cache_quota * arena.granules),
        )
        self.controller = TierController(self.lifecycle, arena)
        self.deterministic = args.deterministic_cache
        self.copied_tokens = 0
        self.evictions = Durations()
        """Of taking pages, where others had to be evicted for them."""
        self.kind_bytes: npt.NDArray[np.int64] = np.array(
            [kind.bytes_per_page(geometry) for kind in profile.kinds]
        )
        """Bytes of a page of each of `profile.kinds`: int64 [kinds]."""
        self._kind_index = {kind.name: index for index, kind in enumerate(profile.kinds)}

    @property
    def shares(self) -> bool:
        """Whether requests share pages at all."""
        return self.tree is not None

    @property
    def short_of_room(self) -> bool:
        """True when less than a quarter of the slabs is free. O(1)."""
        return 4 * self.pool.free_slabs < self._num_slabs

    @property
    def capacity_tokens(self) -> int:
        """Tokens of one sequence that fit whatever their tier: the arena filled with Recent pages.

        With two kinds one slab is left out, since each kind may have a slab that is partly full.
        """
        slabs = self._num_slabs - (1 if self.profile.compresses else 0)
        pages = max(slabs, 1) * self.pool.pages_per_slab(self.profile.recent.name)
        return pages * self.page_size

    @property
    def stale_capacity_tokens(self) -> int:
        """Tokens that the arena holds as Stale pages."""
        return self._num_slabs * self.pool.pages_per_slab(self.profile.stale.name) * self.page_size

    @property
    def _num_slabs(self) -> int:
        return self.pool.total_granules // self.pool.slab_granules

    def kind_indices(self, pages: npt.NDArray[np.int64]) -> npt.NDArray[np.int8]:
        """Index into `profile.kinds` of each allocated page: int64 addresses [n] -> int8 [n]."""
        return self._slab_kinds[pages // self.pool.slab_granules]

    def match_length(self, request: Request) -> int:
        """Tokens of a waiting request that whole cached pages cover now (nothing is touched)."""
        if self.tree is None:
            return 0
        return self.tree.probe(request.namespace, request.tokens, request.reuse_limit)

    def admission_tokens(self, request: Request) -> int:
        """Tokens of new Recent pages that admitting a waiting request takes from what is
        obtainable: for what it has to compute, a page to go on with, and the cached pages that it
        would use and that could have been evicted without it."""
        needed = len(request.tokens) - self.match_length(request) + self.page_size
        if self.tree is None:
            return needed
        limit = request.reuse_limit
        pages = self.tree.unprotected(request.namespace, request.tokens, limit)
        counts = np.bincount(self.kind_indices(np.array(pages, dtype=np.int64)))
        granules = sum(
            int(count) * self.pool.granules_of(kind.name)
            for kind, count in zip(self.profile.kinds, counts, strict=False)
        )
        recent = self.pool.granules_of(self.profile.recent.name)
        return needed + -(-granules // recent) * self.page_size

    def admit(self, request: Request) -> None:
        """Gives the request its block table, filled with the cached prefix of its tokens.

        A cached page that the request leaves in its middle is copied up to there into the
        request's own Recent page (copy-on-write) instead of being recomputed.
        """
        limit = request.reuse_limit
        admission = self.lifecycle.admit(
            request.holder, request.namespace, request.tokens, limit, request.message.priority
        )
        table = self.lifecycle.table(request.holder)
        request.table = table
        request.room = len(table.pages) * self.page_size
        request.written = admission.cached_tokens
        request.retier_cursor = self.profile.anchor_pages
        by_tier = self._count_by_kind(np.array(admission.pages, dtype=np.int64))
        if admission.partial_page is not None:
            copied = 0
            # In deterministic mode chunks start where pages start, whatever is cached.
            if not self.deterministic and admission.partial_tokens >= MIN_COPY_TOKENS:
                copied = self._copy_on_write(
                    request, admission.partial_page, admission.partial_tokens
                )
                kind = self.pool.kind_of(admission.partial_page)
                by_tier[kind] = by_tier.get(kind, 0) + copied
            self.lifecycle.end_copy(request.holder)
            request.written += copied
            self.copied_tokens += copied
        if request.preemptions == 0:
            request.cached_tokens = min(request.written, request.prompt_len)
            request.cached_by_tier = {kind: count for kind, count in by_tier.items() if count}
        self.controller.observe(request)

    def reserve(self, request: Request, num_tokens: int) -> bool:
        """Makes room for the KV of the next `num_tokens` pending tokens; False when there is none.

        Unreferenced cached pages give way; other requests do not. In deterministic mode False as
        well while a page that the tokens would read cannot have the format of its position.
        """
        table = request.held_table
        if self.deterministic and not self._settle(request):
            return False
        if request.written + num_tokens <= request.room:
            return True
        # In deterministic mode rows of the open page may be written and not yet committed.
        ahead = request.written - table.committed
        self.controller.compress_first(
            -(-(request.written + num_tokens) // self.page_size) - len(table.pages)
        )
        try:
            self._obtain(request, ahead + num_tokens)
        except OutOfPages as error:
            kind = error.compactable_kind
            if kind is None or not self.controller.compact(kind):
                return False
            return self.reserve(request, num_tokens)
        request.room = len(table.pages) * self.page_size
        return True

    def commit(self, request: Request, num_tokens: int) -> list[Sealed]:
        """Counts `num_tokens` more tokens as written and seals (shares) every page now full."""
        request.written += num_tokens
        if not self.deterministic:
            table = request.held_table
            self.lifecycle.commit(request.holder, num_tokens)
            sealed = []
            if table.committed >= (table.sealed_pages + 1) * self.page_size:
                sealed = self.lifecycle.seal(request.holder, request.tokens)
            if request.written >= request.observe_at:
                self.controller.observe(request)
            return sealed
        if num_tokens < self.page_size:
            # Part of a page: it is computed again as a whole before it may be shared.
            return []
        self.lifecycle.commit(request.holder, num_tokens)
        sealed = self.lifecycle.seal(request.holder, request.tokens)
        self._settle(request)  # without room now: `reserve` tries again before anybody reads
        return sealed

    def commit_rows(self, requests: Sequence[Request]) -> None:
        """`commit` of one token of each of the requests."""
        if self.deterministic:
            for request in requests:
                self.commit(request, 1)
            return
        full = self.lifecycle.commit_each([request.held_table for request in requests])
        for index in full:
            self.lifecycle.seal(requests[index].holder, requests[index].tokens)
        for request in requests:
            request.written += 1
            if request.written >= request.observe_at:
                self.controller.observe(request)

    def release(self, request: Request) -> None:
        """Drops everything the request holds; the one path of finish, abort and preemption."""
        if not self.deterministic:
            self.controller.leave(request)
        self.lifecycle.release(request.holder)
        request.table = None
        request.written = request.room = 0

    def convert(self, limit: int, is_prefilling: bool) -> None:
        """Converts up to `limit` pages after a step.

        They wait while a prompt is in prefill: they must not delay a first token. Where room is
        short they do not wait, or steady arrivals would keep every page large.
        """
        if self.short_of_room:
            self.controller.compress_left(limit - self.controller.step(limit))
        elif not is_prefilling:
            self.controller.step(limit)

    def flush(self) -> int:
        """Evicts every cached page that no request uses; returns how many."""
        return self.lifecycle.flush()

    def obtainable_tokens(self) -> int:
        """Estimate of the tokens that new Recent pages could take without preempting anybody."""
        return self.lifecycle.obtainable(self.profile.recent.name) * self.page_size

    def _obtain(self, request: Request, num_tokens: int) -> None:
        """Takes pages for the request; what has to be evicted for them is timed."""
        evicted, started = self.lifecycle.counters.evicted_pages, time.perf_counter()
        try:
            self.lifecycle.reserve(request.holder, num_tokens)
        finally:
            if self.lifecycle.counters.evicted_pages > evicted:
                self.evictions.observe(time.perf_counter() - started)

    def _settle(self, request: Request) -> bool:
        """Gives the sealed pages the formats of their positions; False when there is no room."""
        try:
            self.controller.settle(request)
        except OutOfPages as error:
            kind = error.compactable_kind
            return kind is not None and self.controller.compact(kind) and self._settle(request)
        return True

    def _copy_on_write(self, request: Request, source: int, num_tokens: int) -> int:
        if not self.reserve(request, num_tokens):
            return 0
        table = request.held_table
        source_kind = self._kind(source)
        copy_tokens(
            self.arena.buffer,
            source,
            source_kind,
            table.pages[-1],
            self.profile.recent,
            num_tokens,
            self.arena.geometry,
        )
        self.lifecycle.commit(request.holder, num_tokens)
        return num_tokens

    def _kind(self, page: int) -> PageKind:
        return self.profile.kinds[self._kind_index[self.pool.kind_of(page)]]

    def _count_by_kind(self, pages: np.ndarray) -> dict[str, int]:
        counts = np.bincount(self.kind_indices(pages), minlength=len(self.profile.kinds))
        return {
            kind.name: int(count) * self.page_size
            for kind, count in zip(self.profile.kinds, counts, strict=True)
        }
