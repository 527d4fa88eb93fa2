"""Writes tiny GGUF files with the gguf package, from models of transformers and token tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from tokenizers import Tokenizer
from transformers import PreTrainedModel

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """Half-split rows of q or k in the order in which GGUF stores them for llama."""
    split = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2).reshape(rows.shape))


def gguf_name(name: str) -> str:
    module, _, kind = name.rpartition(".")
    if module in _NAMES:
        return f"{_NAMES[module]}.{kind}"
    _, _, layer, part = module.split(".", 3)
    return f"blk.{layer}.{_NAMES[part]}.{kind}"


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    tokens: dict[str, Any],
    *,
    kind: Kind = Kind.F32,
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
) -> dict[str, np.ndarray]:
    """Writes a model; matrices are stored as `kind`.

    Args:
        tokens: `tokenizer.ggml.*` keys without that prefix.
        metadata: further keys, of integers and strings.
        tensors: further float32 tensors.

    Returns:
        The values that a reader must find, under their Hugging Face names.
    """
    config = model.config
    family = config.model_type
    writer = gguf.GGUFWriter(path, family)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    for key, value in (metadata or {}).items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add[type(value)](f"{family}.{key}", value)
    _write_tokens(writer, tokens)
    stored = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.numpy().astype(np.float32)
        encoded = kind if values.ndim == 2 else Kind.F32
        raw = gguf.quants.quantize(values, encoded)
        stored[name] = gguf.quants.dequantize(raw, encoded).reshape(values.shape)
        if family == "llama" and (".q_proj." in name or ".k_proj." in name):
            heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
            raw = interleave(raw, heads)
        writer.add_tensor(gguf_name(name), raw, raw_dtype=encoded)
    for name, extra in (tensors or {}).items():
        writer.add_tensor(name, extra)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


def bpe_tokens(tokenizer: Tokenizer, pre: str, **changes: Any) -> dict[str, Any]:
    """The GGUF token keys of a byte-level BPE; its special tokens become control tokens."""
    state = json.loads(tokenizer.to_str())
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    special = {item["content"] for item in state["added_tokens"] if item["special"]}
    user = {item["content"] for item in state["added_tokens"]} - special
    names = sorted(vocabulary, key=vocabulary.__getitem__)
    return {
        "model": "gpt2",
        "pre": pre,
        "tokens": names,
        "token_type": [3 if t in special else 4 if t in user else 1 for t in names],
        "merges": [" ".join(merge) for merge in state["model"]["merges"]],
        **changes,
    }


def _write_tokens(writer: gguf.GGUFWriter, tokens: dict[str, Any]) -> None:
    for key, value in tokens.items():
        name = key if key == "chat_template" else f"ggml.{key}"
        if isinstance(value, bool):
            writer.add_bool(f"tokenizer.{name}", value)
        elif isinstance(value, int):
            writer.add_uint32(f"tokenizer.{name}", value)
        elif isinstance(value, str):
            writer.add_string(f"tokenizer.{name}", value)
        else:
            writer.add_array(f"tokenizer.{name}", value)
