"""Converts a `.gguf` file of a supported family into a Hugging Face directory, once, in the cache.

The directory is a complete checkpoint: transformers loads it too. Quantised tensors become
float32, so nothing is lost against the file; 4- and 8-bit blocks are kept beside them as they are.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from sglang_minima.models.cache import build_once, cache_dir
from sglang_minima.models.errors import ModelLoadError
from sglang_minima.models.gguf_blocks import BlockArrays, gguf_blocks, save_blocks
from sglang_minima.models.gguf_config import hf_config, hf_tensor_name
from sglang_minima.models.gguf_file import GGUFFile, read_gguf
from sglang_minima.models.gguf_tokenizer import convert_tokenizer
from sglang_minima.models.progress import Progress, stderr_progress

CONVERSION = 3
"""Part of the cache key: raise it when the output of a conversion changes."""
_HEAD_BYTES = 1 << 20
_BF16_EXPONENT = np.uint16(0x7F80)
"""All bits of the exponent: infinite, or no number."""
_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}


def converted_gguf(
    path: Path,
    identity: str | None = None,
    check: Callable[[Path], None] | None = None,
) -> Path:
    """The Hugging Face directory of a GGUF file; converts it if the cache has none.

    Args:
        path: the file.
        identity: names the content in the cache; by default a hash of the file's size, time of
            change and first megabyte (which holds its metadata).
        check: called with the path before a conversion; raises to refuse the file.

    Raises:
        ModelLoadError: the file or its tables cannot be read, or the disk is too small.
        CacheUnusable: the cache cannot be written.
        UnsupportedModel: a family, tokenizer or tensor encoding that is not supported.
    """
    identity = identity or _fingerprint(path)
    target = cache_dir() / "converted" / f"{path.stem}-{identity[:16]}-v{CONVERSION}"

    def build(directory: Path) -> None:
        if check is not None:
            check(path)
        convert_gguf(path, directory, stderr_progress(f"Converting {path.name}"))

    return build_once(target, build)


def convert_gguf(path: Path, directory: Path, progress: Progress | None = None) -> None:
    """Writes config.json, model.safetensors, tokenizer and generation_config into `directory`."""
    file = read_gguf(path)
    config = hf_config(file)
    converted = convert_tokenizer(file.metadata)
    _write_json(directory / "config.json", config)
    _write_json(directory / "tokenizer_config.json", converted.config)
    _write_json(
        directory / "generation_config.json",
        {"bos_token_id": config["bos_token_id"], "eos_token_id": converted.eos_token_ids},
    )
    text = converted.tokenizer.to_str(pretty=True)
    (directory / "tokenizer.json").write_text(text, encoding="utf-8")
    _write_tensors(file, config, directory / "model.safetensors", progress)
    save_blocks(directory, _blocks(file, config))


def _blocks(file: GGUFFile, config: dict[str, Any]) -> dict[str, BlockArrays]:
    """The blocks of every tensor that has them, by checkpoint name."""
    found = {}
    for name, tensor in file.tensors.items():
        target = hf_tensor_name(name)
        if target is None or len(tensor.shape) != 2:
            continue
        arrays = gguf_blocks(tensor.kind.name, tensor.data.reshape(tensor.shape[0], -1))
        if arrays is not None:
            codes, scales, minima = (
                None if part is None else np.ascontiguousarray(_half_split(name, part, config))
                for part in arrays
            )
            assert codes is not None and scales is not None
            found[target] = BlockArrays(codes, scales, minima)
    return found


def _write_tensors(
    file: GGUFFile, config: dict[str, Any], target: Path, progress: Progress | None
) -> None:
    """Streams the tensors, one in memory at a time, into a safetensors file."""
    tensors = [(hf_tensor_name(name), tensor) for name, tensor in file.tensors.items()]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    total = 0
    for name, tensor in tensors:
        if name is not None:
            size = int(np.prod(tensor.shape, dtype=np.int64)) * _ITEM_BYTES[tensor.stored_dtype]
            header[name] = {
                "dtype": tensor.stored_dtype,
                "shape": tensor.shape,
                "data_offsets": [total, total + size],
            }
            total += size
    free = shutil.disk_usage(target.parent).free
    if free < total:
        raise ModelLoadError(
            f"Converting needs {total / 1e9:.1f} GB in {target.parent.parent}, "
            f"{free / 1e9:.1f} GB are free."
        )
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with target.open("wb") as output:
        output.write(len(text).to_bytes(8, "little") + text)
        done = 0
        for name, tensor in tensors:
            if name is None:
                continue
            values = tensor.values()
            if not _all_finite(values, tensor.stored_dtype):
                raise ModelLoadError(
                    f"Tensor {tensor.name} has values that are infinite or no numbers: the file "
                    "is damaged."
                )
            values = np.ascontiguousarray(_half_split(tensor.name, values, config))
            output.write(values.data)
            done += values.nbytes
            if progress is not None:
                progress(done, total)


def _all_finite(values: np.ndarray[Any, Any], dtype: str) -> bool:
    if dtype == "BF16":
        return not bool((values & _BF16_EXPONENT == _BF16_EXPONENT).any())
    return bool(np.isfinite(values).all())


def _half_split(
    name: str, values: np.ndarray[Any, Any], config: dict[str, Any]
) -> np.ndarray[Any, Any]:
    """The rows of tensor `name`, with the rows of llama's q and k in the order of half-split RoPE.

    GGUF stores these two with the members of each rotation plane side by side.
    """
    module = name.split(".")[-2]
    if config["model_type"] != "llama" or module not in ("attn_q", "attn_k"):
        return values
    planes = values.reshape(-1, config["head_dim"] // 2, 2, *values.shape[1:])
    return planes.swapaxes(1, 2).reshape(values.shape)


def _fingerprint(path: Path) -> str:
    status = path.stat()
    with path.open("rb") as handle:
        head = handle.read(_HEAD_BYTES)
    return hashlib.sha256(f"{status.st_size} {status.st_mtime_ns} ".encode() + head).hexdigest()


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False), encoding="utf-8")
