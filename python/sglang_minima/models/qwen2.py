"""Qwen2 and Qwen2.5 (dense)."""

from __future__ import annotations

from sglang_minima.models.causal_lm import CausalLM
from sglang_minima.models.config import ModelConfig
from sglang_minima.models.layers import Attention


class Qwen2ForCausalLM(CausalLM):
    """Biases on q, k and v, none on the output projection."""

    @staticmethod
    def attention(config: ModelConfig, layer: int) -> Attention:
        return Attention(config, layer, qkv_bias=True, output_bias=False, qk_norm=False)
