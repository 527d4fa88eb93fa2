"""The documentation is true: its blocks run, its links lead somewhere, its tables are current."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from docs_kit import PAGES, ROOT, Block, anchors, blocks, links
from server_kit import RunningServer

from sglang_minima.command_line import parse_args

BLOCKS = [
    block
    for page in PAGES
    if page.is_relative_to(ROOT / "docs") or page == ROOT / "README.md"
    for block in blocks(page)
]
RUN = [block for block in BLOCKS if block.info in ("bash", "python")]
# A reply with an error status must fail the block.
PREAMBLE = 'set -euo pipefail\ncurl() { command curl --fail-with-body -sS "$@"; }\n'
NOT_RUN = ("make ", "examples/router.sh ")


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory as the pages assume it: the repository with its `.venv`."""
    directory = tmp_path_factory.mktemp("docs")
    for name in ("benchmark", "docs", "examples"):
        (directory / name).symlink_to(ROOT / name)
    (directory / ".venv").symlink_to(sys.prefix)
    (directory / "home").mkdir()
    return directory


@pytest.mark.parametrize("block", RUN, ids=[block.name for block in RUN])
def test_blocks_run(
    block: Block, server: RunningServer, checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if "import sglang as" in block.text:
        pytest.importorskip("sglang")
    text = block.text.replace("http://127.0.0.1:30000", server.url)
    text = text.replace("-m sglang_minima.chat", f"-m sglang_minima.chat --url {server.url}")
    script = checkout / f"block_{block.line}.py"
    script.write_text(text)
    if block.info == "bash":
        command = ["bash", "-c", PREAMBLE + text]
    elif "__main__" in text:
        command = [sys.executable, str(script)]
    else:
        # Clients take seconds to import, which a process of its own would do once more.
        runpy.run_path(str(script))
        assert "error:" not in capsys.readouterr().out
        return
    roots = os.pathsep.join(str(ROOT / root) for root in ("python", "kernels", "radix"))
    environment = {
        **os.environ,
        "PYTHONPATH": roots,
        "OMP_NUM_THREADS": "1",
        "HOME": str(checkout / "home"),
        "SGLANG_MINIMA_CACHE": os.environ.get(
            "SGLANG_MINIMA_CACHE", str(Path.home() / ".cache" / "sglang_minima")
        ),
    }
    done = subprocess.run(
        command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "error:" not in done.stdout + done.stderr


def test_few_blocks_are_left_out() -> None:
    left_out = [block for block in BLOCKS if block.info.endswith(" notest")]
    for block in left_out:
        for line in block.text.splitlines():
            assert line.startswith(NOT_RUN), f"{block.name}: why is this not run? {line}"
    assert len(left_out) <= 5


def test_every_block_says_what_it_is() -> None:
    for block in BLOCKS:
        kind = block.info.removesuffix(" notest")
        assert kind in {"bash", "python", "json", "yaml", "text"}, block.name
        if kind == "json":
            json.loads(block.text)


def test_config_files_are_read(tmp_path: Path) -> None:
    for block in BLOCKS:
        if block.info == "yaml":
            yaml.safe_load(block.text)
        if block.text.startswith("# server.yaml"):
            path = tmp_path / "server.yaml"
            path.write_text(block.text)
            parse_args(["--config", str(path)])


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: {link}"
        if anchor:
            assert anchor in anchors(target), f"{page.name}: {link}"


def test_every_page_is_reached_from_the_readme() -> None:
    reached, waiting = set[Path](), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page in reached:
            continue
        reached.add(page)
        found = [(page.parent / link.partition("#")[0]).resolve() for link in links(page)]
        waiting += [target for target in found if target.suffix == ".md" and target.is_file()]
        waiting += [target / "README.md" for target in found if (target / "README.md").is_file()]
    assert set(PAGES) <= reached


def test_files_on_the_reading_page_exist() -> None:
    text = (ROOT / "docs/reading-the-code.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w/]+\.(?:py|cu|cpp|inl))`", text))
    folders = ("radix", "kernels", "python", "tests")
    files = [path.as_posix() for folder in folders for path in (ROOT / folder).rglob("*.*")]
    assert len(named) > 20
    assert not {name for name in named if not any(path.endswith("/" + name) for path in files)}


def test_the_page_of_flags_is_current() -> None:
    make_flags = runpy.run_path(str(ROOT / "docs" / "make_flags.py"))
    page = make_flags["PAGE"].read_text(encoding="utf-8")
    assert page == make_flags["render"](), "run python docs/make_flags.py"
