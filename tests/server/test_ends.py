"""How a loaded server ends: a killed scheduler, and signals under load."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
from server_kit import HERE, RunningServer, start_server
from tiny_kit import eventually, info, start_tiny

QUICK = 15.0
"""Seconds: far more than an idle machine needs, and less than any wait that was forgotten."""


def open_streams(server: RunningServer, count: int) -> tuple[list[threading.Thread], list[Any]]:
    """Long streams that have begun; the list gets the last two lines, or the error, of each."""
    begun = threading.Semaphore(0)
    ends: list[Any] = []

    def read(index: int) -> None:
        sampling = {"max_new_tokens": 380, "ignore_eos": True}
        body = {"text": f"{index} long", "sampling_params": sampling, "stream": True}
        body["rid"] = f"slow-{index}"
        try:
            with server.generate(body, stream=True) as reply:
                lines = []
                for line in reply.iter_lines():
                    if line:
                        lines.append(line)
                        if len(lines) == 1:
                            begun.release()
                ends.append(lines[-2:])
        except requests.RequestException as error:
            ends.append(error)

    threads = [threading.Thread(target=read, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for _ in range(count):
        assert begun.acquire(timeout=60)
    return threads, ends


@pytest.fixture
def temporary(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the servers of a test put their sockets; other servers use the system's directory."""
    directory = tmp_path_factory.mktemp("t")
    monkeypatch.setenv("TMPDIR", str(directory))
    return directory


def test_killed_scheduler_ends_every_request_with_an_error(
    model_dir: Path, temporary: Path
) -> None:
    server = start_server([str(HERE / "fake_server.py"), "--model-path", str(model_dir)])
    assert len(list(temporary.iterdir())) == 1
    children = psutil.Process(server.process.pid).children(recursive=True)
    threads, ends = open_streams(server, 6)
    whole = {"text": "abc", "sampling_params": {"max_new_tokens": 380}, "rid": "slow-whole"}
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(server.generate, whole)
        eventually(lambda: server.get("/get_load").json()[0]["num_reqs"] == 7)
        psutil.Process(info(server)["scheduler_pid"]).kill()
        answer = reply.result(QUICK)
    assert answer.status_code == 503
    assert "killed by SIGKILL" in answer.json()["error"]["message"]
    deadline = time.monotonic() + QUICK
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0.0))
    assert len(ends) == 6
    for end in ends:
        assert end[-1] == b"data: [DONE]"
        assert b'"code":503' in end[-2]
        assert b"killed by SIGKILL" in end[-2]
    output = server.process.communicate(timeout=QUICK)[0]
    assert server.process.returncode == 1
    assert "the scheduler process died (killed by SIGKILL" in output
    assert "Traceback" not in output
    assert not psutil.wait_procs(children, timeout=QUICK)[1]
    assert not list(temporary.iterdir())


def post_by_hand(server: RunningServer, body: bytes, length: int) -> socket.socket:
    """Sends the beginning of a request, and reads nothing."""
    port = int(server.url.rsplit(":", 1)[-1])
    connection = socket.create_connection(("127.0.0.1", port))
    head = "POST /generate HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {length}\r\n\r\n".encode() + body)
    return connection


def test_sigterm_under_load_is_a_quick_clean_end(tiny_dir: Path, temporary: Path) -> None:
    server = start_tiny(tiny_dir)
    assert len(list(temporary.iterdir())) == 1
    children = psutil.Process(server.process.pid).children(recursive=True)
    threads, ends = open_streams(server, 24)
    sampling = {"max_new_tokens": 450, "ignore_eos": True}
    body = json.dumps({"text": "x", "sampling_params": sampling, "stream": True}).encode()
    with post_by_hand(server, body, len(body)), post_by_hand(server, b"{", 1000):
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        server.process.send_signal(signal.SIGINT)  # somebody is impatient
        output = server.process.communicate(timeout=QUICK)[0]
    assert server.process.returncode == 0, output
    assert "Traceback" not in output, output
    for thread in threads:
        thread.join(QUICK)
    assert len(ends) == 24
    # A stream was either served to its end, or told that the server is going away.
    assert all(isinstance(end, list) and end[-1] == b"data: [DONE]" for end in ends), ends
    assert not psutil.wait_procs(children, timeout=QUICK)[1]
    assert not list(temporary.iterdir())
