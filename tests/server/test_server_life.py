"""Starts, ends, aborts, disconnects, limits: what happens around the requests."""

from __future__ import annotations

import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import requests
from server_kit import HERE, RunningServer, begin_request, free_port, start_server
from tiny_kit import eventually

from sglang_minima.command_line import parse_args
from sglang_minima.launch_server import _bind, _listen
from sglang_minima.processes import LaunchError

SLOW = {"text": "abc", "sampling_params": {"max_new_tokens": 400}}
KEY = {"Authorization": "Bearer sesame"}
WRONG_KEY = "the API key is missing or wrong"


def running(server: RunningServer) -> int:
    return int(server.get("/get_load", headers=KEY).json()[0]["num_reqs"])


def aborted(server: RunningServer) -> list[str]:
    return list(server.get("/server_info", headers=KEY).json()["aborted"])


def program(model_dir: Path) -> list[str]:
    return [str(HERE / "fake_server.py"), "--model-path", str(model_dir)]


@pytest.fixture(scope="module")
def strict(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server with a key that takes two sequences at a time.

    It ends without a trace when a service manager sends SIGTERM to every process.
    """
    temporary = tmp_path_factory.mktemp("t")
    flags = ["--api-key", "sesame", "--log-requests"]
    flags += ["--max-queued-requests", "1", "--max-running-requests", "1"]
    with pytest.MonkeyPatch.context() as patch:
        # Other servers put their sockets into the system's directory.
        patch.setenv("TMPDIR", str(temporary))
        server = start_server(program(model_dir), *flags)
    children = psutil.Process(server.process.pid).children(recursive=True)
    assert len(list(temporary.iterdir())) == 1
    yield server
    for process in [*children, psutil.Process(server.process.pid)]:
        process.send_signal(signal.SIGTERM)
    output = server.process.communicate(timeout=30)[0]
    assert server.process.returncode == 0
    assert "Traceback" not in output
    assert "curl http://127.0.0.1" in output
    assert "400 tokens fit" in output
    assert "a sequence may have 400 tokens" in output
    chat = f"{sys.executable} -m sglang_minima.chat --url {server.url} --api-key KEY\n"
    assert f"Chat: {chat}" in output
    assert f"Watch it: {server.url}/dashboard. " in output
    assert "INFO SIGTERM: 0 requests running.\n" in output
    assert "sesame" not in output
    # Refusals are logged, without what the client wrote.
    assert f"INFO POST /generate 401: {WRONG_KEY}\n" in output
    assert "INFO GET /secret%0Aplan 404: there is no route /secretplan\n" in output
    assert "INFO POST /generate 400: unknown sampling parameter ..., expected one of\n" in output
    assert "shibboleth" not in output
    assert "/ping" not in output
    assert re.search(r'Finish: \{"rid": "slow-1", .*"prompt_tokens": 3, "cached_tokens": 2', output)
    assert not psutil.wait_procs(children, timeout=15)[1]
    assert not list(temporary.iterdir())


def test_key(strict: RunningServer) -> None:
    body = {"text": "abc", "sampling_params": {"max_new_tokens": 1}}
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "sesame"}):
        reply = strict.generate(body, headers=headers)
        assert reply.status_code == 401
        assert reply.json() == {"error": {"message": WRONG_KEY}}
        refused = strict.get("/v1/models", headers=headers)
        assert refused.status_code == refused.json()["code"] == 401
        assert refused.json()["message"] == WRONG_KEY
    assert strict.generate(body, headers=KEY).status_code == 200
    for path in ("/health", "/health_generate", "/ready", "/ping", "/metrics"):
        assert strict.get(path).status_code == 200
    assert strict.get("/server_info", headers=KEY).json()["api_key"] == "***"


@pytest.mark.parametrize("stream", [False, True])
def test_answers_tell_the_id_of_their_request(strict: RunningServer, stream: bool) -> None:
    body = {"prompt": "abc", "max_tokens": 1, "stream": stream, "rid": "mine"}
    reply = strict.post("/v1/completions", body, headers=KEY)
    assert reply.headers["x-request-id"] == "mine"
    native = {"text": "abc", "sampling_params": {"max_new_tokens": 1}, "stream": stream}
    reply = strict.generate(native, headers=KEY)
    assert reply.headers["x-request-id"] in reply.text
    assert strict.generate({**native, "rid": "ä"}, headers=KEY).headers.get("x-request-id") is None


def test_refusals_for_the_log(strict: RunningServer) -> None:
    assert strict.get("/secret%0Aplan", headers=KEY).status_code == 404
    body = {"text": "shibboleth", "sampling_params": {"shibboleth": 1}}
    assert strict.generate(body, headers=KEY).status_code == 400


def test_browsers_of_other_origins_may_ask(strict: RunningServer) -> None:
    origin = {"Origin": "http://elsewhere.test"}
    asks = {"Access-Control-Request-Method": "POST"}
    asks["Access-Control-Request-Headers"] = "authorization, content-type"
    url = f"{strict.url}/v1/chat/completions"
    preflight = requests.options(url, headers={**origin, **asks}, timeout=10)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "*"
    assert "authorization" in preflight.headers["access-control-allow-headers"].lower()
    assert "access-control-allow-credentials" not in preflight.headers
    # The answer can be read, and it needs the key.
    for headers, status in ((origin, 401), ({**origin, **KEY}, 200)):
        reply = strict.get("/v1/models", headers=headers)
        assert reply.status_code == status
        assert reply.headers["access-control-allow-origin"] == "*"


def test_dashboard_shows_its_data_with_the_key_only(strict: RunningServer) -> None:
    for path in ("", "/main.js", "/style.css"):
        assert strict.get(f"/dashboard{path}").status_code == 200
    for path in ("state", "tree"):
        assert strict.get(f"/dashboard/api/{path}").status_code == 401
        assert strict.get(f"/dashboard/api/{path}", headers=KEY).status_code == 200
    assert strict.post("/dashboard/api/probe", {"text": "abc"}).status_code == 401


def test_queue_full_abort_and_busy_flush(strict: RunningServer) -> None:
    replies: dict[str, requests.Response] = {}

    def ask(rid: str) -> None:
        replies[rid] = strict.generate({**SLOW, "rid": rid}, headers=KEY)

    threads = [threading.Thread(target=ask, args=(rid,)) for rid in ("slow-1", "slow-2")]
    for thread in threads:
        thread.start()
    eventually(lambda: running(strict) == 2)
    full = strict.generate({"text": "abc"}, headers=KEY)
    assert full.status_code == 503
    assert full.json()["error"]["message"] == "The request queue is full."
    assert strict.get("/health_generate").status_code == 200
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    assert strict.post("/v1/chat/completions", chat, headers=KEY).json()["code"] == 503
    assert strict.post("/flush_cache", None, headers=KEY).status_code == 400
    for body in ({}, {"rid": ""}, {"abort_all": False}, {"rid": 5}):
        assert strict.post("/abort_request", body, headers=KEY).status_code == 400
    # A prefix of a rid is not the rid.
    assert strict.post("/abort_request", {"rid": "slow"}, headers=KEY).status_code == 200
    assert running(strict) == 2
    assert strict.post("/abort_request", {"rid": "slow-1"}, headers=KEY).status_code == 200
    threads[0].join(60)
    assert replies["slow-1"].status_code == 200
    assert replies["slow-1"].json()["meta_info"]["finish_reason"]["type"] == "abort"
    assert running(strict) == 1
    assert strict.post("/abort_request", {"abort_all": True}, headers=KEY).status_code == 200
    threads[1].join(60)
    assert replies["slow-2"].json()["meta_info"]["finish_reason"]["type"] == "abort"
    assert strict.post("/flush_cache", None, headers=KEY).status_code == 200


def test_rid_in_use(strict: RunningServer) -> None:
    thread = threading.Thread(
        target=strict.generate, args=({**SLOW, "rid": "slow-x"},), kwargs={"headers": KEY}
    )
    thread.start()
    eventually(lambda: running(strict) == 1)
    again = strict.generate({**SLOW, "rid": "slow-x"}, headers=KEY)
    assert again.status_code == 400
    assert "rid" in again.json()["error"]["message"]
    strict.post("/abort_request", {"rid": "slow-x"}, headers=KEY)
    thread.join(60)


def test_abort_of_a_batch(strict: RunningServer) -> None:
    batch = {"text": ["abc", "xyz"], "rid": "slow-b", "sampling_params": {"max_new_tokens": 400}}
    replies: list[requests.Response] = []
    thread = threading.Thread(target=lambda: replies.append(strict.generate(batch, headers=KEY)))
    thread.start()
    eventually(lambda: running(strict) == 2)
    strict.post("/abort_request", {"rid": "slow-b"}, headers=KEY)
    thread.join(60)
    reasons = [entry["meta_info"]["finish_reason"]["type"] for entry in replies[0].json()]
    assert reasons == ["abort", "abort"]


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_aborts(strict: RunningServer, path: str, stream: bool) -> None:
    rid = f"slow-gone-{path.rsplit('/', 1)[-1]}-{stream}"
    body = {"stream": stream, "rid": rid}
    if path == "/generate":
        body |= SLOW
    else:
        messages = [{"role": "user", "content": "hi"}]
        body |= {"prompt": "abc", "messages": messages, "max_tokens": 400, "ignore_eos": True}
    if stream:
        with strict.post(path, body, headers=KEY, stream=True) as reply:
            next(reply.iter_lines())
    else:
        connection = begin_request(strict.url, path, body, **KEY)
        eventually(lambda: running(strict) == 1)
        connection.close()
    eventually(lambda: rid in aborted(strict) and running(strict) == 0)


def test_disconnect_in_the_middle_of_a_body(strict: RunningServer) -> None:
    port = int(strict.url.rsplit(":", 1)[-1])
    head = f"POST /generate HTTP/1.1\r\nHost: test\r\nAuthorization: {KEY['Authorization']}\r\n"
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(f"{head}Content-Length: 1000\r\n\r\n{{".encode())
            time.sleep(0.1)
    # That the log shows no traceback is asserted when the server has ended.
    assert strict.get("/health").status_code == 200


def test_children_die_with_a_server_that_starts(model_dir: Path) -> None:
    """tests/server/test_router.py kills one that serves."""
    server = start_server(program(model_dir), wait=False)
    parent = psutil.Process(server.process.pid)
    eventually(lambda: len(parent.children()) >= 3)
    children = parent.children()
    server.process.kill()
    server.process.communicate()
    _, alive = psutil.wait_procs(children, timeout=15)
    assert not alive


def test_signal_while_starting(model_dir: Path) -> None:
    server = start_server(program(model_dir), wait=False)
    parent = psutil.Process(server.process.pid)
    eventually(lambda: len(parent.children()) >= 2)
    children = parent.children()
    server.process.send_signal(signal.SIGTERM)
    output = server.process.communicate(timeout=30)[0]
    assert server.process.returncode == 128 + signal.SIGTERM
    assert output == "ended by SIGTERM while starting\n"
    assert not psutil.wait_procs(children, timeout=15)[1]


LOST_SIGNAL = """
import os, signal, sys
from server_kit import FAKE_SCHEDULER
from sglang_minima import launch_server

class Finalized:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)

load = launch_server.load_tokenizer
def signalled(args):
    Finalized()
    return load(args)

launch_server.load_tokenizer = signalled
if __name__ == "__main__":
    sys.exit(launch_server.main(scheduler=FAKE_SCHEDULER))
"""


def test_a_signal_in_a_finalizer_is_not_lost(model_dir: Path, tmp_path: Path) -> None:
    """Python only prints what a finalizer raises."""
    (tmp_path / "lost.py").write_text(LOST_SIGNAL)
    server = start_server([str(tmp_path / "lost.py"), *program(model_dir)[1:]], wait=False)
    output = server.process.communicate(timeout=60)[0]
    assert server.process.returncode == 128 + signal.SIGTERM, output
    assert output.splitlines()[-1] == "ended by SIGTERM while starting"


def test_of_two_servers_that_start_together_one_is_told() -> None:
    port = free_port()
    args = parse_args(["--model-path", "m", "--host", "127.0.0.1", "--port", str(port)])
    with _bind(args.host, port) as first, _bind(args.host, port) as second:
        _listen(first, args)
        with pytest.raises(LaunchError, match=f"cannot listen on 127.0.0.1:{port}: .*in use"):
            _listen(second, args)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--served-model-name", "broken"], "error: the weights are missing"),
        (["--model-path", "/nonexistent"], "error: "),
    ],
)
def test_unusable_model_is_one_line(model_dir: Path, flags: list[str], message: str) -> None:
    server = start_server(program(model_dir), *flags, wait=False)
    output = server.process.communicate(timeout=60)[0]
    assert server.process.returncode == 1
    assert output.splitlines()[-1].startswith(message)
    assert len(output.splitlines()) == 1


def test_port_in_use(model_dir: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        server = start_server(program(model_dir), "--port", port, wait=False)
        output = server.process.communicate(timeout=60)[0]
    assert server.process.returncode == 1
    assert output.strip() == f"error: cannot listen on 127.0.0.1:{port}: Address already in use"
