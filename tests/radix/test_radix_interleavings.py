"""All interleavings of a small configuration: 2 requests, 3 pages, 1 conversion, 1 batch.

Every actor is a small program; an abort is possible before each of its steps. States that look
the same to every further step are visited once, which loses no interleaving.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable

import pytest
from radix_world import NAMESPACES, World

from minima_radix import OutOfPages, PageKindSpec

PAGE_SIZE = 2

PROMPTS = {
    "twins": ((1, 1, 2), (1, 1, 2)),
    "copy_on_write": ((1, 1, 2), (1, 9, 9)),
    "longer_twins": ((1, 1, 2, 2, 3), (1, 1, 2, 2, 3)),
    "longer_copy_on_write": ((1, 1, 2, 2, 3), (1, 1, 2, 9, 9)),
}
"""Full pages and an open one of each request. Together they need up to six pages of the three."""


class Search:
    """Replays a path of steps, and lists the steps that are possible after it."""

    def __init__(self, prompts: dict[int, tuple[int, ...]]) -> None:
        self.prompts = prompts

    def replay(self, path: tuple[str, ...]) -> tuple[World, dict[str, str]]:
        kinds = (PageKindSpec("fp8", 1), PageKindSpec("tq3", 1))
        world = World(PAGE_SIZE, kinds, total_granules=3, slab_granules=1)
        states = {"r1": "new", "r2": "new", "conversion": "new", "batch": "new", "flush": "new"}
        for step in path:
            self.apply(world, states, step)
        return world, states

    def steps(self, world: World, states: dict[str, str]) -> list[str]:
        found = []
        for rid in (1, 2):
            if states[f"r{rid}"] == "new":
                found.append(f"admit {rid}")
            elif states[f"r{rid}"] == "live":
                found.append(f"release {rid}")
                left = len(self.prompts[rid]) - world.lifecycle.table(rid).committed
                found += [f"chunk {rid} {n}" for n in {1, left} if 0 < n <= left]
        if states["conversion"] == "new":
            sealed = set(world.cached_prefixes().values())
            found += [f"begin {page}" for page in sorted(sealed)]
        elif states["conversion"] == "open":
            found += ["publish", "cancel"]
        found += {"new": ["read"], "open": ["end_read"]}.get(states["batch"], [])
        if states["flush"] == "new" and world.cached_prefixes():
            found.append("flush")
        return found

    def apply(self, world: World, states: dict[str, str], step: str) -> None:
        verb, *arguments = step.split()
        numbers = [int(argument) for argument in arguments]
        match verb:
            case "admit":
                world.admit(numbers[0], NAMESPACES[0], self.prompts[numbers[0]])
                states[f"r{numbers[0]}"] = "live"
            case "chunk":
                world.step(*numbers)
            case "release":
                world.release(numbers[0])
                states[f"r{numbers[0]}"] = "done"
            case "begin":
                try:
                    position = world.lifecycle.position_of(numbers[0])
                    world.begin(numbers[0], position, "tq3")
                    states["conversion"] = "open"
                except OutOfPages:
                    pass
            case "publish" | "cancel":
                (conversion,) = world.conversions
                getattr(world, verb)(conversion)
                states["conversion"] = "done"
            case "read":
                world.begin_read()
                states["batch"] = "open"
            case "end_read":
                world.end_read(*world.leases)
                states["batch"] = "done"
            case "flush":
                world.lifecycle.flush()
                states["flush"] = "done"

    def signature(self, world: World, states: dict[str, str]) -> Hashable:
        """Everything that later steps can see, but not the names of pages and holders."""
        names: dict[int, int] = {}

        def name(page: int) -> int:
            return names.setdefault(page, len(names))

        tables = [
            (rid, [name(page) for page in t.pages], t.committed, t.copy_hold is not None)
            for rid, t in sorted(world.lifecycle.tables.items())
        ]
        nodes = sorted(world.tree.walk(), key=lambda node: node.last_access)
        tree = [
            (n.start, bytes(n.key), [name(page) for page in n.pages], n.lock_count) for n in nodes
        ]
        conversions = [(name(c.source), name(c.destination), c.position) for c in world.conversions]
        copies = [
            name(t.copy_hold[0]) for t in world.lifecycle.tables.values() if t.copy_hold is not None
        ]
        batch = [
            sorted((name(page), content) for page, content in pages.items())
            for pages in world.leases.values()
        ]
        references = sorted(
            (name(e.page), e.kind, sorted(e.requests), e.cached, len(e.conversions), e.read_until)
            for e in world.pool.references()
        )
        return repr((states, tables, tree, conversions, copies, batch, references))


@pytest.mark.parametrize(
    "name",
    [
        "twins",
        "copy_on_write",
        pytest.param("longer_twins", marks=pytest.mark.slow),
        pytest.param("longer_copy_on_write", marks=pytest.mark.slow),
    ],
)
def test_no_interleaving_leaks_or_loses_a_page(name: str) -> None:
    search = Search(dict(enumerate(PROMPTS[name], 1)))
    seen: set[Hashable] = set()
    waiting: deque[tuple[str, ...]] = deque([()])
    last_states: list[dict[str, str]] = []
    while waiting:
        path = waiting.popleft()  # breadth first: the shortest path to each state
        world, states = search.replay(path)
        signature = search.signature(world, states)
        if signature in seen:
            continue
        seen.add(signature)
        world.verify()
        waiting.extend((*path, step) for step in search.steps(world, states))
        last_states.append(states)
        world.close()  # everything is aborted at this very moment
    # The search went everywhere: some path ends every program.
    actors = ("r1", "r2", "conversion", "batch", "flush")
    assert dict.fromkeys(actors, "done") in last_states
    assert len(seen) > 1000
