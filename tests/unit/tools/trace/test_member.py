"""A member's part in a trace."""

import struct

import pytest

from kvps.errors import ProtocolError
from kvps.protocol.tracing import SPAN_BYTES, SPANS_MAX, AskClock, ClockIs, Spans
from kvps.tools.trace import member as traced
from kvps.tools.trace.member import NOBODY, SpanKind, TimeSpan, TracedMember, pack, unpack

SPAN = TimeSpan(SpanKind.WAIT, NOBODY, 0, 10, 5)


def recording(now: float = 0.0) -> TracedMember:
    member = TracedMember("gpu-1", 4711)
    assert not member.is_on
    assert member.on_ask(AskClock(7, 100), now, 250) == ClockIs(7, 100, 250)
    assert member.is_on
    return member


@pytest.mark.spec("R341")
def test_member_records_from_the_first_question_until_a_long_silence() -> None:
    member = recording(1.0)
    member.spans.append(SPAN)
    member.on_ask(AskClock(7, 200), 2.0, 300)
    assert member.spans == [SPAN], "the same trace goes on"
    assert list(member.flush(1.9 + traced.SILENCE_MAX_S))
    assert member.is_on
    assert not list(member.flush(2.0 + traced.SILENCE_MAX_S))
    assert not member.is_on


@pytest.mark.spec("R341")
def test_another_trace_begins_anew() -> None:
    member = recording()
    member.spans.append(SPAN)
    member.on_ask(AskClock(8, 0), 1.0, 0)
    assert (member.number, member.spans) == (8, [])


@pytest.mark.spec("R343", "R344")
def test_spans_leave_in_messages_of_bounded_size() -> None:
    member = recording()
    member.spans += [SPAN] * (SPANS_MAX + 1)
    assert member.due() == traced.FLUSH_EVERY_S
    sent = list(member.flush(0.25))
    assert [message for message, _ in sent] == [
        Spans(7, "gpu-1", 4711, SPANS_MAX, 0),
        Spans(7, "gpu-1", 4711, 1, 0),
    ]
    for message, octets in sent:
        assert message.payload_sizes() == (len(octets),)
        assert set(unpack(octets)) == {SPAN}
    assert member.due() == 0.25 + traced.FLUSH_EVERY_S


@pytest.mark.spec("R343")
def test_surplus_spans_are_counted_as_lost() -> None:
    member = recording()
    member.spans += [SPAN] * (traced.WAITING_MAX + 5)
    member.bound()
    assert len(member.spans) == traced.WAITING_MAX
    assert {message.lost for message, _ in member.flush(1.0) if isinstance(message, Spans)} == {5}


# --- spans as bytes, and back ---------------------------------------------------------------------


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
