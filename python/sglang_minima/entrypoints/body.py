"""Reads JSON bodies within a size limit."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from starlette.requests import Request

from sglang_minima.entrypoints.errors import HttpError

MAX_BODY_BYTES = 64 << 20
_MAX_DRAINED_BYTES = 4 * MAX_BODY_BYTES
MAX_DEPTH = 100
"""Nested lists and objects: far more than people write, far fewer than Python's stack holds."""
STALL_SECONDS = 60.0
"""How long a client may send nothing in the middle of a body."""


async def read_json(request: Request) -> Any:
    """The decoded JSON body.

    Raises:
        HttpError: 400 for a wrong content type or invalid or too deeply nested JSON, 408
            for a body that stops coming, 413 for one over the limit.
    """
    content_type = request.headers.get("content-type", "application/json")
    media_type = content_type.split(";")[0].strip().lower()
    if media_type != "application/json":
        raise HttpError(400, f"the content type must be application/json, not {media_type!r}")
    body = await _read(request)
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise HttpError(400, f"the body is not valid JSON: {error}") from None
    # Counting bytes is quick, and no body with fewer brackets can be that deep.
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH and _deeper_than(value, MAX_DEPTH):
        raise HttpError(400, f"the body is nested more than {MAX_DEPTH} levels deep")
    return value


def _deeper_than(value: Any, limit: int) -> bool:
    """Whether more than `limit` lists and objects stand within each other."""
    level = [value] if isinstance(value, list | dict) else []
    for _ in range(limit):
        below: list[Any] = []
        for item in level:
            inner = item.values() if isinstance(item, dict) else item
            below += [child for child in inner if isinstance(child, list | dict)]
        if not below:
            return False
        level = below
    return True


async def _read(request: Request) -> bytearray:
    """The body; what exceeds the limit is read and dropped, so that the client sees the answer."""
    body = bytearray()
    size = 0
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(STALL_SECONDS) as patience:
            async for chunk in request.stream():
                patience.reschedule(loop.time() + STALL_SECONDS)
                size += len(chunk)
                if size <= MAX_BODY_BYTES:
                    body += chunk
                elif size > _MAX_DRAINED_BYTES:
                    break
    except TimeoutError:
        message = f"nothing of the body has come for {STALL_SECONDS:g} seconds"
        raise HttpError(408, message) from None
    if size > MAX_BODY_BYTES:
        raise HttpError(413, f"the body is larger than {MAX_BODY_BYTES >> 20} MiB")
    return body
