"""Decoder layers in native products: norms, gates and residuals are part of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from minima_kernels.cpu.linear import Input
from minima_kernels.cpu.stack import HeadNorm, LayerParts, NativeStack, RotaryAngles, rms_norm
from sglang_minima.models.backend import AttentionBackend, RopeBackend, StepBackend
from sglang_minima.models.causal_lm import Angles, CausalLM, Decoder, DecoderLayer
from sglang_minima.models.layers import Attention, RMSNorm, Rotary
from sglang_minima.models.quantization import BlockLinear


class NativeNorm(RMSNorm):
    """A norm with the bits of `NativeStack`: rounding of keys makes more of the last one."""

    def __init__(self, norm: RMSNorm) -> None:
        nn.Module.__init__(self)
        self.weight = norm.weight
        self.eps = norm.eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


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

    def use_native_norms(self) -> None:
        """Norms of heads, where there are some, become those of a native stack."""
        attention = self.self_attn
        if attention.q_norm is not None and attention.k_norm is not None:
            attention.q_norm = NativeNorm(attention.q_norm)
            attention.k_norm = NativeNorm(attention.k_norm)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, backend: AttentionBackend) -> Tensor:
        parts = self.parts
        qkv = parts.qkv.multiply(x, parts.attention_input)
        attended = self.self_attn.attend(qkv, cos, sin, backend)
        x = parts.output.multiply(attended, residual=x)
        gate_up = parts.gate_up.multiply(x, parts.mlp_input)
        return parts.down.multiply(gate_up, self._gated, residual=x)


class FusedDecoder(Decoder):
    """A decoder of fused layers alone: a decode step is one native call.

    With one row a layer takes a tenth of a millisecond. Python between the products of each would
    take longer, and the threads that share them would fall asleep meanwhile. Other steps run layer
    by layer, with the same bits for the same row.
    """

    def __init__(self, decoder: Decoder, layers: Sequence[FusedLayer], rotary: Rotary) -> None:
        nn.Module.__init__(self)
        self.embed_tokens = decoder.embed_tokens
        self.layers = decoder.layers
        self.norm = NativeNorm(decoder.norm)
        self._angles = RotaryAngles(rotary.inverse, rotary.amplitude)
        parts = [layer.parts for layer in layers]
        self.stack = NativeStack(parts, _normed(decoder.norm), self._angles)
        for layer in layers:
            layer.use_native_norms()

    def forward(
        self, x: Tensor, positions: Tensor, rotary: Angles, backend: AttentionBackend | RopeBackend
    ) -> Tensor:
        step = backend.decode_step() if isinstance(backend, StepBackend) else None
        if step is None:
            return super().forward(x, positions, self._angles.at, backend)
        return self.stack.run(step, x, positions)


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
        model.model = FusedDecoder(model.model, fused, model.rotary)


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
