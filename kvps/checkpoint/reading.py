"""Reading of snapshot files: regular files only, compared with their manifest, with a bar in a terminal.

A link, a pipe or a folder in the place of a file is not followed. A bar is shown in a terminal only.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from kvps.checkpoint import snapshot_writer
from kvps.checkpoint.manifest import ImageFile, Manifest
from kvps.checkpoint.reshard import demand_own
from kvps.core.placement import RULE
from kvps.core.server.snapshot.model import Snapshot
from kvps.errors import StorageError

if TYPE_CHECKING:
    from rich.console import Console

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


def load_image(
    path: Path, manifest: Manifest, server: int, step: Callable[[int], None] = lambda size: None
) -> Snapshot:
    """Return the snapshot of one server from its file, verified: the file that is compared is the
    one that is read.

    Args:
        path: the file.
        manifest: of its cut.
        server: whose snapshot it is.
        step: called with the number of bytes of each step of the comparison.

    Raises:
        StorageError: if it is missing, damaged, or of something else.
    """
    with _opened(path) as file:
        for size in _compared(file, path, manifest.images[server]):
            step(size)
        return read_image(path, manifest, server, file.fileno())


def read_image(path: Path, manifest: Manifest, server: int, fd: int | None = None) -> Snapshot:
    """Return the snapshot of one server from its file, whose SHA-256 was compared before; ``fd``
    is that file, open.

    Raises:
        StorageError: if it is no snapshot, or of something else.
    """
    snapshot = snapshot_writer.read(path, fd)
    if (snapshot.server, snapshot.servers) != (server, manifest.servers):
        raise StorageError(
            f"{path} is the snapshot of server {snapshot.server} of {snapshot.servers}, and should be that "
            f"of {server} of {manifest.servers}"
        )
    if manifest.placement != RULE:
        return snapshot  # it is put together with all the others, and looked at then
    try:
        demand_own(snapshot)
    except StorageError as error:
        raise StorageError(f"{path}: {error}") from error
    return snapshot


def verified(path: Path, expected: ImageFile) -> Iterator[int]:
    """Read a file and compare it with its manifest; yield how many bytes each step read.

    Raises:
        StorageError: if it cannot be read, or differs from what was written.
    """
    with _opened(path) as file:
        yield from _compared(file, path, expected)


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        with opened(path) as file:
            yield file
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error}") from error


def _compared(file: BinaryIO, path: Path, expected: ImageFile) -> Iterator[int]:
    size = os.fstat(file.fileno()).st_size
    if size != expected.size:
        raise StorageError(
            f"{path} has {size} octets, and its manifest says {expected.size}: it was cut short "
            "or replaced; use another checkpoint"
        )
    found = hashlib.sha256()
    while block := file.read(BLOCK):
        found.update(block)
        yield len(block)
    if found.hexdigest() != expected.sha256:
        raise StorageError(
            f"{path} is not what was written: its SHA-256 is {found.hexdigest()[:12]}..., and its "
            f"manifest says {expected.sha256[:12]}...; use another checkpoint"
        )


RESTORE_AT_LEAST_BYTES = 8 << 20
"""A smaller restore ends before a bar could be read."""
Step = Callable[[int], None]
"""Takes the bytes of each step."""


@contextmanager
def shown(what: str, total: int, console: Console) -> Iterator[Step]:
    """Show how far something is, as long as the block runs.

    Args:
        what: the name of the bar.
        total: bytes in all.
        console: draws, if it is a terminal.
    """
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}", markup=False),
        *(BarColumn(), DownloadColumn(), TransferSpeedColumn()),
    )
    disable = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=disable) as progress:
        task = progress.add_task(what, total=total)
        yield lambda size: progress.advance(task, size)


@contextmanager
def restoring(cut: int, total: int) -> Iterator[Step]:
    """Show on stderr how far the restore of a checkpoint is, if that is a terminal and the
    checkpoint is large."""
    if total < RESTORE_AT_LEAST_BYTES or not sys.stderr.isatty():
        yield lambda size: None
        return
    from rich.console import Console

    with shown(f"restoring checkpoint {cut}", total, Console(stderr=True)) as step:
        yield step
