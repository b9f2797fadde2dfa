"""Handles of collectives in flight: torch's ``Work``, with kvps's errors.

torch asks in two ways. Python calls ``wait()``, which raises the error itself. C++ (the reducer of
DistributedDataParallel, for one) takes a future. A Python future that was given an exception counts as a
success there, so the error goes in by a callback that raises: C++ then sees a RuntimeError whose text is
that of the error.

torch.compile leaves methods marked :func:`uncompiled` alone. torch's other process groups are C++, into which
the compiler cannot look. This one is Python: without a mark, the compiler would follow a collective into
locks and threads. ``torch.compiler.disable`` would say so, too, but it imports the compiler, which takes
seconds of every script that trains without it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._dynamo import eval_frame
from torch.futures import Future

from kvps.errors import Timeout
from kvps.runtime.threads import WAITS

F = TypeVar("F", bound=Callable[..., Any])
REASON = "a collective of the backend kvps runs outside of the graph"


def uncompiled(function: F) -> F:
    """Mark a function: compiled code calls it as it is, with all that it calls."""
    marks = {
        "_torchdynamo_disable": True,
        "_torchdynamo_disable_msg": REASON,
        "_torchdynamo_disable_recursive": True,
    }
    for name, value in marks.items():
        setattr(function, name, value)
    skip = eval_frame._FrameAction.SKIP
    strategy = eval_frame._FrameExecStrategy(skip, skip)
    eval_frame.set_code_exec_strategy(function.__code__, strategy)
    return function


class Work(dist.Work):
    """One collective under way.

    Args:
        name: the operation, for errors.
        result: what the future holds at the end.
        source: whose values a ``recv`` brings; None for other operations.
    """

    def __init__(self, name: str, result: Sequence[torch.Tensor], source: int | None = None) -> None:
        super().__init__()
        self._name = name
        self._result = list(result)
        self._source = source
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._wakes: list[Callable[[], None]] = []

    def end(self, error: BaseException | None = None) -> None:
        """The collective is over: done, or failed with ``error``."""
        with self._lock:
            self._error = error
            self._ended.set()
            wakes, self._wakes = self._wakes, []
        for wake in wakes:
            # Callbacks of the future run with it, and may wait for other collectives: that
            # must not keep those from going on.
            threading.Thread(target=wake, name="kvps callback", daemon=True).start()

    def when_over(self, then: Callable[[], None]) -> None:
        """Call ``then`` when the collective is over; at once if it is."""
        with self._lock:
            if not self._ended.is_set():
                self._wakes.append(then)
                return
        then()

    def stand_for(self, result: Sequence[torch.Tensor]) -> None:
        """Make :meth:`result` the result of the whole of which this is the last part."""
        self._result = list(result)

    @uncompiled
    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until the collective is done; return True.

        Args:
            timeout: how long; 0 for as long as the group's timeout lets it take.

        Raises:
            KvpsError: if it failed: WorkerLost, ServerLost, Timeout, ...
        """
        limit_s = timeout.total_seconds()
        if limit_s <= 0:
            self._await()
        elif not self._ended.wait(limit_s):
            raise Timeout(
                f"{self._name} is not done after {limit_s:g} s, and continues. Wait again, or find the "
                "rank that did not call it"
            )
        if self._error is not None:
            raise self._error
        return True

    def _await(self) -> None:
        """Wait until the executor ends the collective."""
        self._ended.wait()

    @uncompiled
    def synchronize(self) -> None:
        """Wait; nothing is left to a stream."""
        self.wait()

    @uncompiled
    def is_completed(self) -> bool:
        """Whether the collective is over, well or not."""
        return self._ended.is_set()

    @uncompiled
    def is_success(self) -> bool:
        """Whether it is over and did not fail."""
        return self._ended.is_set() and self._error is None

    @uncompiled
    def exception(self) -> BaseException | None:
        """The error that it failed with."""
        return self._error

    @uncompiled
    def result(self) -> list[torch.Tensor]:
        """Return the tensors that it fills."""
        return self._result

    def _source_rank(self) -> int:
        if self._source is None:
            raise RuntimeError(f"{self._name} has no source rank; only recv has")
        return self._source

    @uncompiled
    def get_future_result(self) -> Future[int]:
        """Return a future that never fails: 0 if the collective was done, 1 at a Timeout, 2 for other errors.

        These are the numbers of torch's WorkResult.
        """
        source: Future[None] = Future()
        result = source.then(lambda _: _result_of(self._error))
        self.when_over(lambda: source.set_result(None))
        return result

    @uncompiled
    def get_future(self) -> Future[Any]:
        """Return a future of :meth:`result`."""
        source: Future[None] = Future()

        def settle(_: Future[None]) -> list[torch.Tensor]:
            if self._error is not None:
                raise self._error
            return self._result

        future = source.then(settle)
        self.when_over(lambda: source.set_result(None))
        return future


def all_of(name: str, works: Sequence[Work]) -> Work:
    """Return a work that is over when all of ``works`` are, and fails with the first error among them."""
    whole = Work(name, [tensor for work in works for tensor in work.result()])
    left = [len(works)]
    lock = threading.Lock()

    def over() -> None:
        with lock:
            left[0] -= 1
        if left[0] == 0:
            whole.end(next((work.exception() for work in works if work.exception()), None))

    if not works:
        whole.end()
    for work in works:
        work.when_over(over)
    return whole


WAITS[Work._await.__code__] = lambda work: None if work.is_completed() else ()


def _result_of(error: BaseException | None) -> int:
    if error is None:
        return 0
    return 1 if isinstance(error, Timeout) else 2
