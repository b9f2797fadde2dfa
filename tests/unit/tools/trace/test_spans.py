"""Spans as bytes, and back."""

import struct

import pytest

from kvps.errors import ProtocolError
from kvps.protocol.tracing import SPAN_BYTES
from kvps.tools.trace.member import NOBODY, SpanKind, TimeSpan, pack, unpack

SPANS = [
    TimeSpan(SpanKind.COMPUTE, NOBODY, 0, 2**40, 5_000_000),
    TimeSpan(SpanKind.SEND, 1, 3, 2**40 + 7, 12, 42, 5, 9, 4096),
]


def test_spans_come_back_as_they_were() -> None:
    assert list(unpack(pack(SPANS))) == SPANS
    assert len(pack(SPANS)) == 2 * SPAN_BYTES
    assert SPANS[1].end == 2**40 + 19


def test_numbers_that_are_too_large_are_cut() -> None:
    (span,) = unpack(pack([TimeSpan(SpanKind.REPLY, 2, 2**40, 1, -5, 1, 1, 2**40, 2**40)]))
    assert (span.rank, span.took, span.chunk, span.octets) == (2**32 - 1, 0, 2**32 - 1, 2**32 - 1)


def test_malformed_span_is_refused() -> None:
    with pytest.raises(ProtocolError, match="47 octets are no spans of 48"):
        list(unpack(bytes(47)))
    with pytest.raises(ProtocolError, match="no kind of span has number 99"):
        list(unpack(struct.pack("<BBHIQQQQII", 99, *([0] * 9))))
