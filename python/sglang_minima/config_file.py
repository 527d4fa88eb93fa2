"""Settings from a YAML file whose keys are flag names (`--config server.yaml`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from sglang_minima.settings import ArgumentError


def read_config(path: str) -> dict[str, Any]:
    """Flag ("--port") -> value of every key; a key may have dashes or underscores.

    Values are scalars, or lists of scalars (joined by commas); keys without a value are left out.

    Raises:
        ArgumentError: the file cannot be read, or is not such a mapping.
    """
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ArgumentError(f"--config {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ArgumentError(f"--config {path}: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, Mapping):
        raise ArgumentError(f"--config {path}: the file is not a list of lines `flag: value`")
    return {
        "--" + str(key).replace("_", "-"): _scalar(path, key, value)
        for key, value in content.items()
        if value is not None
    }


def _scalar(path: str, key: Any, value: Any) -> Any:
    if isinstance(value, list) and not any(isinstance(part, (list, dict)) for part in value):
        return ",".join(map(str, value))
    if isinstance(value, (list, dict)):
        raise ArgumentError(f"--config {path}: {key} takes one value")
    return value
