"""Tickets and handles: what a call returns, and a session completes; and the turns of threads meanwhile."""

from __future__ import annotations

import functools
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from kvps.errors import KvpsError

TIMEOUT_S = 300.0
"""Default limit of a call, in seconds."""


class CallWatch(Protocol):
    """Hears how long the script waits."""

    @property
    def clock(self) -> Callable[[], int]:
        """Returns nanoseconds."""

    def waited(self, begin: int, end: int) -> None:
        """The calling thread has waited."""


is_profiled: Callable[[], bool] = torch._C._autograd._profiler_enabled
"""Whether a profiler of torch is active in this thread."""


def profiled(what: str) -> AbstractContextManager[object]:
    """Return a range ``kvps::WHAT`` of torch.profiler, for a call ``WHAT()``."""
    name = what.partition("(")[0]
    return torch.profiler.record_function(f"kvps::{name}")


class Ticket:
    """The end of a call: the calling thread waits for it, and the loop's thread announces it."""

    def __init__(self, watch: CallWatch | None = None) -> None:
        self._watch = watch
        # Locks that are released then, and not Events: each call has a ticket, and an Event is
        # made, set and waited for by Python functions.
        self._copied, self._ended = threading.Lock(), threading.Lock()
        self._copied.acquire()
        self._ended.acquire()
        self._is_copied = self._is_ended = False
        self._uncopied: KvpsError | None = None
        """The error of the call before its values were copied."""
        self.value: object = None
        self.error: KvpsError | None = None
        self._lock = threading.Lock()
        self._on_error: Callable[[KvpsError], None] | None = None
        self._then: list[Callable[[], object]] = []

    def copied(self) -> None:
        """The call's values are copied."""
        with self._lock:
            if not self._is_copied:
                self._is_copied = True
                self._copied.release()

    def end(self, value: object, error: KvpsError | None) -> None:
        """The call is over."""
        self.value, self.error = value, error
        with self._lock:
            if not self._is_copied:
                self._uncopied = error
                self._is_copied = True
                self._copied.release()
            if not self._is_ended:
                self._is_ended = True
                self._ended.release()
            if self._on_error is not None:
                self._tell()
            then, self._then = self._then, []
        for tell in then:
            tell()

    def when_over(self, tell: Callable[[], object]) -> None:
        """Call ``tell`` when the call is over: now if it is, else in the loop's thread.

        It must not block there.
        """
        with self._lock:
            if not self._is_ended:
                self._then.append(tell)
                return
        tell()

    def on_error(self, tell: Callable[[KvpsError], None]) -> None:
        """Call ``tell`` with the error of the call, if it fails after its values are copied."""
        with self._lock:
            self._on_error = tell
            self._tell()

    def _tell(self) -> None:
        late = self.error is not None and self._uncopied is None
        if self._is_ended and late and self._on_error is not None:
            assert self.error is not None
            self._on_error(self.error)

    @property
    def is_over(self) -> bool:
        """Whether the call has ended."""
        return self._is_ended

    def _await(self, gate: threading.Lock) -> None:
        """Wait until ``gate`` is free, and tell a timeline and a profiler that are there."""
        watch = self._watch
        began = 0 if watch is None else watch.clock()
        if is_profiled():
            with profiled("wait"), gate:
                pass
        else:
            with gate:
                pass
        if watch is not None:
            watch.waited(began, watch.clock())

    def wait_copied(self) -> None:
        """Wait until the caller may reuse its values.

        Raises:
            KvpsError: if the call failed before that.
        """
        if not self._is_copied:
            self._await(self._copied)
        if self._uncopied is not None:
            raise self._uncopied

    def wait(self) -> object:
        """Wait for the end; the core ends every call by its deadline.

        Raises:
            KvpsError: if the call failed.
        """
        if not self._is_ended:
            self._await(self._ended)
        if self.error is not None:
            self.error.was_raised = True
            raise self.error
        return self.value


def finished(value: object = None, error: KvpsError | None = None) -> Ticket:
    """Return the ticket of a finished call that returned ``value``, or failed with ``error``."""
    ticket = Ticket()
    ticket.end(value, error)
    return ticket


class Handle:
    """The user's end of a call made with ``async_op=True``.

    Example:
        >>> handle = kv.push("w", gradient, async_op=True)  # doctest: +SKIP
        >>> handle.wait()  # doctest: +SKIP
    """

    def __init__(self, ticket: Ticket, result: Callable[[], object], before: Sequence[Ticket] = ()) -> None:
        """Wait for ``ticket``, and for those ``before`` it; return ``result``."""
        self._ticket = ticket
        self._before = tuple(before)
        self._result = result
        self._lock = threading.Lock()
        self._value: object = None
        self._is_taken = False
        self._tell_wait: Callable[[float], object] | None = None

    def tell_wait(self, tell: Callable[[float], object]) -> None:
        """Call ``tell`` with the seconds that the first :meth:`wait` took."""
        self._tell_wait = tell

    def done(self) -> bool:
        """Whether :meth:`wait` would return at once."""
        return self._ticket.is_over and all(ticket.is_over for ticket in self._before)

    def when_over(self, tell: Callable[[], object]) -> None:
        """Call ``tell`` when the call is over: now if it is, else in another thread, where it must not block.

        That :meth:`wait` would raise Timeout by now does not end the call of an allreduce store.
        """
        call = tell
        for ticket in (self._ticket, *self._before):
            call = functools.partial(ticket.when_over, call)
        call()

    def wait(self) -> object:
        """Wait until the call is done; return its result.

        Raises:
            KvpsError: if it failed; Timeout if its ``timeout`` passed.
        """
        began = time.perf_counter()
        for ticket in self._before:
            ticket.wait()
        self._ticket.wait()
        with self._lock:
            if not self._is_taken:
                self._value, self._is_taken = self._result(), True
        if self._tell_wait is not None:
            self._tell_wait(time.perf_counter() - began)
            self._tell_wait = None
        return self._value


class ShortTurns:
    """The interpreter's switch interval while calls are in flight, shorter than usual.

    A thread that waits for the interpreter lock may ask for it only after this interval, 5 ms in
    CPython. The loop waits for it after each system call: so a script that computes in Python
    meanwhile would delay every packet. ``benchmarks/gil.py`` measures that.

    Args:
        interval_s: in seconds; 0 leaves the interval as it is.
    """

    def __init__(self, interval_s: float) -> None:
        self.interval_s = interval_s
        self._lock = threading.Lock()
        self._open = 0
        self._usual_s = 0.0

    def begin(self) -> None:
        """A call begins; the interval of the script is kept for later, unless it is shorter still."""
        with self._lock:
            self._open += 1
            if self._open == 1:
                self._usual_s = sys.getswitchinterval()
                if 0 < self.interval_s < self._usual_s:
                    sys.setswitchinterval(self.interval_s)

    def end(self) -> None:
        """A call ends; after the last one the script has its own interval again, unless it has set
        another."""
        with self._lock:
            self._open -= 1
            if self._open == 0 and math.isclose(sys.getswitchinterval(), self.interval_s):
                sys.setswitchinterval(self._usual_s)

    def forget(self) -> None:
        """Restore the interval in a child of a fork, where no call is in flight."""
        self._lock = threading.Lock()
        if self._open:
            self._open = 1
            self.end()


TURNS = ShortTurns(0.0)
"""The short turns of this process; sessions set their length."""
os.register_at_fork(after_in_child=TURNS.forget)
