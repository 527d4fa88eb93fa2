"""The OpenAI routes `/v1/completions` and `/v1/models`."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from sglang_minima.entrypoints.body import read_json
from sglang_minima.entrypoints.errors import (
    json_response,
    model_not_found,
    openai_error,
    openai_stream_error,
)
from sglang_minima.entrypoints.generate_input import convert_body
from sglang_minima.entrypoints.openai_replies import (
    Envelope,
    UsagePolicy,
    completion_logprobs,
    finish_fields,
    raise_if_refused,
    usage,
)
from sglang_minima.entrypoints.openai_types import CompletionBody
from sglang_minima.entrypoints.sse import EventStream, answering_errors, wait_for_reply
from sglang_minima.tokenization.inputs import check_token_ids
from sglang_minima.tokenization.manager import TokenizerManager
from sglang_minima.tokenization.state import Generation, RequestState

DEFAULT_COMPLETION_TOKENS = 16


@dataclass
class _TextChoice:
    """One choice, whole or as it streams."""

    index: int
    state: RequestState
    echo: str | None
    """The prompt's text, when it is to be repeated before the completion."""
    logprobs: bool
    _text: int = 0
    _tokens: int = 0
    _started: bool = False

    def whole(self) -> dict[str, Any]:
        """The finished choice."""
        logprobs = self._logprobs(0, True, 0)
        if self.logprobs and logprobs is None:
            logprobs = completion_logprobs([], [], 0)
        return self._choice((self.echo or "") + self.state.text, logprobs)

    def advance(self) -> list[dict[str, Any]]:
        """The chunks that bring a client up to date."""
        state, first = self.state, not self._started
        echo = (self.echo or "") if first else ""
        text = state.text[self._text :]
        offset = self._text + (0 if first else len(self.echo or ""))
        logprobs = self._logprobs(self._tokens, first, offset)
        self._started = True
        self._text = max(self._text, len(state.text))
        self._tokens = len(state.output_logprobs.tokens)
        if not (text or echo or logprobs or state.finish):
            return []
        return [self._choice(echo + text, logprobs)]

    def _choice(self, text: str, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        fields = finish_fields(self.state)
        return {"index": self.index, "text": text, "logprobs": logprobs, **fields}

    def _logprobs(self, first: int, with_prompt: bool, offset: int) -> dict[str, Any] | None:
        """Of the output tokens from `first` on; None when there are none."""
        if not self.logprobs:
            return None
        given, made = self.state.input_logprobs, self.state.output_logprobs
        tokens, top = made.tokens[first:], made.top[first:]
        if with_prompt and self.echo is not None:
            tokens, top = [*given.tokens, *tokens], [*given.top, *top]
        return completion_logprobs(tokens, top, offset) if tokens else None


def add_openai_routes(app: FastAPI, manager: TokenizerManager, model_name: str) -> None:
    """Adds the routes; `model_name` is what `/v1/models` lists."""
    started = int(time.time())

    @answering_errors(openai_error)
    async def completions(request: Request) -> Response:
        body = convert_body(await read_json(request), CompletionBody, manager.bounds)
        body.check()
        prompts = body.prompts()
        limit = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        sampling = body.sampling(limit, manager.limits.vocab_size)
        request_id = body.request_id("cmpl", uuid.uuid4().hex)
        request.state.request_id = request_id
        echoes: list[str | None] = []
        for prompt in prompts:
            echoes += [_prompt_text(manager, prompt) if body.echo else None] * sampling.n
        inputs = [
            body.prompt_input(
                prompt,
                request_id if len(prompts) == 1 else f"{request_id}_{index}",
                sampling,
                body.logprobs,
                bool(body.echo),
            )
            for index, prompt in enumerate(prompts)
        ]
        generation = await manager.submit(inputs, request_id)
        envelope = Envelope(request_id, body.model or model_name, "text_completion")
        choices = [
            _TextChoice(index, state, echo, body.logprobs is not None)
            for index, (state, echo) in enumerate(zip(generation.states, echoes, strict=True))
        ]
        if body.stream:
            events = _stream(envelope, UsagePolicy(body), generation, choices)
            return EventStream(events, generation, openai_error, openai_stream_error)
        await wait_for_reply(request, generation)
        for state in generation.states:
            raise_if_refused(state)
        reply = envelope.wrap([choice.whole() for choice in choices])
        return json_response({**reply, "usage": usage(generation.states)})

    def card() -> dict[str, Any]:
        # The second half is for Anthropic's clients.
        return {
            "id": model_name,
            "object": "model",
            "created": started,
            "owned_by": "sglang_minima",
            "root": model_name,
            "parent": None,
            "max_model_len": manager.limits.longest_sequence,
            "type": "model",
            "display_name": model_name,
            "created_at": datetime.fromtimestamp(started, UTC).isoformat(),
        }

    async def models(request: Request) -> Response:
        pages = {"has_more": False, "first_id": model_name, "last_id": model_name}
        return json_response({"object": "list", "data": [card()], **pages})

    async def model(request: Request) -> Response:
        name = request.path_params["name"]
        return json_response(card()) if name == model_name else model_not_found(name)

    app.add_route("/v1/completions", completions, ["POST"])
    app.add_route("/v1/models", models, ["GET"])
    app.add_route("/v1/models/{name:path}", model, ["GET"])


def _prompt_text(manager: TokenizerManager, prompt: str | list[int]) -> str:
    if isinstance(prompt, str):
        return prompt
    check_token_ids(prompt, manager.limits.vocab_size, "prompt")
    return manager.tokenizer.decode(prompt)


async def _stream(
    envelope: Envelope, policy: UsagePolicy, generation: Generation, choices: list[_TextChoice]
) -> AsyncIterator[dict[str, Any]]:
    """The chunks of one call; choices interleave."""
    async for index in generation.updates():
        state = generation.states[index]
        raise_if_refused(state)
        for choice in choices[index].advance():
            chunk = envelope.wrap([choice])
            policy.add_to(chunk, state)
            yield chunk
    if policy.at_end:
        yield {**envelope.wrap([]), "usage": usage(generation.states)}
