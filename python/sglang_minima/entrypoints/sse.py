"""Answers that end when the client goes away: event streams, and waiting for a whole reply."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NamedTuple, TypeVar

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sglang_minima.entrypoints.errors import ErrorBody, json_response, to_http_error
from sglang_minima.tokenization.state import Generation

logger = logging.getLogger(__name__)
T = TypeVar("T")

CLIENT_CLOSED = 499
"""Status of an answer that nobody will read."""


_CLOSING = (408, 413)
"""After these the rest of a body may still come: the connection is of no use any more."""


class ClientGone(Exception):
    """The client closed the connection before the answer was complete."""


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """Awaits `work`, or raises `ClientGone` as soon as the client disconnects."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        for pending in (task, watch):
            pending.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def wait_for_reply(request: Request, generation: Generation) -> None:
    """Waits until all sequences have finished; aborts them when the client disconnects."""
    try:
        await unless_gone(request.receive, generation.wait())
    finally:
        generation.abort()


def event(body: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + orjson.dumps(body) + b"\n\n"


def named_event(body: Any) -> bytes:
    """One server-sent event that is named after the type of its object."""
    name: str = body["type"]
    return b"event: " + name.encode() + b"\n" + event(body)


class Framing(NamedTuple):
    """How objects become a stream."""

    encode: Callable[[Any], bytes]
    ending: bytes


DATA_EVENTS = Framing(event, b"data: [DONE]\n\n")
NAMED_EVENTS = Framing(named_event, b"")


class EventStream(Response):
    """Sends the events of a generation and its ending; aborts it when the client disconnects.

    An error before the first event is an ordinary HTTP error; later it is one more event.

    Args:
        events: the objects to send.
        generation: what `events` reads from.
        error: body of an HTTP error.
        stream_error: body of an error event.
        framing: how the objects are sent.
    """

    def __init__(
        self,
        events: AsyncIterator[Any],
        generation: Generation,
        error: ErrorBody,
        stream_error: ErrorBody,
        framing: Framing = DATA_EVENTS,
    ) -> None:
        super().__init__(media_type="text/event-stream")
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-cache"
        self._events = events
        self._generation = generation
        self._error = error
        self._stream_error = stream_error
        self._framing = framing
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._send_all(scope, receive, send))
        except (ClientGone, OSError):
            logger.debug("a client closed its stream")
        finally:
            self._generation.abort()

    async def _send_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async for body in self._events:
                await self._send(send, self._framing.encode(body))
        except Exception as error:
            failure = to_http_error(error)
            if not self._started:
                await json_response(self._error(failure), failure.status)(scope, receive, send)
                return
            await self._send(send, self._framing.encode(self._stream_error(failure)))
        await self._send(send, self._framing.ending)
        await send({"type": "http.response.body", "body": b""})

    async def _send(self, send: Send, chunk: bytes) -> None:
        if not self._started:
            self._started = True
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
        await send({"type": "http.response.body", "body": chunk, "more_body": True})


Handler = Callable[[Request], Awaitable[Response]]


def answering_errors(error_body: ErrorBody) -> Callable[[Handler], Handler]:
    """Decorator: errors that a client can cause become answers of the route's error shape."""

    def decorate(handler: Handler) -> Handler:
        async def wrapped(request: Request) -> Response:
            try:
                return await handler(request)
            except (ClientGone, ClientDisconnect):
                return Response(status_code=CLIENT_CLOSED)
            except Exception as error:
                failure = to_http_error(error)
                response = json_response(error_body(failure), failure.status)
                if failure.status in _CLOSING:
                    response.headers["connection"] = "close"
                return response

        return wrapped

    return decorate
