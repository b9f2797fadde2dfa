"""One seat of a job: its state, its holder, the limits that it is judged by, and the claims of
newcomers on it.

:mod:`kvps.core.scheduler.membership` says how a seat moves from state to state; this file says what it is.

Claims on a taken seat
----------------------
A supervisor restarts a process as soon as it has ended, and often before any member knows of that end. So a
newcomer that finds its seat taken has perhaps made no mistake::

    HELLO ──► claim ──► CHALLENGE to the holder ──┬── the holder is lost: the newcomer takes the seat
                ▲                                 ├── ALIVE: the newcomer is refused
                └── HELLO again, each second ─────┴── neither: the newcomer is told to wait

A beat proves nothing here: it may have been under way when its sender ended. What proves that a holder
outlived the newcomer's coming is ALIVE with the number of a CHALLENGE that was sent after it.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvps.core.effects import Route
from kvps.core.limits import Limits
from kvps.core.liveness import (
    DROP_GRACE_S,
    SILENCE_MAX_S,
    SILENT_AFTER_S,
    SUSPECTED_AFTER_S,
    SUSPECTED_AGAIN_S,
    Progress,
)
from kvps.core.membership_client import BeatFigures
from kvps.core.texts import shown
from kvps.errors import ConfigError
from kvps.protocol.envelope import Node, Role
from kvps.protocol.membership import Challenge, Hello, Leave, Member, Standing

SEATS = 2
"""The ticket that tells how many seats are taken."""
GOES_ON, REBUILDS = 3, 4
"""The tickets that tell whether the workers go on without a lost worker, and whether they make a lost server
again: 1 if all do that are here, else 0."""
SEATS_MAX = 1500
NAME_MAX = 200
"""Seats of a job, and bytes of a host, an endpoint or a reason: a view must fit into a head."""
REASON_MAX = 1000
"""Bytes of a reason why a server cannot be copied: it says what to do, and is in no view."""
REPLACE_MAX_S = 30.0
"""Nobody waits for a lost worker once all others have ended, so its servers soon end, too."""


class State(enum.Enum):
    """The state of a seat."""

    EMPTY = "empty"
    HELD = "held"
    LEFT = "left"
    """It ended well; no process takes it again in this job."""
    LOST = "lost"
    """It ended otherwise; a replacement may come."""
    GONE = "gone"
    """It ended otherwise, and none will."""
    VACANT = "vacant"
    """Nobody waits for a holder: a worker may be added here."""


def range_of(workers: int, most: int) -> str:
    """Return ``N``, or ``N:MAX`` where workers may be added."""
    return f"{workers}:{most}" if most else str(workers)


@dataclass(frozen=True, slots=True)
class Settings:
    """The operator's settings of the job."""

    workers: int
    """The job begins with so many."""
    servers: int
    silence_max_s: float = SILENCE_MAX_S
    """A member that says nothing for so long is lost."""
    drop_grace_s: float = DROP_GRACE_S
    """A member whose connection broke, and that does not come back for so long, is lost."""
    forming_max_s: float | None = None
    """How long the first job may take to form; None is for ever."""
    keep_alive: bool = False
    """When a job is over, begin another with the same servers."""
    replace_max_s: float = REPLACE_MAX_S
    """How long a job with no worker left waits for the replacement of a lost one."""
    persist: bool = False
    """Yield a Save with each change."""
    tells_seats: bool = False
    """Yield a Finish with :data:`SEATS` and the number of taken seats, each time it changes while
    the job forms; and one with :data:`GOES_ON`, each time that changes."""
    has_keys: bool = False
    """Members say by which keys they will speak, and have no seat before."""
    limits: Limits = field(default_factory=Limits)
    """The named limits."""
    replicas: int = 0
    """The number of standbys of each server."""
    most_workers: int = 0
    """Workers may be added until there are so many, and may come and go; 0 if none may."""

    @property
    def seats_of_workers(self) -> int:
        """How many seats workers have."""
        return self.most_workers or self.workers

    @property
    def advice(self) -> str:
        """The way to more servers than the job has seats for."""
        return (
            "For more, start kvps-launch with -s S:MAX, or kvps-scheduler with --servers MAX and each "
            "kvps-server with the ranks that it holds (--rank 0,1)"
        )

    @property
    def workers_range(self) -> str:
        """The number of workers as ``--workers`` has it."""
        return range_of(self.workers, self.most_workers)

    def size(self, role: Role) -> str:
        """Return the flag that says how many members of a role the job has."""
        return f"--servers {self.servers}" if role is Role.SERVER else f"--workers {self.workers_range}"

    def __post_init__(self) -> None:
        seats = self.seats_of_workers + self.servers * (1 + max(self.replicas, 0))
        if self.most_workers and self.most_workers < self.workers:
            raise ConfigError(
                f"--workers {self.workers_range}: the second number is the most workers that "
                "the job may have, and cannot be below the first"
            )
        if self.workers < 1 or self.servers < 0 or seats > SEATS_MAX:
            raise ConfigError(
                f"{self.seats_of_workers} workers and {self.servers} servers: a job has 1 or more workers, "
                f"0 or more servers, and at most {SEATS_MAX} in all"
            )
        if self.replicas not in (0, 1):
            raise ConfigError(f"--replicas {self.replicas}: a server has 0 or 1 copies")
        if self.replicas and self.servers < 2:
            raise ConfigError(
                f"--replicas 1 with --servers {self.servers}: a copy has to lie in another server's process, "
                "so start 2 or more servers, or leave --replicas at 0"
            )
        limits = (self.silence_max_s, self.drop_grace_s, self.replace_max_s, self.forming_max_s)
        for limit in limits:
            if limit is not None and not (math.isfinite(limit) and limit > 0):
                raise ConfigError(f"a time limit of {limit} s is not possible: it must be above 0")


@dataclass(slots=True)
class SeatLink:
    """A connection that speaks for a seat, and the process at its other end."""

    host: str
    pid: int
    is_supervisor: bool | None
    """None where it said no HELLO to this life of the scheduler."""
    heard_at: float
    challenge: int = 0
    """The newest CHALLENGE that was sent along it."""
    challenged_at: float = -math.inf
    proved: int = 0
    """The newest that was answered: it was alive after that was sent."""


@dataclass(slots=True)
class Seat:
    """A place in the job, and its present or last holder."""

    node: Node
    state: State = State.EMPTY
    incarnation: int = 0
    """The incarnation of its present or last holder; 0 if it was never taken."""
    host: str = ""
    pid: int = 0
    endpoint: str = ""
    master: str = ""
    machine: int = 0
    is_guarded: bool = False
    """A supervisor took it."""
    is_welcomed: bool = False
    """Its WELCOME has been sent; a supervisor's is held back until all workers are here."""
    is_replacement: bool = False
    """Its holder took the place of another while the job ran."""
    is_open: bool = False
    """It is of a worker in a job whose workers come and go."""
    is_added: bool = False
    """Its holder came to such a job while it ran."""
    has_entered: bool = False
    """That holder takes part in a store, so that it may be missed."""
    keys: tuple[str, str] = ("", "")
    """The session keys of its holder, and of the command that a supervisor runs."""
    has_said_so: bool = False
    """It ended by its own word, so no packet brings it back."""
    has_begun: bool = False
    """Its holder has spoken as this incarnation: the WELCOME arrived, and others may rely on it."""
    software: str = ""
    """The version of kvps of its holder; empty if it took the seat before the scheduler was restarted."""
    taken_at: float | None = None
    """When its holder took it; None if the scheduler was restarted since."""
    heard_at: float = 0.0
    has_script: bool = False
    """The process that its supervisor started has spoken to this life of the scheduler."""
    progress: Progress = field(default_factory=lambda: Progress(0, 0.0))
    """The progress of its script."""
    dropped_at: float | None = None
    """When its last link broke; None while a link is intact, or before the first."""
    suspected_at: float = -math.inf
    """When it was last asked whether its host answers."""
    lost_at: float = 0.0
    """Since when it is lost or gone."""
    reason: str = ""
    """Why it is left, lost or gone."""
    figures: BeatFigures = field(default_factory=BeatFigures)
    """From its newest BEAT."""
    links: dict[Route, SeatLink] = field(default_factory=dict)
    line: int = 0
    """Where it was given all that its predecessors held, the incarnation of the first of them."""
    is_level: bool = False
    """A standby may take its server's seat."""
    standing: Standing = field(default_factory=Standing)
    """The newest word of a standby, or of a server about its standby."""

    @property
    def speaker(self) -> Node:
        """The node in the envelopes of its holder: a standby speaks as the server whose seat it may get."""
        return Node(Role.SERVER, self.node.rank) if self.node.role is Role.STANDBY else self.node

    @property
    def process(self) -> tuple[str, int]:
        """The host and process id of its holder, which the parts of one process share."""
        return self.host, self.pid

    @property
    def is_taken(self) -> bool:
        """Whether it has a live holder, or had one that ended well."""
        return self.state in (State.HELD, State.LEFT)

    @property
    def is_alive(self) -> bool:
        """Whether a packet of its incarnation shows that it is held (again)."""
        return self.state is State.HELD or (self.state is State.LOST and not self.has_said_so)

    def is_free_for(self, hello: Hello) -> bool:
        """Whether a newcomer may take it at once."""
        is_left = self.is_open and self.state is State.LEFT
        return self.state in (State.EMPTY, State.LOST, State.VACANT) or is_left or self._was(hello)

    @property
    def is_vacant(self) -> bool:
        """Whether it has no holder, and nobody misses one."""
        is_absent = self.state in (State.LOST, State.GONE)
        return self.state is State.VACANT or (self.is_added and is_absent and not self.has_entered)

    @property
    def is_done(self) -> bool:
        """Whether the job may end without it: it has left, or was added, and the others go on without it."""
        goes_on = self.is_added and self.figures.goes_on and self.state is not State.HELD
        return self.state is State.LEFT or self.is_vacant or goes_on

    def _was(self, hello: Hello) -> bool:
        """Whether its holder, which no link reaches, sends HELLO again."""
        is_alone = self.state is State.HELD and not self.links
        return is_alone and (self.host, self.pid) == (hello.host, hello.pid)

    def is_asked_again(self, hello: Hello) -> bool:
        """Whether ``hello`` is of the server that holds it, and that no WELCOME has reached.

        Workers may know of this incarnation, so that another would look like a loss to them.
        """
        is_server = self.node.role is not Role.WORKER and self.endpoint == hello.endpoint
        return is_server and not self.has_begun and self._was(hello)

    def preference(self, hello: Hello) -> tuple[bool, int, int]:
        """Sort key of free seats: one's own, then empty, then lost ones, then others, then by rank."""
        order = {State.EMPTY: 0, State.LOST: 1}.get(self.state, 2)
        return (not self._was(hello), order, self.node.rank)

    def has_proved(self, since: int) -> bool:
        """Whether its holder has answered a challenge that is newer than ``since``.

        Where there is a supervisor, it is the holder: the command that it ran ends soon after it.
        """
        return any(
            link.proved > since and (link.is_supervisor or not self.is_guarded)
            for link in self.links.values()
        )

    def may_be_replaced(self, settings: Settings, now: float) -> bool:
        """Whether it is lost, but not for too long."""
        return self.state is State.LOST and now < self.lost_at + settings.replace_max_s

    def last_word(self, route: Route) -> float:
        """When this link was heard last."""
        return self.links[route].heard_at

    def due(self, settings: Settings) -> float:
        """When its holder is lost if it says nothing until then."""
        silent_at = self.heard_at + settings.silence_max_s
        if self.dropped_at is None:
            return silent_at
        return min(silent_at, self.dropped_at + settings.drop_grace_s)

    def suspected_from(self) -> float:
        """When the host of a server or standby that says nothing until then is asked whether it answers."""
        if self.node.role is Role.WORKER or self.state is not State.HELD or self.dropped_at is not None:
            return math.inf
        return max(self.heard_at + SUSPECTED_AFTER_S, self.suspected_at + SUSPECTED_AGAIN_S)

    # --- changes ----------------------------------------------------------------------------

    def begin(self, incarnation: int, hello: Hello, now: float, keys: tuple[str, str] = ("", "")) -> None:
        """Begin a new life in this seat."""
        self.keys = keys
        self.state, self.incarnation = State.HELD, incarnation
        self.host, self.pid, self.endpoint = hello.host, hello.pid, hello.endpoint
        self.master, self.machine = hello.master, hello.machine
        self.software, self.taken_at = shortened(hello.software), now
        self.is_guarded = hello.guardian and self.node.role is Role.WORKER
        self.is_welcomed = self.has_said_so = self.is_replacement = self.has_begun = False
        self.is_added = self.has_entered = False
        self.line = 0
        self.heard_at, self.dropped_at, self.reason = now, None, ""
        self.begin_script(now)
        self.has_script = False
        self.links = {}

    def begin_script(self, now: float) -> None:
        """A process begins to make the calls of its holder, and counts from 0."""
        self.has_script = True
        self.figures = BeatFigures()
        self.progress = Progress(0, now)

    def lose(self, reason: str, now: float) -> None:
        """Its holder is lost."""
        self.state, self.reason = State.LOST, reason
        self.lost_at, self.dropped_at = now, None

    def revive(self) -> None:
        """Its holder was lost, and speaks again before a replacement took the seat."""
        self.state, self.reason = State.HELD, ""

    def leave(self, leave: Leave, now: float) -> bool:
        """Its holder says that it ends; return whether that is new. Left and gone are final."""
        end = State.LEFT if leave.done else State.LOST if leave.replaceable else State.GONE
        if self.state not in (State.HELD, State.LOST) or (end is State.LOST and self.has_said_so):
            return False
        if self.state is State.HELD:
            self.lost_at = now
        self.state, self.has_said_so, self.dropped_at = end, True, None
        how = "done" if leave.done else f"exit code {leave.exit_code}"
        self.reason = shortened(f"{how}: {leave.reason}" if leave.reason else how)
        return True

    # --- looking ----------------------------------------------------------------------------

    @property
    def was_idle(self) -> bool:
        """Whether it was held for a command that never spoke; False where that is not known."""
        return self.is_guarded and self.taken_at is not None and not self.has_script

    @property
    def data_key(self) -> str:
        """The session key by which its holder, or the holder's command, speaks to servers."""
        own, command = self.keys
        return command or own

    def doubt(self) -> str:
        """Return why a newcomer that wants it has to wait, while it is held."""
        if self.dropped_at is not None:
            return f"{self.node} has lost its connection, and has a moment to reconnect"
        who = f"{self.node}, held by {self.host}:{self.pid},"
        if not self.links:
            return f"{who} has not been heard since the scheduler was started again"
        return f"{who} is being asked whether it is alive"

    @property
    def shown_state(self) -> str:
        """Its state as a view shows it."""
        if self.is_vacant:
            return State.VACANT.value
        if self.is_added and self.state is State.HELD:
            return "added"
        return "level" if self.is_level else self.state.value

    def presence(self, now: float) -> str:
        """Describe its holder to the ranks that wait for it."""
        if self.state is State.HELD:
            silent_s = now - self.heard_at
            if silent_s >= SILENT_AFTER_S:
                return f"silent for {silent_s:.0f} s"
            return self.progress.words(now) if self.node.role is Role.WORKER else "alive"
        if self.state in (State.EMPTY, State.VACANT):
            return "not joined yet"
        return f"{self.state.value} for {now - self.lost_at:.0f} s: {self.reason}"

    def member(self, now: float) -> Member:
        """Return the seat as a view shows it."""
        return Member(
            role=int(self.node.role),
            rank=self.node.rank,
            incarnation=self.incarnation,
            state=self.shown_state,
            endpoint=self.endpoint,
            host=self.host,
            lost_for_s=now - self.lost_at if self.state in (State.LOST, State.GONE) else 0.0,
            reason=self.reason,
            machine=self.machine,
        )

    def check(self, node: Node, links_max: int) -> None:
        """Assert the invariants."""
        assert self.node == node, f"{self.node} sits at {node}"
        is_unused = self.state in (State.EMPTY, State.VACANT)
        assert is_unused == (self.incarnation == 0), f"{node}: who holds it?"
        assert self.is_open or not self.is_added, f"{node} was added"
        assert len(self.links) <= (links_max if self.is_guarded else 1), f"{node}: many links"
        assert self.dropped_at is None or (self.state is State.HELD and not self.links), (
            f"{node} is under suspicion, but it is {self.state.value} with links {self.links}"
        )


def shortened(text: str, most: int = NAME_MAX) -> str:
    """Return at most ``most`` bytes of a peer's ``text``, fit to be shown."""
    return shown(text).encode()[:most].decode(errors="ignore")


CHALLENGE_EVERY_S = 0.5
"""Seconds after a challenge during which a connection is not challenged again, by any newcomer."""


class Claims:
    """The processes that claim a seat that is taken, and the challenges to its holders."""

    def __init__(self) -> None:
        self.outgoing: list[tuple[Route, Challenge]] = []
        """To be sent."""
        self._newest = 0
        """The number of the newest challenge."""
        self._since: dict[Route, int] = {}
        """By the newcomer's route: the newest challenge when it came. Only later ones prove anything."""

    def __contains__(self, route: Route) -> bool:
        return route in self._since

    def open(self, route: Route) -> int:
        """Return what number a challenge must exceed to prove something to this newcomer."""
        if route not in self._since:
            if len(self._since) >= SEATS_MAX:
                del self._since[next(iter(self._since))]  # the next HELLO of the oldest is a new claim
            self._since[route] = self._newest
        return self._since[route]

    def close(self, route: Route) -> None:
        """A newcomer has a seat, was refused, or is gone."""
        self._since.pop(route, None)

    def challenge(self, links: Mapping[Route, SeatLink], since: int, now: float) -> None:
        """Ask along connections that have proved nothing after ``since`` whether they are alive."""
        for route, link in links.items():
            if link.proved > since or now < link.challenged_at + CHALLENGE_EVERY_S:
                continue
            if link.challenge <= since:  # else it was asked, and has not answered yet
                # By the time: no answer to what a former scheduler asked has this number.
                self._newest = max(self._newest + 1, int(now * 1e6))
                link.challenge = self._newest
            link.challenged_at = now
            self.outgoing.append((route, Challenge(link.challenge)))
