"""Small runs of scheduler_cost and tree_search."""

from __future__ import annotations

import numpy as np
import pytest
import scheduler_cost
import tree_search

from minima_kernels.attention.plan import CheckedSegment
from minima_kernels.attention.segments import tabulate
from sglang_minima.models.embedded import find_embedded_model
from sglang_minima.models.resolve import resolve_model_path
from sglang_minima.runner import batch
from sglang_minima.runner.model_runner import ModelRunner
from sglang_minima.runner.segments import build_segments
from sglang_minima.server_args import ServerArgs


def test_scheduler_cost_measures_every_claim() -> None:
    results = scheduler_cost.measure(100, 3)
    names = ["match", "step", "step, all read", "evict", "evict, one parent"]
    assert [result.what for result in results] == names
    assert all(0 < result.median <= result.p95 <= result.worst for result in results)
    assert scheduler_cost.claims_of(results) == []
    at_target = [result._replace(pages=scheduler_cost.CLAIM_PAGES) for result in results]
    assert len(scheduler_cost.claims_of(at_target)) == 4
    scheduler_cost.plot(results)


def test_own_reads_are_the_same_pages_once_for_each_reader() -> None:
    def run(pages: list[int], kind: int, last: int, readers: list[int]) -> CheckedSegment:
        return CheckedSegment(
            np.array(pages, dtype=np.int64), kind, last, np.array(readers, dtype=np.int64)
        )

    table = tabulate([run([5, 7, 9], 1, 64, [0, 2]), run([11], 0, 3, [1])])
    rows = [
        (s.addresses.tolist(), s.kind_index, s.last_page_len, s.readers.tolist())
        for s in tree_search.unshared(table).rows()
    ]
    assert rows == [([5, 7, 9], 1, 64, [0]), ([5, 7, 9], 1, 64, [2]), ([11], 0, 3, [1])]


@pytest.mark.slow
def test_a_small_tree_search() -> None:
    if find_embedded_model() is None:
        pytest.skip("the embedded model is not installed")
    runner = ModelRunner(ServerArgs(random_seed=1), str(resolve_model_path(None)))
    shape = tree_search.Shape(2, 200, 4)
    rows = [tree_search.run(runner, shape, mode) for mode in ("shared", "own reads", "no cache")]
    assert batch.build_segments is build_segments
    shared, own, none = rows
    assert shared.computed_tokens == own.computed_tokens < none.computed_tokens
    assert none.computed_tokens == none.prompt_tokens == shared.prompt_tokens
    assert shared.pages_read < own.pages_read
    tree_search.plot(rows)
