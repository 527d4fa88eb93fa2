"""Bodies of many megabytes are refused by their size, before anything is made of them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from server_kit import RunningServer
from starlette.requests import Request

from sglang_minima.entrypoints import body
from sglang_minima.entrypoints.errors import HttpError
from sglang_minima.entrypoints.generate_input import parse_generate
from sglang_minima.sampling_params import InvalidRequest
from sglang_minima.tokenization.inputs import Bounds

BOUNDS = Bounds(sequences=64, context=512)
LONG = "word " * 100_000


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("field", ["text", "input_ids"])
def test_prompts_are_counted_before_anything_is_made_of_them(field: str) -> None:
    prompts = ["a" if field == "text" else [1]] * 65
    wrong = {"temperature": -1}
    with pytest.raises(InvalidRequest, match="asks for 65 sequences, the server takes 64"):
        parse_generate({field: prompts, "sampling_params": wrong}, 100, BOUNDS)
    with pytest.raises(InvalidRequest, match="temperature"):
        parse_generate({field: prompts[:64], "sampling_params": wrong}, 100, BOUNDS)


@pytest.mark.parametrize("ids", [[1] * 512, [[1], [1] * 512]])
def test_ids_are_counted_before_they_are_read(ids: list[Any]) -> None:
    with pytest.raises(InvalidRequest, match="the prompt has 512 tokens"):
        parse_generate({"input_ids": ids}, 1, BOUNDS)


def test_completions_of_many_prompts(fake: RunningServer) -> None:
    reply = fake.post("/v1/completions", {"prompt": ["a"] * 100_000, "temperature": -1})
    assert reply.status_code == 400
    assert "asks for 100000 sequences" in reply.json()["message"]


@pytest.mark.parametrize(
    ("path", "values"),
    [
        ("/generate", {"text": "a", "lora_path": nested(600)}),
        ("/generate", {"text": "a", "image_data": nested(900)}),
        ("/v1/completions", {"prompt": "a", "lora_path": nested(600)}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a", "x": nested(600)}]},
        ),
        ("/tokenize", {"messages": [{"role": "user", "content": "a", "x": nested(600)}]}),
        (
            "/v1/messages",
            {
                "max_tokens": 1,
                "messages": [{"role": "user", "content": "a"}],
                "system": nested(600),
            },
        ),
    ],
)
def test_deep_bodies(fake: RunningServer, path: str, values: dict[str, Any]) -> None:
    reply = fake.post(path, {"model": "m", **values})
    assert reply.status_code == 400
    answer = reply.json()
    message = answer["message"] if "message" in answer else answer["error"]["message"]
    assert message == "the body is nested more than 100 levels deep"
    assert ("message" in answer) == (path not in ("/generate", "/v1/messages"))


def test_depth_is_counted_exactly(fake: RunningServer) -> None:
    for depth, refused in ((99, False), (100, True)):
        reply = fake.generate({"text": "a", "lora_path": nested(depth)})
        assert reply.status_code == 400
        assert ("nested" in reply.text) == refused


@pytest.mark.parametrize(
    ("path", "values"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": LONG}]}]},
        ),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "word " * 9000}] * 12}),
        ("/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": LONG}]}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": LONG}]}),
        ("/tokenize", {"messages": [{"role": "user", "content": LONG}]}),
        ("/dashboard/api/probe", {"text": LONG}),
    ],
)
def test_long_chats_are_judged_by_their_beginning(
    tiny: RunningServer, path: str, values: dict[str, Any]
) -> None:
    reply = tiny.post(path, {"model": "m", **values})
    assert reply.status_code == 400
    assert "the prompt has at least " in reply.text


def test_many_messages(tiny: RunningServer) -> None:
    messages = [{"role": "user", "content": "a"}] * 600
    for path in ("/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens", "/tokenize"):
        reply = tiny.post(path, {"model": "m", "max_tokens": 1, "messages": messages})
        assert reply.status_code == 400
        assert "messages has 600 entries" in reply.text


def test_tokenize_has_a_limit(tiny: RunningServer) -> None:
    most = 256 * 512
    assert tiny.post("/tokenize", {"prompt": "a" * most}).json()["count"] >= most
    for prompt in ("a" * (most + 1), ["a" * (most // 2), "a" * (most // 2 + 1)]):
        reply = tiny.post("/tokenize", {"prompt": prompt})
        assert reply.status_code == 400
        assert f"more than {most} characters" in reply.text


@pytest.mark.parametrize(
    "values",
    [
        {"sampling_params": {"stop": "a" * 4097}},
        {"sampling_params": {"stop": ["a", "b" * 4097]}},
        {"sampling_params": {"stop_token_ids": [1] * 1025}},
        {"extra_key": "a" * 1025},
        {"cache_salt": "a" * 1025},
    ],
)
def test_what_travels_with_every_sequence_is_short(
    fake: RunningServer, values: dict[str, Any]
) -> None:
    reply = fake.generate({"text": "a", **values})
    assert reply.status_code == 400, reply.text


def test_a_body_that_stops_coming_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "STALL_SECONDS", 0.05)
    parts = [b'{"text": ', b'"a", ', b'"n": 1']

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0.01 if parts else 3600)
        return {"type": "http.request", "body": parts.pop(0), "more_body": True}

    scope = {"type": "http", "method": "POST", "path": "/generate", "headers": []}
    with pytest.raises(HttpError, match=r"nothing of the body has come for 0\.05 seconds") as told:
        asyncio.run(body.read_json(Request(scope, receive)))
    assert told.value.status == 408
    assert parts == []
