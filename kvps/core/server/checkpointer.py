"""The checkpointer: a server's part in cuts and rollbacks.

Theory of operation
-------------------
The scheduler sees to it that no worker changes anything while snapshots are taken
(:mod:`kvps.core.scheduler.cut`); what still is under way between servers, the checkpointer waits
for. Taking an snapshot takes no copy: the values are held, and an update that comes before they
are on the disk goes to another buffer. Orders of the scheduler may come twice, and answers may be
lost, so each order is answered with all that is known of its cut::

    TAKE-IMAGE ──► IMAGE-TAKEN ──► (disk) ──► IMAGE-KEPT
    COMMIT     ──► (disk) ──► COMMITTED
    RECALL     ──► (disk) ──► SHELF
    RESTORE    ──► (disk) ──► RESTORED

From RESTORE on the server serves no requests until the view says that all have returned: what was asked of
it before belongs to values that are not there any more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from kvps import protocol as p
from kvps.core.counts import Counts
from kvps.core.effects import Disk, Effect, Note
from kvps.core.membership_client import SCHEDULER, MembershipClient
from kvps.core.server.control import Control
from kvps.core.server.snapshot.model import Snapshot
from kvps.core.server.snapshot.storage import (
    Answer,
    AnyOrder,
    Complete,
    Completed,
    FindCuts,
    FoundCuts,
    Loaded,
    Read,
    Remove,
    SnapshotWritten,
    Write,
)
from kvps.errors import ConfigError, KvpsError, Overload, StorageError
from kvps.protocol.envelope import Message

ORDERS = (p.TakeImage, p.Commit, p.GiveUp, p.Recall, p.Restore)
"""The orders of the scheduler."""
TEXT_MAX = 500
"""Maximum characters of an error that is reported: others embed it in their texts."""


@dataclass(slots=True)
class SnapshotInProgress:
    """The progress of one cut on this server."""

    cut: int
    release: Callable[[], None] | None = None
    """Releases the snapshot; None while none is held."""
    taken: bool = False
    stores: tuple[p.StoreSum, ...] = ()
    kept: p.ImageKept | None = None
    committed: p.Committed | None = None
    is_committing: bool = False
    is_resumed: bool = False
    """A store in it was restored from an older cut."""
    began: float = 0.0
    """When it was ordered."""


class Checkpointer:
    """One server's part in cuts and rollbacks."""

    def __init__(
        self,
        member: MembershipClient,
        outbox: list[Effect],
        every_s: float | None,
        counts: Counts | None = None,
    ) -> None:
        self._member = member
        self._counts = counts or Counts()
        self._outbox = outbox
        self._every_s = every_s
        """Seconds between automatic cuts, 0 for none; None without a directory for them."""
        self.taking = SnapshotInProgress(0, taken=True)
        """The newest cut that was ordered; its ``taken`` is true if there was none."""
        self.is_returning = False
        """A rollback was ordered and is not complete: this server serves no requests."""
        self.epoch = 0
        """The epoch of the values held here: how often the job was rolled back."""
        self._returning: p.Restore | None = None
        """The newest rollback that was ordered."""
        self._restored: p.Restored | None = None
        self._recall = 0

    def on_order(self, message: Message, control: Control) -> None:
        """Carry out an order of the scheduler."""
        match message:
            case p.TakeImage():
                self._take(message.cut, control)
            case p.Commit():
                self._commit(message)
            case p.GiveUp():
                self._give_up(message.cut)
            case p.Recall():
                self._recall = message.epoch
                if self._every_s is None:
                    self._say(p.Shelf(message.epoch, False, 0.0, (), 0))
                else:
                    self._order(self._look(self._member.job))
            case p.Restore():
                self._restore(message)
            case _:
                raise AssertionError(f"{type(message).__name__} is no order")

    def on_disk(self, answer: Answer) -> None:
        """Note the answer to a storage order."""
        match answer:
            case SnapshotWritten():
                self._written(answer)
            case Completed():
                taking = self.taking
                if isinstance(answer.error, Overload):
                    self._counts.refused(answer.error)
                if taking.cut == answer.cut:
                    taking.is_committing = False
                    taking.committed = p.Committed(answer.cut, _text(answer.error))
                    self._say(taking.committed)
            case FoundCuts() if answer.for_whom is None:
                every_s = self._every_s or 0.0
                if answer.error is not None:
                    self._outbox.append(Note("warning", str(answer.error)))
                shelf = p.Shelf(self._recall, True, every_s, answer.cuts, answer.highest)
                self._say(shelf)
            case _:
                raise AssertionError("it is the server's")

    # --- taking -------------------------------------------------------------------------------

    def look(self, control: Control) -> None:
        """Take the snapshot that is wanted, if no gradient still waits to be applied."""
        taking = self.taking
        if taking.taken or not control.is_settled:
            return
        try:
            snapshot, taking.release = control.snapshot()
        except StorageError as error:
            taking.taken = True
            self._say(p.ImageTaken(taking.cut))
            self._written(SnapshotWritten(taking.cut, 0, "", error))
            return
        taking.taken, taking.stores = True, _sums(snapshot)
        taking.is_resumed = control.is_resumed
        self._say(p.ImageTaken(taking.cut))
        self._order(Write(taking.cut, snapshot))

    def _take(self, cut: int, control: Control) -> None:
        if cut > self.taking.cut:
            self._give_up(self.taking.cut)
            self.taking = SnapshotInProgress(cut, began=self._counts.now)
        taking = self.taking
        if taking.cut == cut and taking.kept is not None:
            self._say(taking.kept)
        elif taking.cut == cut and taking.taken:
            self._say(p.ImageTaken(cut))
        self.look(control)

    def _written(self, written: SnapshotWritten) -> None:
        taking = self.taking
        if taking.cut != written.cut or taking.kept is not None:
            return  # it was abandoned meanwhile
        self._let_go()
        is_well = written.error is None
        self._counts.add("kvps_checkpoints_total", "written" if is_well else "failed")
        self._counts.add("kvps_checkpoint_bytes_total", by=written.size if is_well else 0)
        self._counts.observe("kvps_checkpoint_duration_seconds", self._counts.now - taking.began)
        if written.error is not None:
            self._outbox.append(Note("error", str(written.error)))
        taking.kept = p.ImageKept(
            written.cut, written.size, written.sha256, taking.stores, _text(written.error)
        )
        self._say(taking.kept)

    def _commit(self, commit: p.Commit) -> None:
        taking = self.taking
        if commit.cut != taking.cut:
            self._say(p.Committed(commit.cut, f"cut {commit.cut} is not the cut in progress"))
        elif taking.committed is not None:
            self._say(taking.committed)
        elif not taking.is_committing:
            taking.is_committing = True
            seat = self._member.seat
            job, is_resumed = self._member.job, taking.is_resumed
            self._order(Complete(job, seat.rank, seat.workers, commit, is_resumed))

    def _give_up(self, cut: int) -> None:
        taking = self.taking
        if cut and taking.cut == cut and taking.committed is None:
            self._let_go()
            if taking.taken and not (taking.kept is not None and taking.kept.error):
                self._order(Remove(cut, self._member.rank))
            self.taking = replace(taking, taken=True, kept=None, release=None)
            self.taking.kept = p.ImageKept(cut, 0, "", (), "it was abandoned")

    def _let_go(self) -> None:
        if self.taking.release is not None:
            self.taking.release()
            self.taking.release = None

    def _look(self, job: bytes | None, tag: str = "", for_whom: object = None, store: str = "") -> FindCuts:
        seat = self._member.seat
        return FindCuts(seat.rank, seat.servers, job, tag, for_whom, store)

    def _read(self, cut: int, for_whom: object) -> Read:
        return Read(self._member.seat.rank, self._member.seat.servers, cut, for_whom)

    def ask(self, request: p.Revive, for_whom: object) -> Disk:
        """Return the order that reads a cut for one store of this job, or lists the cuts.

        Raises:
            ConfigError: if this server has no place for cuts.
        """
        if self._every_s is None:
            raise ConfigError(
                f"server {self._member.rank} has no directory for checkpoints: start every kvps-server "
                "with --checkpoint-dir, or set KVPS_CHECKPOINT_DIR"
            )
        if not request.cut:
            return Disk(self._look(None, request.tag, for_whom, request.store))
        return Disk(self._read(request.cut, for_whom))

    # --- returning ----------------------------------------------------------------------------

    def begin(self) -> None:
        """Forget the cuts of the last job: another begins."""
        self._give_up(self.taking.cut)
        self.epoch, self.is_returning = 0, False
        self._returning = self._restored = None
        self.taking = SnapshotInProgress(0, taken=True)

    def _restore(self, order: p.Restore) -> None:
        if self._returning == order:
            if self._restored is not None:
                self._say(self._restored)
            return
        self._give_up(self.taking.cut)
        self.is_returning, self._returning, self._restored = True, order, None
        self._order(self._read(order.cut, order))

    def is_for_us(self, loaded: Loaded) -> bool:
        """Return whether ``loaded`` is the snapshot of the rollback that was ordered last."""
        return loaded.for_whom is not None and loaded.for_whom is self._returning

    def restored(self, error: KvpsError | None) -> None:
        """Report the end of a rollback; ``error`` if it failed."""
        assert self._returning is not None
        if error is None:
            self.epoch, self.is_returning = self._returning.epoch, False
            self._counts.add("kvps_rollbacks_total", "restored")
        else:
            self._counts.add("kvps_rollbacks_total", "failed")
            self._outbox.append(Note("error", str(error)))
        self._restored = p.Restored(self._returning.epoch, self._returning.cut, _text(error))
        self._say(self._restored)

    # --- small things -------------------------------------------------------------------------

    def _order(self, order: AnyOrder) -> None:
        self._outbox.append(Disk(order))

    def _say(self, message: Message) -> None:
        self._member.send(SCHEDULER, message)


def _sums(snapshot: Snapshot) -> tuple[p.StoreSum, ...]:
    """Return a summary of each store; a key is counted by the server of its first element."""
    return tuple(
        p.StoreSum(
            store.name,
            sum([not key.portions or key.portions[0].start == 0 for key in store.keys]),
            *store.versions,
        )
        for store in snapshot.stores
    )


def _text(error: KvpsError | None) -> str:
    return "" if error is None else str(error)[:TEXT_MAX] or type(error).__name__
