"""Messages about memory that two processes of one host share."""

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
