"""Weights in blocks of 32 as the CPU kernels read them: from a file, or rounded from floats."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from minima_kernels.cpu.linear import BLOCK, BlockKind, pack
from sglang_minima.models.errors import ModelLoadError
from sglang_minima.models.gguf_blocks import BLOCKS_FILE

_ALIGNMENT = 64


class Panels(NamedTuple):
    """A matrix as `minima_kernels.cpu.linear.pack` lays it out."""

    kind: BlockKind
    data: Tensor
    """uint8"""


def has_blocks(directory: Path) -> bool:
    """Whether there are blocks beside a checkpoint."""
    return (directory / BLOCKS_FILE).exists()


def load_panels(directory: Path) -> dict[str, Panels]:
    """The blocks beside a checkpoint by module; empty if it has none.

    All of them are in one piece of memory in huge pages: few rows read the weights as fast as the
    memory gives them, and address translation takes a third of that in small pages.

    Raises:
        ModelLoadError: the file is damaged.
    """
    if not has_blocks(directory):
        return {}
    path = directory / BLOCKS_FILE
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return _panels({name: file.get_tensor(name) for name in sorted(file.keys())})
    except (SafetensorError, OSError, KeyError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}.") from None


def _panels(stored: dict[str, Tensor]) -> dict[str, Panels]:
    panels = {}
    sizes = [-(-tensor.numel() // _ALIGNMENT) * _ALIGNMENT for tensor in stored.values()]
    memory = _huge(sum(sizes))
    start = 0
    for (name, tensor), size in zip(stored.items(), sizes, strict=True):
        data = memory[start : start + tensor.numel()]
        data.copy_(tensor.view(-1))
        module, _, kind = name.rpartition(":")
        panels[module] = Panels(BlockKind[kind], data)
        start += size
    return panels


def _huge(size: int) -> Tensor:
    memory = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def round_to_q4(weight: Tensor) -> Panels:
    """Rounds float weights [outputs, inputs] to the nearest of 16 even levels per block."""
    groups = weight.float().view(len(weight), -1, BLOCK)
    low, high = groups.aminmax(dim=-1)
    minima = low.half()
    scales = ((high - minima.float()) / 15).half()
    step = scales.float().clamp_min(torch.finfo(torch.float16).tiny)
    codes = ((groups - minima.float()[..., None]) / step[..., None]).round_().clamp_(0, 15)
    arrays = (codes.to(torch.uint8).flatten(1), scales, minima)
    return Panels(BlockKind.Q4, torch.from_numpy(pack(*(part.numpy() for part in arrays))))


def round_to_q8(weight: Tensor) -> Panels:
    """Rounds float weights [outputs, inputs] to int8 times a scale per block."""
    groups = weight.float().view(len(weight), -1, BLOCK)
    scales = (groups.abs().amax(dim=-1) / 127).half()
    step = scales.float().clamp_min(torch.finfo(torch.float16).tiny)
    codes = (groups / step[..., None]).round_().clamp_(-127, 127).to(torch.int8)
    return Panels(BlockKind.Q8, torch.from_numpy(pack(codes.flatten(1).numpy(), scales.numpy())))
