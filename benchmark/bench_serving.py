"""The harness of SGLang users, `sglang.bench_serving`, with groups of prompts that share a prefix.

    python benchmark/bench_serving.py

Runs the harness of the wheel against a fresh server with the prefix cache on, and against one with
--disable-radix-cache. What it measures is in the record as it wrote it; how much of the prompts
came from cached pages, which it does not ask, is read from the server before and after.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common import Claim, Record, format_claims, format_table
from serving import running_server

from sglang_minima.models.resolve import resolve_model_path

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HARNESS = Path(__file__).with_name("bench_serving_harness.py")
_LEFT_OUT = (
    "server_info",
    "input_lens",
    "output_lens",
    "ttfts",
    "itls",
    "generated_texts",
    "errors",
)


def run_harness(url: str, options: argparse.Namespace) -> dict[str, Any]:
    """What the harness writes about one run.

    Raises:
        CalledProcessError: the harness failed.
    """
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as output:
        command = [sys.executable, str(HARNESS), "--backend", "sglang", "--base-url", url]
        command += ["--tokenizer", str(resolve_model_path(None)), "--disable-tqdm"]
        command += ["--dataset-name", "generated-shared-prefix", "--flush-cache"]
        command += ["--gsp-num-groups", str(options.groups)]
        command += ["--gsp-prompts-per-group", str(options.prompts)]
        command += ["--gsp-system-prompt-len", str(options.system_tokens)]
        command += ["--gsp-question-len", str(options.question_tokens)]
        command += ["--gsp-output-len", str(options.output_tokens)]
        command += ["--max-concurrency", str(options.at_once), "--output-file", output.name]
        subprocess.run(command, check=True, stdout=sys.stderr)
        written: dict[str, Any] = json.loads(Path(output.name).read_text().splitlines()[-1])
    return {
        # JSON knows no infinity, which is the harness's default rate of requests.
        key: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in written.items()
        if key not in _LEFT_OUT
    }


def prompt_statistics(url: str) -> dict[str, Any]:
    """Counters of prompt tokens of a server."""
    with urllib.request.urlopen(f"{url}/server_info", timeout=60) as reply:
        counters: dict[str, Any] = json.load(reply)["statistics"]
    return counters


def cache_report(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """What of the prompts came from cached pages between two looks at the counters."""
    cached = after["cached_tokens"] - before["cached_tokens"]
    computed = after["computed_prompt_tokens"] - before["computed_prompt_tokens"]
    kinds = {
        kind: count - before["cached_tokens_by_kind"].get(kind, 0)
        for kind, count in after["cached_tokens_by_kind"].items()
    }
    return {
        "cached_tokens": cached,
        "computed_prompt_tokens": computed,
        "cached_share": cached / max(cached + computed, 1),
        "cached_tokens_by_kind": kinds,
    }


def make_claims(rows: Sequence[dict[str, Any]], expected: int) -> list[Claim]:
    """The cache against no cache, and that nothing failed."""
    on, off = rows
    ratio = on["total_throughput"] / off["total_throughput"]
    return [
        Claim.at_least("completed requests", min(r["completed"] for r in rows), expected, ""),
        Claim.at_least("cached share of prompt tokens", on["cached_share"], 0.7, ""),
        Claim.at_least("total token throughput, cache on / off", ratio, 2.0, "x"),
    ]


def plot(rows: Sequence[dict[str, Any]], title: str) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.6), layout="constrained")
    names = ("total_throughput", "median_ttft_ms", "median_e2e_latency_ms")
    labels = ("tokens/s (prompt and output)", "median TTFT (ms)", "median latency (ms)")
    for axis, name, label in zip(figure.subplots(1, 3), names, labels, strict=True):
        bars = axis.bar([row["cache"] for row in rows], [row[name] for row in rows])
        axis.bar_label(bars, fmt="{:,.0f}", padding=2)
        axis.set_xlabel("prefix cache")
        axis.set_ylabel(label)
        axis.margins(y=0.12)
    figure.suptitle(title)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description="sglang.bench_serving, generated shared prefixes.")
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=8, help="of every group")
    parser.add_argument("--system-tokens", type=int, default=512)
    parser.add_argument("--question-tokens", type=int, default=32)
    parser.add_argument("--output-tokens", type=int, default=16)
    parser.add_argument("--at-once", type=int, default=8, help="requests under way together")
    options = parser.parse_args()
    record = Record("bench_serving")
    rows = []
    for cache, flags in (("on", []), ("off", ["--disable-radix-cache"])):
        print(f"cache {cache}", file=sys.stderr, flush=True)
        with running_server(["--max-total-tokens", "64k", *flags]) as url:
            before = prompt_statistics(url)
            written = run_harness(url, options)
            report = cache_report(before, prompt_statistics(url))
        rows.append({"cache": cache, **report, **written})
    claims = make_claims(rows, options.groups * options.prompts)
    columns = {"cache": "", "completed": "d", "cached_share": ".1%", "total_throughput": ".0f"}
    columns |= {"output_throughput": ".1f", "median_ttft_ms": ".0f", "p99_ttft_ms": ".0f"}
    columns |= {"median_tpot_ms": ".1f", "median_e2e_latency_ms": ".0f"}
    print(format_table(rows, columns))
    print(format_claims(claims))
    shape = f"{options.groups} groups of {options.prompts} prompts, {options.system_tokens} shared"
    record.write(rows, claims, plot(rows, f"sglang.bench_serving: {shape} tokens each"))


if __name__ == "__main__":
    main()
