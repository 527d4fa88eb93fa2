"""What is said of FlashInfer where it is not there, broken, or unable."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minima_kernels.cuda import library, ragged
from minima_kernels.cuda.ragged import HEAD_DIMS, RaggedPrefill, backend

GPU = torch.device("cuda", 0)
SHAPE = (32, 8, 128)


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    """Each test finds the library anew; what it finds is of this test alone."""
    found = library._layers_reason, library._prefill_reason, library._sampling_reason
    for function in (*found, library._announce):
        function.cache_clear()
    yield
    for function in (*found, library._announce):
        function.cache_clear()


def find(monkeypatch: pytest.MonkeyPatch, package: Any, reason: str | None = None) -> None:
    monkeypatch.setattr(library, "_find", lambda: (package, reason))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)


def test_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    find(monkeypatch, None, library.MISSING)
    assert library.layers_reason(GPU, torch.bfloat16) == "FlashInfer is not installed"
    assert library.describe(GPU, torch.bfloat16, *SHAPE) == (
        "torch computes norms and activations, prefill, top-p sampling: FlashInfer is not installed"
    )


def test_a_cpu_is_no_place_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    find(monkeypatch, SimpleNamespace())
    cpu = torch.device("cpu")
    assert library.sampling_reason(cpu) == "no CUDA device"
    assert library.layers_reason(cpu, torch.float16) == "no CUDA device"


def test_what_it_has_no_kernels_for(monkeypatch: pytest.MonkeyPatch) -> None:
    find(monkeypatch, SimpleNamespace())
    assert library.layers_reason(GPU, torch.float32) == "dtype float32"
    assert library.prefill_reason(GPU, torch.bfloat16, 32, 8, 80) == "head dim 80"
    assert library.prefill_reason(GPU, torch.float32, *SHAPE) == "dtype float32"


def test_a_kernel_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """One kind of work fails when it is tried: the others are served, and the line says so."""

    def fail(*arguments: object, **named: object) -> None:
        raise RuntimeError("ninja not found\nmore")

    done: list[str] = []

    def serve(name: str) -> Any:
        return lambda *arguments, **named: done.append(name)

    package = SimpleNamespace(
        __version__="9.9",
        norm=SimpleNamespace(rmsnorm=serve("norm"), fused_add_rmsnorm=serve("add")),
        activation=SimpleNamespace(silu_and_mul=serve("silu")),
        sampling=SimpleNamespace(top_p_renorm_probs=fail),
    )
    find(monkeypatch, package)
    monkeypatch.setattr(torch, "ones", _on_cpu(torch.ones))
    monkeypatch.setattr(torch, "full", _on_cpu(torch.full))
    line = library.describe(GPU, torch.bfloat16, 32, 8, 80)
    assert line == (
        "FlashInfer 9.9 computes norms and activations; torch computes prefill (head dim 80), "
        "top-p sampling (RuntimeError: ninja not found)"
    )
    assert done == ["norm", "norm", "add", "silu"]
    library.describe(GPU, torch.bfloat16, 32, 8, 80)
    assert len(done) == 4  # tried once
    with library.library_off():
        assert library.layers_reason(GPU, torch.bfloat16) == library.SWITCHED_OFF
    assert library.layers_reason(GPU, torch.bfloat16) is None


def test_a_wait_is_announced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Before the first trial, which may compile for minutes; not where nothing is tried."""
    heard: list[list[str]] = []

    def listen(*arguments: object, **named: object) -> None:
        heard.append([record.getMessage() for record in caplog.records])

    package = SimpleNamespace(__version__="9.9")
    package.sampling = SimpleNamespace(top_p_renorm_probs=listen)
    package.norm = SimpleNamespace(rmsnorm=listen, fused_add_rmsnorm=listen)
    package.activation = SimpleNamespace(silu_and_mul=listen)
    find(monkeypatch, package)
    monkeypatch.setattr(torch, "ones", _on_cpu(torch.ones))
    monkeypatch.setattr(torch, "full", _on_cpu(torch.full))
    with caplog.at_level(logging.INFO):
        library.sampling_reason(torch.device("cpu"))
        library.layers_reason(GPU, torch.float32)
        assert not caplog.records
        assert library.sampling_reason(GPU) is None
        assert library.layers_reason(GPU, torch.bfloat16) is None
    [line] = caplog.records
    assert heard[0] == [line.getMessage()]
    assert "FlashInfer 9.9" in heard[0][0] and "minutes" in heard[0][0]
    assert "flashinfer-jit-cache" in heard[0][0]


def _on_cpu(make: Any) -> Any:
    def made(*arguments: Any, device: object = None, **named: Any) -> torch.Tensor:
        return make(*arguments, **named)

    return made


def test_the_kernel_with_a_race_is_not_used() -> None:
    """FlashAttention-3 of FlashInfer 0.7.4 at head dim 256."""
    assert [backend((9, 0), dim) for dim in HEAD_DIMS] == ["fa3", "fa3", "fa2"]
    assert backend((8, 0), 128) == backend((10, 0), 128) == "fa2"


def test_prefill_is_planned_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """And for requests that have new tokens; lists of equal numbers are other steps."""
    planned: list[list[int]] = []

    class Wrapper:
        def __init__(self, *given: object, **named: object) -> None: ...

        def plan(
            self, rows: torch.Tensor, columns: torch.Tensor, *sizes: int, **named: Any
        ) -> None:
            assert rows is columns and named["causal"] and named["disable_split_kv"]
            planned.append(rows.tolist())

        def run(self, q: torch.Tensor, *given: object, **named: Any) -> Any:
            assert named["lse_base"] == "ln" and not named["enable_pdl"]
            return q, torch.zeros(q.shape[:2])

    event = SimpleNamespace(synchronize=lambda: None, record=lambda: None)
    prefill = SimpleNamespace(BatchPrefillWithRaggedKVCacheWrapper=Wrapper)
    monkeypatch.setattr(ragged, "package", lambda: SimpleNamespace(prefill=prefill))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    kernel = RaggedPrefill(torch.device("cpu"), 64)
    q, k = torch.zeros(9, 4, 64), torch.zeros(9, 2, 64)
    steps = [tuple(counts) for counts in ([0, 0, 4, 4, 9, 9], [0, 0, 4, 4, 9, 9])]
    for step in steps:
        for _ in range(3):
            kernel.attend(step, q, k, k, step, 0.1)
    assert planned == [[0, 4, 9]] * 2
    for scale, dtype in ((0.2, q.dtype), (0.2, torch.bfloat16)):
        kernel.attend(steps[1], q.to(dtype), k.to(dtype), k.to(dtype), steps[1], scale)
    assert len(planned) == 4
