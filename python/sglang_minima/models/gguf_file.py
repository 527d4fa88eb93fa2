"""Reads the GGUF container (versions 2 and 3): metadata and tensor views over a memory map.

Format: the GGUF specification of the ggml project. Own reader because token arrays of 10⁵ strings
must parse in a fraction of a second; the tensor encodings themselves come from the gguf package.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from sglang_minima.models.errors import ModelLoadError, UnsupportedModel

_SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
"""Value type -> struct code."""
_STRING, _ARRAY = 8, 9
_DEFAULT_ALIGNMENT = 32
_CUT = "it is truncated (or damaged), it ends inside"
_U64 = struct.Struct("<Q")


class GGUFTensor(NamedTuple):
    """One tensor; `data` is its bytes, a view of the file."""

    name: str
    shape: tuple[int, ...]
    """Row-major (the file lists the fastest dimension first)."""
    kind: GGMLQuantizationType
    data: np.ndarray[Any, np.dtype[np.uint8]]

    @property
    def stored_dtype(self) -> str:
        """safetensors name of the dtype that holds the values without loss."""
        return {"F16": "F16", "BF16": "BF16"}.get(self.kind.name, "F32")

    def values(self) -> np.ndarray[Any, Any]:
        """The values in `shape`: float16 as stored, BF16 as its uint16 bits, else float32.

        Raises:
            UnsupportedModel: an encoding that the gguf package cannot decode.
        """
        if self.kind == GGMLQuantizationType.F16:
            return self.data.view(np.float16).reshape(self.shape)
        if self.kind == GGMLQuantizationType.BF16:
            return self.data.view(np.uint16).reshape(self.shape)
        if self.kind == GGMLQuantizationType.F32:
            return self.data.view(np.float32).reshape(self.shape)
        rows = self.data.reshape(*self.shape[:-1], -1)
        try:
            decoded: np.ndarray[Any, Any] = dequantize(rows, self.kind)
        except NotImplementedError:
            raise UnsupportedModel(
                f"GGUF tensors of type {self.kind.name} are not supported."
            ) from None
        return decoded.reshape(self.shape)


class GGUFFile(NamedTuple):
    """A parsed file."""

    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]


def read_gguf(path: Path) -> GGUFFile:
    """Parses a file; tensor bytes stay on disk until they are used.

    Raises:
        ModelLoadError: not a GGUF file, or a truncated one.
        UnsupportedModel: GGUF version 1, a future version or big-endian, or one part of a split.
    """
    try:
        with path.open("rb") as handle:
            data = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
        return _parse(path, data)
    except struct.error:
        raise ModelLoadError(f"{path} is not a readable GGUF file: {_CUT} its header.") from None
    except (OSError, IndexError, ValueError) as error:
        raise ModelLoadError(f"{path} is not a readable GGUF file: {error}.") from None


class _Cursor:
    """Reads values one after another."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.offset = 0

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self.data, self.offset)
        self.offset += struct.calcsize(code)
        return value

    def string(self) -> str:
        (length,) = _U64.unpack_from(self.data, self.offset)
        start = self.offset + 8
        self.offset = start + length
        if self.offset > len(self.data):
            raise ValueError(f"{_CUT} a string")
        return self.data[start : self.offset].decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            item, count = self.scalar("I"), self.scalar("Q")
            if item in _SCALARS:
                dtype = np.dtype(_SCALARS[item]).newbyteorder("<")
                if self.offset + count * dtype.itemsize > len(self.data):
                    raise ValueError(f"{_CUT} a list")
                array = np.frombuffer(self.data, dtype, count, self.offset)
                self.offset += array.nbytes
                return array.tolist()
            return [self.value(item) for _ in range(count)]
        if kind not in _SCALARS:
            raise ValueError(f"unknown value type {kind}")
        return self.scalar(_SCALARS[kind])


def _parse(path: Path, data: mmap.mmap) -> GGUFFile:
    cursor = _Cursor(data)
    if data[:4] != b"GGUF":
        raise ValueError("it does not start with the letters GGUF")
    cursor.offset = 4
    version = cursor.scalar("I")
    if version not in (2, 3):
        raise UnsupportedModel(
            f"{path} has GGUF version {version}; supported are 2 and 3, little-endian."
        )
    tensor_count, value_count = cursor.scalar("Q"), cursor.scalar("Q")
    metadata: dict[str, Any] = {}
    for _ in range(value_count):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar("I"))
    if metadata.get("split.count", 0) > 1:
        raise UnsupportedModel(f"{path} is one part of a split GGUF; merge the parts first.")
    infos = []
    for _ in range(tensor_count):
        name = cursor.string()
        dimensions = [cursor.scalar("Q") for _ in range(cursor.scalar("I"))]
        kind = GGMLQuantizationType(cursor.scalar("I"))
        infos.append((name, tuple(reversed(dimensions)), kind, cursor.scalar("Q")))
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    base = -(-cursor.offset // alignment) * alignment
    tensors = {}
    for name, shape, kind, offset in infos:
        block, block_bytes = GGML_QUANT_SIZES[kind]
        size = int(np.prod(shape, dtype=np.int64)) // block * block_bytes
        if base + offset + size > len(data):
            raise ValueError(f"{_CUT} tensor {name}")
        raw = np.frombuffer(data, np.uint8, size, base + offset)
        tensors[name] = GGUFTensor(name, shape, kind, raw)
    return GGUFFile(metadata, tensors)
