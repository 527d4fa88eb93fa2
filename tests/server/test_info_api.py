"""Health, information, load and metrics routes on the fake scheduler."""

from __future__ import annotations

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
    assert body["max_total_num_tokens"] == body["max_model_len"] == 400
    assert body["context_length"] == 512
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
    assert fake.get(path).status_code == 501
    assert fake.post(path, {}).json()["type"] == "NotImplementedError"
