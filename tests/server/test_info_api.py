"""Health, information, load and metrics routes on the fake scheduler."""

from __future__ import annotations

import re

import pytest
from server_kit import RunningServer


@pytest.mark.parametrize("path", ["/health", "/health_generate", "/ready", "/ping"])
def test_health(fake: RunningServer, path: str) -> None:
    assert fake.get(path).status_code == 200


@pytest.mark.parametrize("path", ["/model_info", "/get_model_info"])
def test_model_info(fake: RunningServer, path: str) -> None:
    body = fake.get(path).json()
    assert body["served_model_name"] == "fake-model"
    assert body["model_path"].startswith("/")
    assert body["model_type"] == "llama"
    assert body["architectures"] == ["LlamaForCausalLM"]
    assert body["is_generation"] is True
    assert body["tokenizer_path"]


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
def test_server_info(fake: RunningServer, path: str) -> None:
    body = fake.get(path).json()
    assert body["kv_profile"] == "minima"
    assert body["page_size"] == 16
    assert body["max_total_num_tokens"] == 400
    assert body["tp_size"] == body["dp_size"] == 1
    assert body["internal_states"][0]["cache"]["arena_bytes"] == 400
    assert body["cache"]["kinds"]["fp8"]["pages_used"] == 3
    assert body["version"]
    assert body["api_key"] is None


def test_check_cache(fake: RunningServer) -> None:
    reply = fake.get("/check_cache")
    assert (reply.status_code, reply.json()) == (200, {"ok": True})
    body = {"text": "abc", "sampling_params": {"max_new_tokens": 400}, "stream": True}
    with fake.generate({**body, "rid": "slow-check"}, stream=True) as stream:
        lines = stream.iter_lines()
        next(lines)
        reply = fake.get("/check_cache")
    assert reply.status_code == 500
    assert reply.json() == {"ok": False, "violation": "a page is held by a request"}


def test_flush_cache(fake: RunningServer) -> None:
    assert fake.get("/flush_cache").status_code == 200
    assert fake.post("/flush_cache", None).status_code == 200


def test_load(fake: RunningServer) -> None:
    [entry] = fake.get("/get_load").json()
    assert entry["dp_rank"] == 0
    assert entry["num_reqs"] == 0
    assert entry["num_tokens"] == 17
    assert fake.get("/v1/loads").json()["loads"][0] == entry


@pytest.mark.parametrize("path", ["/start_profile", "/stop_profile"])
def test_profile(fake: RunningServer, path: str) -> None:
    assert fake.get(path).status_code == 200
    assert fake.post(path, {}).status_code == 200


def test_metrics(fake: RunningServer) -> None:
    def value(name: str) -> float:
        text = fake.get("/metrics").text
        found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
        assert found, name
        return float(found[1])

    label = '{model_name="fake-model"}'
    names = ("num_requests_total", "prompt_tokens_total", "generation_tokens_total")
    before = [value(f"sglang:{name}{label}") for name in names]
    fake.generate({"text": "abc", "sampling_params": {"max_new_tokens": 5}})
    after = [value(f"sglang:{name}{label}") for name in names]
    assert [b - a for a, b in zip(before, after, strict=True)] == [1, 3, 5]
    assert value(f"sglang:time_to_first_token_seconds_count{label}") > 0
    assert value(f"sglang:inter_token_latency_seconds_count{label}") >= 4
    assert value(f"sglang:kv_evictable_tokens{label}") == 32
    assert value('sglang:cached_tokens_total{model_name="fake-model",source="fp8"}') > 0
    assert value('sglang:kv_bytes{kind="fp8",model_name="fake-model",state="used"}') == 300
    assert (
        value('sglang:routes{model_name="fake-model",operation="decode",reason="",route="torch"}')
        == 9
    )
    event = 'sglang:kv_events{event="retiered_pages",kinds="fp8->tq3",model_name="fake-model"}'
    assert value(event) == 4
