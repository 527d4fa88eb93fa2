"""Reads JSON bodies within a size limit."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.requests import Request

from sglang_minima.entrypoints.errors import HttpError

MAX_BODY_BYTES = 64 << 20
_MAX_DRAINED_BYTES = 4 * MAX_BODY_BYTES


async def read_json(request: Request) -> Any:
    """The decoded JSON body.

    Raises:
        HttpError: 400 for a wrong content type or invalid JSON, 413 for a body over the limit.
    """
    content_type = request.headers.get("content-type", "application/json")
    media_type = content_type.split(";")[0].strip().lower()
    if media_type != "application/json":
        raise HttpError(400, f"the content type must be application/json, not {media_type!r}")
    body = await _read(request)
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise HttpError(400, f"the body is not valid JSON: {error}") from None


async def _read(request: Request) -> bytearray:
    """The body; what exceeds the limit is read and dropped, so that the client sees the answer."""
    body = bytearray()
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size <= MAX_BODY_BYTES:
            body += chunk
        elif size > _MAX_DRAINED_BYTES:
            break
    if size > MAX_BODY_BYTES:
        raise HttpError(413, f"the body is larger than {MAX_BODY_BYTES >> 20} MiB")
    return body
