"""The parts of a server's process: the server that it was started as, and in a job with copies the standbys
of other servers, each a core with a loop in a thread of its own.

One part always waits for a seat: when it gets that, the next begins. So the scheduler finds a standby in
every process, also for several servers. In a job without copies one waits only while a seat is to be moved. A
process lives as long as some part of it serves.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVarTuple

from kvps.core.effects import Disk, Exit, Finish
from kvps.core.membership_client import EXIT_CONFIG, SEATED
from kvps.core.server.server import STAYS, WANTED, Server
from kvps.net.driver import Door, Inbox, Lens, Listener, drive
from kvps.net.transport import Transport
from kvps.observe import logs
from kvps.runtime.storage_thread import StorageThread

Ts = TypeVarTuple("Ts")
log = logging.getLogger("kvps")
END_MAX_S = 2.0
"""How long parts may take to end by themselves once the job is over."""
LOOK_EVERY_S = 0.2


@dataclass(slots=True)
class Part:
    """A server's core with what it needs to run."""

    core: Server
    transport: Transport
    inbox: Inbox[Server]
    archive: StorageThread | None
    lens: Lens

    @property
    def serves(self) -> bool:
        """Whether it holds a seat of the job, which is not over, or asks for one by its rank."""
        member = self.core.member
        is_seated = member.welcome is not None or member.identity.rank is not None
        return is_seated and member.stopped is None and member.error is None


class ServerParts:
    """All parts of one process.

    Args:
        make: makes a part that wants the seat of a server, by its rank; or of any standby, by None.
    """

    def __init__(self, make: Callable[[int | None], Part]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._threads: dict[threading.Thread, Part] = {}
        self._is_ending = self._retires = False
        self._first: Part | None = None
        self._last: Exit | None = None
        """How the part ended that held a seat, and was the last to do so; None while none has."""

    def run(self, first: Part, ranks: Sequence[int] = ()) -> Exit:
        """Run ``first`` in this thread, and with it all others; return how the last that served has ended.

        Args:
            first: a server.
            ranks: of more servers, which this process holds, too.
        """
        self._first = first
        for rank in ranks:
            self.begin(rank)
        ending = drive(first.core, first.transport, first.inbox, _Listener(self, first), lens=first.lens)
        _close(first)
        if not self._is_ending:
            while busy := [thread for thread, part in self._living() if part.serves]:
                busy[0].join(LOOK_EVERY_S)
                ending = self._last or ending  # where others have its seats, it does not count
        self.end()
        return ending

    def put(self, door: Door[Server, *Ts], *arguments: *Ts) -> None:
        """Have a door of every part called."""
        for part in [self._first, *[part for _, part in self._living()]]:
            if part is not None:
                part.inbox.put(door, *arguments)

    def retire(self, reason: str, within_s: float) -> None:
        """The operator ends this process: others take its seats before, if they can in this time."""
        if self._retires:
            self.leave(reason)
            return
        self._retires = True
        self.put(Server.retire, reason, within_s)
        late = threading.Timer(within_s, self.leave, (f"{reason}; nobody took its seats in {within_s:g} s",))
        late.daemon = True
        late.start()

    def leave(self, reason: str) -> None:
        """The operator ends this process at once."""
        self._is_ending = True
        self.put(Server.leave, reason)

    def end(self) -> None:
        """End all parts."""
        self._is_ending = True
        for thread, part in self._living():
            if part.serves:
                thread.join(END_MAX_S)
            part.inbox.put(lambda core, now: core.outbox.append(Exit(0, "its process ends")))
        for thread, _ in self._living():
            thread.join(END_MAX_S)

    def begin(self, rank: int | None = None, *, if_none_waits: bool = False) -> None:
        """Start one more part; called when the one that waited has got a seat, or another is wanted."""
        with self._lock:
            waits = any(part.core.member.welcome is None for part in self._threads.values())
            if self._is_ending or self._retires or (if_none_waits and waits):
                return
            part = self._make(rank)
            thread = threading.Thread(target=self._run, args=(part,), name="kvps standby", daemon=True)
            self._threads[thread] = part
            thread.start()

    @property
    def _has_copies(self) -> bool:
        return self._first is not None and self._first.core.member.seat.replicas > 0

    def _living(self) -> list[tuple[threading.Thread, Part]]:
        with self._lock:
            return [(thread, part) for thread, part in self._threads.items() if thread.is_alive()]

    def _run(self, part: Part) -> None:
        member = part.core.member
        logs.speak_in_thread_as(lambda: logs.Speaker("server", member.rank if member.welcome else None))
        try:
            ending = drive(part.core, part.transport, part.inbox, _Listener(self, part), lens=part.lens)
            if member.welcome is None and ending.code == EXIT_CONFIG and self._has_copies:
                log.warning("this process hosts no standby: %s", ending.reason)
            elif member.welcome is not None:
                self._last = ending
                log.info("a part of this process ends: %s", ending.reason)
        except Exception:  # nobody joins this thread for its result: the log must have it
            log.exception("a standby failed")
        finally:
            _close(part)
            with self._lock:
                self._threads.pop(threading.current_thread(), None)


class _Listener(Listener):
    """Starts the next part when one has got a seat, and passes on what concerns files."""

    def __init__(self, parts: ServerParts, part: Part) -> None:
        self._parts, self._part = parts, part

    def finish(self, effect: Finish) -> None:
        if effect.ticket in (SEATED, WANTED):
            begin = partial(self._parts.begin, if_none_waits=effect.ticket == WANTED)
            threading.Thread(target=begin, name="kvps standby starts", daemon=True).start()
        elif effect.ticket == STAYS:
            self._parts.leave(f"asked to stop; {effect.value}")

    def order(self, effect: Disk) -> None:
        if self._part.archive is not None:
            self._part.archive.order(effect)


def _close(part: Part) -> None:
    if part.archive is not None:
        part.archive.close()
    part.transport.close(0.5)
