"""The framing of links: the frames of packets to bytes, and bytes back to frames. No I/O is in here.

A record is one packet. First come the sizes of its payload frames and its head, then its payload::

    length 4 | its complement 4 | count 2, size 4 ..., head | payload frame | payload frame ...

The length counts what lies between the complement and the payload. In a stream, all behind the complement is
sealed, payload in segments of 256 KiB (and the rest of a frame), with the seal's bytes behind each piece.
A record of nothing is a *knock*, and no packet.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kvps.errors import ProtocolError
from kvps.protocol.wire import FRAME_BYTES_MAX, HEAD_BYTES_MAX, PAYLOAD_FRAMES_MAX

Buffer = bytes | memoryview
_LENGTH, _COUNT, _START = struct.Struct("!II"), struct.Struct("!H"), struct.Struct("!IIH")
_ONES = 0xFFFFFFFF
SEGMENT_BYTES = 256 << 10
FIRST_BYTES_MAX = _COUNT.size + 4 * PAYLOAD_FRAMES_MAX + HEAD_BYTES_MAX
KNOCK_BYTES_MAX = 256
"""Bytes before the payload, without their seal; and the same of the first record."""


def memory(size: int) -> memoryview:
    """Return memory whose contents are undefined: a large piece takes none before it is written to."""
    if size <= 64 << 10:
        return memoryview(bytearray(size))
    import numpy as np  # a scheduler, whose packets are small, does without

    return np.empty(size, np.uint8).data


def record_of(frames: Sequence[Buffer]) -> list[Buffer]:
    """Return the bytes of a packet's record that is not sealed."""
    head, count = frames[0], len(frames) - 1
    size = _COUNT.size + 4 * count + len(head)
    payload = [memoryview(frame).cast("B") for frame in frames[1:]] if count else []
    start = struct.pack(f"!IIH{count}I", size, size ^ _ONES, count, *map(len, payload))
    return [start + head, *payload]


def whole_record(octets: memoryview, at: int, end: int) -> tuple[list[memoryview], int] | None:
    """Return the frames of a record that is not sealed, and where it ends; None if that is for a reader.

    Args:
        octets: the bytes that have come, up to ``end``.
        at: where the record begins.
        end: how many bytes have come.

    Example:
        >>> octets = memoryview(b"".join(record_of([b"head", b"payload"])))
        >>> frames, end = whole_record(octets, 0, len(octets))
        >>> [bytes(frame) for frame in frames], end == len(octets)
        ([b'head', b'payload'], True)
    """
    if end - at < _START.size:
        return None
    size, complement, count = _START.unpack_from(octets, at)
    first, at = at + _START.size + 4 * count, at + _LENGTH.size + size
    if complement != size ^ _ONES or not 0 <= first < at <= end or count > PAYLOAD_FRAMES_MAX:
        return None
    frames = [memoryview(bytearray(octets[first:at]))]
    if count:
        for length in struct.unpack_from(f"!{count}I", octets, first - 4 * count):
            frames.append(memoryview(bytearray(octets[at : at + length])))
            at += length
            if at > end:
                return None
    return frames, at


def pieces_of(frames: Sequence[Buffer], seal: Any) -> Iterator[list[Buffer]]:
    """Yield the bytes of a packet, or of a knock if there are no frames, piece by piece.

    What was yielded before is undefined when the next is.

    Args:
        frames: of the packet.
        seal: seals the pieces; None to leave them as they are.
    """
    if seal is None:
        yield record_of(frames)
        return
    first: Buffer = b""
    payload = [memoryview(frame).cast("B") for frame in frames[1:]]
    if frames:
        first = struct.pack(f"!H{len(payload)}I", len(payload), *map(len, payload)) + frames[0]
    sealed = memory(len(first) + seal.octets)
    seal.seal(first, sealed)
    yield [_LENGTH.pack(len(sealed), len(sealed) ^ _ONES), sealed]
    buffer = memory(SEGMENT_BYTES + seal.octets if payload else 0)
    for frame in payload:
        for at in range(0, len(frame) or 1, SEGMENT_BYTES):
            piece = frame[at : at + SEGMENT_BYTES]
            sealed = buffer[: len(piece) + seal.octets]
            seal.seal(piece, sealed)
            yield [sealed]


class Reader:
    """Makes packets of bytes.

    Args:
        seal: opens the pieces; None if they are as they were written.
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
        self.start = memory(_LENGTH.size)
        """The piece with which each record begins."""
        self.unfinished = 0
        """How many bytes of an unfinished packet's payload have come."""

    def pieces(self) -> Iterator[memoryview]:
        """Yield the memory to be filled next, each when the one before is full.

        Raises:
            ProtocolError: if what came is no record; nothing that comes behind can be read.
        """
        octets = self._seal.octets if self._seal else 0
        length, first_max = self.start, KNOCK_BYTES_MAX if self._seal else FIRST_BYTES_MAX
        while True:
            yield length
            size, complement = _LENGTH.unpack(length)
            if complement != size ^ _ONES or not octets <= size <= octets + first_max:
                raise ProtocolError(f"a record has a first piece of {size} bytes")
            first = memory(size - octets)
            yield from self._filled(first)
            first_max = FIRST_BYTES_MAX
            sizes, frames = self._sizes(first) if len(first) else ((), [])
            for size in sizes:
                frames.append(memory(size))
                for at in range(0, size or 1, SEGMENT_BYTES):
                    segment = frames[-1][at : at + SEGMENT_BYTES]
                    yield from self._filled(segment)
                    self.unfinished += len(segment)
            self.unfinished = 0
            self._deliver(frames)

    def _filled(self, into: memoryview) -> Iterator[memoryview]:
        """Yield the memory by which ``into`` is filled: itself, or that of the piece as it was sealed."""
        if self._seal is None:
            if len(into):
                yield into
            return
        sealed = memory(len(into) + self._seal.octets)
        yield sealed
        self._seal.open(sealed, into)

    def _sizes(self, first: memoryview) -> tuple[tuple[int, ...], list[memoryview]]:
        """Return the sizes of a packet's payload frames, and its head as its first frame."""
        try:
            (count,) = _COUNT.unpack_from(first)
            sizes = struct.unpack_from(f"!{count}I", first, _COUNT.size)
        except struct.error:
            raise ProtocolError("a record ends within its sizes") from None
        head = first[_COUNT.size + 4 * count :]
        is_long = sum(sizes) > self._payload_bytes_max or max(sizes, default=0) > FRAME_BYTES_MAX
        if count > PAYLOAD_FRAMES_MAX or not len(head) or is_long:
            raise ProtocolError(f"a record has {count} frames, of {sizes!s:.60} bytes")
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
