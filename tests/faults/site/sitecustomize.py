"""Failpoints: a process of a test ends, stops or fails by itself at a named moment.

Python imports this file at the start of every process that has this folder on PYTHONPATH and does
nothing unless KVPS_FAILPOINTS is set, so the package itself knows nothing of failpoints. The
variable lists points, in the order in which they are to be reached::

    worker-1/said-Push@server-0:3:kill, scheduler/said-Released:1:kill

Each says who (``scheduler``, ``server-R``, ``worker-R``: the training process; ``guardian-R``: the
kvps-worker that started it), at which event, at the how-manieth, and what happens then.

=================  ================================================================================
event              moment
=================  ================================================================================
``saying-X@P``     a message X is about to be given to the socket for peer P
``said-X@P``       it was given
``hearing-X@P``    a message X from P was decoded, and nothing was done about it yet
``heard-X@P``      all that follows from it was done
``saving``         the scheduler is about to write its state; ``saved``: it is on disk
``at-NAME``        the script called :func:`reach` with NAME
=================  ================================================================================

Without ``@P`` any peer will do. Actions are ``kill`` (SIGKILL; what was given to a socket just now
may be lost), ``kill`` and a number of seconds (so long later; the socket's own thread goes on, and
sends it), ``stop`` and a number of seconds (SIGSTOP; a helper sends SIGCONT), and ``raise``.

One point is armed at a time, over all processes: KVPS_FAILPOINTS_LOG is a file that gets a line
for each point that was reached (its place in the list, the monotonic time, the process id), and
the next is armed when there is one more line. A process counts events from the moment at which it
first sees its point armed.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple


class Point(NamedTuple):
    """One entry of the list."""

    who: str
    event: str
    count: int
    action: str


def parsed(text: str) -> list[Point]:
    """Return the points of a list."""
    points = []
    for item in text.split(","):
        who, _, rest = item.strip().partition("/")
        event, count, action = rest.split(":")
        points.append(Point(who, event, int(count), action))
    return points


def own_name(argv: list[str], env: dict[str, str]) -> str:
    """Return who this process is in its cluster; empty if it is none of it."""
    line = " ".join(argv).partition(" -- ")[0]
    command = re.search(r"\bkvps[-.](?:cli\.)?(scheduler|server|worker)\b", line)
    if command is None:
        return f"worker-{env['KVPS_RANK']}" if "KVPS_RANK" in env else ""
    role = {"worker": "guardian"}.get(command[1], command[1])
    rank = re.search(r"--rank (\d+)", line)
    if role == "scheduler":
        return role
    return f"{role}-{rank[1] if rank else env.get('KVPS_RANK', '0')}"


class Armed:
    """The points that are this process's."""

    def __init__(self, me: str, points: list[Point], log: str) -> None:
        self._me = me
        self._points = points
        self._log = log
        self._events = {point.event for point in points if point.who == me}
        self._place = -1
        self._seen = 0

    def happens(self, *names: str) -> None:
        """One event happens, which has these names."""
        if self._events.isdisjoint(names):
            return
        place = self._reached()
        if place >= len(self._points):
            return
        point = self._points[place]
        if point.who != self._me or point.event not in names:
            return
        if place != self._place:
            self._place, self._seen = place, 0
        self._seen += 1
        if self._seen == point.count:
            self._act(place, point.action)

    def _reached(self) -> int:
        try:
            with open(self._log, "rb") as log:
                return log.read().count(b"\n")
        except FileNotFoundError:
            return 0

    def _act(self, place: int, action: str) -> None:
        line = f"{place} {time.monotonic():.6f} {os.getpid()}\n".encode()
        log = os.open(self._log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(log, line)
        os.close(log)
        if action.startswith("kill"):
            time.sleep(float(action.removeprefix("kill") or 0))
            os.kill(os.getpid(), signal.SIGKILL)
        elif action.startswith("stop"):
            seconds = float(action.removeprefix("stop"))
            subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
        elif action == "raise":
            raise RuntimeError("a failpoint raises")
        else:
            raise AssertionError(f"no action {action!r}")


def reach(name: str) -> None:
    """A script is at a place that it calls ``name``."""
    if armed is not None:
        armed.happens(f"at-{name}")


def _wrap(armed: Armed) -> None:
    """Let the transport and the state file say what happens."""
    from kvps.net.transport import Disconnected
    from kvps.net.zeromq import ZmqTransport
    from kvps.runtime.scheduler_process import StateFile

    def names(verb: str, route: object, packet: Any) -> tuple[str, ...]:
        event = f"{verb}-{type(packet.message).__name__}"
        if isinstance(route, str):
            return event, f"{event}@{route.replace(' ', '-')}"
        envelope = packet.envelope
        return event, f"{event}@{envelope.role.name.lower()}-{envelope.rank}"

    send: Callable[..., None] = ZmqTransport.send
    poll: Callable[..., Iterator[tuple[Any, Any]]] = ZmqTransport.poll
    save: Callable[..., None] = StateFile.save

    def sends(self: ZmqTransport, route: Any, packet: Any, hold: Any) -> None:
        armed.happens(*names("saying", route, packet))
        send(self, route, packet, hold)
        armed.happens(*names("said", route, packet))

    def polls(self: ZmqTransport, timeout_s: float | None) -> Iterator[tuple[Any, Any]]:
        for route, packet in poll(self, timeout_s):
            if isinstance(packet, Disconnected):
                yield route, packet
                continue
            armed.happens(*names("hearing", route, packet))
            yield route, packet
            armed.happens(*names("heard", route, packet))

    def saves(self: StateFile, state: bytes) -> None:
        armed.happens("saving")
        save(self, state)
        armed.happens("saved")

    ZmqTransport.send = sends  # type: ignore[method-assign]
    ZmqTransport.poll = polls  # type: ignore[assignment,method-assign]
    StateFile.save = saves  # type: ignore[method-assign]


armed: Armed | None = None
if "KVPS_FAILPOINTS" in os.environ:
    _me = own_name(sys.orig_argv, dict(os.environ))
    _points = parsed(os.environ["KVPS_FAILPOINTS"])
    if any(point.who == _me for point in _points):
        armed = Armed(_me, _points, os.environ["KVPS_FAILPOINTS_LOG"])
        _wrap(armed)
