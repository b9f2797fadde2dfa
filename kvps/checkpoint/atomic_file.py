"""Atomic files: whole or not there at all, even if the process or the machine dies while writing.

A file is written aside under another name, forced to the disk, and renamed; then its folder is
forced to the disk too, since the new name is in there. What has been written is hashed on the way,
while it is still in the processor's cache.
"""

from __future__ import annotations

import errno
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

BLOCK = 1 << 20
"""Octets that are hashed and written, or read and hashed, at once."""


class Written(NamedTuple):
    """What tells a file from another: its octets, and their SHA-256 in hexadecimal digits."""

    size: int
    sha256: str


class Sink:
    """An open file that counts and hashes what is written to it.

    It rests ``rest`` seconds for each second of work, so that others get at the memory and the disk.
    """

    def __init__(self, file: int, rest: float = 0.0) -> None:
        self._file = file
        self._rest = rest
        self._hash = hashlib.sha256()
        self._size = 0

    def write(self, more: bytes | memoryview) -> None:
        """Write all of ``more``.

        Raises:
            OSError: if that fails; some of it may have been written.
        """
        view = memoryview(more)
        if not view.nbytes:
            return  # a view of nothing cannot be cast
        rest = view.cast("B")
        for start in range(0, len(rest), BLOCK):
            began = time.monotonic()
            block = rest[start : start + BLOCK]
            self._hash.update(block)
            self._size += len(block)
            while block:
                count = os.write(self._file, block)
                if count == 0:
                    raise OSError(errno.EIO, "the file takes nothing more")
                block = block[count:]
            if self._rest:
                time.sleep(self._rest * (time.monotonic() - began))

    @property
    def written(self) -> Written:
        """What was written so far."""
        return Written(self._size, self._hash.hexdigest())


def put(path: Path, aside: Path, fill: Callable[[Sink], None], rest: float = 0.0) -> Written:
    """Write the file ``path``, whole or not at all.

    Args:
        path: where it goes; a file of that name is replaced.
        aside: a name in the same folder that nobody else uses.
        fill: writes the contents.
        rest: how long to rest, as :class:`Sink` has it.

    Raises:
        OSError: if it cannot be written. Nothing is left at ``aside``. If only the folder could not
            be forced to the disk, ``path`` is there already, whole.
    """
    file = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        try:
            sink = Sink(file, rest)
            fill(sink)
            os.fsync(file)
        finally:
            os.close(file)
        os.replace(aside, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(aside)
        raise
    force(path.parent)
    return sink.written


def force(folder: Path) -> None:
    """Force the names in ``folder`` to the disk.

    Raises:
        OSError: if that fails.
    """
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def make_folder(folder: Path) -> None:
    """Make ``folder`` and those it is in, for this user alone, and force their names to the disk.

    Raises:
        OSError: if that fails.
    """
    if folder.is_dir():
        return
    make_folder(folder.parent)
    folder.mkdir(0o700, exist_ok=True)
    force(folder.parent)


def remove(path: Path) -> None:
    """Remove a file, if it is there.

    Raises:
        OSError: if that fails.
    """
    path.unlink(missing_ok=True)


def size_of(path: Path) -> int | None:
    """Return how many octets a file has; None where there is none that may be read."""
    try:
        return path.stat().st_size
    except OSError:
        return None


def files(folder: Path) -> list[Path]:
    """Return what lies in a folder; nothing where another server has just removed it."""
    try:
        return list(folder.iterdir())
    except FileNotFoundError:
        return []


def remove_empty(folder: Path) -> None:
    """Remove a folder if nothing is in it."""
    if folder.is_dir() and not files(folder):
        try:
            folder.rmdir()
        except OSError:
            return  # another server has removed it, or has just put something into it


def force_if_there(folder: Path) -> None:
    """As :func:`force`, for a folder that another server may remove."""
    try:
        force(folder)
    except FileNotFoundError:
        return  # another server has removed it


def blocks(path: Path) -> Iterator[bytes]:
    """Yield the contents of a file.

    Raises:
        OSError: if it cannot be read.
    """
    with path.open("rb", buffering=0) as file:
        while block := file.read(BLOCK):
            yield block


def shown(size: int) -> str:
    """Return a number of octets for people, such as ``1.2 GiB``."""
    amount = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1000:
            return f"{size} B" if unit == "B" else f"{amount:.3g} {unit}"
        amount /= 1024
    return f"{amount:.4g} TiB"
