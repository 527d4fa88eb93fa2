"""The engine in the benchmark's own process, step by step, without HTTP."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from minima_kernels import retier
from minima_radix import Namespace
from sglang_minima.cache.prefix_cache import PrefixCache
from sglang_minima.messages import GenerateRequest, TokenOutput
from sglang_minima.runner.model_runner import ModelRunner
from sglang_minima.sampling_params import SamplingParams
from sglang_minima.scheduler.request import Request
from sglang_minima.scheduler.scheduler import Scheduler
from sglang_minima.scheduler.stopping import StopMatcher
from sglang_minima.server_args import ServerArgs


class EngineBench:
    """One profile: an arena with a scheduler over it, on the model that all profiles share."""

    def __init__(self, runner: ModelRunner, args: ServerArgs) -> None:
        self.runner, self.args = runner, args
        arena = runner.allocate(args)
        runner.attach(arena)
        if not args.disable_cuda_graph:
            runner.capture_graphs(args.max_running_requests)
        self.cache = PrefixCache(args, arena)
        self.done: set[str] = set()
        self.first: set[str] = set()
        self.scheduler = Scheduler(args, runner, self.cache, None, frozenset(), self._collect)
        self._count = 0

    def _collect(self, outputs: list[TokenOutput]) -> None:
        for output in outputs:
            self.first.add(output.rid)
            if output.finish is not None:
                if output.finish.type == "abort":
                    raise RuntimeError(output.finish.message)
                self.done.add(output.rid)

    def submit(self, ids: list[int], new_tokens: int) -> str:
        self._count += 1
        rid = f"r{self._count}"
        params = SamplingParams(temperature=0.0, max_new_tokens=new_tokens, ignore_eos=True)
        self.scheduler.add(GenerateRequest(rid, ids, params))
        return rid

    def drain(self) -> None:
        while self.scheduler.busy:
            self.scheduler.step()

    def settle(self) -> None:
        """Converts what may be converted."""
        controller = self.cache.controller
        while controller.step(64) or controller.compress_left(64):
            pass
        synchronize(self.runner.device)

    def prefill(self, ids: list[int]) -> float:
        started = time.perf_counter()
        self.submit(ids, 1)
        self.drain()
        synchronize(self.runner.device)
        return time.perf_counter() - started

    def copy_prefix(self, source: list[int], ids: list[int]) -> None:
        """Puts ``ids`` into the cache with the KV that ``source``, of equal length, has there."""
        lifecycle, recent = self.cache.lifecycle, self.cache.profile.recent
        params = SamplingParams(temperature=0.0, max_new_tokens=1)

        def request(tokens: list[int]) -> Request:
            self._count += 1
            namespace = Namespace(None, None, self.cache.profile.name)
            stop = StopMatcher(params, frozenset(), None)
            message = GenerateRequest(f"copy{self._count}", tokens, params)
            return Request(message, 1 << 40 | self._count, namespace, stop, 0)

        copy = request([*ids, 0])
        self.cache.admit(copy)
        assert copy.written == 0, "the copy has a prefix in the cache"
        if not self.cache.reserve(copy, len(ids)):
            raise torch.cuda.OutOfMemoryError("no room in the arena")
        original = request([*source, 0])
        self.cache.admit(original)
        pages = original.held_table.pages
        for kind in self.cache.profile.kinds:
            chosen = [i for i in range(len(ids) // self.cache.page_size)
                      if lifecycle.pool.kind_of(pages[i]) == kind.name]  # fmt: skip
            targets = [copy.held_table.pages[i] for i in chosen]
            retier(self.cache.arena.buffer, [pages[i] for i in chosen], kind, targets, recent,
                   self.cache.arena.geometry)  # fmt: skip
        self.cache.release(original)
        self.cache.commit(copy, len(ids))
        self.cache.release(copy)

    def decode(self, prompts: Sequence[list[int]], new_tokens: int) -> dict[str, Any]:
        """Runs prompts together; figures of the steps in which all of them decode."""
        started = time.perf_counter()
        rids = {self.submit(ids, new_tokens) for ids in prompts}
        while not rids <= self.first:
            self.scheduler.step()
        synchronize(self.runner.device)
        begun = time.perf_counter()
        kv_bytes = sum(
            kind.pages_used * self.cache.pool.granules_of(name) * 128
            for name, kind in self.cache.pool.stats().kinds.items()
        )
        statistics = self.scheduler.statistics
        idle = statistics.idle
        before = statistics.generated, idle.steps, idle.busy_seconds, idle.idle_seconds
        while not rids & self.done:
            self.scheduler.step()
        synchronize(self.runner.device)
        seconds = time.perf_counter() - begun
        tokens = statistics.generated - before[0]
        measured, busy, waiting = (
            now - then
            for now, then in zip(
                (idle.steps, idle.busy_seconds, idle.idle_seconds), before[1:], strict=True
            )
        )
        self.drain()
        return {
            "requests": len(prompts),
            "prompt": len(prompts[0]),
            "tok_per_s": tokens / seconds,
            "step_ms": 1000 * seconds * len(prompts) / tokens,
            "gpu_ms": 1000 * busy / measured if measured else None,
            "idle_ms": 1000 * waiting / measured if measured else None,
            "cpu_percent": 100 * waiting / (busy + waiting) if measured else None,
            "ttft_s": begun - started,
            "kv_gb": kv_bytes / 1e9,
        }


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
