"""The programs under examples/frontend with the real client against the real server.

Each must print how much of its prompts came from sealed pages, and find there what it shares.
"""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from server_kit import RunningServer

pytest.importorskip("sglang", reason="the sglang frontend client is not installed")
pytest.importorskip("xgrammar")

EXAMPLES = Path(__file__).parents[2] / "examples" / "frontend"
REPORT = re.compile(r"(\d+) of (\d+) prompt tokens came from sealed pages \((.*)\)")


@pytest.fixture(scope="module")
def play(server: RunningServer) -> Any:
    """Runs an example; returns what it returns, and its counts of cached and of all tokens."""
    sys.path.insert(0, str(EXAMPLES))
    endpoint = importlib.import_module("program").Endpoint

    def run(name: str) -> tuple[Any, int, int]:
        client = endpoint(server.url, chat_template_name="chatml")
        result = importlib.import_module(name).run(client)
        report = REPORT.fullmatch(client.report())
        assert report is not None
        by_tier = sum(int(count) for count in re.findall(r"\w+ (\d+)", report[3]))
        assert by_tier == int(report[1])
        return result, int(report[1]), int(report[2])

    yield run
    sys.path.remove(str(EXAMPLES))


Play = Callable[[str], tuple[Any, int, int]]


def test_few_shot_batch_finds_its_shots(play: Play) -> None:
    answers, cached, total = play("few_shot")
    assert answers == ["Rome", "Madrid", "London"]
    # Three questions over the traced prefix, which was computed once before them.
    assert cached >= 3 * 64 and cached > total // 2


def test_chat_finds_the_turns_before(play: Play) -> None:
    metas, _, _ = play("chat")
    assert [meta["cached_tokens"] > 0 for meta in metas[1:]] == [True, True]
    assert metas[2]["cached_tokens"] > metas[1]["cached_tokens"]


def test_branches_are_joined(play: Play) -> None:
    answers, cached, total = play("fork_join")
    assert "four" in answers[0] and "chalk" in answers[2]
    assert all(answers) and cached > total // 3


def test_values_have_their_types(play: Play) -> None:
    values, _, _ = play("typed")
    assert int(values["people"]) == 180
    assert float(values["price"]) == 12.5
    assert re.fullmatch(r'"[\w\s]*"', values["island"])
    assert values["dogs"] in ("True", "False")
    assert values["time"] == "08:30"


def test_three_ways_of_choosing(play: Play) -> None:
    moods, cached, total = play("choices")
    assert moods == ["happy"] * 3
    assert cached > total // 2


def test_json_follows_the_schema(play: Play) -> None:
    import jsonschema

    animals, cached, _ = play("json_output")
    for animal in animals:
        jsonschema.validate(animal, importlib.import_module("json_output").SCHEMA)
    assert [animal["name"] for animal in animals] == ["Rex", "Minka"]
    assert [animal["age"] for animal in animals] == [7, 11]
    assert cached > 0


def test_streams_agree(play: Play) -> None:
    (pieces, again), cached, _ = play("streaming")
    assert len(pieces) > 5 and len(again) > 5
    # A warm run may differ in a word; both are 20 tokens of the same story.
    assert "".join(pieces).split()[0] == "".join(again).split()[0]
    assert cached >= 64


def test_react_uses_a_tool(play: Play) -> None:
    (steps, answer), cached, total = play("react")
    assert steps == [("lookup", "Paris", "2100000")]
    assert answer.isdigit()
    assert cached > total // 2


def test_tree_of_thought_keeps_the_likeliest(play: Play) -> None:
    beams, cached, _ = play("tree_of_thought")
    scores = [score for score, _ in beams]
    assert len(beams) == 2 and scores == sorted(scores, reverse=True) and scores[0] < 0
    assert all(len(thoughts) == 2 for _, thoughts in beams)
    assert cached >= 64


def test_points_are_written_at_the_same_time(play: Play) -> None:
    texts, cached, total = play("parallel_decoding")
    assert len(texts) == 3 and all(texts)
    assert cached > total // 2


def test_limits(play: Play) -> None:
    metas, _, _ = play("limits")
    assert metas["one"]["finish_reason"]["type"] == "stop"
    assert metas["one"]["finish_reason"]["matched"] in ("\n-", "\n")
    assert 10 <= metas["several"]["completion_tokens"] <= 16
    assert metas["exactly"]["completion_tokens"] == 8
    assert metas["exactly"]["finish_reason"] == {"type": "length", "length": 8}


def test_an_example_runs_as_a_program(server: RunningServer) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "choices.py"), "--url", server.url],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert REPORT.search(done.stdout)


def test_every_example_is_tested() -> None:
    here = Path(__file__).read_text()
    names = {path.stem for path in EXAMPLES.glob("*.py")} - {"program"}
    assert names and all(f'play("{name}")' in here for name in names)
