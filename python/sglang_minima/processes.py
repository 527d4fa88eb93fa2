"""Starts the processes of a server, watches them, and ends them.

Children die with their parent (kernel death signal, and a watch for platforms and threads where
that signal does not help); the parent learns at once when a child dies.
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import dataclasses
import importlib
import logging
import multiprocessing
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_minima.channels import Addresses
from sglang_minima.server_args import ServerArgs

if TYPE_CHECKING:
    from sglang_minima.tokenization.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

SCHEDULER = "sglang_minima.scheduler.process:run_scheduler"
DETOKENIZER = "sglang_minima.tokenization.detokenizer:run_detokenizer"
"""Main functions of the children, named so that only the child imports them. They take
(ServerArgs, Addresses, Connection), send {"ok": True, "info": {...}} through the connection and
close it; what they raise before that is reported as {"ok": False, "error": one line}."""

_FORESEEN = (ValueError, OSError, RuntimeError, MemoryError)
"""What a setting, a file or a machine that a child cannot start with raises: its message is enough.
Others are ours to find, and a child that serves should not fail at all: those show where."""
_PR_SET_PDEATHSIG = 1
_EXIT_SECONDS = 5.0


class LaunchError(RuntimeError):
    """The server cannot start; the message is one line for the person who started it."""


class ProcessDied(LaunchError):
    """A child ended without a word while it was starting."""


def configure_logging(level: str) -> None:
    """One line per record on stderr, for this process."""
    logging.basicConfig(
        level=level.upper(),
        format="[%(asctime)s] %(levelname)s %(message)s",
        datefmt="%Y-%m-%d %H:%M:%S",
        force=True,
    )
    # Libraries that report every request or file at INFO would drown the server's own lines.
    for name in ("httpx", "urllib3", "transformers", "asyncio"):
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))


class ProcessGroup:
    """The children of one server: started at once, ready after `wait_ready`.

    Raises:
        LaunchError: the system gives no more processes or files, or no temporary folder.
    """

    def __init__(self, args: ServerArgs, mains: dict[str, str]) -> None:
        context = multiprocessing.get_context("spawn")
        try:
            self.addresses = Addresses.create()
        except (OSError, ValueError) as error:
            raise LaunchError(f"{one_line(error)}: name a folder with TMPDIR") from None
        self._processes: dict[str, BaseProcess] = {}
        self._pipes: dict[str, Connection] = {}
        atexit.register(self.stop)
        # The death signal follows the *thread* that forked: only the main thread outlives them.
        signalled = threading.current_thread() is threading.main_thread()
        parent = os.getpid() if signalled else None
        try:
            for name, main in mains.items():
                receiving, sending = context.Pipe(duplex=False)
                process = context.Process(
                    target=_run_child,
                    args=(main, args, self.addresses, sending, parent),
                    name=f"sglang_minima {name}",
                    daemon=True,
                )
                process.start()
                sending.close()
                self._processes[name], self._pipes[name] = process, receiving
        except OSError as error:
            self.stop()
            raise LaunchError(f"the server's processes cannot start: {error.strerror}") from None

    def wait_ready(self) -> dict[str, Any]:
        """Waits for all children; returns what they say about themselves.

        Raises:
            LaunchError: a child reported an error or died.
        """
        info: dict[str, Any] = {}
        waiting: dict[Any, str] = {pipe: name for name, pipe in self._pipes.items()}
        while waiting:
            for pipe in connection.wait(list(waiting)):
                name = waiting.pop(pipe)
                try:
                    report = self._pipes[name].recv()
                except EOFError:
                    raise ProcessDied(f"{self._obituary(name)} while starting") from None
                if not report["ok"]:
                    raise LaunchError(str(report["error"]))
                info.update(report["info"])
        return info

    def watch(self, loop: asyncio.AbstractEventLoop, on_death: Callable[[str], None]) -> None:
        """Calls `on_death(reason)` in `loop` once for every child that ends."""
        for name, process in self._processes.items():

            def died(name: str = name, sentinel: int = process.sentinel) -> None:
                loop.remove_reader(sentinel)
                on_death(self._obituary(name))

            loop.add_reader(process.sentinel, died)

    def unwatch(self, loop: asyncio.AbstractEventLoop) -> None:
        for process in self._processes.values():
            loop.remove_reader(process.sentinel)

    def stop(self) -> None:
        """Ends the children and removes the ipc directory; can be called more than once."""
        atexit.unregister(self.stop)
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.join()
        shutil.rmtree(self.addresses.directory, ignore_errors=True)

    def _obituary(self, name: str) -> str:
        process = self._processes[name]
        process.join(_EXIT_SECONDS)
        return f"the {name} process died ({describe_exit(process.exitcode)})"


def start(args: ServerArgs, scheduler: str = SCHEDULER) -> ProcessGroup:
    """Starts the scheduler and the detokenizer; `args.model_path` is a resolved directory."""
    return ProcessGroup(args, {"scheduler": scheduler, "detokenizer": DETOKENIZER})


def resolve_model(args: ServerArgs) -> ServerArgs:
    """`args` with `model_path` a directory in Hugging Face format.

    Raises:
        LaunchError: there is no such model, or it cannot be converted.
    """
    from sglang_minima.models.resolve import resolve_model_path

    try:
        directory = resolve_model_path(args.model_path, args.download_model)
    except (ValueError, OSError, RuntimeError) as error:
        raise LaunchError(one_line(error)) from None
    return dataclasses.replace(args, model_path=str(directory))


def load_tokenizer(args: ServerArgs) -> Tokenizer:
    """The tokenizer of a resolved model.

    Raises:
        LaunchError: it cannot be loaded.
    """
    from sglang_minima.models.cache import renewal_hint
    from sglang_minima.models.errors import ModelLoadError
    from sglang_minima.tokenization.tokenizer import Tokenizer

    path = args.tokenizer_path or str(args.model_path)
    try:
        return Tokenizer.load(path, args.chat_template)
    except (OSError, ValueError, RuntimeError) as error:
        what = "" if isinstance(error, ModelLoadError) else "the tokenizer cannot be loaded: "
        hint = renewal_hint(Path(path), error)
        raise LaunchError(f"{what}{one_line(error)}{hint}") from None


def one_line(error: BaseException) -> str:
    """The message of an error without line breaks."""
    return " ".join(str(error).split()) or type(error).__name__


def describe_exit(code: int | None) -> str:
    """ "exit code 1", or "killed by SIGKILL; ..." for a negative code."""
    if code is None or code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name
    hint = "; the system may be out of memory" if name == "SIGKILL" else ""
    return f"killed by {name}{hint}"


def _run_child(
    main: str,
    args: ServerArgs,
    addresses: Addresses,
    ready: Connection,
    parent: int | None,
) -> None:
    """Entry point of every child process."""
    _die_with_parent(parent)
    # Ctrl-C reaches the whole process group, and service managers signal every process: the
    # parent alone decides when the children end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    configure_logging(args.log_level)
    # OpenMP threads that spin at barriers starve each other (and the other processes) as soon as a
    # core is shared: a step then takes 25 times as long. Read when torch is first imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        module, _, function = main.partition(":")
        getattr(importlib.import_module(module), function)(args, addresses, ready)
    except Exception as error:
        if ready.closed or not isinstance(error, _FORESEEN):
            logger.exception("a server process failed")
        else:
            logger.debug("a server process cannot start", exc_info=True)
        if not ready.closed:
            _report_failure(ready, one_line(error) + _renewal_hint(args, error))
        sys.exit(1)


def _renewal_hint(args: ServerArgs, error: BaseException) -> str:
    from sglang_minima.models.cache import renewal_hint
    from sglang_minima.models.errors import ModelLoadError

    is_model = isinstance(error, ModelLoadError)
    return renewal_hint(Path(str(args.model_path)), error) if is_model else ""


def _report_failure(ready: Connection, message: str) -> None:
    try:
        ready.send({"ok": False, "error": message})
    except OSError:
        # The parent has stopped listening: it reads the exit code instead.
        return


def _die_with_parent(parent: int | None) -> None:
    if parent is not None and sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
    owner = multiprocessing.parent_process()
    if owner is not None:
        threading.Thread(
            target=_exit_after, args=(owner,), name="parent watch", daemon=True
        ).start()


def _exit_after(owner: Any) -> None:
    owner.join()
    os._exit(1)
