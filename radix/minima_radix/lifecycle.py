"""PageLifecycle: the one protocol by which pages change owner, state and kind.

Algorithm 1 of Minima-KV (append, retier, promote, seal, finish) with abort, preemption and copy on
write. Who frees what:

    table.pages[0 : bound_pages]       in the tree and referenced by the request
    table.pages[bound_pages : sealed]  immutable, the request's alone (only without a tree)
    table.pages[sealed : ]             Recent pages, still appended to, the request's alone

`release` is the only way a request lets go of pages, whether it finished, was aborted or preempted.
A request's references never depend on the tree and the tree's never on a request.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from minima_radix.compaction import Compactor
from minima_radix.conversions import Conversion, Converter
from minima_radix.counters import LifecycleCounters
from minima_radix.pool import PagePool, ReadLease
from minima_radix.results import Admission, Sealed
from minima_radix.room import CACHE_HOLDER, Room
from minima_radix.table import RequestTable
from minima_radix.tree import RadixTree
from minima_radix.types import LifecycleError, Namespace, ReferenceKind

_REQUEST = ReferenceKind.REQUEST
_CACHE = ReferenceKind.CACHE
_CONVERSION = ReferenceKind.CONVERSION


class PageLifecycle:
    """Pages of live requests and of the prefix cache.

    Args:
        pool: where pages come from.
        tree: the prefix cache; None keeps all pages private to their requests.
        page_size: tokens of a page.
        recent_kind: kind of the pages that requests append to.
        durable_quota_granules: most granules that the cache alone may hold; None = no limit.
    """

    def __init__(
        self,
        pool: PagePool,
        tree: RadixTree | None,
        page_size: int,
        recent_kind: str,
        durable_quota_granules: int | None = None,
    ) -> None:
        if tree is not None and tree.page_size != page_size:
            raise ValueError(f"the tree has pages of {tree.page_size} tokens, not {page_size}")
        pool.granules_of(recent_kind)  # an unknown kind fails now, not in the first step
        self.pool = pool
        self.tree = tree
        self.page_size = page_size
        self.recent_kind = recent_kind
        self.counters = LifecycleCounters()
        self.tables: dict[int, RequestTable] = {}
        self.conversions: dict[int, Conversion] = {}
        """Conversions in flight, by source page."""
        self._holder_ids = count(1)
        self._compactor = Compactor(pool, tree, self.tables, self.conversions)
        self._room = Room(
            pool, tree, recent_kind, durable_quota_granules, self._compactor, self.counters
        )
        self._converter = Converter(
            pool,
            tree,
            self.tables,
            self.conversions,
            self._room,
            self._holder_ids,
            self.counters,
        )

    # ---- requests

    def admit(
        self,
        rid: int,
        namespace: Namespace,
        tokens: Sequence[int],
        limit: int,
        priority: int = 0,
    ) -> Admission:
        """Starts a request with the longest cached prefix, at most `limit` tokens of it.

        References and the lock are taken before this returns. `priority` matters to the eviction
        policy of that name only. Raises `LifecycleError` when the rid is live.
        """
        if rid in self.tables:
            raise LifecycleError(f"request {rid} is live already")
        if self.tree is None:
            self.tables[rid] = RequestTable(namespace, (), priority)
            return Admission(0, [], None, 0)
        match = self.tree.match(namespace, tokens, limit, priority)
        table = self.tables[rid] = RequestTable(namespace, match.pages, priority)
        for page in match.pages:
            self.pool.acquire(page, _REQUEST, rid)
        table.committed = len(match.pages) * self.page_size
        if match.partial_page is not None:
            table.copy_hold = (match.partial_page, next(self._holder_ids))
            self.pool.acquire(*_hold(table.copy_hold))
            self.counters.copies_on_write += 1
        if match.node is not None:
            table.node = self.tree.lock(match.node, match.node_pages)
        return Admission(table.committed, match.pages, match.partial_page, match.partial_tokens)

    def end_copy(self, rid: int) -> None:
        """Lets go of the admission's partial page: its tokens are copied, or not wanted.

        Raises `LifecycleError` when nothing is held.
        """
        table = self.table(rid)
        if table.copy_hold is None:
            raise LifecycleError(f"request {rid} holds no page to copy from")
        self.pool.release(*_hold(table.copy_hold))
        table.copy_hold = None

    def table(self, rid: int) -> RequestTable:
        """The block table of a live request. Raises `LifecycleError` for any other rid."""
        try:
            return self.tables[rid]
        except KeyError:
            raise LifecycleError(f"request {rid} is not live") from None

    def reserve(self, rid: int, num_tokens: int) -> list[int]:
        """Appends Recent pages until the table has room for `num_tokens` more tokens.

        Evicts pages that only the cache holds as needed. Raises `OutOfPages` with the table as it
        was; when that says `fragmented`, move `compaction_moves(error.compactable_kind, ...)` and
        ask again.
        """
        table = self.table(rid)
        wanted = -(-(table.committed + num_tokens) // self.page_size) - len(table.pages)
        if wanted <= 0:
            return []
        self._room.make(self.recent_kind, wanted)
        pages = [self.pool.allocate(self.recent_kind, _REQUEST, rid) for _ in range(wanted)]
        table.pages.extend(pages)
        return pages

    def commit(self, rid: int, num_tokens: int) -> None:
        """Counts `num_tokens` more tokens as written. Raises `LifecycleError` without room."""
        table = self.table(rid)
        committed = table.committed + num_tokens
        if num_tokens < 0 or committed > len(table.pages) * self.page_size:
            raise LifecycleError(
                f"request {rid} has {len(table.pages)} pages, not room for {committed} tokens"
            )
        table.committed = committed

    def commit_each(self, tables: Sequence[RequestTable]) -> list[int]:
        """Counts one more token as written in each of the tables.

        Returns the indices of those that have a page to seal now. Raises `LifecycleError` at the
        first one without room; those before it are counted.
        """
        size = self.page_size
        full = []
        for index, table in enumerate(tables):
            committed = table.committed + 1
            if committed % size <= 1:
                if committed > len(table.pages) * size:
                    raise LifecycleError(f"no room for {committed} tokens in table {index}")
                if committed % size == 0:
                    full.append(index)
            table.committed = committed
        return full

    def seal(self, rid: int, tokens: Sequence[int]) -> list[Sealed]:
        """Makes every full committed page immutable and binds it to the tree at once.

        `tokens` are the request's ids so far, at least the committed ones. Where the tree has a
        page with the same tokens, the request switches to that. The open page is never sealed.
        """
        table = self.table(rid)
        first, end = table.sealed_pages, table.committed // self.page_size
        if first == end:
            return []
        if len(tokens) < end * self.page_size:
            raise LifecycleError(f"{len(tokens)} tokens given, {table.committed} are committed")
        own = table.pages[first:end]
        table.sealed_pages = end
        self.counters.sealed_pages += end - first
        if self.tree is None:
            return [Sealed(first + i, page, None) for i, page in enumerate(own)]
        tokens = tokens[first * self.page_size : end * self.page_size]
        node, twins = self.tree.insert(table.namespace, table.node, tokens, own, table.priority)
        for position, (page, twin) in enumerate(zip(own, twins, strict=False), first):
            self.pool.acquire(twin, _REQUEST, rid)
            table.pages[position] = twin
            self.pool.release(page, _REQUEST, rid)
        for page in own[len(twins) :]:
            self.pool.acquire(page, _CACHE, CACHE_HOLDER)
        if table.node is None:
            table.node = self.tree.lock(node, len(node.pages))
        else:
            self.tree.move_lock(table.node, node)
            table.node = node
        table.bound_pages = end
        self.counters.deduplicated_pages += len(twins)
        replaced: list[int | None] = [*twins, *[None] * (len(own) - len(twins))]
        return [
            Sealed(first + i, page, twin)
            for i, (page, twin) in enumerate(zip(own, replaced, strict=True))
        ]

    def release(self, rid: int) -> None:
        """Ends a request: finished, aborted and preempted are the same. The tree's pages stay, as
        far as the durable quota allows. Raises `LifecycleError` when it is not live."""
        table = self.table(rid)
        if table.copy_hold is not None:
            self.end_copy(rid)
        del self.tables[rid]
        for page in table.pages:
            self.pool.release(page, _REQUEST, rid)
        if table.node is not None and self.tree is not None:
            self.tree.unlock(table.node)
        self._room.enforce_quota()

    # ---- kinds

    def begin_retier(self, page: int, position: int, kind: str) -> Conversion:
        """Starts to re-encode a sealed page at `position` (in pages) into `kind`.

        Source and destination are held until `publish` or `cancel`. The same kind moves the page
        into a fuller slab (compaction). Raises `OutOfPages` with nothing held, `LifecycleError`
        for a page that is not sealed there or is being converted.
        """
        return self._converter.begin(page, position, kind)

    promote = begin_retier

    def publish(self, conversion: Conversion) -> bool:
        """Puts the filled destination into the tree and into every table that has the source.

        False, with the destination freed, when nobody holds the source any more. The source is
        free when its readers are done.
        """
        published = self._converter.publish(conversion)
        self._room.enforce_quota()
        return published

    def cancel(self, conversion: Conversion) -> None:
        """Gives a conversion up: the source stays, the destination is freed."""
        self._converter.cancel(conversion)
        self._room.enforce_quota()

    def compaction_moves(self, kind: str, max_pages: int) -> list[int]:
        """Pages to `begin_retier` into their own kind so that a sparse slab runs empty.

        At most `max_pages` of one slab; empty when the kind's free pages are less than a slab.
        """
        return self._compactor.moves(kind, max_pages)

    def position_of(self, page: int) -> int:
        """The position (in pages) of a page that is in the tree or in a table."""
        return self._compactor.position_of(page)

    # ---- readers and room

    def begin_read(self) -> ReadLease:
        """Opens a lease for a batch in flight (see `PagePool.begin_read`)."""
        return self.pool.begin_read()

    def end_read(self, lease: ReadLease) -> None:
        """Ends the lease of a batch that is done."""
        self.pool.end_read(lease)

    def flush(self) -> int:
        """Empties the cache except for what live requests use; ends pins. Returns pages evicted."""
        return self._room.flush()

    def obtainable(self, kind: str) -> int:
        """Pages of the kind that can be had without preempting anybody: free ones, and those that
        eviction and compaction of other sealed kinds can free. O(kinds)."""
        return self._room.obtainable(kind)


def _hold(hold: tuple[int, int]) -> tuple[int, ReferenceKind, int]:
    page, holder = hold
    return page, _CONVERSION, holder
