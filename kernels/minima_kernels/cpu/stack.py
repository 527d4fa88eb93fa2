"""A decode step through all layers in one native call: see ``native/stack.h``."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from minima_kernels.cpu import abi
from minima_kernels.cpu.decode import NativeDecode
from minima_kernels.cpu.layout import layer_pointers, native_geometry, page_formats
from minima_kernels.cpu.library import native_library
from minima_kernels.cpu.linear import BlockMatrix, Input
from minima_kernels.kinds import PageKind
from minima_kernels.routes import ROUTES, RouteCounters


class HeadNorm(NamedTuple):
    """RMSNorm of each head of queries and keys; float32 ``[D]`` weights."""

    q_weight: torch.Tensor
    k_weight: torch.Tensor
    eps: float


class LayerParts(NamedTuple):
    """A pre-norm decoder layer as products of prepared rows."""

    qkv: BlockMatrix
    output: BlockMatrix
    gate_up: BlockMatrix
    down: BlockMatrix
    attention_input: Input
    mlp_input: Input
    head_norm: HeadNorm | None


class RotaryAngles(NamedTuple):
    """Rotary embedding in the half-split layout."""

    inverse: torch.Tensor
    """float32 ``[D / 2]``: what an angle grows by from position to position."""
    amplitude: float
    """Of cosines and sines."""

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines, float32 ``[N, 1, D]`` each, of int64 ``[N]``: the same bits as in
        `NativeStack.run`."""
        native = native_library()
        assert native is not None
        inverse, positions = self.inverse.contiguous(), positions.contiguous()
        rows, dim = len(positions), 2 * len(inverse)
        cos, sin = torch.empty(rows, 1, dim), torch.empty(rows, 1, dim)
        native.minima_angles(
            inverse.data_ptr(),
            self.amplitude,
            positions.data_ptr(),
            rows,
            dim,
            cos.data_ptr(),
            sin.data_ptr(),
        )
        return cos, sin


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last axis of float32 ``[..., D]``: the same bits as in `NativeStack.run`.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    native = native_library()
    assert native is not None
    dim = x.shape[-1]
    if x.dtype != torch.float32 or weight.dtype != torch.float32 or weight.shape != (dim,):
        raise ValueError(f"no norm of {x.dtype} {list(x.shape)} with {list(weight.shape)}")
    x, weight = x.contiguous(), weight.contiguous()
    out = torch.empty_like(x)
    native.minima_rms_norm(
        x.data_ptr(), x.numel() // dim, dim, weight.data_ptr(), eps, out.data_ptr()
    )
    return out


class DecodeStep(NamedTuple):
    """Where the new tokens of a step go and what they attend to; one row a request."""

    plan: NativeDecode
    recent: PageKind
    """Of the pages that take the new tokens."""
    arena: torch.Tensor
    """uint8 ``[bytes]``"""
    page_bytes: torch.Tensor
    """int64 ``[rows]``: where in the arena the page of each row starts."""
    slots: torch.Tensor
    """int64 ``[rows]``: the row's place in its page."""
    rotation_block: int
    """Of the Hadamard blocks that rotate every head."""
    scale: float
    """Factor on the scores."""


class _Layer(ctypes.Structure):
    """``MinimaLayer``."""

    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in (
                "qkv",
                "output",
                "gate_up",
                "down",
                "attention_input",
                "mlp_input",
                "q_norm",
                "k_norm",
            )
        ),
        ("head_eps", ctypes.c_float),
        ("padding", ctypes.c_int32),
    ]


class _Stack(ctypes.Structure):
    """``MinimaStack``."""

    _fields_ = [
        ("layers", ctypes.c_void_p),
        ("num_layers", ctypes.c_int64),
        ("final_norm", ctypes.c_void_p),
        ("rotary", ctypes.c_void_p),
        ("amplitude", ctypes.c_float),
        ("padding", ctypes.c_int32),
    ]


class _Step(ctypes.Structure):
    """``MinimaStep``."""

    _fields_ = [
        ("plan", ctypes.POINTER(abi.DecodePlan)),
        ("geometry", ctypes.POINTER(abi.Geometry)),
        *(
            (name, ctypes.c_void_p)
            for name in ("formats", "recent", "page_bytes", "slots", "positions", "arena")
        ),
        ("rotation_block", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("padding", ctypes.c_int32),
    ]


class NativeStack:
    """All layers of a model, prepared for calls."""

    def __init__(
        self, layers: Sequence[LayerParts], final_norm: Input, rotary: RotaryAngles
    ) -> None:
        """
        Args:
            final_norm: of what the last layer gives.

        Raises:
            ValueError: no layers, or shapes that do not fit together.
        """
        if not layers:
            raise ValueError("a stack needs a layer")
        self._layers = tuple(layers)
        self._width = layers[0].down.outputs
        self._final_norm = final_norm
        self._inverse = rotary.inverse.contiguous()
        if final_norm.norm is None or final_norm.inputs != self._width:
            raise ValueError(f"the final norm must have {self._width} inputs")
        self._described = (_Layer * len(layers))()
        for target, parts in zip(self._described, layers, strict=True):
            _check(parts, layers[0])
            _describe(target, parts)
        self._native = _Stack(
            layers=ctypes.addressof(self._described),
            num_layers=len(layers),
            final_norm=final_norm.address,
            rotary=self._inverse.data_ptr(),
            amplitude=rotary.amplitude,
        )

    def run(
        self,
        step: DecodeStep,
        x: torch.Tensor,
        positions: torch.Tensor,
        routes: RouteCounters = ROUTES,
    ) -> torch.Tensor:
        """Runs the layers and the final norm; stores K and V.

        Args:
            x: float32 ``[rows, hidden]``, embeddings; not modified.
            positions: int64 ``[rows]``, of each row in its sequence.

        Returns:
            float32 ``[rows, hidden]``.

        Raises:
            ValueError: shapes or dtypes do not fit.
        """
        native = native_library()
        assert native is not None
        plan, geometry = step.plan, step.plan.geometry
        rows, dim = plan.num_rows, geometry.head_dim
        first = self._layers[0]
        num_heads = first.output.inputs // dim
        if first.qkv.outputs != (num_heads + 2 * geometry.num_kv_heads) * dim:
            raise ValueError(f"{first.qkv.outputs} outputs are no heads of {geometry}")
        if len(self._layers) != geometry.num_layers:
            raise ValueError(f"{len(self._layers)} layers for pages of {geometry}")
        _check_tensor(x, (rows, self._width), torch.float32)
        if len(self._inverse) * 2 != dim:
            raise ValueError(f"{len(self._inverse)} angles for heads of {dim}")
        for places in (positions, step.page_bytes, step.slots):
            _check_tensor(places, (rows,), torch.int64)
        out = x.clone(memory_format=torch.contiguous_format)
        positions = positions.contiguous()
        page_bytes, slots = step.page_bytes.contiguous(), step.slots.contiguous()
        described = _Step(
            plan=ctypes.pointer(plan.plan),
            geometry=ctypes.pointer(native_geometry(geometry, num_heads // geometry.num_kv_heads)),
            formats=ctypes.addressof(layer_pointers(plan.kinds, geometry)),
            recent=ctypes.addressof(page_formats(step.recent, geometry)),
            page_bytes=page_bytes.data_ptr(),
            slots=slots.data_ptr(),
            positions=positions.data_ptr(),
            arena=step.arena.data_ptr(),
            rotation_block=step.rotation_block,
            scale=step.scale,
        )
        native.minima_decode_layers(
            ctypes.addressof(self._native),
            ctypes.addressof(described),
            out.data_ptr(),
            torch.get_num_threads(),
        )
        routes.count("append", "native", times=len(self._layers))
        routes.count("decode", "native", times=len(self._layers))
        return out


def _describe(target: Any, parts: LayerParts) -> None:
    for name in ("qkv", "output", "gate_up", "down", "attention_input", "mlp_input"):
        setattr(target, name, getattr(parts, name).address)
    norm = parts.head_norm
    if norm is not None:
        target.q_norm, target.k_norm = norm.q_weight.data_ptr(), norm.k_weight.data_ptr()
        target.head_eps = norm.eps


def _check(parts: LayerParts, first: LayerParts) -> None:
    """That a layer has the shapes of the first one, and those fit together."""
    width, inner = first.down.outputs, first.down.inputs
    expected = {
        "qkv": (first.qkv.outputs, width),
        "output": (width, first.output.inputs),
        "gate_up": (2 * inner, width),
        "down": (width, inner),
    }
    for name, shape in expected.items():
        matrix = getattr(parts, name)
        if (matrix.outputs, matrix.inputs) != shape:
            raise ValueError(f"{name} is [{matrix.outputs}, {matrix.inputs}], not {list(shape)}")
    for prepared in (parts.attention_input, parts.mlp_input):
        if prepared.norm is None or prepared.inputs != width:
            raise ValueError(f"attention and MLP start from norms of {width} inputs")
    for norm in () if parts.head_norm is None else parts.head_norm[:2]:
        if norm.dtype != torch.float32 or not norm.is_contiguous():
            raise ValueError("norms of heads need contiguous float32 weights")


def _check_tensor(x: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if x.shape != shape or x.dtype != dtype:
        raise ValueError(f"expected {dtype} {list(shape)}, not {x.dtype} {list(x.shape)}")
