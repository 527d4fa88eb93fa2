"""Bearer-token check in front of the application."""

from __future__ import annotations

import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from sglang_minima.entrypoints.errors import json_response

OPEN_PATHS = frozenset({"/health", "/health_generate", "/metrics"})
"""Probes and scrapers come without a key."""


class BearerAuth:
    """ASGI middleware: 401 without `Authorization: Bearer <key>`."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._key = api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS and not self._known(scope):
            await json_response({"error": "Unauthorized"}, 401)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _known(self, scope: Scope) -> bool:
        given = dict(scope["headers"]).get(b"authorization", b"")
        scheme, _, key = given.partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(key.strip(), self._key)
