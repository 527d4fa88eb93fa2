"""The OpenAI routes, driven by the real `openai` client, on the fake scheduler."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from server_kit import RunningServer

TEMPLATED = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def client(fake: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=fake.url + "/v1", api_key="none", max_retries=0)


def chat(client: openai.OpenAI, **options: Any) -> Any:
    # The prompt holds <|im_end|>, which the fake scheduler repeats: it must not end the answer.
    extra = {"ignore_eos": True, "skip_special_tokens": False, **options.pop("extra_body", {})}
    options = {"messages": USER, "max_tokens": 12, **options}
    return client.chat.completions.create(model="any", extra_body=extra, **options)


def test_chat(client: openai.OpenAI) -> None:
    reply = chat(client)
    choice = reply.choices[0]
    assert choice.message.role == "assistant"
    assert choice.message.content == TEMPLATED[: len(TEMPLATED) - len("ssistant\n")]
    assert choice.finish_reason == "length"
    assert choice.logprobs is None
    assert reply.id.startswith("chatcmpl-")
    assert reply.model == "any"
    assert reply.object == "chat.completion"
    usage = reply.usage
    # One token a byte, and one for each of the three special tokens.
    assert usage.prompt_tokens == len(TEMPLATED) - 2 * len("<|im_start|>") - len("<|im_end|>") + 3
    assert usage.completion_tokens == 12
    assert usage.total_tokens == usage.prompt_tokens + 12
    assert usage.prompt_tokens_details.cached_tokens == 2


def test_chat_parts_and_roles(fake: RunningServer) -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": None},
        {"role": "tool", "content": "4", "tool_call_id": "x"},
    ]
    body = {
        "model": None,
        "messages": messages,
        "max_tokens": 200,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "stop": "<|im_start|>assistant\n<|im_start|>",
        "stream_options": None,
        "tools": None,
        "tool_choice": None,
        "response_format": {"type": "text"},
        "logprobs": False,
        "top_logprobs": None,
        "separate_reasoning": True,
        "user": "someone",
    }
    reply = fake.post("/v1/chat/completions", body).json()
    assert reply["choices"][0]["message"]["content"] == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\n<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n<|im_start|>"
    )
    assert reply["model"] == "fake-model"
    assert reply["choices"][0]["matched_stop"] == "<|im_start|>assistant\n<|im_start|>"


def test_chat_continues_the_final_message(client: openai.OpenAI) -> None:
    messages = [*USER, {"role": "assistant", "content": "Well,"}]
    extra = {"continue_final_message": True, "no_stop_trim": True}
    reply = chat(
        client, messages=messages, max_tokens=90, stop="Well,<|im_start|>", extra_body=extra
    )
    assert reply.choices[0].message.content.endswith("<|im_start|>assistant\nWell,<|im_start|>")


def test_chat_output_fills_the_context_by_default(client: openai.OpenAI) -> None:
    reply = chat(client, max_tokens=None)
    assert reply.usage.total_tokens == 512


def test_max_completion_tokens(client: openai.OpenAI) -> None:
    reply = chat(client, max_tokens=None, max_completion_tokens=3)
    assert reply.usage.completion_tokens == 3


def test_chat_stream(client: openai.OpenAI) -> None:
    chunks = list(
        chat(client, stream=True, n=2, stream_options={"include_usage": True}, max_tokens=6)
    )
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 12
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    for index in (0, 1):
        mine = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == index]
        assert mine[0].delta.role == "assistant"
        assert mine[0].delta.content == ""
        assert all(choice.delta.role is None for choice in mine[1:])
        assert mine[-1].finish_reason == "length"
        assert all(choice.finish_reason is None for choice in mine[:-1])
        text = "".join(choice.delta.content or "" for choice in mine)
        assert text == ("<|im_start|>user\n", "user\nh")[index]


def test_chat_logprobs(client: openai.OpenAI) -> None:
    extra = {"min_tokens": 1}
    reply = chat(client, logprobs=True, top_logprobs=2, max_tokens=3, extra_body=extra)
    content = reply.choices[0].logprobs.content
    assert [entry.token for entry in content] == ["<|im_start|>", "u", "s"]
    assert [len(entry.top_logprobs) for entry in content] == [2, 2, 2]
    assert bytes(content[1].bytes) == b"u"
    chunks = list(chat(client, logprobs=True, max_tokens=3, stream=True))
    seen = [
        entry.token
        for chunk in chunks
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    assert seen == ["<|im_start|>", "u", "s"]


def test_completion(client: openai.OpenAI) -> None:
    reply = client.completions.create(model="any", prompt="abc")
    assert reply.object == "text_completion"
    assert reply.id.startswith("cmpl-")
    assert reply.choices[0].text == "abc" * 5 + "a"
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage.prompt_tokens_details.cached_tokens == 2


def test_completion_prompt_forms(client: openai.OpenAI) -> None:
    texts = client.completions.create(model="m", prompt=["abc", "xyz"], max_tokens=2, n=2)
    assert [choice.index for choice in texts.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in texts.choices] == ["ab", "bc", "xy", "yz"]
    assert texts.usage.prompt_tokens == 6
    assert texts.usage.completion_tokens == 8
    ids = client.completions.create(model="m", prompt=[2, 3], max_tokens=2)
    assert ids.choices[0].text == '!"'
    batch = client.completions.create(model="m", prompt=[[2, 3], [4]], max_tokens=1)
    assert [choice.text for choice in batch.choices] == ["!", "#"]


def test_completion_echo_and_logprobs(client: openai.OpenAI) -> None:
    reply = client.completions.create(model="m", prompt="abc", max_tokens=2, echo=True, logprobs=2)
    choice = reply.choices[0]
    assert choice.text == "abcab"
    assert choice.logprobs.tokens == ["a", "b", "c", "a", "b"]
    assert choice.logprobs.text_offset == [0, 1, 2, 3, 4]
    assert choice.logprobs.token_logprobs[0] is None
    assert choice.logprobs.top_logprobs[0] is None
    for token, row in zip(
        choice.logprobs.tokens[1:], choice.logprobs.top_logprobs[1:], strict=True
    ):
        assert len(row) == 2
        assert token in row
    only = client.completions.create(model="m", prompt="abc", max_tokens=0, echo=True, logprobs=0)
    assert only.choices[0].text == "abc"
    assert only.choices[0].logprobs.tokens == ["a", "b", "c"]
    # The token itself is always among those told.
    assert [list(row or {}) for row in only.choices[0].logprobs.top_logprobs] == [[], ["b"], ["c"]]


@pytest.mark.parametrize("echo", [False, True])
def test_completion_stream(client: openai.OpenAI, echo: bool) -> None:
    chunks = list(
        client.completions.create(
            model="m", prompt="abc", max_tokens=4, stream=True, logprobs=1, echo=echo
        )
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == ("abc" if echo else "") + "abca"
    assert chunks[-1].choices[0].finish_reason == "length"
    tokens, offsets = [], []
    for chunk in chunks:
        if chunk.choices[0].logprobs:
            tokens += chunk.choices[0].logprobs.tokens
            offsets += chunk.choices[0].logprobs.text_offset
    assert tokens == list("abcabca" if echo else "abca")
    assert offsets == list(range(len(tokens)))


def test_stop_and_matched_stop(client: openai.OpenAI) -> None:
    reply = client.completions.create(model="m", prompt="one, two; ", stop=[";"], max_tokens=40)
    assert reply.choices[0].text == "one, two"
    assert reply.choices[0].finish_reason == "stop"
    assert reply.choices[0].matched_stop == ";"  # type: ignore[attr-defined]


def test_rid_is_the_id(fake: RunningServer) -> None:
    body = {"prompt": "abc", "rid": "mine", "max_tokens": 1}
    assert fake.post("/v1/completions", body).json()["id"] == "mine"


def test_refused(client: openai.OpenAI) -> None:
    for stream in (False, True):
        with pytest.raises(openai.InternalServerError) as caught:
            rid = {"rid": f"refuse-chat-{stream}"}
            client.completions.create(model="m", prompt="abc", stream=stream, extra_body=rid)
        assert caught.value.status_code == 503
        assert "no room" in str(caught.value)


def test_models(client: openai.OpenAI, fake: RunningServer) -> None:
    assert [model.id for model in client.models.list()] == ["fake-model"]
    assert client.models.retrieve("fake-model").id == "fake-model"
    assert fake.get("/v1/models").json()["data"][0]["max_model_len"] == 400
    missing = fake.get("/v1/models/other/name")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"
