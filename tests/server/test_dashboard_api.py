"""The dashboard's routes: what they show, what they never show, and to whom."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest
from server_kit import RunningServer
from tiny_kit import eventually

from sglang_minima.dashboard.feed import TreeFeed
from sglang_minima.dashboard.history import LatencyWindow
from sglang_minima.entrypoints.errors import HttpError
from sglang_minima.messages import ControlReply, GenerateRequest, TextOutput, TokenOutput
from sglang_minima.sampling_params import SamplingParams
from sglang_minima.tokenization.state import RequestState

ASSETS = ("", "/main.js", "/tree.js", "/style.css", "/favicon.svg")


def run(server: RunningServer, text: str, **body: Any) -> dict[str, Any]:
    sampling = {"max_new_tokens": 2, "ignore_eos": True, "temperature": 0}
    reply = server.generate({"text": text, "sampling_params": sampling, **body})
    assert reply.status_code == 200, reply.text
    return dict(reply.json()["meta_info"])


def state(server: RunningServer, since: float = 0) -> dict[str, Any]:
    return dict(server.get(f"/dashboard/api/state?since={since}").json())


def tree(server: RunningServer, query: str = "") -> dict[str, Any]:
    reply = server.get(f"/dashboard/api/tree?{query}")
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def fresh_tree(server: RunningServer, query: str = "") -> dict[str, Any]:
    """A tree that was surveyed after this call."""
    asked = time.monotonic()
    while True:
        found = tree(server, query)
        if time.monotonic() - found["age"] > asked:
            return found
        time.sleep(0.2)


def probe(server: RunningServer, text: str, **body: Any) -> dict[str, Any]:
    reply = server.post("/dashboard/api/probe", {"text": text, **body})
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


# ---- the page


@pytest.mark.parametrize("name", ASSETS)
def test_page_is_static_and_self_contained(fake: RunningServer, name: str) -> None:
    reply = fake.get(f"/dashboard{name}")
    assert reply.status_code == 200
    policy = reply.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    assert reply.headers["x-content-type-options"] == "nosniff"
    text = reply.text.replace("http://www.w3.org/2000/svg", "")
    assert "http://" not in text and "https://" not in text
    again = fake.get(f"/dashboard{name}", headers={"if-none-match": reply.headers["etag"]})
    assert (again.status_code, again.text) == (304, "")


def test_nothing_else_is_served(fake: RunningServer) -> None:
    for path in ("/dashboard/nothing.js", "/dashboard/../server_args.py", "/dashboard/routes.py"):
        assert fake.get(path).status_code == 404
    assert fake.get("/dashboard/api/probe").status_code == 405


# ---- what happens now


def test_state_tells_what_happened(tiny: RunningServer) -> None:
    before = state(tiny)
    run(tiny, "state of the server " * 8)
    eventually(lambda: len(state(tiny, before["time"])["samples"]) >= 2)
    now = state(tiny, before["time"])
    assert all(sample["time"] > before["time"] for sample in now["samples"])
    sample = now["samples"][-1]
    assert set(sample["bytes"]) == {"recent", "anchor", "stale"}
    assert sum(sample["bytes"].values()) > 0
    assert sample["ttft"]["requests"] >= 1 and sample["ttft"]["p50"] > 0
    assert sample["tpot"]["p95"] >= sample["tpot"]["p50"] > 0
    generated = sum(s["generated"] for s in now["samples"])
    assert generated > 0
    assert now["cache"]["arena_bytes"] > 0
    assert now["server"]["kv_profile"] == "minima"
    assert now["statistics"]["prompt_tokens"] > 0
    assert now["requests"] == []


def test_state_lists_requests_without_what_they_say(fake: RunningServer) -> None:
    body = {"text": "abcsecret", "sampling_params": {"max_new_tokens": 400}, "stream": True}
    with fake.generate({**body, "rid": "slow-and-much-longer-name"}, stream=True) as stream:
        lines = stream.iter_lines()
        next(lines)
        reply = fake.get("/dashboard/api/state")
    (request,) = reply.json()["requests"]
    assert request["rid"] == "slow-and-muc"
    assert request["phase"] == "output"
    assert (request["prompt_tokens"], request["cached_tokens"]) == (9, 2)
    assert "secret" not in reply.text


def test_latencies_of_the_last_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    window = LatencyWindow()
    assert window.first_token() == (None, None, 0)
    now = time.monotonic()
    for seconds in range(1, 21):
        request = GenerateRequest(str(seconds), [1], SamplingParams())
        running = RequestState(request, None, None)
        running.created = now - seconds
        running.apply(TextOutput("", TokenOutput("r", [1], None, 1, 1, 0)))
        window.progressed(running, 1)
        running.apply(TextOutput("", TokenOutput("r", [1] * 10, None, 1, 11, 0)))
        window.progressed(running, 10)
        window.finished(running)
    p50, p95, count = window.first_token()
    assert count == 20 and p50 is not None and p95 is not None
    assert p50 == pytest.approx(11, abs=1.5) and p95 == pytest.approx(19, abs=1.5)
    assert window.per_token().requests == 20
    monkeypatch.setattr(time, "monotonic", lambda: now + 120)
    assert window.first_token() == (None, None, 0)


# ---- the tree


@pytest.fixture(scope="module")
def filled(tiny: RunningServer) -> Iterator[RunningServer]:
    """The tiny server with forks of one prompt, and a tenant."""
    trunk = "the trunk that all share. " * 5
    for tail in ("one", "two", "three"):
        run(tiny, trunk + tail * 9)
    run(tiny, "a tenant's own text " * 4, cache_salt="very-secret-salt")
    yield tiny


def test_tree_adds_up_and_zooms(filled: RunningServer) -> None:
    found = fresh_tree(filled, "depth=8&limit=50")
    assert found["found"] and found["total_nodes"] >= 5
    top = found["nodes"][0]
    now = filled.get("/server_info").json()["cache"]
    assert top["nodes"] == found["total_nodes"]
    assert sum(top["below"]) == now["pages_in_tree"]
    forked = next(node for node in found["nodes"] if node["children"] >= 3 and sum(node["own"]))
    inner = tree(filled, f"focus={forked['id']}&depth=3")
    assert inner["nodes"][0]["id"] == forked["id"]
    assert inner["path"][-1]["id"] == forked["id"]
    assert len(inner["nodes"]) == forked["nodes"]
    part = tree(filled, f"focus={forked['id']}&first=1&end=2")
    assert part["nodes"][0]["range"] == [1, 2]
    gone = tree(filled, "focus=feedfeedfeedfeed")
    assert not gone["found"] and gone["nodes"][0]["id"] == top["id"]


def test_tree_and_state_hold_no_text_and_no_salt(filled: RunningServer) -> None:
    for path in ("tree?limit=500&depth=20", "state"):
        text = filled.get(f"/dashboard/api/{path}").text
        for secret in ("trunk", "tenant's", "very-secret-salt"):
            assert secret not in text


@pytest.mark.parametrize(
    "query",
    ["depth=0", "depth=65", "limit=0", "limit=2001", "limit=abc", "depth=nan", "first=-1"],
)
def test_bad_queries_are_refused(filled: RunningServer, query: str) -> None:
    reply = filled.get(f"/dashboard/api/tree?{query}")
    assert reply.status_code == 400
    assert query.partition("=")[0] in reply.json()["message"]
    assert filled.get("/dashboard/api/state?since=-5").status_code == 400


class StubManager:
    """Answers "survey" as told."""

    def __init__(self, ok: bool, value: Any) -> None:
        self.reply = ControlReply("1", ok, value)
        self.asked = 0

    async def control(self, method: str, timeout: float = 0) -> ControlReply:
        self.asked += 1
        await asyncio.sleep(0.01)
        return self.reply


def test_without_a_tree_the_route_says_so() -> None:
    feed = TreeFeed(StubManager(False, "the server shares no prefixes"))  # type: ignore[arg-type]
    with pytest.raises(HttpError, match="shares no prefixes") as caught:
        asyncio.run(feed.latest())
    assert caught.value.status == 404


def test_many_viewers_cost_one_survey(filled: RunningServer) -> None:
    from test_dashboard_tree import survey_of

    survey = survey_of([-1, 0], [(0, 0, 0), (1, 0, 0)])
    manager = StubManager(True, survey)

    async def look() -> None:
        feed = TreeFeed(manager)  # type: ignore[arg-type]
        first = await asyncio.gather(*[feed.latest() for _ in range(20)])
        assert len({id(snapshot) for snapshot in first}) == 1
        for _ in range(20):
            await feed.latest()
        assert manager.asked == 1
        # An old one is shown while it is renewed.
        first[0].taken -= 3.0
        assert await feed.latest() is first[0]
        await asyncio.sleep(0.2)
        assert await feed.latest() is not first[0]
        assert manager.asked == 2

    asyncio.run(look())


# ---- the path of a prompt


def test_probe_shows_what_a_request_would_find(filled: RunningServer) -> None:
    text = "the trunk that all share. " * 5 + "one" * 9
    told = probe(filled, text)
    assert told["tokens"] == len(text)  # one token a byte
    assert told["matched_tokens"] >= 128
    assert len(told["texts"]) == -(-told["tokens"] // told["page_size"])
    assert "".join(told["texts"]) == text
    assert {page["tier"] for page in told["pages"]} >= {"anchor"}
    for _ in range(3):
        assert probe(filled, text)["pages"] == told["pages"]
    meta = run(filled, text)
    assert meta["cached_tokens"] == told["matched_tokens"] + told["copied_tokens"]
    assert probe(filled, text)["pages"][0]["hits"] == told["pages"][0]["hits"] + 1


def test_probe_leaves_no_trace(filled: RunningServer) -> None:
    text = "nobody has sent this text before, it is only looked up " * 2
    before = filled.get("/server_info").json()
    assert probe(filled, text)["matched_tokens"] == 0
    after = filled.get("/server_info").json()
    assert after["statistics"] == before["statistics"]
    assert after["cache"]["pages_used"] == before["cache"]["pages_used"]


def test_probe_of_a_tenant_needs_the_salt(filled: RunningServer) -> None:
    text = "a tenant's own text " * 4
    assert probe(filled, text)["matched_tokens"] == 0
    assert probe(filled, text, cache_salt="wrong")["matched_tokens"] == 0
    assert probe(filled, text, cache_salt="very-secret-salt")["matched_tokens"] >= 64


def test_probe_of_a_chat_message(filled: RunningServer) -> None:
    message = "What is in a page? " * 4
    body = {"model": "any", "messages": [{"role": "user", "content": message}], "max_tokens": 1}
    assert filled.post("/v1/chat/completions", body).status_code == 200
    assert probe(filled, message)["matched_tokens"] == 0
    assert probe(filled, message, chat=True)["matched_tokens"] >= 80


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ([], "JSON object"),
        ({}, "text"),
        ({"text": ""}, "text"),
        ({"text": 5}, "text"),
        ({"text": "a", "chat": 1}, "chat"),
        ({"text": "a", "cache_salt": 3}, "cache_salt"),
        ({"text": "a" * 600}, "tokens"),
        ({"text": "\ud800"}, ""),
    ],
)
def test_bad_probes_are_refused(filled: RunningServer, body: Any, why: str) -> None:
    reply = filled.post("/dashboard/api/probe", body)
    assert reply.status_code == 400
    assert why in reply.json()["message"]
