"""Files of records: a header in JSON, then events, each with its kind and its length.

What stands in a file is data: no class, function or module is looked up by a name from it, but for
the classes of the tables in :mod:`kvps.tools.replay.values`.
"""

from __future__ import annotations

import enum
import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO

from kvps.core.effects import Route
from kvps.errors import ConfigError, ProtocolError
from kvps.protocol import wire
from kvps.protocol.envelope import Loan, Packet
from kvps.protocol.membership import Pong

MAGIC = b"kvps record 1\n"
_EVENT = struct.Struct("<BdQ")
"""Kind, time and bytes of an event."""
_PART = struct.Struct("<Q")
EVENT_BYTES_MAX = 1 << 34
"""The longest event: a snapshot of a server."""


class What(enum.IntEnum):
    """The kinds of events."""

    PACKET = 1
    """A packet came, with its payload."""
    BARE_PACKET = 2
    """A packet came; of its payload only the size is known."""
    FAILURE = 3
    DROP = 4
    TIMER = 5
    ITEM = 6
    """Another thread asked for something."""
    UNKNOWN = 7
    """Something was done that no record can repeat."""
    LENDS = 8
    """The memory said whether a peer would read values where they lie."""
    SIDE_BY_SIDE = 9
    """The memory said whether it could show values side by side."""
    RELEASE = 10
    """The world has read the payload of a packet."""
    SENT = 11
    """A packet left: its checksum in a full record, its head in the short form."""
    DIGEST = 12
    """The state of the core, as a hash."""


@dataclass(slots=True)
class Event:
    """One event of a record."""

    what: What
    at: float
    """Seconds on the clock of the process."""
    parts: list[bytes] = field(default_factory=list)


@dataclass(slots=True)
class Record:
    """One file."""

    header: dict[str, Any]
    events: list[Event]
    is_cut: bool = False
    """The last event is unfinished: the process was killed as it wrote."""


def write_header(file: BinaryIO, header: dict[str, Any]) -> None:
    """Begin a file."""
    text = json.dumps(header).encode()
    file.write(MAGIC + _PART.pack(len(text)) + text)


def event_bytes(event: Event) -> bytes:
    """Return an event as bytes."""
    body = b"".join([_PART.pack(len(part)) + part for part in event.parts])
    return _EVENT.pack(event.what, event.at, len(body)) + body


def read(file: BinaryIO) -> Record:
    """Return the record in ``file``.

    Raises:
        ConfigError: if it is none.
    """
    if file.read(len(MAGIC)) != MAGIC:
        raise ConfigError("this file is no record of kvps")
    try:
        (size,) = _PART.unpack(file.read(_PART.size))
        header = json.loads(file.read(size))
        if not isinstance(header, dict):
            raise ConfigError("the header of this record is damaged")
    except (struct.error, ValueError) as error:
        raise ConfigError("the header of this record is damaged") from error
    record = Record(header, [])
    for event in _events(file, record):
        record.events.append(event)
    return record


def _events(file: BinaryIO, record: Record) -> Iterator[Event]:
    while head := file.read(_EVENT.size):
        if len(head) < _EVENT.size:
            record.is_cut = True
            return
        kind, at, size = _EVENT.unpack(head)
        if size > EVENT_BYTES_MAX:
            raise ConfigError(f"an event of {size} octets: this record is damaged")
        body = file.read(size)
        if len(body) < size:
            record.is_cut = True
            return
        try:
            yield Event(What(kind), at, list(_parts(body)))
        except (ValueError, struct.error) as error:
            raise ConfigError("an event of this record is damaged") from error


def _parts(body: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(body):
        (size,) = _PART.unpack_from(body, at)
        at += _PART.size
        yield body[at : at + size]
        at += size


# --- routes and packets ----------------------------------------------------------------------------


def route_bytes(route: Route) -> bytes:
    """Return a route as bytes."""
    return b"b" + route if isinstance(route, bytes) else b"s" + route.encode()


def route_of(octets: bytes) -> Route:
    """Return the route in ``bytes``."""
    return octets[1:] if octets[:1] == b"b" else octets[1:].decode()


def packet_parts(packet: Packet) -> list[bytes]:
    """Return a packet with its payload."""
    head = wire.encode(Packet(packet.envelope, packet.message, (), packet.loans))[0]
    return [bytes(head), *[bytes(frame) for frame in packet.payload]]


def bare_packet_parts(packet: Packet) -> list[bytes]:
    """Return a packet without its payload, for which loans of nothing stand."""
    loans = tuple([Loan(0, 0, 0, size) for size in packet.message.payload_sizes()])
    return [bytes(wire.encode(Packet(packet.envelope, packet.message, (), loans))[0])]


def packet_of(event: Event) -> Packet:
    """Return the packet of an event; the payload of a bare one is zeros.

    Raises:
        ConfigError: if it is none.
    """
    head, *frames = event.parts[1:]
    # Memory of its own, to be written to: a round may add to what came.
    payload = tuple([memoryview(bytearray(frame)) for frame in frames])
    try:
        bare = wire.decode([head]) if not frames or _has_loans(head) else None
        if bare is None:
            return wire.decode([head, *payload])
        if event.what is What.BARE_PACKET:
            payload = tuple([memoryview(bytearray(loan.size)) for loan in bare.loans])
            return Packet(bare.envelope, bare.message, payload)
        return Packet(bare.envelope, bare.message, payload, bare.loans)
    except ProtocolError as error:
        raise ConfigError(f"a packet of this record is damaged: {error}") from error


def _has_loans(head: bytes) -> bool:
    return head[25] != 0


def checksum_of(packet: Packet) -> bytes:
    """Return the checksum of a packet with its payload, in decimal: it has no loans yet.

    The wall clock of a PONG does not count, as nothing depends on it.
    """
    message = packet.message
    if isinstance(message, Pong):
        message = replace(message, clock_s=0.0)
    crc = zlib.crc32(wire.encode(Packet(packet.envelope, message))[0])
    for frame in packet.payload:
        crc = zlib.crc32(frame, crc)
    return str(crc).encode()
