"""Starts that cannot succeed: one line that names what to change, and no traceback."""

from __future__ import annotations

import errno
import re
import socket
import sys
import tempfile
from pathlib import Path

import pytest
import zmq
from server_kit import free_port, start_server, write_model

from sglang_minima import processes
from sglang_minima.channels import Addresses
from sglang_minima.launch_server import _bind
from sglang_minima.models import ModelLoadError, UnsupportedModel
from sglang_minima.models.cache import CACHE_VARIABLE, build_once, renewal_hint
from sglang_minima.processes import LaunchError, ProcessGroup, load_tokenizer, resolve_model
from sglang_minima.server_args import ServerArgs


@pytest.mark.parametrize("host", ["a" * 80, "a..b", "b\udcff", "8.8.8.8"])
def test_hosts_that_are_none(host: str) -> None:
    with pytest.raises(LaunchError, match="cannot listen on "):
        _bind(host, free_port())


@pytest.mark.parametrize("place", ["the cache", "above it"])
def test_a_file_in_the_place_of_the_cache(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole program, which must end before it loads anything."""
    (tmp_path / "file").write_text("")
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    folder = tmp_path / "file" / ("" if place == "the cache" else "deep")
    monkeypatch.setenv(CACHE_VARIABLE, str(folder))
    program = ["-m", "sglang_minima.launch_server", "--model-path", str(tmp_path / "m.gguf")]
    server = start_server(program, wait=False)
    output = server.process.communicate(timeout=60)[0]
    assert server.process.returncode == 1
    [line] = output.splitlines()
    assert line.startswith("error: ")
    assert str(folder) in line and CACHE_VARIABLE in line


def group(name: str) -> ProcessGroup:
    sys.path.insert(0, str(Path(__file__).parent))  # a child gets the path of its parent
    try:
        return ProcessGroup(ServerArgs(), {"test": f"failing_children:{name}"})
    finally:
        del sys.path[0]


def test_a_child_that_refuses_is_told_in_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    children = group("refuse")
    with pytest.raises(LaunchError, match=r"^the weights are missing$"):
        children.wait_ready()
    children._processes["test"].join(30)
    assert children._processes["test"].exitcode == 1
    children.stop()
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("name", ["stumble", "fail_later"])
def test_faults_of_ours_show_where(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    children = group(name)
    if name == "stumble":
        with pytest.raises(LaunchError, match="nobody thought of this"):
            children.wait_ready()
    else:
        assert children.wait_ready() == {}
    children._processes["test"].join(30)
    children.stop()
    output = capfd.readouterr().err
    assert "Traceback" in output and "failing_children.py" in output


def test_temporary_folders_that_hold_no_sockets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / ("d" * 90)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    with pytest.raises(LaunchError, match=rf"{folder} is too long .*: name a folder with TMPDIR"):
        group("refuse")
    assert not list(folder.iterdir())
    short = Path(tempfile.mkdtemp(dir="/tmp"))
    longest = zmq.IPC_PATH_MAX_LEN - len("/sglang_minima_12345678/detokenizer")
    fitting = short / ("d" * (longest - len(str(short)) - 1))
    fitting.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(fitting))
    addresses = Addresses.create()
    with zmq.Context() as context, context.socket(zmq.PULL) as receiver:
        receiver.bind(addresses.detokenizer)

    def nowhere(**named: object) -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "mkdtemp", nowhere)
    with pytest.raises(LaunchError, match=r"No usable temporary directory .*TMPDIR"):
        group("refuse")


def test_no_more_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(self: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(processes.multiprocessing.context.SpawnProcess, "start", exhausted)
    with pytest.raises(LaunchError, match="processes cannot start: Too many open files"):
        group("refuse")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% if %}", r"The chat template cannot be read: Expected an expression.* \(line 1\)"),
        ("{{ x | nofilter }}", "The chat template cannot be read: No filter named 'nofilter'"),
        ("~nobody-here/template", "The chat template ~nobody-here/template cannot be read"),
        ("{{ raise_exception('not this') }}", None),
        ("{{ messages[7].content }}", None),
    ],
)
def test_chat_templates(template: str, message: str | None, tmp_path: Path) -> None:
    """One that is no Jinja ends the start; which messages it takes is for requests to find."""
    write_model(tmp_path)
    args = ServerArgs(model_path=str(tmp_path), chat_template=template)
    if message is None:
        assert load_tokenizer(args).has_chat_template
    else:
        with pytest.raises(LaunchError, match=message):
            load_tokenizer(args)


def test_what_is_wrong_with_a_model_is_said_as_it_is(tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(LaunchError, match=rf"^{tmp_path / 'config.json'} is not a JSON object"):
        load_tokenizer(ServerArgs(model_path=str(tmp_path)))
    with pytest.raises(LaunchError, match="~nobody-here/model: Could not determine home"):
        resolve_model(ServerArgs(model_path="~nobody-here/model"))


def test_how_a_damaged_conversion_is_renewed(tmp_path: Path) -> None:
    """Bytes that are wrong without being fewer, in the tokenizer and then in the weights."""
    model = build_once(tmp_path / "model", write_model)
    remedy = f"{model} was made from the model's file: remove it, and it is made again."
    tokenizer = model / "tokenizer.json"
    whole = tokenizer.read_bytes()
    tokenizer.write_bytes(b"x" * len(whole))
    args = ServerArgs(model_path=str(model))
    with pytest.raises(LaunchError, match=re.escape(remedy)):
        load_tokenizer(args)
    tokenizer.write_bytes(whole)
    load_tokenizer(args)
    (model / "model.safetensors").write_bytes(b"x" * 64)
    program = ["-m", "sglang_minima.launch_server", "--model-path", str(model)]
    server = start_server(program, "--device", "cpu", wait=False)
    output = server.process.communicate(timeout=60)[0]
    assert server.process.returncode == 1
    assert output.splitlines()[-1].startswith("error: ") and output.rstrip().endswith(remedy)


def test_what_a_new_conversion_would_not_mend(tmp_path: Path) -> None:
    model = build_once(tmp_path / "model", write_model)
    assert renewal_hint(model, ModelLoadError(f"{model} is cut"))
    assert not renewal_hint(model, UnsupportedModel(f"{model} is of another kind"))
    (own := tmp_path / "own").mkdir()
    assert not renewal_hint(own, ModelLoadError(f"{own} is cut"))
    for given in ({"chat_template": "{{ cut"}, {"tokenizer_path": str(own)}):
        args = ServerArgs(model_path=str(model), **given)
        with pytest.raises(LaunchError) as caught:
            load_tokenizer(args)
        assert "made again" not in str(caught.value)
        # As a child says it.
        damage = ModelLoadError(str(caught.value))
        assert not processes._renewal_hint(args, damage)


def test_a_port_in_use_is_found_first() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(LaunchError, match="Address already in use"):
            _bind("127.0.0.1", taken.getsockname()[1])
