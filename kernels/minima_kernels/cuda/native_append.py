"""The same as ``append.py`` in CUDA C++, for comparison."""

from __future__ import annotations

import torch

from minima_kernels.cuda.driver import Argument, Launch
from minima_kernels.cuda.variants import DTYPES, native_append_variant
from minima_kernels.geometry import KVGeometry
from minima_kernels.kinds import PageKind
from minima_kernels.rotation import Rotation
from minima_kernels.routes import ROUTES, RouteCounters

_WARPS = 8

# Arguments that change from run to run, by place.
_Q, _K, _V, _STRIDES, _DTYPE, _ROWS, _HEADS = 0, 1, 2, 3, 6, 7, 8
_COS, _SIN, _Q_OUT, _K_OUT, _K_ROWS, _SHARE, _PAGES, _SLOTS = 10, 11, 13, 14, 15, 16, 17, 18


class NativeAppend:
    """Stores new rows in pages of a kind; launches only, so it can be captured in a CUDA graph.

    Every row format and head dim that the decode kernels read is taken (``decode_reason``).
    """

    def __init__(
        self, kind: PageKind, geometry: KVGeometry, rotation: Rotation, device: torch.device
    ) -> None:
        self._kind, self._geometry = kind, geometry
        self._rotation, self._device = rotation, device
        self._launches: dict[int, Launch] = {}

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
            q: ``[N, Hq, D]`` before RoPE; the last two axes are contiguous in q, k and v.
            k, v: ``[N, H, D]`` in the dtype of q.
            cos, sin: float32 ``[N, 1, D]``, of both halves; sin is negative in the first.
            arena: uint8 ``[bytes]``.
            page_bytes: int64 ``[N]``, where the page of each row starts; a row with a negative
                one is not written.
            slots: int64 ``[N]``, place in the page.
            num_keys: leading rows whose keys are wanted back.

        Returns:
            q ``[N, Hq, D]`` and k ``[num_keys, H, D]`` after RoPE, not rotated.
        """
        routes.count("append", "cuda")
        num_rows, num_heads = q.shape[:2]
        q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        k_out = torch.empty((num_keys, *k.shape[1:]), dtype=k.dtype, device=k.device)
        if not num_rows:
            return q_out, k_out
        launch = self._launches.get(layer)
        if launch is None:
            launch = self._launches[layer] = self._make(layer)
        for place, x in ((_Q, q), (_K, k), (_V, v)):
            launch.set(place, x.data_ptr())
            launch.set(_STRIDES + place, x.stride(0))
        launch.set(_DTYPE, DTYPES[q.dtype])
        launch.set(_ROWS, num_rows)
        launch.set(_HEADS, num_heads)
        launch.set(_COS, cos.data_ptr())
        launch.set(_SIN, sin.data_ptr())
        launch.set(_Q_OUT, q_out.data_ptr())
        launch.set(_K_OUT, k_out.data_ptr() if num_keys else 0)
        launch.set(_K_ROWS, num_keys)
        offset = self._kind.layer_offset(layer, self._geometry)
        launch.set(_SHARE, arena.data_ptr() + offset)
        launch.set(_PAGES, page_bytes.data_ptr())
        launch.set(_SLOTS, slots.data_ptr())
        vectors = num_rows * (num_heads + 2 * self._geometry.num_kv_heads)
        launch.resize(-(-vectors // _WARPS))
        launch.call(torch.cuda.current_stream(self._device).cuda_stream)
        return q_out, k_out

    def _make(self, layer: int) -> Launch:
        geometry, format_ = self._geometry, self._kind.formats[layer]
        function = native_append_variant(format_, geometry).load("append", self._device)
        layout = format_.layout(geometry)
        arguments: list[Argument] = [None] * 19
        arguments[_STRIDES : _HEADS + 1] = [0] * (_HEADS + 1 - _STRIDES)
        arguments[_HEADS + 1] = geometry.num_kv_heads
        arguments[_SIN + 1] = self._rotation.signs
        arguments[_K_ROWS] = 0
        arguments.append(layout.v_codes.offset)
        for part in (layout.k_scales, layout.v_scales):
            arguments.append(0 if part is None else part.offset)
        return Launch(function, (1, 1), arguments, overlaps=False)
