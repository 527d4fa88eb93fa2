"""`/v1/chat/completions`."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from sglang_minima.entrypoints.body import read_json
from sglang_minima.entrypoints.chat_messages import Message
from sglang_minima.entrypoints.chat_replies import ChatStream, chat_choice
from sglang_minima.entrypoints.chat_types import ChatBody
from sglang_minima.entrypoints.conversation import ChatRenderer, Conversation, RenderedChat
from sglang_minima.entrypoints.errors import json_response, openai_error, openai_stream_error
from sglang_minima.entrypoints.generate_input import convert_body
from sglang_minima.entrypoints.openai_replies import (
    Envelope,
    UsagePolicy,
    raise_if_refused,
    usage,
)
from sglang_minima.entrypoints.sse import EventStream, answering_errors, wait_for_reply
from sglang_minima.tokenization.manager import TokenizerManager
from sglang_minima.tokenization.state import Generation


async def render_chat(
    manager: TokenizerManager, renderer: ChatRenderer, chat: Conversation
) -> RenderedChat:
    """Renders a conversation without blocking the event loop for long ones."""

    def render() -> RenderedChat:
        manager.prompts.refuse_overlong("".join(_texts(chat.messages)))
        return renderer.render(chat)

    size = sum(len(str(message)) for message in chat.messages)
    return await manager.prompts.in_thread(size, render)


def _texts(messages: list[Message]) -> Iterator[str]:
    """The texts that a chat template shows for sure."""
    for message in messages:
        content = message.get("content")
        if isinstance(content, str):
            yield content
        elif isinstance(content, list):
            yield from (part["text"] for part in content if isinstance(part.get("text"), str))


def add_chat_route(
    app: FastAPI, manager: TokenizerManager, renderer: ChatRenderer, model_name: str
) -> None:
    """Adds the route; `model_name` is the name in replies to requests without one."""

    @answering_errors(openai_error)
    async def chat_completions(request: Request) -> Response:
        body = convert_body(await read_json(request), ChatBody, manager.bounds)
        body.check()
        vocab_size = manager.limits.vocab_size
        body.sampling(body.output_limit(), vocab_size)  # cheap, and tells before the work
        chat = await render_chat(manager, renderer, body.conversation(vocab_size))
        sampling = body.sampling(body.output_limit(), vocab_size, chat.structural_tag)
        sampling = chat.guide(sampling)
        request_id = body.request_id("chatcmpl", uuid.uuid4().hex)
        request.state.request_id = request_id
        top_logprobs = (body.top_logprobs or 0) if body.logprobs else None
        inputs = [body.prompt_input(chat.prompt, request_id, sampling, top_logprobs)]
        generation = await manager.submit(inputs, request_id)
        envelope = Envelope(request_id, body.model or model_name, "chat.completion")
        if body.stream:
            envelope.kind = "chat.completion.chunk"
            events = _stream(envelope, body, generation, renderer, chat)
            return EventStream(events, generation, openai_error, openai_stream_error)
        await wait_for_reply(request, generation)
        return json_response(_reply(envelope, body, generation, renderer, chat))

    app.add_route("/v1/chat/completions", chat_completions, ["POST"])


def _reply(
    envelope: Envelope,
    body: ChatBody,
    generation: Generation,
    renderer: ChatRenderer,
    chat: RenderedChat,
) -> dict[str, Any]:
    choices, reasoning = [], 0
    token_bytes = renderer.token_bytes if body.logprobs else None
    for index, state in enumerate(generation.states):
        raise_if_refused(state)
        choice, parsed = chat_choice(index, state, chat.make_parser(), token_bytes)
        choices.append(choice)
        reasoning += renderer.reasoning_tokens(parsed.reasoning, state.output_ids)
    return {**envelope.wrap(choices), "usage": usage(generation.states, reasoning)}


async def _stream(
    envelope: Envelope,
    body: ChatBody,
    generation: Generation,
    renderer: ChatRenderer,
    chat: RenderedChat,
) -> AsyncIterator[dict[str, Any]]:
    """The chunks of one call; choices interleave."""
    policy = UsagePolicy(body)
    token_bytes = renderer.token_bytes if body.logprobs else None
    streams = [
        ChatStream(index, state, chat.make_parser(), token_bytes)
        for index, state in enumerate(generation.states)
    ]

    def reasoning_tokens(stream: ChatStream) -> int:
        return renderer.reasoning_tokens(stream.parsed.reasoning, stream.state.output_ids)

    async for index in generation.updates():
        stream = streams[index]
        raise_if_refused(stream.state)
        for choice in stream.advance():
            chunk = envelope.wrap([choice])
            policy.add_to(chunk, stream.state, partial(reasoning_tokens, stream))
            yield chunk
    if policy.at_end:
        reasoning = sum(reasoning_tokens(stream) for stream in streams)
        yield {**envelope.wrap([]), "usage": usage(generation.states, reasoning)}
