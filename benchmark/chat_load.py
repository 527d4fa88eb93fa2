"""The load of `cpu_vs_llamacpp.py`: the same conversations over either server's own route."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Protocol

import aiohttp
import numpy as np
import psutil
from llama_server import LlamaServer
from prefix_sharing import settled_info
from shop_talk import customer_message

SINGLE_STREAM_TOKENS = 128
SINGLE_STREAM_REPEATS = 3
_SINGLE_STREAM_MESSAGES = 18  # about 1,000 tokens


@dataclass(frozen=True)
class Progress:
    """What one event of a stream tells."""

    text: str
    """All of the answer so far."""
    output_tokens: int
    prompt_tokens: int
    computed_tokens: int
    """Prompt tokens that did not come from the cache; right in the last event."""
    done: bool


@dataclass(frozen=True)
class Reply:
    """One answer and its times."""

    last: Progress
    ttft_s: float
    decode_tok_s: float
    """Tokens per second from the first event to the last; 0 for a single event."""


class Target(Protocol):
    """A server under load."""

    url: str

    def stream(
        self, session: aiohttp.ClientSession, text: str, new_tokens: int
    ) -> AsyncIterator[Progress]: ...

    async def clear(self, session: aiohttp.ClientSession) -> None: ...

    async def memory(self, session: aiohttp.ClientSession) -> dict[str, Any]: ...


class MinimaTarget:
    """This project's server, over `/generate`."""

    def __init__(self, url: str) -> None:
        self.url = url

    async def stream(
        self, session: aiohttp.ClientSession, text: str, new_tokens: int
    ) -> AsyncIterator[Progress]:
        sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
        body = {"text": text, "sampling_params": sampling, "stream": True}
        async for event in _events(session, "/generate", body):
            meta = event["meta_info"]
            yield Progress(
                text=event["text"],
                output_tokens=meta["completion_tokens"],
                prompt_tokens=meta["prompt_tokens"],
                computed_tokens=meta["prompt_tokens"] - meta["cached_tokens"],
                done=meta["finish_reason"] is not None,
            )

    async def clear(self, session: aiohttp.ClientSession) -> None:
        async with session.post("/flush_cache") as response:
            response.raise_for_status()

    async def memory(self, session: aiohttp.ClientSession) -> dict[str, Any]:
        """KV bytes once all pages have settled in their tiers."""
        info = await settled_info(session)
        cache = info["cache"]
        return {
            "kv_bytes": cache["bytes_used"],
            "kv_reserved_bytes": cache["arena_bytes"],
            "compute": info["dtype"],
        }


class LlamaTarget:
    """llama.cpp's server, over `/completion`."""

    def __init__(self, server: LlamaServer) -> None:
        self.url = server.url
        self._server = server

    async def stream(
        self, session: aiohttp.ClientSession, text: str, new_tokens: int
    ) -> AsyncIterator[Progress]:
        # top_k alone: the cheapest sampler that is greedy.
        greedy = {"temperature": 0, "samplers": ["top_k"], "top_k": 1, "ignore_eos": True}
        body = {"prompt": text, "n_predict": new_tokens, "stream": True, "cache_prompt": True}
        answer = ""
        async for event in _events(session, "/completion", body | greedy):
            answer += event["content"]
            timings = event.get("timings", {})
            yield Progress(
                text=answer,
                output_tokens=event["tokens_predicted"],
                prompt_tokens=event["tokens_evaluated"],
                computed_tokens=timings.get("prompt_n", event["tokens_evaluated"]),
                done=event["stop"],
            )

    async def clear(self, session: aiohttp.ClientSession) -> None:
        """Nothing: a slot with a few foreign tokens is taken like an empty one."""

    async def memory(self, session: aiohttp.ClientSession) -> dict[str, Any]:
        """KV of the tokens in the slots, and the prompts kept beside them."""
        async with session.get("/slots") as response:
            response.raise_for_status()
            slots = await response.json()
        tokens = sum(slot.get("n_prompt_tokens", 0) for slot in slots)
        beside = self._server.prompt_cache_bytes
        return {
            "kv_bytes": round(tokens * self._server.kv_bytes_per_token) + beside,
            "kv_reserved_bytes": self._server.kv_reserved_bytes + beside,
            "compute": self._server.instruction_set,
        }


async def ask(target: Target, session: aiohttp.ClientSession, text: str, new_tokens: int) -> Reply:
    """Sends one prompt and reads its stream to the end.

    Raises:
        RuntimeError: the stream ended early or the answer has another length.
    """
    started = time.perf_counter()
    first: tuple[float, int] | None = None
    last: Progress | None = None
    async for last in target.stream(session, text, new_tokens):
        if first is None:
            first = time.perf_counter(), last.output_tokens
    ended = time.perf_counter()
    if first is None or last is None or not last.done or last.output_tokens != new_tokens:
        raise RuntimeError(f"the answer is not complete: {last}")
    decoded = last.output_tokens - first[1]
    return Reply(last, first[0] - started, decoded / (ended - first[0]) if decoded else 0.0)


async def converse(
    target: Target, system: str, clients: int, turns: int, new_tokens: int
) -> dict[str, Any]:
    """All turns of all conversations, on a server that has cached nothing; one row of results."""
    async with _session(target) as session:
        # Whatever is built or loaded at the first request is not what is measured.
        await ask(target, session, "Good morning.", 4)
        await target.clear(session)
        texts = [system] * clients
        random_of = [random.Random(number) for number in range(clients)]
        seconds: list[float] = []
        replies: list[list[Reply]] = []
        cpu_before = _cpu_seconds()
        for _ in range(turns):
            texts = [
                text + customer_message(rng) for text, rng in zip(texts, random_of, strict=True)
            ]
            started = time.perf_counter()
            turn = await asyncio.gather(*(ask(target, session, text, new_tokens) for text in texts))
            seconds.append(time.perf_counter() - started)
            replies.append(turn)
            texts = [text + reply.last.text for text, reply in zip(texts, turn, strict=True)]
        cpu_s = _cpu_seconds() - cpu_before
        memory = await target.memory(session)
    ttft = [reply.ttft_s for turn in replies for reply in turn]
    ends = [reply.last for turn in replies for reply in turn]
    prompt_tokens = sum(end.prompt_tokens for end in ends)
    computed_tokens = sum(end.computed_tokens for end in ends)
    return {
        "total_s": sum(seconds),
        "turn_s": seconds,
        "output_tok_s": sum(end.output_tokens for end in ends) / sum(seconds),
        "ttft_p50_s": float(np.quantile(ttft, 0.5)),
        "ttft_p95_s": float(np.quantile(ttft, 0.95)),
        "prompt_tokens": prompt_tokens,
        "prompt_tokens_first_turn": [reply.last.prompt_tokens for reply in replies[0]],
        "computed_tokens": computed_tokens,
        "computed_first_turn": sum(reply.last.computed_tokens for reply in replies[0]),
        "cached_share": 1 - computed_tokens / prompt_tokens,
        "cpu_s": cpu_s,
        **memory,
    }


async def single_stream(target: Target) -> dict[str, Any]:
    """Medians of one request at a time: uncached prefill, and decode after it or a short prompt."""
    long: list[Reply] = []
    short: list[Reply] = []
    async with _session(target) as session:
        await ask(target, session, "Good morning.", 4)
        for number in range(SINGLE_STREAM_REPEATS):
            rng = random.Random(f"single stream {number}")
            text = f"Conversation {number}."
            short.append(await ask(target, session, text, SINGLE_STREAM_TOKENS))
            text += "".join(customer_message(rng) for _ in range(_SINGLE_STREAM_MESSAGES))
            long.append(await ask(target, session, text, SINGLE_STREAM_TOKENS))
    return {
        "single_prompt_tokens": [reply.last.prompt_tokens for reply in long],
        "prefill_tok_s": statistics.median(
            reply.last.computed_tokens / reply.ttft_s for reply in long
        ),
        "decode_tok_s": statistics.median(reply.decode_tok_s for reply in long),
        "decode_short_tok_s": statistics.median(reply.decode_tok_s for reply in short),
    }


def _session(target: Target) -> aiohttp.ClientSession:
    # A connection per request: llama.cpp closes idle ones, at times just as the next one is sent.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=None)
    return aiohttp.ClientSession(target.url, timeout=timeout, connector=connector)


async def _events(
    session: aiohttp.ClientSession, path: str, body: dict[str, Any]
) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects of a stream of server-sent events.

    Raises:
        RuntimeError: an event tells of an error.
    """
    async with session.post(path, json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            field, _, data = line.strip().partition(b": ")
            # Other lines are empty or comments: llama.cpp sends those while a request waits.
            if field != b"data" or data == b"[DONE]":
                continue
            event = json.loads(data)
            if "error" in event:
                raise RuntimeError(f"the server answered {event['error']}")
            yield event


def _cpu_seconds() -> float:
    """CPU time of the servers under this process so far."""
    seconds = 0.0
    for process in psutil.Process().children(recursive=True):
        times = process.cpu_times()
        seconds += times.user + times.system
    return seconds
