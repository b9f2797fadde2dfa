"""A scheduler on a stage: peers that speak to it, a clock, and a check after each step.

A peer here is only a route and what the scheduler has told it; tests put the words into its
mouth. No effect is performed: a step returns the list of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from kvps.core.effects import Effect, Exit, Note, Save, Send
from kvps.core.scheduler.scheduler import Scheduler, Settings
from kvps.protocol.checkpoint import Shelf
from kvps.protocol.envelope import PROTOCOL, Envelope, Message, Packet, Role
from kvps.protocol.membership import Alive, Barrier, Beat, Challenge, Hello, Leave, View, ViewChanges, Welcome

if TYPE_CHECKING:
    from collections.abc import Iterable

JOB = bytes(range(16))
M = TypeVar("M", bound=Message)


@dataclass
class Peer:
    """What one process knows of itself."""

    role: Role
    job: bytes = bytes(16)
    view: int = 0
    known: View | None = None
    rank: int = 0
    incarnation: int = 0
    progress: int = 0
    challenge: int = 0

    def envelope(self, seq: int = 0) -> Envelope:
        return Envelope(self.job, self.view, self.role, self.rank, self.incarnation, seq)


class Stage:
    """One scheduler, its clock, and the peers that have spoken to it, by route."""

    def __init__(self, workers: int = 2, servers: int = 1, **limits: object) -> None:
        self.settings = Settings(workers, servers, **limits)  # type: ignore[arg-type]
        self.now = 100.0
        self.scheduler = Scheduler(self.settings, JOB, self.now)
        self.peers: dict[str, Peer] = {}
        self.saved = b""

    # --- steps ------------------------------------------------------------------------------

    def hello(
        self, route: str, role: str | None = None, rank: int | None = None, **more: object
    ) -> list[Effect]:
        """Say HELLO; ``w…`` are workers and ``s…`` servers unless ``role`` says otherwise."""
        kind = Role[(role or {"w": "worker", "s": "server"}[route[0]]).upper()]
        peer = self.peers.setdefault(route, Peer(kind))
        fields = {
            "major": PROTOCOL[0],
            "minor": PROTOCOL[1],
            "software": "kvps 0.1",
            "features": 0,
            "role": int(kind),
            "rank": rank,
            "host": f"host-{route}",
            "pid": 7,
        }
        return self.say(route, Hello(**(fields | more)), envelope=peer.envelope())  # type: ignore[arg-type]

    def attach(self, route: str, to: str, **more: object) -> list[Effect]:
        """Say HELLO along ``route`` with the identity that peer ``to`` has."""
        member = self.peers[to]
        self.peers[route] = Peer(member.role, member.job, 0, None, member.rank, member.incarnation)
        return self.hello(route, member.role.name, member.rank, **more)

    def beat(self, route: str, progress: int | None = None) -> list[Effect]:
        """Say that ``route`` has made so many calls; without a number, no more than before."""
        peer = self.peers[route]
        peer.progress = peer.progress if progress is None else progress
        return self.say(route, Beat(peer.progress))

    def alive(self, route: str, guardian: bool = False) -> list[Effect]:
        """Answer the challenge that ``route`` got last."""
        return self.say(route, Alive(self.peers[route].challenge, guardian))

    def leave(
        self, route: str, done: bool = True, code: int = 0, replaceable: bool = True, reason: str = ""
    ) -> list[Effect]:
        return self.say(route, Leave(done, code, replaceable, reason))

    def shelf(self, route: str, *cuts: int, **more: object) -> list[Effect]:
        """Answer RECALL: a server without a place for cuts, unless told otherwise."""
        fields = {"epoch": 0, "keeps": bool(cuts), "every_s": 0.0, "highest": max(cuts, default=0)}
        return self.say(route, Shelf(**(fields | more), cuts=cuts))  # type: ignore[arg-type]

    def barrier(
        self, route: str, number: int = 0, seq: int = 1, name: str = "b", store: str = "kv"
    ) -> list[Effect]:
        return self.say(route, Barrier(store, name, number), seq)

    def say(
        self, route: str, message: Message, seq: int = 0, envelope: Envelope | None = None
    ) -> list[Effect]:
        envelope = envelope or self.peers[route].envelope(seq)
        return self.take(self.scheduler.on_packet(route, Packet(envelope, message), self.now))

    def drop(self, route: str) -> list[Effect]:
        return self.take(self.scheduler.on_drop(route, self.now))

    def stop(self) -> list[Effect]:
        return self.take(self.scheduler.on_stop(self.now))

    def conclude(self) -> list[Effect]:
        return self.take(self.scheduler.on_conclude(self.now))

    def restart(self) -> list[Effect]:
        """End the scheduler as kill -9 does, and start it with what it saved last."""
        self.scheduler = Scheduler.restore(self.settings, self.saved, self.now)
        self.scheduler.check()
        return self.take(self.scheduler.on_timer(self.now))

    def wait(self, seconds: float, beating: Iterable[str] = ()) -> list[Effect]:
        """Let time pass. ``beating`` beat every half second; the answers are left out."""
        effects: list[Effect] = []
        end, next_beat = self.now + seconds, self.now
        while True:
            due = self.scheduler.deadline()
            next_beat += 0.5 * (next_beat <= self.now)
            self.now = min(end, next_beat, end if due is None else max(due, self.now))
            for route in beating:
                heard = self.beat(route)
                effects += [item for item in heard if not is_sent(item, Beat)]
            if due is not None and self.now >= due:
                effects += self.take(self.scheduler.on_timer(self.now))
            if self.now >= end:
                return effects

    def stand(self, seconds: float) -> list[Effect]:
        """Stop the scheduler for so long; the time is the first thing that it sees again."""
        self.now += seconds
        return self.take(self.scheduler.on_timer(self.now))

    def take(self, door: None) -> list[Effect]:
        """Collect effects, let the peers learn from them, and check the scheduler."""
        taken: list[Effect] = []
        for effect in self.scheduler.outbox.take():
            if isinstance(effect, Save):
                self.saved = effect.state
            if isinstance(effect, Send):
                effect = effect._replace(packet=self._whole(str(effect.to), effect.packet))
                self._teach(str(effect.to), effect.packet)
            taken.append(effect)
        self.scheduler.check()
        return taken

    def _whole(self, route: str, packet: Packet) -> Packet:
        """Return ``packet`` with the view that the peer has then, if it is VIEW-CHANGES that it can take in."""
        message, known = packet.message, self.peers[route].known
        if (
            not isinstance(message, ViewChanges)
            or known is None
            or self.peers[route].job != packet.envelope.job
        ):
            return packet
        if not message.base <= known.number < message.number:
            return packet
        view = self.scheduler.job.view(self.now)
        assert _timeless(message.applied(known)) == _timeless(view), "a change was left out"
        return packet._replace(message=view)

    def _teach(self, route: str, packet: Packet) -> None:
        peer, message = self.peers[route], packet.message
        if isinstance(message, Welcome):
            peer.job, peer.rank = packet.envelope.job, message.rank
            peer.incarnation = message.incarnation
        if isinstance(message, Challenge):
            peer.challenge = message.number
        if isinstance(message, View):
            peer.job, peer.view, peer.known = packet.envelope.job, message.number, message

    # --- looking ----------------------------------------------------------------------------

    @property
    def phase(self) -> str:
        return self.scheduler.job.phase.value

    @property
    def reason(self) -> str:
        return self.scheduler.job.reason

    def states(self) -> dict[str, str]:
        """The state of each seat, by its name."""
        return {str(node): seat.state.value for node, seat in self.scheduler.job.seats.by_node.items()}

    def form(self) -> None:
        """Fill every seat: ``s0`` …, then ``w0`` …"""
        for rank in range(self.settings.servers):
            self.hello(f"s{rank}", rank=rank, endpoint=f"tcp://s{rank}:1")
        for rank in range(self.settings.workers):
            self.hello(f"w{rank}", rank=rank)
        assert self.phase == "running"


def _timeless(view: View) -> View:
    return replace(view, members=tuple([member._replace(lost_for_s=0.0) for member in view.members]))


def is_sent(effect: Effect, cls: type[Message], route: str | None = None) -> bool:
    """Whether ``effect`` sends such a message (along this route)."""
    return isinstance(effect, Send) and isinstance(effect.packet.message, cls) and route in (None, effect.to)


def sent(effects: Iterable[Effect], cls: type[M], route: str | None = None) -> list[M]:
    """The messages of one class that are sent (along one route)."""
    return [
        effect.packet.message  # type: ignore[misc]
        for effect in effects
        if isinstance(effect, Send) and is_sent(effect, cls, route)
    ]


def told(effects: Iterable[Effect], cls: type[Message]) -> list[str]:
    """The routes along which messages of one class are sent."""
    return [str(effect.to) for effect in effects if isinstance(effect, Send) and is_sent(effect, cls)]


def notes(effects: Iterable[Effect]) -> list[str]:
    """The facts that were reported."""
    return [f"{effect.level}: {effect.text}" for effect in effects if isinstance(effect, Note)]


def exits(effects: Iterable[Effect]) -> list[Exit]:
    """The ends that were asked for."""
    return [effect for effect in effects if isinstance(effect, Exit)]
