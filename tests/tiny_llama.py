"""A random Llama of two small layers, whose steps take a millisecond."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.15,
}


def write_tiny_llama(path: Path, seed: int = 7, **settings: Any) -> Path:
    """Saves the model; returns its directory.

    Args:
        settings: of transformers' `LlamaConfig`, where they differ.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    LlamaForCausalLM(LlamaConfig(**_SIZES | settings)).save_pretrained(path)
    return path
