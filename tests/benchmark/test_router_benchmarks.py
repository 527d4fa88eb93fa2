"""Arithmetic, claims and plots of the benchmarks of the router and of SGLang's harness."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import bench_serving
import pytest
import router
from common import Record


def client(prompt: int, cached: int) -> router.Client:
    made = router.Client("text", router.random.Random(0))
    made.ttft, made.prompt_tokens, made.cached_tokens = [0.5], [prompt], [cached]
    made.output_tokens = [4]
    return made


def test_requests_of_shops_come_mixed_and_are_the_same_every_time() -> None:
    clients = router.make_requests("Rules.", 4, 3)
    texts = [entry.text for entry in clients]
    assert len(texts) == 12
    assert len(set(texts)) == 4
    assert texts[:3] != [texts[0]] * 3
    assert texts == [entry.text for entry in router.make_requests("Rules.", 4, 3)]


def test_a_row_of_the_router() -> None:
    row = router.summarise([client(100, 60), client(100, 0)], 4.0, [1, 1])
    assert row["hit_rate"] == pytest.approx(0.3)
    assert (row["computed_tokens"], row["requests_per_s"], row["busiest_share"]) == (140, 0.5, 0.5)


def test_claims_and_plot_of_the_router(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {
            "memory": memory,
            "policy": policy,
            **router.summarise([client(100, cached)], seconds, [3, 1]),
        }
        for memory, policy, cached, seconds in (
            ("ample", "cache_aware", 60, 1.0),
            ("ample", "round_robin", 20, 2.0),
            ("tight", "cache_aware", 30, 2.0),
            ("tight", "round_robin", 20, 2.0),
        )
    ]
    met = [claim.met for claim in router.make_claims(rows, 2)]
    assert met == [True, True, True, False, False, True]
    Record("plot").write(rows, [], router.plot(rows, "title"), tmp_path)
    assert (tmp_path / "plot.png").stat().st_size > 10_000


def test_cache_report_counts_between_two_looks() -> None:
    before = {"cached_tokens": 10, "computed_prompt_tokens": 5}
    after = {"cached_tokens": 90, "computed_prompt_tokens": 25}
    report = bench_serving.cache_report(
        before | {"cached_tokens_by_kind": {"fp8": 10}},
        after | {"cached_tokens_by_kind": {"fp8": 50, "tq3": 40}},
    )
    assert report["cached_share"] == 0.8
    assert report["cached_tokens_by_kind"] == {"fp8": 40, "tq3": 40}


def test_claims_and_plot_of_the_harness(tmp_path: Path) -> None:
    row = {"cache": "on", "total_throughput": 400.0, "cached_share": 0.9, "completed": 8}
    row |= {"median_ttft_ms": 10.0, "median_e2e_latency_ms": 20.0}
    rows = [row, {**row, "cache": "off", "total_throughput": 250.0, "completed": 7}]
    claims = bench_serving.make_claims(rows, 8)
    assert [claim.met for claim in claims] == [False, True, False]
    Record("plot").write(rows, claims, bench_serving.plot(rows, "title"), tmp_path)
    assert (tmp_path / "plot.png").stat().st_size > 10_000
