"""What the scheduler says of its steps: log lines as users of SGLang know them, and counters."""

from __future__ import annotations

import logging
import re

import pytest
from engine_kit import EngineKit, make_args

from sglang_minima.runner.model_runner import ModelRunner

PREFILL = re.compile(
    r"Prefill batch, #new-seq: (\d+), #new-token: (\d+), #cached-token: (\d+), "
    r"token usage: ([\d.]+), #running-req: (\d+), #queue-req: (\d+), cuda graph: False, "
    r"input throughput \(token/s\): ([\d.]+)"
)
DECODE = re.compile(
    r"Decode batch, #running-req: (\d+), #token: (\d+), token usage: ([\d.]+), "
    r"cuda graph: False, gen throughput \(token/s\): ([\d.]+), #queue-req: (\d+)"
)
PROMPT = list(range(1, 41))


def test_lines_of_prefill_and_decode(
    tiny_runner: ModelRunner, caplog: pytest.LogCaptureFixture
) -> None:
    kit = EngineKit(
        make_args(page_size=8, decode_log_interval=4, max_total_tokens=512), tiny_runner
    )
    with caplog.at_level(logging.INFO, "sglang_minima.scheduler.statistics"):
        kit.generate([PROMPT], max_new_tokens=9, ignore_eos=True)
        kit.generate([PROMPT], max_new_tokens=1)
    lines = [record.getMessage() for record in caplog.records]
    first, decode, _, second = lines
    seen = [PREFILL.fullmatch(line) for line in (first, second)]
    assert seen[0] and seen[1], lines
    assert [match.group(1, 2, 3) for match in seen if match] == [
        ("1", "40", "0"),
        ("1", "1", "39"),
    ]
    found = DECODE.fullmatch(decode)
    assert found, decode
    assert found[1] == "1" and found[5] == "0"
    assert int(found[2]) >= len(PROMPT)
    assert kit.scheduler.statistics.snapshot()["last_cache_hit_rate"] == 39 / 40
    assert kit.scheduler.statistics.snapshot()["cache_hit_rate"] == 39 / 80


def test_shared_pages_count_once(tiny_runner: ModelRunner) -> None:
    kit = EngineKit(make_args(page_size=8, max_total_tokens=1024), tiny_runner)
    statistics = kit.scheduler.statistics
    kit.generate([PROMPT], max_new_tokens=2, ignore_eos=True)
    assert statistics.kv_read_bytes == statistics.kv_read_bytes_per_request > 0
    before = statistics.kv_read_bytes, statistics.kv_read_bytes_per_request
    kit.generate([[*PROMPT, 50 + i] for i in range(4)], max_new_tokens=8, ignore_eos=True)
    shared = statistics.kv_read_bytes - before[0]
    alone = statistics.kv_read_bytes_per_request - before[1]
    # Four readers share five pages; each has one or two of its own.
    assert 2 * shared < alone < 4 * shared


def test_time_in_the_queue_is_told(tiny_runner: ModelRunner) -> None:
    kit = EngineKit(
        make_args(page_size=8, max_total_tokens=512, max_running_requests=1), tiny_runner
    )
    rids = [kit.submit(PROMPT, max_new_tokens=2, ignore_eos=True) for _ in range(2)]
    kit.drain()
    first, second = (kit.last(rid).queue_seconds for rid in rids)
    assert first is not None and second is not None
    assert 0 <= first < second
