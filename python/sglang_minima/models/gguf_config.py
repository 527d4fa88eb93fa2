"""GGUF metadata -> the fields of a Hugging Face `config.json`, and the names of its tensors."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from sglang_minima.models.errors import ModelLoadError, UnsupportedModel
from sglang_minima.models.gguf_file import GGUFFile
from sglang_minima.models.rope import RopeScaling, frequencies

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_ROPE_FACTORS = "rope_freqs.weight"
_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def hf_config(file: GGUFFile) -> dict[str, Any]:
    """`config.json` of a GGUF file of a supported family.

    Raises:
        UnsupportedModel: another architecture, experts, sliding window or unknown rope.
        ModelLoadError: a metadata key is missing.
    """
    family = file.metadata.get("general.architecture")
    if family not in _ARCHITECTURES:
        raise UnsupportedModel(
            f"GGUF architecture {family} is not supported; supported are "
            f"{', '.join(_ARCHITECTURES)}."
        )

    def get(key: str, default: Any = None) -> Any:
        return file.metadata.get(f"{family}.{key}", default)

    def need(key: str) -> Any:
        value = get(key)
        if value is None:
            raise ModelLoadError(f"The GGUF file has no {family}.{key}.")
        return value

    if get("expert_count", 0):
        raise UnsupportedModel("Mixture-of-experts GGUF files are not supported, only dense ones.")
    if 0 < get("attention.sliding_window", 0) < need("context_length"):
        raise UnsupportedModel("GGUF files with sliding-window attention are not supported.")
    if "token_embd.weight" not in file.tensors:
        raise ModelLoadError("The GGUF file has no token_embd.weight.")
    heads, hidden = need("attention.head_count"), need("embedding_length")
    kv_heads = get("attention.head_count_kv", heads)
    if isinstance(heads, list) or isinstance(kv_heads, list):
        raise UnsupportedModel(
            "GGUF files with head counts that differ by layer are not supported."
        )
    head_dim = get("attention.key_length", hidden // heads)
    if get("attention.value_length", head_dim) != head_dim:
        raise UnsupportedModel("GGUF files whose K and V heads differ in size are not supported.")
    if get("rope.dimension_count", head_dim) != head_dim:
        raise UnsupportedModel("GGUF files with partial rotary embeddings are not supported.")
    theta = _shortest(get("rope.freq_base", 10000.0))
    bias = "blk.0.attn_q.bias" in file.tensors
    return {
        "architectures": [_ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "num_hidden_layers": need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": need("feed_forward_length"),
        "hidden_act": "silu",
        "rms_norm_eps": _shortest(need("attention.layer_norm_rms_epsilon")),
        "max_position_embeddings": need("context_length"),
        "rope_theta": theta,
        "rope_parameters": {"rope_theta": theta, **_rope(file, get, theta, head_dim)},
        "attention_bias": bias,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": file.metadata.get("tokenizer.ggml.padding_token_id"),
        "dtype": "float32",
    }


def hf_tensor_name(name: str) -> str | None:
    """Checkpoint name of a GGUF tensor; None for one that `hf_config` has already used.

    Raises:
        UnsupportedModel: a tensor that none of the supported families has.
    """
    if name == _ROPE_FACTORS:
        return None
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is not None:
        layer, module, kind = match.groups()
        if layer is None and module in _TOP:
            return f"{_TOP[module]}.{kind}"
        if layer is not None and module in _LAYER:
            return f"model.layers.{layer}.{_LAYER[module]}.{kind}"
    raise UnsupportedModel(f"The GGUF file has a tensor {name} that no supported family has.")


def _rope(file: GGUFFile, get: Any, theta: float, head_dim: int) -> dict[str, Any]:
    """`rope_parameters` without theta."""
    if _ROPE_FACTORS in file.tensors:
        return _llama3(file.tensors[_ROPE_FACTORS].values(), theta, head_dim)
    kind = get("rope.scaling.type", "none")
    factor = get("rope.scaling.factor", get("rope.scale_linear", 1.0))
    if kind == "none" or factor in (0.0, 1.0):
        return {"rope_type": "default"}
    original = get("rope.scaling.original_context_length", get("context_length"))
    if kind == "linear":
        # config.json states the unstretched length for this kind, GGUF the stretched one.
        raise UnsupportedModel("GGUF files with linear rope scaling are not supported.")
    if kind == "yarn":
        if get("rope.scaling.attn_factor", 1.0) != 1.0:
            raise UnsupportedModel("GGUF yarn with its own attention factor is not supported.")
        return {
            "rope_type": "yarn",
            "factor": _shortest(factor),
            "original_max_position_embeddings": original,
            "beta_fast": _shortest(get("rope.scaling.yarn_beta_fast", 32.0)),
            "beta_slow": _shortest(get("rope.scaling.yarn_beta_slow", 1.0)),
        }
    raise UnsupportedModel(f"GGUF rope scaling {kind} is not supported.")


def _llama3(divisors: np.ndarray[Any, Any], theta: float, head_dim: int) -> dict[str, Any]:
    """The Llama 3 scaling behind a table of divisors, checked against that table."""
    scaling = RopeScaling("llama3", float(divisors.max()), original_max_position=8192)
    plain = np.array(frequencies(theta, head_dim, None).inverse)
    scaled = np.array(frequencies(theta, head_dim, scaling).inverse)
    if divisors.shape != plain.shape or not np.allclose(plain / scaled, divisors, rtol=1e-3):
        raise UnsupportedModel(
            "The GGUF file has rope factors other than those of Llama 3, which is not supported."
        )
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_position,
    }


def _shortest(value: float) -> float:
    """The decimal that a float32 was written as: 9.999999747378752e-06 -> 1e-05."""
    return float(str(np.float32(value)))
