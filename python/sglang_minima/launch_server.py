"""Starts the HTTP server: `python -m sglang_minima.launch_server --model-path ...`."""

from __future__ import annotations

import logging
import os
import shlex
import signal
import socket
import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from sglang_minima.command_line import parse_args
from sglang_minima.processes import (
    SCHEDULER,
    LaunchError,
    configure_logging,
    load_tokenizer,
    resolve_model,
    start,
)
from sglang_minima.server_args import ServerArgs

if TYPE_CHECKING:
    from sglang_minima.entrypoints.http_server import HttpServer
    from sglang_minima.entrypoints.info_api import ServerStatus

logger = logging.getLogger("sglang_minima")


class _Ended(BaseException):
    """A signal asked the server to end."""


class _Ending:
    """Handles SIGTERM and SIGINT while the server starts: raises `_Ended`.

    Python drops what a handler raises inside a finalizer, and extensions may wrap it: so the signal
    is remembered, for `check` at the next step of the start.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self.stopping = False
        """The processes are being ended: nothing may interrupt that."""

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        self.signum = signum
        if not self.stopping:
            raise _Ended

    def check(self) -> None:
        """Raises `_Ended` if a signal has come."""
        if self.signum is not None:
            raise _Ended


def main(argv: list[str] | None = None, scheduler: str = SCHEDULER) -> int:
    """Runs a server until it ends.

    Args:
        argv: command-line arguments (default: those of this process).
        scheduler: main function of the scheduler process, as module:function.

    Returns:
        The exit code: 0 after SIGTERM or Ctrl-C (128 + signal while still starting), 1 when it
        could not start or a process died.
    """
    args = parse_args(argv)
    configure_logging(args.log_level)
    ending = _Ending()
    signal.signal(signal.SIGTERM, ending)
    signal.signal(signal.SIGINT, ending)
    try:
        return _serve(args, scheduler, ending)
    except LaunchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except BaseException:
        if ending.signum is None:
            raise
        print(f"ended by {signal.Signals(ending.signum).name} while starting", file=sys.stderr)
        return 128 + ending.signum


def _serve(args: ServerArgs, scheduler: str, ending: _Ending) -> int:
    with _bind(args.host, args.port) as listener:
        resolved = resolve_model(args)
        group = start(resolved, scheduler)
        try:
            # Imported while the children start: it takes as long as they need.
            from sglang_minima.entrypoints.http_server import HttpServer
            from sglang_minima.entrypoints.info_api import ServerStatus

            tokenizer = load_tokenizer(resolved)
            ending.check()
            status = ServerStatus.begin(args, str(resolved.model_path), group.wait_ready())
            ending.check()
            _listen(listener, args)
            _announce(status, listener)
            death = _run_until_ended(HttpServer(status, group, tokenizer), listener)
        finally:
            ending.stopping = True
            group.stop()
    if death is not None:
        print(f"error: {death}", file=sys.stderr)
        return 1
    return 0


def _run_until_ended(server: HttpServer, listener: socket.socket) -> str | None:
    try:
        return server.run(listener)
    except _Ended:
        # The HTTP server has drained, and raised the signal that told it to once more.
        return None


def _bind(host: str, port: int) -> socket.socket:
    """A bound socket, so that a port in use is known before a model is loaded.

    Raises:
        LaunchError: the address cannot be used.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not the name of a host"
        raise LaunchError(f"cannot listen on {host}:{port}: {why}") from None
    return listener


def _listen(listener: socket.socket, args: ServerArgs) -> None:
    """From here on a request waits for the server instead of being refused.

    Raises:
        LaunchError: another server that started at the same time was ready first.
    """
    try:
        listener.listen()
    except OSError as error:
        raise LaunchError(f"cannot listen on {args.host}:{args.port}: {error.strerror}") from None


def _announce(status: ServerStatus, listener: socket.socket) -> None:
    """What runs where, how much fits, and a request to try."""
    args, info = status.args, status.model_info
    host, port = args.host, listener.getsockname()[1]
    reachable = "127.0.0.1" if host in ("0.0.0.0", "::", "") else host
    key = " -H 'Authorization: Bearer <api key>'" if args.api_key else ""
    logger.info(
        "%s runs on %s: compute %s, weights %s, kernels %s. KV profile %s: %s tokens fit as %s%s "
        "pages of %s; context %s. Listening on http://%s:%d, process %d.",
        Path(status.model_name).name,
        info["device"],
        info["dtype"],
        info["dtype"] if info["quantization"] == "none" else info["quantization"],
        info["kernels"],
        args.kv_profile,
        *_capacity(info),
        info["page_size"],
        f"{info['context_length']:,}",
        host,
        port,
        os.getpid(),
    )
    if status.max_model_len < info["context_length"]:
        logger.warning(
            "The KV arena is smaller than the context: a sequence may have %s tokens. "
            "--kv-cache-memory and --max-total-tokens make it larger.",
            f"{status.max_model_len:,}",
        )
    url = f"http://{reachable}:{port}"
    logger.info(
        "Watch it: %s/dashboard. Chat: %s -m sglang_minima.chat --url %s%s",
        url,
        shlex.quote(sys.executable),
        url,
        " --api-key KEY" if args.api_key else "",
    )
    logger.info(
        "Try: curl %s/v1/chat/completions -H 'Content-Type: application/json'%s "
        '-d \'{"messages": [{"role": "user", "content": "Name the capital of France."}], '
        '"temperature": 0, "max_tokens": 64}\'',
        url,
        key,
    )


def _capacity(info: dict[str, Any]) -> tuple[str, str, str]:
    """Tokens as Recent pages, the format of those, and what fits once pages are Stale."""
    recent, *stale = info["kv_kinds"]
    more = f", {info['max_stale_tokens']:,} as {stale[0]}" if stale else ""
    return f"{info['max_total_num_tokens']:,}", recent, more


if __name__ == "__main__":
    sys.exit(main())
