"""Progress on stderr: bars on a terminal, few lines elsewhere."""

from __future__ import annotations

import io
import logging
import sys

import pytest

from sglang_minima.models import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_lines_come_only_when_it_takes_long(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    report = progress.stderr_progress("Converting")
    for second in range(13):
        clock[0] = 100.0 + second
        report(second * 10_000_000, 120_000_000)
    assert capsys.readouterr().err.splitlines() == [
        "Converting: 16% of 120 MB",
        "Converting: 58% of 120 MB",
        "Converting: 100% of 120 MB",
    ]


def test_short_work_is_silent(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    report = progress.stderr_progress("Loading")
    report(1, 2)
    report(2, 2)
    assert capsys.readouterr().err == ""


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    report = progress.stderr_progress("Warming up", "request")
    report(0, 1)
    assert "Warming up:   0%" in terminal.getvalue()
    report(1, 1)
    assert "Warming up: 100%" in terminal.getvalue()
    assert "1/1" in terminal.getvalue()
    assert terminal.getvalue().endswith("\n")


def test_a_quiet_log_shows_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    progress.log_progress(logging.Logger("quiet", logging.WARNING), "Loading")(1, 1)
    assert terminal.getvalue() == ""
    progress.log_progress(logging.Logger("usual", logging.INFO), "Loading")(1, 1)
    assert "Loading: 100%" in terminal.getvalue()
