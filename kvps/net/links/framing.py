"""The framing of a stream: the frames of packets to bytes, and bytes back to frames. No I/O is in here.

A record is one packet. First come the sizes of its payload frames and its head, then its payload::

    length 4 | its complement 4 | count 2, size 4 ..., head | seal 16 | segment | seal 16 | segment ...

A segment is 256 KiB of a payload frame, or the rest of it. The length counts what lies between the
complement and the first segment. A record of nothing is a *knock*, and no packet.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from kvps.errors import ProtocolError
from kvps.protocol.wire import FRAME_BYTES_MAX, HEAD_BYTES_MAX, PAYLOAD_FRAMES_MAX

Buffer = bytes | memoryview
_LENGTH, _COUNT = struct.Struct("!II"), struct.Struct("!H")
_ONES = 0xFFFFFFFF
SEGMENT_BYTES = 256 << 10
FIRST_BYTES_MAX = _COUNT.size + 4 * PAYLOAD_FRAMES_MAX + HEAD_BYTES_MAX
KNOCK_BYTES_MAX = 256
"""Bytes before the payload, without their seal; and the same of the first record."""


def memory(size: int) -> memoryview:
    """Return memory whose contents are undefined: a large piece takes none before it is written to."""
    return np.empty(size, np.uint8).data


class Writer:
    """Makes the bytes of records, which ``seal`` seals."""

    def __init__(self, seal: Any) -> None:
        self._seal = seal
        self._buffer = memory(SEGMENT_BYTES + seal.octets)

    def record(self, frames: Sequence[Buffer]) -> Iterator[list[Buffer]]:
        """Yield the bytes of a packet, or of a knock if there are no frames, piece by piece.

        What was yielded before is undefined when the next is.
        """
        first: Buffer = b""
        payload = [memoryview(frame).cast("B") for frame in frames[1:]]
        if frames:
            first = struct.pack(f"!H{len(payload)}I", len(payload), *map(len, payload)) + frames[0]
        sealed = self._sealed(first, memory(len(first) + self._seal.octets))
        yield [_LENGTH.pack(len(sealed), len(sealed) ^ _ONES), sealed]
        for frame in payload:
            for at in range(0, len(frame) or 1, SEGMENT_BYTES):
                yield [self._sealed(frame[at : at + SEGMENT_BYTES], self._buffer)]

    def _sealed(self, piece: Buffer, buffer: memoryview) -> memoryview:
        into = buffer[: len(piece) + self._seal.octets]
        self._seal.seal(piece, into)
        return into


class Reader:
    """Makes packets of bytes.

    Args:
        seal: opens the pieces.
        payload_bytes_max: the most payload of one packet.
        deliver: is given the frames of each packet; none for a knock.

    Example::

        for piece in reader.pieces():
            ...  # fill it
    """

    def __init__(
        self, seal: Any, payload_bytes_max: int, deliver: Callable[[list[memoryview]], None]
    ) -> None:
        self._seal, self._payload_bytes_max, self._deliver = seal, payload_bytes_max, deliver
        self.unfinished = 0
        """How many bytes of an unfinished packet's payload have come."""

    def pieces(self) -> Iterator[memoryview]:
        """Yield the memory to be filled next, each when the one before is full.

        Raises:
            ProtocolError: if what came is no record; nothing that comes behind can be read.
        """
        octets, buffer = self._seal.octets, memory(SEGMENT_BYTES + self._seal.octets)
        length, first_max = memory(_LENGTH.size), KNOCK_BYTES_MAX
        while True:
            yield length
            size, complement = _LENGTH.unpack(length)
            if complement != size ^ _ONES or not octets <= size <= octets + first_max:
                raise ProtocolError(f"a stream has a record whose first piece has {size} bytes")
            sealed, first = memory(size), memory(size - octets)
            yield sealed
            self._seal.open(sealed, first)
            first_max = FIRST_BYTES_MAX
            sizes, frames = self._sizes(first) if len(first) else ((), [])
            for size in sizes:
                frames.append(memory(size))
                for at in range(0, size or 1, SEGMENT_BYTES):
                    segment = frames[-1][at : at + SEGMENT_BYTES]
                    sealed = buffer[: len(segment) + octets]
                    yield sealed
                    self._seal.open(sealed, segment)
                    self.unfinished += len(segment)
            self.unfinished = 0
            self._deliver(frames)

    def _sizes(self, first: memoryview) -> tuple[tuple[int, ...], list[memoryview]]:
        """Return the sizes of a packet's payload frames, and its head as its first frame."""
        try:
            (count,) = _COUNT.unpack_from(first)
            sizes = struct.unpack_from(f"!{count}I", first, _COUNT.size)
        except struct.error:
            raise ProtocolError("a stream has a record that ends within its sizes") from None
        head = first[_COUNT.size + 4 * count :]
        is_long = sum(sizes) > self._payload_bytes_max or max(sizes, default=0) > FRAME_BYTES_MAX
        if count > PAYLOAD_FRAMES_MAX or not len(head) or is_long:
            raise ProtocolError(f"a stream has a record of {count} frames, of {sizes!s:.60} bytes")
        return sizes, [head]


def rest_of(pieces: list[Buffer], count: int) -> list[Buffer]:
    """Return what is left of some bytes after the first ``count``.

    Example:
        >>> [bytes(piece) for piece in rest_of([b"abc", b"de"], 4)]
        [b'e']
    """
    for at, piece in enumerate(pieces):
        if count < len(piece):
            return [memoryview(piece)[count:], *pieces[at + 1 :]]
        count -= len(piece)
    return []
