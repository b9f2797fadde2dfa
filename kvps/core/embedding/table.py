"""One server's rows of an embedding table: made by their first push, and evicted.

A row comes into being by a *push* and never by a pull. So what a table holds follows from its pushes,
which are applied once each, in rounds or by number; a pull, which may be sent again or be made by a
worker that is replaced, changes nothing. To a pull, an id without a row has its first value, which
depends on the id alone: it equals a row that has not been updated yet.

With ``admit`` n an id gets its row at its n-th push; the gradients before are dropped. With
``max_age`` a row goes that had no push for so many versions, with ``max_idle_s`` for so many seconds. With
``max_rows`` the oldest go, or with ``half_life`` those that were pushed to least: an eighth of them at once,
since the index is made anew for it, and so seldom. An id that comes again begins again.

Rows go when an update is made, by the clock and the counts of the one server that holds them. A copy of the
server is told which rows there are, and decides nothing.

The optimizer updates the rows that a push names, and no others: momenta of the rest stand still,
as :class:`torch.optim.SparseAdam` has it. Its step counts updates of the whole table.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from kvps.core.embedding.arena import Arenas, Columns, Slots
from kvps.core.embedding.evicted import Evicted
from kvps.core.embedding.id_hash import Ids
from kvps.core.embedding.id_index import IdIndex
from kvps.core.embedding.pages import grown
from kvps.core.embedding.spec import USES, WEIGHT, Admission, EmbeddingSpec, columns_of, new_columns
from kvps.core.embedding.stored import Kept
from kvps.core.embedding.tiered import Tier, TieredArenas
from kvps.core.optim.torch_rules import Updater, create

SCAN_SLOTS = 1 << 20
"""Maximum slots that one block of an export scans."""
AGE_STEPS = 16
"""Old rows are looked for so many times per ``max_age``: a row may outlive it by 1 / AGE_STEPS of it."""
USES_COUNT = 64 << 10
"""Rows whose uses are read at once."""
USES_LOG2_MAX = 53
"""More uses are shown by no row, whatever a checkpoint says: a table has at most 2^53 updates."""
STAMP_MAX = 2**31 - 1
"""Largest version of 32 bits."""
EVICTED = 8
"""One row in so many is evicted when there are too many."""
BEHIND = 1 << 62
"""Where an export begins to tell of ids without a row any more: behind all slots."""

Stamps = npt.NDArray[np.signedinteger[Any]]


class ExportBatch(NamedTuple):
    """Some rows of a table."""

    ids: Ids
    stamps: npt.NDArray[np.int64]
    """int64 [len(ids)]: the version of each row's last push."""
    columns: Columns
    """``weight`` [len(ids), dim] and, if asked for, the optimizer's states: as long, or [len(ids), 1]."""
    next: int
    """Where the next block begins; 0 after the last one."""


class TableState(NamedTuple):
    """A table as it is at one moment."""

    ids: Ids
    """Those of all rows; undefined where the stamp is 0."""
    stamps: npt.NDArray[np.int64]
    arenas: list[Kept]
    counts: npt.NDArray[np.uint8] | None
    counted: int
    lr: float


class RowWatch(Protocol):
    """Hears of the changes of a table."""

    def touched(self, slots: Slots) -> None:
        """Rows at these slots are written, or dropped."""

    def counted(self, ids: Ids, *, are_halved: bool) -> None:
        """A push of ids without a row was counted; all counts ``are_halved`` since."""


class EmbeddingRows:
    """The rows of one table on one server.

    Args:
        recipe: the arguments that it is made by.
        servers: how many share its rows.
        tier: where rows go that memory does not hold; None to hold all.
    """

    def __init__(self, recipe: EmbeddingSpec, servers: int = 1, tier: Tier | None = None) -> None:
        self.recipe = recipe
        self.kind = replace(recipe, seed=0)
        """The specification without the seed, which alike tables share."""
        self._hyper = recipe.hyper
        """The hyper-parameters, with the learning rate that was set last."""
        self.lr = recipe.hyper.number("lr")
        """The learning rate."""
        self.updater: Updater = create(recipe.hyper)
        self._rows_max = -(-recipe.max_rows // servers)
        columns = columns_of(recipe)
        self.arenas = Arenas(columns) if tier is None else TieredArenas(columns, tier)
        self.index = IdIndex()
        self._stamps: Stamps = np.zeros(0, np.int32)
        """By slot, the version that the last push to it made; 0 where there is no row. Of 64 bits from the
        version on that needs them."""
        self.admission = Admission(recipe.admit) if recipe.admit > 1 else None
        self.watch: RowWatch | None = None
        """Hears of what changes; None where no standby is told."""
        self.evicted = Evicted()
        self._marks: deque[tuple[float, int]] = deque()
        """Times, some 2 * AGE_STEPS of them in ``max_idle_s``, and the versions that were made then. The last
        update is among them."""

    def __len__(self) -> int:
        return len(self.index)

    def set_rate(self, lr: float) -> None:
        """Set the learning rate of later updates.

        Raises:
            ConfigError: if it is out of the optimizer's range; nothing is changed.
        """
        hyper = self._hyper.with_lr(lr)
        updater = create(hyper)
        if hyper.number("lr") <= self.lr:
            updater.take_over(self.updater)
        updater.demand(self.recipe.updated_in)
        self._hyper, self.updater, self.lr = hyper, updater, hyper.number("lr")

    @property
    def size_bytes(self) -> int:
        """Bytes of all memory, touched or not."""
        counts = 0 if self.admission is None else self.admission.counts.nbytes
        return self.arenas.size_bytes + self.index.size_bytes + self._stamps.nbytes + counts

    # --- rows that come ---------------------------------------------------------------------------

    def counts(self, ids: Ids) -> npt.NDArray[np.bool_]:
        """Count a push of ids without a row, each named once; return which of them get a row by it."""
        assert self.admission is not None
        before, admitted = self.admission.counted, self.admission.count(ids)
        if self.watch is not None:
            self.watch.counted(ids, are_halved=self.admission.counted != before + len(ids))
        return admitted

    def make_room(self) -> None:
        """Make room for the rows of all slots."""
        self.arenas.reserve(max(1, self.index.used))
        self._stamps = grown(self._stamps, len(self._stamps), self.index.used)

    def new_columns(self, weight: torch.Tensor) -> Columns:
        """Return new rows with these weights, and the optimizer's states of them."""
        return new_columns(self.recipe, self.updater, weight)

    def stamp(self, slots: Slots, versions: int | npt.NDArray[np.int64], newest: int) -> None:
        """Write the versions of rows, of which ``newest`` is the largest."""
        if newest > STAMP_MAX and self._stamps.dtype == np.int32:
            self._stamps = self._stamps.astype(np.int64)
        self._stamps.put(slots, versions)
        if self.watch is not None:
            self.watch.touched(slots)

    # --- rows that go -----------------------------------------------------------------------------

    def evict(self, version: int, now: float) -> None:
        """Drop the rows that are too old, or too many, when a push has made ``version``.

        Args:
            version: of the table.
            now: seconds on a clock of this process.
        """
        age, idle_s, most, first = self.recipe.max_age, self.recipe.max_idle_s, self._rows_max, 0
        self.evicted.begin(version)
        if age and version % max(1, age // AGE_STEPS) == 0:
            first = version - age
        if idle_s:
            if len(self._marks) > 1 and now < self._marks[-2][0] + idle_s / AGE_STEPS:
                self._marks.pop()
            self._marks.append((now, version))
            while len(self._marks) > 1 and self._marks[0][0] <= now - idle_s:
                first = max(first, self._marks.popleft()[1] + 1)
        if first > 0:
            self._evict(np.flatnonzero((self._stamps > 0) & (self._stamps < first)), version)
        if most and len(self) > most:
            self._evict(self._last(len(self) - most + most // EVICTED), version)

    def _evict(self, slots: Slots, version: int) -> None:
        if len(slots):
            self.evicted.add(self.index.ids_at(slots), version, len(self))
            self.drop(slots)

    def _last(self, count: int) -> Slots:
        """Return the slots of the ``count`` rows that were pushed to least, or last longest ago; of equal
        ones the lowest ids."""
        slots = np.flatnonzero(self._stamps)
        ranks: npt.NDArray[Any] = self._stamps[slots]
        if self.recipe.half_life:
            some = (slots[begin : begin + USES_COUNT] for begin in range(0, len(slots), USES_COUNT))
            ranks = np.concatenate([self.arenas.read(part, (USES,))[USES].numpy()[:, 0] for part in some])
        last = np.partition(ranks, count - 1)[count - 1]
        less, equal = slots[ranks < last], slots[ranks == last]
        order = np.argsort(self.index.ids_at(equal))
        return np.concatenate([less, equal[order[: count - len(less)]]])

    def hottest(self, count: int, step: int) -> dict[str, float]:
        """Return the uses of the ``count`` rows in memory that were used most, by id, the most first.

        The column of uses is compared once with the least use that was found so far, and copied nowhere.

        Args:
            count: at least 1.
            step: the number of updates of the table, to which uses decay.
        """
        slots, uses = np.empty(0, np.int64), np.empty(0)
        for arena in self.arenas:
            column = arena.columns[USES].numpy()[:, 0]
            (at,) = (column > (uses.min() if len(uses) == count else -math.inf)).nonzero()
            there = self.arenas.slots_of(arena.start + at)
            is_row = (there >= 0) & self.has_row(there)
            slots, uses = np.append(slots, there[is_row]), np.append(uses, column[at[is_row]])
            if len(uses) > count:
                most = uses.argpartition(-count)[-count:]
                slots, uses = slots[most], uses[most]
        ids = self.index.ids_at(slots)
        decayed = np.exp2(np.minimum(uses - step / self.recipe.half_life, USES_LOG2_MAX))
        return {str(ids[at]): float(decayed[at]) for at in np.lexsort((ids, -uses))}

    def drop(self, slots: Slots) -> None:
        """Drop the rows at these slots."""
        if self.watch is not None:
            self.watch.touched(slots)
        self._stamps[slots] = 0
        self.arenas.forget(slots)
        self.index.drop(slots)

    # --- copies -----------------------------------------------------------------------------------

    def has_row(self, slots: Slots) -> npt.NDArray[np.bool_]:
        """Return which of these slots have a row."""
        is_known = slots < len(self._stamps)
        is_known[is_known] = self._stamps[slots[is_known]] > 0
        return is_known

    def stamps_at(self, slots: Slots) -> npt.NDArray[np.int64]:
        """Return the versions of the last pushes to rows."""
        return self._stamps[slots].astype(np.int64)

    def place(self, slots: Slots, ids: Ids, stamps: npt.NDArray[np.int64], columns: Columns) -> None:
        """Let slots be as they are in another copy: the first have the rows of ``ids``, the others none."""
        live, had = slots[: len(ids)], self.has_row(slots)
        is_same = had[: len(ids)].copy()
        is_same[is_same] = self.index.ids_at(live[is_same]) == ids[is_same]
        had[: len(ids)] &= ~is_same
        if had.any():
            self.drop(slots[had])
        if len(live):
            self.index.put(live[~is_same], ids[~is_same])
            self.make_room()
            self.stamp(live, stamps, int(stamps.max()))
            for some in (is_same, ~is_same):  # a row that is new lies nowhere yet
                part = {name: column[torch.from_numpy(some)] for name, column in columns.items()}
                self.arenas.group((self.arenas,)).write(live[some], (int(some.sum()),), part)
            self.arenas.settle()

    # --- exports and images -----------------------------------------------------------------------

    def block(self, start: int, count: int, since: int = 0, *, with_state: bool = False) -> ExportBatch:
        """Return rows from slot ``start`` on: ``count`` at most, and some blocks have none.

        A row keeps its slot as long as it is there: of the rows that are there all the time, an export
        block by block has each once, whatever is pushed meanwhile. With ``since``, ids that have lost their
        rows after it follow, with stamps of 0 and first values.

        Args:
            start: 0, or ``next`` of the block before.
            count: at least 1.
            since: only rows that a push has changed after this version.
            with_state: the optimizer's states, too.
        """
        gone = self.evicted.after(since) if since else np.empty(0, np.int64)
        if start >= BEHIND:
            gone = gone[start - BEHIND :]
            ids = gone[:count]
            ids = ids[self.index.find(ids) < 0]
            columns = self.new_columns(self.recipe.first_rows(ids))
            names = columns if with_state else (WEIGHT,)
            following = start + count if len(gone) > count else 0
            return ExportBatch(ids, np.zeros_like(ids), {name: columns[name] for name in names}, following)
        stop = min(start + SCAN_SLOTS, self.index.used)
        slots = start + np.flatnonzero(self._stamps[start:stop] > since)
        if len(slots) > count:
            slots = slots[:count]
            stop = int(slots[-1]) + 1
        columns = self.arenas.read(slots, None if with_state else (WEIGHT,))
        following = stop if stop < self.index.used else BEHIND if len(gone) else 0
        return ExportBatch(self.index.ids_at(slots), self.stamps_at(slots), columns, following)

    def keep(self) -> tuple[TableState, Callable[[], None]]:
        """Return the table as it is now, and a function that releases it."""
        slots, arenas, release = self.arenas.keep(self.index.used)
        admission = self.admission
        kept = TableState(
            self.index.ids_at(slots),
            self.stamps_at(slots),
            arenas,
            None if admission is None else admission.counts.copy(),
            0 if admission is None else admission.counted,
            self.lr,
        )
        return kept, release

    def put(self, ids: Ids, stamps: npt.NDArray[np.int64], columns: Columns) -> None:
        """Take in rows that are not here yet, as :meth:`block` or an image has them."""
        slots = self.index.add(ids)
        self.make_room()
        self.stamp(slots, stamps, int(stamps.max(initial=0)))
        if columns.keys() != self.arenas.columns.keys():
            first = self.recipe.first_rows(ids)
            columns = self.new_columns(first) | columns
        self.arenas.group((self.arenas,)).write(slots, (len(ids),), columns)
        self.arenas.settle()

    def count_in(self, counts: npt.NDArray[np.uint8], counted: int) -> None:
        """Take in how often ids without a row were pushed, as an image has it."""
        if self.admission is not None and self.admission.counts.shape == counts.shape:
            self.admission.merge(counts, counted)

    def check(self) -> None:
        """Assert the invariants: whatever has a slot has a stamp, and room for its row."""
        self.index.check()
        self.arenas.check()
        used = self.index.used
        assert np.count_nonzero(self._stamps[:used]) == len(self)
        assert not self._stamps[used:].any()
        assert self.arenas.covers(used)
        if self._rows_max:
            assert len(self) <= self._rows_max
