"""Storage orders of a server's core, and the answers of its disk.

Files are slow, so no request waits for them: an order goes out as an effect, in order, and its answer
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
    """Write the snapshot of a cut; it is not used before the cut is committed."""

    cut: int
    snapshot: Snapshot


@dataclass(frozen=True, slots=True)
class SnapshotWritten:
    """The snapshot is on the disk."""

    cut: int
    size: int
    sha256: str
    error: KvpsError | None = None


@dataclass(frozen=True, slots=True)
class Complete(Order):
    """Write the manifest that makes a cut complete, and remove cuts that are no longer needed."""

    job: bytes
    server: int
    workers: int
    commit: Commit
    is_resumed: bool = True
    """A store of this server was restored from an older cut."""


@dataclass(frozen=True, slots=True)
class Completed:
    """The cut is complete here."""

    cut: int
    error: KvpsError | None = None


@dataclass(frozen=True, slots=True)
class Remove(Order):
    """Remove this server's snapshot of a cut that was given up. Not answered."""

    cut: int
    server: int


@dataclass(frozen=True, slots=True)
class FindCuts(Order):
    """List the cuts."""

    server: int
    servers: int
    job: bytes | None = None
    """Only cuts of this job; None for any."""
    tag: str = ""
    """Only cuts with this tag; "" for any."""
    for_whom: object = None
    """Returned with the answer."""
    store: str = ""
    """The store whose versions are wanted; "" for none."""


@dataclass(frozen=True, slots=True)
class FoundCuts:
    """The cuts that are complete as far as that server needs, and the highest number of any."""

    cuts: tuple[int, ...] = ()
    highest: int = 0
    for_whom: object = None
    error: KvpsError | None = None
    versions: tuple[int, ...] = ()
    """As in REVIVED; empty if no store is named."""


@dataclass(frozen=True, slots=True)
class Read(Order):
    """Read this server's snapshot of a cut."""

    server: int
    servers: int
    cut: int
    for_whom: object = None
    """Returned with the answer."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """The snapshot that was read, or the error."""

    snapshot: Snapshot | None
    for_whom: object
    error: KvpsError | None = None


AnyOrder = Write | Complete | Remove | FindCuts | Read
Answer = SnapshotWritten | Completed | FoundCuts | Loaded
