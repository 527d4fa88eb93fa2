"""Grammars over HTTP: native fields, OpenAI fields, bad ones, and mixed batches."""

from __future__ import annotations

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import openai
import pytest
from server_kit import RunningServer
from tiny_kit import assert_quiet

pytest.importorskip("xgrammar")

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["kind", "tall"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
}


def sample(server: RunningServer, text: str, seed: int = 0, **sampling: Any) -> dict[str, Any]:
    settings = {"max_new_tokens": 256, "sampling_seed": seed, **sampling}
    reply = server.generate({"text": text, "sampling_params": settings})
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


@pytest.mark.parametrize("schema", [PERSON, json.dumps(PERSON)])
def test_json_schema(tiny: RunningServer, schema: Any) -> None:
    reply = sample(tiny, "A person:", json_schema=schema)
    assert reply["meta_info"]["finish_reason"]["type"] == "stop"
    jsonschema.validate(json.loads(reply["text"]), PERSON)


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        ({"regex": "[0-9]{3}-[a-f]+x"}, r"[0-9]{3}-[a-f]+x"),
        ({"regex": r"\"[\w\d]*\""}, r'"\w*"'),
        ({"ebnf": 'root ::= sum\nsum ::= num ("+" num){2}\nnum ::= [1-9]'}, r"[1-9]\+[1-9]\+[1-9]"),
        ({"structural_tag": {"format": {"type": "const_string", "value": "ok"}}}, "ok"),
    ],
)
def test_other_grammars(tiny: RunningServer, grammar: Any, pattern: str) -> None:
    for seed in range(3):
        reply = sample(tiny, "Text:", seed, **grammar)
        assert re.fullmatch(pattern, reply["text"], re.ASCII)
        assert reply["meta_info"]["finish_reason"]["type"] == "stop"


def test_structural_tag_of_the_older_form(tiny: RunningServer) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    tag = {
        "type": "structural_tag",
        "structures": [{"begin": "<f>", "schema": schema, "end": "</f>"}],
        "triggers": ["<f>"],
    }
    # The random model hardly ever writes the trigger: with it as the only likely text, it does.
    bias = {str(byte): 90 for byte in tiny_ids(tiny, "<f>")}
    reply = sample(tiny, "Call:", structural_tag=tag, logit_bias=bias, max_new_tokens=400)
    calls = re.findall(r"<f>(.*?)</f>", reply["text"], re.DOTALL)
    assert calls
    for call in calls:
        jsonschema.validate(json.loads(call), schema)


def tiny_ids(server: RunningServer, text: str) -> list[int]:
    reply = server.generate(
        {
            "text": text,
            "sampling_params": {"max_new_tokens": 0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
    )
    return [entry[1] for entry in reply.json()["meta_info"]["input_token_logprobs"]]


def test_openai_formats(tiny: RunningServer) -> None:
    client = openai.OpenAI(base_url=tiny.url + "/v1", api_key="none")
    common: dict[str, Any] = {"model": "any", "max_tokens": 300, "seed": 3}
    messages: Any = [{"role": "user", "content": "A person"}]
    formats: list[Any] = [
        {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON, "strict": True}},
        {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON}},
    ]
    for form in formats:
        reply = client.chat.completions.create(messages=messages, response_format=form, **common)
        assert reply.choices[0].finish_reason == "stop"
        jsonschema.validate(json.loads(reply.choices[0].message.content or ""), PERSON)
    text = client.completions.create(
        prompt="Code:", extra_body={"regex": "[A-Z]{3}[0-9]{4}"}, **common
    )
    assert re.fullmatch("[A-Z]{3}[0-9]{4}", text.choices[0].text)
    chunks = client.chat.completions.create(
        messages=messages, stream=True, extra_body={"ebnf": 'root ::= "a" [bc]{20} "d"'}, **common
    )
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert re.fullmatch("a[bc]{20}d", streamed)


def test_json_object(tiny: RunningServer) -> None:
    body = {
        "messages": [{"role": "user", "content": "hi"}],
        "response_format": {"type": "json_object"},
        "max_tokens": 200,
        "seed": 5,
        # Closing brackets end the random model's objects.
        "logit_bias": {str(token): 6 for token in tiny_ids(tiny, '}"]')},
    }
    reply = tiny.post("/v1/chat/completions", body).json()["choices"][0]
    assert reply["finish_reason"] == "stop"
    assert isinstance(json.loads(reply["message"]["content"]), dict)


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        ({"regex": "(a"}, "regex is invalid"),
        ({"regex": "(?=a)b"}, "not supported"),
        ({"ebnf": "root ::= nowhere"}, "not defined"),
        ({"ebnf": 'start ::= "a"'}, "root"),
        ({"ebnf": "root ::= root"}, "matches no text"),
        ({"json_schema": '{"type": "nope"}'}, "nope"),
        ({"json_schema": '{"$ref": "#/x"}'}, "json_schema is invalid"),
        ({"structural_tag": '{"format": {"type": "nope"}}'}, "structural_tag is invalid"),
        ({"ebnf": "root ::= " + "(" * 5000 + '"a"' + ")" * 5000}, "Nest"),
    ],
)
def test_bad_grammars_get_a_400(tiny: RunningServer, grammar: Any, said: str) -> None:
    for stream in (False, True):
        reply = tiny.generate({"text": "a", "sampling_params": grammar, "stream": stream})
        assert reply.status_code == 400
        assert said in reply.json()["error"]["message"]
    reply = tiny.post("/v1/completions", {"prompt": "a", **grammar})
    assert reply.status_code == 400
    assert said in reply.json()["message"]


def test_a_batch_with_one_bad_grammar_runs_nothing(tiny: RunningServer) -> None:
    before = tiny.get("/server_info").json()["statistics"]["requests_received"]
    sampling = [{"max_new_tokens": 2}, {"regex": "[", "max_new_tokens": 2}]
    assert tiny.generate({"text": ["a", "b"], "sampling_params": sampling}).status_code == 400
    assert tiny.get("/server_info").json()["statistics"]["requests_received"] == before


def test_free_requests_run_on_while_a_grammar_is_compiled(tiny: RunningServer) -> None:
    words = "|".join(f"{number:05d}{'xyz' * (number % 7)}" for number in range(0, 20000, 3))
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(sample, tiny, "Word:", 0, regex=words, max_new_tokens=64)
        latencies = []
        while not slow.done():
            started = time.monotonic()
            sample(tiny, "Free:", max_new_tokens=4)
            latencies.append(time.monotonic() - started)
        assert re.fullmatch(words, slow.result()["text"])
    assert len(latencies) > 2


def test_mixed_batches_leave_free_requests_alone(tiny: RunningServer) -> None:
    prompts = [f"Prompt number {index}" for index in range(12)]
    free = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
    alone = tiny.generate({"text": prompts, "sampling_params": free}).json()
    grammars = [{"regex": "[a-f]+x"}, {"json_schema": PERSON}, {"ebnf": 'root ::= "x"+'}]
    mixed: list[dict[str, Any]] = [
        free | (grammars[index // 2 % 3] if index % 2 else {}) for index in range(12)
    ]
    together = tiny.generate({"text": prompts, "sampling_params": mixed}).json()
    for index in range(12):
        same = together[index]["output_ids"] == alone[index]["output_ids"]
        assert same == (index % 2 == 0)


def test_samples_of_one_prompt_follow_the_grammar_apart(tiny: RunningServer) -> None:
    body = {
        "text": "Code:",
        "sampling_params": {"n": 4, "regex": "[a-z]{8}", "sampling_seed": 1},
        "return_logprob": True,
    }
    replies = tiny.generate(body).json()
    assert len({reply["text"] for reply in replies}) == 4
    for reply in replies:
        assert re.fullmatch("[a-z]{8}", reply["text"])
        made = reply["meta_info"]["output_token_logprobs"]
        assert len(made) == len(reply["output_ids"]) and all(entry[0] < 0 for entry in made)


def test_a_client_that_leaves_takes_nobody_with_it(tiny: RunningServer) -> None:
    import requests

    with pytest.raises(requests.ReadTimeout):
        requests.post(
            tiny.url + "/generate",
            json={"text": "a", "sampling_params": {"ebnf": 'root ::= "a"* "b" ' + "x" * 5000}},
            timeout=(10, 0.01),
        )
    assert re.fullmatch("ab", sample(tiny, "a", regex="ab")["text"])
    assert_quiet(tiny)
