"""Pages made on the CPU, moved to a GPU in the order that its kernels read."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))

from kernel_pages import POISON, Pages

from minima_kernels import Segment
from minima_kernels.cuda.order import page_order
from minima_kernels.shares import write_shares


def move(pages: Pages, segments: Sequence[Segment]) -> torch.Tensor:
    """The arena of ``pages`` on the GPU; poison stays poison."""
    geometry, cuda = pages.geometry, torch.device("cuda", 0)
    arena = pages.arena.to(cuda)
    for segment in segments:
        kind = pages.kinds[segment.kind_index]
        addresses = torch.as_tensor(segment.addresses)
        for layer, format_ in enumerate(kind.formats):
            if page_order(format_, geometry, cuda) is None:
                continue
            offset, size = kind.layer_offset(layer, geometry), format_.layer_bytes(geometry)
            rows = [pages.arena[a * 128 + offset :][:size] for a in addresses.tolist()]
            data = torch.stack(rows).to(cuda)
            write_shares(arena, addresses.to(cuda), format_, offset, geometry, data)
    assert int(arena[0]) == POISON
    return arena
