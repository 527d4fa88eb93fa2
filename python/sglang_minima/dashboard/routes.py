"""The JSON routes of the dashboard: counts, tiers and times, and no text but one's own."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from sglang_minima.dashboard.assets import add_asset_routes
from sglang_minima.dashboard.feed import TreeFeed
from sglang_minima.dashboard.history import INTERVAL, History, LatencyWindow
from sglang_minima.entrypoints.body import read_json
from sglang_minima.entrypoints.errors import HttpError, json_response, openai_error
from sglang_minima.entrypoints.info_api import ServerStatus
from sglang_minima.entrypoints.sse import answering_errors
from sglang_minima.sampling_params import InvalidRequest
from sglang_minima.tokenization.inputs import namespace_of
from sglang_minima.tokenization.manager import TokenizerManager
from sglang_minima.tokenization.state import RequestState

_MAX_DEPTH = 64
_MAX_LIMIT = 2000
_LISTED_REQUESTS = 40
_RID_CHARACTERS = 12
_STATIC = (
    *("kv_profile", "device", "dtype", "page_size", "context_length", "max_total_num_tokens"),
    *("max_stale_tokens", "kv_kinds"),
)
_CACHE = (
    *("arena_bytes", "free_slab_bytes", "kinds", "tiers", "pages_used", "pages_in_tree"),
    *("pages_locked", "pages_evictable", "compression_vs_bf16", "retier_backlog"),
)
_COUNTERS = (
    *("prompt_tokens", "cached_tokens", "cache_hit_rate", "generated_tokens", "preemptions"),
    *("kv_read_bytes", "kv_read_bytes_per_request"),
)


class Dashboard:
    """The data behind the page, for one server.

    Args:
        manager: talks to the scheduler.
        status: what the information routes report.
        latency: has observed the manager's requests.
    """

    def __init__(
        self, manager: TokenizerManager, status: ServerStatus, latency: LatencyWindow
    ) -> None:
        self._manager = manager
        self._status = status
        self._history = History(manager, latency)
        self._feed = TreeFeed(manager)
        self._sampler = asyncio.get_running_loop().create_task(self._history.run())

    def add_routes(self, app: FastAPI) -> None:
        """Adds the page and its data."""
        add_asset_routes(app)
        app.add_route("/dashboard/api/state", answering_errors(openai_error)(self._state), ["GET"])
        app.add_route("/dashboard/api/tree", answering_errors(openai_error)(self._tree), ["GET"])
        app.add_route("/dashboard/api/probe", answering_errors(openai_error)(self._probe), ["POST"])

    async def close(self) -> None:
        """Stops sampling."""
        self._sampler.cancel()
        self._feed.close()
        await asyncio.gather(self._sampler, return_exceptions=True)

    async def _state(self, request: Request) -> Response:
        """What happens now, and the samples later than `since` (seconds since the epoch)."""
        since = _number(request, "since", 0.0, 0.0, 1e12)
        info = self._history.info
        body: dict[str, Any] = {
            "model": self._status.model_name,
            "started": self._status.started,
            "time": time.time(),
            "interval": INTERVAL,
            "samples": self._history.since(since),
            "requests": self._requests(),
            "num_requests": self._manager.num_running,
        }
        if info is not None:
            body["server"] = {name: info.get(name) for name in _STATIC}
            body["cache"] = {name: info["cache"].get(name) for name in _CACHE}
            body["statistics"] = {name: info["statistics"].get(name) for name in _COUNTERS}
        return json_response(body)

    async def _tree(self, request: Request) -> Response:
        """The largest nodes below `focus`: `depth` levels, `limit` nodes at most.

        With `first` and `end`, only those of the focus's children, by rank of size.
        """
        depth = int(_number(request, "depth", 12, 1, _MAX_DEPTH))
        limit = int(_number(request, "limit", 400, 1, _MAX_LIMIT))
        focus = request.query_params.get("focus", "root")
        children = None
        if "first" in request.query_params or "end" in request.query_params:
            first = int(_number(request, "first", 0, 0, 1e9))
            children = (first, int(_number(request, "end", 1e9, 0, 1e9)))
        snapshot = await self._feed.latest()
        summary = snapshot.summarise(focus, depth, limit, children)
        return json_response({"age": time.monotonic() - snapshot.taken, **summary})

    async def _probe(self, request: Request) -> Response:
        """What a prompt would find in the cache; nothing is computed, held or touched."""
        text, chat, salt = _parse_probe(await read_json(request))
        tokenizer = self._manager.tokenizer
        limit = self._manager.limits.context_length

        def encode() -> list[int]:
            self._manager.prompts.refuse_overlong(text)
            if not chat:
                return tokenizer.encode(text)
            return tokenizer.apply_chat_template([{"role": "user", "content": text}])

        try:
            ids = await self._manager.prompts.in_thread(len(text), encode)
        except ValueError as error:
            raise InvalidRequest(str(error)) from None
        if not 0 < len(ids) <= limit:
            raise InvalidRequest(f"the prompt has {len(ids)} tokens; give 1 to {limit}")
        reply = await self._manager.control("probe", {"input_ids": ids, "salt": salt})
        if not reply.ok:
            raise HttpError(404, str(reply.value))
        found: dict[str, Any] = reply.value
        size = found["page_size"]

        def texts() -> list[str]:
            return [
                tokenizer.decode(ids[start : start + size], skip_special_tokens=False)
                for start in range(0, len(ids), size)
            ]

        found["texts"] = await self._manager.prompts.in_thread(len(text), texts)
        return json_response(found)

    def _requests(self) -> list[dict[str, Any]]:
        """The running and waiting requests, the oldest first."""
        now = time.monotonic()
        return [_request(state, now) for state in self._manager.states(_LISTED_REQUESTS)]


def _request(state: RequestState, now: float) -> dict[str, Any]:
    return {
        # Clients choose these ids: enough to tell them apart, not all that they may say.
        "rid": state.rid[:_RID_CHARACTERS],
        "phase": "prompt" if state.first_token is None else "output",
        "prompt_tokens": state.prompt_tokens,
        "cached_tokens": state.cached_tokens,
        "completion_tokens": state.completion_tokens,
        "seconds": round(now - state.created, 2),
    }


def _number(request: Request, name: str, default: float, low: float, high: float) -> float:
    text = request.query_params.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        raise InvalidRequest(f"{name} must be a number, not {text[:20]!r}") from None
    if not low <= value <= high:
        raise InvalidRequest(f"{name} must be in [{low:g}, {high:g}]")
    return value


def _parse_probe(body: Any) -> tuple[str, bool, str | None]:
    """(text, whether it is a chat message, namespace)."""
    if not isinstance(body, dict):
        raise InvalidRequest("the body must be a JSON object")
    text, chat = body.get("text"), body.get("chat", False)
    if not isinstance(text, str) or not text:
        raise InvalidRequest("text must be a string that is not empty")
    if not isinstance(chat, bool):
        raise InvalidRequest("chat must be true or false")
    keys: list[str | None] = []
    for name in ("extra_key", "cache_salt"):
        key = body.get(name)
        if key is not None and not isinstance(key, str):
            raise InvalidRequest(f"{name} must be a string")
        keys.append(key)
    return text, chat, namespace_of(keys[0], keys[1])
