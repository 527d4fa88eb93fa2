"""FlashInfer on a GPU: which of its kernels serve, and why torch does where they do not.

Whether a kernel serves is tried once per process and kind of work, on a few numbers, before any
request is there: the first use may compile it, or find that it cannot be compiled.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

logger = logging.getLogger(__name__)

MISSING = "FlashInfer is not installed"
SWITCHED_OFF = "FlashInfer switched off"
_HALVES = (torch.float16, torch.bfloat16)

_switched_off = False


@contextmanager
def library_off() -> Iterator[None]:
    """Keep everything on torch, to compare with it; layers are those of when they were made."""
    global _switched_off
    before, _switched_off = _switched_off, True
    try:
        yield
    finally:
        _switched_off = before


@cache
def _find() -> tuple[Any, str | None]:
    """The package, or why it cannot be imported."""
    if importlib.util.find_spec("flashinfer") is None:
        return None, MISSING
    try:
        package = importlib.import_module("flashinfer")
        for name in ("activation", "norm", "prefill", "sampling"):
            importlib.import_module(f"flashinfer.{name}")
    except Exception as error:  # whatever a broken installation raises
        return None, _short(error)
    return package, None


def package() -> Any:
    """The package; ``None`` where it is missing or broken."""
    return _find()[0]


def layers_reason(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why torch computes norms and activations of layers; ``None`` if the library does."""
    return SWITCHED_OFF if _switched_off else _layers_reason(device, dtype)


def prefill_reason(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int
) -> str | None:
    """Why torch attends from new tokens to each other; ``None`` if the library does."""
    if _switched_off:
        return SWITCHED_OFF
    return _prefill_reason(device, dtype, heads, kv_heads, head_dim)


def sampling_reason(device: torch.device) -> str | None:
    """Why torch finds the tokens of top-p sampling; ``None`` if the library does."""
    return SWITCHED_OFF if _switched_off else _sampling_reason(device)


def describe(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int
) -> str:
    """One line: what the library serves for a model and what torch does, and why."""
    found, missing = _find()
    reasons = {
        "norms and activations": layers_reason(device, dtype),
        "prefill": prefill_reason(device, dtype, heads, kv_heads, head_dim),
        "top-p sampling": sampling_reason(device),
    }
    if missing is not None or _switched_off:
        return f"torch computes {', '.join(reasons)}: {missing or SWITCHED_OFF}"
    served = [area for area, reason in reasons.items() if reason is None]
    line = f"FlashInfer {found.__version__} computes {', '.join(served) or 'nothing'}"
    others = [f"{area} ({reason})" for area, reason in reasons.items() if reason is not None]
    return f"{line}; torch computes {', '.join(others)}" if others else line


@cache
def _layers_reason(device: torch.device, dtype: torch.dtype) -> str | None:
    def run(library: Any) -> None:
        x = torch.ones(3, 4, 64, dtype=dtype, device=device)
        weight = torch.ones(64, dtype=dtype, device=device)
        library.norm.rmsnorm(x[:, 0], weight, 1e-6, enable_pdl=False)
        library.norm.rmsnorm(x[:, 1:3], weight, 1e-6, enable_pdl=False)
        library.norm.fused_add_rmsnorm(x[:, 0], x[:, 1], weight, 1e-6, enable_pdl=False)
        library.activation.silu_and_mul(x[:, 0].contiguous(), enable_pdl=False)

    return _wrong_dtype(dtype) or _try(device, run)


@cache
def _prefill_reason(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int
) -> str | None:
    # Imported here: it needs this module.
    from minima_kernels.cuda.ragged import HEAD_DIMS, RaggedPrefill

    def run(library: Any) -> None:
        q = torch.ones(2, heads, head_dim, dtype=dtype, device=device)
        k = torch.ones(2, kv_heads, head_dim, dtype=dtype, device=device)
        RaggedPrefill(device, head_dim).attend(run, q, k, k, (0, 2), 1.0)

    if head_dim not in HEAD_DIMS:
        return f"head dim {head_dim}"
    return _wrong_dtype(dtype) or _try(device, run)


@cache
def _sampling_reason(device: torch.device) -> str | None:
    def run(library: Any) -> None:
        probabilities = torch.full((2, 64), 1 / 64, device=device)
        top_p = torch.full((2,), 0.5, device=device)
        library.sampling.top_p_renorm_probs(probabilities, top_p, is_deterministic=True)

    return _try(device, run)


def _wrong_dtype(dtype: torch.dtype) -> str | None:
    return None if dtype in _HALVES else f"dtype {str(dtype).removeprefix('torch.')}"


def _try(device: torch.device, run: Callable[[Any], None]) -> str | None:
    if device.type != "cuda":
        return "no CUDA device"
    found, missing = _find()
    if missing is not None:
        return missing
    _announce(found.__version__)
    try:
        run(found)
        torch.cuda.synchronize(device)
    except Exception as error:  # compilers and loaders raise all kinds
        logger.debug("FlashInfer failed a trial", exc_info=True)
        return _short(error)
    return None


@cache
def _announce(version: str) -> None:
    """Says what a start may wait for; once, before the first trial."""
    logger.info(
        "Trying FlashInfer %s. What it has not compiled before it compiles now: a first start may "
        "take minutes (not with the package flashinfer-jit-cache of the same version)",
        version,
    )


def _short(error: Exception) -> str:
    """One line of an error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:120]}" if lines else type(error).__name__
