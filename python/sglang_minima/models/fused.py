"""Decoder layers in four native products: norms, gates and residuals are part of them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from minima_kernels.cpu.linear import Input
from sglang_minima.models.backend import AttentionBackend
from sglang_minima.models.causal_lm import CausalLM, DecoderLayer
from sglang_minima.models.layers import RMSNorm
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
        self._qkv, self._output, self._gate_up, self._down = products
        self._attention_input = _normed(layer.input_layernorm)
        self._mlp_input = _normed(layer.post_attention_layernorm)
        self._gated = Input.gated(self._down.inputs)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, backend: AttentionBackend) -> Tensor:
        qkv = self._qkv.multiply(x, self._attention_input)
        attended = self.self_attn.attend(qkv, cos, sin, backend)
        x = self._output.multiply(attended, residual=x)
        gate_up = self._gate_up.multiply(x, self._mlp_input)
        return self._down.multiply(gate_up, self._gated, residual=x)


def fuse_layers(model: CausalLM) -> None:
    """Replaces the layers of a loaded float32 model whose matrices are all in blocks."""
    if model.model.norm.weight.dtype != torch.float32:
        return
    for index, layer in enumerate(model.model.layers):
        assert isinstance(layer, DecoderLayer)
        if all(isinstance(module, BlockLinear) for module in _products(layer)):
            model.model.layers[index] = FusedLayer(layer)


def _products(layer: DecoderLayer) -> list[nn.Module]:
    attention, mlp = layer.self_attn, layer.mlp
    return [attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj]


def _normed(norm: RMSNorm) -> Input:
    return Input.normed(norm.weight, norm.eps)
