"""Parts of several processes on one clock."""

import json

import pytest

from kvps.errors import ConfigError
from kvps.protocol.tracing import Part, RoundTrip
from kvps.tools.trace import chrome
from kvps.tools.trace.chrome import SECOND_NS, ClockOffset, merge, write
from kvps.tools.trace.member import NOBODY, SpanKind, TimeSpan, pack
from tests.unit.tools.trace.traces import MS, Job


def part(role: int, rank: int, trips: tuple[RoundTrip, ...], lost: int = 0) -> Part:
    return Part(1, role, rank, 1, "gpu-1", 4711, trips, 1, lost)


@pytest.mark.spec("R342")
def test_the_middle_of_the_quickest_round_trip_is_the_offset() -> None:
    hour = 3600 * SECOND_NS
    trips = [RoundTrip(1000, hour + 5000, 9000), RoundTrip(20_000, hour + 20_150, 20_300)]
    offset = ClockOffset(trips)
    assert offset.apply(hour + 20_150) == 20_150
    assert offset.error_ns is not None
    assert 151 <= offset.error_ns < 151 + SECOND_NS // 10_000


@pytest.mark.spec("R342")
def test_clocks_that_agree_within_the_error_are_equal() -> None:
    offset = ClockOffset([RoundTrip(1000, 1100, 1500), RoundTrip(2000, 2900, 3000)])
    assert offset.apply(12_345) == 12_345
    assert offset.error_ns == 251


@pytest.mark.spec("R342")
def test_a_clock_that_drifts_is_followed() -> None:
    """100 parts in a million, over ten minutes."""
    trips = [
        RoundTrip(true, int(true * 1.0001) + 7 * SECOND_NS, true + 20_000)
        for true in range(0, 600 * SECOND_NS, 10 * SECOND_NS)
    ]
    offset = ClockOffset(trips)
    for true in (5 * SECOND_NS, 123 * SECOND_NS, 599 * SECOND_NS):
        found = offset.apply(int(true * 1.0001) + 7 * SECOND_NS)
        assert offset.error_ns is not None
        assert abs(found - true) <= offset.error_ns
    assert offset.error_ns is not None
    assert offset.error_ns < 2 * MS


def test_a_process_without_a_round_trip_has_an_unknown_error() -> None:
    span = TimeSpan(SpanKind.SEND, 1, 0, 100, 5)
    trace = merge([(part(2, 0, ()), pack([span])), (part(0, 0, ()), pack([span]))])
    assert [process.error_ns for process in trace.processes] == [0, None]
    assert trace.error_ns is None


def test_parts_of_one_process_are_joined_and_shifted() -> None:
    trips = (RoundTrip(0, 10**15, 10),)
    early, late = (TimeSpan(SpanKind.SEND, 1, 0, 10**15 + at, 5) for at in (100, 50))
    own = TimeSpan(SpanKind.SERVE, 2, 3, 60, 5)
    trace = merge(
        [
            (part(2, 3, trips), pack([early])),
            (part(2, 3, trips, lost=4), pack([late])),
            (part(0, 0, ()), pack([own])),
        ],
        1.7e9,
        77,
    )
    scheduler, worker = trace.processes
    assert scheduler.spans == [own]
    assert [span.begin for span in worker.spans] == [55, 105]
    assert (worker.name, worker.lost, trace.begin, trace.end) == ("worker 3", 4, 55, 110)


# --- Chrome's JSON ----------------------------------------------------------------------------------


def test_a_trace_comes_back_from_its_file(tmp_path) -> None:
    trace = Job(servers=2).trace()
    trace.processes[0].lost = 3
    trace.processes[1].error_ns = 1500
    write(tmp_path / "trace.json", trace)
    assert (tmp_path / "trace.json").stat().st_mode & 0o777 == 0o600
    again = chrome.load((tmp_path / "trace.json").read_text())
    begin = trace.begin
    assert [process.node for process in again.processes] == [process.node for process in trace.processes]
    for mine, theirs in zip(trace.processes, again.processes, strict=True):
        assert [span._replace(begin=span.begin - begin) for span in mine.spans] == theirs.spans
        assert (mine.host, mine.pid, mine.lost, mine.error_ns) == (
            *(theirs.host, theirs.pid, theirs.lost, theirs.error_ns),
        )
    with pytest.raises(ConfigError, match="cannot write"):
        write(tmp_path / "no" / "trace.json", trace)


def test_the_events_are_those_that_perfetto_reads() -> None:
    trace = Job(servers=2, rounds=3).trace()
    document = chrome.document(trace)
    assert set(document) == {"displayTimeUnit", "otherData", "traceEvents"}
    events = document["traceEvents"]
    json.dumps(events, allow_nan=False)
    pids = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert sorted(pids.values()) == [
        *("server 0 (b:20)", "server 1 (b:21)", "worker 0 (a:10)", "worker 1 (a:11)")
    ]
    slices = [event for event in events if event["ph"] == "X"]
    assert min(slice_["ts"] for slice_ in slices) == 0
    assert all(slice_["pid"] in pids and slice_["dur"] >= 0 for slice_ in slices)
    assert {slice_["name"] for slice_ in slices} == {
        *("compute", "wait", "copy", "send", "reduce", "update", "reply", "scatter")
    }
    # Every request has one flow: it starts once, ends once, and binds within slices.
    flows = [event for event in events if event["ph"] in "stf"]
    by_id = {flow["id"]: [] for flow in flows}
    for flow in flows:
        by_id[flow["id"]].append(flow["ph"])
        inside = [
            slice
            for slice in slices
            if (slice["pid"], slice["tid"]) == (flow["pid"], flow["tid"])
            and slice["ts"] <= flow["ts"] <= slice["ts"] + slice["dur"]
        ]
        assert inside
    assert len(by_id) == 3 * 2 * 2
    assert all(phases[0] == "s" and phases[-1] == "f" for phases in by_id.values())
    assert all(phases.count("s") == phases.count("f") == 1 for phases in by_id.values())
    queues = [event for event in events if event["name"] == "queue" and event["ph"] == "b"]
    assert len(queues) == 3 * 2 * 2


def test_a_worker_that_came_back_is_another_process() -> None:
    span = TimeSpan(SpanKind.COMPUTE, NOBODY, 0, 0, 5)
    first, second = (Part(1, 2, 0, life, "a", life, (), 1, 0) for life in (1, 2))
    trace = merge([(first, pack([span])), (second, pack([span]))])
    assert len({chrome.pid_of(process) for process in trace.processes}) == 2


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"traceEvents": []}',
        '{"otherData": {"kvps": 1}, "traceEvents": [{"ph": "X"}]}',
        '{"otherData": {"kvps": 1}, "traceEvents": [{"ph": "M", "name": "process_name", "pid": 1, "args": {}}]}',
    ],
)
def test_another_file_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="no trace of kvps"):
        chrome.load(text)


def test_a_later_format_is_refused() -> None:
    with pytest.raises(ConfigError, match="a trace of format 2"):
        chrome.load('{"otherData": {"kvps": 2}, "traceEvents": []}')
