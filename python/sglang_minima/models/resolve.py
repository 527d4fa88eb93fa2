"""From what the user named (a directory, a .gguf file, nothing) to a Hugging Face directory."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from sglang_minima.models.embedded import (
    EMBEDDED_MODEL_HELP,
    SHA256,
    check_embedded_model,
    download_embedded_model,
    find_embedded_model,
)
from sglang_minima.models.errors import ModelLoadError
from sglang_minima.models.gguf import converted_gguf

_REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w.-]+")
"""A name on a model hub."""


def resolve_model_path(model_path: str | None, download: bool = False) -> Path:
    """The directory in Hugging Face format to load; GGUF files are converted once and cached.

    Args:
        model_path: a directory, a `.gguf` file, or None for the embedded model.
        download: fetch the embedded model if it is asked for and not there.

    Raises:
        ModelLoadError: nothing usable is there.
        UnsupportedModel: a GGUF file of a kind that is not served.
    """
    if model_path is None:
        gguf = find_embedded_model()
        if gguf is None:
            if not download:
                raise ModelLoadError(EMBEDDED_MODEL_HELP)
            gguf = download_embedded_model(lambda line: print(line, file=sys.stderr, flush=True))
        return converted_gguf(gguf, identity=SHA256, check=check_embedded_model)
    try:
        path = Path(model_path).expanduser()
    except RuntimeError as error:
        raise ModelLoadError(f"{model_path}: {error}") from None
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelLoadError(f"{path} has no config.json.")
        return path.resolve()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelLoadError(f"{path} does not exist.")
        return converted_gguf(path)
    if _REPOSITORY.fullmatch(model_path) and not path.exists():
        raise ModelLoadError(
            f"There is no directory {model_path}, and nothing is downloaded by name: run "
            f"`hf download {model_path} --local-dir DIR` (pip install huggingface_hub) and give "
            "DIR as --model-path."
        )
    raise ModelLoadError(f"{path} is neither a directory in Hugging Face format nor a .gguf file.")
