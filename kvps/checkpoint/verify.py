"""Verification of a snapshot file against its manifest: size, SHA-256, and the server it belongs to."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from kvps.checkpoint import regular_file, snapshot_writer
from kvps.checkpoint.manifest import ImageFile, Manifest
from kvps.checkpoint.reshard import demand_own
from kvps.core.placement import RULE
from kvps.core.server.snapshot.model import Snapshot
from kvps.errors import StorageError


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
        StorageError: if it cannot be read, or is not what was written.
    """
    with _opened(path) as file:
        yield from _compared(file, path, expected)


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        with regular_file.opened(path) as file:
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
    while block := file.read(regular_file.BLOCK):
        found.update(block)
        yield len(block)
    if found.hexdigest() != expected.sha256:
        raise StorageError(
            f"{path} is not what was written: its SHA-256 is {found.hexdigest()[:12]}..., and its "
            f"manifest says {expected.sha256[:12]}...; use another checkpoint"
        )
