"""What a warm prefix hit costs in fidelity, without --deterministic-cache.

    python benchmark/cold_warm.py

A warm hit reads the cached prefix from sealed, compressed pages where an exact run reads what the
model computed. For every text: *cold* = exact prefill of all N tokens (profile bf16, which stores
float32 here, one chunk); *warm* = the first N - 256 tokens were the prompt of an earlier request,
its pages are in the tree and have settled in their tiers, and the last 256 tokens run over them.
Both score the same 256 next tokens of the text. The row "bf16" is the warm run over exact pages:
the noise floor of the measurement (and 32 bits a value: compare bytes with 16 bits, not with it).

The scored tokens read each other exactly, as they do in a prefill chunk of the server. That is
easier than scoring with every older key and value compressed, where errors compound from token to
token: the targets come from such a measurement and should be met with room to spare.

The server's own cold run prefills in chunks of 512 and reads its earlier chunks from Recent (FP8)
pages, so in the profiles minima and fp8 a cold prompt of several chunks is close to the row "fp8".

Texts: by default windows spread evenly over the Python language reference that comes with Python
(`pydoc_data.topics`). Licences would be handier, but models know them by heart.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from common import Claim, Record, format_claims, format_table

from minima_radix import Namespace
from sglang_minima.cache.accounting import report
from sglang_minima.cache.prefix_cache import PrefixCache
from sglang_minima.messages import GenerateRequest
from sglang_minima.models.resolve import resolve_model_path
from sglang_minima.runner.batch import DecodeRows, Work, build_batch
from sglang_minima.runner.model_runner import ModelRunner
from sglang_minima.sampling_params import SamplingParams
from sglang_minima.scheduler.request import Request
from sglang_minima.scheduler.scheduler import Scheduler
from sglang_minima.scheduler.stopping import StopMatcher
from sglang_minima.server_args import ServerArgs
from sglang_minima.tokenization.tokenizer import Tokenizer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCORED = 256
LENGTHS = (1024, 1280, 1536)
VARIANTS: dict[str, dict[str, Any]] = {
    "bf16": {"kv_profile": "bf16"},
    "fp8": {"kv_profile": "fp8"},
    "minima tq(16,4)": {"kv_profile": "minima", "stale_format": "tq(16,4)"},
    "minima tq3": {"kv_profile": "minima"},
}


class Fidelity(NamedTuple):
    """Warm against cold at the scored positions of one text."""

    kl: np.ndarray
    """float64 [SCORED], nats: KL(cold || warm)."""
    same_top: np.ndarray
    """bool [SCORED]"""
    delta_nll: np.ndarray
    """float64 [SCORED], nats: warm minus cold, of the next token of the text."""


@dataclass
class Variant:
    """A cache of one profile with a scheduler over it, on a model that all variants share."""

    args: ServerArgs
    runner: ModelRunner

    def __post_init__(self) -> None:
        self.arena = self.runner.allocate(self.args)
        self.cache = PrefixCache(self.args, self.arena)
        self.scheduler = Scheduler(
            self.args, self.runner, self.cache, None, frozenset(), lambda outputs: None
        )

    def store(self, tokens: Sequence[int]) -> None:
        """Serves `tokens` as a prompt and lets every page settle in its tier."""
        self.runner.attach(self.arena)
        self.scheduler.add(_message(tokens))
        while self.scheduler.busy:
            self.scheduler.step()
        while self.cache.controller.step(64):
            pass

    def last_logits(self, tokens: Sequence[int], cached: int) -> torch.Tensor:
        """Runs the tokens after the cached prefix in one chunk over it.

        Args:
            tokens: the whole prompt.
            cached: leading tokens that must come from the cache.

        Returns:
            float32 [SCORED, vocab]: logits of the last positions.
        """
        self.runner.attach(self.arena)
        message = _message(tokens)
        namespace = Namespace(message.salt, message.lora, self.cache.profile.name)
        request = Request(
            message, 1, namespace, StopMatcher(message.sampling, frozenset(), None), 0
        )
        self.cache.admit(request)
        if request.written != cached:
            raise RuntimeError(f"{request.written} tokens came from the cache, not {cached}")
        if not self.cache.reserve(request, request.pending):
            raise RuntimeError("the KV arena is too small for this text")
        assert request.table is not None
        work = Work(request.table, request.tokens[cached:], cached)
        batch = build_batch([work], DecodeRows([], [], []), self.cache, self.runner.device)
        hidden = self.runner.forward(batch).hidden
        self.cache.release(request)
        return self.runner.logits(hidden[-SCORED:])


def _message(tokens: Sequence[int]) -> GenerateRequest:
    sampling = SamplingParams(max_new_tokens=0, temperature=0.0)
    return GenerateRequest("text", list(tokens), sampling)


def compare(cold: torch.Tensor, warm: torch.Tensor, targets: torch.Tensor) -> Fidelity:
    """Two runs at the same positions.

    Args:
        cold: float32 logits [n, vocab].
        warm: float32 logits [n, vocab].
        targets: int64 [n], the tokens that follow in the text.
    """
    p, q = (torch.log_softmax(logits.double(), dim=-1) for logits in (cold, warm))
    kl = (p.exp() * (p - q)).sum(dim=-1)
    index = targets.unsqueeze(-1)
    delta = (p.gather(-1, index) - q.gather(-1, index)).squeeze(-1)
    same = cold.argmax(dim=-1) == warm.argmax(dim=-1)
    return Fidelity(kl.numpy(), same.numpy(), delta.numpy())


def load_texts(
    tokenizer: Tokenizer, data: Path | None, count: int
) -> list[tuple[list[int], list[int]]]:
    """Windows spread evenly over the source: (prompt of N tokens, the SCORED next tokens)."""
    if data is not None:
        source = data.read_text(encoding="utf-8", errors="replace")
    else:
        from pydoc_data.topics import topics

        # Some topics are repeated inside a longer one.
        texts = sorted(set(topics.values()))
        source = "\n\n".join(t for t in texts if not any(t in u for u in texts if u is not t))
    ids = tokenizer.encode(source, add_special_tokens=False)
    room = len(ids) - max(LENGTHS) - 1
    if room < 0 or (count > 1 and room // (count - 1) < SCORED):
        raise SystemExit(f"the text has only {len(ids)} tokens: too few for {count} windows")
    result = []
    for index in range(count):
        start = room * index // max(count - 1, 1)
        window = ids[start : start + LENGTHS[index % len(LENGTHS)] + 1]
        result.append((window[:-1], window[-SCORED:]))
    return result


def mean_and_error(values: Sequence[np.ndarray]) -> tuple[float, float | None]:
    """Mean over all positions and its standard error over texts (None for a single text)."""
    means = np.array([text.mean() for text in values])
    error = float(means.std(ddof=1) / len(means) ** 0.5) if len(means) > 1 else None
    return float(means.mean()), error


def summarise(
    name: str, results: Sequence[Fidelity], variant: Variant, stored: list[tuple[int, int]]
) -> dict[str, Any]:
    """The row of one variant; `stored` has (tokens, bytes) of each text's cached prefix."""
    geometry = variant.arena.geometry
    kl, kl_error = mean_and_error([result.kl for result in results])
    top, top_error = mean_and_error([result.same_top for result in results])
    nll, nll_error = mean_and_error([result.delta_nll for result in results])
    bytes_per_token = sum(size for _, size in stored) / sum(tokens for tokens, _ in stored)
    bf16 = 2 * 2 * geometry.num_layers * geometry.num_kv_heads * geometry.head_dim
    return {
        "variant": name,
        "positions": sum(len(result.kl) for result in results),
        "texts": len(results),
        "kl_mean": kl,
        "kl_se": kl_error,
        "kl_p99": float(np.quantile(np.concatenate([result.kl for result in results]), 0.99)),
        "top1_agreement": top,
        "top1_se": top_error,
        "delta_nll": nll,
        "delta_nll_se": nll_error,
        "bytes_per_token": bytes_per_token,
        "compression_vs_16bit": bf16 / bytes_per_token,
        "stale_bits_per_value": variant.cache.profile.stale.bits_per_value(geometry),
    }


def measure(count: int, data: Path | None) -> list[dict[str, Any]]:
    """Runs every text through every variant; one row per variant."""
    model_dir = resolve_model_path(None)
    runner = ModelRunner(ServerArgs(dtype="float32"), str(model_dir))
    texts = load_texts(Tokenizer.load(model_dir), data, count)
    common: dict[str, Any] = {
        "dtype": "float32",
        "max_total_tokens": 2 * max(LENGTHS),
        "device": "cpu",
    }
    variants = {
        name: Variant(ServerArgs(**common, **settings), runner)
        for name, settings in VARIANTS.items()
    }
    results: dict[str, list[Fidelity]] = {name: [] for name in variants}
    stored: dict[str, list[tuple[int, int]]] = {name: [] for name in variants}
    started = time.perf_counter()
    for index, (prompt, following) in enumerate(texts):
        cold = variants["bf16"].last_logits(prompt, 0)
        prefix = len(prompt) - SCORED
        for name, variant in variants.items():
            variant.store(prompt[:prefix])
            usage = report(variant.cache)
            stored[name].append((prefix, usage["bytes_used"]))
            warm = variant.last_logits(prompt, prefix)
            results[name].append(compare(cold, warm, torch.tensor(following)))
            variant.cache.flush()
        seconds = time.perf_counter() - started
        print(f"text {index + 1} of {count}: {seconds:.0f} s", file=sys.stderr, flush=True)
    return [summarise(name, results[name], variants[name], stored[name]) for name in variants]


def make_claims(rows: Sequence[dict[str, Any]]) -> list[Claim]:
    """The levels that the codec notes measured on fake-quantised KV."""
    row = {entry["variant"]: entry for entry in rows}
    tq3, fp8 = row["minima tq3"], row["fp8"]
    return [
        Claim.at_most("minima tq3, mean KL of a warm hit", tq3["kl_mean"], 0.05, "nat"),
        Claim.at_least("minima tq3, top-1 agreement", 100 * tq3["top1_agreement"], 88, "%"),
        Claim.at_most("fp8, mean KL of a warm hit", fp8["kl_mean"], 0.015, "nat"),
    ]


def plot(rows: Sequence[dict[str, Any]]) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    axes = figure.subplots(1, 3)
    names = [row["variant"].replace(" ", "\n") for row in rows]
    panels = (
        ("kl_mean", "kl_se", 1.0, "KL(cold || warm), mean (nat)"),
        ("top1_agreement", "top1_se", 100.0, "top-1 agreement (%)"),
        ("bytes_per_token", None, 1 / 1024, "KV of the prefix (KiB per token; bf16: float32)"),
    )
    for axis, (key, error, scale, label) in zip(axes, panels, strict=True):
        errors = None if error is None else [scale * (row[error] or 0.0) for row in rows]
        bars = axis.bar(names, [scale * row[key] for row in rows], yerr=errors, capsize=4)
        axis.bar_label(bars, fmt="{:.3g}", padding=3)
        axis.set_xlabel("profile of the cached pages")
        axis.set_ylabel(label)
        axis.margins(y=0.15)
    axes[1].set_ylim(75, 102)
    positions, texts = rows[0]["positions"], rows[0]["texts"]
    figure.suptitle(
        f"A warm prefix hit against an exact cold run: {positions} positions of {texts} texts "
        "(bars: standard error over texts)"
    )
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description="Fidelity of warm prefix hits.")
    parser.add_argument("--texts", type=int, default=18, help="windows, 256 positions each")
    parser.add_argument("--data", type=Path, help="text file (default: Python's reference)")
    options = parser.parse_args()
    record = Record("cold_warm")
    rows = measure(options.texts, options.data)
    claims = make_claims(rows)
    columns = {"variant": "", "positions": "d", "kl_mean": ".5f", "kl_se": ".5f", "kl_p99": ".4f"}
    columns |= {"top1_agreement": ".2%", "top1_se": ".2%", "delta_nll": "+.5f"}
    columns |= {"delta_nll_se": ".5f", "bytes_per_token": ".0f", "compression_vs_16bit": ".2f"}
    print(format_table(rows, columns))
    print(format_claims(claims))
    record.write(rows, claims, plot(rows))


if __name__ == "__main__":
    main()
