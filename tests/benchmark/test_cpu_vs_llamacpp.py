"""The benchmark against llama.cpp: its settings, its search for the best of them, its counting."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import chat_load
import cpu_vs_llamacpp
import llama_server
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from chat_load import LlamaTarget
from common import Record
from hypothesis import given
from hypothesis import strategies as st
from llama_server import LlamaBuild, LlamaServer, LlamaSettings

from sglang_minima.models.embedded import find_embedded_model

LOG = """\
0.01 I system_info: n_threads = 2 | CPU : SSE3 = 1 | AVX2 = 1 | AVX512 = 0 | FMA = 1 |
0.01 I llama_kv_cache:        CPU KV buffer size =    68.91 MiB
0.02 I srv        update:  - cache state: 3 prompts, 16.000 MiB (limits: 8192.000 MiB)
0.03 I srv        update:  - cache state: 2 prompts, 10.500 MiB (limits: 8192.000 MiB)
"""


@given(
    st.builds(
        LlamaSettings,
        slots=st.integers(1, 64),
        unified=st.booleans(),
        kv_type=st.sampled_from(("f16", "q8_0")),
        flash=st.sampled_from(("auto", "off")),
        cache_reuse=st.integers(0, 512),
        idle_cache=st.booleans(),
        similarity=st.floats(0, 1),
    )
)
def test_settings_are_read_as_they_are_shown(settings: LlamaSettings) -> None:
    assert LlamaSettings.parse(str(settings)) == settings


@pytest.mark.parametrize("text", ["slot=4", "slots=many", "unified=1", "kv_type="])
def test_settings_with_a_typo_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"slot|many|unified|kv_type"):
        LlamaSettings.parse(text)


def test_both_builds_are_started_with_the_same_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    params = SimpleNamespace(
        model=SimpleNamespace(), cpuparams=SimpleNamespace(), cpuparams_batch=SimpleNamespace()
    )
    package = SimpleNamespace(
        CommonParams=lambda: params,
        ggml_type={"GGML_TYPE_Q8_0": "q8"},
        llama_flash_attn_type={"LLAMA_FLASH_ATTN_TYPE_AUTO": "auto"},
        get_system_info=lambda: "CPU : AVX2 = 1",
        Server=lambda given: SimpleNamespace(listening_address=f"port {given.port}"),
    )
    monkeypatch.setitem(sys.modules, "xllamacpp", package)
    monkeypatch.setattr("signal.pause", lambda: None)
    settings = LlamaSettings(8, False, "q8_0", "auto", 256, False, 0.5)
    argv = ["-m", "a.gguf", "--port", "80", "-t", "2", "--slots", *settings.arguments()]
    llama_server.serve_prebuilt(argv)
    assert (params.n_parallel, params.n_ctx, params.kv_unified) == (8, 8 * 4096, False)
    assert (params.cache_type_k, params.cache_type_v, params.flash_attn_type) == (
        "q8",
        "q8",
        "auto",
    )
    assert (params.n_cache_reuse, params.cache_idle_slots, params.endpoint_slots) == (
        256,
        False,
        True,
    )
    assert params.slot_prompt_similarity == 0.5
    assert params.cpuparams.n_threads == params.cpuparams_batch.n_threads == 2


def test_log_tells_memory_and_instruction_set(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(LOG)
    server = LlamaServer("", log, 4096)
    assert server.instruction_set == "SSE3 AVX2 FMA"
    assert server.kv_bytes_per_token == pytest.approx(68.91 * 2**20 / 4096, rel=1e-6)
    assert server.prompt_cache_bytes == 10.5 * 2**20
    log.write_text("")
    assert server.prompt_cache_bytes == 0


def test_a_server_that_ends_is_told_with_its_output() -> None:
    build = LlamaBuild("x", (sys.executable, "-c", "print('no such model'); raise SystemExit(3)"))
    with (
        pytest.raises(RuntimeError, match=r"(?s)status 3.*no such model"),
        llama_server.running_llama(build, Path("m.gguf"), LlamaSettings(), 1),
    ):
        pass


# --- the search -----------------------------------------------------------------------------------


def test_search_combines_what_helped() -> None:
    def seconds(each: LlamaSettings) -> float:
        return 10 - (each.kv_type == "q8_0") - 2 * (not each.unified) + 3 * (not each.idle_cache)

    runs: list[LlamaSettings] = []

    def run(each: LlamaSettings) -> dict[str, Any]:
        runs.append(each)
        return {"total_s": seconds(each)}

    best = cpu_vs_llamacpp.helpful_settings(run)
    assert best == LlamaSettings(kv_type="q8_0", unified=False)
    assert runs[0] == LlamaSettings() and len(set(runs)) == len(runs)


def test_search_keeps_the_better_of_two_that_exclude_each_other() -> None:
    gains = {("q8_0", "auto"): 1.0, ("f16", "off"): 2.0}
    best = cpu_vs_llamacpp.helpful_settings(
        lambda each: {"total_s": 10 - gains.get((each.kv_type, each.flash), 0.0)}
    )
    assert best == LlamaSettings(flash="off") and best.possible


def test_noise_is_no_help() -> None:
    best = cpu_vs_llamacpp.helpful_settings(lambda each: {"total_s": 10 - 0.1 * each.cache_reuse})
    assert best == LlamaSettings(cache_reuse=256)
    best = cpu_vs_llamacpp.helpful_settings(
        lambda each: {"total_s": 10.0 - 0.1 * (each.cache_reuse > 0)}
    )
    assert best == LlamaSettings()


def test_the_sweep_over_slots_is_run_for_every_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short answers are fastest with one slot here, long ones with sixteen."""
    bench = cpu_vs_llamacpp.Bench(argparse.Namespace(new_tokens=[24, 64]), Path(), "")
    runs: list[tuple[LlamaSettings, int | None]] = []

    def llama(build: LlamaBuild, each: LlamaSettings, tokens: int | None) -> dict[str, Any]:
        runs.append((each, tokens))
        slope = 1 if tokens == 24 else -1
        return {"total_s": 100 + slope * each.slots - 50 * (each.similarity == 0)}

    monkeypatch.setattr(bench, "llama", llama)
    fastest = bench.llama_all(LlamaBuild("x", ()), [])
    assert fastest == [LlamaSettings(slots=slots, similarity=0.0) for slots in (1, 16)]
    assert [each.slots for each, tokens in runs if tokens == 64] == [1, 2, 4, 8, 16]
    assert sum(tokens is None for _, tokens in runs) == 3
    runs.clear()
    assert bench.llama_all(LlamaBuild("y", ()), fastest) == fastest
    assert len(runs) == 4 + 3


# --- the load -------------------------------------------------------------------------------------


class FakeLlama:
    """Answers like llama.cpp: pings while it waits, one event per token, then the timings."""

    def __init__(self, fail: bool = False, answers: int | None = None) -> None:
        self.prompts: list[str] = []
        self.fail, self.answers = fail, answers

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/completion", self.complete)
        app.router.add_get("/slots", self.slots)
        return app

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        assert body["ignore_eos"] and body["stream"] and body["cache_prompt"]
        self.prompts.append(body["prompt"])
        words = len(body["prompt"].split())
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b": ping\n\n")
        count = self.answers or body["n_predict"]
        event: dict[str, Any] = {"stop": False, "tokens_evaluated": words, "content": " no"}
        for number in range(1, count + 1):
            await self._send(response, event | {"tokens_predicted": number})
        if self.fail:
            await self._send(response, {"error": {"message": "context is full"}})
            return response
        end = {"content": "", "stop": True, "timings": {"prompt_n": 3, "cache_n": words - 3}}
        await self._send(response, event | end | {"tokens_predicted": count})
        return response

    async def _send(self, response: web.StreamResponse, event: dict[str, Any]) -> None:
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")

    async def slots(self, request: web.Request) -> web.Response:
        return web.json_response([{"id": 0, "n_prompt_tokens": 1000}, {"id": 1}])


def _on_fake(fake: FakeLlama, log: Path, run: Callable[[LlamaTarget], Any]) -> Any:
    async def inside() -> Any:
        async with TestServer(fake.app()) as server:
            return await run(LlamaTarget(LlamaServer(str(server.make_url("/")), log, 4096)))

    log.write_text(LOG)
    return asyncio.run(inside())


def test_conversations_with_llama_grow_and_every_token_is_counted(tmp_path: Path) -> None:
    fake = FakeLlama()
    row = _on_fake(fake, tmp_path / "log", lambda t: chat_load.converse(t, "A clerk.", 3, 2, 5))
    prompts = fake.prompts[1:]  # after the first request, which only warms the server up
    assert len(prompts) == 6
    for earlier in prompts[:3]:
        assert sum(later.startswith(earlier + " no" * 5) for later in prompts[3:]) == 1
    assert row["prompt_tokens"] == sum(len(prompt.split()) for prompt in prompts)
    assert row["computed_tokens"] == 18 and row["computed_first_turn"] == 9
    assert row["cached_share"] == pytest.approx(1 - 18 / row["prompt_tokens"])
    assert row["kv_reserved_bytes"] == round(68.91 * 2**20) + 10.5 * 2**20
    assert row["kv_bytes"] == pytest.approx(1000 * 68.91 * 2**20 / 4096 + 10.5 * 2**20, abs=2)
    assert 0 < row["ttft_p50_s"] <= row["ttft_p95_s"] <= row["total_s"]


def test_single_stream_measures_uncached_prompts(tmp_path: Path) -> None:
    fake = FakeLlama()
    row = _on_fake(fake, tmp_path / "log", chat_load.single_stream)
    assert len(fake.prompts) == 1 + 2 * chat_load.SINGLE_STREAM_REPEATS
    assert len({prompt[:15] for prompt in fake.prompts[1:]}) == chat_load.SINGLE_STREAM_REPEATS
    assert min(row["prefill_tok_s"], row["decode_tok_s"], row["decode_short_tok_s"]) > 0


@pytest.mark.parametrize(
    ("fake", "message"),
    [(FakeLlama(fail=True), "context is full"), (FakeLlama(answers=2), "not complete")],
)
def test_incomplete_answers_end_the_benchmark(
    tmp_path: Path, fake: FakeLlama, message: str
) -> None:
    async def ask(target: LlamaTarget) -> None:
        async with aiohttp.ClientSession(target.url) as session:
            await chat_load.ask(target, session, "Hello", 4)

    with pytest.raises(RuntimeError, match=message):
        _on_fake(fake, tmp_path / "log", ask)


# --- what is concluded ----------------------------------------------------------------------------


def _chat(system: str, settings: str, total: float, ttft: float, computed: int) -> dict[str, Any]:
    return {
        "system": system,
        "settings": settings,
        "new_tokens": 24,
        "total_s": total,
        "ttft_p50_s": ttft,
        "ttft_p95_s": 2 * ttft,
        "computed_tokens": computed,
        "kv_bytes": 2**20,
        "prompt_tokens_first_turn": [1540, 1541],
    }


def _single(system: str, settings: str, prefill: float, decode: float) -> dict[str, Any]:
    row = {"system": system, "settings": settings, "new_tokens": None, "prefill_tok_s": prefill}
    return row | {"decode_tok_s": decode, "decode_short_tok_s": 2 * decode}


def _rows() -> list[dict[str, Any]]:
    peer = "llama.cpp native"
    return [
        _chat("sglang_minima", "default", 40.0, 1.0, 8000),
        _single("sglang_minima", "default", 300.0, 45.0),
        _chat(peer, "slots=1", 100.0, 9.0, 10000),
        _chat(peer, "slots=16", 160.0, 1.5, 30000),
        _single(peer, "slots=1", 200.0, 40.0),
        _single(peer, "slots=1 flash=off", 100.0, 60.0),
        _chat("llama.cpp prebuilt", "slots=1", 10.0, 0.1, 10000),
    ]


def test_claims_are_against_the_best_figure_of_any_settings(tmp_path: Path) -> None:
    rows = _rows()
    cpu_vs_llamacpp.check_same_work(rows)
    claims = cpu_vs_llamacpp.make_claims(rows, "llama.cpp native")
    assert [(claim.value, claim.met) for claim in claims] == [
        (0.4, True),
        (pytest.approx(2 / 3), False),
        (0.75, False),
        (0.75, False),
    ]
    cpu_vs_llamacpp.add_reasons(rows, "llama.cpp native")
    assert rows[0]["beside_best_peer"] == (
        "prompt tokens computed 0.80x, prefill speed 1.50x, single-stream decode speed 0.75x "
        "of llama.cpp native with slots=1"
    )
    Record("plot").write(rows, claims, cpu_vs_llamacpp.plot(rows, "title"), tmp_path)
    assert (tmp_path / "plot.png").stat().st_size > 10_000


def test_servers_that_count_other_tokens_are_not_compared() -> None:
    rows = _rows()
    rows[2]["prompt_tokens_first_turn"] = [1540, 1540]
    with pytest.raises(RuntimeError, match="differently"):
        cpu_vs_llamacpp.check_same_work(rows)


@pytest.mark.slow
def test_tiny_run_against_the_prebuilt_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if find_embedded_model() is None or importlib.util.find_spec("xllamacpp") is None:
        pytest.skip("the embedded model or xllamacpp is not installed")
    write = Record.write
    monkeypatch.setattr(Record, "write", lambda *args: write(*args, directory=tmp_path))
    monkeypatch.setattr(cpu_vs_llamacpp, "SYSTEM_TOKENS", 256)
    monkeypatch.setattr(cpu_vs_llamacpp, "SINGLE_STREAM_SETTINGS", (LlamaSettings(slots=1),))
    monkeypatch.setattr(chat_load, "SINGLE_STREAM_TOKENS", 4)
    monkeypatch.setattr(chat_load, "SINGLE_STREAM_REPEATS", 1)
    monkeypatch.delenv("LLAMA_SERVER", raising=False)
    options = ["--clients", "3", "--turns", "2", "--new-tokens", "4", "--threads", "1"]
    monkeypatch.setattr("sys.argv", ["cpu_vs_llamacpp.py", *options, "--llama-settings", "slots=3"])
    cpu_vs_llamacpp.main()
    content = json.loads((tmp_path / "cpu_vs_llamacpp.json").read_text())
    ours, theirs = (row for row in content["rows"] if row["new_tokens"] is not None)
    assert ours["prompt_tokens_first_turn"] == theirs["prompt_tokens_first_turn"]
    assert theirs["computed_first_turn"] == sum(theirs["prompt_tokens_first_turn"])
    assert ours["computed_tokens"] < theirs["computed_tokens"]
    assert "AVX2" in theirs["compute"]
    assert theirs["kv_bytes"] > 3 * 256 * 23040 > ours["kv_bytes"] > 0
    assert len(content["claims"]) == 4
    assert "llama.cpp prebuilt" in capsys.readouterr().out
