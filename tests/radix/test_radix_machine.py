"""Random interleavings of everything that can happen to pages, checked after every step."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from radix_world import NAMESPACES, World

from minima_radix import OutOfPages

MAX_LIVE = 4
MAX_PAGES = 5


class PageMachine(RuleBasedStateMachine):
    page_size = 1
    cached = True
    policy = "lru"
    quota: int | None = None

    @initialize()
    def start(self) -> None:
        self.world = World(self.page_size, cached=self.cached, policy=self.policy, quota=self.quota)
        self.rids = 0

    def prompt(self, data: st.DataObject) -> tuple[int, ...]:
        """Blocks of few values and awkward lengths, so that prefixes meet and part anywhere."""
        size = self.page_size
        lengths = st.sampled_from(sorted({1, max(size // 2, 1), size, size + 1}))
        blocks = data.draw(
            st.lists(st.tuples(st.integers(1, 3), lengths), min_size=1, max_size=2 * MAX_PAGES)
        )
        tokens = [value for value, length in blocks for _ in range(length)]
        return tuple(tokens[: MAX_PAGES * size])

    def some_rid(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.world.live)))

    def start_request(self, namespace_index: int, tokens: tuple[int, ...]) -> None:
        self.rids += 1
        self.world.admit(self.rids, NAMESPACES[namespace_index], tokens)

    @precondition(lambda self: len(self.world.live) < MAX_LIVE)
    @rule(data=st.data(), namespace=st.integers(0, 1))
    def admit(self, data: st.DataObject, namespace: int) -> None:
        self.start_request(namespace, self.prompt(data))

    @precondition(lambda self: 0 < len(self.world.live) < MAX_LIVE)
    @rule(data=st.data())
    def admit_twin(self, data: st.DataObject) -> None:
        request = self.world.live[self.some_rid(data)]
        self.rids += 1
        self.world.admit(self.rids, request.namespace, request.tokens)

    @precondition(lambda self: self.world.live)
    @rule(data=st.data(), pages=st.integers(1, 3), less=st.integers(0, 1))
    def chunk(self, data: st.DataObject, pages: int, less: int) -> None:
        rid = self.some_rid(data)
        left = len(self.world.live[rid].tokens) - self.world.lifecycle.table(rid).committed
        count = min(left, max(pages * self.page_size - less, 1))
        if count:
            self.world.step(rid, count)

    @precondition(lambda self: self.world.live)
    @rule(data=st.data(), value=st.integers(1, 3))
    def decode(self, data: st.DataObject, value: int) -> None:
        rid = self.some_rid(data)
        request = self.world.live[rid]
        if len(request.tokens) < MAX_PAGES * self.page_size:
            request.tokens += (value,)
            left = len(request.tokens) - self.world.lifecycle.table(rid).committed
            self.world.step(rid, left)

    @precondition(lambda self: self.world.live)
    @rule(data=st.data())
    def finish_or_abort(self, data: st.DataObject) -> None:
        self.world.release(self.some_rid(data))

    @precondition(lambda self: self.world.live)
    @rule(data=st.data())
    def preempt_and_resume(self, data: st.DataObject) -> None:
        rid = self.some_rid(data)
        request = self.world.live[rid]
        self.world.release(rid)
        self.world.verify()
        self.world.admit(rid, request.namespace, request.tokens)

    @rule(data=st.data(), kind=st.sampled_from(["fp8", "tq3", "tq3"]))
    def begin_retier(self, data: st.DataObject, kind: str) -> None:
        world = self.world
        sealed = {
            page
            for table in world.lifecycle.tables.values()
            for page in table.pages[: table.sealed_pages]
        } | set(world.cached_prefixes().values())
        free = sorted(sealed - {conversion.source for conversion in world.conversions})
        if free:
            page = data.draw(st.sampled_from(free))
            try:
                world.begin(page, world.lifecycle.position_of(page), kind)
            except OutOfPages:
                assert page not in world.lifecycle.conversions

    @precondition(lambda self: self.world.conversions)
    @rule(data=st.data(), publish=st.booleans())
    def end_retier(self, data: st.DataObject, publish: bool) -> None:
        world = self.world
        conversion = data.draw(st.sampled_from(sorted(world.conversions)))
        if publish:
            held = world.pool.request_holders(conversion.source) or world.pool.is_cached(
                conversion.source
            )
            assert world.publish(conversion) == bool(held)
        else:
            world.cancel(conversion)

    @rule(kind=st.sampled_from(["fp8", "tq3"]))
    def compact(self, kind: str) -> None:
        if not self.world.conversions:
            self.world.compact(kind)

    @precondition(lambda self: len(self.world.leases) < 3)
    @rule()
    def begin_read(self) -> None:
        self.world.begin_read()

    @precondition(lambda self: self.world.leases)
    @rule(data=st.data())
    def end_read(self, data: st.DataObject) -> None:
        self.world.end_read(data.draw(st.sampled_from(sorted(self.world.leases))))

    @precondition(lambda self: self.cached)
    @rule(data=st.data(), namespace=st.integers(0, 1), seconds=st.sampled_from([1.0, 100.0]))
    def pin(self, data: st.DataObject, namespace: int, seconds: float) -> None:
        tokens = self.prompt(data)
        expected = self.world.expected_match(NAMESPACES[namespace], tokens, len(tokens))[0]
        pinned = self.world.tree.pin(NAMESPACES[namespace], tokens, seconds)
        assert pinned == expected

    @precondition(lambda self: self.cached)
    @rule(data=st.data(), namespace=st.integers(0, 1))
    def unpin(self, data: st.DataObject, namespace: int) -> None:
        self.world.tree.unpin(NAMESPACES[namespace], self.prompt(data))

    @rule(seconds=st.sampled_from([0.5, 50.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.clock.now += seconds

    @rule()
    def evict_one(self) -> None:
        if self.cached:
            pinned = self.world.tree.pinned_pages
            self.world.lifecycle._room.evict()
            assert self.world.tree.pinned_pages == pinned

    @rule()
    def flush(self) -> None:
        self.world.lifecycle.flush()
        if self.cached:
            assert self.world.tree.evictable_pages == 0
            assert self.world.tree.total_pages == self.world.tree.locked_pages

    @invariant()
    def books_are_right(self) -> None:
        if hasattr(self, "world"):
            self.world.verify()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.close()


CONFIGURATIONS = {
    "page_1": dict(page_size=1),
    "page_16": dict(page_size=16, policy="slru"),
    "page_64": dict(page_size=64, policy="lfu"),
    "quota": dict(page_size=2, quota=12, policy="priority"),
    "no_tree": dict(page_size=4, cached=False),
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_any_interleaving_keeps_the_books(name: str) -> None:
    machine = type("Machine", (PageMachine,), CONFIGURATIONS[name])
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=40,
            stateful_step_count=40,
            suppress_health_check=list(HealthCheck),
        ),
    )
