"""The framing of streams: any frames come out as they went in, however they are cut, and nothing else does."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvps.errors import ProtocolError
from kvps.net.links import framing
from kvps.net.links.framing import (
    SEGMENT_BYTES,
    Buffer,
    Reader,
    memory,
    pieces_of,
    record_of,
    rest_of,
    whole_record,
)
from kvps.protocol.wire import FRAME_BYTES_MAX, PAYLOAD_FRAMES_MAX

LIMIT = 1 << 20


class Numbered:
    """In place of a cipher: bytes are changed, and their number is behind them."""

    octets = 2

    def __init__(self) -> None:
        self.count = 0

    def seal(self, piece: Buffer, into: memoryview) -> None:
        into[:] = bytes(octet ^ 0x5A for octet in piece) + struct.pack("!H", self.count)
        self.count += 1

    def open(self, piece: Buffer, into: memoryview) -> None:
        if bytes(piece[-2:]) != struct.pack("!H", self.count):
            raise ProtocolError("another was due")
        self.count += 1
        into[:] = bytes(octet ^ 0x5A for octet in piece[:-2])


def octets_of(packets: Sequence[Sequence[bytes]]) -> bytes:
    """Return what goes along a stream."""
    seal = Numbered()
    return b"".join([b"".join(map(bytes, some)) for frames in packets for some in pieces_of(frames, seal)])


def read(octets: bytes, sizes: Sequence[int] = (LIMIT,)) -> list[list[bytes]]:
    """Give a reader some octets, in parts of these sizes at most, and return what it finds."""
    found: list[list[memoryview]] = []
    at, turn = 0, 0
    for piece in Reader(Numbered(), LIMIT, found.append).pieces():
        while len(piece):
            if at == len(octets):
                return [[bytes(frame) for frame in frames] for frames in found]
            part = octets[at : at + min(len(piece), sizes[turn % len(sizes)])]
            piece[: len(part)] = part
            at, turn, piece = at + len(part), turn + 1, piece[len(part) :]
    raise AssertionError("a reader never ends")


@pytest.mark.spec("R453")
@given(
    st.lists(st.lists(st.binary(max_size=6000), max_size=4), max_size=6),
    st.lists(st.integers(1, 9000), min_size=1, max_size=5),
)
def test_packets_come_out_as_they_went_in(payloads: list[list[bytes]], sizes: list[int]) -> None:
    packets = [[], *[[b"a head", *frames] if frames != [b""] else [] for frames in payloads]]
    assert read(octets_of(packets), sizes) == packets


def test_a_frame_of_several_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(framing, "SEGMENT_BYTES", 1000)
    chance = random.Random(7)
    packets = [[b"head", chance.randbytes(size), chance.randbytes(10)] for size in (999, 1000, 1001, 5000)]
    assert read(octets_of(packets), [700]) == packets


def test_unfinished_payload_is_counted() -> None:
    octets, found = octets_of([[], [b"head", bytes(SEGMENT_BYTES + 5000), bytes(7)]]), []
    reader, at = Reader(Numbered(), LIMIT, found.append), 0
    counts = []
    for piece in reader.pieces():
        counts.append(reader.unfinished)
        if at == len(octets):
            break
        piece[:] = octets[at : at + len(piece)]
        at += len(piece)
    assert counts == [0, 0, 0, 0, 0, SEGMENT_BYTES, SEGMENT_BYTES + 5000, 0]
    assert list(map(len, found)) == [0, 3]


def length(size: int) -> bytes:
    """Return the bytes of a length."""
    return struct.pack("!II", size, size ^ 0xFFFFFFFF)


def record(first: bytes) -> bytes:
    """Return a record whose first piece is ``first``, behind a knock."""
    seal = Numbered()
    knock, sealed = memory(2), memory(len(first) + 2)
    seal.seal(b"", knock)
    seal.seal(first, sealed)
    return length(2) + bytes(knock) + length(len(sealed)) + bytes(sealed)


@pytest.mark.spec("R454")
@pytest.mark.parametrize(
    "octets",
    [
        length(framing.KNOCK_BYTES_MAX + 3),
        record(b"")[:12] + length(framing.FIRST_BYTES_MAX + 3),
        length(1),
        struct.pack("!II", 2, 2),
        record(b"\0"),
        record(struct.pack("!HI", 2, 5)),
        record(struct.pack("!H", 0)),
        record(struct.pack("!HI", 1, FRAME_BYTES_MAX + 1) + b"head"),
        record(struct.pack("!HII", 2, LIMIT, 1) + b"head"),
        record(struct.pack(f"!H{PAYLOAD_FRAMES_MAX + 1}I", PAYLOAD_FRAMES_MAX + 1, *[1] * 65) + b"head"),
    ],
)
def test_a_bad_record_is_refused_before_memory_is_taken(octets: bytes) -> None:
    with pytest.raises(ProtocolError, match="a record "):
        read(octets)


@pytest.mark.spec("R454")
def test_a_first_record_is_short() -> None:
    with pytest.raises(ProtocolError, match="has a first piece"):
        read(octets_of([[bytes(framing.KNOCK_BYTES_MAX)]]))


@pytest.mark.parametrize("count", range(8))
def test_the_rest_of_some_bytes(count: int) -> None:
    left = rest_of([b"abc", b"", memoryview(b"de"), b"fg"], count)
    assert b"".join(map(bytes, left)) == b"abcdefg"[count:]


def test_octets_of_a_record_that_is_not_sealed() -> None:
    assert b"".join(record_of([b"head"])).hex(" ") == "00 00 00 06 ff ff ff f9 00 00 68 65 61 64"
    octets = b"".join(record_of([b"head", b"abc", b""]))
    assert octets.hex(" ") == "00 00 00 0e ff ff ff f1 00 02 00 00 00 03 00 00 00 00 68 65 61 64 61 62 63"


@pytest.mark.spec("R616")
@given(
    st.lists(st.lists(st.binary(max_size=300), max_size=4), min_size=1, max_size=6),
    st.lists(st.integers(1, 900), min_size=1, max_size=5),
)
def test_packets_that_are_not_sealed_come_out_as_they_went_in(
    payloads: list[list[bytes]], sizes: list[int]
) -> None:
    packets = [[b"a head", *frames] for frames in payloads]
    octets = b"".join([bytes(part) for frames in packets for part in record_of(frames)])
    at, whole = 0, []
    while found := whole_record(memoryview(octets), at, len(octets)):
        whole.append([bytes(frame) for frame in found[0]])
        assert whole_record(memoryview(octets), at, found[1] - 1) is None
        at = found[1]
    assert (whole, at) == (packets, len(octets))
    come: list[list[memoryview]] = []
    at, turn = 0, 0
    for piece in Reader(None, LIMIT, come.append).pieces():
        while len(piece) and at < len(octets):
            part = octets[at : at + min(len(piece), sizes[turn % len(sizes)])]
            piece[: len(part)] = part
            at, turn, piece = at + len(part), turn + 1, piece[len(part) :]
        if at == len(octets) and len(piece):
            break
    assert [[bytes(frame) for frame in frames] for frames in come] == packets


@pytest.mark.spec("R617")
@given(st.binary(max_size=60))
def test_noise_is_no_whole_record_beyond_what_has_come(octets: bytes) -> None:
    found = whole_record(memoryview(octets), 0, len(octets))
    if found is not None:
        frames, end = found
        assert b"".join(map(bytes, record_of(frames))) == octets[:end]
