"""The message about streams: connections of their own for the packets of a worker and a server."""

from __future__ import annotations

from kvps.protocol.envelope import Message, tag


@tag(63)
class StreamAt(Message):
    """Server to a worker that it has welcomed: you may connect to this port, by this secret."""

    port: int
    secret: str
    """64 hexadecimal digits."""
