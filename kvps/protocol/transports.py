"""Messages about the ways of packets beside ZeroMQ: memory that two processes share, and streams."""

from __future__ import annotations

from kvps.protocol.envelope import Message, tag


@tag(60)
class Offer(Message):
    """To the other end of a data connection: you may read this, if you can find it."""

    pid: int
    fd: int
    size: int
    nonce: int


@tag(61)
class Taken(Message):
    """Answer to OFFER: I can read it; or I cannot, and why."""

    nonce: int
    mapped: bool
    reason: str = ""
    postings: bool = False
    """I post the leases that I return in the first page of my segment, and read what you post in yours."""


@tag(62)
class Release(Message):
    """To a process that lent memory: of the leases below a number, I hold only these."""

    before: int
    but: tuple[int, ...]


@tag(63)
class StreamAt(Message):
    """Server to a worker that it has welcomed: you may connect to this port, by this secret."""

    port: int
    secret: str
    """64 hexadecimal digits."""
