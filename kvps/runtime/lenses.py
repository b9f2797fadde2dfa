"""The lenses of this process's loop: what a timeline sees of it."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

from kvps.core.counts import Counts
from kvps.core.tracing.member import TracedMember
from kvps.errors import ConfigError
from kvps.net.driver import Transport
from kvps.net.lens import Encoding, Lens
from kvps.observe.timeline.files import write
from kvps.observe.timeline.lens import MemberLens, SchedulerLens, parts_of
from kvps.observe.timeline.merged import merge
from kvps.observe.timeline.tracer import Tracer
from kvps.protocol.envelope import Envelope, Role

log = logging.getLogger("kvps")


def _tracer(role: Role, transport: Transport) -> Tracer:
    member = TracedMember(socket.gethostname(), os.getpid())
    encoding = getattr(transport, "encoding", None) or Encoding()
    return Tracer(member, role, encoding)


def member_lens(
    role: Role,
    transport: Transport,
    envelope: Callable[[], Envelope],
    counts: Callable[[], Counts | None] = lambda: None,
    below: Lens | None = None,
) -> MemberLens:
    """Return the lens of a server or worker.

    Args:
        role: what it is.
        transport: of the loop.
        envelope: returns its envelope.
        counts: returns the counters of its core.
        below: the lens that calls the core.
    """
    return MemberLens(_tracer(role, transport), envelope, counts, below)


class Timeline:
    """The lens of a scheduler, and the file of the whole job's timeline if one is wanted.

    Args:
        transport: of the loop.
        path: the file; None records only when an operator asks.
        below: the lens that calls the core.
    """

    def __init__(
        self, transport: Transport, path: str | None, below: Lens | None = None
    ) -> None:
        self._path = path
        tracer = _tracer(Role.SCHEDULER, transport)
        self.lens = SchedulerLens(tracer, from_start=path is not None, below=below)

    def close(self) -> None:
        """Write the file."""
        if self._path is None:
            return
        now, clock = time.monotonic(), time.monotonic_ns()
        trace = merge(parts_of(self.lens, now), time.time(), clock)
        try:
            write(Path(self._path), trace)
        except ConfigError as error:
            log.error("the timeline is lost: %s", error)
        else:
            log.info("the timeline of this job is in %s", self._path)
