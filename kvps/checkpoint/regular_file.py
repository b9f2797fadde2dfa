"""Regular files: read where others may have put a link, a pipe or a folder in their place."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

BLOCK = 1 << 20
"""Bytes that are read at once."""


def size_of(path: Path) -> int | None:
    """Return the size of a file in bytes; None if there is none, or a link, or something else than a file."""
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Have a ``with`` block read a file, unbuffered.

    Nothing is waited for, and no link is followed: a folder of files may hold a pipe, or lead elsewhere.

    Raises:
        OSError: if it cannot be read, or is no regular file.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    if not stat.S_ISREG(path.lstat().st_mode):
        raise OSError(errno.EINVAL, "it is no regular file")
    with open(os.open(path, flags), "rb", buffering=0) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file")
        yield file


def blocks(path: Path) -> Iterator[bytes]:
    """Yield the contents of a file.

    Raises:
        OSError: if it cannot be read.
    """
    with opened(path) as file:
        while block := file.read(BLOCK):
            yield block
