"""Building blocks of the dense decoder families: norm, RoPE, attention and MLP with fused weights.

Everything works on a ragged batch: the N tokens of any number of requests, one after another.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minima_kernels.cpu.library import native_library
from minima_kernels.cpu.linear import rotate as native_rotate
from sglang_minima.models.backend import AttentionBackend, RopeBackend
from sglang_minima.models.config import ModelConfig
from sglang_minima.models.layer_ops import TORCH_OPS, LayerOps
from sglang_minima.models.rope import frequencies


class RMSNorm(nn.Module):
    """x * rsqrt(mean(x²) + eps) * weight over the last dimension, the mean in float32."""

    ops: LayerOps = TORCH_OPS

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Adds x to the residual in place, and returns the norm of that; x is lost."""
        return self.ops.add_rms_norm(x, residual, self.weight, self.eps)


class Linear(nn.Module):
    """y = x Wᵀ + b; weight [outputs, inputs]. Never initialised: the loader fills it."""

    def __init__(self, inputs: int, outputs: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(outputs), requires_grad=False) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def rows(self, index: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows of the weight (embeddings) of the indices [N]: [N, inputs]."""
        return F.embedding(index, self.weight).to(dtype)


class Rotary(nn.Module):
    """cos and sin of the positions of a batch, made once per forward pass for all layers."""

    inverse: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self._frequencies = frequencies(config.rope_theta, config.head_dim, config.rope_scaling)
        self.register_buffer("inverse", torch.empty(config.head_dim // 2), persistent=False)

    def materialise(self, device: torch.device) -> None:
        """Fills the frequencies, float32 whatever the model's dtype: positions need the bits."""
        self.inverse = torch.tensor(self._frequencies.inverse, dtype=torch.float32, device=device)

    @property
    def amplitude(self) -> float:
        """Factor on cosines and sines."""
        return self._frequencies.amplitude

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions int64 [N] -> cos, sin float32 [N, 1, head_dim], as `rotate` takes them."""
        angles = positions[:, None, None].to(torch.float32) * self.inverse
        cos, sin = angles.cos(), angles.sin()
        cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
        amplitude = self.amplitude
        return (cos, sin) if amplitude == 1.0 else (cos * amplitude, sin * amplitude)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE in the half-split layout: plane i is (x[i], x[i + D/2]).

    Args:
        x: [N, heads, D].
        cos, sin: float32 [N, 1, D], of both halves; sin is negative for the first.

    Returns:
        [N, heads, D], contiguous, dtype of x (the products are in float32).
    """
    if x.device.type == "cpu" and x.dtype == torch.float32 and native_library() is not None:
        return native_rotate(x, cos, sin)
    wide = x.float()
    rotated = wide * cos + wide.roll(x.shape[-1] // 2, dims=-1) * sin
    return rotated.to(x.dtype)


class Attention(nn.Module):
    """Projections around the attention backend; q, k and v come from one matrix product."""

    def __init__(
        self, config: ModelConfig, layer: int, qkv_bias: bool, output_bias: bool, qk_norm: bool
    ) -> None:
        super().__init__()
        self.layer = layer
        self.num_heads = config.num_heads
        self.num_kv_heads = config.num_kv_heads
        self.head_dim = config.head_dim
        rows = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        self.qkv_proj = Linear(config.hidden_size, rows, qkv_bias)
        self.o_proj = Linear(config.num_heads * config.head_dim, config.hidden_size, output_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_eps) if qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_eps) if qk_norm else None

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, backend: AttentionBackend | RopeBackend
    ) -> Tensor:
        out: Tensor = self.o_proj(self.attend(self.qkv_proj(x), cos, sin, backend))
        return out

    def attend(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, backend: AttentionBackend | RopeBackend
    ) -> Tensor:
        """What lies between the projections: qkv [N, rows of qkv_proj] -> [N, inputs of o_proj]."""
        heads = qkv.view(qkv.shape[0], -1, self.head_dim)
        if isinstance(backend, RopeBackend):
            attended = self._attend_unturned(heads, cos, sin, backend)
        else:
            attended = self._attend(heads, cos, sin, backend)
        return attended.reshape(len(qkv), -1)

    def _attend(self, heads: Tensor, cos: Tensor, sin: Tensor, backend: AttentionBackend) -> Tensor:
        sizes = (self.num_heads, self.num_kv_heads)
        if self.q_norm is None or self.k_norm is None:
            # One pass over q and k together: at few rows each small operation counts.
            qk, v = torch.split(heads, [sum(sizes), self.num_kv_heads], dim=1)
            q, k = torch.split(rotate(qk, cos, sin), list(sizes), dim=1)
            q, k = q.contiguous(), k.contiguous()
        else:
            q, k, v = torch.split(heads, [*sizes, self.num_kv_heads], dim=1)
            q, k = rotate(self.q_norm(q), cos, sin), rotate(self.k_norm(k), cos, sin)
        return backend.attend(self.layer, q, k, v)

    def _attend_unturned(
        self, heads: Tensor, cos: Tensor, sin: Tensor, backend: RopeBackend
    ) -> Tensor:
        q, k, v = torch.split(heads, [self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return backend.attend_unturned(self.layer, q, k, v, cos, sin)


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)); gate and up are one matrix product."""

    ops: LayerOps = TORCH_OPS

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        inner, bias = config.intermediate_size, config.mlp_bias
        self.gate_up_proj = Linear(config.hidden_size, 2 * inner, bias)
        self.down_proj = Linear(inner, config.hidden_size, bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.ops.silu_and_mul(self.gate_up_proj(x)))
        return out
