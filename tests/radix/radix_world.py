"""A life cycle under test beside a naive model of what every page contains.

The model writes contents: a page holds (namespace, all tokens of its sequence up to its last
written slot). `verify` compares tables, tree and read leases with it after every step.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from minima_radix import (
    Admission,
    Conversion,
    Namespace,
    OutOfPages,
    PageKindSpec,
    PageLifecycle,
    PagePool,
    RadixTree,
    ReadLease,
    check,
)
from minima_radix.node import TOKEN_BYTES, Node

Content = tuple[Namespace, tuple[int, ...]]

NAMESPACES = (Namespace("a", None, "minima"), Namespace("b", None, "minima"))


@dataclass
class FakeClock:
    now: float = 0.0

    def __call__(self) -> float:
        self.now += 1e-6  # accesses are ordered
        return self.now


@dataclass
class Live:
    """A request as the model sees it."""

    namespace: Namespace
    tokens: tuple[int, ...]
    copy_source: Content | None


@dataclass
class World:
    page_size: int
    kinds: tuple[PageKindSpec, ...] = (PageKindSpec("fp8", 5), PageKindSpec("tq3", 2))
    total_granules: int = 60
    slab_granules: int = 10
    policy: str = "lru"
    cached: bool = True
    quota: int | None = None
    clock: FakeClock = field(default_factory=FakeClock)

    def __post_init__(self) -> None:
        self.pool = PagePool(self.kinds, self.total_granules, self.slab_granules)
        self.tree = (
            RadixTree(self.page_size, self.policy, self.clock, head_pages=2)
            if self.cached
            else None
        )
        self.lifecycle = PageLifecycle(
            self.pool, self.tree, self.page_size, self.kinds[0].name, self.quota
        )
        self.contents: dict[int, Content | None] = {}
        self.live: dict[int, Live] = {}
        self.leases: dict[ReadLease, dict[int, Content | None]] = {}
        self.conversions: dict[Conversion, Content | None] = {}

    # ---- the protocol, as an engine would drive it

    def admit(self, rid: int, namespace: Namespace, tokens: tuple[int, ...]) -> Admission:
        expected = self.expected_match(namespace, tokens, len(tokens) - 1)
        admission = self.lifecycle.admit(rid, namespace, tokens, len(tokens) - 1)
        assert (admission.cached_tokens, admission.partial_tokens) == expected
        source = None
        if admission.partial_page is not None:
            content = self.contents[admission.partial_page]
            assert content is not None
            source = (namespace, tokens[: admission.cached_tokens + admission.partial_tokens])
            assert content[0] == namespace and content[1][: len(source[1])] == source[1]
        self.live[rid] = Live(namespace, tokens, source)
        return admission

    def step(self, rid: int, count: int) -> bool:
        """Prefills or decodes `count` tokens; False when there is no memory for them."""
        request = self.live[rid]
        table = self.lifecycle.table(rid)
        start = table.committed
        before = list(table.pages)
        try:
            self.allocated(self.reserve(rid, count))
        except OutOfPages:
            assert list(table.pages) == before and table.committed == start
            return False
        first = table.committed
        if request.copy_source is not None:  # copy on write: those tokens are not computed
            assert table.copy_hold is not None
            content = self.contents[table.copy_hold[0]]
            assert content is not None and content[0] == request.namespace
            source = request.copy_source[1]
            assert content[1][: len(source)] == source
            self.lifecycle.end_copy(rid)
            request.copy_source = None
        for position in range(first, first + count):
            page = table.pages[position // self.page_size]
            assert self.pool.request_holders(page) == (rid,) and not self.pool.is_cached(page)
            self.contents[page] = (request.namespace, request.tokens[: position + 1])
        self.lifecycle.commit(rid, count)
        self.seal(rid)
        return True

    def seal(self, rid: int) -> None:
        for sealed in self.lifecycle.seal(rid, self.live[rid].tokens):
            if sealed.replaced_by is not None:
                assert self.contents[sealed.page] == self.contents[sealed.replaced_by]

    def reserve(self, rid: int, count: int) -> list[int]:
        """Reserves as an engine does: compacts while memory is only scattered."""
        while True:
            try:
                return self.lifecycle.reserve(rid, count)
            except OutOfPages as error:
                if not error.fragmented:
                    self.assert_really_out(rid, count)
                    raise
                assert error.compactable_kind is not None
                free = self.pool.stats().free_slabs
                self.compact(error.compactable_kind)
                if not self.leases:  # else the old places are still being read
                    assert self.pool.stats().free_slabs == free + 1

    def assert_really_out(self, rid: int, count: int) -> None:
        """Without anything in flight the estimate for admission is what can be reached."""
        copies = any(t.copy_hold for t in self.lifecycle.tables.values())
        if self.leases or self.conversions or copies:
            return
        table = self.lifecycle.table(rid)
        wanted = -(-(table.committed + count) // self.page_size) - len(table.pages)
        assert self.lifecycle.obtainable(self.kinds[0].name) < wanted

    def compact(self, kind: str) -> int:
        moves = self.lifecycle.compaction_moves(kind, 100)
        for page in moves:
            self.begin(page, self.lifecycle.position_of(page), kind)
        for conversion in [c for c in self.conversions if c.source in moves]:
            assert self.publish(conversion)
        return len(moves)

    def begin(self, page: int, position: int, kind: str) -> Conversion:
        conversion = self.lifecycle.begin_retier(page, position, kind)
        self.allocated([conversion.destination])
        self.conversions[conversion] = self.contents[page]
        return conversion

    def publish(self, conversion: Conversion) -> bool:
        assert self.contents[conversion.source] == self.conversions.pop(conversion)
        self.contents[conversion.destination] = self.contents[conversion.source]
        return self.lifecycle.publish(conversion)

    def cancel(self, conversion: Conversion) -> None:
        del self.conversions[conversion]
        self.lifecycle.cancel(conversion)

    def release(self, rid: int) -> None:
        del self.live[rid]
        self.lifecycle.release(rid)

    def begin_read(self) -> ReadLease:
        lease = self.lifecycle.begin_read()
        held = [p for table in self.lifecycle.tables.values() for p in table.pages]
        self.leases[lease] = {page: self.contents[page] for page in held}
        return lease

    def end_read(self, lease: ReadLease) -> None:
        self.assert_readable(lease)
        del self.leases[lease]
        self.lifecycle.end_read(lease)

    # ---- the model

    def allocated(self, pages: list[int]) -> None:
        for page in pages:
            self.contents[page] = None

    def assert_readable(self, lease: ReadLease) -> None:
        """No page of the lease was reused: its content is there, or has grown."""
        for page, before in self.leases[lease].items():
            now = self.contents[page]
            if before is not None:
                assert now is not None and now[0] == before[0]
                assert now[1][: len(before[1])] == before[1], "a page was reused while being read"

    def cached_prefixes(self) -> dict[Content, int]:
        """Every page of the tree by what it must contain."""
        found: dict[Content, int] = {}
        for node in self.tree.walk() if self.tree is not None else ():
            above = b"".join(bytes(step.key) for step in reversed(list(node.path())))
            tokens = memoryview(above).cast("i").tolist()
            assert len(above) == node.end * self.page_size * TOKEN_BYTES
            for position, page in enumerate(node.pages, node.start):
                content = (node.namespace, tuple(tokens[: (position + 1) * self.page_size]))
                assert content not in found
                found[content] = page
        return found

    def expected_match(
        self, namespace: Namespace, tokens: tuple[int, ...], limit: int
    ) -> tuple[int, int]:
        """Whole-page tokens and partial tokens that a match must find, by brute force."""
        size = self.page_size
        prefixes = [key[1] for key in self.cached_prefixes() if key[0] == namespace]
        whole = 0
        while whole + size <= limit and tokens[: whole + size] in prefixes:
            whole += size
        partial = 0
        for prefix in prefixes:
            if len(prefix) == whole + size and prefix[:whole] == tokens[:whole]:
                shared = 0
                while whole + shared < limit and shared < size:
                    if prefix[whole + shared] != tokens[whole + shared]:
                        break
                    shared += 1
                partial = max(partial, shared)
        return whole, partial

    def verify(self) -> None:
        check(self.lifecycle)
        for (namespace, tokens), page in self.cached_prefixes().items():
            assert self.contents[page] == (namespace, tokens)
        assert self.lifecycle.tables.keys() == self.live.keys()
        for rid, request in self.live.items():
            table = self.lifecycle.table(rid)
            for i, page in enumerate(table.pages):
                written = min((i + 1) * self.page_size, table.committed)
                if written > i * self.page_size:
                    expected = (request.namespace, request.tokens[:written])
                    content = self.contents[page]
                    assert content is not None and content[0] == expected[0]
                    assert content[1][:written] == expected[1]
        for lease in self.leases:
            self.assert_readable(lease)
        for conversion, content in self.conversions.items():
            assert self.contents[conversion.source] == content

    def close(self) -> None:
        """Ends everything; then every granule must be free again."""
        for conversion in list(self.conversions):
            self.cancel(conversion)
        for rid in list(self.live):
            self.release(rid)
        for lease in list(self.leases):
            self.end_read(lease)
        self.verify()
        self.lifecycle.flush()
        check(self.lifecycle)
        stats = self.pool.stats()
        assert stats.free_slabs == self.total_granules // self.slab_granules
        assert not list(self.pool.references())


def leaves(tree: RadixTree) -> list[Node]:
    return [node for node in tree.walk() if not node.children]
