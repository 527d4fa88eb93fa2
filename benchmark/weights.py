"""Weights on the CPU: speed of each choice by number of rows, and what it changes in the answers.

    python benchmark/weights.py

Speed is process CPU time with one thread, the least of several repeats: the whole model without
attention (all linear layers, norms, output head), so that weights are read as in a real step.
Quality is teacher-forced against float32 weights over windows of the Python language reference
that comes with Python (`pydoc_data.topics`), with exact attention. Start-up is a fresh process
from the interpreter's start to the first token, over an already converted model.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pydoc_data.topics import topics
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from common import Claim, Record, format_claims, format_table

from sglang_minima.models.loader import load_model
from sglang_minima.models.quantization import Quantization, supported
from sglang_minima.models.resolve import resolve_model_path
from sglang_minima.tokenization.tokenizer import Tokenizer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from sglang_minima.models.causal_lm import CausalLM

CHOICES: tuple[Quantization, ...] = ("none", "fp16", "gguf", "int4", "int8")
ROWS = (1, 4, 16, 64, 512)
WINDOW = 256
REPEATS = 7
START_SECONDS = 15.0
FIRST_TOKEN = """
from sglang_minima.entrypoints.engine import Engine

with Engine(quantization={choice!r}, log_level="warning") as engine:
    engine.generate("The capital of France is", {{"max_new_tokens": 1, "temperature": 0.0}})
    print("first token", flush=True)
"""


class ExactAttention:
    """Causal attention over one window."""

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(0, 1)


class NoAttention:
    """Stands in where only the rest of the model is timed."""

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return q


def read_windows(tokenizer: Tokenizer, count: int) -> torch.Tensor:
    """int64 [count * WINDOW]: windows spread evenly over the text."""
    ids = tokenizer.encode("\n".join(topics[name] for name in sorted(topics)))
    step = len(ids) // count
    return torch.tensor([t for i in range(count) for t in ids[i * step : i * step + WINDOW]])


def step_ms(model: CausalLM, ids: torch.Tensor, rows: int) -> float:
    """Milliseconds of CPU time of one pass over `rows` tokens, all of them with logits."""
    tokens, positions, none = ids[:rows], torch.arange(rows), NoAttention()
    times = []
    for _ in range(REPEATS if rows < 64 else 2):
        start = time.process_time()
        # A long prompt needs the logits of its last token only.
        model.logits(model(tokens, positions, none)[-64:])
        times.append(time.process_time() - start)
    return 1e3 * min(times)


def quality(model: CausalLM, ids: torch.Tensor, exact: list[torch.Tensor]) -> dict[str, float]:
    """Agreement with `exact`, log-probabilities by window; the first model called fills them."""
    kls, tops = [], []
    for index, window in enumerate(ids.split(WINDOW)):
        hidden = model(window, torch.arange(len(window)), ExactAttention())
        logp = torch.log_softmax(model.logits(hidden), dim=-1)
        if index == len(exact):
            exact.append(logp)
        wanted = exact[index]
        kls.append((wanted.exp() * (wanted - logp)).sum(dim=-1).double())
        tops.append(wanted.argmax(-1) == logp.argmax(-1))
    kl, top = torch.cat(kls), torch.cat(tops)
    return {
        "top1": top.double().mean().item(),
        "kl_mean": kl.mean().item(),
        "kl_p99": kl.quantile(0.99).item(),
    }


def first_token_s(choice: str) -> float:
    """Seconds of wall time from the start of a process to the first token."""
    start = time.perf_counter()
    command = [sys.executable, "-c", FIRST_TOKEN.format(choice=choice)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        if not process.stdout.readline():
            raise RuntimeError("the engine did not start")
        seconds = time.perf_counter() - start
    return seconds


def plot(rows: list[dict[str, Any]]) -> Figure:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (speed, quality) = plt.subplots(1, 2, figsize=(11, 4))
    for row in rows:
        speed.plot(ROWS, [row[f"ms_{n}"] / n for n in ROWS], marker="o", label=row["weights"])
    speed.set(xscale="log", yscale="log", xlabel="rows in the step")
    speed.set_ylabel("CPU ms per row (one thread)")
    speed.legend()
    others = [row for row in rows if row["weights"] != "none"]
    quality.bar([row["weights"] for row in others], [100 * row["top1"] for row in others])
    quality.set(ylim=(90, 100), ylabel="top-1 agreement with float32 weights (%)")
    for index, row in enumerate(others):
        quality.annotate(f"KL {row['kl_mean']:.1g}", (index, 90.4), ha="center", color="white")
    return figure


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--windows", type=int, default=8, help="windows of 256 scored positions")
    parser.add_argument("--no-start-up", action="store_true", help="skip the start-up times")
    options = parser.parse_args()
    record = Record("weights")
    torch.set_num_threads(1)
    path = resolve_model_path(None)
    ids = read_windows(Tokenizer.load(path), options.windows)
    exact: list[torch.Tensor] = []
    table: list[dict[str, Any]] = []
    for choice in CHOICES:
        support = supported(choice, torch.device("cpu"), torch.float32, path)
        if not support.ok:
            print(f"{choice}: left out, {support.reason}")
            continue
        model, _ = load_model(path, torch.float32, quantization=choice)
        row: dict[str, Any] = {"weights": choice, "positions": len(ids)}
        row.update({f"ms_{n}": step_ms(model, ids, n) for n in ROWS})
        row.update(quality(model, ids, exact))
        row["load"] = os.getloadavg()[0]
        table.append(row)
        del model
    for row in table:
        row["first_token_s"] = None if options.no_start_up else first_token_s(row["weights"])
    columns = {"weights": "", **{f"ms_{n}": ".1f" for n in ROWS}, "top1": ".4f"}
    columns |= {"kl_mean": ".5f", "kl_p99": ".4f", "first_token_s": ".1f", "load": ".1f"}
    print(format_table(table, columns))
    rows = {row["weights"]: row for row in table}
    claims = []
    if "gguf" in rows:
        chosen, exact_row = rows["gguf"], rows["none"]
        claims += [
            Claim.at_least("gguf top-1 agreement with float32", chosen["top1"], 0.998, "of 1"),
            *(
                Claim.at_least(
                    f"gguf step of {n} rows against float32",
                    exact_row[f"ms_{n}"] / chosen[f"ms_{n}"],
                    target,
                    "x",
                )
                for n, target in ((1, 4.0), (16, 2.5), (512, 1.1))
            ),
        ]
        if "fp16" in rows:
            ratio = rows["fp16"]["ms_1"] / chosen["ms_1"]
            claims.append(Claim.at_least("gguf step of 1 row against fp16", ratio, 2.0, "x"))
        if chosen["first_token_s"] is not None:
            name = "gguf start-up to first token"
            claims.append(Claim.at_most(name, chosen["first_token_s"], START_SECONDS, "s"))
    print(format_claims(claims))
    record.write(table, claims, plot(table))


if __name__ == "__main__":
    main()
