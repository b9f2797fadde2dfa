"""The engine: one thread per process that negotiates collectives and has them carried out.

The calling threads put operations into the outbox. The engine's thread takes part in a cycle of
the negotiation whenever the outbox has something or another rank has begun a cycle; so an idle job
sends nothing. It gives the turns of all ranks to the coordinator, and begins the transfers of what
is decided.

After an error that concerns the whole job (a lost rank, a server) every operation fails with it,
and so does every later one, until ``shutdown()`` and ``init()``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from kvps.compat.horovod.common.exceptions import HorovodInternalError
from kvps.compat.horovod.engine.cycles import Cycles
from kvps.compat.horovod.engine.execution import Execution, Executor, Operation
from kvps.compat.horovod.engine.transfers import Transfers
from kvps.compat.horovod.negotiation.coordinator import (
    AllJoined,
    Coordinator,
    Decision,
    Execute,
    Over,
    Refuse,
    fused,
)
from kvps.compat.horovod.negotiation.request import CollectiveRequest, Key, Part, Turn, pack, unpack
from kvps.errors import KvpsError
from kvps.phrases import ranks_in_words
from kvps.torch.distributed.mailbox import Board
from kvps.torch.distributed.ordered_executor import OrderedExecutor
from kvps.torch.distributed.work import Work

log = logging.getLogger("kvps")
WAIT_S = 0.5
"""Seconds that a thread waits for an operation before it says so to the other ranks."""
LOOK_EVERY_S = 0.25
END_MAX_S = 60.0
"""Seconds that operations under way may take at the end."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The settings of an engine.

    Attributes:
        fusion_bytes: the size up to which small operations travel together; the same on every rank.
        stall_warn_s: seconds that an operation may wait for ranks before a log line names them; 0 for never.
        stall_fail_s: seconds until it fails; 0 for never.
        timeout_s: seconds that ranks have to begin, and that each transfer may take.
    """

    fusion_bytes: int = 32 << 20
    stall_warn_s: float = 60.0
    stall_fail_s: float = 0.0
    timeout_s: float = 300.0


class _Transfer(Work):
    """One of the transfers of a bucket; the last that ends delivers the results."""

    def __init__(self, ended: Callable[[BaseException | None], None]) -> None:
        super().__init__("transfer", [])
        self._ended_with = ended

    def end(self, error: BaseException | None = None) -> None:
        """The transfer is over."""
        super().end(error)
        self._ended_with(error)


class Engine:
    """The collectives of one process; it waits until all ranks have begun theirs.

    Args:
        board: of this process.
        limits: its settings.
    """

    def __init__(self, board: Board, limits: Limits) -> None:
        self._board, self._limits = board, limits
        self.rank, self.size = board.rank, board.workers
        self._wake = threading.Event()
        self._lock = threading.Lock()
        self._outbox: list[CollectiveRequest] = []
        self._mine: dict[Key, Operation] = {}
        """Operations that are not over, by process set and name."""
        self._threads: set[int] = set()
        """The threads that have requested operations."""
        self._waits_for: Key | None = None
        self._join: Operation | None = None
        self._is_join_said = False
        self._over = ""
        """Why this rank leaves the negotiation; empty while it does not."""
        self._error: BaseException | None = None
        self._under_way = 0
        self._idle = threading.Condition(self._lock)
        self._warned: set[Key] = set()
        self._coordinator = Coordinator(self.size)
        self._executor = OrderedExecutor()
        self._cycles = Cycles(board, "negotiation", limits.timeout_s, self._wake.set)
        self._planner = Executor(Transfers(board, "collectives", limits.timeout_s), self.rank, self.size)
        self._thread = threading.Thread(target=self._run, name="kvps negotiation", daemon=True)
        self._thread.start()

    # --- the calling threads' side --------------------------------------------------------------

    @property
    def sets(self) -> dict[int, tuple[int, ...]]:
        """Number of each process set -> its ranks."""
        return dict(self._coordinator.sets)

    def submit(self, operation: Operation) -> None:
        """Request an operation.

        Raises:
            ValueError: if an operation of this name is not over.
            HorovodInternalError: if the engine has failed or ended.
        """
        key = operation.request.key
        with self._lock:
            self._demand_running()
            if key in self._mine:
                raise ValueError(
                    f"{operation.request.kind} {key[1]!r}: an operation of this name is not over on rank "
                    f"{self.rank}; wait for it with synchronize(), or give another name="
                )
            operation.since = time.monotonic()
            self._threads.add(threading.get_ident())
            self._mine[key] = operation
            self._outbox.append(operation.request)
            self._waits_for = None
        self._wake.set()

    def wait(self, operation: Operation) -> object:
        """Wait for the end of an operation, and return its result.

        Raises:
            HorovodInternalError: if it failed.
        """
        if not operation.wait_for(WAIT_S):
            with self._lock:
                if self._threads == {threading.get_ident()} and not operation.is_decided:
                    self._waits_for = operation.request.key
            self._wake.set()
            operation.wait_for(None)
        return operation.result()

    def join(self) -> object:
        """Take part with zeros until every rank has joined; return the last rank that joined.

        Raises:
            HorovodInternalError: if the engine fails.
        """
        with self._lock:
            self._demand_running()
            if self._join is not None:
                raise HorovodInternalError("join() has been called on this rank and is not over")
            operation = self._join = Operation(CollectiveRequest("join", "barrier"))
            self._is_join_said = False
        self._wake.set()
        operation.wait_for(None)
        return operation.result()

    def drain(self) -> None:
        """Wait until all operations of this rank are over, or the engine has failed; a minute at most."""
        with self._idle:
            self._idle.wait_for(lambda: not self._mine or self._error is not None, END_MAX_S)

    def close(self) -> None:
        """Leave the negotiation: the operations that are not decided fail on every rank."""
        with self._lock:
            self._over = self._over or "it has called hvd.shutdown()"
        self._wake.set()
        self._thread.join(END_MAX_S)
        with self._idle:
            self._idle.wait_for(lambda: not self._under_way, END_MAX_S)
        self._executor.close()
        try:
            self._board.close()
        except KvpsError as error:  # the operations have told it
            log.debug("shutdown: %s", error)

    def _demand_running(self) -> None:
        if self._error is not None:
            raise HorovodInternalError(str(self._error)) from self._error

    # --- the engine's thread --------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._error is None:
                self._cycles.begin()
                self._await_reason()
                turns = self._cycles.exchange(pack(self._turn()))
                self._take(self._coordinator.take(list(enumerate(map(unpack, turns)))))
        except KvpsError as error:  # a rank or a server is lost, which the other ranks find, too
            self._fail(error)
        except BaseException as error:  # every operation must hear of it, here and on the other ranks
            log.exception("the negotiation of collectives failed")
            self._fail(error)
            with suppress(KvpsError):
                self._cycles.begin()
                self._cycles.exchange(pack(Turn(over=f"its negotiation failed: {error!r}")))

    def _await_reason(self) -> None:
        """Wait until this rank or another one has something to say."""
        while True:
            self._wake.clear()
            with self._lock:
                has_news = bool(self._outbox or self._over) or self._waits_for is not None
                has_news = has_news or (self._join is not None and not self._is_join_said)
            if has_news or self._cycles.has_begun_elsewhere():
                return
            self._look_for_stalls()
            self._wake.wait(LOOK_EVERY_S)

    def _turn(self) -> Turn:
        with self._lock:
            requests, self._outbox = tuple(self._outbox), []
            waits_for, self._waits_for = self._waits_for, None
            has_joined = self._join is not None and not self._is_join_said
            self._is_join_said = self._is_join_said or has_joined
            return Turn(requests, has_joined, self._over, waits_for)

    def _take(self, decisions: Sequence[Decision]) -> None:
        runs: list[tuple[Execute, int]] = []
        for decision in decisions:
            match decision:
                case Execute():
                    runs.append((decision, sum(map(_bytes, decision.first.parts))))
                case Refuse(key, ranks, reason):
                    if self.rank in ranks:
                        self._end(key, HorovodInternalError(reason))
                case AllJoined(last):
                    self._end_join(last)
                case Over(rank, reason):
                    self._fail(HorovodInternalError(f"rank {rank} has left: {reason}"))
        for bucket in fused(runs, self._limits.fusion_bytes):
            self._carry_out(bucket)

    def _end_join(self, last: int) -> None:
        with self._lock:
            operation, self._join = self._join, None
        assert operation is not None
        operation.tensors = []
        operation.is_list = False
        operation.deliver([last])
        operation.end()

    def _carry_out(self, bucket: Sequence[Execute]) -> None:
        """Begin the transfers of a bucket."""
        keys = [run.first.key for run in bucket]
        with self._lock:
            mine = {key: self._mine[key] for key in keys if key in self._mine}
        for run in bucket:
            operation = mine.get(run.first.key)
            if operation is not None:
                operation.is_decided = True
                if run.process_set:
                    operation.deliver([run.process_set])
        execution = self._planner.plan(bucket, mine)
        ended = self._ending(execution, list(mine))
        for track, steps in execution.plans:
            self._executor.begin(track, steps, _Transfer(ended))

    def _ending(self, execution: Execution, keys: Sequence[Key]) -> Callable[[BaseException | None], None]:
        """Return the function that each transfer of a bucket calls at its end.

        ``keys`` belong to operations that this rank has requested. A rank that has joined may request an
        operation of the same name before its zeros have been summed, and that operation is not over.
        """
        left = len(execution.plans)
        failure: BaseException | None = None

        def ended(error: BaseException | None) -> None:
            nonlocal left, failure
            with self._lock:
                left -= 1
                failure = failure or error
                if left > 0:
                    return
            self._deliver(execution, keys, failure)
            with self._idle:
                self._under_way -= 1
                self._idle.notify_all()

        with self._lock:
            self._under_way += 1
        if not left:
            ended(None)
        return ended

    def _deliver(self, execution: Execution, keys: Sequence[Key], error: BaseException | None) -> None:
        if error is None:
            try:
                for deliver in execution.deliver:
                    deliver()
            except Exception as raised:  # the caller must hear of it
                error = raised
        for key in keys:
            self._end(key, error)

    def _end(self, key: Key, error: BaseException | None) -> None:
        with self._lock:
            operation = self._mine.pop(key, None)
            self._warned.discard(key)
            self._idle.notify_all()
        if operation is not None:
            operation.end(error)

    def _fail(self, error: BaseException) -> None:
        """End operations that are not decided, and refuse later ones."""
        with self._lock:
            self._error = error
            self._idle.notify_all()
            ended = [operation for operation in self._mine.values() if not operation.is_decided]
            for operation in ended:
                del self._mine[operation.request.key]
            if self._join is not None:
                ended.append(self._join)
                self._join = None
        for operation in ended:
            operation.end(error)

    def _look_for_stalls(self) -> None:
        """Name the ranks that operations of this rank have waited for too long."""
        now, limits = time.monotonic(), self._limits
        for request, absent in self._coordinator.missing():
            operation = self._mine.get(request.key)
            if operation is None or not absent:
                continue
            waited_s = now - operation.since
            told = (
                f"{request.kind} {request.name!r} has waited {waited_s:.0f} s for "
                f"{ranks_in_words(absent)}, which did not request it"
            )
            if limits.stall_fail_s and waited_s > limits.stall_fail_s:
                self._over = f"{told}: the limit is {limits.stall_fail_s:g} s"
                self._wake.set()
                return
            is_new = request.key not in self._warned
            if limits.stall_warn_s and waited_s > limits.stall_warn_s and is_new:
                self._warned.add(request.key)
                log.warning("%s. Make the same operations on every rank", told)


def _bytes(part: Part) -> int:
    count = 1
    for size in part.shape:
        count *= size
    return count * 8
