"""The offline `Engine` on the fake scheduler."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from server_kit import FAKE_SCHEDULER

from sglang_minima import Engine
from sglang_minima.entrypoints.errors import HttpError
from sglang_minima.processes import LaunchError
from sglang_minima.sampling_params import InvalidRequest
from sglang_minima.settings import ArgumentError
from sglang_minima.tokenization.state import EngineDead

FOUR = {"max_new_tokens": 4}


@pytest.fixture(scope="module")
def engine(model_dir: Path) -> Iterator[Engine]:
    with Engine(scheduler=FAKE_SCHEDULER, model_path=str(model_dir)) as engine:
        yield engine


def test_generate(engine: Engine) -> None:
    reply = engine.generate("abc", FOUR)
    assert reply["text"] == "abca"
    assert reply["meta_info"]["finish_reason"] == {"type": "length", "length": 4}
    replies = engine.generate(["abc", "xyz"], [FOUR, {"max_new_tokens": 1}])
    assert [entry["text"] for entry in replies] == ["abca", "x"]
    assert engine.generate(input_ids=[40, 41], sampling_params=FOUR)["output_ids"] == [40, 41] * 2
    assert len(engine.generate("abc", {**FOUR, "n": 2})) == 2
    scored = engine.generate("abc", FOUR, return_logprob=True)
    assert len(scored["meta_info"]["output_token_logprobs"]) == 4


def test_stream(engine: Engine) -> None:
    texts = [reply["text"] for reply in engine.generate("abc", FOUR, stream=True)]
    assert texts[-1] == "abca"
    assert len(texts) > 1


def test_abandoned_stream_is_aborted(engine: Engine) -> None:
    stream = engine.generate("abc", {"max_new_tokens": 400}, stream=True, rid="slow-a")
    next(stream)
    stream.close()
    assert "slow-a" in engine.get_server_info()["aborted"]


def test_async(engine: Engine) -> None:
    async def main() -> tuple[list[Any], list[str]]:
        calls = [engine.async_generate(text, FOUR) for text in ("abc", "xyz")]
        whole = await asyncio.gather(*calls)
        stream = await engine.async_generate("abc", FOUR, stream=True)
        return whole, [reply["text"] async for reply in stream]

    whole, texts = asyncio.run(main())
    assert [reply["text"] for reply in whole] == ["abca", "xyzx"]
    assert texts[-1] == "abca"


def test_flush_and_info(engine: Engine) -> None:
    assert engine.flush_cache()
    info = engine.get_server_info()
    assert info["page_size"] == 16
    assert info["internal_states"]


def test_errors(engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match="empty"):
        engine.generate("")
    with pytest.raises(InvalidRequest, match="colour"):
        engine.generate("abc", {"colour": 1})
    with pytest.raises(HttpError) as caught:
        engine.generate("abc", FOUR, rid="refuse")
    assert caught.value.status == 503


def test_wrong_settings() -> None:
    with pytest.raises(ArgumentError):
        Engine(port=-1)
    with pytest.raises(LaunchError):
        Engine(model_path="/nonexistent")


def test_a_process_that_ends_without_a_word(model_dir: Path) -> None:
    """As it does where the script has no guard."""
    with pytest.raises(LaunchError, match=r"while starting\. A script that .* `if __name__ == "):
        Engine(model_path=str(model_dir), scheduler="fake_scheduler:end_at_once")


def test_made_in_a_thread_that_ends(model_dir: Path) -> None:
    """The children live as long as the program, and end with the engine."""
    made: list[Engine] = []
    thread = threading.Thread(
        target=lambda: made.append(Engine(scheduler=FAKE_SCHEDULER, model_path=str(model_dir)))
    )
    thread.start()
    thread.join()
    engine = made[0]
    children = [child for child in psutil.Process().children() if "spawn" in str(child.cmdline())]
    assert engine.generate("abc", FOUR)["text"] == "abca"
    with pytest.raises(EngineDead, match="exit code 7"):
        engine.generate("abc", FOUR, rid="die")
    with pytest.raises(EngineDead):
        engine.generate("abc", FOUR)
    engine.shutdown()
    engine.shutdown()
    with pytest.raises(EngineDead, match="was shut down"):
        engine.generate("abc", FOUR)
    assert len(children) >= 2
