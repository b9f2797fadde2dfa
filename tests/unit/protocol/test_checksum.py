"""One number for the same octets, however they are cut and whoever computes it."""

import zlib

import pytest

from kvps.protocol import wire as module
from kvps.protocol.wire import checksum

OCTETS = bytes(range(256)) * 5000


@pytest.mark.spec("R110")
def test_checksum_is_crc_32() -> None:
    assert checksum([b"123456789"]) == 0xCBF43926
    assert checksum([]) == 0
    assert checksum([OCTETS]) == zlib.crc32(OCTETS)


def test_parts_count_as_one() -> None:
    view = memoryview(OCTETS)
    for at in (0, 1, 7, 4096, len(OCTETS)):
        assert checksum([view[:at], bytes(view[at:])]) == zlib.crc32(OCTETS)


def test_order_counts() -> None:
    assert checksum([OCTETS, b"x"]) != checksum([b"x", OCTETS])


def test_the_library_at_hand_agrees_with_pythons(monkeypatch: pytest.MonkeyPatch) -> None:
    found = checksum([b"abc", OCTETS])
    monkeypatch.setattr(module, "crc32", zlib.crc32)
    assert checksum([b"abc", OCTETS]) == found


def test_elements_are_seen_as_octets() -> None:
    assert checksum([memoryview(OCTETS).cast("f")]) == zlib.crc32(OCTETS)
