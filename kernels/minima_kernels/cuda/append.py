"""A step's new rows on a GPU: RoPE, rotation and storage in open pages, one kernel per layer."""

from __future__ import annotations

import torch

from minima_kernels.cuda.driver import Argument, Launch
from minima_kernels.cuda.variants import APPEND_THREADS, append_variant
from minima_kernels.geometry import KVGeometry
from minima_kernels.kinds import PageKind
from minima_kernels.rotation import Rotation
from minima_kernels.routes import ROUTES, RouteCounters

_WARPS = APPEND_THREADS // 32

# Arguments of the generated kernel: tensors, then numbers, each by name.
_TENSORS = (
    "codes", "cosine", "k", "k_out", "page_bytes", "q", "q_out", "scales", "signs", "sine", "slots",
    "v",
)  # fmt: skip
_NUMBERS = (
    "k_rows", "k_scales", "k_width", "num_heads", "num_kv_heads", "num_rows", "q_width", "v_codes",
    "v_scales", "v_width",
)  # fmt: skip


def argument_names(is_scaled: bool, is_signed: bool) -> list[str]:
    """Names of the kernel's arguments in their order; those it does not use are not among them."""
    unused = set() if is_scaled else {"scales", "k_scales", "v_scales"}
    unused |= set() if is_signed else {"signs"}
    return [name for name in _TENSORS + _NUMBERS if name not in unused]


class CudaAppend:
    """Stores new rows in pages of a kind; launches only, so it can be captured in a CUDA graph.

    Every row format and head dim that the decode kernels read is taken (``decode_reason``).
    """

    def __init__(
        self, kind: PageKind, geometry: KVGeometry, rotation: Rotation, device: torch.device
    ) -> None:
        self._kind, self._geometry = kind, geometry
        self._rotation, self._device = rotation, device
        self._launches: dict[tuple[int, int, torch.dtype], tuple[Launch, dict[str, int]]] = {}

    def run(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        arena: torch.Tensor,
        page_bytes: torch.Tensor,
        slots: torch.Tensor,
        num_keys: int = 0,
        *,
        routes: RouteCounters = ROUTES,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Apply RoPE, and write the rows of one layer.

        Args:
            q: ``[N, Hq, D]`` before RoPE; the last two axes are contiguous in q, k and v, and rows
                are a multiple of D apart.
            k, v: ``[N, H, D]`` in the dtype of q.
            cos, sin: float32 ``[N, 1, D]``, of both halves; sin is negative in the first.
            arena: uint8 ``[bytes]``.
            page_bytes: int64 ``[N]``, where the page of each row starts; a row with a negative
                one is not written.
            slots: int64 ``[N]``, place in the page.
            num_keys: leading rows whose keys are wanted back.

        Returns:
            q ``[N, Hq, D]`` and k ``[num_keys, H, D]`` after RoPE, not rotated.

        Raises:
            ValueError: rows of q, k or v are not a multiple of D apart, or begin at an address
                that is not a multiple of 16.
        """
        routes.count("append", "cuda")
        num_rows, num_heads = q.shape[:2]
        q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        k_out = torch.empty((num_keys, *k.shape[1:]), dtype=k.dtype, device=k.device)
        if not num_rows:
            return q_out, k_out
        widths = []
        for name, x in (("q", q), ("k", k), ("v", v)):
            width, rest = divmod(x.stride(0), self._geometry.head_dim)
            if rest or x.data_ptr() % 16:
                raise ValueError(
                    f"{name}: rows {x.stride(0)} elements apart from {x.data_ptr():#x}"
                )
            widths.append((name, x.data_ptr(), width))
        key = layer, num_heads, q.dtype
        made = self._launches.get(key)
        if made is None:
            made = self._launches[key] = self._make(*key)
        launch, at = made
        for name, address, width in widths:
            launch.set(at[name], address)
            launch.set(at[f"{name}_width"], width)
        share = arena.data_ptr() + self._kind.layer_offset(layer, self._geometry)
        launch.set(at["codes"], share)
        if "scales" in at:
            launch.set(at["scales"], share)
        launch.set(at["cosine"], cos.data_ptr())
        launch.set(at["sine"], sin.data_ptr())
        launch.set(at["q_out"], q_out.data_ptr())
        launch.set(at["k_out"], k_out.data_ptr() if num_keys else 0)
        launch.set(at["k_rows"], num_keys)
        launch.set(at["num_rows"], num_rows)
        launch.set(at["page_bytes"], page_bytes.data_ptr())
        launch.set(at["slots"], slots.data_ptr())
        launch.resize(num_rows)
        launch.call(torch.cuda.current_stream(self._device).cuda_stream)
        return q_out, k_out

    def _make(
        self, layer: int, num_heads: int, dtype: torch.dtype
    ) -> tuple[Launch, dict[str, int]]:
        """A launch, and the places of its arguments."""
        geometry, format_, signs = self._geometry, self._kind.formats[layer], self._rotation.signs
        layout = format_.layout(geometry)
        fixed: dict[str, Argument] = {
            "num_heads": num_heads,
            "num_kv_heads": geometry.num_kv_heads,
            "v_codes": layout.v_codes.offset,
            "signs": signs,
        }
        if layout.k_scales is not None and layout.v_scales is not None:
            fixed |= {"k_scales": layout.k_scales.offset, "v_scales": layout.v_scales.offset}
        names = argument_names("k_scales" in fixed, signs is not None)
        arguments = [fixed.get(name, None if name in _TENSORS else 0) for name in names]
        variant = append_variant(format_, geometry, dtype, signs is not None)
        groups = -(-(num_heads + 2 * geometry.num_kv_heads) // _WARPS)
        function = variant.load("append_kernel", self._device)
        launch = Launch(function, (1, groups), arguments, overlaps=False)
        return launch, {name: place for place, name in enumerate(names)}
