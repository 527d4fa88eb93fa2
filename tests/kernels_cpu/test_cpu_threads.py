"""The thread pool, seen from outside: same bits, forks, callers at once, a clean exit."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from kernel_pages import Pages

from minima_kernels import KVGeometry, plan_decode, run_decode


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Batch:
    def __init__(self) -> None:
        pages = Pages(KVGeometry(1, 4, 64, 16), ["tq3", "fp8"])
        segments = [pages.segment(0, 40, [0, 1]), pages.segment(1, 20, [1], last_page_len=3)]
        self.plan = plan_decode(segments, 2, pages.kinds, pages.geometry, "cpu")
        self.q = pages.random(2, 8, 64)
        self.arena = pages.arena

    def run(self) -> torch.Tensor:
        return run_decode(self.plan, self.q, self.arena, 0, 0.125).out


def decode(num_threads: int) -> torch.Tensor:
    torch.set_num_threads(num_threads)
    return Batch().run()


def test_any_number_of_threads(threads: None) -> None:
    expected = decode(1)
    for count in (2, 3, 7):
        # More threads cut the pages into more items, so sums are taken in another order.
        assert torch.allclose(decode(count), expected, atol=1e-4)
        assert torch.equal(decode(count), decode(count))


def test_callers_at_once(threads: None) -> None:
    expected = decode(2)
    with ThreadPoolExecutor(4) as executor:
        for out in executor.map(decode, [2] * 12):
            assert torch.equal(out, expected)


def in_child(batch: Batch, queue: multiprocessing.SimpleQueue[list[float]]) -> None:
    queue.put(batch.run().flatten().tolist())


def test_forked_child(threads: None) -> None:
    """A child forked after the pool has started has none of its threads."""
    torch.set_num_threads(2)
    batch = Batch()
    expected = batch.run().flatten().tolist()
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=in_child, args=(batch, queue))
    child.start()
    child.join(60)
    if child.is_alive():
        child.kill()
    assert child.exitcode == 0
    assert queue.get() == expected
    assert batch.run().flatten().tolist() == expected


def test_clean_exit(threads: None) -> None:
    code = "import test_cpu_threads; print(test_cpu_threads.decode(2).shape)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "[2, 8, 64]" in done.stdout
