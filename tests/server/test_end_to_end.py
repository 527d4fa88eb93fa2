"""The real server's promise: what has been read once comes from sealed pages, and is shown.

Conversations, prompts shared by clients that arrive together, tiers, accounting, tenants.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_kit import RunningServer

SENTENCES = (
    "Pages of a prefix are sealed when they are full and never change after that.",
    "A request that leaves a page in its middle copies it to a page of its own.",
    "What no request needs stays cached until somebody else needs the room.",
    "Old pages are packed into three bits a value, and recent ones into eight.",
)


def essay(topic: str, sentences: int) -> str:
    """A text whose beginning no other test has."""
    body = " ".join(SENTENCES[i % len(SENTENCES)] for i in range(sentences))
    return f"Essay about {topic}. {body}"


def generate(server: RunningServer, text: str, tokens: int = 2, **body: Any) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    reply = server.generate({"text": text, "sampling_params": sampling, **body})
    assert reply.status_code == 200, reply.text
    return dict(reply.json()["meta_info"])


def info(server: RunningServer) -> dict[str, Any]:
    return dict(server.get("/server_info").json())


def settled(server: RunningServer) -> dict[str, Any]:
    """The information once no request runs and no page waits for its conversion."""
    deadline = time.monotonic() + 60
    while True:
        now = info(server)
        if not now["num_running_reqs"] and not now["cache"]["retier_backlog"]:
            return now
        assert time.monotonic() < deadline, now["cache"]
        time.sleep(0.05)


def samples(server: RunningServer, name: str) -> dict[tuple[str, ...], float]:
    """Values of one metric by its label values, without the model's name."""
    families = text_string_to_metric_families(server.get("/metrics").text)
    return {
        tuple(value for label, value in sample.labels.items() if label != "model_name"): (
            sample.value
        )
        for family in families
        for sample in family.samples
        if sample.name == name
    }


@pytest.fixture(scope="module")
def client(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=120)


def test_every_turn_reuses_the_turns_before_it(
    client: openai.OpenAI, server: RunningServer
) -> None:
    page = info(server)["page_size"]
    messages: list[Any] = [{"role": "system", "content": essay("conversations", 4)}]
    usages = []
    for question in ("What is sealed?", "What is copied?", "What is packed?"):
        messages.append({"role": "user", "content": question})
        reply = client.chat.completions.create(
            model="any", messages=messages, temperature=0, max_tokens=12
        )
        usages.append(reply.usage)
        messages.append({"role": "assistant", "content": reply.choices[0].message.content})
    cached = [usage.prompt_tokens_details.cached_tokens for usage in usages]
    assert cached[0] < page
    for before, now in zip(usages, cached[1:], strict=False):
        assert now >= before.prompt_tokens // page * page
    assert cached[0] < cached[1] <= cached[2]


def test_prompt_shared_by_concurrent_clients_is_computed_once(
    client: openai.OpenAI, server: RunningServer
) -> None:
    system = essay("concurrency", 16)
    start = info(server)
    clients = 6
    gate = threading.Barrier(clients)

    def ask(index: int) -> tuple[int, int]:
        gate.wait()
        reply = client.chat.completions.create(
            model="any",
            messages=[
                {"role": "system", "content": system},
                {"role": "user", "content": f"What is {index} plus {index}?"},
            ],
            temperature=0,
            max_tokens=2,
        )
        return reply.usage.prompt_tokens, reply.usage.prompt_tokens_details.cached_tokens

    with ThreadPoolExecutor(clients) as pool:
        usages = list(pool.map(ask, range(clients)))
    end = info(server)
    computed = (
        end["statistics"]["computed_prompt_tokens"] - start["statistics"]["computed_prompt_tokens"]
    )
    prompts = sum(prompt for prompt, _ in usages)
    cached = sum(cached for _, cached in usages)
    assert prompts - cached == computed
    own = 32  # the question and the template around it
    assert computed < usages[0][0] + clients * (start["page_size"] + own)


def test_samples_of_a_prompt_compute_it_once(client: openai.OpenAI, server: RunningServer) -> None:
    start = info(server)
    reply = client.chat.completions.create(
        model="any",
        messages=[{"role": "user", "content": essay("several samples", 8)}],
        n=4,
        seed=3,
        max_tokens=4,
    )
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    assert len({choice.message.content for choice in reply.choices}) > 1
    assert reply.usage.completion_tokens <= 16
    end = info(server)["statistics"]["computed_prompt_tokens"]
    computed = end - start["statistics"]["computed_prompt_tokens"]
    assert computed <= reply.usage.prompt_tokens + 3 * start["page_size"]


def test_old_pages_are_read_from_three_bits(server: RunningServer) -> None:
    text = essay("compression", 48)
    first = generate(server, text)
    assert first["prompt_tokens"] > 600
    assert first["cached_tokens"] < 64
    before = settled(server)
    second = generate(server, text)
    tiers = second["cached_tokens_by_tier"]
    assert set(before["kv_kinds"]) == {"fp8", "tq3"}
    assert tiers["tq3"] >= (first["prompt_tokens"] - before["recent_window"]) // 2
    # Anchors, and the window before the end, stay FP8.
    assert tiers["fp8"] >= before["anchor_tokens"]
    assert sum(tiers.values()) == second["cached_tokens"] >= first["prompt_tokens"] - 64
    after = info(server)["statistics"]
    for kind, count in tiers.items():
        assert (
            after["cached_tokens_by_kind"][kind]
            - before["statistics"]["cached_tokens_by_kind"].get(kind, 0)
            == count
        )
    assert before["cache"]["compression_vs_bf16"] > 2


def test_every_byte_and_page_has_one_place(server: RunningServer) -> None:
    generate(server, essay("accounting", 12))
    now = settled(server)
    cache = now["cache"]
    used = free = waste = 0
    for kind in cache["kinds"].values():
        assert sum(kind["page_bytes_by_part"].values()) == kind["page_bytes"]
        assert kind["bytes_used"] == kind["pages_used"] * kind["page_bytes"]
        used += kind["bytes_used"]
        free += kind["bytes_free"]
        waste += kind["bytes_slab_waste"]
    whole = used + free + waste + cache["free_slab_bytes"] + cache["unassigned_bytes"]
    assert whole == cache["arena_bytes"]
    assert used == cache["bytes_used"] == sum(tier["bytes"] for tier in cache["tiers"].values())
    pages = sum(kind["pages_used"] for kind in cache["kinds"].values())
    assert pages == cache["pages_used"] == sum(tier["pages"] for tier in cache["tiers"].values())
    # Nothing runs: what is in use is in the tree, and could be evicted.
    assert pages == cache["pages_in_tree"] == cache["pages_evictable"] > 0
    assert cache["pages_locked"] == 0
    reply = server.get("/check_cache")
    assert (reply.status_code, reply.json()) == (200, {"ok": True})


def test_metrics_agree_with_the_information(server: RunningServer) -> None:
    generate(server, essay("metrics", 4))
    now = settled(server)
    cache = now["cache"]
    pages, sizes = samples(server, "minima:kv_pages"), samples(server, "minima:kv_bytes")
    for kind, entry in cache["kinds"].items():
        for state in ("used", "free"):
            assert pages[kind, state] == entry[f"pages_{state}"]
            assert sizes[kind, state] == entry[f"bytes_{state}"]
    (evictable,) = samples(server, "sglang:kv_evictable_tokens").values()
    assert evictable == cache["pages_evictable"] * now["page_size"]
    (arena,) = samples(server, "minima:arena_bytes").values()
    assert arena == cache["arena_bytes"]
    tiers = samples(server, "minima:tier_bytes")
    assert tiers == {(tier,): entry["bytes"] for tier, entry in cache["tiers"].items()}
    cached = samples(server, "minima:cached_tokens_total")
    by_kind = {(kind,): count for kind, count in now["statistics"]["cached_tokens_by_kind"].items()}
    assert cached == by_kind
    (device,) = samples(server, "sglang:cached_tokens_total").values()
    assert device == sum(cached.values())
    (read,) = samples(server, "minima:kv_read_bytes_total").values()
    (per_request,) = samples(server, "minima:kv_read_bytes_per_request_total").values()
    assert 0 < read <= per_request


def test_tenants_share_nothing(server: RunningServer) -> None:
    text = essay("tenants", 6)

    def cached(**body: Any) -> int:
        return int(generate(server, text, **body)["cached_tokens"])

    for body in (
        {},
        {"cache_salt": "a"},
        {"cache_salt": "b"},
        {"extra_key": "a"},
        {"extra_key": "a", "cache_salt": "b"},
        {"cache_salt": ""},
    ):
        assert cached(**body) == 0, body
        assert cached(**body) > 0, body


def test_openai_routes_keep_tenants_apart(client: openai.OpenAI) -> None:
    def cached(**extra: Any) -> int:
        reply = client.completions.create(
            model="any",
            prompt=essay("neighbours", 6),
            temperature=0,
            max_tokens=1,
            extra_body=extra,
        )
        return int(reply.usage.prompt_tokens_details.cached_tokens)

    assert cached(cache_salt="a") == 0
    assert cached(cache_salt="b") == 0
    assert cached(extra_key="a") == 0
    assert cached() == 0
    assert cached(cache_salt="a") > 0


def test_flush_empties_the_cache(server: RunningServer) -> None:
    text = essay("flushing", 6)
    generate(server, text)
    assert settled(server)["cache"]["pages_used"] > 0
    assert server.post("/flush_cache", None).status_code == 200
    cache = info(server)["cache"]
    assert cache["pages_used"] == cache["bytes_used"] == cache["pages_in_tree"] == 0
    assert generate(server, text)["cached_tokens"] == 0
