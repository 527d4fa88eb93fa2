"""A real server on a tiny random model under load that no client should cause.

Floods with aborts and disconnects, and pools too small: every request gets one end, and the books
balance when it is quiet.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from contextlib import suppress
from typing import Any

import aiohttp
import psutil
from server_kit import RunningServer
from tiny_kit import assert_quiet, info

WORDS = ("the sea", "of", "a red stone", "and two", "old keepers", "who read", "by night")


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
