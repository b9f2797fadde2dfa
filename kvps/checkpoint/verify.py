"""Verification of a snapshot file against its manifest: size, SHA-256, and the server it belongs to."""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Iterator
from pathlib import Path

from kvps.checkpoint import regular_file, snapshot_writer
from kvps.checkpoint.manifest import ImageFile, Manifest
from kvps.checkpoint.reshard import demand_own
from kvps.core.server.snapshot.model import Snapshot
from kvps.errors import StorageError


def load_image(path: Path, manifest: Manifest, server: int) -> Snapshot:
    """Return the snapshot of one server from its file, verified.

    Raises:
        StorageError: if it is missing, damaged, or of something else.
    """
    for _ in verified(path, manifest.images[server]):
        pass
    return read_image(path, manifest, server)


def read_image(path: Path, manifest: Manifest, server: int) -> Snapshot:
    """Return the snapshot of one server from its file, whose SHA-256 was compared before.

    Raises:
        StorageError: if it is no snapshot, or of something else.
    """
    snapshot = snapshot_writer.read(path)
    if (snapshot.server, snapshot.servers) != (server, manifest.servers):
        raise StorageError(
            f"{path} is the snapshot of server {snapshot.server} of {snapshot.servers}, and should be that "
            f"of {server} of {manifest.servers}"
        )
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
    found = hashlib.sha256()
    try:
        size = regular_file.size_of(path)
        if size is None:
            path.stat()  # for why, if it is not there
            raise OSError(errno.EINVAL, "it is no regular file")
        if size != expected.size:
            raise StorageError(
                f"{path} has {size} octets, and its manifest says {expected.size}: it was cut short "
                "or replaced; use another checkpoint"
            )
        for block in regular_file.blocks(path):
            found.update(block)
            yield len(block)
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error}") from error
    if found.hexdigest() != expected.sha256:
        raise StorageError(
            f"{path} is not what was written: its SHA-256 is {found.hexdigest()[:12]}..., and its "
            f"manifest says {expected.sha256[:12]}...; use another checkpoint"
        )
