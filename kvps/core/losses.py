"""Which members a worker has lost, and what that means for its calls.

A lost server ends the calls of every store: a part of each key went with it. So does one that was
replaced, since the new process holds nothing. A lost worker ends the calls of those stores only
whose rounds wait for it, according to their ``on_worker_lost``: at once (``fail``), when its grace
is over or no replacement can come (``wait``), or not at all (``shrink``).
"""

from __future__ import annotations

from dataclasses import dataclass

from kvps.core.catalogue import Catalogue
from kvps.errors import KvpsError, ServerLost, WorkerLost
from kvps.messages import Member, Role, View


@dataclass(slots=True)
class Lost:
    """A worker that is lost or gone, and since when."""

    member: Member
    since: float


class Losses:
    """What the newest view says of those who are not there."""

    def __init__(self) -> None:
        self.workers: dict[int, Lost] = {}
        self.server: ServerLost | None = None

    def learn(self, view: View, incarnations: dict[int, int], now: float) -> None:
        """Take a view in. ``incarnations`` are those of the servers that this worker talks to."""
        known, self.workers, self.server = self.workers, {}, None
        for one in view.members:
            if one.role == Role.SERVER:
                self.server = self.server or _server_lost(one, incarnations)
            elif one.state in ("lost", "gone"):
                since = now - one.lost_for_s
                before = known.get(one.rank)
                if before is not None and before.member.incarnation == one.incarnation:
                    since = min(since, before.since)
                self.workers[one.rank] = Lost(one, since)

    def error(self, book: Catalogue | None, now: float) -> KvpsError | None:
        """Return why calls of a store cannot succeed, if they cannot."""
        if self.server is not None:
            return self.server
        if book is None or not book.waits_for_lost:
            return None
        for lost in self.workers.values():
            if now >= self._until(book, lost):
                return _worker_lost(book, lost, now)
        return None

    def deadline(self, book: Catalogue) -> float | None:
        """When :meth:`error` will find something to say, if nothing changes."""
        if not book.waits_for_lost:
            return None
        return min((self._until(book, lost) for lost in self.workers.values()), default=None)

    def _until(self, book: Catalogue, lost: Lost) -> float:
        waits = book.opened.on_worker_lost == "wait" and lost.member.state == "lost"
        return lost.since + (book.worker_grace_s if waits else 0.0)


def _server_lost(one: Member, incarnations: dict[int, int]) -> ServerLost | None:
    name = f"server {one.rank} ({one.host} {one.endpoint})"
    if one.state not in ("held", "empty"):
        what = f"{name} is lost: {one.reason}"
    elif incarnations.get(one.rank, one.incarnation) != one.incarnation:
        what = f"{name} took the place of the one that this worker talked to, and is empty"
    else:
        return None
    return ServerLost(
        f"{what}. The lost part of every key is gone; what other servers hold is kept, but no key "
        "can be trusted to be whole. Start the job again from saved weights"
    )


def _worker_lost(book: Catalogue, lost: Lost, now: float) -> WorkerLost:
    one, policy = lost.member, book.opened.on_worker_lost
    if one.state == "gone":
        what, then = "no replacement can come", "Start the job again"
    elif policy == "fail":
        what, then = "on_worker_lost='fail' does not wait", f"Start worker {one.rank} again"
    else:
        what = f"no replacement came in {now - lost.since:.0f} s"
        then = f"Start a replacement with --rank {one.rank}"
    return WorkerLost(
        f"worker {one.rank} ({one.host}) is lost: {one.reason}. Rounds of store "
        f"{book.opened.store!r} need it, and {what}. What was pushed is kept. {then}, or create "
        "the store with on_worker_lost='shrink' to go on without it"
    )
