"""Linear layers over 4- and 8-bit weight blocks by the native kernels: see ``native/linear.h``."""

from __future__ import annotations

import ctypes
from enum import IntEnum
from typing import Any, Literal

import numpy as np
import torch

from minima_kernels.cpu.library import MISSING, native_library

BLOCK = 32
"""Inputs that share a scale."""
PANEL = 16
"""Outputs stored together."""
_ALIGNMENT = 64


class BlockKind(IntEnum):
    """What a block of 32 weights is."""

    Q4 = 0
    """4-bit codes, float16 scale and minimum: code * scale + minimum."""
    Q8 = 1
    """int8 codes and a float16 scale: code * scale."""


class _Matrix(ctypes.Structure):
    """``MinimaMatrix``."""

    _fields_ = [
        ("kind", ctypes.c_int32),
        ("activation_bits", ctypes.c_int32),
        ("outputs", ctypes.c_int64),
        ("inputs", ctypes.c_int64),
        ("panels", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
    ]


class _Input(ctypes.Structure):
    """``MinimaInput``."""

    _fields_ = [
        ("kind", ctypes.c_int32),
        ("eps", ctypes.c_float),
        ("norm_weight", ctypes.c_void_p),
    ]


class Input:
    """What a product starts from: the rows as they are, normalised or gated."""

    def __init__(
        self, kind: int, inputs: int, width: int, norm: torch.Tensor | None = None, eps: float = 0
    ) -> None:
        self.inputs = inputs
        self.width = width
        self.norm = norm
        weight = None if norm is None else norm.data_ptr()
        self._native = _Input(kind, eps, weight)
        self.address = ctypes.addressof(self._native)

    @classmethod
    def plain(cls, inputs: int) -> Input:
        """x [rows, inputs] as it is."""
        return cls(0, inputs, inputs)

    @classmethod
    def normed(cls, weight: torch.Tensor, eps: float) -> Input:
        """RMSNorm of x [rows, inputs] with ``weight`` float32 [inputs]."""
        norm = weight.detach().float().contiguous()
        return cls(1, len(norm), len(norm), norm, eps)

    @classmethod
    def gated(cls, inputs: int) -> Input:
        """silu(a) * b of x [rows, 2 inputs] = (a, b)."""
        return cls(2, inputs, 2 * inputs)


def panel_bytes(kind: BlockKind, inputs: int) -> int:
    """Bytes of the panel of 16 outputs."""
    blocks = inputs // BLOCK
    block = PANEL * (BLOCK + 2) if kind == BlockKind.Q8 else PANEL * (BLOCK // 2 + 4)
    return -(-blocks * block // _ALIGNMENT) * _ALIGNMENT


def pack(
    codes: np.ndarray[Any, Any],
    scales: np.ndarray[Any, Any],
    minima: np.ndarray[Any, Any] | None = None,
) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Lay a matrix out in panels.

    Args:
        codes: [outputs, inputs], uint8 below 16 with ``minima``, else int8.
        scales: float16 [outputs, inputs / 32].
        minima: float16 [outputs, inputs / 32] of Q4; none of Q8.

    Returns:
        uint8 [panels, bytes of a panel].

    Raises:
        ValueError: inputs are no multiple of 32.
    """
    outputs, inputs = codes.shape
    if inputs % BLOCK:
        raise ValueError(f"weight blocks need multiples of {BLOCK} inputs, not {inputs}")
    blocks, panels = inputs // BLOCK, -(-outputs // PANEL)
    kind = BlockKind.Q8 if minima is None else BlockKind.Q4
    # [outputs, blocks, quads of inputs, 4] -> [panels, blocks, quads, outputs of a panel, 4]
    bytes_ = _padded(codes.view(np.uint8), panels).reshape(panels, PANEL, blocks, BLOCK // 4, 4)
    if kind == BlockKind.Q4:
        bytes_ = bytes_[:, :, :, :4] | bytes_[:, :, :, 4:] << 4
    bytes_ = bytes_.transpose(0, 2, 3, 1, 4)
    packed = np.zeros((panels, panel_bytes(kind, inputs)), np.uint8)
    end = bytes_[0].size
    packed[:, :end] = bytes_.reshape(panels, end)
    for halves in (scales,) if minima is None else (scales, minima):
        part = _padded(halves, panels).reshape(panels, PANEL, blocks).transpose(0, 2, 1)
        start, end = end, end + 2 * PANEL * blocks
        packed[:, start:end] = np.ascontiguousarray(part).view(np.uint8).reshape(panels, -1)
    return packed


def _padded(rows: np.ndarray[Any, Any], panels: int) -> np.ndarray[Any, Any]:
    missing = panels * PANEL - len(rows)
    return np.pad(rows, ((0, missing), (0, 0))) if missing else rows


class BlockMatrix:
    """A matrix in panels that the kernels multiply with."""

    def __init__(
        self,
        kind: BlockKind,
        outputs: int,
        inputs: int,
        panels: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation_bits: Literal[8, 16] = 16,
    ) -> None:
        """
        Args:
            panels: uint8 on the CPU, as :func:`pack` makes them.
            bias: float32 [outputs].
            activation_bits: of the integers that blocks of 32 activations are rounded to; 8 is for
                Q4 alone.

        Raises:
            RuntimeError: the extension is not built.
            ValueError: shapes or dtypes do not fit.
        """
        if native_library() is None:
            raise RuntimeError(MISSING)
        size = -(-outputs // PANEL) * panel_bytes(kind, inputs)
        if inputs % BLOCK or panels.dtype != torch.uint8 or panels.numel() != size:
            raise ValueError(f"{panels.numel()} bytes are no {kind.name} [{outputs}, {inputs}]")
        if bias is not None and (bias.dtype != torch.float32 or bias.shape != (outputs,)):
            raise ValueError("the bias must be float32, one value per output")
        if kind == BlockKind.Q8 and activation_bits != 16:
            raise ValueError("Q8 takes activations of 16 bits")
        self.kind = kind
        self.outputs = outputs
        self.inputs = inputs
        self.panels = panels.contiguous()
        self.bias = None if bias is None else bias.contiguous()
        self.plain = Input.plain(inputs)
        self._native = _Matrix(
            int(kind),
            activation_bits,
            outputs,
            inputs,
            self.panels.data_ptr(),
            None if self.bias is None else self.bias.data_ptr(),
        )
        self.address = ctypes.addressof(self._native)

    def multiply(
        self,
        x: torch.Tensor,
        prepared: Input | None = None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """input(x) Wᵀ + bias + residual.

        Args:
            x: float32 [rows, inputs], or as wide as ``prepared`` says.
            prepared: what happens to x first; nothing by default.
            residual: float32 [rows, outputs].

        Returns:
            float32 [rows, outputs].
        """
        prepared = prepared or self.plain
        if prepared.inputs != self.inputs:
            raise ValueError(f"{prepared.inputs} prepared inputs for a matrix of {self.inputs}")
        if x.dtype != torch.float32 or x.dim() != 2 or x.shape[1] != prepared.width:
            raise ValueError(f"x must be float32 [rows, {prepared.width}], not {list(x.shape)}")
        native = native_library()
        assert native is not None
        rows = x.shape[0]
        x = x.contiguous()
        out = torch.empty(rows, self.outputs)
        if residual is not None:
            if residual.dtype != torch.float32 or residual.shape != out.shape:
                raise ValueError(f"the residual must be float32 {list(out.shape)}")
            residual = residual.contiguous()
        native.minima_linear(
            self.address,
            prepared.address,
            x.data_ptr(),
            None if residual is None else residual.data_ptr(),
            rows,
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        """float32 [N, inputs]: the rows of W of the indices, int64 [N].

        Raises:
            IndexError: an index out of range.
        """
        native = native_library()
        assert native is not None
        index = index.to(torch.int64).contiguous()
        out = torch.empty(len(index), self.inputs)
        if not native.minima_matrix_rows(
            self.address, index.data_ptr(), len(index), out.data_ptr()
        ):
            raise IndexError(f"a row is out of range of the {self.outputs} there are")
        return out


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding in the half-split layout.

    Args:
        heads: float32 [N, heads, D]; of a row, heads lie one after another.
        cos, sin: float32 [N, 1, D], sin negative in the first half.

    Returns:
        float32 [N, heads, D], contiguous.
    """
    native = native_library()
    assert native is not None
    rows, count, dim = heads.shape
    if heads.stride()[1:] != (dim, 1) or heads.dtype != torch.float32:
        heads = heads.float().contiguous()
    out = torch.empty(rows, count, dim)
    native.minima_rotate(
        heads.data_ptr(),
        rows,
        heads.stride(0),
        count,
        dim,
        cos.data_ptr(),
        sin.data_ptr(),
        out.data_ptr(),
    )
    return out
