"""How far log-probabilities of the same tokens differ between the decode and the prefill path.

    python benchmark/logprob_paths.py

For every text the engine decodes 96 tokens greedily after a prompt of 700 and reports the
log-probability of each (*decode path*). Then prompt and tokens together are a prompt whose last 96
log-probabilities are asked for (*prefill path*), once with an empty cache (*cold*) and once over
the pages that the first request left, settled in their tiers (*warm*). Reinforcement learning
and evaluation take the two for the same number; with compressed pages they are not: decoding reads
the newest tokens as FP8 pages and older ones as the profile keeps them, while a prefill reads the
tokens of its own chunk exactly. The row "bf16" (which stores float32 here) is the exact control.

Texts: the same windows of the Python language reference as in `cold_warm.py`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from cold_warm import load_texts
from common import Claim, Record, format_claims, format_table

from sglang_minima.cache.prefix_cache import PrefixCache
from sglang_minima.messages import GenerateRequest, LogProbs, TokenOutput
from sglang_minima.models.resolve import resolve_model_path
from sglang_minima.runner.model_runner import ModelRunner
from sglang_minima.sampling_params import SamplingParams
from sglang_minima.scheduler.scheduler import Scheduler
from sglang_minima.server_args import ServerArgs
from sglang_minima.tokenization.tokenizer import Tokenizer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PROMPT = 700
NEW = 96
PROFILES = ("bf16", "fp8", "minima")


class Scorer:
    """An engine of one profile, on a model that all share."""

    def __init__(self, args: ServerArgs, runner: ModelRunner) -> None:
        self._runner = runner
        self._arena = runner.allocate(args)
        self._cache = PrefixCache(args, self._arena)
        self._outputs: list[TokenOutput] = []
        self._scheduler = Scheduler(
            args, runner, self._cache, None, frozenset(), self._outputs.extend
        )

    def compare(self, prompt: list[int]) -> dict[str, np.ndarray]:
        """Differences prefill - decode, float64 [NEW] nats, of the cold and the warm prefill."""
        self._cache.flush()
        decoded, _ = self._run(prompt, NEW, -1)
        ids = [token for _, token in decoded]
        made = np.array([value for value, _ in decoded], dtype=np.float64)
        found = {}
        for name in ("warm", "cold"):
            if name == "cold":
                self._cache.flush()
            scored, cached = self._run([*prompt, *ids], 0, PROMPT)
            if (cached > 0) != (name == "warm"):
                raise RuntimeError(f"{cached} tokens of the {name} prefill came from the cache")
            found[name] = np.array([value for value, _ in scored], dtype=np.float64) - made
        return found

    def _run(self, ids: list[int], new: int, start: int) -> tuple[list[Any], int]:
        """Log-probabilities of the new tokens, or of the prompt from `start`; tokens cached."""
        self._runner.attach(self._arena)
        self._outputs.clear()
        sampling = SamplingParams(max_new_tokens=new, temperature=0.0, ignore_eos=True)
        message = GenerateRequest("text", ids, sampling)
        message.return_logprob, message.logprob_start_len = True, start
        self._scheduler.add(message)
        while self._scheduler.busy:
            self._scheduler.step()
        while self._cache.controller.step(64):
            pass
        parts: list[LogProbs | None] = [
            output.output_logprobs if new else output.input_logprobs for output in self._outputs
        ]
        tokens = [token for part in parts if part is not None for token in part.tokens]
        return tokens, self._outputs[-1].cached_tokens


def summarise(profile: str, prefill: str, differences: Sequence[np.ndarray]) -> dict[str, Any]:
    """One row; absolute differences in nats."""
    values = np.abs(np.concatenate(differences))
    return {
        "profile": profile,
        "prefill": prefill,
        "texts": len(differences),
        "tokens": len(values),
        "mean": float(values.mean()),
        "p99": float(np.quantile(values, 0.99)),
        "max": float(values.max()),
        "bias": float(np.concatenate(differences).mean()),
    }


def measure(count: int) -> list[dict[str, Any]]:
    """One row per profile and kind of prefill."""
    model_dir = resolve_model_path(None)
    common: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_total_tokens": 2048}
    runner = ModelRunner(ServerArgs(**common), str(model_dir))
    texts = load_texts(Tokenizer.load(model_dir), None, count)
    rows = []
    started = time.perf_counter()
    for profile in PROFILES:
        scorer = Scorer(ServerArgs(**common, kv_profile=profile), runner)
        found = [scorer.compare(prompt[:PROMPT]) for prompt, _ in texts]
        for name in ("cold", "warm"):
            rows.append(summarise(profile, name, [text[name] for text in found]))
        seconds = time.perf_counter() - started
        print(f"{profile}: {seconds:.0f} s", file=sys.stderr, flush=True)
    return rows


def make_claims(rows: Sequence[dict[str, Any]]) -> list[Claim]:
    """The exact control must agree; what compressed pages cost is told, not promised."""
    exact = max(row["max"] for row in rows if row["profile"] == "bf16")
    return [Claim.at_most("bf16, largest difference of the two paths", exact, 1e-3, "nat")]


def plot(rows: Sequence[dict[str, Any]]) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axis = figure.subplots()
    names = [f"{row['profile']}\n{row['prefill']}" for row in rows]
    for key, marker in (("mean", "o"), ("p99", "s"), ("max", "^")):
        axis.plot(names, [row[key] for row in rows], marker, label=key)
    axis.set_yscale("log")
    axis.set_ylabel("|prefill - decode| of a token's log-probability (nat)")
    axis.set_xlabel("profile, prefill with an empty or a filled cache")
    axis.legend()
    figure.suptitle(f"{rows[0]['tokens']} tokens of {rows[0]['texts']} texts")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description="Prefill-path against decode-path logprobs.")
    parser.add_argument("--texts", type=int, default=12, help=f"windows, {NEW} tokens each")
    options = parser.parse_args()
    record = Record("logprob_paths")
    rows = measure(options.texts)
    claims = make_claims(rows)
    columns = {"profile": "", "prefill": "", "tokens": "d", "mean": ".2e", "p99": ".2e"}
    print(format_table(rows, {**columns, "max": ".2e", "bias": "+.1e"}))
    print(format_claims(claims))
    record.write(rows, claims, plot(rows))


if __name__ == "__main__":
    main()
