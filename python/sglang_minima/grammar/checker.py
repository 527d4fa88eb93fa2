"""`GrammarChecker`: tells an HTTP process whether a grammar can be used, before anything queues."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import sys
from collections import OrderedDict
from collections.abc import Iterable

import msgspec

from sglang_minima.grammar.spec import Grammar
from sglang_minima.grammar.workshop import Order, Verdict
from sglang_minima.sampling_params import InvalidRequest

logger = logging.getLogger(__name__)

MAX_WAITING = 256
"""Grammars on trial at once."""
MAX_REMEMBERED = 4096
_REMEMBERED_CHARACTERS = 32 << 20
_MODULES = ("xgrammar", "tvm_ffi")
MISSING = (
    "structured output needs the packages xgrammar and apache-tvm-ffi, which are not installed "
    "on this server (pip install 'sglang-minima[grammar]')"
)


class GrammarBusy(RuntimeError):
    """The grammar cannot be tried out now (503)."""


class GrammarChecker:
    """Has grammars tried out by a `workshop` process, which starts with the first of them.

    What was found out is remembered, so a grammar costs a trial once, also a bad one.

    Args:
        tokenizer_path: of the model's tokenizer.
    """

    def __init__(self, tokenizer_path: str) -> None:
        self._tokenizer_path = tokenizer_path
        self._known: OrderedDict[Grammar, str | None] = OrderedDict()
        self._characters = 0
        self._trials: dict[Grammar, asyncio.Task[str | None]] = {}
        self._verdicts: dict[str, asyncio.Future[str | None]] = {}
        self._next_id = 0
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()

    async def check(self, grammars: Iterable[Grammar]) -> None:
        """Returns when all of them are known to be usable.

        Raises:
            InvalidRequest: one cannot be used, or this server has no structured output.
            GrammarBusy: too many are on trial, or the process that tries them died or cannot start.
        """
        for grammar in dict.fromkeys(grammars):
            error = await self._verdict(grammar)
            if error is not None:
                raise InvalidRequest(error)

    def refuse(self, grammar: Grammar, error: str) -> None:
        """Remembers that an accepted grammar turned out to be unusable.

        Args:
            error: one sentence for the clients that come with it later.
        """
        self._remember(grammar, error)

    async def close(self) -> None:
        """Ends the process."""
        tasks = [*self._trials.values(), *([self._reading] if self._reading else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _verdict(self, grammar: Grammar) -> str | None:
        if grammar in self._known:
            self._known.move_to_end(grammar)
            return self._known[grammar]
        trial = self._trials.get(grammar)
        if trial is None:
            if not all(importlib.util.find_spec(name) for name in _MODULES):
                raise InvalidRequest(MISSING)
            if len(self._trials) >= MAX_WAITING:
                raise GrammarBusy("too many grammars are being compiled")
            trial = asyncio.get_running_loop().create_task(self._try(grammar))
            self._trials[grammar] = trial
            trial.add_done_callback(lambda task: self._trial_ended(grammar, task))
        # Shielded: a client that leaves must not take the answer from the others who wait.
        return await asyncio.shield(trial)

    def _trial_ended(self, grammar: Grammar, task: asyncio.Task[str | None]) -> None:
        del self._trials[grammar]
        if not task.cancelled() and task.exception() is None:
            self._remember(grammar, task.result())

    async def _try(self, grammar: Grammar) -> str | None:
        async with self._starting:
            process = self._process or await self._start()
        assert process.stdin is not None
        self._next_id += 1
        order = Order(str(self._next_id), grammar)
        verdict: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._verdicts[order.id] = verdict
        process.stdin.write(msgspec.json.encode(order) + b"\n")
        return await verdict

    async def _start(self) -> asyncio.subprocess.Process:
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "sglang_minima.grammar.workshop",
                self._tokenizer_path,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
                # Ctrl-C reaches the whole process group; the server decides when this one ends.
                start_new_session=True,
            )
        except OSError as error:  # no more files or processes, which may pass
            logger.error("The process that compiles grammars cannot be started: %s", error)
            raise GrammarBusy("the process that compiles grammars cannot be started") from None
        self._process = process
        self._reading = asyncio.get_running_loop().create_task(self._read(process))
        return process

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        """Hands out verdicts until the process ends."""
        assert process.stdout is not None and process.stdin is not None
        decoder = msgspec.json.Decoder(Verdict)
        problem = "the process that compiles grammars died; try again"
        try:
            async for line in process.stdout:
                verdict = decoder.decode(line)
                future = self._verdicts.pop(verdict.id, None)
                if future is None:
                    problem = verdict.error or problem
                elif future.done():
                    continue
                elif verdict.busy:
                    future.set_exception(GrammarBusy(verdict.error))
                else:
                    future.set_result(verdict.error)
        finally:
            self._process = None
            abandoned, self._verdicts = self._verdicts, {}
            for future in abandoned.values():
                if not future.done():
                    future.set_exception(GrammarBusy(problem))
            # A workshop whose input ends takes its children with it.
            process.stdin.close()
            if process.returncode is None:
                process.kill()
            await process.wait()

    def _remember(self, grammar: Grammar, error: str | None) -> None:
        if grammar not in self._known:
            self._characters += len(grammar.text)
        self._known[grammar] = error
        while len(self._known) > MAX_REMEMBERED or self._characters > _REMEMBERED_CHARACTERS:
            dropped, _ = self._known.popitem(last=False)
            self._characters -= len(dropped.text)
