"""What every benchmark of GPU kernels shares: facts of the device, timing, and its record."""

from __future__ import annotations

import ctypes
import math
import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from common import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Bytes read in one replay: many times the cache.
MIN_REPLAY_BYTES = 1.2e9
MAX_SETS = 12

Call = Callable[[], object]


def gpu_record(benchmark: str) -> Record:
    """A record that knows the GPU."""
    if not torch.cuda.is_available():
        raise SystemExit(f"{benchmark} measures an NVIDIA GPU, and there is none.")
    record = Record(benchmark, needs_plot=False)
    record.machine |= gpu_facts()
    return record


def gpu_facts() -> dict[str, Any]:
    """The GPU and what runs it."""
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "cuda": torch.version.cuda,
    }


def time_graph(calls: Sequence[Call], rounds: int) -> tuple[float, float, float]:
    """Median, least and largest microseconds of one call, all calls in one CUDA graph."""
    stream = torch.cuda.Stream()
    count = max(len(calls), 4)
    times = []
    with torch.cuda.stream(stream):
        for call in calls:
            call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            held = [calls[i % len(calls)]() for i in range(count)]
        for _ in range(3):
            graph.replay()
        for _ in range(rounds):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record(stream)
            graph.replay()
            stop.record(stream)
            stream.synchronize()
            times.append(start.elapsed_time(stop) * 1e3 / count)
    del held
    return statistics.median(times), min(times), max(times)


def time_events(call: Call, rounds: int) -> float:
    """Median milliseconds of a call, by the device's clock."""
    times = []
    for index in range(rounds + 2):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        stop.synchronize()
        if index >= 2:
            times.append(start.elapsed_time(stop))
    return statistics.median(times)


def num_sets(num_bytes: int) -> int:
    """Input sets of so many bytes to rotate, so that no replay finds them in the cache."""
    return max(1, min(MAX_SETS, math.ceil(MIN_REPLAY_BYTES / num_bytes)))


def find_flashinfer() -> Any | None:
    """The module, ready to compile kernels; None, which is told, where it is not installed."""
    try:
        import flashinfer
    except ImportError:
        print("FlashInfer is not installed: no peers")
        return None
    ctypes.CDLL("libcuda.so.1", ctypes.RTLD_GLOBAL)
    return flashinfer


def draw_methods(axis: Axes, rows: Sequence[dict[str, Any]], title: str) -> None:
    """The microseconds of each method as bars, FlashInfer's in a colour of their own."""
    colours = ["C1" if row["method"].startswith("FlashInfer") else "C0" for row in rows]
    axis.barh([row["method"] for row in rows], [row["us"] for row in rows], color=colours)
    axis.set(title=title, xlabel="µs")
    axis.invert_yaxis()
