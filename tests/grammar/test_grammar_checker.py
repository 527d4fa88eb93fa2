"""The process that tries out grammars: what it refuses, what bounds it, what it survives."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from sglang_minima.grammar import checker as checkers
from sglang_minima.grammar import workshop
from sglang_minima.grammar.checker import GrammarBusy, GrammarChecker
from sglang_minima.grammar.failed import AMBIGUOUS
from sglang_minima.grammar.spec import Grammar
from sglang_minima.sampling_params import InvalidRequest


@pytest.fixture(scope="module")
def loop() -> Any:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.fixture(scope="module")
def checker(loop: asyncio.AbstractEventLoop, byte_model: Path) -> Any:
    """One checker for all tests: its process takes seconds to start."""

    async def start() -> GrammarChecker:
        return GrammarChecker(str(byte_model))

    checker = loop.run_until_complete(start())
    yield checker
    loop.run_until_complete(checker.close())


def make(kind: Any, text: str) -> Grammar:
    return Grammar(kind, text)


def nested(depth: int, kind: str = "array") -> str:
    if kind == "array":
        return '{"type":"array","items":' * depth + '{"type":"integer"}' + "}" * depth
    start = '{"type":"object","required":["a"],"properties":{"a":'
    return start * depth + '{"type":"integer"}' + "}}" * depth


WORDS = [f"w{n:06d}" for n in range(20_000)]


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        (make("json_schema", nested(490, "object")), "more than 5 s"),
        (make("json_schema", nested(7000)), "json_schema"),
        (make("json_schema", f'{{"enum": {WORDS}}}'.replace("'", '"')), "too large"),
        (make("regex", "(" * 5000 + "a" + ")" * 5000), "invalid"),
        (make("regex", "(" * 500 + "a" + "|b)*" * 500), "too"),
        (make("ebnf", "root ::= root"), "matches no text"),
        (make("regex", "|".join(WORDS[:5000])), ""),
        (make("regex", "((a{1000}){1000}){1000}"), ""),
        (make("regex", "(a|b|c){0,100000}"), ""),
        (make("regex", "(.*a){30}.*b"), ""),
        (make("regex", "(a?){200}a{200}"), ""),
        (make("json_schema", '{"type":"string","minLength":1000000}'), ""),
        (make("json_schema", '{"type":"array","minItems":100000,"items":{}}'), ""),
    ],
)
def test_pathological_grammars_end_in_bounded_time(
    checker: GrammarChecker, loop: asyncio.AbstractEventLoop, grammar: Grammar, said: str
) -> None:
    started = time.monotonic()
    try:
        loop.run_until_complete(checker.check([grammar]))
        error = ""
    except InvalidRequest as refused:
        error = str(refused)
    # Some of them are harmless: what matters is that they end, and that the others are refused.
    assert said in error if said else not error
    assert time.monotonic() - started < workshop.WALL_SECONDS
    assert process_of(checker).memory_info().rss < 1 << 30


def process_of(checker: GrammarChecker) -> psutil.Process:
    assert checker._process is not None
    return psutil.Process(checker._process.pid)


def refusal(loop: asyncio.AbstractEventLoop, checker: GrammarChecker, grammar: Grammar) -> str:
    with pytest.raises(InvalidRequest) as refused:
        loop.run_until_complete(checker.check([grammar]))
    return str(refused.value)


def test_refusals_and_acceptances_are_remembered(
    checker: GrammarChecker, loop: asyncio.AbstractEventLoop
) -> None:
    bad, good = make("regex", "(oops"), make("regex", "fine+")
    first = refusal(loop, checker, bad)
    loop.run_until_complete(checker.check([good]))
    orders = checker._next_id
    assert refusal(loop, checker, bad) == first
    loop.run_until_complete(checker.check([good, good]))
    assert checker._next_id == orders


def test_what_turned_out_to_be_too_slow_is_refused(
    checker: GrammarChecker, loop: asyncio.AbstractEventLoop
) -> None:
    grammar = make("regex", "slow+")
    loop.run_until_complete(checker.check([grammar]))
    characters = checker._characters
    checker.refuse(grammar, AMBIGUOUS)
    assert refusal(loop, checker, grammar) == AMBIGUOUS
    assert checker._characters == characters


def test_what_is_asked_twice_at_once_is_tried_once(
    checker: GrammarChecker, loop: asyncio.AbstractEventLoop
) -> None:
    grammar, other = make("regex", "twice{2}"), make("regex", "other{2}")
    orders = checker._next_id

    async def ask() -> None:
        impatient = asyncio.ensure_future(checker.check([grammar]))
        patient = [asyncio.ensure_future(checker.check([grammar, other])) for _ in range(4)]
        await asyncio.sleep(0)
        impatient.cancel()
        await asyncio.gather(*patient)

    loop.run_until_complete(ask())
    assert checker._next_id == orders + 2


def test_a_dead_process_is_told_and_replaced(
    checker: GrammarChecker, loop: asyncio.AbstractEventLoop
) -> None:
    async def kill_while_waiting() -> None:
        await checker.check([make("regex", "alive")])
        waiting = asyncio.ensure_future(checker.check([make("json_schema", nested(600))]))
        await asyncio.sleep(0.02)
        process_of(checker).kill()
        with pytest.raises(GrammarBusy, match="died"):
            await waiting
        await checker.check([make("regex", "alive again")])

    loop.run_until_complete(kill_while_waiting())


def test_large_grammars_keep_nobody_waiting(
    checker: GrammarChecker, loop: asyncio.AbstractEventLoop
) -> None:
    """Each would take five seconds; a small one behind them is done long before."""
    count = workshop.MAX_SLOW + 4

    async def flood() -> tuple[float, list[BaseException | None]]:
        await checker.check([make("regex", "here")])
        large = [
            asyncio.ensure_future(checker.check([make("json_schema", nested(n, "object"))]))
            for n in range(460, 460 + count)
        ]
        await asyncio.sleep(0)
        started = time.monotonic()
        await checker.check([make("regex", "small")])
        seconds = time.monotonic() - started
        while sum(task.done() for task in large) < 3:
            await asyncio.sleep(0.05)
        refused = [task.exception() for task in large if task.done()]
        await checker.close()
        await asyncio.gather(*large, return_exceptions=True)
        return seconds, refused

    seconds, refused = loop.run_until_complete(asyncio.wait_for(flood(), 60))
    assert seconds < count * workshop.CPU_SECONDS / workshop.MAX_JOBS / 2
    assert all(isinstance(error, GrammarBusy) and "large" in str(error) for error in refused)


def test_nothing_is_left_behind(checker: GrammarChecker, loop: asyncio.AbstractEventLoop) -> None:
    async def close_while_busy() -> list[psutil.Process]:
        await checker.check([make("regex", "busy")])
        slow = asyncio.ensure_future(checker.check([make("json_schema", nested(480, "object"))]))
        process = process_of(checker)
        while not process.children():
            await asyncio.sleep(0.02)
        processes = [process, *process.children()]
        await checker.close()
        with pytest.raises(asyncio.CancelledError):
            await slow
        return processes

    processes = loop.run_until_complete(close_while_busy())
    assert len(processes) == 2
    assert not psutil.wait_procs(processes, timeout=30)[1]


def test_the_process_ends_with_its_input(
    checker: GrammarChecker, loop: asyncio.AbstractEventLoop
) -> None:
    async def abandon() -> None:
        await checker.check([make("regex", "input")])
        process, stdin = process_of(checker), checker._process and checker._process.stdin
        assert stdin is not None
        stdin.close()
        await asyncio.to_thread(process.wait, 10)

    loop.run_until_complete(abandon())


def test_a_child_cannot_take_more_memory() -> None:
    program = (
        "import os\nfrom sglang_minima.grammar import workshop\nworkshop._limit(os.getppid())\n"
        "kept = bytearray(256 << 20)\nprint('fits', flush=True)\nbytearray(512 << 20)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "fits\n" and "MemoryError" in done.stderr


def test_too_many_at_once(
    checker: GrammarChecker, loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkers, "MAX_WAITING", 2)

    async def flood() -> None:
        asked = [
            asyncio.ensure_future(checker.check([make("regex", f"a{{{n}}}")])) for n in (1, 2, 3)
        ]
        with pytest.raises(GrammarBusy, match="too many"):
            await asked[2]
        await asyncio.gather(*asked[:2])

    loop.run_until_complete(flood())


def test_a_model_that_cannot_be_loaded_is_told(tmp_path: Path) -> None:
    async def ask() -> None:
        checker = GrammarChecker(str(tmp_path))
        with pytest.raises(GrammarBusy, match="cannot be started"):
            await checker.check([make("regex", "a")])
        await checker.close()

    asyncio.run(ask())


def test_a_process_that_cannot_start_is_told_and_started_later(
    byte_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system has no more files or processes for it now."""

    async def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async def ask() -> None:
        checker = GrammarChecker(str(byte_model))
        with monkeypatch.context() as patch:
            patch.setattr(asyncio, "create_subprocess_exec", refuse)
            with pytest.raises(GrammarBusy, match="cannot be started"):
                await checker.check([make("regex", "a")])
        await checker.check([make("regex", "a")])
        await checker.close()

    asyncio.run(ask())


def test_without_xgrammar_the_package_is_named(
    byte_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkers, "_MODULES", ("xgrammar", "no_such_module"))

    async def ask() -> None:
        checker = GrammarChecker(str(byte_model))
        with pytest.raises(InvalidRequest, match="xgrammar"):
            await checker.check([make("regex", "a")])
        await checker.close()

    asyncio.run(ask())


def test_memory_of_verdicts_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkers, "MAX_REMEMBERED", 10)

    async def fill() -> GrammarChecker:
        checker = GrammarChecker("nowhere")
        for number in range(50):
            checker._remember(make("regex", "a" * number), None)
        return checker

    checker = asyncio.run(fill())
    assert len(checker._known) == 10
    assert checker._characters == sum(range(40, 50))
