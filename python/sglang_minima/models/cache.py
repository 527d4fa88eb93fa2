"""The cache directory: derived files that are built once, also when servers start together.

What was built has the sizes of its files beside it, so that one that was cut later (a full disk, a
copy that broke off) is noticed and built again. Other damage is for readers to find: a checksum of
all weights would take longer than to load them.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from sglang_minima.models.errors import ModelLoadError, UnsupportedModel

logger = logging.getLogger(__name__)

CACHE_VARIABLE = "SGLANG_MINIMA_CACHE"
SIZES = "sizes.json"
"""File with the sizes of the others by name."""
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_REMEDY = f"name a folder that can be written with {CACHE_VARIABLE}"


class CacheUnusable(ModelLoadError):
    """Files cannot be kept in the cache; the message names the folder and the variable."""


def cache_dir() -> Path:
    """`$SGLANG_MINIMA_CACHE`, or `~/.cache/sglang_minima`; it need not exist.

    Raises:
        CacheUnusable: no folder is named, and there is no home.
    """
    chosen = os.environ.get(CACHE_VARIABLE)
    try:
        return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "sglang_minima"
    except RuntimeError as error:
        raise CacheUnusable(
            f"There is no folder for converted models ({error}): {_REMEDY}."
        ) from None


def build_once(target: Path, build: Callable[[Path], None]) -> Path:
    """Returns the directory `target`, built by `build(empty directory)` if it does not exist.

    The directory appears by an atomic rename, so a reader never sees half of it. Processes that
    arrive together wait for the first; what a crashed one left is removed. One whose files are not
    of their sizes any more is built again, with a warning.

    Raises:
        CacheUnusable: the folder above cannot be made or written, or the disk is full.
    """
    if target.is_dir() and _damaged_file(target) is None:
        return target
    folder = target.parent
    with _explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with _locked(target.with_name(f"{target.name}.lock")):
        if target.is_dir():
            damaged = _damaged_file(target)
            if damaged is None:
                return target
            logger.warning("%s is damaged: %s is made again", damaged, target)
            with _explained(folder):
                if target.is_symlink():  # the folder was moved to another disk: it stays there
                    target.unlink()
                else:
                    shutil.rmtree(target)
        for leftover in folder.glob(f"{target.name}.building-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        with _explained(folder):
            building = Path(tempfile.mkdtemp(prefix=f"{target.name}.building-", dir=folder))
        try:
            with _explained(folder, _NO_ROOM):
                build(building)
                sizes = {file.name: file.stat().st_size for file in building.iterdir()}
                (building / SIZES).write_text(json.dumps(sizes), encoding="utf-8")
            with _explained(folder):
                building.chmod(0o755)
                building.rename(target)
        except BaseException:
            shutil.rmtree(building, ignore_errors=True)
            raise
    return target


def renewal_hint(directory: Path, error: BaseException) -> str:
    """What helps where reading a directory of `build_once` failed: to follow the error's message.

    Empty for other directories, for errors that do not name this one (of a chat template, of
    another tokenizer), and for what a new copy would not mend.
    """
    is_named = str(directory) in str(error)
    if not is_named or isinstance(error, UnsupportedModel) or not (directory / SIZES).is_file():
        return ""
    return f" {directory} was made from the model's file: remove it, and it is made again."


def _damaged_file(directory: Path) -> Path | None:
    """A file that is not as long as it was written; older versions wrote no sizes to tell."""
    sizes = directory / SIZES
    try:
        expected = json.loads(sizes.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError, IsADirectoryError):
        return sizes
    if not isinstance(expected, dict):
        return sizes
    for name, size in expected.items():
        file = directory / str(name)
        if not file.is_file() or file.stat().st_size != size:
            return file
    return None


@contextmanager
def _explained(folder: Path, codes: Collection[int] | None = None) -> Iterator[None]:
    """Says what a failed write means: of any kind, or of those that are `codes`."""
    try:
        yield
    except OSError as error:
        if codes is not None and error.errno not in codes:
            raise
        why = error.strerror
    except SafetensorError as error:  # writing alone: nothing of that kind is read here
        why = str(error)
    else:
        return
    raise CacheUnusable(f"Files cannot be kept in {folder} ({why}): {_REMEDY}.")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Exclusive between processes; the system frees the lock when its holder dies.

    The file is removed at the end. Who waited for it then holds a lock that no newcomer sees, and
    takes the next one.
    """
    while True:
        with _explained(path.parent):
            opened = path.open("w")
        with opened as handle:
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
