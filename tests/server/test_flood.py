"""A real server on a tiny random model under load that no client should cause.

Floods with aborts and disconnects, pools too small, random bodies, killed processes: every request
gets one end, and the books balance when it is quiet.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
import requests
from server_kit import RunningServer, start_server, write_model

FLAGS = (
    *("--load-format", "dummy", "--dtype", "float32", "--log-level", "warning"),
    *("--page-size", "16", "--recent-window", "32", "--anchor-tokens", "16"),
    *("--max-total-tokens", "1536", "--max-running-requests", "48"),
)
WORDS = ("the sea", "of", "a red stone", "and two", "old keepers", "who read", "by night")


@pytest.fixture(scope="module")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, a byte-level tokenizer, a context of 512 tokens."""
    directory = tmp_path_factory.mktemp("tiny")
    write_model(directory)
    config = json.loads((directory / "config.json").read_text())
    config |= {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config["num_key_value_heads"] = 2
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def start_tiny(directory: Path) -> RunningServer:
    program = ["-m", "sglang_minima.launch_server", "--model-path", str(directory)]
    return start_server(program, *FLAGS)


@pytest.fixture(scope="module")
def tiny(tiny_dir: Path) -> Iterator[RunningServer]:
    server = start_tiny(tiny_dir)
    yield server
    server.process.send_signal(signal.SIGTERM)
    output = server.process.communicate(timeout=30)[0]
    assert server.process.returncode == 0, output
    assert "Traceback" not in output, output
    assert "ERROR" not in output, output


def eventually(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def info(server: RunningServer) -> dict[str, Any]:
    return dict(server.get("/server_info").json())


def assert_quiet(server: RunningServer) -> None:
    """Nothing runs, every request has had one end, and the tree owns every page in use."""

    def idle() -> bool:
        load = server.get("/get_load").json()[0]
        return not any(load[key] for key in ("num_reqs", "num_running_reqs", "num_waiting_reqs"))

    eventually(idle)
    reply = server.get("/check_cache")
    assert (reply.status_code, reply.json()) == (200, {"ok": True})
    now = info(server)
    cache, counts = now["cache"], now["statistics"]
    assert cache["pages_used"] == cache["pages_in_tree"] == cache["pages_evictable"]
    ended = counts["requests_completed"] + counts["requests_aborted"]
    assert counts["requests_received"] == ended
    metrics = server.get("/metrics").text
    finished = next(line for line in metrics.splitlines() if "num_requests_total{" in line)
    assert float(finished.split()[-1]) == ended


def prompts(rng: random.Random, count: int) -> list[str]:
    """Paths of a random tree: each prompt extends the beginning of an earlier one."""
    made = ["In the beginning there was the sea."]
    while len(made) < count:
        base = rng.choice(made[-32:])
        base = base[: rng.randrange(len(base) + 1)]
        made.append((base + " " + " ".join(rng.choices(WORDS, k=rng.randrange(1, 20))))[:320])
    return made


class Flood:
    """Clients of all manners; counts what happened to their requests."""

    def __init__(self, server: RunningServer, session: aiohttp.ClientSession, seed: int) -> None:
        self._url = server.url
        self._session = session
        self._random = random.Random(seed)
        self.ends: Counter[str] = Counter()

    def body(self, index: int, text: str) -> dict[str, Any]:
        rng = self._random
        sampling = {
            "max_new_tokens": rng.choice((0, 1, 2, 5, 12, 40)),
            "temperature": rng.choice((0, 1.0)),
            "ignore_eos": True,
            "stop": rng.choice(([], "e", ["zz", "th"])),
        }
        body: dict[str, Any] = {"text": text, "sampling_params": sampling, "rid": f"flood-{index}"}
        if rng.random() < 0.5:
            body["cache_salt"] = "tenant"
        if rng.random() < 0.2:
            body |= {"return_logprob": True, "logprob_start_len": rng.choice((-1, 0))}
        return body

    async def client(self, index: int, text: str) -> None:
        rng = self._random
        body = self.body(index, text)
        manner = rng.choices(
            (
                *(self.read, self.stream, self.batch, self.chat),
                *(self.abort, self.leave, self.vanish, self.blunder),
            ),
            (24, 20, 6, 6, 14, 12, 12, 6),
        )[0]
        await manner(body)

    async def read(self, body: dict[str, Any]) -> None:
        self.end(json.loads(await self.ask("/generate", body))["meta_info"]["finish_reason"])

    async def stream(self, body: dict[str, Any]) -> None:
        async with self._session.post(
            self._url + "/generate", json={**body, "stream": True}
        ) as reply:
            assert reply.status == 200, await reply.text()
            lines = [line async for line in reply.content if line.strip()]
        assert lines[-1] == b"data: [DONE]\n"
        events = [json.loads(line.removeprefix(b"data: ")) for line in lines[:-1]]
        reasons = [event["meta_info"]["finish_reason"] for event in events]
        assert not any(reasons[:-1])
        self.end(reasons[-1])

    async def batch(self, body: dict[str, Any]) -> None:
        """Two prompts with two samples each; half of the batches are aborted by their rid."""
        body["text"] = [body["text"], body["text"][:9]]
        body["sampling_params"] |= {"n": 2}
        reading = asyncio.create_task(self.ask("/generate", body))
        if self._random.random() < 0.5:
            await asyncio.sleep(self._random.random() * 0.1)
            await self.ask("/abort_request", {"rid": body["rid"]})
        reasons = [reply["meta_info"]["finish_reason"] for reply in json.loads(await reading)]
        assert len(reasons) == 4
        self.end(reasons[0])

    async def chat(self, body: dict[str, Any]) -> None:
        asked = {
            "messages": [{"role": "user", "content": body["text"]}],
            "max_tokens": body["sampling_params"]["max_new_tokens"],
            "stream": True,
            "stream_options": {"include_usage": True},
            "rid": body["rid"],
        }
        lines = (await self.ask("/v1/chat/completions", asked)).splitlines()
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert events[-1]["usage"]["prompt_tokens"] > 0
        choices = [choice for event in events for choice in event["choices"]]
        (reason,) = [c["finish_reason"] for c in choices if c["finish_reason"]]
        self.end({"type": reason})

    async def ask(self, path: str, body: dict[str, Any]) -> str:
        async with self._session.post(self._url + path, json=body) as reply:
            text = await reply.text()
            assert reply.status == 200, text
            return text

    async def abort(self, body: dict[str, Any]) -> None:
        body["sampling_params"]["max_new_tokens"] = 150
        reading = asyncio.create_task(self._random.choice((self.read, self.stream))(body))
        await asyncio.sleep(self._random.random() * 0.2)
        await self.ask("/abort_request", {"rid": body["rid"]})
        await reading

    async def leave(self, body: dict[str, Any]) -> None:
        """Goes away in the middle of a stream."""
        body["sampling_params"]["max_new_tokens"] = 150
        wanted = self._random.randrange(1, 4)
        async with self._session.post(
            self._url + "/generate", json={**body, "stream": True}
        ) as reply:
            async for line in reply.content:
                wanted -= bool(line.strip())
                if not wanted:
                    break
            reply.close()
        self.ends["left"] += 1

    async def vanish(self, body: dict[str, Any]) -> None:
        """Goes away before the first token."""
        body |= {"stream": self._random.random() < 0.5}
        patience = aiohttp.ClientTimeout(total=0.002 + self._random.random() * 0.05)
        with suppress(TimeoutError):
            async with self._session.post(
                self._url + "/generate", json=body, timeout=patience
            ) as reply:
                await reply.read()
        self.ends["vanished"] += 1

    async def blunder(self, body: dict[str, Any]) -> None:
        bad: list[dict[str, Any]] = [
            {**body, "text": ""},
            {**body, "text": "x" * 600},
            {**body, "sampling_params": {"heat": 1}},
            {**body, "return_logprob": True, "logprob_start_len": 500},
        ]
        async with self._session.post(
            self._url + "/generate", json=self._random.choice(bad)
        ) as reply:
            assert reply.status == 400
            assert (await reply.json())["error"]["message"]
        self.ends["refused"] += 1

    def end(self, reason: dict[str, Any]) -> None:
        self.ends[reason["type"]] += 1


def run_flood(server: RunningServer, count: int, clients: int, seed: int) -> Counter[str]:
    async def flood() -> Counter[str]:
        room = asyncio.Semaphore(clients)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:
            crowd = Flood(server, session, seed)

            async def one(index: int, text: str) -> None:
                async with room:
                    await crowd.client(index, text)

            texts = prompts(random.Random(seed), count)
            await asyncio.gather(*(one(index, text) for index, text in enumerate(texts)))
            return crowd.ends

    return asyncio.run(flood())


def test_flood_of_aborts_disconnects_and_blunders(tiny: RunningServer) -> None:
    ends = run_flood(tiny, count=1000, clients=64, seed=1)
    assert ends.total() == 1000
    assert set(ends) == {"stop", "length", "abort", "left", "vanished", "refused"}
    assert_quiet(tiny)
    counts = info(tiny)["statistics"]
    assert counts["requests_aborted"] > 100
    assert counts["cached_tokens"] > 0
    assert tiny.post("/flush_cache", None).status_code == 200
    assert info(tiny)["cache"]["pages_used"] == 0


def test_idle_server_rests(tiny: RunningServer) -> None:
    sampling = {"max_new_tokens": 64, "ignore_eos": True}
    assert tiny.generate({"text": "long " * 30, "sampling_params": sampling}).ok
    assert_quiet(tiny)

    def used() -> float:
        processes = [psutil.Process(tiny.process.pid)]
        processes += processes[0].children()
        return sum(sum(process.cpu_times()[:2]) for process in processes)

    time.sleep(0.6)
    before = used()
    time.sleep(1.0)
    assert used() - before < 0.1


def test_pool_too_small_for_the_load_answers_everybody(tiny: RunningServer) -> None:
    before = info(tiny)["statistics"]["preemptions"]

    async def load() -> list[dict[str, Any]]:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

            async def ask(index: int, text: str) -> dict[str, Any]:
                body = {
                    "text": f"{index} {text}",
                    "sampling_params": {
                        "max_new_tokens": 150,
                        "ignore_eos": True,
                        "temperature": 0,
                    },
                }
                async with session.post(tiny.url + "/generate", json=body) as reply:
                    assert reply.status == 200, await reply.text()
                    return dict(await reply.json())

            texts = prompts(random.Random(2), 40)
            return await asyncio.gather(*(ask(i, text) for i, text in enumerate(texts)))

    replies = asyncio.run(load())
    for reply in replies:
        assert reply["meta_info"]["finish_reason"] == {"type": "length", "length": 150}
        assert len(reply["output_ids"]) == 150
    assert info(tiny)["statistics"]["preemptions"] > before
    assert any(reply["meta_info"]["num_retractions"] for reply in replies)
    assert_quiet(tiny)


# --- random bodies


SCALARS: tuple[Any, ...] = (
    *(None, True, False, 0, 1, 2, 3, -1, -2, 7, 511, 512, 1 << 31, 1 << 63, -(1 << 63), 1 << 70),
    *(0.0, 0.5, 1.0, -0.5, 1e-9, 1e300, "", "a", "hello", "1", "\x00", "\ud83d\ude00 ü", "x" * 700),
    *([], {}, [None], [[]], [1], ["a"], [1, 2, 3], [1, "a"], [[1], [2, 3]], [True], [0.5]),
    *({"a": 1}, {"1": 1}, {"1": 200.0}, {"type": "text"}, [{}], [{"a": None}], {"x": {"y": []}}),
)
SAMPLING = (
    *("max_new_tokens", "min_new_tokens", "temperature", "top_p", "top_k", "min_p", "n", "stop"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "stop_token_ids", "regex"),
    *("stop_regex", "ignore_eos", "skip_special_tokens", "no_stop_trim", "logit_bias", "heat"),
    *("sampling_seed", "stream_interval", "json_schema", "spaces_between_special_tokens"),
)
GENERATE = (
    *("text", "input_ids", "sampling_params", "rid", "return_logprob", "logprob_start_len"),
    *("top_logprobs_num", "token_ids_logprob", "return_text_in_logprobs", "stream", "priority"),
    *("extra_key", "cache_salt", "image_data", "lora_path", "session_params", "unknown"),
)
OPENAI = (
    *("model", "max_tokens", "n", "temperature", "top_p", "seed", "stop", "stream", "logit_bias"),
    *("stream_options", "frequency_penalty", "presence_penalty", "response_format", "top_k"),
    *("min_p", "min_tokens", "repetition_penalty", "stop_token_ids", "stop_regex", "ignore_eos"),
    *("rid", "extra_key", "cache_salt", "priority", "logprobs", "user", "unknown"),
)
COMPLETION = (*OPENAI, "prompt", "echo", "best_of", "suffix")
CHAT = (
    *(*OPENAI, "messages", "max_completion_tokens", "top_logprobs", "tools", "tool_choice"),
    *("continue_final_message", "chat_template_kwargs"),
)
MESSAGES: tuple[Any, ...] = (
    [{"role": "user", "content": "hi"}],
    [{"role": "assistant", "content": None}],
    [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
    [{"role": "system", "content": "s"}, {"role": "tool", "content": "t", "tool_call_id": 5}],
    [{"role": "user", "content": "hi", "name": {"odd": []}}, {"role": "assistant", "content": "a"}],
    [{"role": [], "content": "hi"}],
)


def random_body(rng: random.Random, path: str) -> Any:
    """A sound body with some keys replaced by anything; sometimes not even an object."""
    if rng.random() < 0.02:
        return rng.choice(SCALARS)

    def scatter(body: dict[str, Any], keys: tuple[str, ...], most: int) -> dict[str, Any]:
        chosen = rng.sample(keys, rng.randrange(most))
        return body | {key: rng.choice(SCALARS) for key in chosen}

    if path == "/generate":
        sampling = scatter({"max_new_tokens": 3}, SAMPLING, 3)
        return scatter({"text": "hello", "sampling_params": sampling}, GENERATE, 4)
    if path == "/v1/completions":
        return scatter({"prompt": "hello", "max_tokens": 3}, COMPLETION, 4)
    return scatter({"messages": rng.choice(MESSAGES), "max_tokens": 3}, CHAT, 4)


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
def test_random_bodies_never_break_the_server(tiny: RunningServer, path: str) -> None:
    rng = random.Random(path)
    bodies = [random_body(rng, path) for _ in range(300)]
    statuses: Counter[int] = Counter()

    async def flood() -> None:
        room = asyncio.Semaphore(16)
        patience = aiohttp.ClientTimeout(total=60)
        async with aiohttp.ClientSession(timeout=patience) as session:

            async def one(body: Any) -> None:
                async with room, session.post(tiny.url + path, json=body) as reply:
                    text = await reply.text()
                statuses[reply.status] += 1
                assert reply.status < 500, (body, text)
                if reply.content_type == "text/event-stream":
                    assert text.endswith("data: [DONE]\n\n"), (body, text)
                    assert '"code":5' not in text, (body, text)
                else:
                    json.loads(text)

            await asyncio.gather(*map(one, bodies))

    asyncio.run(flood())
    assert statuses[200] > 5
    assert statuses[400] > 5
    assert tiny.generate({"text": "alive", "sampling_params": {"max_new_tokens": 1}}).ok
    assert_quiet(tiny)


# --- ends


def open_streams(server: RunningServer, count: int) -> tuple[list[threading.Thread], list[Any]]:
    """Long streams that have begun; the list gets the last two lines, or the error, of each."""
    begun = threading.Semaphore(0)
    ends: list[Any] = []

    def read(index: int) -> None:
        sampling = {"max_new_tokens": 450, "ignore_eos": True}
        body = {"text": f"{index} long", "sampling_params": sampling, "stream": True}
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


def scheduler_of(server: RunningServer) -> psutil.Process:
    """The child that holds the model: the one with the most memory."""
    children = psutil.Process(server.process.pid).children()
    return max(children, key=lambda child: child.memory_info().rss)


@pytest.fixture
def temporary(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the servers of a test put their sockets; other servers use the system's directory."""
    directory = tmp_path_factory.mktemp("t")
    monkeypatch.setenv("TMPDIR", str(directory))
    return directory


def test_killed_scheduler_ends_streams_with_an_error(tiny_dir: Path, temporary: Path) -> None:
    server = start_tiny(tiny_dir)
    assert len(list(temporary.iterdir())) == 1
    children = psutil.Process(server.process.pid).children(recursive=True)
    threads, ends = open_streams(server, 6)
    scheduler_of(server).kill()
    started = time.monotonic()
    for thread in threads:
        thread.join(20)
    assert time.monotonic() - started < 5
    assert len(ends) == 6
    for end in ends:
        assert end[-1] == b"data: [DONE]"
        assert b'"code":503' in end[-2]
        assert b"killed by SIGKILL" in end[-2]
    output = server.process.communicate(timeout=20)[0]
    assert server.process.returncode == 1
    assert "Traceback" not in output
    assert not psutil.wait_procs(children, timeout=5)[1]
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
        started = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        server.process.send_signal(signal.SIGINT)  # somebody is impatient
        output = server.process.communicate(timeout=20)[0]
    assert time.monotonic() - started < 5
    assert server.process.returncode == 0, output
    assert "Traceback" not in output, output
    for thread in threads:
        thread.join(5)
    assert len(ends) == 24
    # A stream was either served to its end, or told that the server is going away.
    assert all(isinstance(end, list) and end[-1] == b"data: [DONE]" for end in ends), ends
    assert not psutil.wait_procs(children, timeout=5)[1]
    assert not list(temporary.iterdir())
