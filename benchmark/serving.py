"""Starts the real server for a benchmark and ends it afterwards."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

START_SECONDS = 300.0
STOP_SECONDS = 30.0


@contextmanager
def running_server(arguments: Sequence[str]) -> Iterator[str]:
    """A server on the embedded model at a free port; yields its URL.

    Raises:
        RuntimeError: it did not become healthy; the message ends with what it printed.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "sglang_minima.launch_server", "--port", str(port)]
    command += ["--log-level", "warning", *arguments]
    with tempfile.NamedTemporaryFile(suffix=".log") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            _wait_until_healthy(url, process, Path(log.name))
            yield url
        finally:
            stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Asks a server to end, and ends it when it takes too long."""
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _wait_until_healthy(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url + "/health", timeout=5) as reply:
                if reply.status == 200:
                    return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.1)
    output = log.read_text(errors="replace")[-4000:]
    raise RuntimeError(f"the server did not start (exit status {process.poll()}):\n{output}")
