"""The latest value of each key of an allreduce store, and the collective that makes it.

A pull takes the newest collective of its keys when it is called, and waits for that one, whatever is pushed
later. If a collective fails, its keys fall back to the values that they had. :class:`AllreduceRequests` puts
rows on the device of the collective, and copies its result.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from kvps.core.worker import calls
from kvps.core.worker.plan import Priority
from kvps.errors import ConfigError, KeyNotFound
from kvps.phrases import never_initialised
from kvps.runtime.device import bring_back
from kvps.runtime.ticket import Ticket
from kvps.store.allreduce.queue import Collective, CollectiveQueue
from kvps.store.arguments import Outcome, targets_for
from kvps.store.key_list import KeyList
from kvps.store.requests import COPY_FALSE, Requests


class LatestValues:
    """The values of all keys, made or being made."""

    def __init__(self, queue: CollectiveQueue) -> None:
        self._queue = queue
        self._newest: dict[str, Collective] = {}
        self._made: dict[str, Collective] = {}
        """Key -> the last collective that has made a value of it."""
        self._order = threading.Lock()
        """Held while a collective is added, so that the newest is the last one."""

    def __contains__(self, name: str) -> bool:
        newest = self._newest.get(name)
        return newest is not None and (not newest.has_failed or name in self._made)

    def of(self, names: Sequence[str]) -> list[Collective]:
        """Return the collective that makes the newest value of each key.

        Raises:
            KeyNotFound: if there is none.
        """
        newest = [self._newest.get(name) for name in names]
        without = {holder for holder in set(newest) if holder is None or holder.has_failed}
        collectives = []
        for name, collective in zip(names, newest, strict=True):
            latest = collective if collective not in without else self._made.get(name)
            if latest is None:
                raise KeyNotFound(never_initialised(name))
            collectives.append(latest)
        return collectives

    def begin(self, collective: Collective, step: int, limit_s: float) -> Collective:
        """Begin a collective that makes the next value of its keys.

        Args:
            collective: one that has not been begun.
            step: the number of pushes that it adds to their versions.
            limit_s: seconds until it must be in the queue.

        Raises:
            Timeout: if too many wait already.
        """
        run, names = collective.run, list(collective.places)

        def counted() -> list[torch.Tensor]:
            rows = run()
            older = {name: self._made[name].versions[name] for name in names if name in self._made}
            collective.versions = {name: step + older.get(name, 0) for name in names}
            self._made.update(dict.fromkeys(names, collective))
            return rows

        collective.run = counted
        with self._order:
            self._queue.add(collective, limit_s)
            self._newest.update(dict.fromkeys(names, collective))
        return collective


class CollectiveTicket(Ticket):
    """A call that waits for collectives that were begun before."""

    def __init__(
        self,
        names: Sequence[str],
        collectives: Sequence[Collective],
        limit_s: float,
        wait: Callable[[Collective, float, float], None],
        read: Callable[[Collective, str], object] = Collective.row,
    ) -> None:
        """Wait for the values of some keys.

        Args:
            names: the keys.
            collectives: for each key the one that makes its value.
            limit_s: seconds that it may take.
            wait: called with a collective, the seconds left and ``limit_s``; raises its error.
            read: returns what the call wants of a key.
        """
        super().__init__()
        self._names = names
        self._collectives = collectives
        self._limit_s = limit_s
        self._deadline = time.monotonic() + limit_s
        self._wait = wait
        self._read = read
        self.copied()

    @property
    def is_over(self) -> bool:
        """Whether all collectives are over, or its time is."""
        return time.monotonic() > self._deadline or all(collective.done() for collective in self._collectives)

    def when_over(self, tell: Callable[[], object]) -> None:
        """Call ``tell`` when all collectives are over: now if they are, else in the thread that
        makes them."""
        left: set[Future[list[torch.Tensor]]] = set(self._collectives)
        lock = threading.Lock()

        def over(collective: Future[list[torch.Tensor]]) -> None:
            with lock:
                left.discard(collective)
                is_last = not left
            if is_last:
                tell()

        if not left:
            tell()
        for collective in list(left):
            collective.add_done_callback(over)

    def wait(self) -> object:
        """Wait; return what was read of each key.

        Raises:
            KvpsError: if a collective failed; Timeout, naming the ranks that are missing.
        """
        if self.value is None:
            for collective in dict.fromkeys(self._collectives):
                self._wait(collective, self._deadline - time.monotonic(), self._limit_s)
            pairs = zip(self._collectives, self._names, strict=True)
            self.value = [self._read(collective, name) for collective, name in pairs]
        return self.value


class AllreduceRequests(Requests):
    """The requests of one ``allreduce`` store."""

    def here(
        self, names: tuple[str, ...], values: Sequence[torch.Tensor], limit_s: float
    ) -> tuple[torch.Tensor, ...]:
        """Return the value of each key as it is: all of them on one device, as one collective needs."""
        if len({value.device for value in values}) > 1:
            return tuple([value.cpu() for value in values])
        return tuple(values)

    def plain_pushpull(
        self, keys: KeyList, value: object, out: object, urgency: Priority
    ) -> calls.PushValues | None:
        """Return None: a collective knows no sinks, and its values are written when they are at this rank."""
        return None

    def wanted(self, keys: KeyList, out: object, copy: bool) -> Outcome:
        """Return the end of a pull: copies of the values that are at this rank, or these themselves."""
        if out is None:

            def returned(rows: Any) -> object:
                if not copy:
                    return rows if keys.is_many else rows[0]
                copies = [row.clone() if row.device.type == "cpu" else row.cpu() for row in rows]
                return copies if keys.is_many else copies[0]

            return (), returned
        if not copy:
            raise ConfigError(COPY_FALSE)
        targets: Sequence[torch.Tensor] | None = keys.rows(out, as_sinks=True)
        if targets is not None:
            places = list(range(len(targets)))
        else:  # several of one key, or such as must be looked at
            lists = targets_for(keys.names, keys.is_many, out, self._specs)
            targets = [target for devices in lists for target in devices]
            places = [index for index, devices in enumerate(lists) for _ in devices]

        def write(rows: Any) -> object:
            deliver(targets, [rows[place] for place in places])
            return out

        return (), write


@torch.no_grad()
def deliver(targets: Sequence[torch.Tensor], rows: Sequence[torch.Tensor]) -> None:
    """Copy each row into its target, a tensor of the user's, wherever either is."""
    if all(row.is_cpu for row in (*targets, *rows)) and not any(map(torch.Tensor.is_neg, targets)):
        torch._foreach_copy_(list(targets), list(rows))  # all at once: there may be thousands
        return
    bring_back(zip(targets, rows, strict=True))
