"""Models: configuration, the dense decoder families, loading, GGUF conversion, embedded model.

Names are imported on first use, so that resolving a path or reading a config loads no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang_minima.models.backend import AttentionBackend
    from sglang_minima.models.causal_lm import CausalLM
    from sglang_minima.models.config import ModelConfig
    from sglang_minima.models.embedded import (
        EMBEDDED_MODEL_HELP,
        download_embedded_model,
        find_embedded_model,
    )
    from sglang_minima.models.errors import ModelLoadError, UnsupportedModel
    from sglang_minima.models.loader import load_model
    from sglang_minima.models.resolve import resolve_model_path

_MODULES = {
    "AttentionBackend": "backend",
    "CausalLM": "causal_lm",
    "EMBEDDED_MODEL_HELP": "embedded",
    "ModelConfig": "config",
    "ModelLoadError": "errors",
    "UnsupportedModel": "errors",
    "download_embedded_model": "embedded",
    "find_embedded_model": "embedded",
    "load_model": "loader",
    "resolve_model_path": "resolve",
}

__all__ = [
    "EMBEDDED_MODEL_HELP",
    "AttentionBackend",
    "CausalLM",
    "ModelConfig",
    "ModelLoadError",
    "UnsupportedModel",
    "download_embedded_model",
    "find_embedded_model",
    "load_model",
    "resolve_model_path",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
