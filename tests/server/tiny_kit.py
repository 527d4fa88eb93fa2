"""A server on a tiny random model, whose steps take milliseconds, and what must hold in it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from server_kit import RunningServer, start_server, write_model

FLAGS = (
    *("--load-format", "dummy", "--dtype", "float32", "--log-level", "warning"),
    *("--page-size", "16", "--recent-window", "32", "--anchor-tokens", "16"),
    *("--max-total-tokens", "1536", "--max-running-requests", "48"),
)


def write_tiny(directory: Path) -> None:
    """Two layers, a byte-level tokenizer, a context of 512 tokens; no weights."""
    write_model(directory)
    config = json.loads((directory / "config.json").read_text())
    config |= {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config["num_key_value_heads"] = 2
    (directory / "config.json").write_text(json.dumps(config))


def start_tiny(directory: Path) -> RunningServer:
    program = ["-m", "sglang_minima.launch_server", "--model-path", str(directory)]
    return start_server(program, *FLAGS)


def eventually(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def info(server: RunningServer) -> dict[str, Any]:
    return dict(server.get("/server_info").json())


def assert_quiet(server: RunningServer) -> None:
    """Nothing runs, every request has had one end, and the tree owns every page in use."""

    def idle() -> bool:
        load = server.get("/get_load").json()[0]
        return not any(load[key] for key in ("num_reqs", "num_running_reqs", "num_waiting_reqs"))

    eventually(idle)
    reply = server.get("/check_cache")
    assert (reply.status_code, reply.json()) == (200, {"ok": True})
    now = info(server)
    cache, counts = now["cache"], now["statistics"]
    assert cache["pages_used"] == cache["pages_in_tree"] == cache["pages_evictable"]
    ended = counts["requests_completed"] + counts["requests_aborted"]
    assert counts["requests_received"] == ended
    metrics = server.get("/metrics").text
    finished = next(line for line in metrics.splitlines() if "num_requests_total{" in line)
    assert float(finished.split()[-1]) == ended
