"""The error shapes of the HTTP interface, one helper each.

`/generate` answers {"error": {"message"}}, `/v1/messages` {"type": "error", "error": {...}}; every
other route answers the flat OpenAI-style object.
Bad input is always a 4xx with one sentence: a router repeats a request that got a 5xx.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson
from starlette.responses import Response

from sglang_minima.grammar.checker import GrammarBusy
from sglang_minima.sampling_params import InvalidRequest
from sglang_minima.tokenization.manager import QueueFull
from sglang_minima.tokenization.state import EngineDead

_LONGEST_MESSAGE = 1000
"""A sentence that quotes what a client wrote must not send back megabytes of it."""


class HttpError(Exception):
    """An answer other than 200, with the sentence that the client sees."""

    def __init__(self, status: int, message: str) -> None:
        if len(message) > _LONGEST_MESSAGE:
            message = message[:_LONGEST_MESSAGE] + "..."
        super().__init__(message)
        self.status = status
        self.message = message


ErrorBody = Callable[[HttpError], dict[str, Any]]

_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "PayloadTooLargeError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
}


def json_response(body: Any, status: int = 200) -> Response:
    """A JSON answer."""
    return Response(orjson.dumps(body), status, media_type="application/json")


def native_error(error: HttpError) -> dict[str, Any]:
    """The body that `/generate` sends."""
    return {"error": {"message": error.message}}


def native_stream_error(error: HttpError) -> dict[str, Any]:
    """The event that `/generate` sends when a stream has already begun."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {
        "error": {
            "message": error.message,
            "type": kind,
            "code": error.status,
            "retryable": error.status == 503,
        }
    }


def openai_error(error: HttpError) -> dict[str, Any]:
    """The flat body that the OpenAI routes (and all other routes) send."""
    return {
        "object": "error",
        "message": error.message,
        "type": _TYPES.get(error.status, "InternalServerError"),
        "param": None,
        "code": error.status,
    }


_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    503: "overloaded_error",
}


def anthropic_error(error: HttpError) -> dict[str, Any]:
    """The body, and the stream event, that `/v1/messages` sends."""
    kind = _ANTHROPIC_TYPES.get(error.status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def error_body_of(path: str) -> ErrorBody:
    """The shape of errors that never reach the route of a path."""
    if path == "/generate":
        return native_error
    return anthropic_error if path.startswith("/v1/messages") else openai_error


def openai_stream_error(error: HttpError) -> dict[str, Any]:
    """The event that an OpenAI route sends when a stream has already begun."""
    return {"error": openai_error(error)}


def model_not_found(name: str) -> Response:
    """The nested 404 of `/v1/models/{id}`."""
    body = {
        "message": f"The model '{name}' does not exist",
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }
    return json_response({"error": body}, 404)


def to_http_error(error: Exception) -> HttpError:
    """The HTTP answer to an exception of the serving code.

    Raises:
        Exception: `error` itself, when it is none that a client can cause.
    """
    if isinstance(error, HttpError):
        return error
    if isinstance(error, InvalidRequest):
        return HttpError(400, str(error))
    if isinstance(error, QueueFull | EngineDead | GrammarBusy):
        return HttpError(503, str(error))
    if isinstance(error, TimeoutError):
        return HttpError(503, "the scheduler did not answer in time")
    raise error
