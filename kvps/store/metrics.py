"""The numbers of a store for experiment trackers: their names, and the waiting times of its calls.

:meth:`kvps.KVStore.metrics` returns them as a flat dict. Every kind of store has the same names,
so that one script logs all of them; a number that a kind of store does not have is 0, and a ratio 1.
"""

from __future__ import annotations

import functools
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, NamedTuple, ParamSpec, cast

from kvps.protocol.stores import StatusIs
from kvps.runtime.ticket import Handle

NAMES: Mapping[str, str] = {
    "rank": "Rank of this worker.",
    "workers": "Number of workers of the job.",
    "servers": "Number of servers of the job; 0 without servers.",
    "lost_members": "Number of workers and servers that are lost.",
    "epoch": "How often the job was rolled back to a checkpoint.",
    "reconnects": "Connections to servers that broke, or were made anew for a replacement.",
    "keys": "Number of keys that this worker knows.",
    "rounds": "Number of pushes by this rank of its most frequently pushed key; in a synchronous "
    "store, rounds.",
    "push_age": "Number of pushes by other ranks between the newest two reads of this rank, at "
    "the key where it is most: the age of its push between them. 0 in a synchronous store.",
    "sent_bytes": "Bytes of values that were sent or lent to servers, or to the worker that "
    "pushes for this host.",
    "received_bytes": "Bytes of values that came from them.",
    "compression_ratio": "Bytes of pushed dense gradients for each byte of their payload.",
    "resent_requests": "Requests that were lost on the way, and sent again.",
    "push_calls": "Number of calls of push(), and of waits for their handles.",
    "push_wait_s": "Seconds that the script spent in them, in all.",
    "push_wait_p50_s": "Median of the newest 1,024 of these times.",
    "push_wait_p99_s": "Their 99th percentile.",
    "pull_calls": "Number of calls of pull(), pushpull() and the pulls of rows, and of waits for "
    "their handles.",
    "pull_wait_s": "Seconds that the script spent in them, in all.",
    "pull_wait_p50_s": "Median of the newest 1,024 of these times.",
    "pull_wait_p99_s": "Their 99th percentile.",
}
"""Name -> meaning, of all that the process knows by itself."""
SERVER_NAMES: Mapping[str, str] = {
    "staleness": "By how many pushes this rank is ahead of the slowest live rank, at the key "
    "where it is most.",
    "lateness_s": "Seconds by which this rank's pushes came after the first push of their round: "
    "a moving mean.",
    "dropped_rounds": "Rounds without effect, as their sums were not finite, of the key with the most.",
    "open_rounds": "Number of keys whose round waits for a rank; servers name at most 1,000 keys.",
    "oldest_round_s": "Age of the oldest open round in seconds; 0 for none.",
}
"""Name -> meaning of each figure that the servers are asked for."""


class Straggler(NamedTuple):
    """A rank that an open round waits for."""

    rank: int
    key: str
    """One key of that round."""
    round: int
    age_s: float
    """Seconds since the round was opened."""


def of_servers(answers: Sequence[StatusIs], rank: int, staleness: Mapping[str, int]) -> dict[str, float]:
    """Return the numbers that the servers' answers to STATUS have.

    Args:
        answers: one of each server.
        rank: of this worker.
        staleness: by key, as :meth:`~kvps.KVStore.staleness` returns it.
    """
    ages = [stalled.age_s for answer in answers for stalled in answer.rounds]
    return {
        "staleness": max(staleness.values(), default=0),
        "lateness_s": max([answer.late.get(str(rank), 0.0) for answer in answers], default=0.0),
        "dropped_rounds": max([count for answer in answers for count in answer.dropped.values()], default=0),
        "open_rounds": len({stalled.key for answer in answers for stalled in answer.rounds}),
        "oldest_round_s": max(ages, default=0.0),
    }


WAITS_MAX = 1024
"""Calls of each kind whose waiting times the percentiles cover: the newest."""
P = ParamSpec("P")


class WaitTimes:
    """The waiting times of calls of one kind.

    Example:
        >>> waits = WaitTimes()
        >>> for seconds in (0.25, 0.5, 0.75):
        ...     waits.add(seconds)
        >>> waits.figures("pull")
        {'pull_calls': 3, 'pull_wait_s': 1.5, 'pull_wait_p50_s': 0.5, 'pull_wait_p99_s': 0.75}
    """

    def __init__(self) -> None:
        self._count = 0
        self._total_s = 0.0
        self._newest: deque[float] = deque(maxlen=WAITS_MAX)

    def add(self, seconds: float) -> None:
        """Count one call."""
        self._count += 1
        self._total_s += seconds
        self._newest.append(seconds)

    def figures(self, kind: str) -> dict[str, float]:
        """Return the numbers of calls of this ``kind``."""
        ordered = sorted(self._newest)
        return {
            f"{kind}_calls": self._count,
            f"{kind}_wait_s": self._total_s,
            f"{kind}_wait_p50_s": percentile(ordered, 0.5),
            f"{kind}_wait_p99_s": percentile(ordered, 0.99),
        }


def percentile(ordered: Sequence[float], part: float) -> float:
    """Return the smallest of ``ordered`` that at least this ``part`` of them do not exceed; 0 for none.

    Example:
        >>> percentile([1.0, 2.0, 3.0, 4.0], 0.5)
        2.0
    """
    return ordered[max(0, math.ceil(part * len(ordered)) - 1)] if ordered else 0.0


def timed(kind: str) -> Callable[[Callable[Concatenate[Any, P], Any]], Callable[Concatenate[Any, P], Any]]:
    """Count the time of each call of a method in the ``waits`` of its object; use it as a decorator.

    Of a call that returns a handle, only the wait for that handle counts.
    """

    def decorate(method: Callable[Concatenate[Any, P], Any]) -> Callable[Concatenate[Any, P], Any]:
        @functools.wraps(method)
        def call(self: Any, *args: P.args, **kwargs: P.kwargs) -> Any:
            began = time.perf_counter()
            result = method(self, *args, **kwargs)
            waits = self.waits[kind]
            if isinstance(result, Handle):
                result.tell_wait(waits.add)
            else:
                waits.add(time.perf_counter() - began)
            return result

        return cast("Callable[Concatenate[Any, P], Any]", call)

    return decorate
