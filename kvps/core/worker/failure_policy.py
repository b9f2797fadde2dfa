"""The failure policy of a worker: the lost members, and the calls that end because of them.

A lost server ends the calls of every store: a part of each key went with it. So does one that was
replaced, since the new process holds nothing. Where there is a cut to which the servers can return,
calls wait for that as long as for a worker; servers that have tried to return to one, and could not, are
lost. A lost worker ends the calls of a store
according to its ``on_worker_lost``: at once (``fail``), when its grace is over or no replacement can come
(``wait``, where rounds wait for it), or not at all (``shrink``, and ``wait`` where there are no rounds).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from kvps.core.nonfinite import Flaw, describe
from kvps.core.worker.plan import Key
from kvps.core.worker.store import WorkerStore
from kvps.errors import KvpsError, NonFinite, ServerLost, WorkerLost
from kvps.protocol.envelope import Role
from kvps.protocol.membership import Member, View
from kvps.protocol.values import Dropped


@dataclass(slots=True)
class LostWorker:
    """A worker that is lost or gone, and since when."""

    member: Member
    since: float


@dataclass(frozen=True, slots=True)
class LostServer:
    """A server that holds nothing of what this worker knows."""

    what: str
    since: float
    cut: int
    """To which the servers can return, once it is replaced; 0 if there is none."""

    def until(self, grace_s: float) -> float:
        """Return until when calls wait."""
        return self.since + (grace_s if self.cut else 0.0)


class FailurePolicy:
    """What the newest view says of those who are not there."""

    def __init__(self) -> None:
        self.workers: dict[int, LostWorker] = {}
        self.server: LostServer | None = None
        self.is_any = False
        """Some worker or server is lost."""
        self.was_replaced = False
        """Some worker has taken another's place."""
        self._lives: dict[int, int] = {}
        """Of each worker rank, the newest incarnation."""

    def learn(self, view: View, incarnations: dict[int, int], now: float) -> None:
        """Take a view in. ``incarnations`` are those of the servers that this worker talks to."""
        known, self.workers = self.workers, {}
        server, self.server = self.server, None
        for one in view.members:
            if one.role == Role.SERVER:
                what = _why_lost(one, incarnations)
                if what and self.server is None:
                    since = now - one.lost_for_s if server is None else server.since
                    cut = 0 if one.state == "gone" else view.cut
                    self.server = LostServer(what, since, cut)
                continue
            before_it = self._lives.get(one.rank, 0)
            self._lives[one.rank] = one.incarnation
            self.was_replaced = self.was_replaced or 0 < before_it < one.incarnation
            if one.state in ("lost", "gone"):
                since = now - one.lost_for_s
                before = known.get(one.rank)
                if before is not None and before.member.incarnation == one.incarnation:
                    since = min(since, before.since)
                self.workers[one.rank] = LostWorker(one, since)
        if self.server is None and view.epoch and not view.cut:
            self.server = LostServer(view.reason, now, 0)
        self.is_any = self.server is not None or bool(self.workers)

    def error(self, store: WorkerStore | None, now: float) -> KvpsError | None:
        """Return why calls of a store cannot succeed, if they cannot."""
        lost_server = self.server
        if lost_server is not None:
            grace_s = math.inf if store is None else store.worker_grace_s
            if now >= lost_server.until(grace_s):
                return _server_lost(lost_server)
        if store is None or not store.waits_for_lost:
            return None
        for lost in self.workers.values():
            if now >= self._until(store, lost):
                return _worker_lost(store, lost, now)
        return None

    def deadline(self, store: WorkerStore) -> float | None:
        """When :meth:`error` will find something to say, if nothing changes."""
        until = []
        if self.server is not None:
            until.append(self.server.until(store.worker_grace_s))
        if store.waits_for_lost:
            until += [self._until(store, lost) for lost in self.workers.values()]
        return min(until, default=None)

    def _until(self, store: WorkerStore, lost: LostWorker) -> float:
        waits = store.opened.on_worker_lost == "wait" and lost.member.state == "lost"
        return lost.since + (store.worker_grace_s if waits else 0.0)


def _why_lost(one: Member, incarnations: dict[int, int]) -> str:
    """Return why a server does not hold what it held; empty if it does."""
    name = f"server {one.rank} ({one.host} {one.endpoint})"
    if one.state not in ("held", "empty"):
        return f"{name} is lost: {one.reason}"
    if incarnations.get(one.rank, one.incarnation) != one.incarnation:
        return f"{name} took the place of the one that this worker talked to, and is empty"
    return ""


def _server_lost(lost: LostServer) -> ServerLost:
    if lost.cut:
        return ServerLost(
            f"{lost.what}. Checkpoint {lost.cut} is complete, and no replacement came in time. Start "
            "that server again with its --checkpoint-dir, and training goes on from there"
        )
    return ServerLost(
        f"{lost.what}. The lost part of every key is gone; what other servers hold is kept, but no "
        "key can be trusted to be whole. Start the job again from saved weights, and the servers "
        "with --checkpoint-dir to survive this"
    )


def _worker_lost(store: WorkerStore, lost: LostWorker, now: float) -> WorkerLost:
    one, policy = lost.member, store.opened.on_worker_lost
    if one.state == "gone":
        what, then = "no replacement can come", "Start the job again"
    elif policy == "fail":
        what, then = "on_worker_lost='fail' does not wait", f"Start worker {one.rank} again"
    else:
        what = f"no replacement came in {now - lost.since:.0f} s"
        then = f"Start a replacement with --rank {one.rank}"
    who_needs_it = "Rounds" if store.ordered else "Calls"
    return WorkerLost(
        f"worker {one.rank} ({one.host}) is lost: {one.reason}. {who_needs_it} of store "
        f"{store.name!r} need it, and {what}. What was pushed is kept. {then}, or create "
        "the store with on_worker_lost='shrink' to go on without it"
    )


def complain(
    store: str, is_ordered: bool, keys: Mapping[str, Key], found: Mapping[str, Dropped]
) -> None:
    """Tell a worker of the updates in ``found``, by key, of which it was not told before.

    Args:
        store: whose keys they are.
        is_ordered: whether updates are rounds.
        keys: what the worker knows of all keys; it is noted there that it was told.
        found: what the servers say.

    Raises:
        NonFinite: if there are any.
    """
    news = {name: one for name, one in found.items() if one.number >= keys[name].heard}
    if not news:
        return
    for name, one in news.items():
        keys[name].heard = one.number + 1
    name, one = next(iter(news.items()))
    what = f"round {one.number}" if is_ordered else f"push {one.number} of this rank"
    others = f" (and of {len(news) - 1} more)" if len(news) > 1 else ""
    raise NonFinite(
        f"store {store!r}: {what} of key {name!r}{others} was dropped: "
        f"{describe(name, Flaw(one.values, one.ranks))}. The weights and the optimizer's state are as "
        "they were before it, on every server; go on with the next push, and look at the loss and "
        "the learning rate if this comes again"
    )
