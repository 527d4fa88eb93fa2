"""`/generate` with the fake scheduler: shapes, streams, batches, stops, log-probabilities.

The byte-level tokenizer makes one token a byte; the scheduler repeats the prompt's tokens.
"""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
import requests
from server_kit import RunningServer


def ask(fake: RunningServer, **body: Any) -> Any:
    reply = fake.generate(body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def events(reply: requests.Response) -> list[dict[str, Any]]:
    """The objects of an event stream, which must end with [DONE]."""
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/event-stream")
    blocks = reply.content.decode().split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]


def test_single_reply(fake: RunningServer) -> None:
    body = ask(fake, text="abc", sampling_params={"max_new_tokens": 5})
    assert body["text"] == "abcab"
    assert len(body["output_ids"]) == 5
    meta = body["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 5}
    assert meta["prompt_tokens"] == 3
    assert meta["completion_tokens"] == 5
    assert meta["cached_tokens"] == 2
    assert meta["cached_tokens_by_tier"] == {"fp8": 2}
    assert meta["reasoning_tokens"] == 0
    assert meta["weight_version"] == "default"
    assert meta["num_retractions"] == 0
    assert meta["e2e_latency"] > 0
    assert meta["id"]
    assert "input_token_logprobs" not in meta


def test_put_and_charset(fake: RunningServer) -> None:
    data = json.dumps({"text": "ab", "sampling_params": {"max_new_tokens": 2}})
    headers = {"Content-Type": "application/json; charset=utf-8"}
    reply = requests.put(fake.url + "/generate", data=data, headers=headers, timeout=60)
    assert reply.json()["text"] == "ab"


def test_input_ids_and_unknown_keys(fake: RunningServer) -> None:
    body = ask(
        fake,
        input_ids=[40, 41],
        sampling_params={"max_new_tokens": 3, "regex": None, "stop": [], "stop_regex": []},
        background=False,
        return_bytes=False,
        log_metrics=True,
        image_data=None,
        lora_path=[None],
    )
    assert body["output_ids"] == [40, 41, 40]


def test_prefill_only(fake: RunningServer) -> None:
    body = ask(fake, text="abc", sampling_params={"max_new_tokens": 0})
    assert body["text"] == ""
    assert body["output_ids"] == []
    assert body["meta_info"]["finish_reason"] == {"type": "length", "length": 0}


def test_output_is_clipped_to_the_context(fake: RunningServer) -> None:
    body = ask(fake, text="abcd" * 90, sampling_params={"max_new_tokens": 1000})
    assert body["meta_info"]["completion_tokens"] == 512 - 360


def test_batch_in_order(fake: RunningServer) -> None:
    body = ask(
        fake,
        text=["abc", "xyz"],
        sampling_params=[{"max_new_tokens": 9}, {"max_new_tokens": 2}],
        rid="batch",
    )
    assert [entry["text"] for entry in body] == ["abcabcabc", "xy"]
    assert [entry["meta_info"]["id"] for entry in body] == ["batch_0", "batch_1"]


def test_batch_of_one_is_a_list(fake: RunningServer) -> None:
    body = ask(fake, input_ids=[[40, 41]], sampling_params={"max_new_tokens": 1})
    assert isinstance(body, list)
    assert len(body) == 1


def test_samples_are_adjacent(fake: RunningServer) -> None:
    body = ask(fake, text=["abc", "xyz"], sampling_params={"max_new_tokens": 3, "n": 2})
    assert [entry["text"] for entry in body] == ["abc", "bca", "xyz", "yzx"]


def test_several_samples_of_one_prompt(fake: RunningServer) -> None:
    body = ask(fake, text="abc", sampling_params={"max_new_tokens": 2, "n": 3}, rid="many")
    assert [entry["text"] for entry in body] == ["ab", "bc", "ca"]
    assert [entry["meta_info"]["id"] for entry in body] == ["many_0", "many_1", "many_2"]


def test_stream_is_cumulative(fake: RunningServer) -> None:
    body = {"text": "abc", "sampling_params": {"max_new_tokens": 6}, "stream": True}
    seen = events(fake.generate(body))
    texts = [entry["text"] for entry in seen]
    assert texts[-1] == "abcabc"
    assert len(texts) > 2
    assert all(after.startswith(before) for before, after in itertools.pairwise(texts))
    assert [entry["meta_info"]["finish_reason"] for entry in seen[:-1]] == [None] * (len(seen) - 1)
    assert seen[-1]["meta_info"]["finish_reason"]["type"] == "length"
    assert len(seen[-1]["output_ids"]) == 6
    assert "index" not in seen[0]


def test_batch_stream_has_index(fake: RunningServer) -> None:
    body = {
        "text": ["abc", "xyz"],
        "sampling_params": {"max_new_tokens": 4, "n": 2},
        "stream": True,
    }
    final = {entry["index"]: entry["text"] for entry in events(fake.generate(body))}
    assert final == {0: "abca", 1: "bcab", 2: "xyzx", 3: "yzxy"}


@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_is_cut(fake: RunningServer, stream: bool) -> None:
    sampling = {"max_new_tokens": 50, "stop": ["world"]}
    body = {"text": "hello world ", "sampling_params": sampling, "stream": stream}
    reply = fake.generate(body)
    seen = events(reply) if stream else [reply.json()]
    assert seen[-1]["text"] == "hello "
    assert seen[-1]["meta_info"]["finish_reason"] == {"type": "stop", "matched": "world"}
    assert not any("w" in entry["text"] for entry in seen)


def test_stop_prefix_is_released(fake: RunningServer) -> None:
    sampling = {"max_new_tokens": 6, "stop": "cab!"}
    body = {"text": "abc", "sampling_params": sampling, "stream": True}
    assert events(fake.generate(body))[-1]["text"] == "abcabc"


def test_no_stop_trim(fake: RunningServer) -> None:
    sampling = {"max_new_tokens": 50, "stop": "world", "no_stop_trim": True}
    assert ask(fake, text="hello world ", sampling_params=sampling)["text"] == "hello world"


def test_eos_is_not_text(fake: RunningServer) -> None:
    sampling = {"max_new_tokens": 50, "skip_special_tokens": False}
    body = ask(fake, text="ab<|im_end|>", sampling_params=sampling)
    assert body["text"] == "ab"
    assert body["output_ids"][-1] == 1
    assert body["meta_info"]["finish_reason"] == {"type": "stop", "matched": 1}
    sampling["ignore_eos"] = True
    sampling["max_new_tokens"] = 4
    body = ask(fake, text="ab<|im_end|>", sampling_params=sampling)
    assert body["text"] == "ab<|im_end|>a"


def test_characters_are_never_halved(fake: RunningServer) -> None:
    body = {"text": "é中🙂", "sampling_params": {"max_new_tokens": 9}, "stream": True}
    seen = events(fake.generate(body))
    assert seen[-1]["text"] == "é中🙂"
    assert not any("�" in entry["text"] for entry in seen)


def test_logprobs(fake: RunningServer) -> None:
    body = ask(
        fake,
        text="abc",
        sampling_params={"max_new_tokens": 2},
        return_logprob=True,
        logprob_start_len=1,
        top_logprobs_num=2,
        token_ids_logprob=[5, 6],
        return_text_in_logprobs=True,
    )
    meta, ids = body["meta_info"], body["output_ids"]
    given, made = meta["input_token_logprobs"], meta["output_token_logprobs"]
    assert [entry[2] for entry in given] == ["b", "c"]
    # Entry 0 has a real value when something precedes it.
    assert all(isinstance(entry[0], float) for entry in given)
    assert [entry[1:] for entry in made] == [[ids[0], "a"], [ids[1], "b"]]
    assert meta["output_token_logprobs_length"] == 2
    assert [len(row) for row in meta["output_top_logprobs"]] == [2, 2]
    assert [len(row) for row in meta["input_top_logprobs"]] == [2, 2]
    assert [[entry[1] for entry in row] for row in meta["output_token_ids_logprobs"]] == [
        [5, 6],
        [5, 6],
    ]


def test_logprobs_default_to_the_output(fake: RunningServer) -> None:
    body = ask(fake, text="abc", sampling_params={"max_new_tokens": 1}, return_logprob=True)
    meta = body["meta_info"]
    assert meta["input_token_logprobs"] == []
    assert meta["output_token_logprobs"][0][2] is None
    assert "output_top_logprobs" not in meta


def test_logprobs_of_a_prompt_without_output(fake: RunningServer) -> None:
    body = ask(fake, text="abc", sampling_params={"max_new_tokens": 0}, return_logprob=True)
    given = body["meta_info"]["input_token_logprobs"]
    assert len(given) == 3
    assert given[0][0] is None
    assert body["meta_info"]["output_token_logprobs"] == []


def test_select_of_the_frontend(fake: RunningServer) -> None:
    prefix = ask(fake, text="pick: ", sampling_params={"max_new_tokens": 0})
    start = max(prefix["meta_info"]["prompt_tokens"] - 2, 0)
    replies = ask(
        fake,
        text=["pick: yes", "pick: no"],
        sampling_params={"max_new_tokens": 0, "temperature": 0},
        return_logprob=True,
        return_text_in_logprobs=True,
        logprob_start_len=start,
    )
    texts = [
        "".join(entry[2] for entry in reply["meta_info"]["input_token_logprobs"])
        for reply in replies
    ]
    assert texts == [": yes", ": no"]


def test_namespaces_do_not_collide(fake: RunningServer) -> None:
    sampling = {"max_new_tokens": 1}
    keys = [
        {},
        {"extra_key": "a"},
        {"cache_salt": "a"},
        {"extra_key": "a", "cache_salt": "b"},
        {"extra_key": '["a","b"]'},
    ]
    for index, key in enumerate(keys):
        ask(fake, text="abc", sampling_params=sampling, rid=f"salt{index}", **key)
    seen = fake.get("/server_info").json()["requests"]
    salts = {entry["rid"]: entry["salt"] for entry in seen if entry["rid"].startswith("salt")}
    assert salts["salt0"] is None
    assert len(set(salts.values())) == len(keys)


def test_refused_request_has_its_status(fake: RunningServer) -> None:
    for stream in (False, True):
        reply = fake.generate({"text": "abc", "rid": f"refuse{stream}", "stream": stream})
        assert reply.status_code == 503
        assert reply.json() == {"error": {"message": "no room"}}
