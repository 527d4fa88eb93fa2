"""The native `/generate` route and the routes that manage running requests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from sglang_minima.entrypoints.body import read_json
from sglang_minima.entrypoints.errors import (
    HttpError,
    json_response,
    native_error,
    native_stream_error,
    openai_error,
)
from sglang_minima.entrypoints.generate_input import GenerateCall, parse_generate
from sglang_minima.entrypoints.replies import abort_error, native_reply
from sglang_minima.entrypoints.sse import EventStream, answering_errors, wait_for_reply
from sglang_minima.tokenization.manager import TokenizerManager
from sglang_minima.tokenization.state import Generation


def add_native_routes(app: FastAPI, manager: TokenizerManager) -> None:
    """Adds `/generate`, `/flush_cache` and `/abort_request`."""

    @answering_errors(native_error)
    async def generate(request: Request) -> Response:
        call = parse_generate(await read_json(request), manager.limits.vocab_size, manager.bounds)
        generation = await manager.submit(call.prompts, call.group)
        request.state.request_id = call.group or generation.states[0].rid
        if call.stream:
            events = stream_replies(call, generation)
            return EventStream(events, generation, native_error, native_stream_error)
        await wait_for_reply(request, generation)
        return json_response(collect_replies(call, generation))

    @answering_errors(openai_error)
    async def flush_cache(request: Request) -> Response:
        reply = await manager.control("flush_cache")
        if reply.ok:
            return PlainTextResponse("The prefix cache is empty now.\n")
        return PlainTextResponse(
            "The cache was not flushed: requests are running or waiting.\n", 400
        )

    @answering_errors(openai_error)
    async def abort_request(request: Request) -> Response:
        body = await read_json(request)
        if not isinstance(body, dict):
            raise HttpError(400, "the body must be a JSON object")
        rid, everything = body.get("rid"), body.get("abort_all", False)
        if everything is True:
            manager.abort_all()
        elif isinstance(rid, str) and rid:
            manager.abort(rid)
        else:
            raise HttpError(400, "give the rid of a request or of a batch, or abort_all: true")
        return Response(status_code=200)

    app.add_route("/generate", generate, ["POST", "PUT"])
    app.add_route("/flush_cache", flush_cache, ["GET", "POST"])
    app.add_route("/abort_request", abort_request, ["POST"])


def collect_replies(call: GenerateCall, generation: Generation) -> Any:
    """The whole reply: one object, or a list for a batch or n > 1.

    Raises:
        HttpError: the scheduler refused a sequence.
    """
    for state in generation.states:
        error = abort_error(state.finish)
        if error is not None:
            raise error
    replies = [native_reply(state) for state in generation.states]
    return replies[0] if call.single else replies


async def stream_replies(
    call: GenerateCall, generation: Generation
) -> AsyncIterator[dict[str, Any]]:
    """Cumulative replies as they grow; with "index" for a batch or n > 1.

    Raises:
        HttpError: the scheduler refused a sequence.
    """
    async for index in generation.updates():
        state = generation.states[index]
        error = abort_error(state.finish)
        if error is not None:
            raise error
        reply = native_reply(state)
        if not call.single:
            reply["index"] = index
        yield reply
