"""Invariants of pages, tables and tree, recounted from scratch.

`check` walks everything: for tests after every step, and for a server that is idle.
"""

from __future__ import annotations

from collections import Counter, defaultdict

from minima_radix.lifecycle import PageLifecycle
from minima_radix.node import TOKEN_BYTES, Node
from minima_radix.pool import PagePool
from minima_radix.tree import RadixTree
from minima_radix.types import InvariantViolation


def check(lifecycle: PageLifecycle) -> None:
    """Raises `InvariantViolation` that lists every violated invariant; returns None when clean."""
    faults = _pool_faults(lifecycle.pool) + _holder_faults(lifecycle) + _table_faults(lifecycle)
    if lifecycle.tree is not None:
        faults += _tree_faults(lifecycle.tree) + _lock_faults(lifecycle)
    if faults:
        raise InvariantViolation(faults)


def _pool_faults(pool: PagePool) -> list[str]:
    """free + referenced = total per slab and kind; counters equal a recount."""
    faults: list[str] = []
    stats = pool.stats()
    if stats.accounted_granules != stats.total_granules:
        faults.append(
            f"{stats.accounted_granules} of {stats.total_granules} granules are accounted for"
        )
    states: dict[str, Counter[str]] = defaultdict(Counter)
    open_leases = pool.open_leases()
    for entry in pool.references():
        if entry.requests:
            state = "request"
        elif entry.conversions:
            state = "conversion"
        elif entry.cached:
            state = "cache"
        else:
            state = "reader"
            if not open_leases or open_leases[0] > entry.read_until:
                faults.append(f"page {entry.page} is lost: no holder and no lease keeps it")
        states[entry.kind][state] += 1
    cache_only = {e.page for e in pool.references() if not (e.requests or e.conversions)}
    cache_only &= {e.page for e in pool.references() if e.cached}
    for name, kind in stats.kinds.items():
        counted = states[name]
        recorded = {
            "request": kind.request_pages,
            "conversion": kind.conversion_pages,
            "cache": kind.cache_pages,
            "reader": kind.reader_pages,
        }
        for state, number in recorded.items():
            if counted[state] != number:
                faults.append(f"{name}: {number} {state} pages counted, {counted[state]} found")
        if kind.pages_used != counted.total():
            faults.append(f"{name}: {kind.pages_used} pages in use, {counted.total()} found")
        per_slab = pool.pages_per_slab(name)
        slabs = list(pool.slabs_by_use(name))
        if kind.pages_free != len(slabs) * per_slab - counted.total():
            faults.append(f"{name}: free and used pages do not fill the slabs")
        for pages in slabs:
            if not 0 < len(pages) <= per_slab:
                faults.append(f"{name}: a slab of {per_slab} pages has {len(pages)} in use")
        if kind.evictable_slabs != sum(cache_only.issuperset(pages) for pages in slabs):
            faults.append(f"{name}: {kind.evictable_slabs} evictable slabs are not what is found")
        if sum(map(len, slabs)) != counted.total():
            faults.append(f"{name}: pages in use outside the slabs of the kind")
    return faults


def _holder_faults(lifecycle: PageLifecycle) -> list[str]:
    """The holders of a page, found by walking, are the references that the pool has recorded."""
    requests: dict[int, list[int]] = defaultdict(list)
    conversions: dict[int, list[int]] = defaultdict(list)
    cached: Counter[int] = Counter()
    for rid, table in lifecycle.tables.items():
        for page in table.pages:
            requests[page].append(rid)
        if table.copy_hold is not None:
            conversions[table.copy_hold[0]].append(table.copy_hold[1])
    for conversion in lifecycle.conversions.values():
        conversions[conversion.source].append(conversion.id)
        conversions[conversion.destination].append(conversion.id)
    if lifecycle.tree is not None:
        for node in lifecycle.tree.walk():
            cached.update(node.pages)
    faults: list[str] = []
    recorded = {entry.page: entry for entry in lifecycle.pool.references()}
    for page in {*requests, *conversions, *cached} - recorded.keys():
        faults.append(f"page {page} is free but in use")
    for page, entry in recorded.items():
        if sorted(entry.requests) != sorted(requests[page]):
            faults.append(
                f"page {page}: requests {sorted(entry.requests)} recorded, "
                f"{sorted(requests[page])} found"
            )
        if sorted(entry.conversions) != sorted(conversions[page]):
            faults.append(
                f"page {page}: conversions {sorted(entry.conversions)} recorded, "
                f"{sorted(conversions[page])} found"
            )
        if entry.cached != bool(cached[page]) or cached[page] > 1:
            faults.append(
                f"page {page}: cached {entry.cached} recorded, {cached[page]} times in the tree"
            )
    return faults


def _table_faults(lifecycle: PageLifecycle) -> list[str]:
    """Every table covers its positions exactly once; its bound pages are the tree's."""
    faults: list[str] = []
    size = lifecycle.page_size
    recorded = {entry.page: entry for entry in lifecycle.pool.references()}
    for rid, table in lifecycle.tables.items():
        if len(set(table.pages)) != len(table.pages):
            faults.append(f"request {rid}: a page serves two positions")
        if table.committed > len(table.pages) * size:
            faults.append(f"request {rid}: {table.committed} tokens do not fit its pages")
        if not table.bound_pages <= table.sealed_pages <= table.committed // size:
            faults.append(f"request {rid}: a page is sealed or bound before it is written")
        if lifecycle.tree is not None and table.bound_pages != table.sealed_pages:
            faults.append(f"request {rid}: a sealed page is not in the tree")
        for page in table.pages[table.sealed_pages :]:
            entry = recorded.get(page)
            if entry is not None and (len(entry.requests) > 1 or entry.cached):
                faults.append(f"request {rid}: open page {page} is shared")
        if (table.node.end if table.node is not None else 0) != table.bound_pages:
            faults.append(f"request {rid}: its lock does not end with its bound pages")
        in_tree = [] if table.node is None else list(table.node.path())
        bound = [page for node in reversed(in_tree) for page in node.pages]
        if bound != list(table.pages[: table.bound_pages]):
            faults.append(f"request {rid}: its bound pages are not those of the tree")
    return faults


def _tree_faults(tree: RadixTree) -> list[str]:
    """Edges are page aligned, children hang together, counters equal a recount."""
    faults: list[str] = []
    page_bytes = tree.page_size * TOKEN_BYTES
    # Before the walk: asking for these ends the pins that have expired.
    counted = {
        "evictable": tree.evictable_pages,
        "pinned": tree.pinned_pages,
        "locked": tree.locked_pages,
        "total": tree.total_pages,
        "head": tree.pages_in_heads,
    }
    total = locked = pinned = evictable = head = 0
    for node in tree.walk():
        name = f"node at page {node.start} of {node.namespace}"
        total += len(node.pages)
        head += min(len(node.pages), max(tree.head_pages - node.start, 0))
        locked += len(node.pages) if node.lock_count else 0
        pinned += len(node.pages) if node.pin_count else 0
        evictable += 0 if node.lock_count or node.pin_count else len(node.pages)
        if not node.pages or len(node.key) != len(node.pages) * page_bytes:
            faults.append(f"{name}: tokens and pages do not match")
        if node.evictable and not node.queued:
            faults.append(f"{name}: eviction does not know this leaf")
        if any(not tree.is_at(page, i) for i, page in enumerate(node.pages, node.start)):
            faults.append(f"{name}: a page is indexed elsewhere")
        parent = node.parent
        if parent is None or parent.children.get(bytes(node.key[:page_bytes])) is not node:
            faults.append(f"{name}: its parent is gone or does not know it")
        elif parent.end != node.start or parent.namespace != node.namespace:
            faults.append(f"{name}: does not begin where its parent ends")
    found = {
        "evictable": evictable,
        "pinned": pinned,
        "locked": locked,
        "total": total,
        "head": head,
    }
    faults += [
        f"tree: {number} {what} pages counted, {found[what]} found"
        for what, number in counted.items()
        if number != found[what]
    ]
    return faults


def _lock_faults(lifecycle: PageLifecycle) -> list[str]:
    """Locks and pins of a node are those that end in it or below."""
    assert lifecycle.tree is not None
    locks: Counter[Node] = Counter()
    pins: Counter[Node] = Counter()
    for table in lifecycle.tables.values():
        if table.node is not None:
            locks.update(table.node.path())
    nodes = list(lifecycle.tree.walk())
    for node in nodes:
        if node.pinned_until is not None:
            pins.update(node.path())
    return [
        f"node at page {node.start} of {node.namespace}: {node.lock_count} locks and "
        f"{node.pin_count} pins counted, {locks[node]} and {pins[node]} found"
        for node in nodes
        if (node.lock_count, node.pin_count) != (locks[node], pins[node])
    ]
