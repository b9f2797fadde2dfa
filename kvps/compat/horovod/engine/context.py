"""The context of a process: whether ``init()`` was called, its ranks, its process sets, and its engine.

In a process there is one context; inside a LocalCluster each thread that is a worker has its own.

Every ``init()`` forms a *generation*: the processes that hold the seats of the job at this time,
by incarnation, and how often these have called ``init()``. Generations share no store, so a rank
that was started again meets the others with empty stores, and none of the push numbers of its predecessor.
"""

from __future__ import annotations

import atexit
import hashlib
import threading
import time
from collections import Counter
from itertools import count

from kvps import config
from kvps.compat.horovod.common.exceptions import HorovodInternalError
from kvps.compat.horovod.engine.engine import Engine, Limits
from kvps.compat.horovod.engine.execution import Operation
from kvps.errors import WorkerLost
from kvps.phrases import ranks_in_words
from kvps.protocol.envelope import Role
from kvps.runtime import process
from kvps.runtime.current import current as current_cluster
from kvps.runtime.worker_session import WorkerSession, ending
from kvps.torch.distributed.mailbox import Board

NOT_INITIALIZED = "Horovod has not been initialized; use hvd.init()."
"""The beginning of an error's text, as scripts for Horovod compare it."""
ALL_HERE_S = 600.0
"""Seconds that a lost rank has to come back, unless HOROVOD_ELASTIC_TIMEOUT says otherwise."""
TIMEOUT_S = 300.0
LOOK_EVERY_S = 0.1


class Context:
    """The state behind the functions of :mod:`kvps.compat.horovod` in one worker."""

    def __init__(self) -> None:
        self.engine: Engine | None = None
        self._session: WorkerSession | None = None
        self._lock = threading.RLock()
        self._generations: Counter[tuple[int, ...]] = Counter()
        self.numbers: dict[str, count[int]] = {}
        """Prefix of names that are made here -> the next number."""
        self.handles: dict[int, Operation] = {}
        self._next_handle = count()
        self.can_add_sets = False
        """Whether process sets may be added after ``init()``."""

    # --- begin and end --------------------------------------------------------------------------

    def init(self, is_dynamic: bool) -> None:
        """Join the job, and wait for the other ranks; nothing if it was called before.

        Raises:
            HorovodInternalError: if a rank is lost while it waits.
            KvpsError: if the job cannot be joined.
        """
        with self._lock:
            if self.engine is not None:
                return
            limits = _limits()
            session = process.session(limits.timeout_s)
            generation = self._generation(session)
            try:
                board = Board(limits.timeout_s, f"horovod.{generation}")
                engine = Engine(board, limits)
            except WorkerLost as error:
                raise HorovodInternalError(str(error)) from error
            self._session, self.engine = session, engine
            self.numbers, self.handles = {}, {}
            self.can_add_sets = is_dynamic or config.switch("HOROVOD_DYNAMIC_PROCESS_SETS")

    def _generation(self, session: WorkerSession) -> str:
        """Return the name of this generation, when a process holds every seat."""
        limit_s = config.number("HOROVOD_ELASTIC_TIMEOUT", ALL_HERE_S) or ALL_HERE_S
        until = time.monotonic() + limit_s
        while True:
            info = session.info
            held = info.workers_in("held")
            absent = [rank for rank in range(info.workers) if rank not in held]
            if not absent:
                break
            if time.monotonic() > until:
                raise WorkerLost(
                    f"hvd.init(): {ranks_in_words(absent)} did not come back within {limit_s:g} s. Start "
                    "lost ranks again, as kvps-launch --max-restarts does"
                )
            time.sleep(LOOK_EVERY_S)
        lives = tuple([info.incarnation(rank) for rank in range(info.workers)])
        number = self._generations[lives]
        self._generations[lives] += 1
        text = f"{lives}.{number}"
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def shutdown(self) -> None:
        """Leave the negotiation; nothing if there is none."""
        with self._lock:
            engine, self.engine = self.engine, None
        if engine is not None:
            engine.close()

    # --- what there is --------------------------------------------------------------------------

    def running(self) -> Engine:
        """Return the engine.

        Raises:
            ValueError: before ``init()``.
        """
        if self.engine is None:
            raise ValueError(f"{NOT_INITIALIZED} This process has not called it, or has shut down")
        return self.engine

    def neighbours(self) -> list[int]:
        """Return the ranks on this rank's machine, ascending."""
        rank = self.running().rank
        homes = self._homes()
        return [other for other, home in enumerate(homes) if home == homes[rank]]

    def machines(self) -> list[list[int]]:
        """Return the ranks of each machine; machines are in the order of their first rank."""
        homes = self._homes()
        return [[rank for rank, other in enumerate(homes) if other == home] for home in dict.fromkeys(homes)]

    def _homes(self) -> list[tuple[str, int]]:
        self.running()
        assert self._session is not None
        seats = {
            seat.rank: (seat.host, seat.machine)
            for seat in self._session.info.members
            if seat.role == Role.WORKER
        }
        return [seats[rank] for rank in sorted(seats)]

    # --- operations -----------------------------------------------------------------------------

    def name(self, given: str | None, kind: str) -> str:
        """Return the name of an operation: the given, or the next number of this kind."""
        if given is not None:
            return str(given)
        numbers = self.numbers.setdefault(kind, count(1))
        return f"{kind}.noname.{next(numbers)}"

    def submit(self, operation: Operation) -> int:
        """Request an operation; return its handle."""
        self.running().submit(operation)
        handle = next(self._next_handle)
        self.handles[handle] = operation
        return handle

    def poll(self, handle: int) -> bool:
        """Return whether an operation is over.

        Raises:
            ValueError: for a handle that was not made here, or whose result was taken.
        """
        operation = self.handles.get(handle)
        if operation is None:
            raise ValueError(f"Handle {handle} was not created or has been cleared: synchronize() clears it")
        return operation.is_over

    def synchronize(self, handle: int) -> object:
        """Wait for an operation and return its result; None if it was taken before.

        Raises:
            HorovodInternalError: if the operation failed.
        """
        operation = self.handles.get(handle)
        if operation is None:
            return None
        try:
            engine = self.engine
            if engine is not None:
                return engine.wait(operation)
            operation.wait_for(None)
            return operation.result()
        finally:
            self.handles.pop(handle, None)


def _limits() -> Limits:
    warn_s = config.number("HOROVOD_STALL_CHECK_TIME_SECONDS", 60.0)
    fail_s = config.number("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", 0.0)
    is_off = config.switch("HOROVOD_STALL_CHECK_DISABLE")
    return Limits(
        stall_warn_s=0.0 if is_off else warn_s or 0.0,
        stall_fail_s=0.0 if is_off else fail_s or 0.0,
        timeout_s=config.number("HOROVOD_GLOO_TIMEOUT_SECONDS") or TIMEOUT_S,
    )


_of_process = Context()
_of_thread = threading.local()
_is_watched = False


def current() -> Context:
    """Return the context of this process, or of this thread of a LocalCluster."""
    cluster = current_cluster()
    if cluster is None:
        return _of_process
    mine: tuple[object, Context] | None = getattr(_of_thread, "mine", None)
    if mine is None or mine[0] is not cluster:
        mine = _of_thread.mine = (cluster, Context())
    return mine[1]


def begin(is_dynamic: bool) -> Context:
    """Initialise the current context, and have it shut down when a process ends well.

    So the other ranks need not find out that this one has ended.
    """
    global _is_watched
    mine = current()
    mine.init(is_dynamic)
    if not _is_watched and mine is _of_process:
        _is_watched = True
        atexit.register(_at_exit)
    return mine


def _at_exit() -> None:
    if ending.exit_code == 0:
        _of_process.shutdown()
