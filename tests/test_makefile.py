"""The README's two commands: what they would install is what pip takes and the project offers."""

from __future__ import annotations

import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("gpus", [0, 1])
@pytest.mark.parametrize(
    ("target", "extras"), [("serve", set()), ("test", {"dev", "eval", "frontend", "router"})]
)
def test_a_fresh_clone_installs(target: str, extras: set[str], gpus: int, tmp_path: Path) -> None:
    command = ["make", "-n", target, f"GPU={gpus}", f"VENV={tmp_path / 'venv'}", "MAKEFLAGS="]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    lines = [shlex.split(line) for line in printed.splitlines()]
    (installed,) = (line[line.index("-e") + 1] for line in lines if "-e" in line)
    match = re.fullmatch(r"\.(?:\[([a-z]+(?:,[a-z]+)*)\])?", installed)
    assert match, installed
    named = set((match[1] or "").split(",")) - {""}
    assert named == extras | ({"gpu"} if gpus else set())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert named <= set(project["optional-dependencies"])
    constrained = [line for line in lines if "constraints-cpu.txt" in line]
    assert len(constrained) == (0 if gpus else 1)
