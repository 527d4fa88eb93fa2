"""Shared by the model tests: a dense attention backend, and tiny checkpoints of each family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from sglang_minima.models.causal_lm import CausalLM


class DenseAttention:
    """Keeps every request's K and V whole and attends exactly; the yardstick of these tests."""

    def __init__(self) -> None:
        self._kv: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._rows: list[tuple[int, int]] = []

    def plan(self, rows: list[tuple[int, int]]) -> Tensor:
        """Names the next batch: (request, number of new tokens) each; returns the positions."""
        self._rows = rows
        lengths = [self.length(request) for request, _ in rows]
        return torch.cat(
            [torch.arange(old, old + new) for old, (_, new) in zip(lengths, rows, strict=True)]
        )

    def length(self, request: int) -> int:
        return self._kv[0, request][0].shape[0] if (0, request) in self._kv else 0

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        sizes = [new for _, new in self._rows]
        parts = zip(self._rows, q.split(sizes), k.split(sizes), v.split(sizes), strict=True)
        return torch.cat([self._one(layer, row[0], *qkv) for row, *qkv in parts])

    def _one(self, layer: int, request: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if (layer, request) in self._kv:
            old_k, old_v = self._kv[layer, request]
            k, v = torch.cat((old_k, k)), torch.cat((old_v, v))
        self._kv[layer, request] = (k, v)
        mask = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
        heads = [x.transpose(0, 1) for x in (q, k, v)]
        return F.scaled_dot_product_attention(*heads, attn_mask=mask, enable_gqa=True).transpose(
            0, 1
        )


@torch.no_grad()
def run_batch(model: CausalLM, backend: DenseAttention, rows: dict[int, list[int]]) -> list[Tensor]:
    """One step; the logits [new tokens, vocab] of every request."""
    positions = backend.plan([(request, len(ids)) for request, ids in rows.items()])
    ids = torch.tensor([token for new in rows.values() for token in new])
    logits = model.logits(model(ids, positions, backend))
    return list(logits.split([len(new) for new in rows.values()]))


_SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied-mha": ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 6}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-wide-heads": ("llama", {"head_dim": 32}),
    "llama-3": ("llama", {"rope_parameters": _LLAMA3, "rms_norm_eps": 1e-5}),
    "llama-linear": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    ),
    "qwen2": ("qwen2", {}),
    "qwen2-tied-yarn": ("qwen2", {"tie_word_embeddings": True, "rope_parameters": _YARN}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3-tied-biases-yarn": (
        "qwen3",
        {
            "head_dim": 24,
            "tie_word_embeddings": True,
            "attention_bias": True,
            "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.8, "beta_fast": 16.0},
        },
    ),
}


WIDE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}
"""Sizes that blocks of 32 weights take."""


def make_reference(name: str, **more: Any) -> PreTrainedModel:
    """A random model of transformers; norms and biases are random too, so that they count."""
    family, changes = CHECKPOINTS[name]
    config_class, model_class = _FAMILIES[family]
    torch.manual_seed(len(name))
    model = model_class(config_class(**{**_SMALL, **changes, **more})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.normal_(mean=0.5, std=0.3)
            else:
                parameter.normal_(std=0.15)
    return model


def save_reference(name: str, path: Path, **options: Any) -> PreTrainedModel:
    model = make_reference(name)
    model.save_pretrained(path, **options)
    return model
