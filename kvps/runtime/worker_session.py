"""A process's membership of a cluster as a worker: a core, its loop in a thread, and the end of both.

All dist stores of a process share one session. It begins with the first store and ends with the
process, or with :func:`kvps.shutdown`. A process that ends well leaves the job. A process that
ends with an exception, or with an exit code other than 0, is lost, so that half a run does not
count as a whole run. Under kvps-worker the supervisor tells the scheduler how the command ended.

The core belongs to the loop's thread. Other threads make calls, and read :attr:`WorkerSession.info`.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn, TypeVarTuple

import torch

from kvps import annexes, config
from kvps.core.effects import Copied, Exit, Finish
from kvps.core.membership_client import JOIN_MAX_S, Identity
from kvps.core.worker.calls import Call, Flush
from kvps.core.worker.cluster_info import RESIZED, ClusterInfo
from kvps.core.worker.timeout_report import ASK_SCRIPT
from kvps.core.worker.worker import Worker
from kvps.errors import ConfigError, KvpsError, SchedulerLost
from kvps.net import descriptors
from kvps.net.driver import LOOK_EVERY_S, Door, Inbox, Listener, drive
from kvps.net.shm.transport import SharedMemory
from kvps.net.transport import Transport
from kvps.net.zap import Keys
from kvps.observe import logs
from kvps.protocol.envelope import Role
from kvps.runtime.device import Staging
from kvps.runtime.member_process import own_identity
from kvps.runtime.threads import waited_tickets
from kvps.runtime.ticket import TURNS, Ticket, is_profiled, profiled
from kvps.runtime.transport import open_transport
from kvps.tensors import Memory

log = logging.getLogger("kvps")
Ts = TypeVarTuple("Ts")
LEAVE_MAX_S = 5.0
"""Seconds for which the end of a process waits for the scheduler to hear of it."""


class WorkerSession(Listener):
    """One worker of one cluster, in this process.

    Args:
        identity: the worker's name and seat.
        transport: sends and receives its packets; the loop closes it.
        memory: where values lie that travel.
        is_replaceable: whether another process may be started in its place if it fails.
    """

    def __init__(
        self, identity: Identity, transport: Transport, memory: Memory, *, is_replaceable: bool = True
    ) -> None:
        lenses, now = annexes.load("lenses"), time.monotonic()
        header = {"role": "worker", "now": now, "identity": lenses.identity_of(identity)}
        self._record = lenses.recorder(
            {**header, "threads": torch.get_num_threads()}, annexes.load("recorded-values").dumps
        )
        self._core = Worker(identity, now, lenses.recorded(memory, self._record))
        self._callbacks: list[Callable[[Any], object]] = []
        self.scheduler = identity.scheduler
        """The scheduler's endpoint."""
        self.pid = os.getpid()
        self.staging = Staging(memory.extent if isinstance(memory, SharedMemory) else (0, 0))
        TURNS.interval_s = config.switch_interval_s()
        self._is_replaceable = is_replaceable
        self._stores: dict[str, int] = {}
        self.names: dict[str, str] = {}
        """Name of each open store -> its type."""
        self.handles: Counter[str] = Counter()
        """Name of each open store -> how many objects of this process use it."""
        self.published: dict[str, int] | None = {}
        """Name of each publication -> its last version that is known here."""
        self._transport = transport
        self._lens = lenses.member_lens(
            Role.WORKER, transport, self._core.member.envelope, below=self._record
        )
        self._inbox: Inbox[Worker] = Inbox(transport)
        self._tickets: dict[int, Ticket] = {}
        self._numbers = itertools.count(1)
        self._over: KvpsError | None = None
        self._thread = threading.Thread(target=self._run, name="kvps", daemon=True)
        self._thread.start()
        lenses.dump_at_signal(self._inbox, self._record)

    # --- the loop's side ------------------------------------------------------------------------

    def _run(self) -> None:
        logs.speak_in_thread_as(self.speaker)
        error: KvpsError = SchedulerLost("this process has left its cluster")
        try:
            self._inbox.put(Worker.start)
            with torch.no_grad():  # values may be parameters
                drive(self._core, self._transport, self._inbox, self, lens=self._lens)
            if self._record is not None:
                self._record.close(self._core)
            error = self._core.member.end or error
        except KvpsError as raised:
            error = raised
        except BaseException as raised:  # the loop must not end and leave callers waiting
            log.exception("the kvps loop failed")
            if self._record is not None:
                self._record.dump_once(self._core, repr(raised))
            error = KvpsError(f"the kvps loop failed: {raised!r}")
        finally:
            self._over = error
            for number in list(self._tickets):
                self._end(number, None, error)
            self.staging.close()
            self._transport.close(0.2)

    def finish(self, effect: Finish) -> None:
        """End the ticket of a call; or say in which calls the script waits."""
        if effect.ticket == ASK_SCRIPT:
            self._inbox.put(Worker.on_script, self._waited_for())
            return
        if effect.ticket == RESIZED:
            for callback in self._callbacks:
                try:
                    callback(effect.value)
                except Exception:  # the loop goes on
                    log.exception("a callback of on_resize() failed")
            return
        self._end(effect.ticket, effect.value, effect.error)

    def on_resize(self, callback: Callable[[Any], object]) -> None:
        """Call back, in the thread of the loop, with the number of workers each time that it has changed."""
        self._callbacks.append(callback)

    def _waited_for(self) -> tuple[int, ...]:
        """Return the numbers of the calls that the whole script waits in; 0 stands for a call that
        has just ended."""
        numbers = {id(ticket): number for number, ticket in self._tickets.items()}
        waited = waited_tickets()
        # Those of other sessions, such as of another rank in a LocalCluster, do not concern this one.
        mine = [asked for asked in waited if id(asked) in numbers or asked.is_over]
        return tuple(sorted({numbers.get(id(asked), 0) for asked in mine}))

    def _end(self, number: int, value: object, error: KvpsError | None) -> None:
        ticket = self._tickets.pop(number, None)
        if ticket is not None:
            ticket.end(value, error)
            TURNS.end()

    def copied(self, effect: Copied) -> None:
        """Tell the caller that its values are copied."""
        ticket = self._tickets.get(effect.ticket)
        if ticket is not None:
            ticket.copied()

    # --- the user's side ------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This worker's rank."""
        return self.info.rank

    @property
    def info(self) -> ClusterInfo:
        """The newest snapshot of the cluster that the loop has published."""
        return self._core.info

    def speaker(self) -> logs.Speaker:
        """Return the role and rank that log lines carry."""
        return logs.Speaker("worker", self.info.rank if self.info.workers else None)

    @property
    def is_over(self) -> bool:
        """Whether the loop has ended."""
        return self._over is not None

    def next_name(self, prefix: str) -> str:
        """Return a name for a store, numbered by order of creation: the same on every worker."""
        number = self._stores.get(prefix, 0)
        self._stores[prefix] = number + 1
        return f"{prefix}-{number}"

    def figures(self, store: str) -> dict[str, float]:
        """Return the numbers of a store: a copy that the loop makes, or the last if the loop has ended."""
        copied: list[dict[str, float]] = []
        done = threading.Event()

        def copy(core: Worker, now: float) -> None:
            copied.append({**core.figures(store), "reconnects": self._transport.reconnects})
            done.set()

        self._inbox.put(copy)
        while not done.wait(LOOK_EVERY_S):
            if not self._thread.is_alive():  # so nobody else reads or writes the core
                return self._core.figures(store)
        return copied[0]

    def close_store(self, name: str) -> None:
        """No object of this process uses a store any more; nobody waits."""
        if os.getpid() == self.pid:
            self._inbox.put(Worker.on_close, name)

    def join(self, timeout_s: float) -> None:
        """Wait until all seats of the cluster are taken.

        Raises:
            ConfigError: in a process that was forked from the one that made the session.
            KvpsError: if that cannot be, or not in time.
        """
        if os.getpid() != self.pid:
            raise ConfigError(
                f"process {os.getpid()} was forked from process {self.pid}, which is a worker already, and "
                "cannot be the same worker. Fork before the first store is created, and create stores in "
                "one of the processes"
            )
        self._begin(Worker.on_join, time.monotonic() + timeout_s).wait()

    def call(self, call: Call, timeout_s: float) -> Ticket:
        """Begin a call.

        Raises:
            ConfigError: in a process that was forked from the one that made the session.
        """
        if os.getpid() != self.pid:
            raise ConfigError(
                f"this store was made in process {self.pid} and is used in {os.getpid()} after a "
                "fork; use stores only in the process that created them (DataLoader workers should "
                "return data, not push)"
            )
        deadline = time.monotonic() + timeout_s
        if is_profiled():
            with profiled(call.title):
                return self._begin(Worker.on_call, call, deadline)
        return self._begin(Worker.on_call, call, deadline)

    def stop_waiting(self, ticket: Ticket) -> None:
        """Let a call end for its caller, which was interrupted, as at its deadline; wait until it has."""
        ended = threading.Event()
        ticket.when_over(ended.set)
        for number in [number for number, own in list(self._tickets.items()) if own is ticket]:
            self._inbox.put(Worker.on_interrupt, number)
            ended.wait(LEAVE_MAX_S)

    def _begin(self, door: Door[Worker, int, *Ts], *arguments: *Ts) -> Ticket:
        """Call a door of the core with a number of its own; return the ticket of that number."""
        number, ticket = next(self._numbers), Ticket(self._lens.watch)
        TURNS.begin()
        self._tickets[number] = ticket
        self._inbox.put(door, number, *arguments)
        if self._over is not None:
            self._end(number, None, self._over)
        return ticket

    def leave(self, done: bool, exit_code: int, reason: str, say: bool = True) -> None:
        """End this process's part in the job; ``say`` tells the scheduler."""
        if os.getpid() != self.pid:
            return
        if self.is_over:
            self._thread.join(LEAVE_MAX_S)  # it may be closing its sockets
            return
        if say:
            self._inbox.put(Worker.leave, done, exit_code, reason, self._is_replaceable)
            self._thread.join(LEAVE_MAX_S)
            if self._thread.is_alive():
                log.warning("the scheduler did not answer LEAVE in %.0f s", LEAVE_MAX_S)
        self._inbox.put(lambda core, now: core.outbox.append(Exit(0, "left")))
        self._thread.join(LEAVE_MAX_S)

    def give_up(self, error: KvpsError) -> None:
        """End the loop; its calls, and all later ones, raise ``error``."""

        def end(core: Worker, now: float) -> None:
            raise error

        self._inbox.put(end)

    def flush(self, timeout_s: float) -> None:
        """Wait until every push of every store is acknowledged.

        Raises:
            KvpsError: if one cannot be.
        """
        for name in list(self.names):
            self.call(Flush(name), timeout_s).wait()


def worker_session(
    scheduler: str,
    rank: int | None = None,
    incarnation: int = 0,
    job: bytes = bytes(16),
    join_max_s: float = JOIN_MAX_S,
    *,
    is_replaceable: bool = True,
    keys: Keys | None = None,
) -> WorkerSession:
    """Return a session of this process with the cluster at ``scheduler``."""
    identity = replace(
        own_identity(Role.WORKER, scheduler, keys),
        rank=rank,
        incarnation=incarnation,
        job=job,
        join_max_s=join_max_s,
        is_enrolled=keys is not None and keys.is_enrolled,
    )
    descriptors.demand("a worker", descriptors.of_worker(1, 1) + descriptors.SPARE)
    transport, memory, _ = open_transport(keys=keys)
    return WorkerSession(identity, transport, memory, is_replaceable=is_replaceable)


class ExitStatus:
    """The exit code of this process, noted by hooks and read by the exit handler."""

    def __init__(self) -> None:
        self.exit_code = 0
        self.is_own = False
        """Python would end the process with another code."""
        self._hooks: tuple[object, object] = (None, None)
        """The newest that were set here, of exceptions and of exits."""

    def watch(self) -> None:
        """Hook uncaught exceptions and calls of sys.exit; hooks that are set already are called as well."""
        excepthook, leave = sys.excepthook, sys.exit

        # Functions of this call, and not methods: a script may have hooked behind an earlier
        # watch(), and calls it.
        def on_exception(*exception: Any) -> None:
            error = exception[1]
            self.exit_code = error.exit_code if isinstance(error, KvpsError) else 1
            self.is_own = self.exit_code != 1
            excepthook(*exception)

        def on_exit(status: Any = None) -> NoReturn:
            if status is None:
                self.exit_code = 0
            else:
                self.exit_code = status if isinstance(status, int) else 1
            leave(status)

        on_hooked, on_left = self._hooks
        if excepthook is not on_hooked:
            sys.excepthook = on_hooked = on_exception
        if leave is not on_left:
            sys.exit = on_left = on_exit
        self._hooks = on_hooked, on_left


ending = ExitStatus()


def leave_at_exit(session: WorkerSession, is_guarded: bool, timeout_s: float) -> None:
    """Flush and leave ``session`` when the process ends; the process fails if a push is lost then.

    Args:
        session: the process's session.
        is_guarded: a supervisor tells the scheduler how this process ended.
        timeout_s: seconds that the flush may take.
    """
    ending.watch()

    def end() -> None:
        if session.is_over:
            return
        code = ending.exit_code
        if code == 0:
            try:
                session.flush(timeout_s)
            except KvpsError as error:
                log.error("at exit: %s", error)  # the text says all
                code = 1
        session.leave(code == 0, code, "", say=not is_guarded)
        if code != ending.exit_code or ending.is_own:
            end_process(code)

    atexit.register(end)


def end_process(code: int) -> NoReturn:
    """End this process with ``code``: an exit handler has no other way to say that it failed."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)
