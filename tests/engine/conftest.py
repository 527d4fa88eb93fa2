from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from engine_kit import make_runner

from sglang_minima.models.embedded import find_embedded_model
from sglang_minima.models.resolve import resolve_model_path
from sglang_minima.runner.model_runner import ModelRunner
from sglang_minima.tokenization.tokenizer import Tokenizer


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
def tokenizer(embedded_dir: Path) -> Tokenizer:
    return Tokenizer.load(embedded_dir)
