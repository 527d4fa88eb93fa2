from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from engine_kit import make_runner
from tiny_llama import write_tiny_llama

from sglang_minima.models.embedded import find_embedded_model
from sglang_minima.models.resolve import resolve_model_path
from sglang_minima.runner.model_runner import ModelRunner
from sglang_minima.tokenization.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(
        tmp_path_factory.mktemp("tiny"),
        vocab_size=512,
        intermediate_size=128,
        max_position_embeddings=8192,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
    )


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
