"""Merged traces as Chrome's JSON (``traceEvents``), which Perfetto opens; and back.

Files of timelines: written whole or not at all.

The merged trace: the spans of all processes on the scheduler's clock, and how exact that is.
"""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvps.checkpoint import atomic_file
from kvps.errors import ConfigError
from kvps.protocol.envelope import Node, Role
from kvps.protocol.tracing import Part, RoundTrip
from kvps.tools.trace import chrome
from kvps.tools.trace.member import NOBODY, SpanKind, TimeSpan, unpack

SECOND_NS = 1_000_000_000
DRIFT = 10_000
"""Two clocks drift apart by at most a nanosecond in this many: 100 parts in a million."""


@dataclass(slots=True)
class Process:
    """One process, and its spans."""

    node: Node
    incarnation: int
    host: str
    pid: int
    spans: list[TimeSpan] = field(default_factory=list)
    """In the order of their beginnings, on the scheduler's clock."""
    error_ns: int | None = 0
    """By how much its times may be wrong; None if that is unknown."""
    lost: int = 0
    """Spans that are missing."""

    @property
    def name(self) -> str:
        """Its role and rank, with its life if there were several."""
        return str(self.node)


@dataclass(slots=True)
class MergedTrace:
    """One trace of one cluster."""

    processes: list[Process]
    wall_s: float = 0.0
    """Seconds since 1970 when the scheduler's clock was ``clock``."""
    clock: int = 0

    @property
    def begin(self) -> int:
        """When the first span begins."""
        return min([process.spans[0].begin for process in self.processes if process.spans], default=0)

    @property
    def end(self) -> int:
        """When the last span ends."""
        return max([span.end for process in self.processes for span in process.spans], default=0)

    @property
    def error_ns(self) -> int | None:
        """By how much the times of two processes may differ from the truth; None if unknown."""
        errors = [process.error_ns for process in self.processes]
        return None if None in errors else max([error or 0 for error in errors], default=0)


class ClockOffset:
    """The offset of one member's clock, from round trips between it and the scheduler.

    An answer that took ``back - sent`` was read somewhere in between: half of that is the error,
    and it grows with the time from there, as clocks drift. Clocks that agree within all errors
    count as equal: processes of one host have the same clock.
    """

    def __init__(self, trips: Sequence[RoundTrip]) -> None:
        self._trips = trips
        self._near: dict[int, RoundTrip] = {}
        self.error_ns: int | None = None
        self._is_equal = all(abs(_offset(trip)) <= _half(trip) for trip in trips)
        if trips and self._is_equal:
            self.error_ns = min([_half(trip) for trip in trips])

    def apply(self, clock: int) -> int:
        """Return the scheduler's time when the member's clock showed ``clock``."""
        if self._is_equal:
            return clock
        second = clock // SECOND_NS
        if second not in self._near:
            middle = second * SECOND_NS + SECOND_NS // 2
            errors = [_half(trip) + abs(trip.clock - middle) // DRIFT for trip in self._trips]
            self.error_ns = max(self.error_ns or 0, min(errors) + SECOND_NS // 2 // DRIFT)
            self._near[second] = self._trips[errors.index(min(errors))]
        return clock + _offset(self._near[second])


def _offset(trip: RoundTrip) -> int:
    return (trip.sent + trip.back) // 2 - trip.clock


def _half(trip: RoundTrip) -> int:
    return max(0, trip.back - trip.sent) // 2 + 1


def merge(parts: Iterable[tuple[Part, bytes]], wall_s: float = 0.0, clock: int = 0) -> MergedTrace:
    """Put all parts on the scheduler's clock.

    Args:
        parts: as they came from the scheduler.
        wall_s: seconds since 1970 at the moment ``clock``.
        clock: the moment on the scheduler's clock, in nanoseconds.

    Raises:
        ProtocolError: if they are damaged.
    """
    found: dict[tuple[int, int, int], Process] = {}
    offsets: dict[tuple[int, int, int], ClockOffset] = {}
    for part, octets in parts:
        who = part.role, part.rank, part.incarnation
        if who not in found:
            node = Node(Role(part.role), part.rank)
            found[who] = Process(node, part.incarnation, part.host, part.pid)
            offsets[who] = ClockOffset(part.trips)
        process, offset = found[who], offsets[who]
        process.lost = max(process.lost, part.lost)
        process.spans += [span._replace(begin=offset.apply(span.begin)) for span in unpack(octets)]
        process.error_ns = 0 if part.role == Role.SCHEDULER else offset.error_ns
    for process in found.values():
        process.spans.sort(key=lambda span: (span.begin, -span.took))
    return MergedTrace([found[who] for who in sorted(found)], wall_s, clock)


SCRIPT, LOOP, LINK = 1, 2, 3
"""Threads of a process: its script, its loop, and its requests on their way."""
FORMAT = 1
_SCRIPT_KINDS = (SpanKind.COMPUTE, SpanKind.WAIT)
_PID_STEP = 10_000


def document(trace: MergedTrace) -> dict[str, Any]:
    """Return the JSON of a trace; times are microseconds from its beginning."""
    error = trace.error_ns
    begin = trace.begin
    return {
        "displayTimeUnit": "ms",
        "otherData": {
            "kvps": FORMAT,
            "wall_clock_at_0": trace.wall_s + (begin - trace.clock) / 1e9,
            "clock_error_us": None if error is None else error / 1000,
            "spans_lost": sum([process.lost for process in trace.processes]),
        },
        "traceEvents": [*_metadata(trace), *_slices(trace, begin), *_arrows(trace, begin)],
    }


def pid_of(process: Process) -> int:
    """Return the number of a process in the trace: equal for no two."""
    return process.node.role * _PID_STEP**2 + process.node.rank * _PID_STEP + process.incarnation


def _metadata(trace: MergedTrace) -> Iterator[dict[str, Any]]:
    for process in trace.processes:
        pid = pid_of(process)
        label = f"{process.name} ({process.host}:{process.pid})"
        who = {
            "name": label,
            "role": process.node.role,
            "rank": process.node.rank,
            "incarnation": process.incarnation,
            "host": process.host,
            "pid": process.pid,
            "error_ns": process.error_ns,
            "lost": process.lost,
        }
        yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": who}
        order = {Role.WORKER: 0, Role.SERVER: 1, Role.SCHEDULER: 2}[process.node.role]
        sort = {"sort_index": order * _PID_STEP + process.node.rank}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": sort}
        for tid, name in ((SCRIPT, "script"), (LOOP, "kvps loop")):
            if tid == LOOP or process.node.role is Role.WORKER:
                args = {"name": name}
                yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": args}


def _slices(trace: MergedTrace, zero: int) -> Iterator[dict[str, Any]]:
    for process in trace.processes:
        pid = pid_of(process)
        for span in process.spans:
            peer = "" if span.role == NOBODY else str(Node(Role(span.role), span.rank))
            yield {
                "ph": "X",
                "name": span.kind.name.lower(),
                "cat": "kvps",
                "pid": pid,
                "tid": SCRIPT if span.kind in _SCRIPT_KINDS else LOOP,
                "ts": (span.begin - zero) / 1000,
                "dur": span.took / 1000,
                "args": {
                    "peer": peer,
                    "seq": span.seq,
                    "number": span.number,
                    "chunk": span.chunk,
                    "octets": span.octets,
                },
            }


RequestId = tuple[int, int, int, int, int]
"""Role and rank of the sender and of the receiver, and the number of the request between them."""


def request_of(process: Process, span: TimeSpan) -> RequestId | None:
    """Return the request that a span belongs to; None for none."""
    if not span.seq or span.role == NOBODY:
        return None
    ours, theirs = (int(process.node.role), process.node.rank), (span.role, span.rank)
    is_asker = span.kind in (SpanKind.COPY, SpanKind.ENCODE, SpanKind.SEND, SpanKind.SCATTER) or (
        span.kind is SpanKind.SERVE and process.node.role is Role.WORKER and span.role != Role.WORKER
    )
    return (*ours, *theirs, span.seq) if is_asker else (*theirs, *ours, span.seq)


def _arrows(trace: MergedTrace, zero: int) -> Iterator[dict[str, Any]]:
    """Yield the flow of each request, and the time that it waited between two processes."""
    found: dict[RequestId, list[tuple[Process, TimeSpan]]] = defaultdict(list)
    for process in trace.processes:
        for span in process.spans:
            request = request_of(process, span)
            if request is not None:
                found[request].append((process, span))
    for number, steps in enumerate(found.values(), 1):
        steps.sort(key=lambda step: step[1].begin)
        if len({id(process) for process, _ in steps}) < 2:
            continue
        yield from _waits(steps, number, zero)
        for at, (process, span) in enumerate(steps):
            event = {
                "ph": "s" if at == 0 else "f" if at == len(steps) - 1 else "t",
                "name": "request",
                "cat": "kvps",
                "id": number,
                "pid": pid_of(process),
                "tid": LOOP,
                "ts": (span.begin - zero + span.took // 2) / 1000,
            }
            if event["ph"] == "f":
                event["bp"] = "e"
            yield event


def _waits(steps: list[tuple[Process, TimeSpan]], number: int, zero: int) -> Iterator[dict[str, Any]]:
    """Yield *queue* at the receiver: from when a request was sent until it is looked at."""
    for (sender, before), (receiver, after) in itertools.pairwise(steps):
        if sender is receiver or after.begin <= before.end:
            continue
        is_answer = before.kind is SpanKind.REPLY
        common = {
            "name": "reply on its way" if is_answer else "queue",
            "cat": "kvps wait",
            "id": f"{number}",
            "pid": pid_of(receiver),
            "tid": LINK,
        }
        yield {**common, "ph": "b", "ts": (before.end - zero) / 1000, "args": {"seq": after.seq}}
        yield {**common, "ph": "e", "ts": (after.begin - zero) / 1000}


def dump(trace: MergedTrace) -> str:
    """Return the text of the file."""
    return json.dumps(document(trace), separators=(",", ":"))


def load(text: str) -> MergedTrace:
    """Return the trace in the text of a file that :func:`dump` made.

    Raises:
        ConfigError: if it is something else.
    """
    try:
        loaded = json.loads(text)
        other, events = loaded["otherData"], loaded["traceEvents"]
        if other["kvps"] != FORMAT:
            raise ConfigError(f"a trace of format {other['kvps']}; this kvps reads {FORMAT}")
        processes = {
            event["pid"]: _process(event["args"])
            for event in events
            if event["ph"] == "M" and event["name"] == "process_name"
        }
        for event in events:
            if event["ph"] == "X" and event["pid"] in processes:
                processes[event["pid"]].spans.append(_span(event))
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            "this file is no trace of kvps: write one by 'kvps trace --out FILE' or KVPS_TIMELINE"
        ) from error
    for process in processes.values():
        process.spans.sort(key=lambda span: (span.begin, -span.took))
    return MergedTrace(list(processes.values()), float(other["wall_clock_at_0"]), 0)


def _process(args: dict[str, Any]) -> Process:
    node = Node(Role(args["role"]), args["rank"])
    return Process(
        node, args["incarnation"], args["host"], args["pid"], error_ns=args["error_ns"], lost=args["lost"]
    )


def _span(event: dict[str, Any]) -> TimeSpan:
    args = event["args"]
    role, rank = NOBODY, 0
    if args["peer"]:
        name, _, number = args["peer"].partition(" ")
        role, rank = Role[name.upper()].value, int(number or 0)
    return TimeSpan(
        SpanKind[event["name"].upper()],
        role,
        rank,
        round(event["ts"] * 1000),
        round(event["dur"] * 1000),
        args["seq"],
        args["number"],
        args["chunk"],
        args["octets"],
    )


def write(path: Path, trace: MergedTrace) -> None:
    """Write the file of a trace, whole or not at all.

    Raises:
        ConfigError: if it cannot be written.
    """
    text = chrome.dump(trace).encode()
    try:
        atomic_file.put(path, lambda sink: sink.write(text))
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error
