"""Flags, the config file, flags of SGLang, and the help text."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from sglang_minima import __version__
from sglang_minima.command_line import build_parser, parse_args
from sglang_minima.foreign_flags import ELSEWHERE, FOREIGN_FLAGS
from sglang_minima.server_args import ServerArgs
from sglang_minima.settings import GROUPS, flag_name


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line of a command line that is refused."""
    with pytest.raises(SystemExit) as end:
        parse_args(list(argv))
    assert end.value.code == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    return line.removeprefix("python -m sglang_minima.launch_server: error: ").strip()


def config(tmp_path: Path, text: str) -> str:
    path = tmp_path / "server.yaml"
    path.write_text(text)
    return str(path)


def test_no_flags_are_the_defaults() -> None:
    assert parse_args([]) == ServerArgs()


def test_values_sizes_and_switches() -> None:
    argv = ["--model", "m", "--port=8000", "--max-total-tokens", "64k", "--log-requests"]
    args = parse_args([*argv, "--deterministic-cache", "false", "--chunked-prefill-size", "-1"])
    assert args == ServerArgs(
        model_path="m",
        port=8000,
        max_total_tokens=65536,
        log_requests=True,
        chunked_prefill_size=-1,
    )


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--modle", "x"], "unknown flag --modle (did you mean --model?)"),
        (["--page_size=3"], "unknown flag --page_size (did you mean --page-size?)"),
        (
            ["--prot", "1", "--hots", "x"],
            "unknown flag --prot (did you mean --port?); unknown flag --hots (did you mean",
        ),
        (["--enable-lorra"], "unknown flag --enable-lorra"),
        (["--max-num-seqs", "8"], "unknown flag --max-num-seqs (here: --max-running-requests)"),
        (["--enable-prefix-caching"], "--enable-prefix-caching (not needed: prefixes are always"),
        (["--api-key", ""], "--api-key is empty"),
        (["--host= "], "--host is empty"),
        (["--schedule-policy", "random"], "--schedule-policy: random is not supported: use fcfs"),
        (["--mod", "x"], "unknown flag --mod (did you mean --model?)"),
        (["model"], "unexpected argument 'model'"),
        (["--port", "x"], "argument --port: invalid int value: 'x'"),
        (["--log-requests=maybe"], "argument --log-requests: 'maybe' is neither true nor false"),
        (["--kv-cache-memory", "2x"], "--kv-cache-memory: '2x' is not a number such as 512, 32k"),
        (
            ["--kv-cache-memory", "9" * 400],
            "'99999999999999999999' is too large a number",
        ),
        (["--context-length", "9" * 20], "--context-length: '99999999999999999999' is too large"),
        (["--cpu-threads", "100000"], "--cpu-threads must be in [1, 1024]"),
        (["--cpu-threads", "0"], "--cpu-threads must be in [1, 1024]"),
        (["--port", "70000"], "--port must be in [0, 65535]"),
        (["--max-total-tokens", "1", "--kv-cache-memory", "1"], "exclude each other"),
    ],
)
def test_wrong_flags(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = refusal(capsys, *argv)
    assert message in line
    assert ("did you mean" in line) == ("did you mean" in message)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_args(["--version"])
    assert capsys.readouterr().out == f"{__version__}\n"


# --- config file ----------------------------------------------------------------------------------


def test_config_file(tmp_path: Path) -> None:
    text = "port: 8000\nmax_total_tokens: 64k\nlog-requests: true\nstale-fp8-layers: [0, -1]\n"
    path = config(tmp_path, text + "api-key:\nmem-fraction-static: 0.5\nkv-profile: minima\n")
    expected = ServerArgs(
        port=8000,
        max_total_tokens=65536,
        log_requests=True,
        stale_fp8_layers="0,-1",
        mem_fraction_static=0.5,
    )
    assert parse_args(["--config", path]) == expected


def test_the_command_line_wins(tmp_path: Path) -> None:
    path = config(tmp_path, "port: 8000\nlog-requests: true\nkv-profile: fp8\n")
    args = parse_args(["--port", "30000", f"--config={path}", "--log-requests=false"])
    assert args == ServerArgs(kv_profile="fp8")


def test_an_empty_config_file(tmp_path: Path) -> None:
    assert parse_args(["--config", config(tmp_path, "# nothing\n")]) == ServerArgs()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prt: 1\nhots: x\n", "unknown key prt (did you mean port?); unknown key hots"),
        ("config: other.yaml\n", "unknown key config"),
        ("max-num-seqs: 1\n", "unknown key max-num-seqs (here: --max-running-requests)"),
        ("model-path: ''\n", "--model-path is empty"),
        ("port: true\n", "port takes a value"),
        ("log-requests: 3\n", "log-requests takes true or false"),
        ("port: x\n", "argument --port: invalid int value: 'x'"),
        ("port: {a: 1}\n", "port takes one value"),
        ("- port\n", "not a list of lines"),
        ("port: [\n", "expected the node content"),
        ("port: 99999\n", "--port must be in [0, 65535]"),
        ("enable-lora: true\n", "--enable-lora is not supported"),
    ],
)
def test_wrong_config(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refusal(capsys, "--config", config(tmp_path, text))


def test_errors_of_the_file_name_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = config(tmp_path, "prt: 1\n")
    assert refusal(capsys, "--config", path).startswith(path)
    assert refusal(capsys, "--config", "nowhere.yaml") == (
        "--config nowhere.yaml: No such file or directory"
    )


# --- flags of SGLang ------------------------------------------------------------------------------


def test_accepted_flags_are_noted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    argv = ["--enable-metrics", "--attention-backend", "flashinfer", "--tp", "1"]
    path = config(tmp_path, "disable-cuda-graph-padding: true\nenable-cache-report: false\n")
    assert parse_args([*argv, "--config", path]) == ServerArgs()
    assert capsys.readouterr().err.splitlines() == [
        "note: --disable-cuda-graph-padding: decode steps are captured up to "
        "--max-running-requests (256 at most)",
        "note: --enable-metrics: metrics are always served at /metrics",
        "note: --attention-backend flashinfer: kernels are chosen by the machine",
    ]


def test_flags_that_stand_for_settings(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--kv-cache-dtype", "fp8_e4m3", "--enable-deterministic-inference"]
    assert parse_args(argv) == ServerArgs(kv_profile="fp8", deterministic_cache=True)
    notes = capsys.readouterr().err
    assert "--kv-cache-dtype fp8_e4m3: the same as --kv-profile fp8\n" in notes
    assert "--enable-deterministic-inference: the same as --deterministic-cache\n" in notes
    assert parse_args(["--kv-cache-dtype", "auto"]) == ServerArgs()
    assert capsys.readouterr().err == ""


def test_hints_of_other_servers_names_are_true() -> None:
    names = {name.removeprefix("--") for name in build_parser()._option_string_actions}
    for other, hint in ELSEWHERE.items():
        assert other not in names
        assert set(re.findall(r"--([a-z-]+)", hint)) <= names


def test_flags_that_cannot_be_honoured(capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(capsys, "--tp", "2").startswith("--tp 2 is not supported, only 1: ")
    message = refusal(capsys, "--lora-paths", "a", "b", "--port", "1")
    assert message == "--lora-paths is not supported: adapters are not served"
    assert "only auto or fp8_e4m3" in refusal(capsys, "--kv-cache-dtype", "fp8_e5m2")


def test_foreign_flags_are_foreign() -> None:
    flags = [flag for foreign in FOREIGN_FLAGS for flag in foreign.flags]
    assert len(set(flags)) == len(flags)
    own = {flag_name(entry.name) for entry in dataclasses.fields(ServerArgs)}
    assert not own & set(flags)


# --- help -----------------------------------------------------------------------------------------


def test_help_shows_every_setting_in_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    text = build_parser().format_help()
    assert max(map(len, text.splitlines())) <= 100
    places = [text.index(f"\n{name} ({about}):") for name, about in GROUPS.items()]
    assert places == sorted(places)
    for entry in dataclasses.fields(ServerArgs):
        place = text.index(f"  {flag_name(entry.name)}")
        group = list(GROUPS).index(entry.metadata["group"])
        assert places[group] < place < [*places, len(text)][group + 1]
        if entry.default not in (None, "", False, True):
            assert f"(default: {entry.default})" in " ".join(text[place:].split())
    assert "--max-total-tokens TOKENS" in text
    assert "--kv-profile minima|fp8|bf16" in text
