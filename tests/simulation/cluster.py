"""Scheduler, servers and workers on a simulated network, and the scripts that the workers run.

A script is a generator: ``yield from kv.push(…)`` is what ``kv.push(…)`` is to a user, with the same
moments of return and the same errors. As a user may, it reuses its memory as soon as it may: values
that were pushed are overwritten at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvps.compression.policy import CompressionPolicy
from kvps.core.effects import Copied, Finish, Save
from kvps.core.embedding.id_hash import Ids
from kvps.core.embedding.id_split import SplitIds
from kvps.core.embedding.spec import EmbeddingSpec
from kvps.core.embedding.tiered import Tier
from kvps.core.membership_client import JOIN_MAX_S, SEATED, Identity
from kvps.core.optim.hyperparams import resolve
from kvps.core.scheduler.handover import SUSPECT, Suspect
from kvps.core.scheduler.scheduler import Scheduler, Settings
from kvps.core.scheduler.seat import Seat
from kvps.core.server.server import WANTED, Server
from kvps.core.worker import calls
from kvps.core.worker.calls.embeddings import Group
from kvps.core.worker.plan import CopyVersion
from kvps.core.worker.timeout_report import ASK_SCRIPT
from kvps.core.worker.worker import Worker
from kvps.errors import EpochChanged, KvpsError
from kvps.protocol.envelope import Envelope, Node, Packet, Role
from kvps.protocol.membership import Drain, Scale
from kvps.protocol.stores import Open
from kvps.tensors import spec_of
from tests.simulation.disk import Disk
from tests.simulation.keys import ProcessKeys, keys_of
from tests.simulation.network import Faults, Network, Process
from tests.simulation.shelf import Shelves

JOB = bytes(range(16))
TRASH = 77
"""Written over values that the caller may reuse."""
CHUNK_BYTES = 512
"""Small, so that small tensors meet every limit."""
LEAVE_MAX_S = 5.0
"""How long a worker whose script ended waits for an answer to its LEAVE, as a process does."""


@dataclass
class Do:
    """What a script waits for."""

    call: calls.Call
    timeout_s: float = 10_000.0
    until: str = "finished"
    """``copied`` and ``begun`` return earlier."""


Script = Generator[Do | float | None, Any, Any]
"""A number is seconds for which the script computes; None waits until the script is woken."""
Values = dict[str, torch.Tensor]
Tables = dict[str, tuple[torch.Tensor, torch.Tensor]]


@dataclass
class Store:
    """A script's end of one store."""

    name: str = "kv"
    mode: str = "sync"
    staleness: int = 0
    deterministic: bool = False
    on_worker_lost: str = "wait"
    bigarray_bound: int = 100_000
    worker_grace_s: float = 240.0
    timeout_s: float = 10_000.0
    bundles: bool = False
    on_nonfinite: str = "apply"
    quorum: int = 0
    grace_s: float = -1.0
    late: str = "drop"
    rebuilds: bool = False
    push_call: type[calls.PushValues] = calls.PushValues

    def open(self) -> Script:
        opened = Open(
            self.name,
            self.mode,
            self.staleness,
            self.deterministic,
            self.on_worker_lost,
            self.bigarray_bound,
            CHUNK_BYTES,
            self.bundles,
            self.on_nonfinite,
            quorum=self.quorum,
            grace_s=self.grace_s,
            late=self.late,
            rebuilds=self.rebuilds,
        )
        yield self._do(calls.OpenStore(self.name, opened, self.worker_grace_s))

    def init(self, values: Values) -> Script:
        keys = tuple((name, spec_of(value)) for name, value in values.items())
        yield self._do(calls.Init(self.name, keys, tuple(values.values())))

    def broadcast(self, values: Values) -> Script:
        keys = tuple((name, spec_of(value)) for name, value in values.items())
        sinks = tuple(torch.zeros_like(value) for value in values.values())
        yield self._do(calls.Broadcast(self.name, keys, tuple(values.values()), sinks))
        return dict(zip(values, sinks, strict=True))

    def push(self, values: Values, priority: int = 0, wait: bool = False) -> Script:
        """Push; return when the values are copied, or if ``wait`` when they are taken in."""
        rows = tuple(value.clone() for value in values.values())
        call = self.push_call(self.name, tuple(values), rows, None, priority, not wait)
        yield self._do(call, "finished" if wait else "copied")
        for row in rows:
            row.fill_(TRASH)

    def pushpull(self, values: Values, priority: int = 0) -> Script:
        rows = tuple(value.clone() for value in values.values())
        sinks = tuple(torch.full_like(value, TRASH) for value in rows)
        yield self._do(self.push_call(self.name, tuple(values), rows, sinks, priority, False))
        for row in rows:
            row.fill_(TRASH)
        return dict(zip(values, sinks, strict=True))

    def pull(self, like: Values, priority: int = 0, min_version: int = 0) -> Script:
        sinks = tuple(torch.full_like(value, TRASH) for value in like.values())
        yield self._do(calls.PullValues(self.name, tuple(like), sinks, priority, min_version))
        return dict(zip(like, sinks, strict=True))

    def push_rows(self, values: Tables, priority: int = 0, wait: bool = False) -> Script:
        """Push rows, (numbers in order, rows) for each key; return as :meth:`push` does."""
        given: list[torch.Tensor] = []
        for ids, rows in values.values():
            given += [ids.clone(), torch.arange(len(ids)), rows.clone()]
        call = calls.PushKeyRows(self.name, tuple(values), tuple(given), priority, not wait)
        yield self._do(call, "finished" if wait else "copied")
        for row in given[2::3]:
            row.fill_(TRASH)

    def pull_rows(self, wanted: Values, priority: int = 0) -> Script:
        """Pull rows by their numbers, which are in order."""
        ids = tuple(wanted.values())
        places = tuple(torch.arange(len(id_)) for id_ in ids)
        found = yield self._do(calls.PullKeyRows(self.name, tuple(wanted), ids, places, priority))
        return dict(zip(wanted, found, strict=True))

    def refresh(self, copies: Values, marks: dict[str, CopyVersion | None]) -> Script:
        """Bring ``copies``, of which ``marks`` say what they hold, up to date."""
        sinks = tuple(torch.full_like(copy, TRASH) for copy in copies.values())
        known = tuple(marks.get(name) for name in copies)
        found = yield self._do(calls.Refresh(self.name, tuple(copies), sinks, known, 0))
        for (name, copy), fresh in zip(copies.items(), found, strict=True):
            marks[name] = fresh.mark
            if fresh.whole is not None:
                copy.copy_(fresh.whole)
            for ids, rows in fresh.patches:
                copy[ids] = rows

    def set_optimizer(self, name: str, **hyper: Any) -> Script:
        resolved = resolve(name, hyper)
        yield self._do(calls.SetOptimizer(self.name, resolved))
        if resolved.optional("clip_global_norm") is not None:
            self.push_call = calls.PushStep

    def set_rate(self, lr: float) -> Script:
        yield self._do(calls.SetRate(self.name, lr))

    def compress(self, rules: CompressionPolicy) -> Script:
        yield self._do(calls.Compress(self.name, rules))

    def resume(self, keys: Sequence[str]) -> Script:
        place = yield self._do(calls.TakePlace(self.name, tuple(keys), replays=False))
        return place.owed

    def versions(self, keys: Sequence[str]) -> Script:
        return (yield self._do(calls.Versions(self.name, tuple(keys))))

    def lookup(self, keys: Sequence[str]) -> Script:
        return (yield self._do(calls.Lookup(self.name, tuple(keys))))

    def checkpoint(self, tag: str = "") -> Script:
        return (yield self._do(calls.TakeCheckpoint(self.name, tag)))

    def restore(self, tag: str = "") -> Script:
        return (yield self._do(calls.RestoreCheckpoint(self.name, tag)))

    def embed(self, key: str, recipe: EmbeddingSpec, rank: int) -> Script:
        yield self._do(calls.MakeTable(self.name, key, recipe, rank))

    def push_ids(self, key: str, ids: Ids, rows: torch.Tensor, servers: int) -> Script:
        """Push rows; return when they are copied."""
        yield from self.push_tables({key: (ids, rows)}, servers)

    def push_tables(self, parts: dict[str, tuple[Ids, torch.Tensor]], servers: int) -> Script:
        """Push rows of tables with rows of one kind; return when they are copied."""
        split = SplitIds([ids for ids, _ in parts.values()], servers)
        totals = tuple(split.summed([rows for _, rows in parts.values()]))
        groups = (Group("float64", totals[0].shape[1], 0, len(parts)),)
        yield self._do(
            calls.PushTableRows(self.name, tuple(parts), True, groups, split.shares, totals), "copied"
        )

    def pull_ids(self, key: str, recipe: EmbeddingSpec, ids: Ids, servers: int) -> Script:
        (rows,) = yield from self.pull_tables({key: ids}, recipe, servers)
        return rows

    def pull_tables(self, parts: dict[str, Ids], recipe: EmbeddingSpec, servers: int) -> Script:
        """Return the rows of each table; all have the same kind of rows."""
        split = SplitIds([*parts.values()], servers)
        groups = (Group(recipe.dtype, recipe.dim, 0, len(parts)),)
        (rows,) = yield self._do(calls.PullTableRows(self.name, tuple(parts), groups, split.shares))
        return [rows[places] for places in split.places]

    def block(self, key: str, dim: int, server: int, start: int) -> Script:
        """Return some of the rows that one server has."""
        call = calls.ExportBlock(self.name, key, server, dim, start, 3, 0, with_state=True)
        return (yield self._do(call))

    def barrier(self, name: str | None = None) -> Script:
        yield self._do(calls.StandAtBarrier(self.name, name))

    def join(self) -> Script:
        return (yield self._do(calls.JoinStore(self.name)))

    def flush(self) -> Script:
        yield self._do(calls.Flush(self.name))

    def _do(self, call: calls.Call, until: str = "finished") -> Do:
        return Do(call, self.timeout_s, until)


class Client:
    """One worker process and the script that it runs."""

    def __init__(self, cluster: Cluster, process: Process, core: Worker, script: Script) -> None:
        self.process = process
        self.core = core
        self.result: Any = None
        self.error: KvpsError | None = None
        self.later: list[KvpsError] = []
        """Errors of calls that had returned already."""
        self.done_at: float | None = None
        self._network = cluster.network
        self._script = script
        self._tickets = itertools.count(1)
        self._ticket = 0
        self._until = "finished"
        self._is_idle = False
        process.on_finish, process.on_copied = self._finished, self._copied

    def begin(self) -> None:
        """Join, and then run the script."""
        now = self._network.time(self.process.name)
        self._network.perform(self.process, self.core.start(now))
        self._ticket = next(self._tickets)
        self._perform(self.core.on_join(self._ticket, now + 10_000.0, now))

    def wake(self) -> None:
        """Let the script go on, if it waits for that."""
        if self._is_idle:
            self._is_idle = False
            self._soon(None, None)

    def _perform(self, door: None) -> None:
        self._network.perform(self.process, door)

    def _finished(self, effect: Finish) -> None:
        if effect.ticket == ASK_SCRIPT:
            self._hear_script((self._ticket,) if self._ticket else ())
            return
        if effect.ticket != self._ticket:
            if effect.error is not None:
                self.later.append(effect.error)
            return
        self._soon(effect.value, effect.error)

    def _hear_script(self, waits_in: tuple[int, ...]) -> None:
        """Tell the core in which call the script waited when the core asked."""
        network = self._network

        def tell() -> None:
            if self.process.alive:
                self._perform(self.core.on_script(waits_in, network.time(self.process.name)))

        network.at(max(network.now, self.process.wakes_at), tell)

    def _copied(self, effect: Copied) -> None:
        if effect.ticket == self._ticket and self._until == "copied":
            self._soon(None, None)

    def _soon(self, value: Any, error: KvpsError | None) -> None:
        """Resume the script a little later: it runs in another thread than the loop."""
        self._ticket = 0
        delay = self._network.random.random() * 0.001
        self._network.at(self._network.now + delay, lambda: self._resume(value, error))

    def _resume(self, value: Any, error: KvpsError | None) -> None:
        if not self.process.alive:
            return
        if self._network.now < self.process.wakes_at:
            self._network.at(self.process.wakes_at, lambda: self._resume(value, error))
            return
        try:
            step = self._script.throw(error) if error is not None else self._script.send(value)
        except StopIteration as end:
            self._end(end.value, None)
        except KvpsError as raised:
            self._end(None, raised)
        else:
            if step is None:
                self._is_idle = True
                return
            if isinstance(step, float):
                self._network.at(self._network.now + step, lambda: self._resume(None, None))
                return
            returned = next((late for late in self.later if isinstance(late, EpochChanged)), None)
            if returned is not None:  # as KVStore does at the next call
                self.later.remove(returned)
                self._soon(None, returned)
                return
            now = self._network.time(self.process.name)
            self._ticket, self._until = next(self._tickets), step.until
            self._perform(self.core.on_call(self._ticket, step.call, now + step.timeout_s, now))

    def _end(self, result: Any, error: KvpsError | None) -> None:
        self.result, self.error, self.done_at = result, error, self._network.now
        code = 0 if error is None else 1
        now = self._network.time(self.process.name)
        self._perform(self.core.leave(error is None, code, "the script ended", True, now))
        self._network.at(self._network.now + LEAVE_MAX_S, self._stop)

    def _stop(self) -> None:
        if self.process.alive:
            self._network.kill(self.process)


class Cluster:
    """One job: ``clients`` are those that run now or ended by themselves, by rank."""

    def __init__(
        self,
        workers: int,
        servers: int,
        script: Callable[[int], Script],
        seed: int = 0,
        faults: Faults | None = None,
        machines: Sequence[int] = (),
        rates: dict[str, float] | None = None,
        checkpoint_every_s: float | None = None,
        memory_limit: int | None = None,
        tier: Callable[[], Tier] | None = None,
        has_keys: bool = False,
        most_workers: int = 0,
        replicas: int = 0,
    ) -> None:
        """Start all processes, at slightly different times.

        With ``most_workers``, others may be added until there are so many.
        ``machines`` are those of the workers, by rank; servers are on machine 1. ``rates`` are those
        of the clocks of processes, where they are wrong. With keys, all connections are made by them.
        """
        self.has_keys = has_keys
        self.machines = list(machines)
        self.network = Network(seed, faults or Faults())
        self.network.rates = rates or {}
        self.checkpoint_every_s = checkpoint_every_s
        self.memory_limit = memory_limit
        self.tier = tier
        """How often servers want cuts; None for servers without a disk."""
        self.shelves = Shelves(self.network)
        self.workers = workers
        self.coming = 0
        """Workers that will be added later."""
        self.script = script
        self.clients: dict[int, Client] = {}
        self.started: dict[int, list[Client]] = {rank: [] for rank in range(workers)}
        """All that were ever started, by rank."""
        self.join_max_s = JOIN_MAX_S
        """How long a process waits for a scheduler that says nothing, before it has joined."""
        self._servers: dict[int, Process] = {}
        self._pids = itertools.count(100)
        # One who stands still for minutes is to come back also where nobody else is left.
        self.settings = Settings(
            workers,
            servers,
            persist=True,
            replace_max_s=240.0,
            has_keys=has_keys,
            most_workers=most_workers,
            replicas=replicas,
        )
        self.disk = Disk()
        self.schedulers: list[Process] = []
        """All that were ever started."""
        self.start_scheduler()
        for rank in range(servers):
            self.network.at(self._soon(), lambda rank=rank: self.start_server(rank))  # type: ignore[misc]
        self.spares: list[Process] = []
        """All standbys that were ever started; some are servers by now."""
        for _ in range(servers * replicas):
            self.network.at(self._soon(), self.start_spare)
        for rank in range(workers):
            self.network.at(self._soon(), lambda rank=rank: self.start_worker(rank))  # type: ignore[misc]

    def _soon(self) -> float:
        return self.network.random.random() * 0.1

    def start_scheduler(self) -> Process:
        """Start the scheduler, from what the former one saved if it did."""
        now = self.network.time("scheduler")
        saved = self.disk.read("scheduler")
        core = Scheduler.restore(self.settings, saved, now) if saved else Scheduler(self.settings, JOB, now)
        keys = keys_of(Role.SCHEDULER, "") if self.has_keys else None
        if keys is not None:
            keys.ring.sessions = core.job.seats.sessions()
        self.scheduler = process = self.network.add(
            "scheduler", Role.SCHEDULER, core, "sim://scheduler", keys
        )
        self.schedulers.append(process)
        process.on_save = lambda effect: self._save(process, effect)
        process.on_finish = lambda effect: self._look_at(process, core, effect)
        self.network.perform(process, iter(()))
        return process

    def _look_at(self, process: Process, core: Scheduler, effect: Finish) -> None:
        """Tell the scheduler after a moment whether somebody listens at an endpoint."""
        if effect.ticket != SUSPECT:
            return
        suspect = effect.value
        assert isinstance(suspect, Suspect)

        def tell() -> None:
            if process.alive and not self.network.listens(suspect.endpoint):
                now = self.network.time("scheduler")
                self.network.perform(process, core.on_ended(suspect.rank, suspect.incarnation, now))

        self.network.at(self.network.now + 0.01, tell)

    def start_spare(self) -> Process:
        """Start a process that wants to be the standby of some server."""
        pid = next(self._pids)
        name, endpoint = f"standby {pid}", f"tcp://standby:{pid}"
        keys = keys_of(Role.SERVER, f"standby-{pid}") if self.has_keys else None
        identity = replace(self._identity(Role.SERVER, 0, pid, keys, endpoint), rank=None, standby=True)
        now = self.network.time(name)
        core = Server(identity, now, checkpoint_every_s=self.checkpoint_every_s)
        process = self.network.add(name, Role.SERVER, core, endpoint, keys)
        process.on_finish = lambda effect: self._start_wanted(effect)
        self.spares.append(process)
        self.network.perform(process, core.start(now))
        return process

    def _start_wanted(self, effect: Finish) -> None:
        """Start a standby in the place of one that has a seat; where a seat moves, unless one waits."""
        waits = any(spare.alive and spare.core.member.welcome is None for spare in self.spares)  # type: ignore[attr-defined]
        if effect.ticket == SEATED or (effect.ticket == WANTED and not waits):
            self.network.at(self.network.now + 0.01, self.start_spare)

    def order(self, message: Drain | Scale) -> None:
        """Ask the scheduler as an operator does."""
        core, now = self.scheduler.core, self.network.time("scheduler")
        seats: Iterable[Seat] = core.job.seats.by_node.values()  # type: ignore[attr-defined]
        routes = [link for seat in seats if seat.node.role is Role.WORKER for link in seat.links]
        if not routes:  # nobody is there whose connection the answer may take
            return
        route, asking = routes[0], Envelope(bytes(16), 0, Role.WORKER, 0, 0, 1 << 40)
        self.network.perform(self.scheduler, core.on_packet(route, Packet(asking, message), now))

    def holders(self, rank: int) -> tuple[Process | None, Process | None]:
        """Return the process that has the seat of a server, and its standby, as the scheduler knows them."""
        seats = self.scheduler.core.job.seats.by_node  # type: ignore[attr-defined]
        found: list[Process | None] = []
        for role in (Role.SERVER, Role.STANDBY):
            seat = seats.get(Node(role, rank))  # in a job without copies there is none
            life = 0 if seat is None else seat.incarnation
            found.append(
                next(
                    (
                        item
                        for item in (*self.servers, *self.spares)
                        if item.alive and life and item.core.member.incarnation == life  # type: ignore[attr-defined]
                    ),
                    None,
                )
            )
        return found[0], found[1]

    def is_level(self, rank: int) -> bool:
        """Whether the scheduler would give the seat of a server to its standby."""
        return bool(self.scheduler.core.job.seats.by_node[Node(Role.STANDBY, rank)].is_level)  # type: ignore[attr-defined]

    def _save(self, process: Process, effect: Save) -> None:
        """Write what a process must find again; one that cannot ends, and has told nobody."""
        try:
            self.disk.write(process.name, effect.state)
        except OSError:
            self.network.kill(process)

    @property
    def is_over(self) -> bool:
        """Whether the scheduler has written that there is nothing to go on from."""
        return self.disk.read("scheduler") == b""

    def start_server(self, rank: int) -> Process:
        """Start a server: the first at this rank, or another in its place, which holds nothing."""
        pid = next(self._pids)
        endpoint = f"tcp://server-{rank}:{pid}"
        name = f"server {rank}"
        now = self.network.time(name)
        keys = keys_of(Role.SERVER, f"{rank}-{pid}") if self.has_keys else None
        identity = self._identity(Role.SERVER, rank, pid, keys, endpoint)
        core = Server(
            identity,
            now,
            self.memory_limit,
            checkpoint_every_s=self.checkpoint_every_s,
            tier=self.tier,
        )
        process = self.network.add(name, Role.SERVER, core, endpoint, keys)
        process.on_order = lambda effect: self.shelves.order(process, rank, effect.order)
        process.on_finish = lambda effect: self._start_wanted(effect)
        self._servers[rank] = process
        self.network.perform(process, core.start(now))
        return process

    def add_worker(self) -> Client:
        """Start one more worker, of the next number; it takes a rank that is free."""
        number = self.workers
        self.workers, self.coming = self.workers + 1, max(0, self.coming - 1)
        self.started[number] = []
        return self.start_worker(number, is_added=True)

    def start_worker(self, rank: int, is_added: bool = False) -> Client:
        pid = next(self._pids)
        name = f"worker {rank}"
        keys = keys_of(Role.WORKER, f"{rank}-{pid}") if self.has_keys else None
        identity = self._identity(Role.WORKER, rank, pid, keys)
        identity = replace(identity, rank=None) if is_added else identity
        core = Worker(identity, self.network.time(name))
        endpoint = f"sim://worker-{rank}-{pid}"
        process = self.network.add(name, Role.WORKER, core, endpoint, keys)
        self.clients[rank] = Client(self, process, core, self.script(rank))
        self.started[rank].append(self.clients[rank])
        self.clients[rank].begin()
        return self.clients[rank]

    def _identity(
        self, role: Role, rank: int, pid: int, keys: ProcessKeys | None, endpoint: str = ""
    ) -> Identity:
        host = f"host-{role}-{rank}"
        machine = 1 if role is Role.SERVER else dict(enumerate(self.machines)).get(rank, 0)
        return Identity(
            role,
            "sim://scheduler",
            host,
            pid,
            "kvps",
            rank,
            endpoint=endpoint,
            machine=machine,
            join_max_s=self.join_max_s,
            public_key=keys.session if keys is not None else "",
        )

    def kill(self, rank: int, is_noticed: bool = True) -> None:
        """End a worker as kill -9 does, unless it has ended by itself."""
        client = self.clients.get(rank)
        if client is not None and client.done_at is None:
            self.network.kill(client.process, is_noticed)

    def replace(self, rank: int) -> None:
        """Start a replacement for a worker that was killed."""
        if not self.clients[rank].process.alive and self.clients[rank].done_at is None:
            self.start_worker(rank)

    def lose(self, rank: int, at: float, again_s: float = 20.0, is_noticed: bool = True) -> None:
        """Kill a worker at a time, and replace it some seconds later."""
        self.network.at(at, lambda: self.kill(rank, is_noticed))
        self.network.at(at + again_s, lambda: self.replace(rank))

    def run(self, limit_s: float = 2_000.0) -> None:
        """Let the job run until every script has ended."""
        self.network.run(lambda: self.is_done, limit_s)

    def ended_well(self) -> list[Client]:
        """Return the workers, none of whose scripts has failed."""
        for client in self.clients.values():
            assert client.error is None, client.error
        return list(self.clients.values())

    def run_for(self, seconds: float) -> None:
        """Let some time pass."""
        end = self.network.now + seconds
        self.network.at(end, lambda: None)
        self.network.run(lambda: self.network.now >= end, end)

    def part(self, limit_s: float) -> None:
        """Let the scheduler and the servers end; the workers' scripts have."""
        end = self.network.now + limit_s
        self.network.run(lambda: not self.scheduler.alive and not self.is_anyone_alive, end)

    @property
    def servers(self) -> list[Process]:
        """Those that run now or ran last, by rank."""
        return [self._servers[rank] for rank in sorted(self._servers)]

    @property
    def is_anyone_alive(self) -> bool:
        """Whether the scheduler or a server has not ended."""
        return any(item.alive for item in (self.scheduler, *self.servers))

    @property
    def processes(self) -> list[Process]:
        """Those that run now or ran last, by seat."""
        workers = [client.process for client in self.clients.values()]
        return [self.scheduler, *self.servers, *workers]

    @property
    def is_done(self) -> bool:
        """Whether every script has ended."""
        return (
            not self.coming
            and len(self.clients) == self.workers
            and all(
                client.done_at is not None or client.core.member.end is not None
                for client in self.clients.values()
            )
        )
