"""Every bad input gets a 4xx with one sentence, in the shape of its route, and the server lives."""

from __future__ import annotations

import json
from typing import Any

import pytest
import requests
from server_kit import RunningServer

TEXT = {"text": "abc"}
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
TOOL = {"type": "function", "function": {"name": "f"}}

BAD_GENERATE: list[tuple[dict[str, Any], str]] = [
    ({}, "text or input_ids"),
    ({"text": None}, "text or input_ids"),
    ({"text": "a", "input_ids": [1]}, "text or input_ids"),
    ({"text": 5}, "text"),
    ({"text": ["a", 5]}, "text"),
    ({"text": ""}, "empty"),
    ({"text": []}, "empty"),
    ({"text": ["a", ""]}, "empty"),
    ({"input_ids": []}, "empty"),
    ({"input_ids": [[1], []]}, "empty"),
    ({"input_ids": [1, [2]]}, "mixes"),
    ({"input_ids": ["a"]}, "input_ids"),
    ({"input_ids": [1.5]}, "input_ids"),
    ({"input_ids": [True]}, "input_ids"),
    ({"input_ids": [-1]}, "-1"),
    ({"input_ids": [258]}, "258"),
    ({"input_ids": [1 << 63]}, "input_ids"),
    ({"text": "a" * 512}, "512 tokens"),
    ({"text": "a" * 401}, "400 tokens"),
    ({"text": "a" * 2_000_000}, "at least"),
    ({"input_ids": [2] * 1_000_000}, "1000000"),
    ({**TEXT, "sampling_params": "hot"}, "sampling_params"),
    ({**TEXT, "sampling_params": {"heat": 1}}, "heat"),
    ({**TEXT, "sampling_params": {"temperature": "1"}}, "temperature"),
    ({**TEXT, "sampling_params": {"temperature": -1}}, "temperature"),
    ({**TEXT, "sampling_params": {"top_p": 0}}, "top_p"),
    ({**TEXT, "sampling_params": {"top_k": 0}}, "top_k"),
    ({**TEXT, "sampling_params": {"top_k": 1 << 70}}, "top_k"),
    ({**TEXT, "sampling_params": {"stream_interval": 1 << 70}}, "stream_interval"),
    ({**TEXT, "sampling_params": {"max_new_tokens": -1}}, "max_new_tokens"),
    ({**TEXT, "sampling_params": {"max_new_tokens": 1e18}}, "max_new_tokens"),
    ({**TEXT, "sampling_params": {"max_new_tokens": 1.5}}, "max_new_tokens"),
    ({**TEXT, "sampling_params": {"n": 0}}, "n must"),
    ({**TEXT, "sampling_params": {"n": 1_000_000}}, "n must"),
    ({**TEXT, "sampling_params": {"stop": [1]}}, "stop"),
    ({**TEXT, "sampling_params": {"stop": [""]}}, "stop"),
    ({**TEXT, "sampling_params": {"stop_regex": "("}}, "stop_regex"),
    ({**TEXT, "sampling_params": {"stop_regex": "[[:foo:]]"}}, "stop_regex"),
    ({**TEXT, "sampling_params": {"stop_regex": "((a{999}){999}){999}"}}, "stop_regex"),
    ({**TEXT, "sampling_params": {"stop_regex": "x" * 300}}, "stop_regex"),
    ({**TEXT, "sampling_params": {"stop_token_ids": [9999]}}, "stop_token_ids"),
    ({**TEXT, "sampling_params": {"logit_bias": {"x": 1}}}, "logit_bias"),
    ({**TEXT, "sampling_params": {"json_schema": "{"}}, "json_schema"),
    ({**TEXT, "sampling_params": {"json_schema": "[1]"}}, "json_schema"),
    ({**TEXT, "sampling_params": {"json_schema": 5}}, "json_schema"),
    ({**TEXT, "sampling_params": {"regex": ["a"]}}, "regex"),
    ({**TEXT, "sampling_params": {"regex": "a" * 300_000}}, "regex"),
    ({**TEXT, "sampling_params": {"regex": "a", "ebnf": 'root ::= "a"'}}, "at most one"),
    ({**TEXT, "sampling_params": {"structural_tag": {}}}, "structural_tag"),
    (
        {**TEXT, "sampling_params": {"structural_tag": '{"structures": [1], "triggers": []}'}},
        "begin",
    ),
    ({**TEXT, "sampling_params": {"grammar": ["regex", "a", True]}}, "grammar"),
    ({**TEXT, "sampling_params": [{}, {}]}, "sampling_params"),
    ({**TEXT, "temperature": 0}, "temperature belongs into sampling_params"),
    ({**TEXT, "max_new_tokens": 4, "sampling_params": {}}, "max_new_tokens belongs into"),
    ({**TEXT, "json_schema": "{}"}, "json_schema belongs into sampling_params"),
    ({"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params"),
    ({**TEXT, "rid": ""}, "rid"),
    ({**TEXT, "rid": 5}, "rid"),
    ({**TEXT, "rid": "x" * 300}, "rid"),
    ({"text": ["a", "b"], "rid": ["same", "same"]}, "rid"),
    ({"text": ["a", "b"], "rid": ["one"]}, "rid"),
    ({**TEXT, "stream": "yes"}, "stream"),
    ({**TEXT, "return_logprob": 1}, "return_logprob"),
    ({**TEXT, "logprob_start_len": -2}, "logprob_start_len"),
    ({**TEXT, "return_logprob": True, "logprob_start_len": 4}, "logprob_start_len"),
    ({**TEXT, "top_logprobs_num": 100_000}, "top_logprobs_num"),
    ({**TEXT, "token_ids_logprob": [100_000]}, "token_ids_logprob"),
    ({**TEXT, "token_ids_logprob": [1, [2]]}, "token_ids_logprob"),
    ({**TEXT, "token_ids_logprob": [1] * 257}, "token_ids_logprob"),
    ({**TEXT, "priority": 1 << 40}, "priority"),
    ({**TEXT, "extra_key": 5}, "extra_key"),
    ({**TEXT, "image_data": "aGk="}, "image_data"),
    ({**TEXT, "lora_path": "adapter"}, "lora_path"),
    ({**TEXT, "return_hidden_states": True}, "return_hidden_states"),
    ({"text": ["a"] * 5000}, "5000"),
]

BAD_CHAT: list[tuple[dict[str, Any], str]] = [
    ({}, "messages"),
    ({"messages": []}, "empty"),
    ({"messages": "hi"}, "messages"),
    ({"messages": ["hi"]}, "messages"),
    ({"messages": [{"content": "hi"}]}, "role"),
    ({"messages": [{"role": "wizard", "content": "hi"}]}, "role"),
    ({"messages": [{"role": "user"}]}, "content"),
    ({"messages": [{"role": "user", "content": 5}]}, "content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "text"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "text"),
    ({"messages": [{"role": "user", "content": "x" * 600}]}, "context"),
    ({**CHAT, "max_tokens": -1}, "max_tokens"),
    ({**CHAT, "max_tokens": "5"}, "max_tokens"),
    ({**CHAT, "temperature": -0.5}, "temperature"),
    ({**CHAT, "n": 1000}, "n must"),
    ({**CHAT, "top_logprobs": 5}, "logprobs"),
    ({**CHAT, "logprobs": True, "top_logprobs": 50}, "top_logprobs"),
    ({**CHAT, "tools": [{"type": "function"}]}, "tools[0]"),
    ({**CHAT, "tools": [{"type": "web_search"}]}, "tools[0]"),
    ({**CHAT, "tools": [{"type": "function", "function": {"name": ""}}]}, "name"),
    ({**CHAT, "tools": [{"type": "function", "function": {"name": "a.b"}}]}, "letters"),
    ({**CHAT, "tools": [{"type": "function", "function": {"name": "a" * 65}}]}, "1 to 64"),
    ({**CHAT, "tools": [TOOL, TOOL]}, "same name"),
    ({**CHAT, "tools": [TOOL], "tool_choice": "maybe"}, "tool_choice"),
    ({**CHAT, "tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice"),
    (
        {
            **CHAT,
            "tools": [TOOL],
            "tool_choice": {"type": "function", "function": {"name": "g"}},
        },
        "'g'",
    ),
    ({**CHAT, "tool_choice": "required"}, "tools is empty"),
    ({**CHAT, "tools": [], "tool_choice": "required"}, "tools is empty"),
    ({**CHAT, "functions": [{"name": "f"}]}, "use tools"),
    ({**CHAT, "modalities": ["text", "audio"]}, "modalities"),
    ({"messages": [{"role": "user", "content": "a", "tool_calls": []}]}, "tool_calls"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]}, "function"),
    ({"input_ids": [1, 900]}, "900"),
    ({"input_ids": [], "messages": []}, "empty"),
    ({**CHAT, "response_format": {"type": "xml"}}, "response_format"),
    ({**CHAT, "response_format": {"type": "json_schema"}}, "json_schema"),
    ({**CHAT, "response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "schema"),
    ({**CHAT, "response_format": {"type": "structural_tag"}}, "structural_tag"),
    ({**CHAT, "response_format": {"type": "json_object"}, "regex": "a+"}, "two grammars"),
    ({**CHAT, "regex": 5}, "regex"),
    ({**CHAT, "guided_regex": "(", "guided_choice": ["a"]}, "both guided_regex and guided_choice"),
    ({**CHAT, "guided_regex": "a", "regex": "a"}, "two grammars"),
    ({**CHAT, "guided_choice": "a"}, "guided_choice must be a list"),
    ({**CHAT, "structured_outputs": {"json": [1]}}, "structured_outputs.json: json_schema"),
    ({**CHAT, "structured_outputs": {"lark": "a"}}, "structured_outputs.lark is not supported"),
    ({**CHAT, "structured_outputs": "json"}, "structured_outputs must be an object"),
    ({**CHAT, "lora_path": "x"}, "lora_path"),
    ({**CHAT, "continue_final_message": True}, "assistant"),
    ({**CHAT, "chat_template_kwargs": {"tokenize": False}}, "template"),
    ({**CHAT, "seed": 1 << 70}, "seed"),
]

BAD_COMPLETION: list[tuple[dict[str, Any], str]] = [
    ({}, "prompt"),
    ({"prompt": ""}, "empty"),
    ({"prompt": []}, "empty"),
    ({"prompt": [1, "a"]}, "mixes"),
    ({"prompt": [[1], [999]]}, "999"),
    ({"prompt": [-1], "echo": True}, "-1"),
    ({"prompt": [[1], [1 << 40]], "echo": True}, "prompt"),
    ({"prompt": "a", "best_of": 3}, "best_of"),
    ({"prompt": "a", "suffix": "b"}, "suffix"),
    ({"prompt": "a", "logprobs": 100}, "logprobs"),
    ({"prompt": "a", "min_tokens": 20}, "min_tokens"),
    ({"prompt": "a", "stop": 5}, "stop"),
    ({"prompt": "a", "logit_bias": {"5": 1000}}, "logit_bias"),
    ({"prompt": "a" * 600}, "600 tokens"),
]

RAW: list[tuple[bytes, str, int]] = [
    (b"{", "application/json", 400),
    (b"", "application/json", 400),
    (b"[]", "application/json", 400),
    (b'"text"', "application/json", 400),
    (b"null", "application/json", 400),
    (b'{"text": "\xff\xfe"}', "application/json", 400),
    (b'{"text": "\\ud800"}', "application/json", 400),
    (b'{"text": NaN}', "application/json", 400),
    (b"[" * 100_000, "application/json", 400),
    (b'{"text": "a"}', "text/plain", 400),
    (b'{"text": "' + b"a" * (100 << 20) + b'"}', "application/json", 413),
]


def one_sentence(message: str) -> None:
    assert message
    assert len(message) < 400
    assert "\n" not in message
    assert "Traceback" not in message


@pytest.mark.parametrize(("body", "expected"), BAD_GENERATE, ids=range(len(BAD_GENERATE)))
def test_generate(fake: RunningServer, body: dict[str, Any], expected: str) -> None:
    reply = fake.generate(body)
    assert reply.status_code == 400, reply.text
    assert set(reply.json()) == {"error"}
    message = reply.json()["error"]["message"]
    one_sentence(message)
    assert expected in message


@pytest.mark.parametrize(("body", "expected"), BAD_CHAT, ids=range(len(BAD_CHAT)))
def test_chat(fake: RunningServer, body: dict[str, Any], expected: str) -> None:
    flat_error(fake.post("/v1/chat/completions", body), expected)


@pytest.mark.parametrize(("body", "expected"), BAD_COMPLETION, ids=range(len(BAD_COMPLETION)))
def test_completion(fake: RunningServer, body: dict[str, Any], expected: str) -> None:
    flat_error(fake.post("/v1/completions", body), expected)


def flat_error(reply: requests.Response, expected: str) -> None:
    assert reply.status_code == 400, reply.text
    body = reply.json()
    assert body["object"] == "error"
    assert body["code"] == 400
    assert body["type"] == "BadRequestError"
    assert body["param"] is None
    one_sentence(body["message"])
    assert expected in body["message"]


@pytest.mark.parametrize(("data", "content_type", "status"), RAW, ids=range(len(RAW)))
@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions"])
def test_raw_bodies(
    fake: RunningServer, path: str, data: bytes, content_type: str, status: int
) -> None:
    headers = {"Content-Type": content_type}
    reply = requests.post(fake.url + path, data=data, headers=headers, timeout=60)
    assert reply.status_code == status
    body = reply.json()
    one_sentence(body["error"]["message"] if path == "/generate" else body["message"])


def test_unknown_routes_and_methods(fake: RunningServer) -> None:
    reply = fake.get("/v1/nothing")
    assert (reply.status_code, reply.json()["code"]) == (404, 404)
    reply = fake.get("/generate")
    message = {"message": "/generate does not take GET"}
    assert (reply.status_code, reply.json()) == (405, {"error": message})
    reply = fake.get("/v1/messages")
    assert (reply.status_code, reply.json()["type"]) == (405, "error")
    reply = fake.post("/concate_and_append_request", {"src_rids": [], "dst_rid": "a"})
    assert reply.status_code == 501
    assert "enable_parallel_encoding" in reply.json()["message"]


def test_what_a_client_wrote_is_not_sent_back_whole(fake: RunningServer) -> None:
    long = "a" * 100_000
    reply = fake.generate({**TEXT, "sampling_params": {long: 1}})
    assert (reply.status_code, len(reply.text) < 1100) == (400, True)
    message = {"role": "user", "content": [{"type": long}]}
    reply = fake.post("/v1/messages", {"max_tokens": 1, "messages": [message]})
    assert (reply.status_code, len(reply.text) < 1100) == (400, True)
    assert "blocks of type" in reply.text


def test_streams_are_refused_before_they_start(fake: RunningServer) -> None:
    reply = fake.generate({"text": "", "stream": True})
    assert reply.status_code == 400
    assert json.loads(reply.text)["error"]["message"]


def test_server_lives_on(fake: RunningServer) -> None:
    reply = fake.generate({"text": "abc", "sampling_params": {"max_new_tokens": 3}})
    assert reply.json()["text"] == "abc"
    assert fake.get("/get_load").json()[0]["num_reqs"] == 0
