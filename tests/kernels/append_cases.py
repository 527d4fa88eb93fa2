"""New rows of a step, appended by a kernel and by torch step by step."""

from __future__ import annotations

import torch

from minima_kernels import (
    GRANULE,
    KVGeometry,
    PageKind,
    Rotation,
    append_tokens,
    parse_format,
    read_page,
)
from minima_kernels.cuda.append import CudaAppend


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return wide * cos + wide.roll(x.shape[-1] // 2, dims=-1) * sin


def check_append(
    name: str,
    dim: int,
    dtype: torch.dtype,
    device: torch.device,
    signs: list[int] | None = None,
) -> None:
    """Seven rows of 12 query heads and 3 KV heads, fused as a model's projection leaves them."""
    torch.manual_seed(0)
    geometry = KVGeometry(2, 3, dim, 64)
    kind = PageKind.uniform(name, parse_format(name), 2)
    granules = kind.granules(geometry)
    rotation = Rotation(dim, device=device, signs=signs)
    poisoned = torch.full((4 * granules * GRANULE,), 255, dtype=torch.uint8, device=device)
    arenas = [poisoned, poisoned.clone()]
    num_rows = 7
    heads = torch.randn(num_rows, 12 + 6, dim).to(device, dtype)
    q, k, v = heads.split((12, 3, 3), dim=1)
    angles = torch.rand(num_rows, 1, dim // 2).to(device) * 6
    cos, sin = angles.cos(), angles.sin()
    cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
    pages = torch.tensor([0, 1, 1, 3, 3, 2, -1])
    page_bytes = torch.where(pages < 0, -1, pages * granules * GRANULE).to(device)
    slots = torch.tensor([0, 63, 5, 1, 2, 17, 0], device=device)
    new_q, new_k = CudaAppend(kind, geometry, rotation, device).run(
        1, q, k, v, cos, sin, arenas[0], page_bytes, slots, 4
    )
    turned = rope(k, cos, sin)
    exact = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
    assert torch.allclose(new_q.float(), rope(q, cos, sin), atol=exact, rtol=exact)
    assert torch.allclose(new_k.float(), turned[:4], atol=exact, rtol=exact)
    stored = slice(0, num_rows - 1)
    append_tokens(
        kind, 1, arenas[1], page_bytes[stored], slots[stored],
        rotation.forward(turned[stored]), rotation.forward(v[stored]), geometry,
    )  # fmt: skip
    for page, slot in zip(pages[stored].tolist(), slots.tolist(), strict=False):
        for own, expected in zip(
            read_page(arenas[0], page * granules, kind, 1, geometry),
            read_page(arenas[1], page * granules, kind, 1, geometry),
            strict=True,
        ):
            # A value on the border of two codes may fall to the other side.
            error = (own[slot] - expected[slot]).norm() / expected[slot].norm()
            assert error < 4e-3
    # Nothing else was written, above all nothing of the row without a page.
    differing = (arenas[0] != 255) != (arenas[1] != 255)
    assert differing.float().mean() < 1e-3
    assert bool((arenas[0][: kind.layer_offset(1, geometry)] == 255).all())
