"""What every answer gets: a log line if it is a refusal, a header with the id of its request."""

from __future__ import annotations

import logging
import re
from urllib.parse import quote

import orjson
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sglang_minima.entrypoints.auth import PROBE_PATHS

logger = logging.getLogger(__name__)

_QUOTED = re.compile(r"""'[^']*'|"[^"]*\"""")
_SEPARATOR = re.compile(r": |; ")
_MAX_PATH = 100
_MAX_REASON = 160


class AccessLog:
    """ASGI middleware: `POST /generate 400: reason` for every answer of 400 and above.

    Probes are left out. What clients wrote does not stand in the log: of the reason only the first
    clause is taken, without what it quotes. Where a route has set `request.state.request_id`, the
    answer carries it as `x-request-id`: it is the `rid` of the log's lines and of `/abort_request`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in PROBE_PATHS:
            await self._app(scope, receive, send)
            return
        status = 0

        async def log_and_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                request_id = scope.get("state", {}).get("request_id", "")
                if request_id and request_id.isascii() and request_id.isprintable():
                    headers = [*message["headers"], (b"x-request-id", request_id.encode())]
                    message = {**message, "headers": headers}
            elif status >= 400:
                path = quote(scope["path"])[:_MAX_PATH]
                logger.info("%s %s %d%s", scope["method"], path, status, _reason(message["body"]))
                status = 0
            await send(message)

        await self._app(scope, receive, log_and_send)


def _reason(body: bytes) -> str:
    """`: why`, from an error of any shape; empty when the body tells nothing."""
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError:
        return ""
    if isinstance(found, dict) and isinstance(found.get("error"), dict):
        found = found["error"]
    message = found.get("message") if isinstance(found, dict) else None
    if not isinstance(message, str):
        return ""
    clause = _SEPARATOR.split(_QUOTED.sub("...", message), maxsplit=1)[0][:_MAX_REASON]
    return ": " + "".join(char if char.isprintable() else " " for char in clause)
