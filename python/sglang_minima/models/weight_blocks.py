"""4-bit weight blocks: codes with a scale and a minimum per group of 32, and where they come from.

The Q4_0 and Q4_1 blocks of a GGUF file are kept beside the converted checkpoint as they are, so
that int4 weights do not go through float and back (which would not find the same levels again).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.numpy import save_file
from safetensors.torch import load_file
from torch import Tensor

GROUP = 32
BLOCKS_FILE = "blocks.safetensors"
_PARTS = ("codes", "scales", "minima")
_Q4_0_CENTRE = 8


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


def gguf_blocks(kind: str, rows: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]] | None:
    """The blocks of a quantised GGUF matrix without a detour through float.

    Args:
        kind: GGUF encoding.
        rows: uint8 [outputs, bytes of a row].

    Returns:
        The arrays of `Blocks` by name; None for encodings that are not 4-bit blocks of 32.
    """
    if kind not in ("Q4_0", "Q4_1"):
        return None
    # Layout of a block (ggml): float16 scale, for Q4_1 float16 minimum, 16 bytes of which the low
    # halves are weights 0 to 15 and the high halves 16 to 31.
    head = 2 if kind == "Q4_0" else 4
    blocks = rows.reshape(len(rows), -1, head + GROUP // 2)
    halves = np.ascontiguousarray(blocks[..., :head]).view(np.float16)
    packed = blocks[..., head:]
    nibbles = np.concatenate((packed & 15, packed >> 4), axis=-1)
    scales = np.ascontiguousarray(halves[..., 0])
    # A power of two times a float16 is exact.
    minima = -_Q4_0_CENTRE * scales if kind == "Q4_0" else np.ascontiguousarray(halves[..., 1])
    return {
        "codes": (nibbles[..., 0::2] | nibbles[..., 1::2] << 4).reshape(len(rows), -1),
        "scales": scales,
        "minima": minima.astype(np.float16),
    }


def save_blocks(directory: Path, blocks: Mapping[str, Mapping[str, np.ndarray[Any, Any]]]) -> None:
    """Writes blocks by tensor name beside a checkpoint; nothing if there are none."""
    if blocks:
        flat = {f"{name}:{part}": v for name, parts in blocks.items() for part, v in parts.items()}
        save_file(flat, directory / BLOCKS_FILE)


def load_blocks(directory: Path) -> dict[str, Blocks]:
    """The blocks beside a checkpoint by tensor name; empty if it has none."""
    path = directory / BLOCKS_FILE
    if not path.exists():
        return {}
    flat = load_file(path)
    names = {name.rpartition(":")[0] for name in flat}
    return {name: Blocks(*(flat[f"{name}:{part}"] for part in _PARTS)) for name in names}
