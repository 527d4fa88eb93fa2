"""A tiny random model with a byte-level tokenizer, driven step by step under grammars."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))
sys.path.insert(0, str(Path(__file__).parents[1] / "server"))
sys.path.insert(0, str(Path(__file__).parent))

from grammar_kit import GrammarKit, make_runner
from tiny_kit import write_tiny

from sglang_minima.runner.model_runner import ModelRunner

if importlib.util.find_spec("xgrammar") is None:
    collect_ignore_glob = ["test_constrained_output.py", "test_grammar_checker.py"]


@pytest.fixture(scope="session")
def byte_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Configuration and tokenizer (one token a byte) of a model whose weights are drawn."""
    directory = tmp_path_factory.mktemp("bytes")
    write_tiny(directory)
    return directory


@pytest.fixture(scope="session")
def runner(byte_model: Path) -> ModelRunner:
    return make_runner(byte_model)


@pytest.fixture
def kit(runner: ModelRunner, byte_model: Path) -> GrammarKit:
    return GrammarKit.start(runner, byte_model)
