"""From ten workers to a thousand: what a worker costs must not grow with the number of the others.

Counted are messages, octets, and the calls of functions in which the scheduler's answers take, none of
which depend on the machine: 10 workers and 2 servers, 100 and 8, 1,000 and 64. Beats go by the
second and not by the round, and are counted apart. Processor time is printed beside them, and not judged. A
row of the table for each size is printed::

    python -m pytest -s --all tests/simulation/test_scale.py

``KVPS_SCALE_ROUNDS=100`` plays as many rounds.
"""

import gc
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from types import FrameType
from typing import Any

import pytest
import torch

from kvps.core.effects import Send
from kvps.core.scheduler import seat
from kvps.core.scheduler.rate_limits import AHEAD_S, ROWS_OF_A_MESSAGE, ROWS_PER_S
from kvps.core.scheduler.scheduler import Scheduler, Settings
from kvps.core.scheduler.seat import SeatLink
from kvps.core.server import options
from kvps.protocol import wire
from kvps.protocol.envelope import PROTOCOL, Envelope, Packet, Role
from kvps.protocol.membership import Barrier, Beat, Hello, Leave, View, ViewChanges
from tests.simulation.cluster import JOB, Cluster, Script, Store
from tests.simulation.network import Faults
from tests.support.effects import taken

ROUNDS = int(os.environ.get("KVPS_SCALE_ROUNDS", "5"))
SIZES = ((10, 2), (100, 8), (1_000, 64))
KEYS = [f"layer {number}" for number in range(8)]
OF_A_ROUND = ("Push", "Pull", "Pulled", "Ack", "Probe", "Probed", "Norms")
OF_THE_SCHEDULER = ("Barrier", "Released")


@dataclass(frozen=True)
class Seen:
    """What one size of cluster cost."""

    workers: int
    servers: int
    carried: Counter[str]
    in_rounds: Counter[str]
    """Of that, what was sent between the first round's begin and the last one's end."""
    virtual_s: float
    spent_us: Mapping[str, float]
    """By role, processor time in rounds for each worker and round: rules, and packets to octets and back."""

    def per_round(self, *names: str) -> float:
        """Messages of these kinds for each worker and round."""
        return sum(self.in_rounds[name] for name in names) / (self.workers * ROUNDS)


def rounds(rank: int, workers: int, began: Callable[[], None], ended: Callable[[], None]) -> Script:
    kv = Store()
    values = {key: torch.full((3,), 1.0 + rank) for key in KEYS}
    yield from kv.open()
    yield from kv.init(values)
    yield from kv.barrier()
    began()
    for _ in range(ROUNDS):
        pulled = yield from kv.pushpull(values)
        for key in KEYS:
            assert pulled[key].tolist() == [workers * (workers + 1) / 2] * 3
        yield from kv.barrier()
    ended()


def seen(workers: int, servers: int) -> Seen:
    """Play a job of this size to its end; how every process ends is counted, too."""
    before: list[tuple[Counter[str], Counter[str]]] = []
    after: list[tuple[Counter[str], Counter[str]]] = []
    cluster: Cluster

    def now() -> tuple[Counter[str], Counter[str]]:
        return cluster.network.carried.copy(), cluster.network.spent_ns.copy()

    def script(rank: int) -> Script:
        return rounds(rank, workers, lambda: before.append(now()), lambda: after.append(now()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(options, "CHUNK_BYTES_MIN", 1)
        cluster = Cluster(workers, servers, script, 0, Faults(in_order=True))
        cluster.network.clock_ns = time.thread_time_ns
        cluster.network.checks = False  # they look at all of a server, and would be quadratic
        gc.disable()  # it would look at all of a growing cluster again and again
        try:
            cluster.run()
            cluster.ended_well()
            cluster.part(100)
        finally:
            gc.enable()
    # The first to begin and the last to end: nothing of any round is left out.
    carried, spent = after[-1][0] - before[0][0], after[-1][1] - before[0][1]
    return Seen(
        workers,
        servers,
        cluster.network.carried,
        carried,
        cluster.network.now,
        {role: ns / 1000 / (workers * ROUNDS) for role, ns in spent.items()},
    )


@pytest.mark.timeout(600 + 60 * ROUNDS)
@pytest.mark.parametrize(
    ("workers", "servers"), [*SIZES[:-1], pytest.param(*SIZES[-1], marks=pytest.mark.thorough)]
)
def test_cost_per_worker_stays_the_same_as_the_cluster_grows(workers: int, servers: int) -> None:
    table = [
        "| workers | servers | push | ack | pulled | barrier | views | hellos | virtual s | worker us | server us | scheduler us |"
    ]
    table += ["|" + "---|" * 12]
    cost = seen(workers, servers)
    table.append(line(cost))
    in_rounds(cost)
    around_them(cost)
    sys.stdout.write("\n".join(["", *table, ""]))


def in_rounds(seen: Seen) -> None:
    # Keys of one server travel together; with more servers, up to one message for each key.
    pushes = seen.per_round("Push")
    assert 1 <= pushes <= len(KEYS)
    assert seen.per_round("Pulled") == pushes
    assert seen.per_round(*OF_A_ROUND) <= 3 * pushes  # an ACK each, but for the last of a round
    assert seen.per_round(*OF_THE_SCHEDULER) <= 2 + 2 / ROUNDS  # some begin before others heard
    assert seen.in_rounds["View"] == seen.in_rounds["ViewChanges"] == 0
    assert seen.in_rounds["Hello"] == 0


def around_them(seen: Seen) -> None:
    """Joining and leaving."""
    members = seen.workers + seen.servers
    # A HELLO to each server, one to the scheduler, and perhaps another while it waits.
    assert seen.carried["Hello"] <= members * seen.servers + 2 * members
    # One when all are here, and what the pace allows while all leave at once.
    assert seen.carried["View"] + seen.carried["ViewChanges"] <= 25 * members
    assert seen.carried["Leave"] == seen.carried["Left"] == seen.workers


def line(seen: Seen) -> str:
    members = seen.workers + seen.servers
    figures = [
        *(seen.per_round(name) for name in ("Push", "Ack", "Pulled")),
        seen.per_round(*OF_THE_SCHEDULER),
        (seen.carried["View"] + seen.carried["ViewChanges"]) / members,
        seen.carried["Hello"] / members,
        seen.virtual_s,
        *(seen.spent_us[role] for role in ("worker", "server", "scheduler")),
    ]
    return f"| {seen.workers:,} | {seen.servers} | " + " | ".join(f"{x:.2f}" for x in figures) + " |"


# --- the scheduler by itself ----------------------------------------------------------------------


class Steps:
    """How many calls of functions something took: its work, whatever machine does it."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event in ("call", "c_call"):
            self.count += 1


@contextmanager
def counted() -> Iterator[Steps]:
    steps, before = Steps(), sys.getprofile()
    sys.setprofile(steps)
    try:
        yield steps
    finally:
        sys.setprofile(before)


class Full:
    """A scheduler whose seats are all taken. Its members are known by their node's name."""

    def __init__(self, workers: int, servers: int) -> None:
        self.settings = Settings(workers, servers)
        self.core = Scheduler(self.settings, JOB, 0.0)
        self.lives: dict[str, int] = {}
        self.now = 53.0
        seats = self.core.job.seats
        *others, last = seats.by_node.values()
        for number, other in enumerate(others, start=1):  # thousands join one by one only in minutes
            role, rank = other.node
            hello = Hello(*PROTOCOL, "kvps", 0, role, rank, f"host-{rank}", 1, f"tcp://h:{1 + rank}")
            route = f"{role} {rank} 1".encode()
            other.begin(number, hello, self.now)
            other.links[route] = SeatLink(hello.host, 1, False, self.now)
            seats.routes[route], seats.issued = other, number
            self.lives[f"{role} {rank}"] = number
        self.join(last.node.role, last.node.rank)
        self.now += 200  # for so long no view follows one of all seats to so many
        self.core.check()

    def join(self, role: Role, rank: int, pid: int = 1) -> list[Send]:
        hello = Hello(*PROTOCOL, "kvps", 0, role, rank, f"host-{rank}", pid, f"tcp://h:{1 + rank}")
        said = self.say(f"{role} {rank} {pid}", Envelope(bytes(16), 0, role, rank, 0, 0), hello)
        self.lives[f"{role} {rank}"] = self.core.job.seats.issued
        return said

    def say(self, name: str, envelope: Envelope, message: Any) -> list[Send]:
        effects = taken(self.core, self.core.on_packet(name.encode(), Packet(envelope, message), self.now))
        return [effect for effect in effects if isinstance(effect, Send)]

    def of(self, rank: int, seq: int = 0) -> Envelope:
        life = self.lives[f"{Role.WORKER} {rank}"]
        return Envelope(JOB, self.core.job.number, Role.WORKER, rank, life, seq)

    def worker(self, rank: int, message: Any, seq: int = 0) -> list[Send]:
        return self.say(f"{Role.WORKER} {rank} 1", self.of(rank, seq), message)


@cache
def full(workers: int, servers: int) -> Full:
    return Full(workers, servers)


def copy(workers: int, servers: int) -> Full:
    return deepcopy(full(workers, servers))


def test_a_beat_and_a_barrier_take_the_scheduler_the_same_work_for_each_worker() -> None:
    work = []
    for workers, servers in SIZES:
        item = full(workers, servers)
        with counted() as steps:
            for rank in range(workers):
                item.worker(rank, Beat(1))
                item.worker(rank, Barrier("kv", "b", 0), seq=1)
        work.append(steps.count / workers)
    assert work[-1] < 1.1 * work[0], work
    began = time.thread_time_ns()
    for rank in range(workers):
        beat = wire.encode(Packet(item.of(rank), Beat(2)))
        for answer in item.worker(rank, wire.decode(beat).message):
            wire.encode(answer.packet)
    beat_us = (time.thread_time_ns() - began) / 1000 / workers
    sys.stdout.write(f"\na beat and its answer, encoded and decoded: {beat_us:.0f} us\n")


def test_a_loss_and_a_join_cost_a_message_and_the_same_work_for_each_member() -> None:
    work = []
    for workers, servers in SIZES:
        full, members = copy(workers, servers), workers + servers
        with counted() as steps:
            lost = full.worker(3, Leave(False, 9, True, "killed"))
            full.now += 5
            joined = full.join(Role.WORKER, 3, pid=2)
        assert sum(isinstance(send.packet.message, View | ViewChanges) for send in lost) == members
        assert len(lost) <= members + 1
        assert len(joined) <= members + 2
        work.append(steps.count / members)
    assert work[-1] < 1.1 * work[0], work


@pytest.mark.parametrize("what", ["join", "leave"])
def test_if_all_change_at_once_each_member_hears_of_it_a_few_times(what: str) -> None:
    for workers, servers in SIZES:
        full, members = copy(workers, servers), workers + servers
        views, begun = 0, full.now
        for rank in range(1, min(workers, 300)):
            said = full.worker(rank, Leave(what == "leave", 9, True, ""))
            if what == "join":
                said += full.join(Role.WORKER, rank, pid=2)
            views += sum(isinstance(send.packet.message, View | ViewChanges) for send in said)
            full.now += 0.001
        while full.core.job.is_untold:
            due = full.core.deadline()
            assert due is not None
            full.now = max(full.now, due)
            effects = taken(full.core, full.core.on_timer(full.now))
            views += sum(isinstance(o.packet.message, View | ViewChanges) for o in effects if type(o) is Send)
        full.core.check()
        assert not full.core.job.is_untold, "the last change is told to all"
        # What the pace allows, the one that goes beyond it, and those that come with a WELCOME.
        allowed = ROWS_PER_S * (full.now - begun + AHEAD_S) / (members * ROWS_OF_A_MESSAGE) + 1.1
        assert views <= allowed * members + (workers if what == "join" else 0)


@pytest.mark.spec("R483")
@pytest.mark.parametrize(("workers", "servers"), [SIZES[1], (9_744, 256)])
def test_a_loss_costs_each_member_some_octets_however_many_there_are(
    workers: int, servers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """10,000 seats do not fit into a job yet: the answer to a status query has to fit into a head."""
    monkeypatch.setattr(seat, "SEATS_MAX", 10_000)
    full, members = Full(workers, servers), workers + servers
    for change in (Leave(False, -9, True, "killed by SIGKILL"), Leave(True, 0, True, "")):
        said = full.worker(3 if change.exit_code else 4, change)
        news = [
            wire.encode(send.packet) for send in said if isinstance(send.packet.message, View | ViewChanges)
        ]
        assert len(news) == members
        assert max(sum(map(len, frames)) for frames in news) <= 200
        full.now += 5
    joined = full.join(Role.WORKER, 3, pid=2)
    views = [
        wire.encode(send.packet) for send in joined if isinstance(send.packet.message, View | ViewChanges)
    ]
    sizes = sorted(sum(map(len, frames)) for frames in views)
    assert sizes[-2] <= 200 < sizes[-1], "the newcomer alone is told of all seats"
    sys.stdout.write(f"\na view of {members} seats: {sizes[-1]} octets; of one that joined: {sizes[0]}\n")


def test_a_member_takes_the_same_octets_of_a_view_however_many_there_are() -> None:
    """One of all 1,500 seats still fits into a head: ``tests/unit/core/scheduler/test_job.py``."""
    octets = []
    for workers, servers in SIZES:
        item = full(workers, servers)
        envelope = Envelope(JOB, 1, Role.SCHEDULER, 0, 0, 0)
        (head,) = wire.encode(Packet(envelope, item.core.job.view(item.now)))
        assert len(head) <= wire.HEAD_BYTES_MAX
        octets.append(len(head) / (workers + servers))
    assert max(octets) < 1.3 * min(octets), octets
