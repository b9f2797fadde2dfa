"""A whole cluster inside this process: for a laptop, a notebook, a test.

Scheduler, servers and workers are the real ones, each with its loop in a thread, and talk over
loopback sockets; a subprocess may join with ``KVPS_SCHEDULER`` set to :attr:`LocalCluster.scheduler` and
``KVPS_KEYS`` to :attr:`LocalCluster.keys`.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from torch._C._distributed_c10d import HashStore, Store

from kvps import annexes, config
from kvps.core.effects import Core, Exit, Finish
from kvps.core.membership_client import SEATED
from kvps.core.scheduler.handover import Suspect
from kvps.core.scheduler.scheduler import Scheduler, Settings
from kvps.core.server.server import Server
from kvps.errors import ConfigError, KvpsError, Timeout, WorkerLost
from kvps.net import descriptors
from kvps.net.driver import Inbox, Lens, Listener, drive
from kvps.net.memory import share_bytes
from kvps.net.transport import Transport
from kvps.net.zap import Keys, keys_can_be
from kvps.net.zeromq import ZmqTransport
from kvps.observe import logs
from kvps.protocol.envelope import Role
from kvps.runtime import current
from kvps.runtime.key_files import KeyMemory, Section, generate, of
from kvps.runtime.member_process import own_identity
from kvps.runtime.open_stores import OpenStores
from kvps.runtime.scheduler_process import THIS_PROCESS
from kvps.runtime.suspicion import Suspicions
from kvps.runtime.ticket import TIMEOUT_S
from kvps.runtime.transport import open_transport
from kvps.runtime.worker_session import WorkerSession, worker_session

log = logging.getLogger("kvps")
T = TypeVar("T")
END_MAX_S = 10.0


class LocalCluster:
    """Scheduler, servers and workers in this process, as a context manager.

    Each thread that calls :func:`kvps.create` inside is a worker; :meth:`run` starts one thread per worker
    for you. Give each worker an accelerator of its own, if there are several: torch has one thread for the
    backward passes of a device.

    Args:
        workers: number of workers, 1 or more.
        servers: number of servers, 1 or more.
        most_workers: once ``workers`` threads have joined, others may be added, and come and go, until there
            are so many; 0 if none may.
        replicas: number of copies of each server, 0 or 1.

    Example:
        >>> import kvps, torch
        >>> def work(rank):
        ...     kv = kvps.create("dist_sync")
        ...     kv.init("w", torch.zeros(1))
        ...     return kv.pushpull("w", torch.tensor([rank + 1.0])).item()
        >>> with kvps.LocalCluster(workers=2, servers=2) as cluster:
        ...     cluster.run(work)
        [3.0, 3.0]
    """

    def __init__(self, workers: int = 1, servers: int = 1, most_workers: int = 0, replicas: int = 0) -> None:
        for name, given in (("workers", workers), ("servers", servers)):
            if type(given) is not int or given < 1:
                raise ConfigError(f"{name}={given!r}: use a whole number, 1 or more")
        Settings(workers, servers, replicas=replicas)  # which refuses impossible copies
        self.workers = workers
        self.servers = servers
        self.most_workers = most_workers
        self.replicas = replicas
        self.users: dict[Any, set[int]] = {}
        """Accelerator -> the threads whose workers compute there."""
        self.scheduler = ""
        """The address of the scheduler, inside the ``with`` block."""
        self._workers: list[ThreadPoolExecutor] = []
        """A thread for each worker, since the first :meth:`run`."""
        self._has_failed = False
        self._is_over = False
        """No standby is started any more."""
        self._shortage: WorkerLost | None = None
        """Why the job never gets all of its workers in this run; None while it may."""
        self.keys = ""
        """The path of the cluster's keys, inside the ``with`` block; empty if this system has none."""
        self._sections: list[Section] = []
        self._key_memory: KeyMemory | None = None
        self._threads: list[threading.Thread] = []
        self._stops: list[Callable[[], None]] = []
        self._sessions: dict[int, WorkerSession] = {}
        self._mine = threading.local()
        self._lock = threading.Lock()
        self._board: Store | None = None
        self._endings: list[OpenStores] = []

    @property
    def board(self) -> Store:
        """Where the workers of allreduce stores meet."""
        with self._lock:
            if self._board is None:
                self._board = HashStore()
            return self._board

    def endings(self) -> OpenStores:
        """Return those stores of the calling thread that no session ends."""
        mine: OpenStores | None = getattr(self._mine, "endings", None)
        if mine is None:
            mine = self._mine.endings = OpenStores()
            self._endings.append(mine)
        return mine

    def __enter__(self) -> LocalCluster:
        with self._lock:  # a thread that creates a store waits for the start
            current.enter(self)
            try:
                self.start()
            except BaseException:
                current.leave()
                raise
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        current.leave()
        self.close(done=error is None)

    def start(self) -> None:
        """Start the scheduler and the servers.

        Raises:
            ConfigError: if there are too few file descriptors for the cluster.
        """
        sizes = max(self.workers, self.most_workers), self.servers
        descriptors.demand(
            f"a cluster of {sizes[0]} workers and {sizes[1]} servers in one process",
            descriptors.of_scheduler(*sizes)
            + self.servers * (1 + self.replicas) * descriptors.of_server(*sizes)
            + sizes[0] * descriptors.of_worker(*sizes)
            + descriptors.SPARE,
        )
        if keys_can_be() and not config.switch("KVPS_INSECURE"):
            self._sections = generate()
            self._key_memory = KeyMemory(self._sections)
            self.keys = self._key_memory.path
        limits = config.limits()
        settings = Settings(
            self.workers,
            self.servers,
            config.silence_max_s(),
            config.drop_grace_s(),
            has_keys=bool(self.keys),
            limits=limits,
            most_workers=self.most_workers,
            replicas=self.replicas,
        )
        transport = ZmqTransport(
            "tcp://127.0.0.1:0",
            watch=True,
            checksums=config.checksums(),
            role=Role.SCHEDULER,
            keys=self._keys_of("scheduler"),
            limits=limits,
        )
        self.scheduler = transport.endpoint
        now = time.monotonic()
        self._drive("scheduler", Scheduler(settings, secrets.token_bytes(16), now, THIS_PROCESS), transport)
        for rank in range(self.servers):
            self._start_server(rank)

    def _start_server(self, rank: int, *, standby: bool = False) -> None:
        """Start a server, or a standby that lies beside it: with copies, each rank counts as a host."""
        keys = self._keys_of("server")
        opened, memory, endpoint = open_transport("tcp://127.0.0.1:0", keys)
        own = own_identity(Role.SERVER, self.scheduler, keys)
        own = replace(own, host=f"{own.host}/{rank}") if self.replicas else own
        identity = replace(own, rank=None if standby else rank, endpoint=endpoint, standby=standby)
        limit = share_bytes(self.servers * (1 + self.replicas))
        core = Server(identity, time.monotonic(), limit, memory, limits=config.limits())
        self._drive(f"standby {rank}" if standby else f"server {rank}", core, opened)

    def _start_standby(self, rank: int) -> None:
        with self._lock:
            if not self._is_over:
                self._start_server(rank, standby=True)

    def _keys_of(self, role: str) -> Keys | None:
        return of(self._sections, role) if self._sections else None

    def session(self) -> WorkerSession:
        """Return the calling thread's worker; create it if the thread is new.

        Raises:
            ConfigError: if all workers are taken by other threads.
            WorkerLost: if another worker has ended without a store, so that the job never begins.
        """
        mine: WorkerSession | None = getattr(self._mine, "session", None)
        if mine is not None and not mine.is_over:
            return mine
        with self._lock:
            if self._shortage is not None:
                raise self._shortage
            taken = len(self._sessions)
            is_added = self.most_workers > 0 and taken >= self.workers  # the scheduler has a seat, or refuses
            if taken >= self.workers and not is_added:
                raise ConfigError(
                    f"all {self.workers} workers of this LocalCluster are taken: each thread that "
                    "creates a store is a worker; use LocalCluster(workers=...) with more workers"
                )
            rank = getattr(self._mine, "rank", None)
            session = worker_session(
                self.scheduler,
                None if is_added else taken if rank is None else rank,
                is_replaceable=False,  # nobody starts a thread that raised again
                keys=self._keys_of("worker"),
            )
            self._sessions[id(session)] = session
        self._mine.session = session
        return session

    def run(self, work: Callable[..., T], *args: Any) -> list[T]:
        """Call ``work(rank, *args)`` in one thread per worker; return the results by rank.

        May be called again: each worker keeps its thread, its rank and its stores. After an error the workers
        have left, and it cannot be called again.

        Raises:
            BaseException: the first error of a worker; the other workers then end with WorkerLost.
            ConfigError: if a worker has raised in an earlier call.
        """
        if self._has_failed:
            raise ConfigError("a worker of this LocalCluster has failed; create another LocalCluster")
        errors: list[BaseException] = []

        def work_as(rank: int) -> T:
            self._mine.rank = rank
            try:
                result = work(rank, *args)
            except BaseException as error:
                errors.append(error)  # before the others can have one for that reason
                reason = f"raised {type(error).__name__}"
                self._check_joined(rank, reason)
                self._leave(done=False, reason=reason)
                raise
            self._check_joined(rank, "returned")
            return result

        self._shortage = None
        if not self._workers:
            self._workers = [
                ThreadPoolExecutor(1, thread_name_prefix=f"worker {rank}") for rank in range(self.workers)
            ]
        futures = [worker.submit(work_as, rank) for rank, worker in enumerate(self._workers)]
        wait(futures)
        if errors:
            self._has_failed = True
            raise errors[0]
        return [future.result() for future in futures]

    def _check_joined(self, rank: int, reason: str) -> None:
        """Let nobody wait for the calling thread's worker if it ends before it has joined the job."""
        mine: WorkerSession | None = getattr(self._mine, "session", None)
        if mine is not None and mine.info.workers:
            return
        with self._lock:
            if self._shortage is None:
                self._shortage = WorkerLost(
                    f"worker {rank} of this LocalCluster {reason} before the job began: a job begins when "
                    f"all of its workers ({self.workers}) have created a dist store. Create one in each "
                    "worker, or use LocalCluster(workers=...) with fewer workers"
                )
            for session in self._sessions.values():
                # A job cannot have begun without the calling thread, whatever the scheduler has
                # told the others.
                if mine is None or not session.info.workers:
                    session.give_up(self._shortage)

    def leave(self) -> None:
        """Flush and leave as the calling thread's worker; rounds close without it."""
        self.endings().end(is_done=True)
        session: WorkerSession | None = getattr(self._mine, "session", None)
        if session is not None and not session.is_over:
            session.flush(TIMEOUT_S)
            session.leave(done=True, exit_code=0, reason="shutdown()")

    def _leave(self, done: bool, reason: str) -> None:
        with suppress(KvpsError):
            self.endings().end(done)
        session: WorkerSession | None = getattr(self._mine, "session", None)
        if session is not None:
            session.leave(done, 0 if done else 1, reason)

    def close(self, done: bool = True) -> None:
        """End the workers and thereby the job; ``done`` if there was no error."""
        for worker in self._workers:
            worker.shutdown()
        for endings in self._endings:
            with suppress(KvpsError):
                endings.end(done)
        for session in self._sessions.values():
            if done:
                with suppress(KvpsError):
                    session.flush(TIMEOUT_S)
            session.leave(done, 0 if done else 1, "the cluster is closed")
        joined = [session for session in self._sessions.values() if session.info.workers]
        unfinished = len(joined) < self.workers or not done
        if unfinished:
            for stop in self._stops:
                stop()
        for scheduler in self._threads[:1]:
            scheduler.join(END_MAX_S)
        with self._lock:
            self._is_over = True
        # The scheduler has told all that it knew of. A spare that had not reached it would ask for a minute.
        for thread, stop in zip(self._threads, self._stops, strict=True):
            if thread.name.startswith("kvps standby"):
                stop()
        for thread in self._threads:
            thread.join(END_MAX_S)
        if self._key_memory is not None:
            self._key_memory.close()
            self._key_memory = None
        if any(thread.is_alive() for thread in self._threads):
            for stop in self._stops:
                stop()
            raise Timeout(f"the cluster did not end in {END_MAX_S:.0f} s; its threads were stopped")

    def _drive(self, name: str, core: Core, transport: Transport) -> None:
        inbox: Inbox[Any] = Inbox(transport)
        if isinstance(core, Server):
            inbox.put(Server.start)
        timeline, lens = _lens(core, transport)
        listener = _Listener(lambda: self._start_standby(int(name.rpartition(" ")[2])), inbox)

        role, _, rank = name.partition(" ")
        speaker = logs.Speaker(role, int(rank) if rank else None)

        def run() -> None:
            logs.speak_in_thread_as(lambda: speaker)
            try:
                drive(core, transport, inbox, listener, lens=lens)
                if timeline is not None:
                    timeline.close()
            except Exception:  # nobody joins this thread for its result: the log must have it
                log.exception("%s failed", name)
            finally:
                transport.close(0.5)

        thread = threading.Thread(target=run, name=f"kvps {name}", daemon=True)
        self._threads.append(thread)
        self._stops.append(lambda: inbox.put(lambda core, now: core.outbox.append(Exit(0, "stopped"))))
        thread.start()


class _Listener(Listener):
    """In a cluster with copies: begins a standby where a server has got its seat, and looks into suspects."""

    def __init__(self, begin: Callable[[], None], inbox: Inbox[Any]) -> None:
        self._begin, self._inbox, self._suspicions = begin, inbox, Suspicions()

    def finish(self, effect: Finish) -> None:
        if effect.ticket == SEATED:
            threading.Thread(target=self._begin, daemon=True).start()
        elif isinstance(effect.value, Suspect):
            self._suspicions.look_into(effect.value, self._inbox)


def _lens(core: Core, transport: Transport) -> tuple[Any, Lens]:
    """Return the lens of a scheduler or a server; of a scheduler with the timeline that it gathers."""
    lenses = annexes.load("lenses")
    if isinstance(core, Server):
        counts = core.counts
        return None, lenses.member_lens(Role.SERVER, transport, core.member.envelope, lambda: counts)
    timeline = lenses.Timeline(transport, config.text("KVPS_TIMELINE"))
    return timeline, timeline.lens
