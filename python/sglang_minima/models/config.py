"""`ModelConfig`: what the engine needs to know of a checkpoint, read from its `config.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_minima.models.errors import ModelLoadError, UnsupportedModel
from sglang_minima.models.rope import RopeScaling, read_rope, scaled_max_position

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")

_COUNTS = (
    *("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"),
    *("intermediate_size", "max_position"),
)


@dataclass(frozen=True)
class ModelConfig:
    """Geometry and token ids of a dense decoder-only model."""

    architecture: str
    """Class name in `architectures`, e.g. "LlamaForCausalLM"."""
    model_type: str
    vocab_size: int
    """Rows of the logits; a tokenizer may know fewer ids."""
    hidden_size: int
    num_layers: int
    num_heads: int
    """Query heads."""
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_position: int
    """Context length in tokens, after rope scaling."""
    tie_embeddings: bool
    """The output head is the input embedding."""
    attention_bias: bool
    """Llama, Qwen3: biases on q, k, v and o. Qwen2: always True, and then o has none."""
    mlp_bias: bool
    qk_norm: bool
    """RMSNorm over head_dim on every q and k head, before RoPE (Qwen3)."""
    bos_token_id: int | None
    eos_token_ids: frozenset[int]
    """Of config.json and generation_config.json together."""
    checkpoint_dtype: str
    """The dtype the checkpoint names for itself, e.g. "bfloat16"."""

    @classmethod
    def load(cls, path: Path) -> ModelConfig:
        """Reads `config.json` and, where there is one, `generation_config.json` of a directory.

        Raises:
            ModelLoadError: a file is missing or is not a JSON object, or a field is missing.
            UnsupportedModel: see `from_dict`.
        """
        generation_path = path / "generation_config.json"
        generation = read_json_object(generation_path) if generation_path.exists() else {}
        return cls.from_dict(read_json_object(path / "config.json"), generation)

    @classmethod
    def from_dict(
        cls, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None
    ) -> ModelConfig:
        """Parses the fields of a Hugging Face configuration (transformers 4 and 5 spellings).

        Raises:
            ModelLoadError: a field is missing or has the wrong type.
            UnsupportedModel: an architecture, activation, rope or attention this server lacks.
        """
        try:
            architecture = _architecture(config)
            _check_supported(config)
            return cls._parse(architecture, config, generation_config or {})
        except KeyError as error:
            raise ModelLoadError(f"config.json has no field {error}.") from None
        except (TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
            raise ModelLoadError(
                f"config.json has a field of the wrong type or value: {error}."
            ) from None

    @classmethod
    def _parse(
        cls, architecture: str, config: Mapping[str, Any], generation: Mapping[str, Any]
    ) -> ModelConfig:
        num_heads = int(config["num_attention_heads"])
        hidden_size = int(config["hidden_size"])
        num_kv_heads = int(config.get("num_key_value_heads") or num_heads)
        if num_heads % num_kv_heads:
            raise ModelLoadError(
                f"{num_heads} query heads cannot be shared out over {num_kv_heads} KV heads."
            )
        # Qwen3 checkpoints that omit head_dim mean 128, whatever hidden_size / num_heads is.
        default_head_dim = 128 if architecture.startswith("Qwen3") else hidden_size // num_heads
        theta, scaling = read_rope(config)
        bos = config.get("bos_token_id")
        loaded = cls(
            architecture=architecture,
            model_type=str(config.get("model_type", "")),
            vocab_size=int(config["vocab_size"]),
            hidden_size=hidden_size,
            num_layers=int(config["num_hidden_layers"]),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=int(config.get("head_dim") or default_head_dim),
            intermediate_size=int(config["intermediate_size"]),
            rms_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope_theta=theta,
            rope_scaling=scaling,
            max_position=scaled_max_position(int(config["max_position_embeddings"]), scaling),
            tie_embeddings=bool(config.get("tie_word_embeddings", False)),
            attention_bias=architecture.startswith("Qwen2")
            or bool(config.get("attention_bias", False)),
            mlp_bias=bool(config.get("mlp_bias", False)),
            qk_norm=architecture.startswith("Qwen3"),
            bos_token_id=None if bos is None else int(bos),
            eos_token_ids=_ids(config.get("eos_token_id")) | _ids(generation.get("eos_token_id")),
            checkpoint_dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
        )
        for name in _COUNTS:
            if getattr(loaded, name) < 1:
                raise ModelLoadError(f"config.json: {name} must be positive.")
        return loaded


def read_json_object(path: Path) -> dict[str, Any]:
    """Reads a JSON file whose top level must be an object, else `ModelLoadError`."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelLoadError(f"{path.parent} has no {path.name}.") from None
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}.") from None
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} is not a JSON object.")
    return value


def _architecture(config: Mapping[str, Any]) -> str:
    names = config.get("architectures") or []
    for name in names:
        if name in SUPPORTED_ARCHITECTURES:
            return str(name)
    found = ", ".join(map(str, names)) or "none named"
    raise UnsupportedModel(
        f"Architecture {found} is not supported; supported are "
        f"{', '.join(SUPPORTED_ARCHITECTURES)}."
    )


def _check_supported(config: Mapping[str, Any]) -> None:
    if config.get("quantization_config"):
        raise UnsupportedModel(
            "Quantised Hugging Face checkpoints are not supported; use an unquantised checkpoint "
            "or a .gguf file."
        )
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModel(f"Activation {activation} is not supported; supported is silu.")
    if _slides(config):
        raise UnsupportedModel(
            "Sliding-window attention is not supported; supported are models whose every layer "
            "attends to the full context."
        )


def _slides(config: Mapping[str, Any]) -> bool:
    """Whether any layer uses a window (Qwen2 configs name one even where it is switched off)."""
    layer_types = config.get("layer_types")
    if layer_types is not None:
        return any(kind != "full_attention" for kind in layer_types)
    if not config.get("sliding_window") or not config.get("use_sliding_window", True):
        return False
    # Qwen2: the first max_window_layers layers attend to everything.
    return int(config.get("max_window_layers", 0)) < int(config.get("num_hidden_layers", 0))


def _ids(value: Any) -> frozenset[int]:
    if value is None:
        return frozenset()
    return frozenset(int(item) for item in (value if isinstance(value, list) else [value]))
