"""Chats that share a system prompt: this server against llama.cpp's, one CPU, one GGUF file.

    python benchmark/cpu_vs_llamacpp.py --llama-server PATH

16 conversations of 4 turns begin with the same system prompt of 1,500 tokens; the clients of a turn
send their requests at the same moment, greedily, streaming over HTTP, with as many threads on both
sides. Every run has a fresh server with an empty cache. llama.cpp is run with its defaults, with
each setting of its cache, KV type and attention that could help, and with those that helped
together on 1 to 16 slots; what is compared is its best figure of each kind, from whichever settings
gave it. Single streams are measured apart, alone on a fresh server.

PATH is a natively built llama-server (or set LLAMA_SERVER). The prebuilt server of the package
xllamacpp is the second peer where that package is installed, and tuned itself where it is the only
one. Without either only this server is run, and no claim is made.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from chat_load import LlamaTarget, MinimaTarget, Target, converse, single_stream
from common import Claim, Record, format_claims, format_table
from llama_server import LlamaBuild, LlamaSettings, running_llama
from serving import running_server
from shop_talk import system_prompt

from sglang_minima.models.embedded import EMBEDDED_MODEL_HELP, find_embedded_model
from sglang_minima.models.resolve import resolve_model_path
from sglang_minima.tokenization.tokenizer import Tokenizer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = dict[str, Any]

SYSTEM_TOKENS = 1500
OURS = "sglang_minima"
SINGLE_STREAMS = (
    ("decode_tok_s", "after 1,000 tokens"),
    ("decode_short_tok_s", "after a short prompt"),
)
SLOTS = (1, 2, 4, 8, 16)
VARIATIONS: tuple[dict[str, Any], ...] = (
    {"unified": False},
    {"kv_type": "q8_0"},
    {"flash": "off"},
    {"cache_reuse": 256},
    {"idle_cache": False},
    {"similarity": 0.0},
)
NOISE = 0.02
"""A variation helps if it is faster by more than this share."""
SINGLE_STREAM_SETTINGS = (
    LlamaSettings(slots=1),
    LlamaSettings(slots=1, flash="off"),
    LlamaSettings(slots=1, kv_type="q8_0"),
)


def helpful_settings(run: Callable[[LlamaSettings], Row]) -> LlamaSettings:
    """llama.cpp's defaults with every variation that made them faster when run alone."""
    base = LlamaSettings()
    needed = run(base)["total_s"] * (1 - NOISE)
    best = base
    gains = [(run(replace(base, **each))["total_s"], each) for each in VARIATIONS]
    for seconds, variation in sorted(gains, key=lambda gain: float(gain[0])):
        together = replace(best, **variation)
        if seconds < needed and together.possible:
            best = together
    return best


class Bench:
    """Runs servers one after another and keeps their rows."""

    def __init__(self, options: argparse.Namespace, model: Path, system: str) -> None:
        self.options, self.model, self.system = options, model, system
        self.rows: list[Row] = []

    def ours(self, flags: str, new_tokens: int | None) -> Row:
        """One run of this server; `new_tokens` None: single streams."""
        threads = ["--cpu-threads", str(self.options.threads)]
        with running_server([*threads, *shlex.split(flags)]) as url:
            target = MinimaTarget(url)
            return self._measure(target, OURS, flags or "default", new_tokens)

    def llama(self, build: LlamaBuild, settings: LlamaSettings, new_tokens: int | None) -> Row:
        """One run of llama.cpp."""
        with running_llama(build, self.model, settings, self.options.threads) as server:
            return self._measure(LlamaTarget(server), build.name, str(settings), new_tokens)

    def _measure(self, target: Target, system: str, settings: str, tokens: int | None) -> Row:
        row: Row = {"system": system, "settings": settings, "new_tokens": tokens}
        if tokens is None:
            row |= asyncio.run(single_stream(target))
        else:
            clients, turns = self.options.clients, self.options.turns
            row |= asyncio.run(converse(target, self.system, clients, turns, tokens))
        row["load_average"] = round(os.getloadavg()[0], 2)
        self.rows.append(row)
        print(_line(row), file=sys.stderr, flush=True)
        return row

    def llama_all(
        self, build: LlamaBuild, settings: Sequence[LlamaSettings]
    ) -> list[LlamaSettings]:
        """All its runs; finds the settings where none are given. Returns the fastest per length."""
        lengths = self.options.new_tokens
        if not settings:
            helpful = helpful_settings(lambda each: self.llama(build, each, lengths[0]))
            settings = [replace(helpful, slots=slots) for slots in SLOTS]
        fastest = []
        for new_tokens in lengths:
            rows = {each: self.llama(build, each, new_tokens) for each in settings}
            fastest.append(min(rows, key=lambda each: float(rows[each]["total_s"])))
        for each in SINGLE_STREAM_SETTINGS:
            self.llama(build, each, None)
        return list(dict.fromkeys(fastest))


def check_same_work(rows: Sequence[Row]) -> None:
    """Raises RuntimeError if the first prompts were not the same tokens in number everywhere."""
    chats = [row for row in rows if row["new_tokens"] is not None]
    if len({tuple(row["prompt_tokens_first_turn"]) for row in chats}) > 1:
        raise RuntimeError("the servers count the tokens of the same prompts differently")


def make_claims(rows: Sequence[Row], peer: str) -> list[Claim]:
    """Each way this server was run, against the best figure of any settings of `peer`."""
    claims = []
    for row in rows:
        if row["system"] != OURS:
            continue
        name = "" if row["settings"] == "default" else f"{row['settings']}, "
        same = [other for other in rows if other["system"] == peer]
        same = [other for other in same if other["new_tokens"] == row["new_tokens"]]
        if row["new_tokens"] is None:
            for key, what in SINGLE_STREAMS:
                ratio = row[key] / max(other[key] for other in same)
                text = f"{name}single-stream decode speed, {what} / {peer}"
                claims.append(Claim.at_least(text, ratio, 0.9, "x"))
            continue
        for key, what in (("total_s", "total time"), ("ttft_p50_s", "TTFT p50")):
            ratio = row[key] / min(other[key] for other in same)
            text = f"{name}{row['new_tokens']} new tokens: {what} / {peer}"
            claims.append(Claim.at_most(text, ratio, 0.5, "x"))
    return claims


def add_reasons(rows: Sequence[Row], peer: str) -> None:
    """Tells beside the fastest of `peer` where our time goes: tokens computed, and speeds."""
    singles = [row for row in rows if row["new_tokens"] is None]
    for row in rows:
        if row["system"] != OURS or row["new_tokens"] is None:
            continue
        same = [r for r in rows if (r["system"], r["new_tokens"]) == (peer, row["new_tokens"])]
        best = min(same, key=lambda other: float(other["total_s"]))
        own = next(r for r in singles if (r["system"], r["settings"]) == (OURS, row["settings"]))
        theirs = [r for r in singles if r["system"] == peer]
        parts = [f"prompt tokens computed {row['computed_tokens'] / best['computed_tokens']:.2f}x"]
        for key, what in (
            ("prefill_tok_s", "prefill speed"),
            ("decode_tok_s", "single-stream decode speed"),
        ):
            parts.append(f"{what} {own[key] / max(float(other[key]) for other in theirs):.2f}x")
        row["beside_best_peer"] = f"{', '.join(parts)} of {peer} with {best['settings']}"


def plot(rows: Sequence[Row], title: str) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 8), layout="constrained")
    axes = figure.subplots(2, 2).ravel()
    chats = [row for row in rows if row["new_tokens"] is not None]
    singles = [row for row in rows if row["new_tokens"] is None]
    panels = (
        (chats, (("total_s", "total"),), "total time of all turns (s)"),
        (chats, (("ttft_p50_s", "p50"), ("ttft_p95_s", "p95")), "time to first token (s)"),
        (chats, (("kv_bytes", "held at the end"),), "KV memory (MiB)"),
        (
            singles,
            SINGLE_STREAMS,
            "single-stream decode (tokens/s)",
        ),
    )
    for axis, (shown, series, label) in zip(axes, panels, strict=True):
        at = np.arange(len(shown))
        height = 0.8 / len(series)
        for number, (key, name) in enumerate(series):
            scale = 2**20 if key == "kv_bytes" else 1
            bars = axis.barh(
                at + number * height, [row[key] / scale for row in shown], height, label=name
            )
            axis.bar_label(bars, fmt="{:.3g}", padding=2, fontsize=7)
            for bar, row in zip(bars, shown, strict=True):
                bar.set_edgecolor("black")
                bar.set_linewidth(1.5 if row["system"] == OURS else 0)
        axis.set_yticks(at + 0.4 - height / 2, [_line_name(row) for row in shown], fontsize=7)
        axis.invert_yaxis()
        axis.margins(x=0.15)
        axis.set_xlabel(label)
        axis.legend(fontsize=7)
    figure.suptitle(title)
    return figure


def _line_name(row: Row) -> str:
    tokens = "" if row["new_tokens"] is None else f", {row['new_tokens']} new tokens"
    return f"{row['system']}: {row['settings']}{tokens}"


def _line(row: Row) -> str:
    keys = ("total_s", "ttft_p50_s", "computed_tokens", "prefill_tok_s", "decode_tok_s")
    return f"{_line_name(row)}: " + ", ".join(f"{k} {row[k]:.4g}" for k in keys if k in row)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Shared prompts on a CPU, against llama.cpp.")
    binary = os.environ.get("LLAMA_SERVER")
    parser.add_argument("--llama-server", type=Path, default=binary and Path(binary))
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, nargs="+", default=[24, 64])
    parser.add_argument("--threads", type=int, default=2, help="of either server")
    parser.add_argument(
        "--flags", action="append", default=[], help="run this server with these flags as well"
    )
    parser.add_argument(
        "--llama-settings",
        type=LlamaSettings.parse,
        action="append",
        default=[],
        help='only these instead of tuning, e.g. "slots=4 kv_type=q8_0"; may be repeated',
    )
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    model = find_embedded_model()
    if model is None:
        sys.exit(EMBEDDED_MODEL_HELP)
    record = Record("cpu_vs_llamacpp")
    system = system_prompt(Tokenizer.load(resolve_model_path(None)), SYSTEM_TOKENS)
    bench = Bench(options, model, system)
    for flags in ("", *options.flags):
        for new_tokens in (*options.new_tokens, None):
            bench.ours(flags, new_tokens)
    peers = [LlamaBuild.native(options.llama_server)] if options.llama_server else []
    if importlib.util.find_spec("xllamacpp") is not None:
        peers.append(LlamaBuild.prebuilt())
    settings = list(options.llama_settings)
    for peer in peers:
        settings = bench.llama_all(peer, settings)
    check_same_work(bench.rows)
    claims: list[Claim] = []
    if peers:
        add_reasons(bench.rows, peers[0].name)
        claims = make_claims(bench.rows, peers[0].name)
    else:
        print("no llama.cpp here (see --help): only this server was run, nothing is claimed")
    columns = {"system": "", "settings": "", "new_tokens": "", "total_s": ".1f"}
    columns |= {"output_tok_s": ".1f", "ttft_p50_s": ".2f", "ttft_p95_s": ".2f"}
    columns |= {"computed_tokens": "d", "cached_share": ".1%", "kv_bytes": "d"}
    columns |= {"kv_reserved_bytes": "d", "cpu_s": ".1f", "load_average": ".1f"}
    print(format_table([r for r in bench.rows if r["new_tokens"] is not None], columns))
    columns = {"system": "", "settings": "", "prefill_tok_s": ".1f"}
    columns |= {"decode_tok_s": ".1f", "decode_short_tok_s": ".1f", "load_average": ".1f"}
    print(format_table([r for r in bench.rows if r["new_tokens"] is None], columns))
    for system, compute in {
        r["system"]: r["compute"] for r in bench.rows if "compute" in r
    }.items():
        print(f"{system} computes with {compute}")
    for row in bench.rows:
        if "beside_best_peer" in row:
            print(f"{_line_name(row)}: {row['beside_best_peer']}")
    print(format_claims(claims))
    title = f"{options.clients} conversations x {options.turns} turns over a shared system prompt"
    record.write(bench.rows, claims, plot(bench.rows, f"{title} of {SYSTEM_TOKENS} tokens"))


if __name__ == "__main__":
    main()
