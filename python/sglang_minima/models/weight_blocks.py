"""4-bit weight blocks: codes with a scale and a minimum per group of 32 weights."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

from sglang_minima.models.gguf_blocks import BLOCKS_FILE, GROUP, PARTS


class Blocks(NamedTuple):
    """w[n, k] = code[n, k] * scale[n, k // 32] + minimum[n, k // 32]."""

    codes: Tensor
    """uint8 [outputs, inputs / 2]: inputs 2i in the low and 2i + 1 in the high half of byte i."""
    scales: Tensor
    """float16 [outputs, inputs / 32]"""
    minima: Tensor
    """float16 [outputs, inputs / 32]"""

    def values(self) -> Tensor:
        """float32 [outputs, inputs]"""
        outputs, groups = self.scales.shape
        values = torch.empty(outputs, groups, GROUP // 2, 2)
        codes = self.codes.view(outputs, groups, GROUP // 2)
        values[..., 0] = codes & 15
        values[..., 1] = codes >> 4
        values *= self.scales.float()[..., None, None]
        values += self.minima.float()[..., None, None]
        return values.view(outputs, groups * GROUP)


def group_blocks(weight: Tensor) -> Blocks:
    """Rounds float weights [outputs, inputs] to the nearest of 16 even levels per group."""
    outputs, inputs = weight.shape
    groups = weight.float().view(outputs, inputs // GROUP, GROUP)
    low, high = groups.aminmax(dim=-1)
    minima = low.half()
    scales = ((high - minima.float()) / 15).half()
    step = scales.float().clamp_min(torch.finfo(torch.float16).tiny)
    codes = ((groups - minima.float()[..., None]) / step[..., None]).round().clamp(0, 15)
    pairs = codes.to(torch.uint8).view(outputs, inputs // 2, 2)
    return Blocks(pairs[..., 0] | (pairs[..., 1] << 4), scales, minima)


def load_blocks(directory: Path) -> dict[str, Blocks]:
    """The blocks beside a checkpoint by tensor name; empty if it has none."""
    path = directory / BLOCKS_FILE
    if not path.exists():
        return {}
    flat = load_file(path)
    names = {name.rpartition(":")[0] for name in flat}
    return {name: Blocks(*(flat[f"{name}:{part}"] for part in PARTS)) for name in names}
