"""Storage orders of a server's core, and the answers of its disk.

Files are slow, so nobody waits for them: an order goes out as an effect, in order, and its answer
comes in by a door of its own (:meth:`~kvps.core.server.server.Server.on_disk`). An order that fails is
answered with a :class:`~kvps.errors.StorageError`; no answer is left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvps.core.effects import Order
from kvps.core.server.snapshot.model import Snapshot
from kvps.errors import KvpsError
from kvps.protocol.checkpoint import Commit


@dataclass(frozen=True, slots=True)
class Write(Order):
    """Write this image of a cut, where it is of no use before the cut is committed."""

    cut: int
    image: Snapshot


@dataclass(frozen=True, slots=True)
class SnapshotWritten:
    """The image is on the disk."""

    cut: int
    size: int
    sha256: str
    error: KvpsError | None = None


@dataclass(frozen=True, slots=True)
class Complete(Order):
    """Write the manifest that makes a cut complete, and remove what is older than need be."""

    job: bytes
    server: int
    workers: int
    commit: Commit


@dataclass(frozen=True, slots=True)
class Completed:
    """The cut is complete here."""

    cut: int
    error: KvpsError | None = None


@dataclass(frozen=True, slots=True)
class Remove(Order):
    """Remove this server's image of a cut that was given up. Not answered."""

    cut: int
    server: int


@dataclass(frozen=True, slots=True)
class FindCuts(Order):
    """Which cuts are there?"""

    server: int
    servers: int
    job: bytes | None = None
    """Of this job only."""
    tag: str = ""
    """With this tag only, if it is not empty."""
    for_whom: object = None
    """Comes back with the answer."""


@dataclass(frozen=True, slots=True)
class FoundCuts:
    """The cuts that are complete as far as that server needs, and the highest number of any."""

    cuts: tuple[int, ...] = ()
    highest: int = 0
    for_whom: object = None
    error: KvpsError | None = None


@dataclass(frozen=True, slots=True)
class Read(Order):
    """Read what this server holds of a cut."""

    server: int
    servers: int
    cut: int
    for_whom: object = None
    """Comes back with the answer."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What was read."""

    image: Snapshot | None
    for_whom: object
    error: KvpsError | None = None


AnyOrder = Write | Complete | Remove | FindCuts | Read
Answer = SnapshotWritten | Completed | FoundCuts | Loaded
