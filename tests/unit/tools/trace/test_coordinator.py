"""The scheduler's part in a trace."""

import pytest

from kvps.errors import ConfigError
from kvps.protocol.envelope import Envelope, Role
from kvps.protocol.tracing import (
    SPANS_MAX,
    TRIPS_MAX,
    AskClock,
    ClockIs,
    Fetch,
    RoundTrip,
    Spans,
    Trace,
    Tracing,
)
from kvps.tools.trace.coordinator import ASK_EVERY_S, BYTES_MAX, GATHER_S, GONE_S, KEEP_S, TraceCoordinator
from kvps.tools.trace.member import SpanKind, TimeSpan, pack

WORKER = Envelope(bytes(16), 3, Role.WORKER, 1, 5, 0)
OCTETS = pack([TimeSpan(SpanKind.SEND, 1, 0, 10, 5)])


def begun(for_s: float = 10.0) -> TraceCoordinator:
    trace_coordinator = TraceCoordinator()
    assert trace_coordinator.due() is None
    assert not list(trace_coordinator.on_time(0.0, 0))
    answer = trace_coordinator.on_trace(1, Trace(7, for_s), 0.0, 99, 1.7e9)
    assert answer == Tracing(1, for_s + GATHER_S, 0, 1.7e9, 99)
    return trace_coordinator


def spans(count: int, lost: int = 0, number: int = 7) -> tuple[Spans, bytes]:
    return Spans(number, "gpu-1", 4711, count, lost), OCTETS * count


# --- one trace at a time ----------------------------------------------------------------------------


@pytest.mark.spec("R340")
def test_a_second_trace_is_refused_while_one_is_recorded_or_gathered() -> None:
    trace_coordinator = begun()
    assert trace_coordinator.is_on(9.9)
    for now in (5.0, 10.0 + GATHER_S - 0.1):
        with pytest.raises(ConfigError, match="another trace is being recorded"):
            trace_coordinator.on_trace(2, Trace(8, 1.0), now, 0, 0.0)
    answer = trace_coordinator.on_trace(3, Trace(7, 10.0), 4.0, 0, 0.0)
    assert isinstance(answer, Tracing)
    assert answer.left_s == pytest.approx(6.0 + GATHER_S)
    done = trace_coordinator.on_trace(4, Trace(7, 10.0), 10.0 + GATHER_S, 0, 0.0)
    assert isinstance(done, Tracing)
    assert (done.left_s, trace_coordinator.is_on(10.0)) == (0.0, False)
    trace_coordinator.on_trace(5, Trace(8, 1.0), 10.0 + GATHER_S, 0, 0.0)
    assert trace_coordinator.is_on(12.0)


@pytest.mark.spec("R340")
@pytest.mark.parametrize("for_s", [0.0, -1.0, 601.0])
def test_a_trace_of_no_time_or_too_much_is_refused(for_s: float) -> None:
    trace_coordinator = TraceCoordinator()
    with pytest.raises(ConfigError, match="ask for more than 0 and at most 600 s"):
        trace_coordinator.on_trace(1, Trace(7, for_s), 0.0, 0, 0.0)
    assert trace_coordinator.recording is None


@pytest.mark.spec("R340")
def test_parts_are_fetched_by_number() -> None:
    trace_coordinator = begun()
    assert not list(TraceCoordinator().parts())
    trace_coordinator.on_spans(WORKER, *spans(2, lost=3))
    part, octets = trace_coordinator.on_fetch(9, Fetch(7, 0))
    assert (part.seq, part.role, part.rank, part.incarnation) == (9, Role.WORKER, 1, 5)  # type: ignore[attr-defined]
    assert (part.host, part.pid, part.count, part.lost) == ("gpu-1", 4711, 2, 3)  # type: ignore[attr-defined]
    assert part.payload_sizes() == (len(octets),)
    assert [octets for _, octets in trace_coordinator.parts()] == [octets]
    with pytest.raises(ConfigError, match="has 1 parts, not 2"):
        trace_coordinator.on_fetch(9, Fetch(7, 1))
    with pytest.raises(ConfigError, match="no longer there"):
        trace_coordinator.on_fetch(9, Fetch(8, 0))


# --- clocks -----------------------------------------------------------------------------------------


@pytest.mark.spec("R341")
def test_every_member_is_asked_for_its_clock_while_it_lasts() -> None:
    trace_coordinator = begun(60.0)
    trace_coordinator.beat(b"a", 0.0)
    trace_coordinator.beat("worker 1", 0.0)
    assert list(trace_coordinator.on_time(0.0, 5)) == [(b"a", AskClock(7, 5)), ("worker 1", AskClock(7, 5))]
    assert not list(trace_coordinator.on_time(ASK_EVERY_S / 2, 6))
    assert trace_coordinator.due() == ASK_EVERY_S
    trace_coordinator.beat(b"a", 10.0)
    assert [route for route, _ in trace_coordinator.on_time(GONE_S, 7)] == [b"a"]
    assert not list(trace_coordinator.on_time(60.0, 8))
    assert trace_coordinator.recording is not None
    assert not list(trace_coordinator.on_time(60.0 + KEEP_S, 9))
    assert trace_coordinator.recording is None


@pytest.mark.spec("R342", "R343")
def test_the_quickest_round_trips_are_kept() -> None:
    trace_coordinator = begun()
    trace_coordinator.on_clock(WORKER, ClockIs(8, 0, 0), 1)
    assert trace_coordinator.recording is not None
    assert not trace_coordinator.recording.trips, "of another trace"
    for at in range(TRIPS_MAX + 1):
        took = 1000 if at == 30 else 10
        trace_coordinator.on_clock(WORKER, ClockIs(7, 1000 * at, 1), 1000 * at + took)
    (trips,) = trace_coordinator.recording.trips.values()
    assert len(trips) == TRIPS_MAX
    assert RoundTrip(30_000, 1, 31_000) not in trips
    trace_coordinator.on_spans(WORKER, *spans(1))
    part, _ = trace_coordinator.on_fetch(1, Fetch(7, 0))
    assert part.trips == tuple(trips)  # type: ignore[attr-defined]


# --- bounds -----------------------------------------------------------------------------------------


@pytest.mark.spec("R343")
def test_spans_of_another_trace_change_nothing() -> None:
    trace_coordinator = begun()
    trace_coordinator.on_spans(WORKER, *spans(1, number=8))
    TraceCoordinator().on_spans(WORKER, *spans(1))
    assert not list(trace_coordinator.parts())


@pytest.mark.spec("R343")
def test_parts_are_filled_and_what_goes_beyond_the_limit_is_counted() -> None:
    trace_coordinator = begun()
    full = spans(SPANS_MAX)
    room = BYTES_MAX // len(full[1])
    for _ in range(room):
        trace_coordinator.on_spans(WORKER, *full)
    trace_coordinator.on_spans(WORKER, *full)
    trace_coordinator.on_spans(WORKER, *full)
    parts = [part for part, _ in trace_coordinator.parts()]
    assert len(parts) == room
    assert {part.lost for part in parts} == {2 * SPANS_MAX}
    small = begun()
    for _ in range(10):
        small.on_spans(WORKER, *spans(3))
    assert [part.count for part, _ in small.parts()] == [30]
