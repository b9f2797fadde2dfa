"""Messages of publications: versions of named sets of tensors, and the processes that read them."""

from __future__ import annotations

from kvps.protocol.envelope import Answer, Message, tag
from kvps.protocol.membership import Member

KEEP_MAX = 1024
"""How many versions of a publication may stay that no reader uses."""
READ_BYTES_MAX = 8 << 20
"""Octets that one READ may ask for."""
CHANGES_BYTES_MAX = 1 << 20
"""Octets whose changes one READ-CHANGES may ask for: a server compares them before it serves others."""


def _sizes(size: int) -> tuple[int, ...]:
    """Return the size of the only frame; no frame for no octets."""
    return (size,) if size else ()


# --- a worker that publishes ----------------------------------------------------------------------


@tag(160)
class Freeze(Message):
    """Worker to server: keep the present values of these chunks as blocks of a version."""

    store: str
    publication: str
    number: int
    keep: int
    """How many complete versions stay that no reader uses."""
    as_dtype: int
    """The element type in which floating-point values are read; 0 for their own."""
    chunks: tuple[int, ...]


@tag(161)
class Put(Message):
    """Worker to server: keep these octets as a block of a version."""

    store: str
    publication: str
    number: int
    keep: int
    block: int
    size: int

    def payload_sizes(self) -> tuple[int, ...]:
        """The octets."""
        return _sizes(self.size)


@tag(162)
class Announce(Message):
    """Worker to server: a version is complete; server 0 also gets the manifest, which tells what is where."""

    store: str
    publication: str
    number: int
    keep: int
    size: int

    def payload_sizes(self) -> tuple[int, ...]:
        """The manifest, if there is one."""
        return _sizes(self.size)


@tag(163)
class LastVersion(Message):
    """Worker to server: which version did you hear of last? Or, has there been this one?"""

    store: str
    publication: str
    least: int
    """Answer when a version of at least this number is complete; 0 to hear at once of the last one."""


@tag(164)
class VersionIs(Answer):
    """Answer to LAST-VERSION and WATCH."""

    number: int
    """0 if there is none."""
    age_s: float = 0.0
    """Seconds since it is complete."""
    names: tuple[str, ...] = ()
    """The names of some publications, if this one is unknown."""


# --- a process that reads -------------------------------------------------------------------------


@tag(165)
class Where(Message):
    """Reader to scheduler: where are the servers?"""


@tag(166)
class ServersAre(Answer):
    """Answer to WHERE."""

    members: tuple[Member, ...]
    keys: tuple[str, ...] = ()
    """In the order of ``members``, the public key that each has where it listens."""


@tag(167)
class Watch(Message):
    """Reader to server 0: tell me when there is a newer version than this one."""

    publication: str
    newer: int


@tag(168)
class Retain(Message):
    """Reader to server: I read this version now, and no older one; 0 for none at all."""

    publication: str
    number: int
    wants_manifest: bool = False
    base: int = 0
    """An older version whose octets I have. It stays, too, so that I can ask what has changed; 0 for none."""


@tag(169)
class Retained(Answer):
    """Answer to RETAIN: it stays for now."""

    size: int = 0

    def payload_sizes(self) -> tuple[int, ...]:
        """The manifest, if it was wanted."""
        return _sizes(self.size)


@tag(170)
class Read(Message):
    """Reader to server, or to a reader that relays: octets of a block, please."""

    publication: str
    number: int
    block: int
    start: int
    size: int
    relays: bool = False
    """The answer may be ELSEWHERE."""
    without: int = 0
    """The rank of a relay that did not give these octets; 0 for none."""
    server: int = 0
    """To a relay: the server whose block it is."""


@tag(171)
class Octets(Answer):
    """Answer to READ."""

    size: int

    def payload_sizes(self) -> tuple[int, ...]:
        """The octets."""
        return _sizes(self.size)


@tag(172)
class ReadChanges(Message):
    """Reader to server: octets of a block, please, or what has changed since an older version."""

    publication: str
    number: int
    block: int
    start: int
    size: int
    base: int
    """The older version."""
    width: int
    """Octets of an element, of which changes consist: 1, 2, 4 or 8."""
    proves: bool = False
    """Tell the CRC-32 also where the server knows that nothing has changed."""
    relays: bool = False
    """The answer may be ELSEWHERE."""


@tag(173)
class Changes(Answer):
    """Answer to READ-CHANGES: elements to write over those of the older version."""

    count: int = 0
    """How many there are."""
    run_count: int = 0
    """In how many runs; 0 if they are scattered."""
    check: int = 0
    """The CRC-32 of the octets when that is done, plus 2^32; 0 if the server knows that nothing has changed
    and need not prove it."""
    size: int = 0

    def payload_sizes(self) -> tuple[int, ...]:
        """Where elements are, and the elements; nothing if nothing has changed."""
        return _sizes(self.size)


@tag(174)
class Elsewhere(Answer):
    """Answer to READ and READ-CHANGES: another reader has these octets, or is about to."""

    endpoint: str = ""
    """Where it listens. A relay leaves all fields out while it has yet to receive the octets."""
    relay: int = 0
    """Its rank."""
    digest: str = ""
    """The SHA-256 of the octets, in hexadecimal."""
