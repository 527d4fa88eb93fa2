"""Streams chat completions of a server and measures them."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Generator
from typing import Any, NamedTuple

_CONNECT_SECONDS = 10.0
_SILENT_SECONDS = 600.0
"""A long prompt may be computed for minutes before the first token comes."""


class ChatError(RuntimeError):
    """The server cannot be reached, or it refused; the message is one line."""


class Statistics(NamedTuple):
    """What one reply cost, as the server counted and as the client saw it."""

    prompt_tokens: int
    completion_tokens: int
    cached: dict[str, int]
    """Prompt tokens from cached pages, by page format ("cached" where none is told)."""
    first_token_seconds: float
    tokens_per_second: float | None
    """After the first token; None for a reply of one token."""


class ChatClient:
    """One server, with the settings of the conversation.

    Args:
        url: of the server, without a path.
        api_key: sent as a bearer token.
        max_tokens: longest reply (None: until the model ends it).
        temperature: of sampling.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        max_tokens: int | None = None,
        temperature: float = 0.7,
    ) -> None:
        self.url = url.rstrip("/")
        self.last: Statistics | None = None
        """Of the last reply that came to its end."""
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._settings: dict[str, Any] = {"temperature": temperature}
        if max_tokens is not None:
            self._settings["max_tokens"] = max_tokens

    def model(self) -> str:
        """The name of the served model.

        Raises:
            ChatError: no such server, or it refused.
        """
        with self._open("/v1/models", None, _CONNECT_SECONDS) as response:
            return str(json.load(response)["data"][0]["id"])

    def ask(self, messages: list[dict[str, str]]) -> Generator[str]:
        """The reply to a conversation, piece by piece; `last` is set at its end.

        Closing the iterator ends the connection, which ends the request on the server.

        Raises:
            ChatError: the server cannot be reached, refused, or broke off.
        """
        self.last = None
        body = {
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._settings,
        }
        started = time.perf_counter()
        first = latest = None
        usage: dict[str, Any] = {}
        with self._open("/v1/chat/completions", body, _SILENT_SECONDS) as response:
            try:
                for line in response:
                    if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                        continue
                    chunk = json.loads(line.removeprefix(b"data: "))
                    if "error" in chunk:
                        raise ChatError(_message(chunk))
                    usage = chunk.get("usage") or usage
                    for choice in chunk["choices"]:
                        text = choice["delta"].get("content")
                        if text:
                            latest = time.perf_counter()
                            first = first or latest
                            yield text
            except (OSError, http.client.HTTPException) as error:
                raise ChatError(f"the server broke off: {error or type(error).__name__}") from None
        if usage:
            now = time.perf_counter()
            self.last = _statistics(
                usage, (first or now) - started, (latest or now) - (first or now)
            )

    def _open(self, path: str, body: Any, timeout: float) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, self._headers)
        try:
            return urllib.request.urlopen(request, timeout=timeout)
        except urllib.error.HTTPError as error:
            raise ChatError(_refusal(error)) from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise ChatError(f"no answer from {self.url}: {reason}") from None


def _statistics(usage: dict[str, Any], first: float, decoding: float) -> Statistics:
    details = usage.get("prompt_tokens_details") or {}
    cached = details.get("cached_tokens_by_tier")
    if cached is None:
        cached = {"cached": details.get("cached_tokens", 0)}
    completion = int(usage["completion_tokens"])
    speed = (completion - 1) / decoding if completion > 1 and decoding > 0 else None
    return Statistics(int(usage["prompt_tokens"]), completion, cached, first, speed)


def _refusal(error: urllib.error.HTTPError) -> str:
    hint = "; --api-key KEY sends one" if error.code == 401 else ""
    try:
        return f"{_message(json.load(error))} (status {error.code}){hint}"
    except ValueError:
        return f"status {error.code}{hint}"


def _message(body: Any) -> str:
    """The message of an error object in the shapes that servers use."""
    found = body.get("error", body) if isinstance(body, dict) else body
    if isinstance(found, dict):
        found = found.get("message", found)
    return str(found)
