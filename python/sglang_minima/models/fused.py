"""Decoder layers in native products: norms, gates and residuals are part of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from minima_kernels.cpu.linear import Input
from minima_kernels.cpu.stack import HeadNorm, LayerParts, NativeStack
from sglang_minima.models.backend import AttentionBackend, RopeBackend, StepBackend
from sglang_minima.models.causal_lm import CausalLM, DecoderLayer, Layers
from sglang_minima.models.layers import Attention, RMSNorm
from sglang_minima.models.quantization import BlockLinear


class FusedLayer(nn.Module):
    """Computes what a `DecoderLayer` over `BlockLinear` modules in float32 does.

    At few rows a layer of separate operations costs about as much outside its products as in them.
    """

    def __init__(self, layer: DecoderLayer) -> None:
        super().__init__()
        self.input_layernorm = layer.input_layernorm
        self.self_attn = layer.self_attn
        self.post_attention_layernorm = layer.post_attention_layernorm
        self.mlp = layer.mlp
        products = [module.matrix for module in _products(layer) if isinstance(module, BlockLinear)]
        qkv, output, gate_up, down = products
        self.parts = LayerParts(
            qkv,
            output,
            gate_up,
            down,
            _normed(layer.input_layernorm),
            _normed(layer.post_attention_layernorm),
            _head_norm(layer.self_attn),
        )
        self._gated = Input.gated(down.inputs)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, backend: AttentionBackend) -> Tensor:
        parts = self.parts
        qkv = parts.qkv.multiply(x, parts.attention_input)
        attended = self.self_attn.attend(qkv, cos, sin, backend)
        x = parts.output.multiply(attended, residual=x)
        gate_up = parts.gate_up.multiply(x, parts.mlp_input)
        return parts.down.multiply(gate_up, self._gated, residual=x)


class FusedLayers(Layers):
    """Fused layers, and a decode step through all of them in one native call.

    With one row a layer takes a third of a millisecond: Python between the products of each would
    take as long again, and the threads that share them would fall asleep meanwhile.
    """

    def __init__(self, layers: Sequence[FusedLayer]) -> None:
        super().__init__(layers)
        self.stack = NativeStack([layer.parts for layer in layers])

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, backend: AttentionBackend | RopeBackend
    ) -> Tensor:
        step = backend.decode_step() if isinstance(backend, StepBackend) else None
        if step is None:
            return super().forward(x, cos, sin, backend)
        return self.stack.run(step, x, cos, sin)


def fuse_layers(model: CausalLM) -> None:
    """Replaces the layers of a loaded float32 model whose matrices are all in blocks."""
    if model.model.norm.weight.dtype != torch.float32:
        return
    layers = model.model.layers
    for index, layer in enumerate(layers):
        assert isinstance(layer, DecoderLayer)
        if all(isinstance(module, BlockLinear) for module in _products(layer)):
            layers[index] = FusedLayer(layer)
    fused = [layer for layer in layers if isinstance(layer, FusedLayer)]
    if len(fused) == len(layers):
        model.model.layers = FusedLayers(fused)


def _products(layer: DecoderLayer) -> list[nn.Module]:
    attention, mlp = layer.self_attn, layer.mlp
    return [attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj]


def _normed(norm: RMSNorm) -> Input:
    return Input.normed(norm.weight, norm.eps)


def _head_norm(attention: Attention) -> HeadNorm | None:
    q_norm, k_norm = attention.q_norm, attention.k_norm
    if q_norm is None or k_norm is None:
        return None
    return HeadNorm(q_norm.weight.detach(), k_norm.weight.detach(), q_norm.eps)
