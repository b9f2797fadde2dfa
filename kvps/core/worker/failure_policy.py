"""The failure policy of a worker: the lost members, and the calls that end because of them.

A lost server ends the calls of every store: a part of each key went with it. So does a server that
was replaced, since the new process holds nothing. Where there is a cut to which the servers can
return, calls wait for that as long as for a worker; servers that have tried to return to a cut,
and could not, are lost.

A lost worker ends the calls of a store according to its ``on_worker_lost``: at once (``fail``),
when its grace is over or no replacement can come (``wait``, where rounds wait for it), or not at
all (``shrink``, and ``wait`` where there are no rounds).
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
    """A worker that is lost or gone."""

    member: Member
    since: float


@dataclass(frozen=True, slots=True)
class LostServer:
    """A server that holds none of the values that this worker knows."""

    what: str
    since: float
    cut: int
    """The cut to which the servers can return once it is replaced; 0 if there is none."""
    may_return: bool
    """Another process may take its place."""

    def until(self, store: WorkerStore | None, *, rebuilds: bool = False) -> float:
        """Return until when calls of a store wait; ``rebuilds`` is of one that is not made yet."""
        rebuilds = rebuilds if store is None else store.kept is not None
        grace_s = math.inf if store is None else store.worker_grace_s
        return self.since + (grace_s if self.cut or (rebuilds and self.may_return) else 0.0)


class FailurePolicy:
    """The lost members of the newest view, and which calls end because of them."""

    def __init__(self) -> None:
        self.workers: dict[int, LostWorker] = {}
        self.server: LostServer | None = None
        self.is_any = False
        """Some worker or server is lost."""
        self.was_replaced = False
        """Some worker has taken another's place."""
        self._lives: dict[int, int] = {}
        """Worker rank -> its newest incarnation."""

    def learn(self, view: View, incarnations: dict[int, int], now: float) -> None:
        """Take a view in. ``incarnations`` are those of the servers that this worker is connected
        to, by rank."""
        known, self.workers = self.workers, {}
        server, self.server = self.server, None
        for member in view.members:
            if member.role == Role.SERVER:
                what = why_lost(member, incarnations)
                if what and self.server is None:
                    since = now - member.lost_for_s if server is None else server.since
                    cut = 0 if member.state == "gone" else view.cut
                    self.server = LostServer(what, since, cut, member.state == "lost")
            if member.role != Role.WORKER:
                continue
            earlier = self._lives.get(member.rank, 0)
            self._lives[member.rank] = member.incarnation
            self.was_replaced = self.was_replaced or 0 < earlier < member.incarnation
            if member.state in ("lost", "gone"):
                since = now - member.lost_for_s
                before = known.get(member.rank)
                if before is not None and before.member.incarnation == member.incarnation:
                    since = min(since, before.since)
                self.workers[member.rank] = LostWorker(member, since)
        if self.server is None and view.epoch and not view.cut:
            self.server = LostServer(view.reason, now, 0, may_return=False)
        self.is_any = self.server is not None or bool(self.workers)

    def error(self, store: WorkerStore | None, now: float, *, rebuilds: bool = False) -> KvpsError | None:
        """Return why calls of a store cannot succeed, if they cannot; ``rebuilds`` is of one not made yet."""
        if store is not None and store.lost is not None:
            return store.lost
        lost_server = self.server
        if lost_server is not None and now >= lost_server.until(store, rebuilds=rebuilds):
            return server_lost(lost_server)
        if store is None or not store.waits_for_lost:
            return None
        for lost in self.workers.values():
            if now >= self._until(store, lost):
                return _worker_lost(store, lost, now)
        return None

    def deadline(self, store: WorkerStore) -> float:
        """When :meth:`error` will find something to say, if nothing changes; infinite for never."""
        workers = self.workers.values() if store.waits_for_lost else ()
        server_until = math.inf if self.server is None else self.server.until(store)
        return min([server_until, *[self._until(store, lost) for lost in workers]])

    def _until(self, store: WorkerStore, lost: LostWorker) -> float:
        waits = store.opened.on_worker_lost == "wait" and lost.member.state == "lost"
        return lost.since + (store.worker_grace_s if waits else 0.0)


def named(server: Member) -> str:
    """Return the name of a server, with its host and endpoint."""
    return f"server {server.rank} ({server.host} {server.endpoint})"


def why_lost(server: Member, incarnations: dict[int, int]) -> str:
    """Return why a server has lost its values; empty if it has not."""
    name = named(server)
    if server.state not in ("held", "empty"):
        return f"{name} is lost: {server.reason}"
    if incarnations.get(server.rank, server.incarnation) != server.incarnation:
        return f"{name} has replaced the server that this worker used, and is empty"
    return ""


def server_lost(lost: LostServer) -> ServerLost:
    """Return the error of calls that need a lost server."""
    if lost.cut:
        return ServerLost(
            f"{lost.what}. Checkpoint {lost.cut} is complete, and no replacement came in time. Start "
            "that server again with its --checkpoint-dir, and training continues from the checkpoint"
        )
    return ServerLost(
        f"{lost.what}. Its part of every key is lost. The other servers keep their parts, but no "
        "key is complete. Start the job again from saved weights; with --checkpoint-dir, a job survives "
        "the loss of a server"
    )


def _worker_lost(store: WorkerStore, lost: LostWorker, now: float) -> WorkerLost:
    member, policy = lost.member, store.opened.on_worker_lost
    if member.state == "gone":
        what, then = "no replacement can come", "Start the job again"
    elif policy == "fail":
        what, then = "on_worker_lost='fail' does not wait", f"Start worker {member.rank} again"
    else:
        what = f"no replacement came in {now - lost.since:.0f} s"
        then = f"Start a replacement with --rank {member.rank}"
    who_needs_it = "Rounds" if store.ordered else "Calls"
    return WorkerLost(
        f"worker {member.rank} ({member.host}) is lost: {member.reason}. {who_needs_it} of store "
        f"{store.name!r} need it, and {what}. Earlier pushes are kept. {then}, or create "
        "the store with on_worker_lost='shrink' to continue without it"
    )


def complain(store: str, is_ordered: bool, keys: Mapping[str, Key], found: Mapping[str, Dropped]) -> None:
    """Tell the script of dropped updates of which it was not told before.

    Args:
        store: name of the store.
        is_ordered: whether updates are rounds.
        keys: all keys of the store; they note that the script was told.
        found: key -> the update that was dropped.

    Raises:
        NonFinite: if there are any.
    """
    news = {name: update for name, update in found.items() if update.number >= keys[name].heard}
    if not news:
        return
    for name, update in news.items():
        keys[name].heard = update.number + 1
    name, update = next(iter(news.items()))
    what = f"round {update.number}" if is_ordered else f"push {update.number} of this rank"
    others = f" (and {len(news) - 1} more)" if len(news) > 1 else ""
    raise NonFinite(
        f"store {store!r}: {what} of key {name!r}{others} was dropped: "
        f"{describe(name, Flaw(update.values, update.ranks))}. The weights and the optimizer's state are "
        "unchanged on every server. Continue with the next push; if this happens again, check the loss and "
        "the learning rate"
    )
