"""Qwen3 (dense)."""

from __future__ import annotations

from sglang_minima.models.causal_lm import CausalLM
from sglang_minima.models.config import ModelConfig
from sglang_minima.models.layers import Attention


class Qwen3ForCausalLM(CausalLM):
    """RMSNorm on every query and key head; head_dim is independent of hidden_size."""

    @staticmethod
    def attention(config: ModelConfig, layer: int) -> Attention:
        bias = config.attention_bias
        return Attention(config, layer, qkv_bias=bias, output_bias=bias, qk_norm=True)
