"""The lenses of this process's loop: what a timeline and a record see of it."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar, cast

from kvps import __version__, config
from kvps.core.counts import Counts
from kvps.core.membership_client import Identity
from kvps.errors import ConfigError
from kvps.net.driver import Inbox, Lens
from kvps.net.transport import Encoding, Transport
from kvps.protocol.envelope import Envelope, Role
from kvps.tools.replay.recorder import Dumps, FullLens, RecordedMemory, RingLens
from kvps.tools.trace.chrome import merge, write
from kvps.tools.trace.lens import MemberLens, SchedulerLens, parts_of
from kvps.tools.trace.member import TracedMember
from kvps.tools.trace.tracer import Tracer

log = logging.getLogger("kvps")
M = TypeVar("M")


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

    def __init__(self, transport: Transport, path: str | None, below: Lens | None = None) -> None:
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


# --- records ---------------------------------------------------------------------------------------


def recorder(header: Mapping[str, Any], dumps: Dumps | None = None) -> RingLens | None:
    """Return the lens that records this process, as KVPS_RECORD says; None for no record.

    Args:
        header: the arguments of the core.
        dumps: writes the arguments of its requests.

    Raises:
        ConfigError: if KVPS_RECORD is wrong.
        StorageError: if a full record cannot be written.
    """
    how = config.record()
    if how == "off":
        return None
    said = {"version": __version__, "host": socket.gethostname(), "pid": os.getpid(), **header}
    kind = FullLens if how == "full" else RingLens
    return kind(said, config.record_dir(), dumps)


def identity_of(identity: Identity) -> dict[str, Any]:
    """Return an identity as it stands in a header; a session key's secret is no part of it."""
    return {**asdict(identity), "role": identity.role.value, "job": identity.job.hex()}


def recorded(memory: M, lens: RingLens | None) -> M:
    """Return ``memory``, with its answers noted in a full record."""
    return cast("M", RecordedMemory(memory, lens)) if isinstance(lens, FullLens) else memory


def dump_at_signal(inbox: Inbox[Any], lens: RingLens | None) -> bool:
    """Write the flight recorder at SIGUSR1 from now on; return whether that is so.

    A script that has a handler of its own, and a thread that is not the main one, keep theirs.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if lens is None or not is_main or signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL:
        return False

    def dump(core: Any, now: float) -> None:
        lens.dump(core, "SIGUSR1")

    signal.signal(signal.SIGUSR1, lambda *_: inbox.put(dump))
    return True


@contextmanager
def dumping_at_signal(inbox: Inbox[Any], lens: RingLens | None) -> Iterator[None]:
    """Write the flight recorder at SIGUSR1, for as long as the block runs."""
    is_ours = dump_at_signal(inbox, lens)
    try:
        yield
    finally:
        if is_ours:
            signal.signal(signal.SIGUSR1, signal.SIG_DFL)
