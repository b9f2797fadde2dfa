"""Verification of a snapshot file against its manifest: size, SHA-256, and the server it belongs to."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from kvps.checkpoint import atomic_file, snapshot_writer
from kvps.checkpoint.manifest import ImageFile, Manifest
from kvps.checkpoint.reshard import demand_own
from kvps.core.server.snapshot.model import Snapshot
from kvps.errors import StorageError


def load_image(path: Path, manifest: Manifest, server: int) -> Snapshot:
    """Return the image of one server from its file, verified.

    Raises:
        StorageError: if it is missing, damaged, or of something else.
    """
    for _ in verified(path, manifest.images[server]):
        pass
    return read_image(path, manifest, server)


def read_image(path: Path, manifest: Manifest, server: int) -> Snapshot:
    """Return the image of one server from its file, whose SHA-256 was compared before.

    Raises:
        StorageError: if it is no image, or of something else.
    """
    image = snapshot_writer.read(path)
    if (image.server, image.servers) != (server, manifest.servers):
        raise StorageError(
            f"{path} is the image of server {image.server} of {image.servers}, and should be that "
            f"of {server} of {manifest.servers}"
        )
    try:
        demand_own(image)
    except StorageError as error:
        raise StorageError(f"{path}: {error}") from error
    return image


def verified(path: Path, expected: ImageFile) -> Iterator[int]:
    """Read a file and compare it with its manifest; yield how many bytes each step read.

    Raises:
        StorageError: if it cannot be read, or is not what was written.
    """
    found = hashlib.sha256()
    try:
        size = path.stat().st_size
        if size != expected.size:
            raise StorageError(
                f"{path} has {size} octets, and its manifest says {expected.size}: it was cut short "
                "or replaced; use another checkpoint"
            )
        for block in atomic_file.blocks(path):
            found.update(block)
            yield len(block)
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error}") from error
    if found.hexdigest() != expected.sha256:
        raise StorageError(
            f"{path} is not what was written: its SHA-256 is {found.hexdigest()[:12]}..., and its "
            f"manifest says {expected.sha256[:12]}...; use another checkpoint"
        )
