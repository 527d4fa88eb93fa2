"""Check of the API key in front of the application."""

from __future__ import annotations

import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from sglang_minima.dashboard.assets import PATHS
from sglang_minima.entrypoints.errors import HttpError, error_body_of, json_response

PROBE_PATHS = frozenset({"/health", "/health_generate", "/ready", "/ping", "/metrics"})
OPEN_PATHS = PROBE_PATHS | PATHS
"""Probes and scrapers come without a key; so does the dashboard's page, which then asks for it."""


class KeyAuth:
    """ASGI middleware: 401 without `Authorization: Bearer <key>` or `x-api-key: <key>`."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._key = api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS and not self._known(scope):
            failure = HttpError(401, "the API key is missing or wrong")
            body = error_body_of(scope["path"])(failure)
            await json_response(body, 401)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _known(self, scope: Scope) -> bool:
        headers = dict(scope["headers"])
        scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        given = [headers.get(b"x-api-key", b"")]
        if scheme.lower() == b"bearer":
            given.append(bearer.strip())
        return any(hmac.compare_digest(key, self._key) for key in given)
