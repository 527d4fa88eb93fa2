"""`CausalLM`: the pre-norm decoder that the dense families share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from sglang_minima.models.backend import AttentionBackend, RopeBackend
from sglang_minima.models.config import ModelConfig
from sglang_minima.models.layer_ops import LayerOps
from sglang_minima.models.layers import Attention, GatedMLP, Linear, RMSNorm, Rotary

Angles = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Positions to cosines and sines, as `Rotary`."""


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, attention: Attention) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_eps)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_eps)
        self.mlp = GatedMLP(config)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, backend: AttentionBackend | RopeBackend
    ) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, backend)
        x = x + self.mlp(self.post_attention_layernorm(x))
        return x


class Decoder(nn.Module):
    """Embedding, layers and final norm: the `model.` part of a checkpoint."""

    def __init__(self, config: ModelConfig, attentions: list[Attention]) -> None:
        super().__init__()
        # A Linear holds [vocab, hidden], which serves both the lookup and a tied output head.
        self.embed_tokens = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.layers = nn.ModuleList(DecoderLayer(config, attention) for attention in attentions)
        self.norm = RMSNorm(config.hidden_size, config.rms_eps)

    def forward(
        self, x: Tensor, positions: Tensor, rotary: Angles, backend: AttentionBackend | RopeBackend
    ) -> Tensor:
        """Embeddings [N, hidden_size], which are lost -> hidden states after the final norm."""
        cos, sin = rotary(positions)
        self.norm.ops.count(len(self.layers))
        if self.norm.ops.fuses_residuals:
            return self._run_fused(x, cos, sin, backend)
        for layer in self.layers:
            x = layer(x, cos, sin, backend)
        hidden: Tensor = self.norm(x)
        return hidden

    def _run_fused(
        self, x: Tensor, cos: Tensor, sin: Tensor, backend: AttentionBackend | RopeBackend
    ) -> Tensor:
        """The same with each sum and the norm that follows it, of the next layer, in one."""
        layers: list[Any] = list(self.layers)
        norms = [layer.input_layernorm for layer in layers[1:]]
        residual, x = x, layers[0].input_layernorm(x)
        for layer, following in zip(layers, [*norms, self.norm], strict=True):
            attended = layer.self_attn(x, cos, sin, backend)
            x = layer.mlp(layer.post_attention_layernorm.add(attended, residual))
            x = following.add(x, residual)
        return x


class CausalLM(nn.Module, ABC):
    """A decoder-only language model over a ragged batch of tokens.

    A family is a subclass that says how its attention is built. Modules are named as in Hugging
    Face checkpoints, except that q, k, v and gate, up are fused (see `loader`).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config, [self.attention(config, i) for i in range(config.num_layers)])
        self.lm_head = (
            None
            if config.tie_embeddings
            else Linear(config.hidden_size, config.vocab_size, bias=False)
        )
        self.rotary = Rotary(config)

    @staticmethod
    @abstractmethod
    def attention(config: ModelConfig, layer: int) -> Attention:
        """The attention module of one layer."""

    def forward(
        self, input_ids: Tensor, positions: Tensor, attention: AttentionBackend | RopeBackend
    ) -> Tensor:
        """Runs all layers.

        Args:
            input_ids: int64 [N], the tokens of all requests of the step, flattened.
            positions: int64 [N], of each token in its own request.
            attention: stores K and V of the step and attends, layer by layer.

        Returns:
            [N, hidden_size] after the final norm, in the model's dtype.
        """
        x = self.model.embed_tokens.rows(input_ids, self.model.norm.weight.dtype)
        hidden: Tensor = self.model(x, positions, self.rotary, attention)
        return hidden

    def use(self, ops: LayerOps) -> None:
        """Sets what computes norms and activations."""
        for module in self.modules():
            if isinstance(module, RMSNorm | GatedMLP):
                module.ops = ops

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [M, hidden_size] of the rows to sample from -> float32 [M, vocab_size]."""
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        logits: Tensor = head(hidden)
        return logits.to(torch.float32)
