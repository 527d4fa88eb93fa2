from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parent))

from engine_kit import make_runner

from sglang_minima.models.embedded import find_embedded_model
from sglang_minima.models.resolve import resolve_model_path
from sglang_minima.runner.model_runner import ModelRunner
from sglang_minima.tokenization.tokenizer import Tokenizer

SHORT_LAYERS = 6


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Llama whose steps take a millisecond."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=8192,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
        initializer_range=0.15,
    )
    path = tmp_path_factory.mktemp("tiny")
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def tiny_runner(tiny_dir: Path) -> ModelRunner:
    return make_runner(tiny_dir)


@pytest.fixture(scope="session")
def embedded_dir() -> Path:
    if find_embedded_model() is None:
        pytest.skip("the embedded model is not installed")
    return resolve_model_path(None)


@pytest.fixture(scope="session")
def embedded_runner(embedded_dir: Path) -> ModelRunner:
    return make_runner(embedded_dir)


@pytest.fixture(scope="session")
def short_runner(embedded_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    """The embedded model without all but its first layers: real weights for less work."""
    path = tmp_path_factory.mktemp("short")
    config = json.loads((embedded_dir / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": SHORT_LAYERS}))
    with safe_open(embedded_dir / "model.safetensors", framework="pt") as whole:
        split = {name: name.split(".") for name in sorted(whole.keys())}
        names = [n for n, p in split.items() if p[1] != "layers" or int(p[2]) < SHORT_LAYERS]
        save_file({name: whole.get_tensor(name) for name in names}, path / "model.safetensors")
    return make_runner(path)


@pytest.fixture(scope="session")
def tokenizer(embedded_dir: Path) -> Tokenizer:
    return Tokenizer.load(embedded_dir)
