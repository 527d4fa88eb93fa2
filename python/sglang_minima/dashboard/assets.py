"""The files of the page, as they stand in the package."""

from __future__ import annotations

import hashlib
from importlib.resources import files

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

_PAGE = "index.html"
_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_HEADERS = {
    # Nothing from elsewhere, nothing inline, in no other page's frame.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def _load() -> dict[str, Response]:
    """The answers by path."""
    answers = {}
    for file in files(__package__).joinpath("static").iterdir():
        media_type = _TYPES.get(file.name.rpartition(".")[2])
        if media_type is not None:
            content = file.read_bytes()
            tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
            path = "/dashboard" if file.name == _PAGE else f"/dashboard/{file.name}"
            answers[path] = Response(
                content, headers={**_HEADERS, "content-type": media_type, "etag": tag}
            )
    return answers


_ANSWERS = _load()
PATHS = frozenset(_ANSWERS)
"""Open to everybody, with a key or without: they hold nothing of this server."""


def add_asset_routes(app: FastAPI) -> None:
    """Adds `/dashboard` and the files that it loads."""

    async def asset(request: Request) -> Response:
        answer = _ANSWERS[request.url.path]
        if request.headers.get("if-none-match") == answer.headers["etag"]:
            return Response(status_code=304, headers=dict(_HEADERS))
        return answer

    for path in sorted(PATHS):
        app.add_route(path, asset, ["GET"])
