"""The checkpoint coordinator: begins cuts, and decides when servers roll back to one.

The moment of a cut is that of its stage ``imaging`` (:mod:`kvps.core.scheduler.cut`).
A cut is taken at the interval of the servers (``--checkpoint-every``), and when workers ask
(``kv.checkpoint()``; they have met at a barrier before). :meth:`CheckpointCoordinator.conclude`
takes one more, and none after it: the job is to be stopped. Before the first push of this job only
workers get a cut: a script may still be about to restore an older job's, and
:meth:`~kvps.KVStore.restore` takes the newest. Only one cut is taken at a time. Which cuts there
are is asked of the servers; the scheduler itself keeps two numbers: that of the newest cut that
was begun, so that no two have the same, and that of the newest that is complete, so that everybody
can be told whether a lost server is a misfortune or the end.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from kvps.core.counts import Counts
from kvps.core.effects import Note
from kvps.core.limits import TABLE, remedy
from kvps.core.scheduler.barriers import RoutedMessage, Waiter
from kvps.core.scheduler.cut import AGAIN_S, CUT_MAX, Cut, CutStage, NodeMessage, Rollback
from kvps.core.texts import TAG_RULE, is_tag, shown
from kvps.errors import ConfigError, KvpsError, Overload, ProtocolError, StorageError
from kvps.protocol.checkpoint import Checkpoint, Checkpointed, Recall, Restored, Shelf
from kvps.protocol.envelope import Message, Node, Role
from kvps.protocol.membership import Error

T = TypeVar("T")
CheckpointEffect = NodeMessage | RoutedMessage | Note
"""A message to a member, along all of its connections; an answer to a worker's request; a line of log."""
RETRY_S = 5.0
"""How long after a cut that was given up the next is tried, at most."""
STORES_MAX = 1024
"""Stores whose requests wait at a time, and stores whose last answer is kept for workers that ask late."""
FIRST_PUSH_MAX_S = 2.5
"""How long the last cut of a job that seems not to have pushed waits for a beat that says otherwise."""
REQUESTS_WITHIN_S = 60.0
"""The time of the limit ``checkpoints``: so many are written because workers ask, and then a
request waits."""


@dataclass(slots=True)
class CheckpointRequest:
    """One store's request for a cut, the ``number``-th of its kind."""

    store: str
    number: int
    tag: str
    waiters: dict[int, Waiter] = field(default_factory=dict)
    """By rank."""


class CheckpointCoordinator:
    """The cuts of one job; it decides. The job takes the effects of each call by :meth:`take_effects`."""

    def __init__(
        self,
        workers: int,
        servers: int,
        requests_max: int = TABLE["checkpoints"].default,
        counts: Counts | None = None,
    ) -> None:
        self._requests_max = requests_max
        self._counts = counts or Counts()
        self._requested_at: deque[float] = deque()
        """When the last cuts began that workers asked for, as many as the limit."""
        self._delayed: CheckpointRequest | None = None
        """The request that waits since too many were granted; that was counted."""
        self._workers_count = workers
        self._count = servers
        self.begun = 0
        """The number of the newest cut that was begun, by this job or another."""
        self.kept = 0
        """The newest cut of this job that is complete; 0 while there is none."""
        self.kept_at: float | None = None
        """When it became complete; None if this process did not see that."""
        self.took_s = 0.0
        """How long it took."""
        self.epoch = 0
        self.recovery: Rollback | None = None
        self.failure = ""
        """Why the servers could not return to a cut; their values are of no use from then on."""
        self._outbox: list[CheckpointEffect] = []
        """Effects of the call that is being made, in order."""
        self.has_changed = False
        """Something that a restart must know."""
        self.has_pushed = False
        """A worker of this job has pushed, or continues from what another job had pushed."""
        self.concluded: int | None = None
        """The cut that has concluded the job, 0 where nothing was to be kept; None until it is complete."""
        self._is_concluding = False
        self._unpushed_at = 0.0
        """When a job that is to be stopped counts as one that has not pushed."""
        self._final = 0
        """The newest cut that was begun to conclude the job."""
        self._shelves: dict[int, Shelf] = {}
        """Server -> its answer about where it keeps cuts."""
        self._cut: Cut | None = None
        self._requests: dict[str, CheckpointRequest] = {}
        self._served: dict[str, CheckpointRequest] = {}
        """The requests for which the cut was begun: a cut that was begun before a request does not
        satisfy it."""
        self._granted: dict[str, tuple[int, int]] = {}
        """By store, the last request that was granted, and by which cut."""
        self._refused: dict[str, tuple[int, KvpsError]] = {}
        """store -> the last refused request, and why: workers that ask later get the same answer."""
        self._workers: frozenset[int] = frozenset()
        self._servers: frozenset[int] = frozenset()
        self._next_at = 0.0
        self._again_at = 0.0
        self._is_running = False

    def resume(self, begun: int, kept: int, epoch: int, is_returning: bool) -> None:
        """Go on from the state of a former scheduler."""
        self.begun, self.kept, self.epoch = begun, kept, epoch
        self.has_pushed = bool(kept)
        if is_returning:
            self.recovery = Rollback(epoch, self._count)
        elif epoch and not kept:
            self.failure = _hopeless("an earlier scheduler found none")
        elif begun > kept:  # workers may still stand for it
            everybody = frozenset(range(self._workers_count)), frozenset(range(self._count))
            self._cut = Cut(begun, "", epoch, *everybody, begun_at=0.0)
            self._cut.give_up("the scheduler was restarted")

    def conclude(self, now: float) -> None:
        """Take a cut of the present state as soon as possible, and none after it: the job is to be
        stopped."""
        self._is_concluding, self._next_at = True, now
        self._unpushed_at = now + FIRST_PUSH_MAX_S
        self._go_on(now)

    def take_effects(self) -> list[CheckpointEffect]:
        """Return the effects that were not taken yet."""
        effects, self._outbox = self._outbox, []
        return effects

    # --- who is there -------------------------------------------------------------------------

    def meet(self, workers: Iterable[int], servers: Iterable[int], is_running: bool, now: float) -> None:
        """These members are alive now; ``is_running`` while the job may have cuts."""
        if is_running and not self._is_running:
            self._next_at = now + self._pause_s
            self._again_at = now
        self._workers, self._servers = frozenset(workers), frozenset(servers)
        self._is_running = is_running
        if self._cut is not None:
            self._cut.meet(self._workers, self._servers)
        for asked in self._requests.values():
            for rank in asked.waiters.keys() - self._workers:
                del asked.waiters[rank]
        self._go_on(now)

    def replaced(self, rank: int, now: float) -> bool:
        """A server was replaced; return whether all servers return to a cut now."""
        self._shelves.pop(rank, None)
        if self._cut is not None:
            self._cut.give_up(f"server {rank} was replaced")
        if not self.kept:
            return False
        self.epoch += 1
        self.recovery = Rollback(self.epoch, self._count)
        self.has_changed = True
        self._requests.clear()  # who has them will see the epoch in the view, and ask no more
        self._granted.clear()
        self._refused.clear()
        self._outbox.append(
            Note("warning", f"server {rank} was replaced: epoch {self.epoch} begins with a rollback")
        )
        self._again_at = now  # it has to be welcomed before it hears anything else
        return True

    def pushed(self, now: float) -> None:
        """A worker says that it has pushed."""
        if not self.has_pushed:
            self.has_pushed, self._next_at = True, now + self._pause_s
            self._go_on(now)

    # --- what is heard ------------------------------------------------------------------------

    def ask(self, rank: int, waiter: Waiter, request: Checkpoint, now: float) -> None:
        """A worker wants a cut.

        Raises:
            ConfigError: if no server has a place for it, or its tag is none.
        Overload: if requests of too many stores wait.
        """
        if request.tag and not is_tag(request.tag):
            raise ConfigError(f"tag={request.tag!r:.80}: {TAG_RULE}")
        granted = self._granted.get(request.store)
        if granted is not None and request.number <= granted[0]:
            self._outbox.append(RoutedMessage(waiter.route, Checkpointed(waiter.seq, granted[1])))
            return
        refused = self._refused.get(request.store)
        if refused is not None and request.number == refused[0]:
            raise refused[1]
        if self.failure:
            raise StorageError(self.failure)
        if self._knows_all and not self._keeps:
            raise _no_place()
        asked = self._requests.get(request.store)
        if asked is None and len(self._requests) >= STORES_MAX:
            raise Overload(
                f"checkpoints of {STORES_MAX} stores wait already; ask again when they are written",
                limit="waiting_checkpoints",
            )
        if asked is None or asked.number < request.number:
            asked = self._requests[request.store] = CheckpointRequest(
                request.store, request.number, request.tag
            )
        asked.waiters[rank] = waiter
        self._go_on(now)

    def hear(self, node: Node, message: Message, now: float) -> None:
        """A member says something of cuts.

        Raises:
            ProtocolError: if it names a cut that no server can have.
        """
        if isinstance(message, Shelf):
            if max((message.highest, *message.cuts)) > CUT_MAX:
                raise ProtocolError(f"{node} names a cut above {CUT_MAX}")
            knew_all = self._knows_all
            self._shelves[node.rank] = message
            self.begun = max(self.begun, message.highest)
            if self._knows_all and not knew_all:
                self._next_at = now + self._pause_s
            if self._knows_all and not self._keeps:
                self._refuse_all(_no_place())
        if self.recovery is not None:
            self._hear_of_return(node, message, now)
        elif self._cut is not None and getattr(message, "cut", 0) == self._cut.number:
            before = self._cut.stage, self._cut.behind
            self._cut.hear(node, message)
            if (self._cut.stage, self._cut.behind) != before:
                self._say_again(now)
        self._go_on(now)

    def _hear_of_return(self, node: Node, message: Message, now: float) -> None:
        recovery = self.recovery
        assert recovery is not None
        before = recovery.cut
        recovery.hear(node.rank, message)
        if isinstance(message, Restored) and message.error:
            self._outbox.append(Note("error", f"server {node.rank} cannot roll back: {shown(message.error)}"))
        if recovery.failure:
            self.failure = _hopeless(recovery.failure)
            self._outbox.append(Note("error", self.failure))
            self.kept, self.recovery, self.has_changed = 0, None, True
            self._refuse_all(StorageError(self.failure))
        elif recovery.is_over:
            self._outbox.append(
                Note("warning", f"all servers hold cut {recovery.cut}; epoch {self.epoch} begins")
            )
            self.kept, self.recovery, self.has_changed = recovery.cut, None, True
            self._next_at = now + self._pause_s
        elif recovery.cut != before:
            self._say_again(now)

    # --- what follows -------------------------------------------------------------------------

    def on_time(self, now: float) -> None:
        """Begin the cuts that are due, and repeat questions that have no answer."""
        if self._cut is not None:
            self._cut.on_time(now)
        if self._is_unpushed and self.concluded is None and now >= self._unpushed_at:
            self.concluded = 0
            text = (
                "no last checkpoint: no worker has pushed yet; what earlier jobs have written stays as it is"
            )
            self._outbox.append(Note("warning", text))
        self._go_on(now)
        if now >= self._again_at:
            self._say_again(now)

    @property
    def due(self) -> float | None:
        """When :meth:`on_time` may have something to do."""
        if not self._is_running and self.recovery is None:
            return None
        if self.recovery is not None or self._cut is not None or not self._knows_all:
            return self._again_at
        if not self._may_begin:
            return None
        times = [self._next_at] * self._is_timed + [self._request_at] * bool(self._requests)
        times += [self._unpushed_at] * self._is_unpushed
        return min(times, default=None)

    @property
    def _request_at(self) -> float:
        """When a cut may begin that workers ask for."""
        is_full = len(self._requested_at) >= self._requests_max
        return self._requested_at[0] + REQUESTS_WITHIN_S if is_full else -math.inf

    @property
    def _may_begin(self) -> bool:
        """Whether all that a cut needs is here."""
        is_whole = self._knows_all and self._keeps and len(self._servers) == self._count
        is_free = self.recovery is None and self._cut is None and not self.failure
        is_free = is_free and self.concluded is None
        return is_whole and self._is_running and is_free

    def _go_on(self, now: float) -> None:
        """End the cut that is over, and begin the next if it is time."""
        if self._cut is not None:
            self._end(self._cut, now)
        if not self._may_begin:
            return
        request = next(iter(self._requests.values()), None)
        is_due = self._is_timed and now >= self._next_at
        if request is not None and not is_due:
            if now < self._request_at:
                self._delay(request, now)
                return
            self._requested_at.append(now)
            if len(self._requested_at) > self._requests_max:
                self._requested_at.popleft()
        if request is not None or is_due:
            self._served = {
                store: asked
                for store, asked in self._requests.items()
                if request is not None and asked.tag == request.tag
            }
            self.begun += 1
            if self._is_concluding:
                self._final = self.begun
            self._cut = Cut(
                self.begun,
                "" if request is None else request.tag,
                self.epoch,
                self._workers,
                self._servers,
                now,
                self.kept,
            )
            self.has_changed = True
            self._say_again(now)

    def _delay(self, request: CheckpointRequest, now: float) -> None:
        """Let a request wait, and say so once."""
        if request is self._delayed:
            return
        self._delayed = request
        error = Overload(
            f"a checkpoint of store {request.store!r} begins in {self._request_at - now:.0f} s: workers "
            f"have asked for {self._requests_max} in {REQUESTS_WITHIN_S:.0f} s; {remedy('checkpoints')}",
            limit="checkpoints",
        )
        self._counts.refused(error)
        self._outbox.append(Note("warning", str(error)))

    def _end(self, cut: Cut, now: float) -> None:
        if cut.stage is CutStage.COMPLETE:
            self._cut, self.kept, self.has_changed = None, cut.number, True
            self.kept_at, self.took_s = now, now - cut.begun_at
            self._next_at = now + self._pause_s
            if cut.number == self._final:
                self.concluded = cut.number
            self._outbox.append(Note("info", f"checkpoint {cut.number} is complete"))
            self._grant(cut)
        elif cut.stage is CutStage.GIVEN_UP:
            if not cut.taken and cut.begun_at in self._requested_at:  # nothing was written
                self._requested_at.remove(cut.begun_at)
            if not cut.by_worker:
                error = StorageError(f"checkpoint {cut.number} was abandoned: {cut.reason}")
                for asked in self._take_served():
                    self._refuse(asked, error)
            if cut.is_over:
                self._cut = None
                self._next_at = now + min(self._every_s or RETRY_S, RETRY_S)
                self._outbox.append(Note("warning", f"checkpoint {cut.number} was abandoned: {cut.reason}"))

    def _grant(self, cut: Cut) -> None:
        for asked in self._take_served():
            _keep(self._granted, asked.store, (asked.number, cut.number))
            for waiter in asked.waiters.values():
                self._outbox.append(RoutedMessage(waiter.route, Checkpointed(waiter.seq, cut.number)))

    def _take_served(self) -> list[CheckpointRequest]:
        """Return the requests that the cut was begun for and that still stand; they stand no more."""
        served = [asked for store, asked in self._served.items() if self._requests.get(store) is asked]
        for request in served:
            del self._requests[request.store]
        self._served = {}
        return served

    def _refuse_all(self, error: KvpsError) -> None:
        for asked in self._requests.values():
            self._refuse(asked, error)
        self._requests.clear()

    def _refuse(self, asked: CheckpointRequest, error: KvpsError) -> None:
        _keep(self._refused, asked.store, (asked.number, error))
        for waiter in asked.waiters.values():
            self._outbox.append(RoutedMessage(waiter.route, Error(waiter.seq, error.code, str(error))))

    def _say_again(self, now: float) -> None:
        self._again_at = now + AGAIN_S
        if self.recovery is not None:
            self._outbox += self.recovery.outgoing()
        elif self._cut is not None:
            self._outbox += self._cut.outgoing()
        elif self._is_running:
            for rank in sorted(self._servers - self._shelves.keys()):
                self._outbox.append(NodeMessage(Node(Role.SERVER, rank), Recall(self.epoch)))

    @property
    def stage(self) -> str:
        """How far the cut that is being taken has come; empty if there is none."""
        return "" if self._cut is None else self._cut.stage.value

    @property
    def every_s(self) -> float | None:
        """How often cuts are taken, 0 for only when asked; None where servers have no place for them."""
        return self._every_s if self._keeps else None

    @property
    def _knows_all(self) -> bool:
        return len(self._shelves) == self._count

    @property
    def _keeps(self) -> bool:
        return bool(self._shelves) and all(shelf.keeps for shelf in self._shelves.values())

    @property
    def _is_timed(self) -> bool:
        """Whether a cut begins at ``_next_at`` without a worker's request."""
        return self.has_pushed and (self._is_concluding or self._every_s > 0)

    @property
    def _is_unpushed(self) -> bool:
        """Whether the job is to be stopped, and no worker has pushed."""
        return self._is_concluding and not self.has_pushed

    @property
    def _pause_s(self) -> float:
        """How long after a cut the next begins without a worker's request."""
        return 0.0 if self._is_concluding else self._every_s

    @property
    def _every_s(self) -> float:
        """How often cuts are taken; 0 for only when asked."""
        wanted = [shelf.every_s for shelf in self._shelves.values() if shelf.every_s]
        return min(wanted, default=0.0)


def _keep(kept: dict[str, T], store: str, answer: T) -> None:
    """Keep the last answer to a store, and no more than :data:`STORES_MAX` of them."""
    kept.pop(store, None)
    kept[store] = answer
    if len(kept) > STORES_MAX:
        del kept[next(iter(kept))]


def _no_place() -> ConfigError:
    return ConfigError(
        "there is no directory for checkpoints: start every kvps-server with --checkpoint-dir, or set "
        "KVPS_CHECKPOINT_DIR"
    )


def _hopeless(why: str) -> str:
    return f"the servers could not roll back to a checkpoint ({why})"
