"""Servers for the tests: with a fake scheduler (`fake`), and the real one (`server`)."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from server_kit import HERE, RunningServer, start_server, write_model
from tiny_kit import start_tiny, write_tiny


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Configuration and byte-level tokenizer of a model that has no weights."""
    directory = tmp_path_factory.mktemp("model")
    write_model(directory)
    return directory


@pytest.fixture(scope="session")
def fake(model_dir: Path) -> Iterator[RunningServer]:
    """A server whose scheduler repeats the prompt."""
    program = [str(HERE / "fake_server.py"), "--model-path", str(model_dir)]
    # Nobody reads the log while the tests run: lines of refused requests would fill the pipe.
    server = start_server(program, "--served-model-name", "fake-model", "--log-level", "warning")
    yield server
    server.end(signal.SIGINT)


@pytest.fixture(scope="session")
def scripted(model_dir: Path) -> Iterator[RunningServer]:
    """A server that answers with the script in the prompt; its model reasons and calls tools."""
    program = [str(HERE / "fake_server.py"), "--model-path", str(model_dir)]
    flags = ("--context-length", "8192", "--reasoning-parser", "qwen3", "--api-key", "sesame")
    server = start_server(program, *flags, "--log-level", "warning")
    yield server
    server.end(signal.SIGINT)


@pytest.fixture(scope="session")
def server() -> Iterator[RunningServer]:
    """The real server on the embedded model; skipped where that is not installed."""
    from sglang_minima.models.embedded import find_embedded_model

    if find_embedded_model() is None:
        pytest.skip("the embedded model is not installed")
    # Nobody reads the log while the tests run: lines of every batch would fill the pipe.
    flags = ("--kv-cache-memory", "256m", "--log-level", "warning")
    server = start_server(["-m", "sglang_minima.launch_server"], *flags)
    yield server
    server.end(signal.SIGTERM)


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model without weights: its server draws them."""
    directory = tmp_path_factory.mktemp("tiny")
    write_tiny(directory)
    return directory


@pytest.fixture(scope="session")
def tiny(tiny_dir: Path) -> Iterator[RunningServer]:
    """The real server on the tiny model."""
    server = start_tiny(tiny_dir)
    yield server
    output = server.end(signal.SIGTERM)
    assert "Traceback" not in output, output
    assert "ERROR" not in output, output
