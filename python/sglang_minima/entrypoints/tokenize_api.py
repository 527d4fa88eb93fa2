"""`/tokenize` and `/detokenize`: what a prompt becomes, and back."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from sglang_minima.entrypoints.body import read_json
from sglang_minima.entrypoints.chat_api import render_chat
from sglang_minima.entrypoints.chat_types import ChatBody
from sglang_minima.entrypoints.conversation import ChatRenderer
from sglang_minima.entrypoints.errors import json_response, openai_error
from sglang_minima.entrypoints.generate_input import convert_body, token_prompts
from sglang_minima.entrypoints.sse import answering_errors
from sglang_minima.sampling_params import InvalidRequest
from sglang_minima.tokenization.inputs import check_token_ids
from sglang_minima.tokenization.manager import TokenizerManager

_CHARACTERS_PER_TOKEN = 256
"""A call may have this often the context in characters: more would keep everybody's prompts waiting
for the tokenizer."""


class TokenizeBody(ChatBody, kw_only=True):
    """A text, a list of texts, or the messages and tools of a chat."""

    prompt: str | list[str] | None = None
    add_special_tokens: bool | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """Token ids, or lists of them."""

    tokens: list[int | list[int]]
    skip_special_tokens: bool | None = None


def add_tokenize_routes(app: FastAPI, manager: TokenizerManager, renderer: ChatRenderer) -> None:
    """Adds both routes, with and without the prefix `/v1`.

    `/tokenize` answers {"tokens", "count", "max_model_len"}; for a list of texts, lists of tokens
    and counts. `/detokenize` answers {"text"}: special tokens are shown unless
    `skip_special_tokens` is true.
    """
    tokenizer, limits = manager.tokenizer, manager.limits

    def encode(text: str, add_special_tokens: bool) -> list[int]:
        try:
            return tokenizer.encode(text, add_special_tokens)
        except ValueError as error:
            raise InvalidRequest(str(error)) from None

    @answering_errors(openai_error)
    async def tokenize(request: Request) -> Response:
        body = convert_body(await read_json(request), TokenizeBody, manager.bounds)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequest("give either prompt or messages")
        tokens: list[Any]
        count: int | list[int]
        if body.prompt is None:
            chat = await render_chat(manager, renderer, body.conversation(limits.vocab_size))
            tokens, count = chat.prompt, len(chat.prompt)
        else:
            texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
            special = body.add_special_tokens is not False
            most = _CHARACTERS_PER_TOKEN * limits.context_length
            if sum(map(len, texts)) > most:
                raise InvalidRequest(f"prompt has more than {most} characters")
            rows = await manager.prompts.in_thread(
                sum(map(len, texts)), lambda: [encode(text, special) for text in texts]
            )
            tokens, count = rows, [len(row) for row in rows]
            if isinstance(body.prompt, str):
                tokens, count = rows[0], len(rows[0])
        return json_response(
            {"tokens": tokens, "count": count, "max_model_len": limits.longest_sequence}
        )

    @answering_errors(openai_error)
    async def detokenize(request: Request) -> Response:
        body = convert_body(await read_json(request), DetokenizeBody)
        prompts, batch = token_prompts(body.tokens, "tokens")
        for ids in prompts:
            check_token_ids(ids, limits.vocab_size, "tokens")
        texts = await manager.prompts.in_thread(
            sum(map(len, prompts)),
            lambda: [tokenizer.decode(ids, body.skip_special_tokens is True) for ids in prompts],
        )
        return json_response({"text": texts if batch else texts[0]})

    for prefix in ("", "/v1"):
        app.add_route(f"{prefix}/tokenize", tokenize, ["POST"])
        app.add_route(f"{prefix}/detokenize", detokenize, ["POST"])
