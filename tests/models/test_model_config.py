"""`ModelConfig`: both spellings of every field, and one clear sentence for what is not served."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from models_support import CHECKPOINTS, make_reference

from sglang_minima.models import ModelConfig, ModelLoadError, UnsupportedModel
from sglang_minima.models.rope import frequencies

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": 1024,
}
LLAMA3_ROPE = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}


def test_defaults_of_a_sparse_config() -> None:
    config = ModelConfig.from_dict(LLAMA)
    assert (config.num_kv_heads, config.head_dim) == (4, 16)
    assert (config.rope_theta, config.rope_scaling, config.max_position) == (10000.0, None, 1024)
    assert not (config.tie_embeddings or config.attention_bias or config.qk_norm)
    assert (config.bos_token_id, config.eos_token_ids) == (None, frozenset())


def test_eos_of_both_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "eos_token_id": 7}))
    assert ModelConfig.load(tmp_path).eos_token_ids == {7}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [8, 9]}')
    assert ModelConfig.load(tmp_path).eos_token_ids == {7, 8, 9}


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3_ROPE}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3_ROPE}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3_ROPE}},
    ],
)
def test_rope_spellings_agree(spelling: dict[str, Any]) -> None:
    config = ModelConfig.from_dict({**LLAMA, **spelling})
    assert config.rope_theta == 5e5
    assert config.rope_scaling is not None
    assert config.rope_scaling.kind == "llama3"
    assert config.rope_scaling.original_max_position == 256
    assert config.max_position == 1024


@pytest.mark.parametrize(
    ("rope", "length"),
    [
        ({"rope_type": "linear", "factor": 2.0}, 2048),
        ({"rope_type": "yarn", "factor": 4.0}, 4096),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024),
        ({"rope_type": "default"}, 1024),
    ],
)
def test_context_length_follows_scaling(rope: dict[str, Any], length: int) -> None:
    assert ModelConfig.from_dict({**LLAMA, "rope_scaling": rope}).max_position == length


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_frequencies_equal_transformers(name: str) -> None:
    reference = make_reference(name)
    config = ModelConfig.from_dict(
        {**reference.config.to_dict(), "architectures": [type(reference).__name__]}
    )
    mine = frequencies(config.rope_theta, config.head_dim, config.rope_scaling)
    rotary = reference.model.rotary_emb
    torch.testing.assert_close(torch.tensor(mine.inverse), rotary.inv_freq, rtol=1e-5, atol=0)
    assert math.isclose(mine.amplitude, rotary.attention_scaling, rel_tol=1e-6)


QWEN2 = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "sliding_window": 512}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({**LLAMA, "architectures": ["MistralForCausalLM"]}, "MistralForCausalLM .* supported are"),
        ({**LLAMA, "architectures": None}, "none named"),
        ({**LLAMA, "hidden_act": "gelu"}, "gelu"),
        ({**LLAMA, "quantization_config": {"quant_method": "gptq"}}, "Quantised"),
        ({**LLAMA, "rope_scaling": {"rope_type": "longrope"}}, "longrope .* supported are"),
        ({**LLAMA, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({**LLAMA, "partial_rotary_factor": 0.5}, "Partial rotary"),
        ({**QWEN2, "use_sliding_window": True, "max_window_layers": 1}, "Sliding-window"),
        ({**LLAMA, "layer_types": ["full_attention", "sliding_attention"]}, "Sliding-window"),
    ],
)
def test_unsupported_is_one_sentence(config: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModel, match=words) as caught:
        ModelConfig.from_dict(config)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"use_sliding_window": False},
        {"use_sliding_window": True, "max_window_layers": 2},
        {"use_sliding_window": True, "layer_types": ["full_attention"] * 2},
        {"sliding_window": None},
    ],
)
def test_sliding_window_that_is_off_is_accepted(changes: dict[str, Any]) -> None:
    assert ModelConfig.from_dict({**QWEN2, **changes}).attention_bias


def test_qwen3_head_dim_default() -> None:
    config = ModelConfig.from_dict({**LLAMA, "architectures": ["Qwen3ForCausalLM"]})
    assert (config.head_dim, config.qk_norm) == (128, True)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "cannot be read"),
        ("[]", "not a JSON object"),
        (json.dumps({**LLAMA, "hidden_size": "wide"}), "wrong type"),
        (json.dumps({**LLAMA, "architectures": 3}), "wrong type"),
        (json.dumps({**LLAMA, "rope_parameters": [1]}), "wrong type"),
        (json.dumps({**LLAMA, "num_attention_heads": 0}), "wrong type or value"),
        (json.dumps({**LLAMA, "vocab_size": 0}), "vocab_size must be positive"),
        (json.dumps({**LLAMA, "intermediate_size": -1}), "intermediate_size must be positive"),
        (json.dumps({**LLAMA, "max_position_embeddings": 0}), "max_position must be positive"),
        (json.dumps({**LLAMA, "rope_scaling": {"rope_type": "llama3"}}), "no field 'factor'"),
        (json.dumps({k: v for k, v in LLAMA.items() if k != "vocab_size"}), "vocab_size"),
        (json.dumps({**LLAMA, "num_key_value_heads": 3}), "3 KV heads"),
    ],
)
def test_broken_config_files(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelLoadError, match=words):
        ModelConfig.load(tmp_path)


def test_missing_config_file(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"has no config\.json"):
        ModelConfig.load(tmp_path)
