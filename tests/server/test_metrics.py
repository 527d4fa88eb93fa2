"""What /metrics exports: the names that dashboards use, values, format; and the request log."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families
from server_kit import RunningServer

from sglang_minima.entrypoints.metrics import ServerMetrics
from sglang_minima.entrypoints.request_log import RequestLog
from sglang_minima.messages import FinishReason, GenerateRequest, TextOutput, TokenOutput
from sglang_minima.sampling_params import SamplingParams
from sglang_minima.tokenization.state import RequestState
from sglang_minima.tokenization.tokenizer import Tokenizer

GRAFANA = Path(__file__).parents[2] / "docs" / "grafana" / "sglang_minima.json"
MODEL = {"model_name": "fake-model"}
RANK = {"engine_type": "unified", "tp_rank": "0", "pp_rank": "0"}

PUBLIC_NAMES = (
    # What the dashboards published for SGLang ask for.
    *("sglang:e2e_request_latency_seconds_bucket", "sglang:e2e_request_latency_seconds_sum"),
    *("sglang:e2e_request_latency_seconds_count", "sglang:time_to_first_token_seconds_bucket"),
    *("sglang:time_to_first_token_seconds_sum", "sglang:time_to_first_token_seconds_count"),
    *("sglang:time_per_output_token_seconds_bucket", "sglang:time_per_output_token_seconds_sum"),
    *("sglang:time_per_output_token_seconds_count", "sglang:inter_token_latency_seconds_bucket"),
    *("sglang:queue_time_seconds_bucket", "sglang:num_running_reqs", "sglang:num_queue_reqs"),
    *("sglang:gen_throughput", "sglang:cache_hit_rate", "sglang:token_usage"),
    *("sglang:num_used_tokens", "sglang:prompt_tokens_total", "sglang:generation_tokens_total"),
    *("sglang:cached_tokens_total", "sglang:num_requests_total", "sglang:evicted_tokens_total"),
    *("sglang:num_aborted_requests_total", "sglang:max_total_num_tokens"),
    *("sglang:kv_available_tokens", "sglang:kv_evictable_tokens", "sglang:kv_used_tokens"),
    *("sglang:realtime_tokens_total", "sglang:num_retracted_requests_total"),
    *("sglang:num_so_requests_total", "sglang:num_grammar_queue_reqs", "sglang:num_grammar_total"),
    *("sglang:num_grammar_cache_hit_total", "sglang:engine_startup_time"),
    *("sglang:engine_load_weights_time", "sglang:num_retractions_bucket"),
    *("sglang:cuda_graph_passes_total", "sglang:eviction_duration_seconds_bucket"),
    *("sglang:cache_config_info", "sglang:per_stage_req_latency_seconds_count"),
)

BUCKETS = ("0.002", "0.005", "0.2", "0.5", "10.0", "+Inf")
Values = dict[str, dict[frozenset[tuple[str, str]], float]]


def scrape(server: RunningServer) -> Values:
    """All samples by name and labels; fails where a sample stands twice."""
    reply = server.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain; version=")
    values: Values = {}
    for family in text_string_to_metric_families(reply.text):
        for sample in family.samples:
            labels = frozenset(sample.labels.items())
            assert labels not in values.setdefault(sample.name, {}), (sample.name, labels)
            values[sample.name][labels] = sample.value
    return values


def value(values: Values, name: str, **labels: str) -> float:
    return values[name][frozenset({**MODEL, **labels}.items())]


def test_names_of_public_dashboards(fake: RunningServer) -> None:
    fake.generate({"text": "abc", "sampling_params": {"max_new_tokens": 3}})
    values = scrape(fake)
    assert [name for name in PUBLIC_NAMES if name not in values] == []
    for name in PUBLIC_NAMES:
        assert all(dict(labels)["model_name"] == "fake-model" for labels in values[name]), name


def test_values_follow_requests(fake: RunningServer) -> None:
    names = (
        *("num_requests_total", "prompt_tokens_total", "generation_tokens_total"),
        *("time_to_first_token_seconds_count", "inter_token_latency_seconds_count"),
        *("time_per_output_token_seconds_count", "e2e_request_latency_seconds_count"),
    )
    before = scrape(fake)
    fake.generate({"text": "abc", "sampling_params": {"max_new_tokens": 5}})
    after = scrape(fake)
    grown = [value(after, f"sglang:{n}") - value(before, f"sglang:{n}") for n in names]
    assert grown == [1, 3, 5, 1, 4, 4, 1]
    cached = [value(v, "sglang:cached_tokens_total", source="device") for v in (before, after)]
    assert cached[1] - cached[0] == 2


def test_values_of_the_scheduler(fake: RunningServer) -> None:
    values = scrape(fake)
    assert value(values, "sglang:kv_evictable_tokens", **RANK) == 32
    assert value(values, "sglang:kv_used_tokens", **RANK) == 16
    assert value(values, "sglang:kv_available_tokens", **RANK) == 16
    assert value(values, "sglang:token_usage", **RANK) == 0.25
    assert value(values, "sglang:evicted_tokens_total", **RANK) == 96
    assert value(values, "sglang:realtime_tokens_total", **RANK, mode="prefill_compute") == 3
    assert value(values, "sglang:num_grammar_queue_reqs", **RANK) == 1
    assert value(values, "sglang:num_grammar_total", **RANK) == 4
    assert value(values, "sglang:num_grammar_cache_hit_total", **RANK) == 3
    assert value(values, "sglang:engine_startup_time", **RANK) == 2.5
    assert value(values, "sglang:engine_load_weights_time", **RANK) == 1.5
    assert value(values, "sglang:cuda_graph_passes_total", **RANK, mode="decode_cuda_graph") == 5
    pages = str(400 // 16)
    assert value(values, "sglang:cache_config_info", page_size="16", num_pages=pages) == 1
    evictions = "sglang:eviction_duration_seconds"
    counts = {le: value(values, evictions + "_bucket", **RANK, le=le) for le in BUCKETS}
    assert counts == {"0.002": 0, "0.005": 1, "0.2": 1, "0.5": 2, "10.0": 2, "+Inf": 3}
    assert value(values, evictions + "_count", **RANK) == 3
    assert value(values, evictions + "_sum", **RANK) == pytest.approx(20.304)
    # Nothing was compiled.
    assert "sglang:grammar_compilation_time_seconds_count" not in values
    assert value(values, "minima:kv_bytes", kind="fp8", state="used") == 300
    assert value(values, "minima:tier_bytes", tier="stale") == 100
    assert value(values, "minima:evictable_pages") == 2
    assert value(values, "minima:locked_pages") == 1
    assert value(values, "minima:compression_ratio") == 2
    assert value(values, "minima:cached_tokens_total", kind="fp8") == 2
    assert value(values, "minima:retiered_pages_total", source="fp8", target="tq3") == 4
    assert value(values, "minima:retier_seconds_total") == 0.25
    assert value(values, "minima:sealed_pages_total") == 5
    assert value(values, "minima:kv_read_bytes_total") == 1000
    assert value(values, "minima:kv_read_bytes_per_request_total") == 3000
    assert value(values, "minima:gpu_decode_seconds_total") == 12.5
    assert value(values, "minima:gpu_idle_seconds_total") == 0.5
    route = {"operation": "decode", "route": "torch", "reason": ""}
    assert value(values, "minima:route_uses_total", **route) == 9


def test_http_requests_are_counted_by_route(fake: RunningServer) -> None:
    fake.get("/metrics")
    before = scrape(fake)
    fake.generate({"text": "abc", "sampling_params": {"max_new_tokens": 1}})
    fake.generate({"text": 5})
    fake.get("/v1/models/fake-model")
    fake.get("/v1/models/other")
    for path in ("/nowhere", "/nowhere/else", "/generate"):
        requests.request("PURGE" if "gen" in path else "GET", fake.url + path, timeout=60)
    after = scrape(fake)

    def grown(name: str, **labels: str) -> float:
        key = frozenset(labels.items())
        return after[name][key] - before.get(name, {}).get(key, 0)

    generate = {"endpoint": "/generate", "method": "POST"}
    model = {"endpoint": "/v1/models/{name:path}", "method": "GET"}
    unknown = {"endpoint": "unknown", "method": "GET"}
    responses = "sglang:http_responses_total"
    assert grown("sglang:http_requests_total", **generate) == 2
    assert grown(responses, **generate, status_code="200") == 1
    assert grown(responses, **generate, status_code="400") == 1
    assert grown(responses, **model, status_code="200") == 1
    assert grown(responses, **model, status_code="404") == 1
    assert grown(responses, **unknown, status_code="404") == 2
    odd = {"endpoint": "/generate", "method": "unknown"}
    assert grown("sglang:http_requests_total", **odd) == 1
    active = after["sglang:http_requests_active"]
    assert active[frozenset(generate.items())] == 0
    assert active[frozenset({"endpoint": "/metrics", "method": "GET"}.items())] == 1


def test_grammars_and_stages_are_timed(tiny: RunningServer) -> None:
    pytest.importorskip("xgrammar", reason="structured output is not installed")
    stage = {"stage": "prefill_forward"}
    before = scrape(tiny)
    for _ in range(2):
        sampling = {"regex": "[ab]{3}metric", "max_new_tokens": 16}
        assert tiny.generate({"text": "metrics", "sampling_params": sampling}).ok
    after = scrape(tiny)

    def grown(name: str, **labels: str) -> float:
        key = frozenset(labels.items())
        return after[name][key] - before.get(name, {}).get(key, 0)

    label = {
        "model_name": next(iter(dict(key)["model_name"] for key in after["minima:arena_bytes"]))
    }
    assert grown("sglang:num_so_requests_total", **label) == 2
    assert grown("sglang:num_retractions_count", **label) == 2
    ranked = label | RANK
    assert grown("sglang:num_grammar_total", **ranked) == 2
    assert grown("sglang:num_grammar_cache_hit_total", **ranked) == 1
    assert grown("sglang:grammar_compilation_time_seconds_count", **ranked) == 1
    assert grown("sglang:per_stage_req_latency_seconds_count", **ranked, **stage) == 2
    assert 0 < grown("sglang:per_stage_req_latency_seconds_sum", **ranked, **stage) < 60
    assert after["sglang:engine_startup_time"][frozenset(ranked.items())] > 0


def test_no_family_without_samples(tiny: RunningServer) -> None:
    """sglang-router joins no scrapes where one worker names a family that it has no sample of."""
    info = tiny.get("/server_info").json()["internal_states"][0]
    info["cache"]["counters"]["retiered_pages"] = {}
    info["statistics"]["cached_tokens_by_kind"] = {}
    info["routes"] = []
    info["statistics"]["passes"] = {}
    families = list(text_string_to_metric_families(ServerMetrics("m").render(info).decode()))
    assert len(families) > 30
    assert [family.name for family in families if not family.samples] == []
    assert "minima:retiered_pages" not in {family.name for family in families}


@pytest.mark.parametrize("which", ["fake", "tiny"])
def test_every_grafana_expression_names_exported_metrics(
    which: str, request: pytest.FixtureRequest
) -> None:
    server: RunningServer = request.getfixturevalue(which)
    for _ in range(2):
        server.generate({"text": "metrics " * 12, "sampling_params": {"max_new_tokens": 3}})
    exported = scrape(server)
    panels = json.loads(GRAFANA.read_text())["panels"]
    expressions = [target["expr"] for panel in panels for target in panel.get("targets", [])]
    assert len(expressions) > 20
    used: set[str] = set()
    for expression in expressions:
        names = re.findall(r"\b(?:sglang|minima):\w+", expression)
        assert names, expression
        used.update(names)
        for opening, closing in ("()", "[]", "{}"):
            assert expression.count(opening) == expression.count(closing), expression
        for name, labels in re.findall(r"((?:sglang|minima):\w+)\{([^}]*)\}", expression):
            known = {label for sample in exported[name] for label, _ in sample}
            assert set(re.findall(r"(\w+)\s*[=!]", labels)) <= known | {"instance"}, expression
    assert used <= exported.keys(), used - exported.keys()


def test_grafana_panels_have_their_place() -> None:
    panels = json.loads(GRAFANA.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells), "panels overlap"
    assert max(x for x, _ in cells) < 24


# ---- the request log

SECRET = "my secret prompt"


def finished_state(tokenizer: Tokenizer, text: str, answer: str) -> RequestState:
    sampling = SamplingParams(max_new_tokens=4, stop=["secret stop"])
    request = GenerateRequest('r"1\n', tokenizer.encode(text), sampling)
    state = RequestState(request, None, None)
    count = len(request.input_ids)
    output = TokenOutput("r1", [5], FinishReason("stop"), count, 1, 2, queue_seconds=0.5)
    state.apply(TextOutput(answer, output))
    return state


@pytest.fixture
def lines(
    model_dir: Path, caplog: pytest.LogCaptureFixture
) -> Callable[..., list[tuple[str, dict[str, Any]]]]:
    tokenizer = Tokenizer.load(str(model_dir))

    def write(level: int, text: str = SECRET) -> list[tuple[str, dict[str, Any]]]:
        caplog.clear()
        log = RequestLog(level, tokenizer)
        state = finished_state(tokenizer, text, "my secret answer")
        with caplog.at_level(logging.INFO, "sglang_minima.requests"):
            log.received(state)
            log.progressed(state, 1)
            log.finished(state)
        messages = [record.getMessage() for record in caplog.records]
        assert all("\n" not in message for message in messages)
        parts = [message.split(": ", 1) for message in messages]
        return [(word, json.loads(body)) for word, body in parts]

    return write


def test_request_log_has_no_content_by_default(
    lines: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    (receive, first), (finish, last) = lines(0)
    assert (receive, finish) == ("Receive", "Finish")
    assert first == {"rid": 'r"1\n', "prompt_tokens": len(SECRET)}
    assert last["finish_reason"] == "stop"
    assert (last["cached_tokens"], last["completion_tokens"]) == (2, 1)
    assert last["queue_time"] == 0.5
    assert "secret" not in caplog.text


def test_request_log_levels(lines: Callable[..., Any]) -> None:
    first, last = (entry for _, entry in lines(1))
    assert first["sampling_params"]["max_new_tokens"] == 4
    assert "text" not in first and "text" not in last
    first, last = (entry for _, entry in lines(2))
    assert (first["text"], last["text"]) == (SECRET, "my secret answer")
    long = "a" * 5000 + "z"
    shortened = lines(2, long)[0][1]["text"]
    assert len(shortened) < 2100 and shortened.endswith("z")
    assert lines(3, long)[0][1]["text"] == long
