"""The real `sglang-router` in front of two, then three of our servers."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
from server_kit import HERE, RunningServer, begin_request, free_port, start_server
from tiny_kit import FLAGS, assert_quiet, eventually, info

pytest.importorskip("sglang_router")

GREEDY = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
LONG = [{"role": "user", "content": "a" * 999}]
PROGRAM = ["-m", "sglang_minima.launch_server", "--model-path"]
ROUTER_FLAGS = (
    *("--policy", "cache_aware", "--host", "127.0.0.1", "--log-level", "warn"),
    *("--health-check-interval-secs", "1", "--health-check-timeout-secs", "5"),
    *("--health-failure-threshold", "1", "--health-success-threshold", "1"),
    # See examples/router.sh for the reasons.
    *("--disable-circuit-breaker", "--retry-initial-backoff-ms", "300"),
)


@dataclass
class Routed:
    """A router and its workers."""

    url: str
    workers: list[RunningServer] = field(default_factory=list)

    def post(self, path: str, body: Any, **kwargs: Any) -> requests.Response:
        return requests.post(self.url + path, json=body, timeout=60, **kwargs)

    def get(self, path: str) -> requests.Response:
        return requests.get(self.url + path, timeout=60)

    def counts(self, key: str) -> list[int]:
        """A counter of every worker."""
        return [info(worker)["statistics"][key] for worker in self.workers]

    def served(self, work: Callable[[], object]) -> list[int]:
        """How many sequences every worker got during `work`."""
        before = self.counts("requests_received")
        work()
        after = self.counts("requests_received")
        return [now - then for now, then in zip(after, before, strict=True)]

    def healthy(self) -> dict[str, bool]:
        return {
            entry["url"]: entry["is_healthy"] for entry in self.get("/workers").json()["workers"]
        }


@pytest.fixture(scope="module")
def routed(tiny: RunningServer, tiny_dir: Path, tmp_path_factory: Any) -> Iterator[Routed]:
    """A router over the shared tiny server and one more."""
    second = start_server([*PROGRAM, str(tiny_dir)], *FLAGS)
    routed = Routed(f"http://127.0.0.1:{free_port()}", [tiny, second])
    log = tmp_path_factory.mktemp("router") / "router.log"
    port = routed.url.rsplit(":", 1)[1]
    command = [sys.executable, "-m", "sglang_router.launch_router", *ROUTER_FLAGS, "--port", port]
    command += ["--prometheus-port", str(free_port()), "--worker-urls", tiny.url, second.url]
    with log.open("w") as output:
        router = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        eventually(lambda: router.poll() is not None or ready(routed.url))
        assert router.poll() is None, log.read_text()
        yield routed
    finally:
        router.terminate()
        router.wait(30)
        for worker in routed.workers[1:]:
            worker.process.terminate()
            worker.process.communicate(timeout=30)


def ready(url: str) -> bool:
    try:
        return requests.get(f"{url}/readiness", timeout=5).status_code == 200
    except requests.ConnectionError:
        return False


def generate(routed: Routed, text: str, **sampling: Any) -> dict[str, Any]:
    reply = routed.post("/generate", {"text": text, "sampling_params": {**GREEDY, **sampling}})
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def at_once(routed: Routed, texts: list[str], **sampling: Any) -> list[dict[str, Any]]:
    replies: list[dict[str, Any]] = [{}] * len(texts)

    def ask(index: int) -> None:
        replies[index] = generate(routed, texts[index], **sampling)

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(texts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(replies)
    return replies


def test_the_router_knows_its_workers(routed: Routed) -> None:
    entries = routed.get("/workers").json()["workers"]
    assert {entry["url"] for entry in entries} == {worker.url for worker in routed.workers}
    served = info(routed.workers[0])["served_model_name"]
    assert all(entry["is_healthy"] and entry["model_id"] == served for entry in entries)
    assert [model["id"] for model in routed.get("/v1/models").json()["data"]] == [served]
    assert routed.get("/get_model_info").json()["model_path"] == served
    loads = routed.get("/get_loads").json()["workers"]
    assert [entry["load"] for entry in loads] == [0, 0]
    # Only one worker has samples of its conversions: the router must still join the scrapes.
    only = routed.workers[0]
    only.generate({"text": "a" * 300, "sampling_params": GREEDY})
    eventually(lambda: bool(info(only)["cache"]["counters"]["retiered_pages"]))
    # The router leaves out a worker that does not answer its scrape at once, as on busy cores.
    deadline = time.monotonic() + 20
    while True:
        metrics = routed.get("/engine_metrics").text
        if all(f'worker_addr="{worker.url}"' in metrics for worker in routed.workers):
            break
        assert time.monotonic() < deadline, metrics
        time.sleep(0.2)
    assert "sglang_num_running_reqs{" in metrics
    assert "minima_retiered_pages" in metrics


def test_load_spreads_and_prefixes_stay(routed: Routed) -> None:
    assert requests.post(routed.url + "/flush_cache", timeout=60).status_code == 200
    prefixes = [f"{index:02d} is where we begin. " * 6 for index in range(8)]
    shares = routed.served(lambda: at_once(routed, prefixes, max_new_tokens=40))
    # The requests were under way together, so neither worker got most of them.
    assert sum(shares) == 8
    assert min(shares) >= 2
    homes = []
    for prefix in prefixes:
        for question in ("Why?", "When?"):
            reply: list[dict[str, Any]] = []
            text = prefix + question
            shares = routed.served(
                lambda text=text, reply=reply: reply.append(generate(routed, text))
            )
            assert sum(shares) == 1
            homes.append(shares.index(1))
            # Whoever answers has the prefix, but for what does not fill a page of 16 tokens.
            assert reply[0]["meta_info"]["cached_tokens"] >= len(prefix) - 16
    assert homes[::2] == homes[1::2]
    assert set(homes) == {0, 1}


def test_programs_run_through_the_router(routed: Routed) -> None:
    sgl = pytest.importorskip("sglang")

    @sgl.function
    def tree(s: Any) -> None:
        s += "The beginning is the same for all. "
        forks = s.fork(3)
        for index, fork in enumerate(forks):
            fork += f"Branch {index}: "
            fork += sgl.gen("end", max_tokens=4, temperature=0, ignore_eos=True)
        s["ends"] = [fork["end"] for fork in forks]

    state = tree.run(backend=sgl.RuntimeEndpoint(routed.url))
    assert len(state["ends"]) == 3
    chat = {"model": "any", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    reply = routed.post("/v1/chat/completions", chat).json()
    assert reply["usage"]["completion_tokens"] <= 4
    assert "cached_tokens" in reply["usage"]["prompt_tokens_details"]
    batch = {"input_ids": [[5, 6], [7, 8]], "sampling_params": GREEDY}
    assert len(routed.post("/generate", batch).json()) == 2


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {}),
        ("/generate", {"text": "a", "sampling_params": {"temperature": -1}}),
        ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": -1}}),
        ("/generate", {"text": "a" * 2000}),
        ("/generate", {"input_ids": [99999]}),
        ("/generate", {"text": "a", "lora_path": "x"}),
        ("/generate", {"text": ["a", "b"]}),
        ("/v1/chat/completions", {"model": "x", "messages": []}),
        (
            "/v1/chat/completions",
            {"model": "x", "messages": [{"role": "user", "content": "a" * 999}]},
        ),
        ("/v1/completions", {"model": "x", "prompt": "a", "top_p": 7}),
        ("/v1/completions", {"model": "x", "prompt": "a", "n": 9999}),
        ("/v1/embeddings", {"model": "x", "input": "a"}),
    ],
)
def test_bad_input_is_refused_once(routed: Routed, path: str, body: Any) -> None:
    def refuse() -> None:
        reply = routed.post(path, body)
        assert 400 <= reply.status_code < 500, reply.text

    # The router repeats what fails with 5xx, on every worker.
    assert sum(routed.served(refuse)) <= 1
    for worker in routed.workers:
        assert worker.get("/health").status_code == 200


def test_much_bad_input_harms_nobody(routed: Routed) -> None:
    for _ in range(30):
        assert routed.post("/generate", {"input_ids": [99999]}).status_code == 400
    assert generate(routed, "And now a good one")["meta_info"]["completion_tokens"] == 4


@pytest.mark.parametrize("stream", [True, False])
def test_a_disconnect_ends_the_request(routed: Routed, stream: bool) -> None:
    aborted = sum(routed.counts("requests_aborted"))
    body = {"text": "A long one", "stream": stream}
    body["sampling_params"] = {**GREEDY, "max_new_tokens": 480}
    if stream:
        with routed.post("/generate", body, stream=True) as reply:
            next(reply.iter_lines())
    else:
        received = sum(routed.counts("requests_received"))
        connection = begin_request(routed.url, "/generate", body)
        eventually(lambda: sum(routed.counts("requests_received")) > received)
        connection.close()
    eventually(lambda: sum(routed.counts("requests_aborted")) == aborted + 1)
    for worker in routed.workers:
        assert_quiet(worker)


def test_a_killed_worker_drops_out_and_comes_back(routed: Routed, tiny_dir: Path) -> None:
    third = start_server([*PROGRAM, str(tiny_dir)], *FLAGS, wait=False)
    routed.workers.append(third)
    eventually(lambda: is_up(third))
    assert requests.post(routed.url + "/workers", json={"url": third.url}, timeout=60).ok
    eventually(lambda: routed.healthy().get(third.url, False))
    three = routed.served(
        lambda: at_once(routed, [f"{i} of many" for i in range(12)], max_new_tokens=40)
    )
    assert min(three) >= 1

    children = psutil.Process(third.process.pid).children()
    assert len(children) >= 3
    third.process.kill()
    third.process.communicate(timeout=30)
    assert not psutil.wait_procs(children, timeout=15)[1]
    # Before a health check tells, the router repeats what the dead worker did not take elsewhere.
    for number in range(6):
        generate(routed, f"{number} after the end of one worker")
    eventually(lambda: not routed.healthy()[third.url], 20)
    assert routed.get("/readiness").json()["healthy_workers"] == 2
    at_once(routed, [f"{number} without it" for number in range(6)])

    port = third.url.rsplit(":", 1)[1]
    program = [*PROGRAM, str(tiny_dir)]
    third.process = start_server(program, *FLAGS, port=int(port), wait=False).process
    eventually(lambda: routed.healthy()[third.url])
    texts = [f"{number} again" for number in range(12)]
    assert min(routed.served(lambda: at_once(routed, texts, max_new_tokens=40))) >= 1


@pytest.mark.slow
def test_the_script_starts_and_ends_everything(tiny_dir: Path) -> None:
    port = free_port()
    command = ["examples/router.sh", "2", "--model-path", str(tiny_dir), *FLAGS]
    environment = {**os.environ, "PORT": str(port), "PYTHON": sys.executable}
    root = HERE.parents[1]
    script = subprocess.Popen(command, cwd=root, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert script.stdout is not None
        assert next(script.stdout).startswith(f"2 workers behind http://127.0.0.1:{port};")
        children = psutil.Process(script.pid).children(recursive=True)
        routed = Routed(f"http://127.0.0.1:{port}")
        assert list(routed.healthy().values()) == [True, True]
        generate(routed, "hello")
    finally:
        script.terminate()
        script.communicate(timeout=60)
    assert script.returncode == 143
    assert not psutil.wait_procs(children, timeout=30)[1]


def is_up(server: RunningServer) -> bool:
    try:
        return server.get("/health").status_code == 200
    except requests.ConnectionError:
        return False
