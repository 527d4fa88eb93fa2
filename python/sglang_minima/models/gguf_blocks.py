"""The 4- and 8-bit blocks of GGUF files, kept beside the converted checkpoint as they are.

So these weights do not go through float and back, which would not find the same levels again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from safetensors.numpy import save_file

BLOCKS_FILE = "blocks.safetensors"
BLOCK = 32
"""Weights that share a scale."""
_Q4_0_CENTRE = 8
_FUSED = {
    part: (fused, parts)
    for fused, parts in (
        ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
        ("gate_up_proj", ("gate_proj", "up_proj")),
    )
    for part in parts
}
"""Part -> the fused module and all its parts, in the order of their rows."""

Array = np.ndarray[Any, Any]


class BlockArrays(NamedTuple):
    """w[n, k] = codes[n, k] * scales[n, k // 32] + minima[n, k // 32]."""

    codes: Array
    """[outputs, inputs]: uint8 below 16, or int8 where there are no minima."""
    scales: Array
    """float16 [outputs, inputs / 32]"""
    minima: Array | None
    """float16 [outputs, inputs / 32]"""

    @property
    def kind(self) -> Literal["Q4", "Q8"]:
        """Name of a `minima_kernels.cpu.linear.BlockKind`."""
        return "Q8" if self.minima is None else "Q4"


def gguf_blocks(kind: str, rows: Array) -> BlockArrays | None:
    """The blocks of a quantised GGUF matrix without a detour through float.

    Args:
        kind: GGUF encoding.
        rows: uint8 [outputs, bytes of a row].

    Returns:
        None if these are no 4- or 8-bit blocks of 32.
    """
    if kind not in ("Q4_0", "Q4_1", "Q8_0"):
        return None
    # Layout of a block (ggml): float16 scale, for Q4_1 float16 minimum, then 32 int8 or 16 bytes of
    # which the low halves are weights 0 to 15 and the high halves 16 to 31.
    head = 4 if kind == "Q4_1" else 2
    body = BLOCK if kind == "Q8_0" else BLOCK // 2
    blocks = rows.reshape(len(rows), -1, head + body)
    halves = np.ascontiguousarray(blocks[..., :head]).view(np.float16)
    scales = np.ascontiguousarray(halves[..., 0])
    codes = blocks[..., head:]
    if kind == "Q8_0":
        signed = np.ascontiguousarray(codes).view(np.int8)
        return BlockArrays(signed.reshape(len(rows), -1), scales, None)
    nibbles = np.concatenate((codes & 15, codes >> 4), axis=-1).reshape(len(rows), -1)
    # A power of two times a float16 is exact.
    minima = -_Q4_0_CENTRE * scales if kind == "Q4_0" else np.ascontiguousarray(halves[..., 1])
    return BlockArrays(nibbles, scales, minima.astype(np.float16))


def module_blocks(blocks: Mapping[str, BlockArrays]) -> Iterable[tuple[str, BlockArrays]]:
    """The blocks by module from those by tensor: fused modules have those of all their parts.

    A fused module whose parts have not all the same kind of blocks is left out.
    """
    for name in blocks:
        module = name.removesuffix(".weight")
        projection = module.rpartition(".")[2]
        parent = module.removesuffix(projection)
        fused, parts = _FUSED.get(projection, (projection, (projection,)))
        if projection != parts[0]:
            continue
        found = [blocks.get(f"{parent}{part}.weight") for part in parts]
        present = [block for block in found if block is not None]
        if len(present) < len(found) or len({block.kind for block in present}) > 1:
            continue
        codes, scales = (np.concatenate([block[i] for block in present]) for i in (0, 1))
        minima = [block.minima for block in present if block.minima is not None]
        yield (
            f"{parent}{fused}",
            BlockArrays(codes, scales, np.concatenate(minima) if minima else None),
        )


def save_blocks(directory: Path, blocks: Mapping[str, BlockArrays]) -> None:
    """Writes blocks by tensor name beside a checkpoint, by module and as the kernels read them.

    The name of a tensor is that of its module, a colon and the kind; nothing is written if there
    are no blocks.
    """
    # Brings torch, which those who only resolve a path do without.
    from minima_kernels.cpu.linear import pack

    panels = {f"{name}:{arrays.kind}": pack(*arrays) for name, arrays in module_blocks(blocks)}
    if panels:
        save_file(panels, directory / BLOCKS_FILE)
