"""The OpenAI routes: `/v1/completions`, `/v1/chat/completions` and `/v1/models`."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
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
    chat_logprobs,
    completion_logprobs,
    finish_fields,
    usage,
)
from sglang_minima.entrypoints.openai_types import ChatBody, CommonBody, CompletionBody
from sglang_minima.entrypoints.replies import abort_error
from sglang_minima.entrypoints.sse import EventStream, answering_errors, wait_for_reply
from sglang_minima.sampling_params import InvalidRequest
from sglang_minima.tokenization.inputs import PromptInput, check_token_ids
from sglang_minima.tokenization.manager import TokenizerManager
from sglang_minima.tokenization.state import Generation, RequestState

DEFAULT_COMPLETION_TOKENS = 16


@dataclass
class _Sent:
    """How much of a choice a stream has sent."""

    text: int = 0
    tokens: int = 0
    started: bool = False


@dataclass
class _Call:
    """What every reply or chunk of one call carries."""

    id: str
    model: str
    kind: str
    body: CommonBody
    echoes: list[str] = field(default_factory=list)
    """Prompt texts to repeat before the completion, one a choice (empty: none)."""
    logprobs: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    def envelope(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": self.kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


def add_openai_routes(app: FastAPI, manager: TokenizerManager, model_name: str) -> None:
    """Adds the `/v1` routes; `model_name` is what `/v1/models` lists."""
    started = int(time.time())

    async def respond(
        request: Request, call: _Call, inputs: list[PromptInput], chat: bool
    ) -> Response:
        generation = await manager.submit(inputs, call.id)
        if call.body.stream:
            call.kind = "chat.completion.chunk" if chat else call.kind
            events = _stream(call, generation, chat)
            return EventStream(events, generation, openai_error, openai_stream_error)
        await wait_for_reply(request, generation)
        for state in generation.states:
            _raise_if_refused(state)
        choice = _chat_choice if chat else _text_choice
        choices = [choice(call, index, state) for index, state in enumerate(generation.states)]
        return json_response({**call.envelope(choices), "usage": usage(generation.states)})

    @answering_errors(openai_error)
    async def completions(request: Request) -> Response:
        body = convert_body(await read_json(request), CompletionBody)
        body.check()
        prompts = body.prompts()
        limit = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        sampling = body.sampling(limit, manager.limits.vocab_size)
        request_id = body.request_id("cmpl", uuid.uuid4().hex)
        call = _Call(request_id, body.model or model_name, "text_completion", body)
        call.logprobs = body.logprobs is not None
        if body.echo:
            for prompt in prompts:
                call.echoes += [_prompt_text(manager, prompt)] * sampling.n
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
        return await respond(request, call, inputs, chat=False)

    @answering_errors(openai_error)
    async def chat_completions(request: Request) -> Response:
        body = convert_body(await read_json(request), ChatBody)
        body.check()
        messages = body.checked_messages()
        sampling = body.sampling(body.output_limit(), manager.limits.vocab_size)
        prompt = await manager.in_thread(
            sum(len(str(message["content"])) for message in messages),
            lambda: _apply_template(manager, body, messages),
        )
        request_id = body.request_id("chatcmpl", uuid.uuid4().hex)
        call = _Call(request_id, body.model or model_name, "chat.completion", body)
        call.logprobs = bool(body.logprobs)
        top_logprobs = (body.top_logprobs or 0) if body.logprobs else None
        inputs = [body.prompt_input(prompt, request_id, sampling, top_logprobs)]
        return await respond(request, call, inputs, chat=True)

    def card() -> dict[str, Any]:
        return {
            "id": model_name,
            "object": "model",
            "created": started,
            "owned_by": "sglang_minima",
            "root": model_name,
            "parent": None,
            "max_model_len": manager.limits.context_length,
        }

    async def models(request: Request) -> Response:
        return json_response({"object": "list", "data": [card()]})

    async def model(request: Request) -> Response:
        name = request.path_params["name"]
        return json_response(card()) if name == model_name else model_not_found(name)

    app.add_route("/v1/completions", completions, ["POST"])
    app.add_route("/v1/chat/completions", chat_completions, ["POST"])
    app.add_route("/v1/models", models, ["GET"])
    app.add_route("/v1/models/{name:path}", model, ["GET"])


def _prompt_text(manager: TokenizerManager, prompt: str | list[int]) -> str:
    if isinstance(prompt, str):
        return prompt
    check_token_ids(prompt, manager.limits.vocab_size, "prompt")
    return manager.tokenizer.decode(prompt)


def _apply_template(
    manager: TokenizerManager, body: ChatBody, messages: list[dict[str, Any]]
) -> list[int]:
    if not manager.tokenizer.has_chat_template:
        raise InvalidRequest("the model has no chat template; give one with --chat-template")
    continued = bool(body.continue_final_message)
    try:
        return manager.tokenizer.apply_chat_template(
            messages,
            add_generation_prompt=not continued,
            continue_final_message=continued,
            **(body.chat_template_kwargs or {}),
        )
    except (ValueError, TypeError) as error:
        raise InvalidRequest(f"the chat template refused the messages: {error}") from None


def _text_choice(call: _Call, index: int, state: RequestState) -> dict[str, Any]:
    echo = call.echoes[index] if call.echoes else ""
    choice = {"index": index, "text": echo + state.text, "logprobs": None, **finish_fields(state)}
    if call.logprobs:
        given, made = state.input_logprobs, state.output_logprobs
        tokens = [*given.tokens, *made.tokens] if echo else made.tokens
        top = [*given.top, *made.top] if echo else made.top
        choice["logprobs"] = completion_logprobs(tokens, top, 0)
    return choice


def _chat_choice(call: _Call, index: int, state: RequestState) -> dict[str, Any]:
    made = state.output_logprobs
    return {
        "index": index,
        "message": {
            "role": "assistant",
            "content": state.text,
            "reasoning_content": None,
            "tool_calls": None,
        },
        "logprobs": chat_logprobs(made.tokens, made.top) if call.logprobs else None,
        **finish_fields(state),
    }


async def _stream(call: _Call, generation: Generation, chat: bool) -> AsyncIterator[dict[str, Any]]:
    """The chunks of one call; choices interleave."""
    options = call.body.stream_options
    with_usage = options is not None and bool(options.include_usage)
    every_chunk = options is not None and bool(options.continuous_usage_stats)
    chunks_of = _chat_chunks if chat else _text_chunks
    sent = [_Sent() for _ in generation.states]
    async for index in generation.updates():
        state = generation.states[index]
        _raise_if_refused(state)
        for choice in chunks_of(call, index, state, sent[index]):
            chunk = call.envelope([choice])
            if every_chunk:
                chunk["usage"] = usage([state])
            elif with_usage:
                chunk["usage"] = None
            yield chunk
    if with_usage:
        yield {**call.envelope([]), "usage": usage(generation.states)}


def _text_chunks(call: _Call, index: int, state: RequestState, sent: _Sent) -> list[dict[str, Any]]:
    """The chunks that bring a client up to date with one choice."""
    logprobs: dict[str, Any] | None = None
    text = state.text[sent.text :]
    echo = call.echoes[index] if call.echoes and not sent.started else ""
    if call.logprobs:
        made = state.output_logprobs
        tokens, top = made.tokens[sent.tokens :], made.top[sent.tokens :]
        offset = sent.text + (len(call.echoes[index]) if call.echoes and not echo else 0)
        if echo:
            tokens = [*state.input_logprobs.tokens, *tokens]
            top = [*state.input_logprobs.top, *top]
        if tokens:
            logprobs = completion_logprobs(tokens, top, offset)
        sent.tokens = len(made.tokens)
    sent.started = True
    sent.text = max(sent.text, len(state.text))
    if not (text or echo or logprobs or state.finish):
        return []
    return [{"index": index, "text": echo + text, "logprobs": logprobs, **finish_fields(state)}]


def _chat_chunks(call: _Call, index: int, state: RequestState, sent: _Sent) -> list[dict[str, Any]]:
    """The chunks that bring a client up to date with one choice."""
    running = {"finish_reason": None, "matched_stop": None}
    chunks: list[dict[str, Any]] = []

    def add(delta: dict[str, Any], logprobs: Any, finish: dict[str, Any]) -> None:
        chunks.append({"index": index, "delta": delta, "logprobs": logprobs, **finish})

    if not sent.started:
        sent.started = True
        add({"role": "assistant", "content": ""}, None, running)
    text = state.text[sent.text :]
    sent.text = max(sent.text, len(state.text))
    logprobs = None
    if call.logprobs:
        made = state.output_logprobs
        if len(made.tokens) > sent.tokens:
            logprobs = chat_logprobs(made.tokens[sent.tokens :], made.top[sent.tokens :])
        sent.tokens = len(made.tokens)
    if text or logprobs:
        add({"content": text}, logprobs, running)
    if state.finish is not None:
        add({}, None, finish_fields(state))
    return chunks


def _raise_if_refused(state: RequestState) -> None:
    error = abort_error(state.finish)
    if error is not None:
        raise error
