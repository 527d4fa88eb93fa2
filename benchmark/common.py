"""What every benchmark shares: the facts of the machine, claims with targets, table, JSON, plot."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RESULTS = Path(__file__).resolve().parent / "results"

_PACKAGES = (
    "sglang-minima", "torch", "transformers", "numpy", "flashinfer-python", "tilelang",
)  # fmt: skip
_CPU_FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")


@dataclass(frozen=True)
class Claim:
    """A measured value beside what was hoped for; a missed target stays in the record."""

    name: str
    value: float
    unit: str
    target: str
    met: bool

    @classmethod
    def at_most(cls, name: str, value: float, limit: float, unit: str) -> Claim:
        return cls(name, value, unit, f"<= {limit:g}", value <= limit)

    @classmethod
    def at_least(cls, name: str, value: float, limit: float, unit: str) -> Claim:
        return cls(name, value, unit, f">= {limit:g}", value >= limit)


@dataclass
class Record:
    """One run of one benchmark; made before the work starts, so that it knows the load then."""

    benchmark: str
    command: str = field(default_factory=lambda: _command(sys.argv))
    date: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    machine: dict[str, Any] = field(default_factory=lambda: describe_machine())
    needs_plot: bool = True

    def __post_init__(self) -> None:
        if self.needs_plot and not _can_plot():
            raise SystemExit(
                "Benchmarks draw with matplotlib, which is not installed. `make test`, or "
                '.venv/bin/pip install "sglang-minima[eval]", brings it.'
            )

    def write(
        self,
        rows: Sequence[Mapping[str, Any]],
        claims: Sequence[Claim],
        figure: Figure | None = None,
        directory: Path = RESULTS,
    ) -> Path:
        """Writes NAME.json and, with a figure, NAME.png; returns the path of the JSON file."""
        machine = {**self.machine, "load_average_after": _load()}
        content = {
            "benchmark": self.benchmark,
            "date": self.date,
            "machine": machine,
            "versions": versions(),
            "command": self.command,
            "rows": list(rows),
            "claims": [asdict(claim) for claim in claims],
        }
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"{self.benchmark}.json"
        path.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n")
        if figure is not None:
            figure.savefig(directory / f"{self.benchmark}.png", dpi=120, bbox_inches="tight")
        return path

    def finish(
        self,
        rows: Sequence[dict[str, Any]],
        claims: Sequence[Claim],
        draw: Callable[[Sequence[dict[str, Any]]], Figure],
        options: argparse.Namespace,
    ) -> None:
        """Prints the claims, and writes the record as `add_output_options` were given."""
        print(format_claims(claims))
        print(self.write(rows, claims, draw(rows) if options.plot else None, options.output))


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """Where the record goes, and whether a plot goes with it."""
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--plot", action=argparse.BooleanOptionalAction, default=_can_plot())


def _can_plot() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def panels(rows: int, columns: int, size: tuple[float, float]) -> tuple[Figure, Any]:
    """An empty figure of so many inches, and its axes [rows, columns]."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size)
    return figure, figure.subplots(rows, columns, squeeze=False)


def describe_machine() -> dict[str, Any]:
    """CPU, cores, memory and load: what a reader needs to judge the numbers."""
    model, flags = platform.processor() or platform.machine(), set[str]()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            model = value.strip()
        elif name.strip() == "flags":
            flags = set(value.split())
    return {
        "cpu": model,
        "cpu_features": [feature for feature in _CPU_FEATURES if feature in flags],
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "load_average_before": _load(),
    }


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide the numbers."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed as a package"
    return found


def format_table(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> str:
    """Rows as aligned text.

    Args:
        rows: one mapping per line; a value that is None is shown as "-".
        columns: key in the rows -> format spec, e.g. {"profile": "", "total_s": ".1f"}.
    """
    cells = [list(columns)]
    for row in rows:
        cells.append(
            ["-" if row[key] is None else format(row[key], spec) for key, spec in columns.items()]
        )
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    lines = [
        "  ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True)) for line in cells
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def format_claims(claims: Sequence[Claim]) -> str:
    """One line per claim, missed ones told as such."""
    return "\n".join(
        f"{'met   ' if claim.met else 'MISSED'}  {claim.name}: {claim.value:.4g} {claim.unit} "
        f"(target {claim.target})"
        for claim in claims
    )


def _load() -> list[float]:
    """Load averages over 1, 5 and 15 minutes."""
    return [round(value, 2) for value in os.getloadavg()]


def _command(argv: Sequence[str]) -> str:
    return shlex.join(["python", f"benchmark/{Path(argv[0]).name}", *argv[1:]])
