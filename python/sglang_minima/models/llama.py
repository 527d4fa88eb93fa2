"""Llama 2, 3, 3.1, 3.2 and everything of the same architecture (SmolLM2, TinyLlama, ...)."""

from __future__ import annotations

from sglang_minima.models.causal_lm import CausalLM
from sglang_minima.models.config import ModelConfig
from sglang_minima.models.layers import Attention


class LlamaForCausalLM(CausalLM):
    """The plain decoder; `attention_bias` puts biases on all four projections."""

    @staticmethod
    def attention(config: ModelConfig, layer: int) -> Attention:
        bias = config.attention_bias
        return Attention(config, layer, qkv_bias=bias, output_bias=bias, qk_norm=False)
