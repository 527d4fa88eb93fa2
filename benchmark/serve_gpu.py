"""Decode throughput of the engine on a GPU: long prompts, shared and not, profile by profile.

A model of Llama-3-8B's geometry with random weights. Shared: one prefill of the prefix by the
engine itself, then all requests with the prefix and a tail of their own, at once. Unshared: the
same number of tokens for every request in pages of its own; the first comes from the prefill, the
others are copies of its bytes under other token ids. The time of decoding runs from the step in
which all requests have their first token to the end of the last.

gpu_ms and idle_ms are between events on the GPU's stream (`runner/idle.py`): a step from where its
model begins to where its tokens are sampled, and from there to the next. So all that the GPU waits
for the host is idle, and so are the copy of a step's tables and conversions of pages. cpu_percent
is the idle share.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from common import Claim, Record, add_output_options, format_claims, format_table, panels
from engine_bench import EngineBench

from minima_kernels.routes import ROUTES
from sglang_minima.runner.model_runner import ModelRunner
from sglang_minima.server_args import ServerArgs

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
TINY = LLAMA_8B | {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 1000,
}
TAIL = 64
"""Tokens of a prompt behind the prefix."""

COLUMNS = {"scenario": "", "profile": "", "requests": "", "prompt": "", "tok_per_s": ".0f",
           "step_ms": ".2f", "gpu_ms": ".2f", "idle_ms": ".3f", "cpu_percent": ".1f",
           "ttft_s": ".2f", "build_s": ".1f", "kv_gb": ".2f", "note": ""}  # fmt: skip


def random_ids(count: int, seed: int, vocab: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(10, vocab, (count,), generator=generator).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--profiles", nargs="*", default=["bf16", "fp8", "minima"])
    parser.add_argument("--prefix", type=int, default=32768)
    parser.add_argument("--readers", type=int, default=32)
    parser.add_argument("--unshared", type=int, default=16, help="0: leave that scenario out")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--kv-memory", default=90 << 30, type=int)
    parser.add_argument("--graphs", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--overlap", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--embedded", help="a .gguf file or directory: two rows of that model too")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the script out")
    add_output_options(parser)
    options = parser.parse_args()
    if not torch.cuda.is_available() and not options.tiny:
        raise SystemExit("serve_gpu measures an NVIDIA GPU, and there is none: only --tiny runs.")
    record = Record("serve_gpu", needs_plot=False)
    record.machine |= gpu_facts()
    rows: list[dict[str, Any]] = []
    if options.profiles:
        rows += large_model(options)
        release_memory()
    if options.embedded:
        rows += embedded(options.embedded, options)
    claims = make_claims(rows)
    print(format_table(rows, COLUMNS))
    print(format_claims(claims))
    for route, count in sorted(ROUTES.snapshot().items()):
        print(*route, count)
    print(record.write(rows, claims, draw(rows) if options.plot else None, options.output))


def large_model(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Both scenarios, profile by profile."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(TINY if options.tiny else LLAMA_8B))
        args = ServerArgs(
            model_path=folder,
            load_format="dummy",
            dtype="float32" if options.tiny and not torch.cuda.is_available() else "bfloat16",
            quantization="none",
            kv_cache_memory=options.kv_memory,
            max_running_requests=max(options.readers, options.unshared),
            chunked_prefill_size=8192,
            retier_pages_per_step=16,
            random_seed=0,
            disable_cuda_graph=not options.graphs,
            disable_overlap_schedule=not options.overlap,
        )
        started = time.perf_counter()
        runner = ModelRunner(args, folder)
        print(f"model: {time.perf_counter() - started:.1f} s", flush=True)
        for profile in options.profiles:
            rows += measure(runner, args, profile, options)
            print(format_table(rows, COLUMNS), flush=True)
    return rows


def gpu_facts() -> dict[str, Any]:
    if not torch.cuda.is_available():
        return {"gpu": None}
    return {
        "gpu": torch.cuda.get_device_name(),
        "cuda": torch.version.cuda,
        "gpu_memory_bytes": torch.cuda.get_device_properties(0).total_memory,
    }


def release_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def measure(
    runner: ModelRunner, base: ServerArgs, profile: str, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Both scenarios of one profile; a lack of memory becomes a row that says so."""
    vocab = runner.config.vocab_size
    prefix = random_ids(options.prefix, 1, vocab)
    rows: list[dict[str, Any]] = []
    bench = None
    scenario = "shared"
    empty: dict[str, Any] = dict.fromkeys(COLUMNS)
    try:
        started = time.perf_counter()
        bench = EngineBench(runner, dataclasses.replace(base, kv_profile=profile))
        print(f"{profile}: arena and graphs {time.perf_counter() - started:.1f} s", flush=True)
        seconds = bench.prefill([*prefix, 1])
        started = time.perf_counter()
        bench.settle()
        print(f"{profile}: prefill {seconds:.2f} s, {time.perf_counter() - started:.2f} s retier")
        prompts = [[*prefix, *random_ids(TAIL, 100 + i, vocab)] for i in range(options.readers)]
        bench.decode([[*prompt[:-2], 1, 2] for prompt in prompts[:2]], 4)  # warm-up
        rows.append(empty | {"scenario": scenario, "profile": profile, "build_s": seconds,
                             "note": ""} | bench.decode(prompts, options.new_tokens))  # fmt: skip
        if options.unshared:
            scenario = "unshared"
            started = time.perf_counter()
            prefixes = [prefix]
            for i in range(1, options.unshared):
                prefixes.append([*random_ids(64, 1000 + i, vocab), *prefix[64:]])
                bench.copy_prefix(prefix, prefixes[-1])
                bench.settle()
            seconds = time.perf_counter() - started
            prompts = [[*ids, *random_ids(TAIL, 200 + i, vocab)] for i, ids in enumerate(prefixes)]
            rows.append(empty | {"scenario": scenario, "profile": profile, "build_s": seconds,
                                 "note": ""}
                        | bench.decode(prompts, options.new_tokens))  # fmt: skip
    except torch.cuda.OutOfMemoryError as error:
        note = f"out of memory: {str(error)[:60]}"
        rows.append(empty | {"scenario": scenario, "profile": profile, "note": note})
    del bench
    runner.detach()
    release_memory()
    return rows


def embedded(path: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The embedded model: one stream, and 64."""
    from sglang_minima.models.resolve import resolve_model_path

    folder = str(resolve_model_path(path))
    args = ServerArgs(
        model_path=folder,
        kv_cache_memory=4 << 30,
        max_running_requests=64,
        chunked_prefill_size=8192,
        random_seed=0,
        disable_cuda_graph=not options.graphs,
        disable_overlap_schedule=not options.overlap,
    )
    runner = ModelRunner(args, folder)
    bench = EngineBench(runner, args)
    vocab = runner.config.vocab_size
    rows = []
    for count in (1, 64):
        for seed in (0, 1):  # the first warms up
            prompts = [random_ids(512, 10000 * seed + 100 * count + i, vocab) for i in range(count)]
            figures = bench.decode(prompts, 256 if seed else 8)
        rows.append(dict.fromkeys(COLUMNS) | {"scenario": "embedded model", "profile": "minima",
                                              "note": ""} | figures)  # fmt: skip
    return rows


def make_claims(rows: Sequence[dict[str, Any]]) -> list[Claim]:
    """The targets where the rows that they need are there."""
    speed = {(row["scenario"], row["profile"]): row["tok_per_s"] for row in rows}
    claims = []
    for scenario, other, target in (
        ("shared", "bf16", 2.0),
        ("shared", "fp8", 1.3),
        ("unshared", "fp8", 1.3),
    ):
        ours, theirs = speed.get((scenario, "minima")), speed.get((scenario, other))
        if ours and theirs:
            name = f"{scenario}: decode throughput of minima over {other}"
            claims.append(Claim.at_least(name, ours / theirs, target, "x"))
    for row in rows:
        is_embedded = row["scenario"] == "embedded model" and row["requests"] == 64
        if (is_embedded or row["scenario"] == "shared") and row["cpu_percent"]:
            name = f"CPU share of a step, {row['scenario']}, {row['profile']}, {row['requests']}"
            claims.append(Claim.at_most(name, row["cpu_percent"], 5, "%"))
    return claims


def draw(rows: Sequence[dict[str, Any]]) -> Any:
    """Decode throughput, a panel per scenario."""
    scenarios = list(dict.fromkeys(row["scenario"] for row in rows))
    figure, axes = panels(1, len(scenarios), (4 * len(scenarios), 3.5))
    for axis, scenario in zip(axes[0], scenarios, strict=True):
        chosen = [row for row in rows if row["scenario"] == scenario and row["tok_per_s"]]
        names = [f"{row['profile']} x{row['requests']}" for row in chosen]
        axis.bar(names, [row["tok_per_s"] for row in chosen])
        axis.set(title=scenario, ylabel="tokens/s, decode")
    figure.tight_layout()
    return figure


if __name__ == "__main__":
    main()
