"""The benchmarks' own arithmetic, their files, and small runs of what they drive."""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any

import cold_warm
import numpy as np
import prefix_sharing
import pytest
import torch
from aiohttp import web
from aiohttp.test_utils import TestServer
from common import Claim, Record, add_output_options, format_claims, format_table, panels
from tiny_llama import write_tiny_llama

from sglang_minima.models.embedded import find_embedded_model
from sglang_minima.runner.model_runner import ModelRunner
from sglang_minima.server_args import ServerArgs

CASES = [(profile, cache) for profile in ("minima", "bf16") for cache in ("on", "off")]


def test_table_aligns_and_shows_missing_values() -> None:
    rows = [{"name": "a", "value": 1.25, "more": 3}, {"name": "bcd", "value": None, "more": 4}]
    lines = format_table(rows, {"name": "", "value": ".1f"}).splitlines()
    assert lines == ["name  value", "----  -----", "   a    1.2", " bcd      -"]


def test_claims_meet_their_target_at_the_limit_and_miss_beyond() -> None:
    assert Claim.at_most("x", 0.30, 0.30, "x").met
    assert not Claim.at_most("x", 0.31, 0.30, "x").met
    assert Claim.at_least("x", 88.0, 88, "%").met
    missed = Claim.at_least("share", 87.9, 88, "%")
    assert not missed.met
    assert format_claims([missed]) == "MISSED  share: 87.9 % (target >= 88)"


def test_record_has_every_part(tmp_path: Path) -> None:
    record = Record("some_name", command="python benchmark/some_name.py")
    figure = cold_warm.plot([_fidelity_row("fp8"), _fidelity_row("minima tq3")])
    path = record.write([{"a": None}], [Claim.at_most("c", 1, 2, "s")], figure, tmp_path)
    content = json.loads(path.read_text())
    assert set(content) == {
        "benchmark",
        "date",
        "machine",
        "versions",
        "command",
        "rows",
        "claims",
    }
    assert content["claims"] == [
        {"name": "c", "value": 1, "unit": "s", "target": "<= 2", "met": True}
    ]
    assert len(content["machine"]["load_average_before"]) == 3
    assert len(content["machine"]["load_average_after"]) == 3
    assert (tmp_path / "some_name.png").stat().st_size > 10_000


def test_record_refuses_values_that_are_not_json(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON"):
        Record("some_name").write([{"a": float("nan")}], [], None, tmp_path)


@pytest.mark.parametrize("plot", [True, False])
def test_a_run_ends_with_claims_record_and_plot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], plot: bool
) -> None:
    parser = argparse.ArgumentParser()
    add_output_options(parser)
    options = parser.parse_args(["--output", str(tmp_path), *([] if plot else ["--no-plot"])])
    claims = [Claim.at_most("c", 3, 2, "s")]
    Record("name").finish([{"a": 1}], claims, lambda rows: panels(1, len(rows), (2, 2))[0], options)
    assert capsys.readouterr().out.splitlines() == [
        "MISSED  c: 3 s (target <= 2)",
        str(tmp_path / "name.json"),
    ]
    assert (tmp_path / "name.png").exists() == plot


def _fidelity_row(name: str) -> dict[str, Any]:
    numbers = dict.fromkeys(("kl_mean", "kl_se", "top1_agreement", "bytes_per_token"), 0.01)
    return {"variant": name, "positions": 512, "texts": 1, "top1_se": None, **numbers}


# --- cold_warm ------------------------------------------------------------------------------------


def test_compare_against_numbers_worked_out_by_hand() -> None:
    cold = torch.log(torch.tensor([[0.5, 0.25, 0.25], [0.2, 0.6, 0.2]]))
    warm = torch.log(torch.tensor([[0.25, 0.5, 0.25], [0.2, 0.6, 0.2]])) + 3.0
    found = cold_warm.compare(cold, warm, torch.tensor([0, 1]))
    expected = 0.5 * np.log(2) - 0.25 * np.log(2)
    np.testing.assert_allclose(found.kl, [expected, 0.0], atol=1e-6)
    np.testing.assert_allclose(found.delta_nll, [np.log(2), 0.0], atol=1e-6)
    assert found.same_top.tolist() == [False, True]


def test_standard_error_is_over_texts_not_positions() -> None:
    mean, error = cold_warm.mean_and_error([np.array([1.0, 3.0]), np.array([4.0, 4.0])])
    assert mean == 3.0
    assert error == pytest.approx(1.0)
    assert cold_warm.mean_and_error([np.ones(4)]) == (1.0, None)


@pytest.fixture(scope="module")
def tiny_runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    path = write_tiny_llama(
        tmp_path_factory.mktemp("tiny"), vocab_size=256, max_position_embeddings=2048
    )
    return ModelRunner(ServerArgs(dtype="float32", device="cpu"), str(path))


def test_warm_runs_lose_what_the_pages_lose(tiny_runner: ModelRunner) -> None:
    torch.manual_seed(3)
    prompt = torch.randint(256, (640,)).tolist()
    prefix = len(prompt) - cold_warm.SCORED
    targets = torch.randint(256, (cold_warm.SCORED,))
    losses, sizes = {}, {}
    for name, settings in cold_warm.VARIANTS.items():
        args = ServerArgs(dtype="float32", device="cpu", max_total_tokens=2048, **settings)
        variant = cold_warm.Variant(args, tiny_runner)
        if name == "bf16":
            cold = variant.last_logits(prompt, 0)
        variant.store(prompt[:prefix])
        sizes[name] = cold_warm.report(variant.cache)["bytes_used"]
        warm = variant.last_logits(prompt, prefix)
        losses[name] = float(cold_warm.compare(cold, warm, targets).kl.mean())
        variant.cache.flush()
        assert cold_warm.report(variant.cache)["pages_used"] == 0
    assert losses["bf16"] < 1e-8 < losses["fp8"] < losses["minima tq3"] < 0.1
    assert sizes["bf16"] > sizes["fp8"] > sizes["minima tq3"]


def test_a_missing_hit_is_an_error(tiny_runner: ModelRunner) -> None:
    args = ServerArgs(dtype="float32", device="cpu", max_total_tokens=2048)
    variant = cold_warm.Variant(args, tiny_runner)
    with pytest.raises(RuntimeError, match="0 tokens came from the cache, not 64"):
        variant.last_logits([5] * 320, 64)


# --- prefix_sharing -------------------------------------------------------------------------------


class FakeServer:
    """Answers like the server, one event per token; half of every prompt counts as cached."""

    def __init__(self) -> None:
        self.prompts: list[str] = []
        self.computed = 0
        self.fail = False

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/generate", self.generate)
        app.router.add_post("/flush_cache", self.flush)
        app.router.add_get("/server_info", self.info)
        return app

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        assert body["sampling_params"]["ignore_eos"] and body["stream"]
        new_tokens = body["sampling_params"]["max_new_tokens"]
        self.prompts.append(body["text"])
        words = len(body["text"].split())
        self.computed += words - words // 2
        response = web.StreamResponse()
        await response.prepare(request)
        for count in range(1, new_tokens + 1):
            meta = {
                "prompt_tokens": words,
                "cached_tokens": words // 2,
                "completion_tokens": count,
                "num_retractions": 0,
                "finish_reason": {"type": "length"} if count == new_tokens else None,
            }
            event = {"text": " yes" * count, "meta_info": meta}
            if self.fail:
                event = {"error": {"message": "no room"}}
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    async def flush(self, request: web.Request) -> web.Response:
        return web.Response()

    async def info(self, request: web.Request) -> web.Response:
        kind = {"pages_used": 10, "bytes_used": 640, "bits_per_value": 4.0}
        cache = {"pages_used": 10, "bytes_used": 640, "compression_vs_bf16": 4.0}
        return web.json_response(
            {
                "cache": {**cache, "retier_backlog": 0, "kinds": {"tq3": kind}},
                "statistics": {"computed_prompt_tokens": self.computed},
                "num_running_reqs": 0,
                "page_size": 64,
                "dtype": "float32",
            }
        )


def _converse(fake: FakeServer, **options: int) -> dict[str, Any]:
    async def run() -> dict[str, Any]:
        async with TestServer(fake.app()) as server:
            namespace = argparse.Namespace(**options)
            url = str(server.make_url("/"))
            return await prefix_sharing.converse(url, "You are a clerk.", namespace)

    return asyncio.run(run())


def test_conversations_grow_and_every_token_is_counted() -> None:
    fake = FakeServer()
    row = _converse(fake, clients=3, turns=2, new_tokens=5)
    prompts = fake.prompts[1:]  # after the first request, which only warms the server up
    assert len(prompts) == 6
    assert all(prompt.startswith("You are a clerk.\n\nCustomer:") for prompt in prompts)
    for earlier in prompts[:3]:
        assert sum(later.startswith(earlier + " yes" * 5) for later in prompts[3:]) == 1
    assert row["output_tokens"] == 30
    assert row["prompt_tokens"] == sum(len(prompt.split()) for prompt in prompts)
    assert row["computed_tokens"] == fake.computed - -(-len(fake.prompts[0].split()) // 2)
    assert row["cached_share"] == pytest.approx(0.5, abs=0.02)
    assert (row["kv_bytes_per_token"], row["vs_16bit"]) == (1.0, 0.25)
    assert 0 < row["ttft_p50_s"] <= row["ttft_p95_s"] <= row["total_s"]


def test_an_error_in_a_stream_ends_the_benchmark() -> None:
    fake = FakeServer()
    fake.fail = True
    with pytest.raises(RuntimeError, match="no room"):
        _converse(fake, clients=1, turns=1, new_tokens=2)


def test_claims_compare_the_same_profile_with_and_without_cache(tmp_path: Path) -> None:
    seconds = {("minima", "on"): 20, ("minima", "off"): 100, ("bf16", "on"): 90}
    rows = [
        {
            "profile": profile,
            "cache": cache,
            "total_s": seconds.get((profile, cache), 100),
            "cached_share": 0.95 if cache == "on" else 0.0,
            "prompt_tokens_first_turn": [1540, 1542],
            # The system prompt once, the private tokens, and up to a page of each client.
            "computed_first_turn": 1500 + 40 + 42 + 2 * 64 + (profile == "bf16"),
            "ttft_p50_s": 0.5,
            "ttft_p95_s": 1.5,
            "kv_bytes_per_token": 6400.0 if cache == "on" else None,
            "vs_16bit": 0.28 if cache == "on" else None,
            "compute_dtype": "float32",
        }
        for profile, cache in CASES
    ]
    claims = prefix_sharing.make_claims(rows, 1500)
    missed = [claim.name.split(" (")[0] for claim in claims if not claim.met]
    assert missed == [
        "bf16: prompt tokens computed in the first turn",
        "bf16: total time, cache on / off",
    ]
    assert [claim.value for claim in claims if "on / off" in claim.name] == [0.2, 0.9]
    Record("plot").write(rows, claims, prefix_sharing.plot(rows, "title"), tmp_path)
    assert (tmp_path / "plot.png").stat().st_size > 10_000


@pytest.mark.slow
def test_tiny_run_against_a_real_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if find_embedded_model() is None:
        pytest.skip("the embedded model is not installed")
    write = Record.write
    monkeypatch.setattr(Record, "write", lambda *args: write(*args, directory=tmp_path))
    monkeypatch.setattr(prefix_sharing, "SYSTEM_TOKENS", 256)
    options = ["--clients", "3", "--turns", "2", "--new-tokens", "4", "--profiles", "minima"]
    monkeypatch.setattr("sys.argv", ["prefix_sharing.py", *options])
    prefix_sharing.main()
    on, off = json.loads((tmp_path / "prefix_sharing.json").read_text())["rows"]
    assert on["prompt_tokens"] == off["prompt_tokens"] == off["computed_tokens"]
    assert on["computed_tokens"] < 0.6 * off["computed_tokens"]
    assert on["output_tokens"] == off["output_tokens"] == 24
    assert "profile" in capsys.readouterr().out
