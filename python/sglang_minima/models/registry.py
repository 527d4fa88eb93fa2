"""Architecture name -> model class. A new family is one module and one line here."""

from __future__ import annotations

from sglang_minima.models.causal_lm import CausalLM
from sglang_minima.models.config import ModelConfig
from sglang_minima.models.llama import LlamaForCausalLM
from sglang_minima.models.qwen2 import Qwen2ForCausalLM
from sglang_minima.models.qwen3 import Qwen3ForCausalLM

MODEL_CLASSES: dict[str, type[CausalLM]] = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "Qwen2ForCausalLM": Qwen2ForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
}


def build_model(config: ModelConfig) -> CausalLM:
    """An empty model of the config's architecture (which `ModelConfig` has checked)."""
    return MODEL_CLASSES[config.architecture](config)
