"""Norms and activations between the products of a layer: FlashInfer's kernels on a GPU, or torch.

A model gets its operations once, when it is loaded; nothing is decided while it runs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor

from minima_kernels.cuda.library import layers_reason, package
from minima_kernels.routes import ROUTES


class LayerOps(ABC):
    """What the norms and MLPs of a model call."""

    fuses_residuals: bool
    """Whether `add_rms_norm` is one kernel, so that layers are better run with it."""

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Norm over the last dimension of x, [N, size] or [N, heads, size]; rows may be strided."""

    @abstractmethod
    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Adds x to the residual in place and returns its norm; x is lost. Both [N, size]."""

    @abstractmethod
    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up: [N, 2 * size] -> [N, size]."""

    @abstractmethod
    def count(self, num_layers: int) -> None:
        """Counts one run through so many layers."""


class TorchOps(LayerOps):
    """The same by torch."""

    fuses_residuals = False

    def __init__(self, reason: str | None = None) -> None:
        """reason: why no library serves, counted with every run; None where none could."""
        self._reason = reason

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self.rms_norm(residual.add_(x), weight, eps)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def count(self, num_layers: int) -> None:
        if self._reason is not None:
            ROUTES.count("norm", "torch", self._reason, times=num_layers)


class FlashInferOps(LayerOps):
    """By FlashInfer: float16 and bfloat16; sums and products are rounded once, at the end."""

    fuses_residuals = True

    def __init__(self) -> None:
        library = package()
        self._norm, self._add_norm = library.norm.rmsnorm, library.norm.fused_add_rmsnorm
        self._silu = library.activation.silu_and_mul

    # Each kernel waits for the whole of the one before: what comes next may be of another library.

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        normed: Tensor = self._norm(x, weight, eps, enable_pdl=False)
        return normed

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        self._add_norm(x, residual, weight, eps, enable_pdl=False)
        return x

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        product: Tensor = self._silu(gate_up, enable_pdl=False)
        return product

    def count(self, num_layers: int) -> None:
        ROUTES.count("norm", "flashinfer", times=num_layers)


TORCH_OPS = TorchOps()
"""What models have until they are given others."""


def layer_ops(device: torch.device, dtype: torch.dtype) -> LayerOps:
    """The operations of a model on a device in a compute dtype."""
    if device.type != "cuda":
        return TORCH_OPS
    reason = layers_reason(device, dtype)
    return FlashInferOps() if reason is None else TorchOps(reason)
