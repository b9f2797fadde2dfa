"""What may befall a cluster for a while, and how a seed draws it.

Swarm testing: a seed first draws *which kinds* of fault there are, and then when and whom they hit. A run
with every kind at once meets few states; runs of two or three kinds meet those between them.

All that is drawn here can be survived: no server is silent for as long as the scheduler waits, and
what ends is started again, as a guardian, systemd or Kubernetes would (:func:`supervise`).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvps.core.scheduler.seat import State
from kvps.protocol.envelope import Node, Packet, Role
from tests.simulation.cluster import Client, Cluster
from tests.simulation.network import Faults, Process
from tests.simulation.training import LOST, ON_TIME

SILENCE_S = 12.0
"""After that the scheduler takes a member for lost."""
PAUSES = (0.5 * SILENCE_S, 1.5 * SILENCE_S, 10 * SILENCE_S)
LOOK_EVERY_S = 5.0
"""How often it is looked who has ended and must be started again."""
HARMLESS = ("double", "overtake", "far", "slow", "clocks", "kill")
"""Kinds of fault after which every process still ends with exit code 0."""
KINDS = (*HARMLESS, "lose", "cut", "reset", "pause", "usurp", "restart", "full")


@dataclass(frozen=True)
class Cut:
    """A link that carries nothing for a while, in one direction or both."""

    source: str
    target: str
    both_ways: bool
    since: float
    until: float
    is_held: bool
    """What is sent in that time comes when it is over, as TCP does; else it is lost."""

    def meets(self, source: str, target: str, now: float) -> bool:
        """Whether a packet from ``source`` to ``target`` is stopped at ``now``."""
        ends = (source, target)
        is_here = ends == (self.source, self.target)
        is_back = self.both_ways and ends == (self.target, self.source)
        return (is_here or is_back) and self.since <= now < self.until


@dataclass(frozen=True)
class Pause:
    """A process that is stopped (SIGSTOP) and goes on later."""

    name: str
    at: float
    seconds: float
    is_usurped: bool = False
    """A replacement is started while the process is stopped; when it wakes, it must end."""


@dataclass(frozen=True)
class Restart:
    """The scheduler ends, and is started again from what it saved."""

    at: float
    after_s: float
    is_torn: bool
    """It ends in the midst of its next write, so that what it saved before is read."""


@dataclass(frozen=True)
class Reset:
    """The connections between two processes break, and are made again."""

    at: float
    names: tuple[str, str]


@dataclass
class Trouble:
    """All that befalls one job."""

    kinds: tuple[str, ...] = ()
    faults: Faults = field(default_factory=Faults)
    cuts: list[Cut] = field(default_factory=list)
    slow: dict[tuple[str, str], float] = field(default_factory=dict)
    """Bytes per second, from one process to another."""
    pauses: list[Pause] = field(default_factory=list)
    rates: dict[str, float] = field(default_factory=dict)
    kills: list[tuple[float, int, bool]] = field(default_factory=list)
    restarts: list[Restart] = field(default_factory=list)
    resets: list[Reset] = field(default_factory=list)
    full: tuple[float, float] | None = None
    """Since and until when nothing can be written."""

    @property
    def silences_the_scheduler(self) -> bool:
        """Whether some member may hear nothing from the scheduler for long."""
        is_cut = any("scheduler" in (cut.source, cut.target) for cut in self.cuts)
        is_stopped = any(pause.name == "scheduler" for pause in self.pauses)
        return is_cut or is_stopped or bool(self.restarts) or self.full is not None

    def befall(self, cluster: Cluster) -> list[Client]:
        """Let all of this happen to ``cluster``; return those who will be usurped, once they are."""
        usurped: list[Client] = []
        network = cluster.network
        network.delays = Links(self, cluster)
        for stop in self.pauses:
            network.at(stop.at, lambda own=stop: pause(cluster, own, usurped))  # type: ignore[misc]
        for at, rank, is_noticed in self.kills:
            network.at(at, lambda own=rank, how=is_noticed: cluster.kill(own, how))  # type: ignore[misc]
            network.at(at, lambda own=rank: replace_at_once(cluster, own))  # type: ignore[misc]
        supervise(cluster, usurped)
        for item in self.restarts:
            network.at(item.at, lambda it=item: restart(cluster, it.after_s, it.is_torn))  # type: ignore[misc]
        for broken in self.resets:
            network.at(broken.at, lambda own=broken: reset(cluster, own))  # type: ignore[misc]
        for at, is_full in zip(self.full or (), (True, False), strict=False):
            network.at(at, lambda it=is_full: setattr(cluster.disk, "is_full", it))  # type: ignore[misc]
        return usurped


class Links:
    """How late each packet is by cuts and slow links."""

    def __init__(self, trouble: Trouble, cluster: Cluster) -> None:
        self._trouble = trouble
        self._cluster = cluster
        self._free_at: dict[tuple[str, str], float] = {}

    def __call__(self, source: Process, target: Process, packet: Packet) -> Sequence[float]:
        now, ends = self._cluster.network.now, (source.name, target.name)
        for cut in self._trouble.cuts:
            if cut.meets(*ends, now):
                return (cut.until - now,) if cut.is_held else LOST
        rate = self._trouble.slow.get(ends)
        if rate is None:
            return ON_TIME
        size = 100 + sum(len(frame) for frame in packet.payload)
        self._free_at[ends] = max(self._free_at.get(ends, now), now) + size / rate
        return (self._free_at[ends] - now,)


def restart(cluster: Cluster, after_s: float, is_torn: bool = False) -> None:
    """End the scheduler and start it again ``after_s`` later; or end it while it writes next."""
    if is_torn:
        cluster.disk.tear(cluster.scheduler.name)
    elif cluster.scheduler.alive:
        cluster.network.kill(cluster.scheduler)
        cluster.network.at(cluster.network.now + after_s, lambda: _start_scheduler(cluster))


def _start_scheduler(cluster: Cluster) -> None:
    if not cluster.scheduler.alive and not cluster.is_over:
        cluster.start_scheduler()


def replace_at_once(cluster: Cluster, rank: int) -> None:
    """Start a replacement for a worker that was killed, before anybody knows that it was."""
    if rank in cluster.clients:
        cluster.replace(rank)


def replace_when_lost(cluster: Cluster, rank: int) -> None:
    """Start a replacement for a worker that was killed, as soon as the scheduler takes one."""
    client = cluster.clients.get(rank)
    if client is None or client.process.alive or client.done_at is not None:
        return
    if may_be_taken(cluster, rank):
        cluster.replace(rank)
    else:
        cluster.network.at(cluster.network.now + 1, lambda: replace_when_lost(cluster, rank))


def supervise(cluster: Cluster, usurped: list[Client]) -> None:
    """Start again whoever ended before its time, as guardians and systemd do.

    Such are a scheduler that could not save; a worker whose script was not done (one that cannot
    join for a minute ends as *temporary*; one whose WELCOME comes after it has said HELLO to a
    restarted scheduler has two, and is fenced); and a server that could not join for a minute. One
    who came to take a seat and was refused is not: the one before it had woken, and has it again.
    """
    _start_scheduler(cluster)
    for rank in cluster.started:
        _recognise(cluster, rank, usurped)
    for rank, client in list(cluster.clients.items()):
        if client.process.exit is not None and client.done_at is None:
            replace_when_lost(cluster, rank)
    for server in cluster.servers:
        if server.exit is not None and server.core.member.welcome is None:  # type: ignore[attr-defined]
            cluster.start_server(rank_of(server.name))
    if not cluster.is_over:
        cluster.network.at(cluster.network.now + LOOK_EVERY_S, lambda: supervise(cluster, usurped))


def _recognise(cluster: Cluster, rank: int, usurped: list[Client]) -> None:
    """Let that process be the client of a rank which holds its seat.

    One that was started in another's place is refused if the scheduler hears the other one before.
    """
    seat = cluster.scheduler.core.job.seats.by_node[Node(Role.WORKER, rank)]  # type: ignore[attr-defined]
    for process in cluster.started[rank]:
        is_it = seat.is_taken and process.core.member.incarnation == seat.incarnation
        # One that was killed may be thought to live still, while another waits for its seat.
        if is_it and process.process.alive and cluster.clients[rank] is not process:
            cluster.clients[rank] = process
            usurped[:] = [old for old in usurped if old is not process]
            process.wake()


def may_be_taken(cluster: Cluster, rank: int) -> bool:
    """Whether the scheduler is here, and knows that nobody holds this seat."""
    seat = cluster.scheduler.core.job.seats.by_node[Node(Role.WORKER, rank)]  # type: ignore[attr-defined]
    return cluster.scheduler.alive and seat.state in (State.LOST, State.EMPTY)


def rank_of(name: str) -> int:
    """Return the rank of the process that is called ``name``."""
    return int(name.split()[1])


def reset(cluster: Cluster, broken: Reset) -> None:
    """Break the connections between two processes, if both are there."""
    first, other = ([it for it in cluster.processes if it.name == name] for name in broken.names)
    if first and other:
        cluster.network.reset(first[0], other[0])


def pause(cluster: Cluster, stop: Pause, usurped: list[Client]) -> None:
    """Stop a process for a while, if it is there; who is usurped meanwhile is added to the list."""
    named = [field for field in cluster.processes if field.name == stop.name and field.alive]
    for process in named:
        cluster.network.pause(process, stop.seconds)
    if named and stop.is_usurped:
        rank = rank_of(stop.name)
        at = cluster.network.now + stop.seconds / 2
        cluster.network.at(at, lambda: _usurp(cluster, cluster.clients[rank], rank, usurped))


def _usurp(cluster: Cluster, old: Client, rank: int, usurped: list[Client]) -> None:
    is_here = cluster.clients[rank] is old and old.process.alive and old.done_at is None
    if is_here and cluster.network.now < old.process.wakes_at and may_be_taken(cluster, rank):
        usurped.append(old)
        cluster.start_worker(rank)


def see_that_it_was_fenced(cluster: Cluster, old: Client) -> None:
    """See that nobody served one whose seat was taken, once it had woken (I9).

    Its script may end well as it wakes, if all that it waits for had been answered when it was
    stopped: sooner than anything that it asks then can be.
    """
    answered_at = old.process.wakes_at + 2 * cluster.network.faults.latency_s
    assert old.done_at is None or old.done_at <= answered_at, (
        f"I9: the seat of {old.process.name} was taken, and its script was served and ended"
    )
    assert old.error is None, f"I9: {old.process.name} was to end with its process: {old.error}"
    assert old.process.exit is None or old.process.exit.code != 0, old.process.exit


# --- drawing --------------------------------------------------------------------------------------


def drawn(dice: random.Random, workers: int, servers: int) -> Trouble:
    """Draw some kinds of trouble, and what it is."""
    kinds = tuple(kind for kind in KINDS if dice.random() < 0.35)
    some = [f"worker {rank}" for rank in range(workers)]
    others = [f"server {rank}" for rank in range(servers)]
    trouble = Trouble(kinds)
    trouble.faults = Faults(
        lose=dice.choice([0.02, 0.1]) if "lose" in kinds else 0.0,
        double=dice.choice([0.1, 0.5]) if "double" in kinds else 0.0,
        jitter_s=dice.choice([0.002, 0.1, 2.0]) if "overtake" in kinds else 0.0,
        latency_s=dice.choice([0.05, 0.3]) if "far" in kinds else 0.001,
        in_order=dice.random() < 0.3,
        lent=dice.random() < 0.3,
    )

    def moment() -> float:
        return dice.choice([dice.random() * 0.3, dice.random() * 10])

    if "cut" in kinds:
        for _ in range(dice.randint(1, 3)):
            ends = [dice.choice(some), dice.choice([*others, "scheduler"])]
            dice.shuffle(ends)
            since = moment()
            until = since + dice.choice([1.0, 5.0, 20.0])
            cut = Cut(ends[0], ends[1], dice.random() < 0.5, since, until, dice.random() < 0.5)
            trouble.cuts.append(cut)
        if "pause" not in kinds:  # both together may be more than the scheduler waits for
            ends = [dice.choice(others), "scheduler"]
            dice.shuffle(ends)
            since, seconds = moment(), dice.choice([1.0, 5.0])
            cut = Cut(ends[0], ends[1], dice.random() < 0.5, since, since + seconds, False)
            trouble.cuts.append(cut)
    if "reset" in kinds:
        for _ in range(dice.randint(1, 6)):
            names = dice.choice(some), dice.choice([*some, *others, "scheduler"])
            trouble.resets.append(Reset(moment(), names))
        if {"lose", "overtake", "far", "clocks", "pause", "cut"}.isdisjoint(kinds):
            # Its next beat, of which there is one a second, has to come within a second.
            trouble.resets.append(Reset(moment(), (dice.choice(others), "scheduler")))
    if "slow" in kinds:
        for _ in range(dice.randint(1, 2)):
            ends = [dice.choice(some), dice.choice(others)]
            dice.shuffle(ends)
            trouble.slow[ends[0], ends[1]] = dice.choice([1_000.0, 20_000.0])
    if "pause" in kinds:
        pauses = [
            Pause(dice.choice(some), moment(), dice.choice(PAUSES)),
            Pause(dice.choice(others), moment(), PAUSES[0]),
            Pause("scheduler", moment(), dice.choice(PAUSES[:2])),
        ]
        trouble.pauses += dice.sample(pauses, dice.randint(1, 3))
    if "usurp" in kinds:
        trouble.pauses.append(Pause(dice.choice(some), moment(), 40.0, is_usurped=True))
    if "clocks" in kinds:
        trouble.rates = {item: dice.uniform(0.9, 1.1) for item in ["scheduler", *some, *others]}
    if "kill" in kinds:
        for _ in range(dice.randint(1, 2)):
            trouble.kills.append((moment(), dice.randrange(workers), dice.random() < 0.7))
    if "restart" in kinds:
        for _ in range(dice.randint(1, 2)):
            after_s = dice.choice([0.05, 3.0, 15.0])
            trouble.restarts.append(Restart(moment(), after_s, dice.random() < 0.4))
    if "full" in kinds:
        since = moment()
        trouble.full = since, since + dice.choice([1.0, 12.0])
    return trouble
