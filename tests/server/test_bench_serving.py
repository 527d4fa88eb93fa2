"""The harness of SGLang users runs against the server, and its output is read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from server_kit import HERE, RunningServer
from tiny_kit import info

pytest.importorskip("sglang")

HARNESS = HERE.parents[1] / "benchmark" / "bench_serving_harness.py"


def run(*arguments: str, home: Path) -> subprocess.CompletedProcess[str]:
    # The harness keeps generated prompts in the home directory.
    environment = {**os.environ, "HOME": str(home), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HARNESS), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_generated_shared_prefixes(tiny: RunningServer, tiny_dir: Path, tmp_path: Path) -> None:
    before = info(tiny)["statistics"]
    output = tmp_path / "out.jsonl"
    done = run(
        *("--backend", "sglang", "--base-url", tiny.url, "--tokenizer", str(tiny_dir)),
        *("--dataset-name", "generated-shared-prefix", "--gsp-num-groups", "2"),
        *("--gsp-prompts-per-group", "3", "--gsp-system-prompt-len", "64"),
        *("--gsp-question-len", "16", "--gsp-output-len", "8", "--disable-tqdm"),
        *("--max-concurrency", "2", "--flush-cache", "--output-file", str(output)),
        home=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    written: dict[str, Any] = json.loads(output.read_text())
    assert (written["completed"], written["total_output_tokens"]) == (6, 48)
    assert written["mean_ttft_ms"] > 0
    # The harness keeps what /server_info answered.
    counters = written["server_info"]["statistics"]
    assert counters["cached_tokens"] - before["cached_tokens"] >= 2 * 2 * 48
