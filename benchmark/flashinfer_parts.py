"""FlashInfer against torch in the engine's own calls: norms, activations, causal prefill, sampling.

Norms and activations as in decode steps (1 and 64 rows, CUDA graphs) and in prefill (4,096 rows);
attention of new tokens to each other in one layer, requests of one length and ragged; sampling
over a vocabulary of 128,256 tokens, beside a sort of all probabilities in float64.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from common import Claim, add_output_options, format_table, panels
from gpu_timing import gpu_record, time_events, time_graph

from minima_kernels.cuda import library
from minima_kernels.cuda.extend import attend_new
from minima_kernels.cuda.library import library_off
from minima_kernels.cuda.ragged import RaggedPrefill
from sglang_minima.models.layer_ops import FlashInferOps, LayerOps, TorchOps
from sglang_minima.runner.cut import Cut, draw_cut

DEVICE = torch.device("cuda", 0)
GEOMETRIES = {"A": (24, 4, 256), "B": (32, 8, 128), "C": (32, 8, 64)}
LENGTHS = {
    "1 x 512": [512],
    "1 x 4,096": [4096],
    "8 x 512": [512] * 8,
    "16 ragged": [37 + 91 * i for i in range(16)],
}
VOCABULARY = 128256
CALLS = 32
"""In one graph: a launch of it takes as long as some of them."""
CUTS = {
    "whole": (-1, 1.0, 0.0),
    "top-p 0.95": (-1, 0.95, 0.0),
    "top-k 20, top-p 0.95": (20, 0.95, 0.0),
}
COLUMNS = {"part": "", "case": "", "torch_us": ".1f", "library_us": ".1f", "speedup": ".2f",
           "sort_us": ".0f", "note": ""}  # fmt: skip

Rows = list[dict[str, Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    add_output_options(parser)
    arguments = parser.parse_args()
    record = gpu_record("flashinfer_parts")
    rows = [*layers(arguments.rounds), *prefill(arguments.rounds), *sampling(arguments.rounds)]
    print(format_table(rows, COLUMNS))
    claims = [
        Claim.at_least(f"{row['part']}, {row['case']}: over torch", row["speedup"], 1.0, "x")
        for row in rows
        if row["speedup"] is not None
    ]
    for row in rows:
        if row["sort_us"] is not None:
            ours = min(us for us in (row["torch_us"], row["library_us"]) if us is not None)
            name = f"{row['part']}, {row['case']}: over a sort of the vocabulary"
            claims.append(Claim.at_least(name, row["sort_us"] / ours, 1.0, "x"))
    record.finish(rows, claims, draw, arguments)


def row(
    part: str, case: str, torch_us: float, library_us: float | None, **more: Any
) -> dict[str, Any]:
    speedup = None if library_us is None else torch_us / library_us
    return {
        "part": part, "case": case, "torch_us": torch_us, "library_us": library_us,
        "speedup": speedup, "sort_us": None, "note": "",
    } | more  # fmt: skip


def layers(rounds: int) -> Rows:
    """Norms and activations of an 8B model's layer."""
    reason = library.layers_reason(DEVICE, torch.bfloat16)
    rows: Rows = []
    for count in (1, 64, 4096):
        x, residual = torch.randn(2, count, 4096, device=DEVICE).bfloat16().unbind()
        gate_up = torch.randn(count, 2 * 14336, device=DEVICE).bfloat16()
        heads = torch.randn(count, 48, 128, device=DEVICE).bfloat16()[:, :32]
        weight = torch.ones(4096, device=DEVICE, dtype=torch.bfloat16)

        def add_norm(
            ops: LayerOps, x: Any = x, residual: Any = residual, w: Any = weight
        ) -> object:
            if ops.fuses_residuals:
                return ops.add_rms_norm(x, residual, w, 1e-5)
            return ops.rms_norm(x + residual, w, 1e-5)

        def head_norm(ops: LayerOps, heads: Any = heads, w: Any = weight[:128]) -> object:
            return ops.rms_norm(heads, w, 1e-6)

        def activation(ops: LayerOps, gate_up: Any = gate_up) -> object:
            return ops.silu_and_mul(gate_up)

        for part, call in (
            ("add + norm", add_norm),
            ("head norm", head_norm),
            ("SiLU", activation),
        ):
            times: list[float | None] = []
            for ops in (TorchOps(), None if reason else FlashInferOps()):
                found = None if ops is None else time_graph([partial(call, ops)] * CALLS, rounds)[0]
                times.append(found)
            assert times[0] is not None
            rows.append(row(part, f"{count} rows", times[0], times[1], note=reason or ""))
    return rows


def prefill(rounds: int) -> Rows:
    """Causal attention of new tokens to each other, planning left out as it is once a step."""
    return [causal(name, case, rounds) for name in GEOMETRIES for case in LENGTHS]


def causal(name: str, case: str, rounds: int) -> dict[str, Any]:
    heads, kv_heads, dim = GEOMETRIES[name]
    indptr = [0, *accumulate(LENGTHS[case])]
    joint = torch.randn(indptr[-1], heads + 2 * kv_heads, dim, device=DEVICE).bfloat16()
    q, k, v = joint.split((heads, kv_heads, kv_heads), dim=1)
    tensors, scale = (q.contiguous(), k.contiguous(), v), dim**-0.5
    by_torch = 1e3 * time_events(lambda: attend_new(*tensors, indptr, scale), rounds)
    reason = library.prefill_reason(DEVICE, torch.bfloat16, heads, kv_heads, dim)
    if reason is not None:
        return row("causal", f"{name}, {case}", by_torch, None, note=reason)
    kernel, step = RaggedPrefill(DEVICE, dim), object()
    found = 1e3 * time_events(lambda: kernel.attend(step, *tensors, indptr, scale), rounds)
    plans = 1e3 * time_events(lambda: kernel.attend(object(), *tensors, indptr, scale), rounds)
    note = f"planned each time: {plans:.0f} µs"
    return row("causal", f"{name}, {case}", by_torch, found, note=note)


def sampling(rounds: int) -> Rows:
    """From logits to tokens, tables of the rows included."""
    rows: Rows = []
    reason = library.sampling_reason(DEVICE)
    for count in (1, 64):
        logits = (torch.randn(count, VOCABULARY, device=DEVICE) * 3).bfloat16().float()
        for case, cut in CUTS.items():
            cuts = [Cut(0.8, (i + 0.5) / count, *cut) for i in range(count)]

            def run(cuts: Any = cuts, logits: Any = logits) -> object:
                return draw_cut(logits, cuts)

            with library_off():
                by_torch = 1e3 * time_events(run, rounds)
            found = 1e3 * time_events(run, rounds) if case == "top-p 0.95" and not reason else None
            by_sort = 1e3 * time_events(by_sorting(logits, cut), rounds)
            rows.append(row("sampling", f"{count} rows, {case}", by_torch, found, sort_us=by_sort))
    return rows


def by_sorting(logits: torch.Tensor, cut: tuple[int, float, float]) -> Callable[[], object]:
    """All probabilities in float64, sorted unless nothing is cut."""
    top_k, top_p, _ = cut
    point = torch.rand(len(logits), 1, dtype=torch.float64, device=logits.device)

    def run() -> object:
        probs = torch.softmax(logits.double() / 0.8, -1)
        if top_k == -1 and top_p == 1:
            return torch.searchsorted(probs.cumsum(-1), point)
        ordered, order = probs.sort(dim=-1, descending=True, stable=True)
        if top_k > 0:
            ordered = ordered * (torch.arange(VOCABULARY, device=logits.device) < top_k)
        ordered = ordered / ordered.sum(-1, keepdim=True)
        summed = ordered.cumsum(-1)
        left = (ordered * (summed - ordered < top_p)).cumsum(-1)
        return order.gather(-1, torch.searchsorted(left, point * left[:, -1:]))

    return run


def draw(rows: Sequence[dict[str, Any]]) -> Any:
    """Speed over torch, part by part."""
    shown = [row for row in rows if row["speedup"] is not None]
    figure, axes = panels(1, 1, (7, 0.3 * len(shown) + 1))
    axis = axes[0, 0]
    axis.barh([f"{row['part']}, {row['case']}" for row in shown], [row["speedup"] for row in shown])
    axis.axvline(1.0, color="black", linewidth=0.8)
    axis.invert_yaxis()
    axis.set(xlabel="times as fast as torch")
    figure.tight_layout()
    return figure


if __name__ == "__main__":
    main()
