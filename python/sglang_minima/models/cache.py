"""The cache directory: derived files that are built once, also when servers start together."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

CACHE_VARIABLE = "SGLANG_MINIMA_CACHE"


def cache_dir() -> Path:
    """`$SGLANG_MINIMA_CACHE`, or `~/.cache/sglang_minima`; created if need be."""
    chosen = os.environ.get(CACHE_VARIABLE)
    path = Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "sglang_minima"
    path.mkdir(parents=True, exist_ok=True)
    return path


def build_once(target: Path, build: Callable[[Path], None]) -> Path:
    """Returns the directory `target`, built by `build(empty directory)` if it does not exist.

    The directory appears by an atomic rename, so a reader never sees half of it. Processes that
    arrive together wait for the first; what a crashed one left is removed.
    """
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.with_name(f"{target.name}.lock")):
        if target.is_dir():
            return target
        for leftover in target.parent.glob(f"{target.name}.building-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        building = Path(tempfile.mkdtemp(prefix=f"{target.name}.building-", dir=target.parent))
        try:
            build(building)
            building.chmod(0o755)
            building.rename(target)
        except BaseException:
            shutil.rmtree(building, ignore_errors=True)
            raise
    return target


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Exclusive between processes; the system frees the lock when its holder dies.

    The file is removed at the end. Who waited for it then holds a lock that no newcomer sees, and
    takes the next one.
    """
    while True:
        with path.open("w") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            if not _is_at(path, handle.fileno()):
                continue
            try:
                yield
            finally:
                path.unlink()
            return


def _is_at(path: Path, descriptor: int) -> bool:
    """Whether the open file is the one that the path names now."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
