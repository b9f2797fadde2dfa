"""The replay of a record: the same core, given the same inputs in the same order, in virtual time.

A full record of any role can be replayed, up to a request that could not be written down. The
short form, a dumped ring, can be replayed if it begins with the process and its core needs no
values: a scheduler's always, a server as far as its rounds and sessions go.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kvps.core.effects import Core, Disk, Hold, Send
from kvps.core.limits import Limits
from kvps.core.membership_client import Identity
from kvps.core.scheduler.scheduler import ProcessInfo, Scheduler, Settings
from kvps.core.server.server import Server
from kvps.core.worker.worker import Worker
from kvps.errors import ConfigError, KvpsError, from_code
from kvps.protocol import wire
from kvps.protocol.envelope import Role
from kvps.tensors import TORCH
from kvps.tools.replay.digest import digest
from kvps.tools.replay.format import (
    Event,
    Record,
    What,
    bare_packet_parts,
    checksum_of,
    packet_of,
    route_bytes,
    route_of,
)
from kvps.tools.replay.values import Decoder

_INPUTS = (What.PACKET, What.BARE_PACKET, What.FAILURE, What.DROP, What.TIMER, What.ITEM)


class ReplayedMemory:
    """A memory that answers as the recorded one did."""

    def __init__(self, events: Iterable[Event]) -> None:
        self._lends: deque[bool] = deque()
        self._joined: deque[bool] = deque()
        for event in events:
            if event.what is What.LENDS:
                self._lends.append(event.parts[0] == b"1")
            elif event.what is What.SIDE_BY_SIDE:
                self._joined.append(event.parts[0] == b"1")

    def empty(self, count: int, dtype: str) -> torch.Tensor:
        """Return a flat tensor."""
        return torch.empty(count, dtype=TORCH[dtype])

    def lends(self, route: str | bytes, pieces: Sequence[torch.Tensor]) -> bool:
        """Return the next recorded answer."""
        return self._lends.popleft() if self._lends else False

    def side_by_side(self, parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Return the values as one tensor, if the recorded memory did."""
        return torch.cat(list(parts)) if self._joined and self._joined.popleft() else None


@dataclass(slots=True)
class ReplayOutcome:
    """The findings of a replay."""

    core: Any
    inputs: int = 0
    """Inputs that the core was given."""
    sent: int = 0
    """Packets that left as they did in the record."""
    states: list[tuple[float, bool]] = field(default_factory=list)
    """Time of each recorded digest, and whether the replayed state has the same."""
    difference: str = ""
    """The first difference; empty if there is none."""
    stopped: str = ""
    """Why the replay ended before the record; empty if it did not."""

    @property
    def is_same(self) -> bool:
        """Whether everything that can be compared is equal."""
        return not self.difference and all(same for _, same in self.states)


def replay(record: Record) -> ReplayOutcome:
    """Replay ``record``.

    Raises:
        ConfigError: if it cannot be replayed.
    """
    _demand_replayable(record)
    if threads := record.header.get("threads"):
        torch.set_num_threads(int(threads))
    with torch.no_grad():
        return _Replay(record).run()


def _demand_replayable(record: Record) -> None:
    header = record.header
    if header.get("is_full"):
        return
    if header.get("dropped"):
        raise ConfigError(
            f"this is the short form, and {header['dropped']} events before it are gone: it can be shown "
            "(--show), not replayed. For a record that can, start the process with KVPS_RECORD=full"
        )
    if header.get("role") == "worker":
        raise ConfigError(
            "the short form of a worker has no values of calls: it can be shown (--show), not replayed. "
            "For a record that can, start the process with KVPS_RECORD=full"
        )


def core_of(header: dict[str, Any], memory: ReplayedMemory) -> Any:
    """Return the core that a record begins with.

    Raises:
        ConfigError: if the header does not describe one.
    """
    try:
        now = float(header["now"])
        if header["role"] == "scheduler":
            given = dict(header["settings"])
            given["limits"] = Limits(**given["limits"])
            settings = Settings(**given)
            state = bytes.fromhex(header["state"])
            if state:
                return Scheduler.restore(settings, state, now, ProcessInfo(header["software"]))
            return Scheduler(settings, bytes.fromhex(header["job"]), now, ProcessInfo(header["software"]))
        described = dict(header["identity"])
        described["role"] = Role(described["role"])
        described["job"] = bytes.fromhex(described["job"])
        identity = Identity(**described)
        if header["role"] == "server":
            return Server(
                identity,
                now,
                header["memory_limit"],
                memory,
                header["threads"],
                header["checkpoint_every_s"],
                Limits(**header["limits"]),
            )
        return Worker(identity, now, memory)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"the header of this record is damaged: {error!r}") from error


class _Replay:
    def __init__(self, record: Record) -> None:
        self._record = record
        self._outcome = ReplayOutcome(core_of(record.header, ReplayedMemory(record.events)))
        self._expected: deque[Event] = deque()
        """The packets that are to leave because of the input that is replayed."""
        self._is_unfinished = False
        """The process was killed before it had sent all packets of the input that is replayed."""
        self._holds: dict[int, Hold] = {}
        self._released: set[int] = set()
        self._sent = 0
        self._for_whom: list[object] = []

    def run(self) -> ReplayOutcome:
        """Give the core all inputs."""
        events, found = self._record.events, self._outcome
        last = max((n for n, event in enumerate(events) if event.what in {*_INPUTS, What.DIGEST}), default=0)
        for index, event in enumerate(events):
            if event.what in _INPUTS:
                self._expected = _sent_after(events, index)
                self._is_unfinished = index == last
                try:
                    self._input(event)
                    self._take()
                except ConfigError as error:
                    found.stopped = str(error)
                    break
                found.inputs += 1
                found.core.deadline()
            elif event.what is What.RELEASE:
                self._release(int(event.parts[0]))
            elif event.what is What.UNKNOWN and event.parts[1:] == [b"!"]:
                found.stopped = f"{event.parts[0].decode()} could not be written down"
                break
            elif event.what is What.DIGEST:
                self._compare(event)
            if found.difference:
                break
        return found

    def _input(self, event: Event) -> None:
        core: Core = self._outcome.core
        now = event.at
        match event.what:
            case What.PACKET | What.BARE_PACKET:
                packet = packet_of(event)
                self._guarded(lambda: core.on_packet(route_of(event.parts[0]), packet, now))
            case What.FAILURE:
                route, head, code, text = event.parts
                envelope = wire.decode([head]).envelope
                error: Exception = RuntimeError(text.decode())
                if code.isdigit():
                    error = from_code(int(code), text.decode())
                core.on_failure(route_of(route), envelope, error, now)
            case What.DROP:
                core.on_drop(route_of(event.parts[0]), now)
            case What.TIMER:
                core.on_timer(now)
            case _:
                self._call(event)

    def _guarded(self, call: Callable[[], None]) -> None:
        """A packet may raise the failure that the record has next."""
        try:
            call()
        except KvpsError:
            raise
        except Exception:  # the record continues with the inputs that followed
            return

    def _call(self, event: Event) -> None:
        name, octets = event.parts[0].decode(), event.parts[1]
        if name not in CALLS:
            raise ConfigError(f"this record asks for {name!r}, which no core of kvps offers")
        if not octets and name not in _PLAIN:
            raise ConfigError(f"the short form has no arguments of {name}")
        arguments = Decoder(self._thing).loads(octets) if octets else ()
        getattr(self._outcome.core, name)(*arguments, event.at)

    def _thing(self, number: int) -> object:
        return self._for_whom[number]

    def _take(self) -> None:
        for effect in self._outcome.core.outbox.take():
            if isinstance(effect, Send):
                number, self._sent = self._sent, self._sent + 1
                self._check(effect)
                if effect.hold is not None:
                    if number in self._released:
                        effect.hold.release()
                    else:
                        self._holds[number] = effect.hold
            elif isinstance(effect, Disk):
                self._for_whom.append(getattr(effect.order, "for_whom", None))

    def _release(self, number: int) -> None:
        hold = self._holds.pop(number, None)
        if hold is not None:
            hold.release()
        else:
            self._released.add(number)

    def _check(self, effect: Send) -> None:
        found = self._outcome
        if not self._expected:
            if not self._is_unfinished and not self._record.is_cut and not found.difference:
                found.difference = self._said(f"sends {_shown(effect)}, which is not in the record")
            return
        event = self._expected.popleft()
        was_short = not self._record.header.get("is_full")
        said = bare_packet_parts(effect.packet)[0] if was_short else checksum_of(effect.packet)
        same = event.parts[1] == said
        if event.parts[0] == route_bytes(effect.to) and same:
            found.sent += 1
        elif not found.difference:
            found.difference = self._said(f"sends {_shown(effect)}, and sent another packet then")

    def _said(self, what: str) -> str:
        return f"after {self._outcome.inputs} inputs the core {what}"

    def _compare(self, event: Event) -> None:
        full, short = (part.decode() for part in event.parts)
        core = self._outcome.core
        same = digest(core) == full if full else digest(core, values=False) == short
        self._outcome.states.append((event.at, same))


CALLS = {
    *("start", "on_call", "on_interrupt", "on_join", "on_close", "leave", "retire"),
    *("on_stop", "on_conclude", "on_measure", "on_disk", "on_memory", "on_script", "on_ended"),
}
"""The methods of cores that a record may name."""
_PLAIN = {"start", "on_stop", "on_conclude", "on_measure"}


def _sent_after(events: list[Event], index: int) -> deque[Event]:
    """Return the packets that left because of the input at ``index``."""
    found: deque[Event] = deque()
    for event in events[index + 1 :]:
        if event.what is What.SENT:
            found.append(event)
        elif event.what in _INPUTS or event.what is What.UNKNOWN:
            break
    return found


def _shown(effect: Send) -> str:
    return f"{type(effect.packet.message).__name__} along {effect.to!r}"
