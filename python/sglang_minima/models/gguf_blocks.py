"""The 4-bit blocks of GGUF files, kept beside the converted checkpoint as they are.

So int4 weights do not go through float and back, which would not find the same levels again. No
torch here: a conversion needs none.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

BLOCKS_FILE = "blocks.safetensors"
GROUP = 32
PARTS = ("codes", "scales", "minima")
_Q4_0_CENTRE = 8


def gguf_blocks(kind: str, rows: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]] | None:
    """The blocks of a quantised GGUF matrix without a detour through float.

    Args:
        kind: GGUF encoding.
        rows: uint8 [outputs, bytes of a row].

    Returns:
        The arrays of `weight_blocks.Blocks` by name; None if these are not 4-bit blocks of 32.
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
