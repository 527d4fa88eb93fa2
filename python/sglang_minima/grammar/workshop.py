"""The process that tries out grammars: `python -m sglang_minima.grammar.workshop TOKENIZER`.

It loads the tokenizer once and then forks a child for every grammar. The child compiles it and
follows it for a while, under limits of CPU time and memory that the kernel enforces, so nothing in
a grammar can take more than that or hurt anybody else. Nearly all grammars take milliseconds: one
that takes longer is put aside and tried again where it keeps none of these waiting.

Lines of JSON come in (`Order`) and go out (`Verdict`); the first line out is about the start (rid
""). It ends when its input ends.
"""

from __future__ import annotations

import ctypes
import os
import random
import resource
import selectors
import signal
import sys
import time
from collections import deque
from typing import NoReturn

import msgspec

from sglang_minima.grammar.spec import Grammar

MAX_JOBS = 2
CPU_SECONDS = 5
QUICK_SECONDS = 0.5
"""CPU time of the first try; who needs more gets one of the places in the slow queue."""
MAX_SLOW = 8
"""Grammars in the slow queue, which has one job at a time."""
WALL_SECONDS = 60.0
"""Against children that wait for what never comes; CPU time ends those that work."""
MEMORY_BYTES = 512 << 20
MAX_COMPILED_BYTES = 32 << 20

_PR_SET_PDEATHSIG = 1


class Order(msgspec.Struct):
    """A grammar to try."""

    id: str
    grammar: Grammar


class Verdict(msgspec.Struct):
    """What became of it."""

    id: str
    error: str | None = None
    """One sentence for the client; None when the grammar can be used."""
    busy: bool = False
    """Nothing was found out: too many others are at it."""


class _Job:
    """A child at work."""

    def __init__(self, order: Order, pid: int, pipe: int, quick: bool) -> None:
        self.order = order
        self.quick = quick
        self.pid = pid
        self.pipe = pipe
        self.deadline = time.monotonic() + WALL_SECONDS
        self.said = b""


class Workshop:
    """Forks children for orders and reports what they say or why they died."""

    def __init__(self, tokenizer_path: str) -> None:
        from sglang_minima.tokenization.tokenizer import Tokenizer

        tokenizer = Tokenizer.load(tokenizer_path)
        # After the tokenizer, which may be missing: xgrammar takes seconds to import.
        from sglang_minima.grammar.compiler import GrammarCompiler, vocabulary

        self._compiler = GrammarCompiler(vocabulary(tokenizer, tokenizer.eos_token_ids))
        self._eos = tokenizer.eos_token_ids
        self._queue: deque[Order] = deque()
        self._slow: deque[Order] = deque()
        """Those that took too long at their first try."""
        self._selector = selectors.DefaultSelector()
        self._jobs: dict[int, _Job] = {}
        """By the pipe on which the child answers."""

    def serve(self) -> None:
        """Works until the input ends."""
        decoder = msgspec.json.Decoder(Order)
        unread = b""
        self._selector.register(0, selectors.EVENT_READ)
        while True:
            timeout = min((job.deadline for job in self._jobs.values()), default=None)
            if timeout is not None:
                timeout = max(0.0, timeout - time.monotonic())
            for key, _ in self._selector.select(timeout):
                data = os.read(key.fd, 1 << 16)
                if key.fd:
                    self._hear(self._jobs[key.fd], data)
                    continue
                if not data:
                    return
                *lines, unread = (unread + data).split(b"\n")
                self._queue.extend(decoder.decode(line) for line in lines)
            for job in list(self._jobs.values()):
                if time.monotonic() > job.deadline:
                    self._hear(job, b"")
            while len(self._jobs) < MAX_JOBS and self._begin_next():
                continue

    def _begin_next(self) -> bool:
        """Starts a job, if there is one that may start now."""
        if self._queue:
            self._begin(self._queue.popleft(), quick=True)
            return True
        if self._slow and all(job.quick for job in self._jobs.values()):
            self._begin(self._slow.popleft(), quick=False)
            return True
        return False

    def _begin(self, order: Order, quick: bool) -> None:
        reading, writing = os.pipe()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            self._work(order.grammar, writing, parent, quick)
        os.close(writing)
        self._jobs[reading] = _Job(order, pid, reading, quick)
        self._selector.register(reading, selectors.EVENT_READ)

    def _hear(self, job: _Job, data: bytes) -> None:
        """The child has said something, or (no data) it has ended or must end."""
        job.said += data
        if data:
            return
        self._selector.unregister(job.pipe)
        os.close(job.pipe)
        del self._jobs[job.pipe]
        os.kill(job.pid, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(job.pid, 0)[1])
        kind = job.order.grammar.kind
        if -status == signal.SIGPROF:
            self._put_aside(job.order)
            return
        if status == 0:
            error = job.said.decode(errors="replace") or None
        elif -status == signal.SIGXCPU or time.monotonic() > job.deadline:
            error = f"{kind} is too complex: it takes more than {CPU_SECONDS} s to compile"
        else:
            error = f"{kind} is too complex to be compiled"
        tell(Verdict(job.order.id, error))

    def _put_aside(self, order: Order) -> None:
        if len(self._slow) < MAX_SLOW:
            self._slow.append(order)
        else:
            tell(Verdict(order.id, "too many large grammars are being compiled", busy=True))

    def _work(self, grammar: Grammar, pipe: int, parent: int, quick: bool) -> NoReturn:
        """The child's life; it says nothing when the grammar can be used."""
        code = 1
        try:
            _limit(parent)
            if quick:
                # Its signal, SIGPROF, ends the child.
                signal.setitimer(signal.ITIMER_PROF, QUICK_SECONDS)
            os.write(pipe, (self._try(grammar) or "").encode()[:4096])
            code = 0
        finally:
            os._exit(code)

    def _try(self, grammar: Grammar) -> str | None:
        from sglang_minima.grammar.compiler import GrammarError
        from sglang_minima.grammar.trial import trial

        try:
            compiled = self._compiler.compile(grammar)
        except GrammarError as error:
            return str(error)
        if compiled.memory_size_bytes > MAX_COMPILED_BYTES:
            return (
                f"{grammar.kind} is too large: compiled it takes "
                f"{compiled.memory_size_bytes >> 20} MiB of at most {MAX_COMPILED_BYTES >> 20}"
            )
        problem = trial(compiled, self._eos, grammar, random.Random(0))
        return None if problem is None else f"{grammar.kind} {problem}"


def _limit(parent: int) -> None:
    """Bounds this child by the kernel: its time, its memory, and that it dies with its parent."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        memory = _data_bytes() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(5)


def _data_bytes() -> int:
    """Private memory of this process, as RLIMIT_DATA counts it."""
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith("VmData:"))
    return int(line.split()[1]) << 10


def tell(verdict: Verdict) -> None:
    """Writes one line of output."""
    os.write(1, msgspec.json.encode(verdict) + b"\n")


def main() -> None:
    """Entry point."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        workshop = Workshop(sys.argv[1])
    except Exception as error:
        tell(Verdict("", f"structured output cannot be started: {error}"))
        return
    tell(Verdict(""))
    workshop.serve()


if __name__ == "__main__":
    main()
