"""The README's commands: what they would install is what pip takes and the project offers, and they
say what they do."""

from __future__ import annotations

import re
import shlex
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def plan(target: str, gpus: int, venv: Path) -> list[list[str]]:
    """The commands that make would run, as words."""
    command = ["make", "-n", target, f"GPU={gpus}", f"VENV={venv}", "MAKEFLAGS="]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [shlex.split(line) for line in printed.replace("\\\n", "").splitlines()]


@pytest.mark.parametrize("gpus", [0, 1])
@pytest.mark.parametrize(
    ("target", "extras"), [("serve", set()), ("test", {"dev", "eval", "frontend", "router"})]
)
def test_a_fresh_clone_installs(target: str, extras: set[str], gpus: int, tmp_path: Path) -> None:
    lines = plan(target, gpus, tmp_path / "venv")
    (installed,) = (line[line.index("-e") + 1] for line in lines if "-e" in line)
    match = re.fullmatch(r"\.(?:\[([a-z]+(?:,[a-z]+)*)\])?", installed)
    assert match, installed
    named = set((match[1] or "").split(",")) - {""}
    assert named == extras | ({"gpu"} if gpus else set())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert named <= set(project["optional-dependencies"])
    constrained = [line for line in lines if "constraints-cpu.txt" in line]
    assert len(constrained) == (0 if gpus else 1)


@pytest.mark.parametrize("gpus", [0, 1])
def test_the_client_comes_without_test_tools(gpus: int, tmp_path: Path) -> None:
    """And where the server was installed, nothing is compiled again for it."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    (tmp_path / ".installed").touch()
    lines = plan("frontend", gpus, tmp_path)
    installs = [line[line.index("install") + 1 :] for line in lines if "install" in line]
    named = [[word for word in words if not word.startswith("-")] for words in installs]
    constraints = [] if gpus else ["constraints-cpu.txt"]
    (client,) = re.findall(r"^FRONTEND := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert named == [[*constraints, "sglang-minima[frontend]"], [client]]
    assert "--no-deps" in installs[1] and not any("-e" in line for line in lines)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra = project["optional-dependencies"]["frontend"]
    assert not {"pytest", "tilelang", "hypothesis"} & {re.split(r"\W", name)[0] for name in extra}
    pages = ("README.md", "docs/quickstart.md", "examples/frontend/README.md")
    assert all("make frontend" in (ROOT / page).read_text() for page in pages)


PYTHON = """#!/bin/sh
case "$2" in
venv) mkdir -p "$3/bin"; cp "$0" "$3/bin/python";;
*) echo "ran $*";;
esac
"""


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("target", ["serve", "frontend", "$(VENV)/.installed-dev"])
def test_what_takes_long_is_announced(target: str, terminal: bool, tmp_path: Path) -> None:
    """A line before every run of pip; in a terminal pip itself shows what it does."""
    python = tmp_path / "python"
    python.write_text(PYTHON)
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    venv = tmp_path / "venv"
    target = target.replace("$(VENV)", str(venv))
    command = ["make", target, f"VENV={venv}", f"PYTHON={python}", "GPU=0", "MAKEFLAGS="]
    if terminal:
        code = f"import pty, sys; sys.exit(pty.spawn({command!r}))"
        command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True
    )
    lines = done.stdout.splitlines()
    runs = [i for i, line in enumerate(lines) if line.startswith("ran -m pip install")]
    assert len(runs) >= 3
    for i in runs[1:]:
        # Before pip stands its own command, and before that the line for people.
        assert lines[i - 2].startswith("Installing ") or "ran -m pip" in lines[i - 2]
    assert sum(line.startswith("Installing ") for line in lines) >= 2
    assert all(("--quiet" in lines[i]) != terminal for i in runs)
