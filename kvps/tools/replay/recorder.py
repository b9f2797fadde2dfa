"""The flight recorder of a process: all that its core was given, in a ring of the last events or
completely in a file.

The *ring* is always on. It holds the envelopes and fields of the last packets that came and left,
timers, calls and failures, and no values. The *full* record goes to a file as it happens, with
payloads and the arguments of calls, so that it survives SIGKILL. For a replay it also has the
answers of the memory, and when the world had read a payload.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

from kvps.core.effects import Core, Disk, Effect, Exit, Hold, Route, Send
from kvps.core.membership_client import EXIT_CONFIG, EXIT_TEMPORARY
from kvps.errors import KvpsError, StorageError
from kvps.net.driver import Doors, Lens, Perform
from kvps.protocol import wire
from kvps.protocol.envelope import Envelope, Message, Packet
from kvps.protocol.membership import Left
from kvps.tools.replay.digest import digest
from kvps.tools.replay.format import (
    Event,
    What,
    bare_packet_parts,
    checksum_of,
    event_bytes,
    packet_parts,
    route_bytes,
    write_header,
)

log = logging.getLogger("kvps")
C = TypeVar("C", bound=Core)
EVENTS_MAX = 10_000
FULL = EVENTS_MAX + 1_000
"""Events of a ring; the oldest of them then go together."""
RUNS_MAX = 100_000
"""Runs of elements in all messages of the ring: a push of a thousand keys may have a thousand."""
FILES_MAX = 20
"""Files of one directory; the oldest go."""
EXPECTED = (0, EXIT_TEMPORARY, EXIT_CONFIG)
"""Exit codes that are no error of this process."""
Entry = tuple[What, float, Any, Envelope | None, Message | None]
"""Kind, time, route or words, and the head of a packet. Nothing here keeps values alive."""
Dumps = Callable[[Callable[[object], int | None], object], bytes | None]
"""Writes the arguments of a request as bytes; None if they cannot be written."""
SMALL = ("on_join", "leave", "on_memory", "on_script")
"""Requests whose arguments a ring keeps; the arguments of other requests may be values."""


class Ring:
    """The last events of a process."""

    def __init__(self) -> None:
        self.entries: deque[Entry] = deque()
        self.dropped = 0
        """Events before those in the ring."""
        self.runs = 0
        """Runs in the messages of all entries."""

    def trim(self) -> None:
        """Drop the oldest events, if there are too many."""
        while len(self.entries) > EVENTS_MAX or self.runs > RUNS_MAX:
            self.dropped += 1
            self.runs -= len(getattr(self.entries.popleft()[4], "runs", ()))


class RingLens(Lens):
    """The lens that fills a ring. A packet, a call and an effect cost one function each.

    Args:
        header: the beginning of a file of this process.
        folder: where files go.
        dumps: writes the arguments of requests; None in a process whose requests have none.
    """

    def __init__(self, header: dict[str, Any], folder: Path, dumps: Dumps | None = None) -> None:
        self.ring = Ring()
        self._note = self.ring.entries.append
        self._dumps = dumps
        self._header = header
        self._folder = folder
        self._has_dumped = False
        self._now = 0.0
        """The time of the door that is called."""

    def connect(self, core: Core, perform: Perform) -> None:
        """The loop begins: note each effect before it is performed."""
        super().connect(core, perform)
        self._core, self._below, self._perform = core, self.doors, perform
        core.outbox.connect(self._on_effect)
        self.doors = self.own = Doors(self.packet, self.failure, self.drop, self.timer, self.request)

    def packet(self, route: Route, packet: Packet, now: float) -> None:
        """A packet came."""
        self._now, message = now, packet.message
        self._note((What.BARE_PACKET, now, route, packet.envelope, message))
        self.ring.runs += len(getattr(message, "runs", ()))
        self._below.packet(route, packet, now)
        if len(self.ring.entries) >= FULL or self.ring.runs > RUNS_MAX:
            self.ring.trim()

    def failure(self, route: Route, envelope: Envelope, error: Exception, now: float) -> None:
        """A packet was refused, or caused an unexpected error: then the ring goes to a file, once."""
        self._note((What.FAILURE, now, failure_parts(route, envelope, error), None, None))
        self._now = now
        self._below.failure(route, envelope, error, now)
        if not isinstance(error, KvpsError):
            self.dump_once(self._core, repr(error))

    def drop(self, route: Route, now: float) -> None:
        """A connection broke."""
        self._note((What.DROP, now, route, None, None))
        self._now = now
        self._below.drop(route, now)

    def timer(self, now: float) -> None:
        """The deadline is reached."""
        self._note((What.TIMER, now, None, None, None))
        self._now = now
        self._below.timer(now)

    def request(self, door: Callable[..., None], core: Core, *arguments: Any) -> None:
        """Another thread asks for something; of arguments that may be values, only the types are kept."""
        self._now = now = arguments[-1]
        name = door.__name__
        if name not in SMALL and getattr(type(core), name, None) is door:
            self._note((What.ITEM, now, (name, *map(type, arguments[:-1])), None, None))
        else:
            self._note((*self._words(core, door, arguments[:-1], now), None, None))
        self._below.request(door, core, *arguments)

    def _on_effect(self, effect: Effect) -> None:
        if isinstance(effect, Send):
            packet = effect.packet
            self._note((What.SENT, self._now, effect.to, packet.envelope, packet.message))
            self.ring.runs += len(getattr(packet.message, "runs", ()))
        elif isinstance(effect, Exit) and effect.code not in EXPECTED:
            self.dump_once(self._core, effect.reason, logging.INFO)
        self._perform(effect)

    def _words(
        self, core: Core, door: Callable[..., None], arguments: tuple[object, ...], now: float
    ) -> tuple[What, float, list[bytes]]:
        """Return the ring's record of a request whose arguments are small, or unknown."""
        if not _is_of(core, door):
            return What.UNKNOWN, now, [_name_of(door)]
        octets = b"" if self._dumps is None else self._dumps(lambda _: None, arguments) or b""
        return What.ITEM, now, [door.__name__.encode(), octets, _shown(map(type, arguments))]

    # --- files ----------------------------------------------------------------------------------

    def close(self, core: Core) -> None:
        """The loop has ended."""

    def dump_once(self, core: Core, why: str, level: int = logging.WARNING) -> None:
        """Write the ring to a file, unless that was done for an earlier error."""
        if not self._has_dumped:
            self._has_dumped = True
            self.dump(core, why, level)

    def dump(self, core: Core, why: str, level: int = logging.WARNING) -> Path | None:
        """Write the ring to a file; return its name, None if that failed.

        Args:
            core: whose state goes to the end of it.
            why: stands at its beginning.
            level: of the line in the log.
        """
        header = {**self._header, "why": why, "dropped": self.ring.dropped, "is_full": False}
        try:
            path, file = new_file(self._folder, self._header["role"])
            with file:
                write_header(file, header)
                for entry in self.ring.entries:
                    file.write(event_bytes(_event(entry)))
                state = digest(core, values=False)
                at = self.ring.entries[-1][1] if self.ring.entries else 0.0
                file.write(event_bytes(Event(What.DIGEST, at, [b"", state.encode()])))
        except OSError as error:
            log.error("cannot write the flight recorder to %s: %s", self._folder, error)
            return None
        log.log(level, "wrote the flight recorder to %s", path)
        return path


def _event(entry: Entry) -> Event:
    what, at, subject, envelope, message = entry
    if envelope is not None and message is not None:
        return Event(what, at, [route_bytes(subject), *bare_packet_parts(Packet(envelope, message))])
    if what is What.DROP:
        return Event(what, at, [route_bytes(subject)])
    if isinstance(subject, tuple):
        name, *types = subject
        return Event(what, at, [name.encode(), b"", _shown(types)])
    return Event(what, at, list(subject or ()))


def _shown(types: Iterable[type]) -> bytes:
    return f"({', '.join([kind.__name__ for kind in types])})".encode()


def _is_of(core: Core, door: Callable[..., None]) -> bool:
    """Whether a door is a method of ``core``, which a replay can call."""
    return getattr(type(core), door.__name__, None) is door


def _name_of(door: object) -> bytes:
    return str(getattr(door, "__qualname__", type(door).__name__)).encode()


def failure_parts(route: Route, envelope: Envelope, error: Exception) -> list[bytes]:
    """Return the record of a failure: route, envelope, and the error by its code or its class."""
    head = bytes(wire.encode(Packet(envelope, Left()))[0])
    code = str(error.code) if isinstance(error, KvpsError) else type(error).__name__
    return [route_bytes(route), head, code.encode(), str(error)[:2000].encode()]


def new_file(folder: Path, role: str) -> tuple[Path, BinaryIO]:
    """Create a file for a record, which only its owner can read; the oldest of too many go.

    Raises:
        OSError: if that cannot be, or the directory is another user's.
    """
    folder.mkdir(0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.geteuid():
        raise PermissionError(f"{folder} belongs to another user")
    old = []
    for path in folder.glob("*.record"):
        with suppress(FileNotFoundError):  # another process may remove the same files
            old.append((path.stat().st_mtime_ns, path))
    for _, path in sorted(old)[: max(0, len(old) - FILES_MAX + 1)]:
        path.unlink(missing_ok=True)
    stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
    for number in range(1000):
        path = folder / f"{role}-{os.getpid()}-{stamp}-{number}.record"
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            continue
        return path, cast("BinaryIO", os.fdopen(fd, "wb"))
    raise FileExistsError(f"{folder} has a thousand records of this process")


class _WatchedHold:
    """A hold whose release is noted."""

    def __init__(self, hold: Hold, released: Callable[[], None]) -> None:
        self._hold, self._released = hold, released

    def release(self) -> None:
        """The world has read it."""
        self._released()
        self._hold.release()


class FullLens(RingLens):
    """The lens that writes all that its core is given to a file, and fills the ring.

    Args:
        header: as for :class:`RingLens`, with all arguments of the core.
        folder: where the file goes.
        dumps: writes the arguments of a request.
        clock: seconds.

    Raises:
        StorageError: if the file cannot be made.
    """

    def __init__(
        self,
        header: dict[str, Any],
        folder: Path,
        dumps: Dumps | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(header, folder, dumps)
        self._clock = clock
        self._sent = self._orders = 0
        self._awaited: dict[int, int] = {}
        """The number of an order, by the identity of the request that it is for."""
        self._kept: list[object] = []
        self._is_whole = True
        try:
            self.path, self._file = new_file(folder, header["role"])
            write_header(self._file, {**header, "is_full": True, "dropped": 0})
            self._file.flush()
        except OSError as error:
            raise StorageError(f"cannot write a record to {folder}: {error}") from error
        log.info("the record of this process is %s", self.path)

    def note(self, what: What, at: float, *parts: bytes) -> None:
        """Write an event, and give it to the kernel: it survives the end of this process."""
        if not self._is_whole:
            return
        try:
            self._file.write(event_bytes(Event(what, at, list(parts))))
            self._file.flush()
        except OSError as error:  # a full disk costs the record, and not the job
            self._is_whole = False
            log.warning("the record %s ends here: %s", self.path, error)

    def packet(self, route: Route, packet: Packet, now: float) -> None:
        """A packet came."""
        self.note(What.PACKET, now, route_bytes(route), *packet_parts(packet))
        super().packet(route, packet, now)

    def failure(self, route: Route, envelope: Envelope, error: Exception, now: float) -> None:
        """A packet was refused, or caused an unexpected error."""
        self.note(What.FAILURE, now, *failure_parts(route, envelope, error))
        super().failure(route, envelope, error, now)

    def drop(self, route: Route, now: float) -> None:
        """A connection broke."""
        self.note(What.DROP, now, route_bytes(route))
        super().drop(route, now)

    def timer(self, now: float) -> None:
        """The deadline is reached."""
        self.note(What.TIMER, now)
        super().timer(now)

    def request(self, door: Callable[..., None], core: Core, *arguments: Any) -> None:
        """Another thread asks for something."""
        now = arguments[-1]
        if _is_of(core, door):
            octets = b"" if self._dumps is None else self._dumps(self._place, arguments[:-1])
            if octets is None:
                self.note(What.UNKNOWN, now, door.__name__.encode(), b"!")
            else:
                self.note(What.ITEM, now, door.__name__.encode(), octets)
        else:
            self.note(What.UNKNOWN, now, _name_of(door))
        super().request(door, core, *arguments)

    def _place(self, thing: object) -> int | None:
        """Return the order that ``thing`` was given with."""
        return self._awaited.get(id(thing))

    def _on_effect(self, effect: Effect) -> None:
        if isinstance(effect, Send):
            self.note(What.SENT, self._now, route_bytes(effect.to), checksum_of(effect.packet))
            number, self._sent = self._sent, self._sent + 1
            if effect.hold is not None:
                hold = _WatchedHold(effect.hold, partial(self._released, number))
                effect = Send(effect.to, effect.packet, hold)
        elif isinstance(effect, Disk):
            thing = getattr(effect.order, "for_whom", None)
            if thing is not None:
                self._awaited[id(thing)] = self._orders
                self._kept.append(thing)
            self._orders += 1
        super()._on_effect(effect)

    def _released(self, number: int) -> None:
        self.note(What.RELEASE, self._clock(), str(number).encode())

    def close(self, core: Core) -> None:
        """The loop has ended: mark the state."""
        self.mark(core, self._clock())
        self._file.close()

    def mark(self, core: Core, now: float) -> None:
        """Write the digest of the state."""
        self.note(What.DIGEST, now, digest(core).encode(), digest(core, values=False).encode())

    def dump(self, core: Core, why: str, level: int = logging.WARNING) -> Path | None:
        """Mark the state in the file; the ring has nothing more than that."""
        self.mark(core, self._clock())
        log.log(level, "the record of this process is %s", self.path)
        return self.path


class RecordedMemory:
    """A memory whose answers are recorded, as the core decides by them."""

    def __init__(self, inner: Any, lens: FullLens, clock: Callable[[], float] = time.monotonic) -> None:
        self._inner, self._lens, self._clock = inner, lens, clock

    def empty(self, count: int, dtype: str) -> Any:
        """Return a flat tensor."""
        return self._inner.empty(count, dtype)

    def lends(self, route: str | bytes, pieces: Sequence[Any]) -> bool:
        """Whether the peer along ``route`` would read ``pieces`` where they lie."""
        answer: bool = self._inner.lends(route, pieces)
        self._lens.note(What.LENDS, self._clock(), b"1" if answer else b"0")
        return answer

    def side_by_side(self, parts: Sequence[Any]) -> Any:
        """Return values that were lent here as one tensor; None if that fails."""
        answer = self._inner.side_by_side(parts)
        self._lens.note(What.SIDE_BY_SIDE, self._clock(), b"0" if answer is None else b"1")
        return answer
