"""`/generate` with the fake scheduler: shapes, streams, batches, stops, log-probabilities."""

from __future__ import annotations

from conftest import RunningServer


def test_single_reply(fake: RunningServer) -> None:
    reply = fake.generate({"text": "abc", "sampling_params": {"max_new_tokens": 5}})
    assert reply.status_code == 200
    body = reply.json()
    assert body["text"] == "abcab"
    assert len(body["output_ids"]) == 5
    meta = body["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 5}
    assert meta["prompt_tokens"] == 3
    assert meta["completion_tokens"] == 5
    assert meta["cached_tokens"] == 2
    assert meta["cached_tokens_by_tier"] == {"fp8": 2}
    assert meta["e2e_latency"] > 0
