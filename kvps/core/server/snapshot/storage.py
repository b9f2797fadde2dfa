"""What a server's core asks of its disk, and what the disk answers.

Files are slow, so nobody waits for them: an order goes out as an effect, in order, and its answer
comes in by a door of its own (:meth:`~kvps.core.server.Server.on_disk`). An order that fails is
answered with a :class:`~kvps.errors.StorageError`; no answer is left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvps.core.image import Image
from kvps.errors import KvpsError
from kvps.messages import Commit


@dataclass(frozen=True, slots=True)
class Write:
    """Write this image of a cut, where it is of no use before the cut is committed."""

    cut: int
    image: Image


@dataclass(frozen=True, slots=True)
class Written:
    """The image is on the disk."""

    cut: int
    size: int
    sha256: str
    error: KvpsError | None = None


@dataclass(frozen=True, slots=True)
class Complete:
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
class Remove:
    """Remove this server's image of a cut that was given up. Not answered."""

    cut: int
    server: int


@dataclass(frozen=True, slots=True)
class Look:
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
class Found:
    """The cuts that are complete as far as that server needs, and the highest number of any."""

    cuts: tuple[int, ...] = ()
    highest: int = 0
    for_whom: object = None
    error: KvpsError | None = None


@dataclass(frozen=True, slots=True)
class Read:
    """Read what this server holds of a cut."""

    server: int
    servers: int
    cut: int
    for_whom: object = None
    """Comes back with the answer."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What was read."""

    image: Image | None
    for_whom: object
    error: KvpsError | None = None


Order = Write | Complete | Remove | Look | Read
Answer = Written | Completed | Found | Loaded
