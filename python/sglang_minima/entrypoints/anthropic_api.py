"""`/v1/messages` and `/v1/messages/count_tokens`: Anthropic's Messages API."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from sglang_minima.entrypoints.anthropic_replies import MessageStream, Reply, whole_message
from sglang_minima.entrypoints.anthropic_types import CountBody, MessagesBody
from sglang_minima.entrypoints.body import read_json
from sglang_minima.entrypoints.chat_api import render_chat
from sglang_minima.entrypoints.conversation import ChatRenderer
from sglang_minima.entrypoints.errors import anthropic_error, json_response
from sglang_minima.entrypoints.generate_input import convert_body
from sglang_minima.entrypoints.openai_replies import raise_if_refused
from sglang_minima.entrypoints.sse import (
    NAMED_EVENTS,
    EventStream,
    answering_errors,
    wait_for_reply,
)
from sglang_minima.tokenization.inputs import PromptInput
from sglang_minima.tokenization.manager import TokenizerManager
from sglang_minima.tokenization.state import Generation


def add_anthropic_routes(
    app: FastAPI,
    manager: TokenizerManager,
    renderer: ChatRenderer,
    model_name: str,
    page_size: int,
) -> None:
    """Adds both routes.

    Args:
        app: the application.
        manager: takes the requests.
        renderer: of the model's chats.
        model_name: the name in replies to requests without one.
        page_size: tokens in a page: what is cached are whole pages.
    """
    vocab_size = manager.limits.vocab_size

    @answering_errors(anthropic_error)
    async def messages(request: Request) -> Response:
        body = convert_body(await read_json(request), MessagesBody, manager.bounds)
        body.sampling(vocab_size, None)  # cheap, and tells before the work
        chat = await render_chat(manager, renderer, body.conversation())
        sampling = body.sampling(vocab_size, chat.structural_tag)
        sampling = chat.guide(sampling)
        name = f"msg_{uuid.uuid4().hex[:24]}"
        request.state.request_id = name
        reply = Reply(name, body.model or model_name, body.max_tokens, body.marks_cache, page_size)
        generation = await manager.submit([PromptInput(chat.prompt, sampling, name)], name)
        parser = chat.make_parser()
        if body.stream:
            stream = MessageStream(reply, generation.states[0], parser)
            events = _events(generation, stream)
            return EventStream(events, generation, anthropic_error, anthropic_error, NAMED_EVENTS)
        await wait_for_reply(request, generation)
        raise_if_refused(generation.states[0])
        return json_response(whole_message(reply, generation.states[0], parser))

    @answering_errors(anthropic_error)
    async def count_tokens(request: Request) -> Response:
        body = convert_body(await read_json(request), CountBody, manager.bounds)
        chat = await render_chat(manager, renderer, body.conversation())
        return json_response({"input_tokens": len(chat.prompt)})

    app.add_route("/v1/messages", messages, ["POST"])
    app.add_route("/v1/messages/count_tokens", count_tokens, ["POST"])


async def _events(generation: Generation, stream: MessageStream) -> AsyncIterator[dict[str, Any]]:
    async for _ in generation.updates():
        raise_if_refused(stream.state)
        for event in stream.advance():
            yield event
