"""The stream from an agent to its launch: what a remote process prints and reports, in frames.

A login shell may print something before the agent runs. So the stream begins where the agent says that it
is one, and of which version::

    \\nkvps-agent VERSION\\n
    kind (1 byte)  length (4 bytes, big-endian)  the bytes themselves      again and again
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

OUT = 0
ERROR = 1
REPORT = 2
"""A line of the report pipe: how a worker's command ended."""
GREETING = b"\nkvps-agent "
NOISE_MAX = 1 << 16
"""Bytes before the greeting; a shell that prints more is not quietly read for ever."""
LENGTH_MAX = 1 << 20
_HEAD = struct.Struct("!BI")


def greeting(version: str) -> bytes:
    """Return the beginning of the stream."""
    return GREETING + version.encode() + b"\n"


def frame(kind: int, data: bytes) -> bytes:
    """Return one frame."""
    return _HEAD.pack(kind, len(data)) + data


class FrameReader:
    """The reader's end of one stream."""

    def __init__(self) -> None:
        self.version: str | None = None
        """The version that the agent gave; None until it has."""
        self._rest = b""

    def feed(self, more: bytes) -> Iterator[tuple[int, bytes]]:
        """Return the frames that end in ``more``.

        Raises:
            ValueError: if no agent writes this.
        """
        self._rest += more
        if self.version is None and not self._greeted():
            return
        while len(self._rest) >= _HEAD.size:
            kind, length = _HEAD.unpack_from(self._rest)
            if kind > REPORT or length > LENGTH_MAX:
                raise ValueError(f"a frame of kind {kind} with {length} bytes")
            stop = _HEAD.size + length
            if len(self._rest) < stop:
                return
            data, self._rest = self._rest[_HEAD.size : stop], self._rest[stop:]
            yield kind, data

    def _greeted(self) -> bool:
        noise, found, after = self._rest.partition(GREETING)
        version, ends, rest = after.partition(b"\n")
        if found and ends:
            self.version, self._rest = version.decode(errors="replace"), rest
            return True
        if len(noise) > NOISE_MAX:
            raise ValueError(f"{len(noise)} bytes of something else")
        return False
