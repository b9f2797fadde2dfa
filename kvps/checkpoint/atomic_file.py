"""Atomic files: whole or not there at all, even if the process or the machine dies while writing.

A file is written aside under another name, forced to disk, and renamed. Then its folder is forced to
disk too, since the new name is stored there. :func:`replacing` does this for every file that kvps writes;
:func:`put` also hashes the contents on the way, while they are still in the processor's cache.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

BLOCK = 1 << 20
"""Bytes that are hashed and written at once."""


class Written(NamedTuple):
    """The identity of a file's contents: their size in bytes, and their SHA-256 in hexadecimal."""

    size: int
    sha256: str


class HashedFile:
    """An open file that counts and hashes what is written to it.

    It sleeps ``throttle`` seconds for each second of work, so that others get at the memory and the disk.
    """

    def __init__(self, file: int, throttle: float = 0.0) -> None:
        self._file = file
        self._throttle = throttle
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
        octets = view.cast("B")
        for start in range(0, len(octets), BLOCK):
            began = time.monotonic()
            block = octets[start : start + BLOCK]
            self._hash.update(block)
            self._size += len(block)
            while block:
                count = os.write(self._file, block)
                if count == 0:
                    raise OSError(errno.EIO, "the file takes nothing more")
                block = block[count:]
            if self._throttle:
                time.sleep(self._throttle * (time.monotonic() - began))

    @property
    def written(self) -> Written:
        """The size and hash of the bytes written so far."""
        return Written(self._size, self._hash.hexdigest())


@contextmanager
def replacing(path: Path, aside: Path | None = None) -> Iterator[Path]:
    """Have a ``with`` block write a file, which then takes the place of ``path``, whole or not at all.

    Args:
        path: where it goes; a file of that name is replaced.
        aside: a name in the same folder that no other process uses; None for a random name.

    Yields:
        The name to write it under.

    Raises:
        OSError: if it cannot be put there. Nothing is left under the other name. If only the folder
            could not be forced to disk, ``path`` is there already, whole. What is there and no file, such as
            a device, is not replaced.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "there is something that is not a file", str(path))
    if aside is None:
        aside = path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        yield aside
        force(aside)
        os.replace(aside, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(aside)
        raise
    force(path.parent)


def put(
    path: Path,
    fill: Callable[[HashedFile], None],
    aside: Path | None = None,
    throttle: float = 0.0,
    mode: int = 0o600,
) -> Written:
    """Write the file ``path``, whole or not at all.

    Args:
        path: where it goes; a file of that name is replaced.
        fill: writes the contents.
        aside: as for :func:`replacing`.
        throttle: seconds to sleep for each second of work.
        mode: the file's permissions, less the umask.

    Raises:
        OSError: as :func:`replacing`.
    """
    with replacing(path, aside) as place:
        file = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        try:
            sink = HashedFile(file, throttle)
            fill(sink)
        finally:
            os.close(file)
    return sink.written


def force(path: Path) -> None:
    """Force the contents of a file, or the names in a folder, to disk.

    Raises:
        OSError: if that fails.
    """
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def make_folder(folder: Path) -> None:
    """Make ``folder`` and its parents for this user alone, and force their names to disk.

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


def files(folder: Path) -> list[Path]:
    """Return the entries of a folder; none if another server has just removed it."""
    try:
        return list(folder.iterdir())
    except FileNotFoundError:
        return []


def remove_empty(folder: Path) -> None:
    """Remove a folder if it is empty."""
    if folder.is_dir() and not files(folder):
        try:
            folder.rmdir()
        except OSError:
            return  # another server has removed it, or has just put something into it


def force_if_there(folder: Path) -> None:
    """Do as :func:`force`, for a folder that another server may remove."""
    try:
        force(folder)
    except FileNotFoundError:
        return  # another server has removed it
