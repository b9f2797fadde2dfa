"""A member's side of the membership protocol: HELLO, beats, views, leaving.

A member says HELLO until it is welcomed, beats once a second from then on, remembers the newest view, and
says LEAVE when it ends, until that is heard. The server core and the worker core each own one of these and
read its view. A member that has to wait is told so. A member that hears nothing for 60 s gives up with a
*temporary* error, because the scheduler may only be late.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from kvps import protocol as p
from kvps.core.effects import Connect, Exit, Finish, Note, Outbox, Route, Send
from kvps.core.liveness import SILENCE_MAX_S
from kvps.errors import ConfigError, Fenced, KvpsError, ProtocolError, SchedulerLost, Unauthorized, from_code
from kvps.protocol.envelope import PROTOCOL, Envelope, Message, Node, Packet, Role, maker

SCHEDULER = "scheduler"
_envelope = maker(Envelope)
BEAT_EVERY_S = 1.0
COPY_BEAT_EVERY_S = 0.25
"""The same of a server that has a copy, or is one: it need not be silent for long."""
STILL_S = 5.0
"""A process whose timer rings so late was stopped itself, and received nothing in that time."""
JOIN_MAX_S = 60.0
ASK_DOCTOR = "; 'kvps doctor' finds out why"
"""The end of a line that says that a cluster is not reached."""
WAITS_S = 30.0
"""A worker that waits longer for its place in the job says so, and again whenever that time has doubled."""
EXIT_TEMPORARY = 75
EXIT_CONFIG = 78
SEATED = 6
"""The ticket that tells that a server of a job with copies has a seat; its value is the WELCOME."""


@dataclass(frozen=True, slots=True)
class Quorum:
    """The worker ranks that rounds may have to wait for."""

    held: frozenset[int]
    """Held by a live worker (or not yet taken for the first time)."""
    lost: frozenset[int]
    """Lost: it did not leave, so its gradient is missing until a replacement brings it."""
    added: Mapping[int, int] = field(default_factory=dict)
    """Rank -> incarnation of a live worker that was added: it counts in a store once it has entered that."""
    late: frozenset[int] = frozenset()
    """Ranks that are no more those of the first workers: if lost, they count where they had entered."""
    heirs: frozenset[int] = frozenset()
    """Ranks that an added worker has taken from a lost one of the first workers."""

    def within(self, entered: Mapping[int, int], on_worker_lost: str) -> Quorum:
        """Return the ranks that count in one store.

        Args:
            entered: the ranks of added workers that have entered it, and their incarnations. Where a store
                waits for lost ranks, it waits for the successor of one that had.
            on_worker_lost: the policy of the store.
        """
        waits = on_worker_lost != "shrink"
        here = [
            rank
            for rank, incarnation in self.added.items()
            if entered.get(rank) == incarnation or (waits and (rank in entered or rank in self.heirs))
        ]
        lost = [rank for rank in self.lost if rank not in self.late or rank in self.heirs or rank in entered]
        return Quorum(self.held.union(here), frozenset(lost))

    def members(self, on_worker_lost: str) -> frozenset[int]:
        """The ranks that take part in a store with this policy."""
        return self.held | self.lost if self.lost and on_worker_lost != "shrink" else self.held


@dataclass(frozen=True, slots=True)
class Identity:
    """The identity of a process before it joins."""

    role: Role
    scheduler: str
    """The scheduler's endpoint."""
    host: str
    pid: int
    software: str
    rank: int | None = None
    incarnation: int = 0
    """The incarnation of the seat that a supervisor already holds for this process; 0 for a seat
    of its own."""
    endpoint: str = ""
    guardian: bool = False
    master: str = ""
    silence_max_s: float = SILENCE_MAX_S
    """The scheduler is taken for lost when it said nothing for so long."""
    job: bytes = bytes(16)
    """The job of that seat; zeros without a supervisor."""
    join_max_s: float = JOIN_MAX_S
    """Seconds of HELLOs to a scheduler that does not answer."""
    machine: int = 0
    """As in HELLO."""
    public_key: str = ""
    """The session key of the member; empty without keys."""
    command_key: str = ""
    """The session key of the command that it runs as a supervisor."""
    is_enrolled: bool = False
    """A supervisor has enrolled that key for the seat that it holds."""
    standby: bool = False
    """The process wants to be the standby of some server, and no server."""


def check_protocol(hello: p.Hello, me: str) -> None:
    """Check that the sender of ``hello`` and ``me`` understand each other.

    Raises:
        ProtocolError: naming both versions.
    """
    if hello.major != PROTOCOL[0]:
        raise ProtocolError(
            f"protocol {hello.major}.{hello.minor} (kvps {hello.software}) cannot talk to "
            f"{PROTOCOL[0]}.{PROTOCOL[1]} at {me}; install one version everywhere"
        )


class BeatFigures(NamedTuple):
    """The numbers of a BEAT, as the message has them."""

    rounds: int = 0
    in_bytes: int = 0
    out_bytes: int = 0
    memory_bytes: int = 0
    limit_bytes: int = 0
    goes_on: bool = False
    replayed: int = 0
    rebuilds: bool = False


class MembershipClient:
    """One process's membership of one job, from HELLO to LEFT."""

    def __init__(self, identity: Identity, now: float, outbox: Outbox) -> None:
        self.identity = identity
        self._outbox = outbox
        self.job = identity.job
        self.rank = (identity.rank or 0) if identity.incarnation else 0
        self.incarnation = identity.incarnation
        self.welcome: p.Welcome | None = None
        self.view: p.View | None = None
        self._late: set[int] = set()
        self._heirs: set[int] = set()
        self._quorum: tuple[p.View, Quorum] | None = None
        """The number of the view that it was made for."""
        self.reason = f"no answer from the scheduler at {identity.scheduler}"
        self.error: KvpsError | None = None
        """Why this process can be no member (any more)."""
        self.stopped: p.Stop | None = None
        self.left = False
        self.progress = 0
        """How many calls the script has made."""
        self.waits_in = ""
        """The call that it waits in."""
        self.standstill = 0
        """The number of its standstill; 0 if it may go on by itself."""
        self.figures: Callable[[], BeatFigures] = BeatFigures
        """Returns the numbers for the next BEAT; asked once per second."""
        self.standing: Callable[[], p.Standing] | None = None
        """Returns what a server says of its copy beside each BEAT; None while it says nothing."""
        self.heard_at = now
        self._leave: p.Leave | None = None
        self._drain: p.Drain | None = None
        """The LEAVE that was sent, until it is acknowledged."""
        self._next_beat = now
        self._last_timer_at = now
        self._began_at = now
        self._waits_s = WAITS_S
        """After so long a wait for the first view the next line is due."""

    # --- what it knows ----------------------------------------------------------------------

    @property
    def end(self) -> KvpsError | None:
        """Why this process can make no more calls, if it cannot."""
        if self.error is None and self.stopped is not None:
            return SchedulerLost(f"the job is over: {self.stopped.reason}")
        return self.error

    @property
    def running(self) -> bool:
        """Whether every seat has been taken and the job goes on."""
        return self.view is not None and self.view.phase == "running" and self.stopped is None

    @property
    def seat(self) -> p.Welcome:
        """The WELCOME, of a process that is a member already."""
        assert self.welcome is not None, "nobody has welcomed this process yet"
        return self.welcome

    @property
    def number(self) -> int:
        """The newest view's number; 0 before the first."""
        return self.view.number if self.view else 0

    def envelope(self, seq: int = 0) -> Envelope:
        """Return this process's envelope for request ``seq``."""
        number = self.view.number if self.view else 0
        return _envelope((self.job, number, self.identity.role, self.rank, self.incarnation, seq))

    def packet(self, message: Message, seq: int = 0) -> Packet:
        """Return ``message`` from this process."""
        return Packet(self.envelope(seq), message)

    def send(self, to: Route, message: Message, seq: int = 0) -> None:
        """Send ``message`` along ``to``."""
        self._outbox.append(Send(to, self.packet(message, seq)))

    def greet(self, to: Route) -> None:
        """Send HELLO along ``to``."""
        self._outbox.append(Send(to, self.hello()))

    def quorum(self) -> Quorum:
        """Return which workers count; all of them before the first view."""
        if self.view is None:
            workers = self.welcome.workers if self.welcome else 0
            return Quorum(frozenset(range(workers)), frozenset())
        if self._quorum is None or self._quorum[0] is not self.view:
            quorum = Quorum(self._ranks("held", "empty"), self._ranks("lost", "gone"))
            if self.seat.most:
                quorum = replace(
                    quorum,
                    added={node.rank: node.incarnation for node in self._workers("added")},
                    late=frozenset(self._late),
                    heirs=frozenset(self._heirs),
                )
            self._quorum = (self.view, quorum)
        return self._quorum[1]

    def _ranks(self, *states: str) -> frozenset[int]:
        return frozenset(member.rank for member in self._workers(*states))

    def _workers(self, *states: str) -> list[p.Member]:
        assert self.view is not None
        members = self.view.members
        return [member for member in members if member.role == Role.WORKER and member.state in states]

    def _follow(self, known: p.View | None) -> None:
        """Note, from one view to the next, which ranks have other holders than the first."""
        first = self._ranks("held", "empty")
        free = self._ranks("left", "vacant")
        added = self._ranks("added")
        if known is not None:
            self._heirs |= added - self._late
        self._late = (self._late | free | added) - first
        self._heirs -= free | first

    def has_left(self, rank: int) -> bool:
        """Whether a worker's script has ended, and nobody takes its place."""
        return self.view is not None and rank in self._ranks("left")

    def silent_for(self, now: float) -> float:
        """Seconds since the scheduler was last heard."""
        return now - self.heard_at

    # --- what it does -----------------------------------------------------------------------

    def start(self, now: float) -> None:
        """Connect and say HELLO."""
        self._outbox.append(self._connect(self.identity.is_enrolled))
        self.on_timer(now)

    def _connect(self, is_member: bool) -> Connect:
        return Connect("scheduler", self.identity.scheduler, is_member=is_member)

    def _join(self) -> None:
        """Say HELLO, and where there are keys, before it by which of them this process will speak."""
        identity = self.identity
        if identity.public_key and not identity.is_enrolled:
            self.send(SCHEDULER, p.Enrol(identity.public_key, identity.command_key))
        self.greet(SCHEDULER)

    def key_of(self, node: Node) -> str:
        """Return the public key of a member; empty if it has none."""
        view = self.view
        if view is None:
            return ""
        return next(
            (
                key
                for member, key in zip(view.members, view.keys, strict=False)
                if (member.role, member.rank) == node
            ),
            "",
        )

    def hello(self) -> Packet:
        """Return this process's HELLO."""
        identity = self.identity
        return Packet(
            Envelope(self.job, 0, identity.role, self.rank, self.incarnation, 0),
            p.Hello(
                *PROTOCOL,
                identity.software,
                p.STANDBY_FEATURE if identity.standby else 0,
                identity.role,
                self.rank if self.welcome else identity.rank,
                identity.host,
                identity.pid,
                identity.endpoint,
                identity.guardian,
                identity.master,
                identity.machine,
            ),
        )

    def stand(self) -> None:
        """Say how the copy of a server stands; done beside each BEAT, and at once when that changes."""
        if self.standing is not None:
            self.send(SCHEDULER, self.standing())

    def drain_within(self, within_s: float) -> None:
        """Ask that others take the seats of this process; said again beside each BEAT."""
        self._drain = p.Drain(self.rank, within_s)
        self.send(SCHEDULER, self._drain)

    def leave(self, done: bool, exit_code: int, replaceable: bool, reason: str) -> None:
        """Say that this process ends, and how."""
        if not self.left and self.welcome is not None:
            self._leave = p.Leave(done, exit_code, replaceable, reason)
            self.send(SCHEDULER, self._leave)

    def on_packet(self, packet: Packet, now: float) -> None:
        """The scheduler said something about membership; anything else is not for here."""
        self.heard_at = now
        message = packet.message
        match message:
            case p.Welcome():
                if self.welcome is None:
                    self.welcome = message
                    self.job = packet.envelope.job
                    self.rank, self.incarnation = message.rank, message.incarnation
                    self.reason = "waiting for the other members"
                    self._outbox.append(Note("debug", f"joined as {Node(self.identity.role, self.rank)}"))
                    if self.identity.public_key and not self.identity.is_enrolled:
                        self._outbox.append(self._connect(is_member=True))
                    self.send(SCHEDULER, p.Beat(self.progress, self.waits_in))
                    self._next_beat = now + BEAT_EVERY_S
                    if message.replicas and self.identity.role is Role.SERVER:
                        self._outbox.append(Finish(SEATED, message))
            case p.View():
                # One that overtakes a WELCOME is sent again: beats say which view is known.
                is_new = message.number > self.number or packet.envelope.job != self.job
                if is_new and self.welcome is not None:
                    known = self.view if packet.envelope.job == self.job else None
                    self.view = message
                    self.job = packet.envelope.job
                    if self.welcome.most:
                        self._follow(known)
            case p.ViewChanges():
                # One whose base is lost waits for nothing: beats say which view is known.
                known = self.view if packet.envelope.job == self.job else None
                if known is not None and message.base <= known.number < message.number:
                    self.view = message.applied(known)
                    if self.seat.most:
                        self._follow(known)
            case p.Beat():
                self.reason = message.reason or self.reason
            case p.Challenge():
                # One that ends does not answer: another may take its seat.
                if not (self._leave or self.stopped or self.error):
                    alive = p.Alive(message.number, self.identity.guardian)
                    self.send(SCHEDULER, alive)
            case p.Left():
                self.left = True
            case p.Stop():
                self.stopped = message
            case p.Error():
                self._refused(message)
            case _:
                self._outbox.append(Note("debug", f"unexpected {type(message).__name__} from the scheduler"))

    def _refused(self, message: p.Error) -> None:
        error = from_code(message.code, message.text)
        if self.welcome is None or isinstance(error, Fenced | Unauthorized):
            self.error = error
            code = EXIT_CONFIG if isinstance(error, ConfigError | Unauthorized) else 1
            self._outbox.append(Exit(code, str(error)))
        else:
            self._outbox.append(Note("warning", str(error)))

    def on_timer(self, now: float) -> None:
        """Say HELLO again, or beat, or LEAVE again, if it is time."""
        if now > self._last_timer_at + STILL_S:  # this process stood still, and not the scheduler
            self.heard_at = now
        self._last_timer_at = now
        if now < self._next_beat or self.stopped or self.left or self.error:
            return
        self._next_beat = now + (BEAT_EVERY_S if self.standing is None else COPY_BEAT_EVERY_S)
        self._say_that_it_waits(now)
        if self.welcome is not None:
            figures = self.figures()._asdict()
            beat = p.Beat(self.progress, self.waits_in, standstill=self.standstill, **figures)
            self.send(SCHEDULER, beat)
            self.stand()
            if self._drain is not None:
                self.send(SCHEDULER, self._drain)
            if self._leave is not None:
                self.send(SCHEDULER, self._leave)
        elif self.silent_for(now) < self.identity.join_max_s:
            self._join()
        else:
            self.error = SchedulerLost(
                f"{self.identity.role} on {self.identity.host}: no answer from the scheduler at "
                f"{self.identity.scheduler} for {self.identity.join_max_s:g} s. Nothing was lost. "
                "Check that kvps-scheduler runs and that KVPS_SCHEDULER or --scheduler names its "
                "--bind address, then start this again"
            )
            self._outbox.append(Exit(EXIT_TEMPORARY, str(self.error)))

    def _say_that_it_waits(self, now: float) -> None:
        """Tell a person whose script does not begin why; a supervisor's command says so itself."""
        waited_s = now - self._began_at
        if self.view is not None or self.identity.role != Role.WORKER or waited_s < self._waits_s:
            return
        if self.welcome is None or not self.identity.guardian:
            self._waits_s = 2 * waited_s
            said = f"this worker has waited {waited_s:.0f} s for its place in the job: {self.reason}"
            self._outbox.append(Note("warning", f"{said}{ASK_DOCTOR}"))

    def deadline(self) -> float | None:
        """When the next HELLO or beat is due."""
        if self.stopped or self.left or self.error:
            return None
        return self._next_beat
