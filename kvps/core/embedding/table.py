"""One server's rows of an embedding table: made by their first push, and evicted.

A row comes into being by a *push* and never by a pull. So what a table holds follows from its pushes,
which are applied once each, in rounds or by number; a pull, which may be sent again or be made by a
worker that is replaced, changes nothing. To a pull, an id without a row has its first value, which
depends on the id alone: it equals a row that has not been updated yet.

With ``admit`` n an id gets its row at its n-th push; the gradients before are dropped. With
``max_age`` a row goes that had no push for so many versions, with ``max_rows`` the oldest go: an
eighth of them at once, since the index is made anew for it, and so seldom. An id that comes again
begins again.

The optimizer updates the rows that a push names, and no others: momenta of the rest stand still,
as :class:`torch.optim.SparseAdam` has it. Its step is that of the whole table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvps.core.embedding.arena import Arena, Arenas, Columns, Slots
from kvps.core.embedding.id_hash import Ids
from kvps.core.embedding.id_index import IdIndex
from kvps.core.embedding.pages import grown
from kvps.core.embedding.spec import WEIGHT, Admission, EmbeddingSpec, columns_of, new_state
from kvps.core.optim.sparse_update import update_placed
from kvps.core.optim.torch_rules import Terms, Updater, create
from kvps.dtypes import summed_in
from kvps.tensors import TORCH

SCAN_SLOTS = 1 << 20
"""Maximum slots that one block of an export scans."""
AGE_STEPS = 16
"""Old rows are looked for so many times per ``max_age``: a row may outlive it by 1 / AGE_STEPS of it."""
FIRST_COUNT = 16 << 10
"""Elements whose first values are computed at once: what is between stays in a core's cache."""
PULLED_MAX = 1 << 17
"""Maximum ids of pulls whose slots are kept, 16 bytes each, until they are pushed to."""
STAMP_MAX = 2**31 - 1
"""Largest version of 32 bits."""
EVICTED = 8
"""One row in so many is evicted when there are too many."""

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
    """Slot -> id; undefined where the stamp is 0."""
    stamps: npt.NDArray[np.int64]
    arenas: list[Arena]
    counts: npt.NDArray[np.uint8] | None
    counted: int
    lr: float


class EmbeddingRows:
    """The rows of one table on one server.

    Args:
        recipe: what it is made by.
        servers: how many share its rows.
    """

    def __init__(self, recipe: EmbeddingSpec, servers: int = 1) -> None:
        self.recipe = recipe
        self._hyper = recipe.hyper
        """The hyper-parameters, with the learning rate that was set last."""
        self.updater: Updater = create(recipe.hyper)
        self._rows_max = -(-recipe.max_rows // servers)
        self._arenas = Arenas(columns_of(recipe))
        self._index = IdIndex()
        self._stamps: Stamps = np.zeros(0, np.int32)
        """By slot, the version that the last push to it made; 0 where there is no row. Of 64 bits from the
        version on that needs them."""
        self._admission = Admission(recipe.admit) if recipe.admit > 1 else None
        self._pulled: dict[tuple[int, int, int], tuple[Ids, Slots]] = {}
        """By (number of ids, first id, last id), oldest first: ids and slots that pulls have found."""
        self._pulled_count = 0
        """Number of ids in it."""

    def __len__(self) -> int:
        return len(self._index)

    @property
    def lr(self) -> float:
        """The learning rate."""
        return self._hyper.number("lr")

    def set_rate(self, lr: float) -> None:
        """Set the learning rate of later updates.

        Raises:
            ConfigError: if it is out of the optimizer's range; nothing is changed.
        """
        hyper = self._hyper.with_lr(lr)
        updater = create(hyper)
        if hyper.number("lr") <= self._hyper.number("lr"):
            updater.take_over(self.updater)
        updater.demand(TORCH[self.recipe.dtype])
        self._hyper, self.updater = hyper, updater

    @property
    def summed_in(self) -> torch.dtype:
        """The type in which gradients are summed."""
        return TORCH[summed_in(self.recipe.dtype)]

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns: ``weight``, and the optimizer's states."""
        return tuple(self._arenas.columns)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row's weights."""
        return self.recipe.dim * TORCH[self.recipe.dtype].itemsize

    @property
    def size_bytes(self) -> int:
        """Bytes of all memory, touched or not."""
        counts = 0 if self._admission is None else self._admission.counts.nbytes
        return self._arenas.size_bytes + self._index.size_bytes + self._stamps.nbytes + counts

    # --- pulls and pushes -----------------------------------------------------------------------

    def pull(self, ids: Ids, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the rows of ``ids``, [len(ids), dim]; first values where there is no row.

        Args:
            ids: they may be repeated.
            out: where the rows go, as long and contiguous; None for a tensor of their own.
        """
        if out is None:
            out = torch.empty((len(ids), self.recipe.dim), dtype=TORCH[self.recipe.dtype])
        slots = self._index.find(ids)
        self._note(ids, slots)
        (absent,) = (slots < 0).nonzero()
        if len(absent) < len(ids):
            slots[absent] = slots.max()  # rows of absent ids are written over below
            self._arenas.weights(slots, out)
        if len(absent):
            out.index_copy_(0, torch.from_numpy(absent), self._first(ids.take(absent)))
        return out

    def push(self, ids: Ids, gradients: torch.Tensor, *, version: int, step: int) -> None:
        """Update the rows of ``ids`` by one push or round.

        Args:
            ids: each named once.
            gradients: [len(ids), dim], contiguous, of the type :attr:`summed_in`; they are only read.
            version: what the table's version is by this; 1 or more.
            step: how many updates the table has had, this one included.
        """
        slots, taken = self._admit(ids, self._found(ids))
        if len(slots):
            self._update(slots, gradients if taken is None else gradients.index_select(0, taken), step)
            self._stamp(slots, version, version)
        self._evict(version)

    def _note(self, ids: Ids, slots: Slots) -> None:
        """Keep what a pull has found, for the push of its gradients."""
        if not 0 < len(ids) <= PULLED_MAX:
            return
        what = len(ids), int(ids[0]), int(ids[-1])
        if what in self._pulled:
            self._forget(what)
        self._pulled[what] = ids, slots.copy()
        self._pulled_count += len(ids)
        while self._pulled_count > PULLED_MAX:
            self._forget(next(iter(self._pulled)))

    def _forget(self, what: tuple[int, int, int]) -> None:
        self._pulled_count -= len(self._pulled.pop(what)[0])

    def _found(self, ids: Ids) -> Slots:
        """Return the slots of the ids of a push: those that a pull has found, if it had the same ids."""
        what = (len(ids), int(ids[0]), int(ids[-1])) if len(ids) else (0, 0, 0)
        if what not in self._pulled or not np.array_equal(self._pulled[what][0], ids):
            return self._index.find(ids)
        _, slots = self._pulled[what]
        self._forget(what)
        (absent,) = (slots < 0).nonzero()
        if len(absent):  # another push may have made their rows since
            slots[absent] = self._index.find(ids.take(absent))
        return slots

    def _admit(self, ids: Ids, slots: Slots) -> tuple[Slots, torch.Tensor | None]:
        """Give rows to ids that may have one; return the slots of all that have, and which ids
        these are, None for all."""
        (fresh,) = (slots < 0).nonzero()
        if not len(fresh):
            return slots, None
        if self._admission is not None:
            fresh = fresh[self._admission.count(ids.take(fresh))]
        if len(fresh):
            slots[fresh] = self._add(ids.take(fresh))
        (there,) = (slots >= 0).nonzero()
        if len(there) == len(ids):
            return slots, None
        return slots.take(there), torch.from_numpy(there)

    def _add(self, ids: Ids) -> Slots:
        slots = self._index.add(ids)
        self._arenas.reserve(self._index.used)
        self._stamps = grown(self._stamps, len(self._stamps), self._index.used)
        weight = self._first(ids)
        self._arenas.write(slots, {WEIGHT: weight} | new_state(self.updater, weight))
        return slots

    def _stamp(self, slots: Slots, versions: int | npt.NDArray[np.int64], newest: int) -> None:
        """Write the versions of rows, of which ``newest`` is the largest."""
        if newest > STAMP_MAX and self._stamps.dtype == np.int32:
            self._stamps = self._stamps.astype(np.int64)
        self._stamps.put(slots, versions)

    def _first(self, ids: Ids) -> torch.Tensor:
        recipe = self.recipe
        rows = torch.empty((len(ids), recipe.dim), dtype=TORCH[recipe.dtype])
        for begin in range(0, len(ids), at_once := max(1, FIRST_COUNT // recipe.dim)):
            some = slice(begin, begin + at_once)
            rows[some] = torch.from_numpy(recipe.first.values(ids[some], recipe.dim, recipe.seed))
        return rows

    def _update(self, slots: Slots, gradients: torch.Tensor, step: int) -> None:
        placed = self._arenas.places_to_write(slots)
        terms = Terms(step, *self._hyper.for_key(""))
        update_placed(placed.pop(WEIGHT), placed, gradients, self.updater, terms, is_read=True)

    # --- rows that go -----------------------------------------------------------------------------

    def _evict(self, version: int) -> None:
        age, most = self.recipe.max_age, self._rows_max
        if age and version % max(1, age // AGE_STEPS) == 0:
            self._drop(np.flatnonzero((self._stamps > 0) & (self._stamps < version - age)))
        if most and len(self) > most:
            self._drop(self._oldest(len(self) - most + most // EVICTED))

    def _oldest(self, count: int) -> Slots:
        """Return the slots of the ``count`` oldest rows; of equally old ones the lowest ids."""
        slots = np.flatnonzero(self._stamps)
        stamps = self._stamps[slots]
        last = np.partition(stamps, count - 1)[count - 1]
        older, equal = slots[stamps < last], slots[stamps == last]
        order = np.argsort(self._index.ids_at(equal))
        return np.concatenate([older, equal[order[: count - len(older)]]])

    def _drop(self, slots: Slots) -> None:
        self._stamps[slots] = 0
        self._index.drop(slots)
        self._pulled.clear()
        self._pulled_count = 0

    # --- exports and images -----------------------------------------------------------------------

    def block(self, start: int, count: int, since: int = 0, *, with_state: bool = False) -> ExportBatch:
        """Return rows from slot ``start`` on: ``count`` at most, and some blocks have none.

        A row keeps its slot as long as it is there: of the rows that are there all the time, an export
        block by block has each once, whatever is pushed meanwhile.

        Args:
            start: 0, or ``next`` of the block before.
            count: at least 1.
            since: only rows that a push has changed after this version.
            with_state: the optimizer's states, too.
        """
        stop = min(start + SCAN_SLOTS, self._index.used)
        slots = start + np.flatnonzero(self._stamps[start:stop] > since)
        if len(slots) > count:
            slots = slots[:count]
            stop = int(slots[-1]) + 1
        columns = self._arenas.read(slots) if with_state else {WEIGHT: self._arenas.weights(slots)}
        following = stop if stop < self._index.used else 0
        return ExportBatch(
            self._index.ids_at(slots), self._stamps[slots].astype(np.int64), columns, following
        )

    def keep(self) -> tuple[TableState, Callable[[], None]]:
        """Return the table as it is now, and a function that releases it."""
        arenas, release = self._arenas.keep()
        used, admission = self._index.used, self._admission
        kept = TableState(
            self._index.ids_at(np.arange(used)),
            self._stamps[:used].astype(np.int64),
            arenas,
            None if admission is None else admission.counts.copy(),
            0 if admission is None else admission.counted,
            self.lr,
        )
        return kept, release

    def put(self, ids: Ids, stamps: npt.NDArray[np.int64], columns: Columns) -> None:
        """Take in rows that are not here yet, as :meth:`block` or an image has them."""
        slots = self._add(ids)
        self._stamp(slots, stamps, int(stamps.max(initial=0)))
        fresh = self._arenas.read(slots)
        self._arenas.write(slots, fresh | {name: columns[name] for name in fresh if name in columns})

    def count_in(self, counts: npt.NDArray[np.uint8], counted: int) -> None:
        """Take in how often ids without a row were pushed, as an image has it."""
        if self._admission is not None and self._admission.counts.shape == counts.shape:
            self._admission.merge(counts, counted)

    def check(self) -> None:
        """Assert the invariants: whatever has a slot has a stamp, and room for its row."""
        self._index.check()
        self._arenas.check()
        used = self._index.used
        assert np.count_nonzero(self._stamps[:used]) == len(self)
        assert not self._stamps[used:].any()
        assert self._arenas.room >= used
        if self._rows_max:
            assert len(self) <= self._rows_max
