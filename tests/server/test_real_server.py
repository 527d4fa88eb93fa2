"""The real server on the embedded model, from outside: what a user sees first."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
import requests
from server_kit import RunningServer
from tiny_kit import eventually

SYSTEM = "You are a careful assistant. " + "Answer briefly, and say so when you do not know. " * 12


@pytest.fixture(scope="module")
def client(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def generate(server: RunningServer, text: str, tokens: int, **body: Any) -> Any:
    sampling = {"temperature": 0, "max_new_tokens": tokens, **body.pop("sampling", {})}
    reply = server.generate({"text": text, "sampling_params": sampling, **body})
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_chat_answers(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model="any",
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        temperature=0,
        max_tokens=16,
    )
    assert "Paris" in reply.choices[0].message.content
    assert reply.choices[0].finish_reason == "stop"


def test_second_turn_comes_from_the_cache(client: openai.OpenAI, server: RunningServer) -> None:
    page = server.get("/server_info").json()["page_size"]
    messages: list[Any] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": "Name a primary colour."},
    ]
    first = client.chat.completions.create(
        model="any", messages=messages, temperature=0, max_tokens=8
    )
    messages += [
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "Name another."},
    ]
    second = client.chat.completions.create(
        model="any", messages=messages, temperature=0, max_tokens=8
    )
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached >= first.usage.prompt_tokens // page * page > 0


def test_stream_equals_the_whole_reply(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {
        "model": "any",
        "prompt": "Once upon a time",
        "temperature": 0,
        "max_tokens": 24,
    }
    whole = client.completions.create(**options).choices[0].text
    pieces = [chunk.choices[0].text for chunk in client.completions.create(stream=True, **options)]
    assert len(pieces) > 3
    assert "".join(pieces) == whole


def test_stop_string(server: RunningServer) -> None:
    whole = generate(server, "Once upon a time", 24)["text"]
    stop = whole[20:26]
    cut = generate(server, "Once upon a time", 24, sampling={"stop": stop})
    assert cut["text"] == whole[: whole.index(stop)]
    assert cut["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}


def test_stop_string_is_never_streamed(client: openai.OpenAI, server: RunningServer) -> None:
    whole = generate(server, "Once upon a time", 24)["text"]
    stop = whole[20:32]
    chunks = client.completions.create(
        model="any", prompt="Once upon a time", temperature=0, max_tokens=24, stop=stop, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole[: whole.index(stop)]


def test_select_has_a_value_for_every_token(server: RunningServer) -> None:
    prefix = "The capital of France is"
    start = generate(server, prefix, 0)["meta_info"]["prompt_tokens"] - 2
    replies = server.generate(
        {
            "text": [prefix + " Paris", prefix + " cheese"],
            "sampling_params": {"max_new_tokens": 0, "temperature": 0},
            "return_logprob": True,
            "return_text_in_logprobs": True,
            "logprob_start_len": start,
        }
    ).json()
    values = [reply["meta_info"]["input_token_logprobs"] for reply in replies]
    assert [entry[2] for entry in values[0]] == [" France", " is", " Paris"]
    assert all(entry[0] < 0 for row in values for entry in row)
    assert values[0][-1][0] > sum(entry[0] for entry in values[1][2:])


def test_seeded_samples_repeat(server: RunningServer) -> None:
    sampling = {"temperature": 1.0, "n": 3, "sampling_seed": 7}
    runs = [generate(server, "My favourite food is", 8, sampling=sampling) for _ in range(2)]
    texts = [[reply["text"] for reply in run] for run in runs]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 1


def test_disconnects_leave_nothing_behind(server: RunningServer) -> None:
    def leave(index: int) -> None:
        body = {
            "text": f"Story number {index}: once upon a time",
            "sampling_params": {"max_new_tokens": 2000, "ignore_eos": True},
            "stream": index % 2 == 0,
        }
        url = server.url + "/generate"
        patience = 60.0 if body["stream"] else 1.5
        try:
            with requests.post(url, json=body, stream=True, timeout=patience) as reply:
                next(reply.iter_lines())
        except requests.ReadTimeout:
            assert not body["stream"]

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(leave, range(8)))
    eventually(lambda: not server.get("/get_load").json()[0]["num_reqs"])
    assert server.post("/flush_cache", None).status_code == 200
    cache = server.get("/server_info").json()["cache"]
    assert cache["pages_used"] == 0


def test_every_byte_of_the_arena_is_accounted_for(server: RunningServer) -> None:
    generate(server, SYSTEM, 4)
    cache = server.get("/server_info").json()["cache"]
    parts = ("bytes_used", "bytes_free", "bytes_slab_waste")
    kinds = sum(kind[part] for kind in cache["kinds"].values() for part in parts)
    assert kinds + cache["free_slab_bytes"] + cache["unassigned_bytes"] == cache["arena_bytes"]
    text = server.get("/metrics").text
    assert "minima:arena_bytes{" in text
    assert 'state="used"' in text
