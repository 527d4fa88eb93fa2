"""Cubin files, and whether they are whole.

A kept cubin ends in its SHA-256: in the file itself, so that it cannot be copied without it, and no
reader meets the checksum of another process's file. One without (compiled by hand, or by an older
version) is taken if it ends where its ELF header says: one whose checksum was overwritten, as by
the zeros that a crash leaves, is longer.
"""

from __future__ import annotations

import hashlib
import logging
import struct
from functools import cache
from pathlib import Path

logger = logging.getLogger(__name__)

_MARK = b"\nsha256\n"
_DIGEST_BYTES = hashlib.sha256().digest_size
_SEAL_BYTES = len(_MARK) + _DIGEST_BYTES

# ELF-64: where program and section headers begin; of each the size and the count.
_MAGIC = b"\x7fELF\x02"
_STARTS, _SIZES = struct.Struct("<QQ"), struct.Struct("<HHHH")
_STARTS_AT, _SIZES_AT = 32, 54


class CubinDamaged(RuntimeError):
    """A file is not what a compiler wrote."""


def seal_cubin(path: Path) -> None:
    """Add the checksum to a file that nvcc wrote."""
    with path.open("r+b") as file:
        digest = hashlib.sha256(file.read()).digest()
        file.write(_MARK + digest)


def read_cubin(path: Path) -> bytes:
    """What nvcc wrote, without the checksum.

    Raises:
        CubinDamaged: the file is cut, or other bytes than were written; the message names it.
        OSError: it cannot be read.
    """
    data = path.read_bytes()
    body, seal = data[:-_SEAL_BYTES], data[-_SEAL_BYTES:]
    if seal.startswith(_MARK):
        if seal.removeprefix(_MARK) == hashlib.sha256(body).digest():
            return body
    elif _ends_with_its_headers(data):
        return data
    raise CubinDamaged(f"the compiled kernel {path} is damaged")


def has_cubin(path: Path) -> bool:
    """Whether a whole cubin is there; a damaged one is warned of, once.

    Raises:
        OSError: it cannot be read.
    """
    try:
        read_cubin(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except CubinDamaged as error:
        _warn(str(error))
        return False
    return True


@cache
def _warn(text: str) -> None:
    logger.warning("%s, and not used; it is compiled again where it can be", text)


def _ends_with_its_headers(data: bytes) -> bool:
    """Whether an ELF file ends where its headers do, the last that nvcc writes."""
    if not data.startswith(_MAGIC) or len(data) < _SIZES_AT + _SIZES.size:
        return False
    starts = _STARTS.unpack_from(data, _STARTS_AT)
    sizes = _SIZES.unpack_from(data, _SIZES_AT)
    ends = (starts[0] + sizes[0] * sizes[1], starts[1] + sizes[2] * sizes[3])
    return max(ends) == len(data)
