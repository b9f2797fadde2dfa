"""Memory budget of a server: what its stores will take, checked before anything is allocated (``Overload``).

A key takes more than its weights: a second buffer while readers hold the first, the sum of an open round, and
the optimizer's state once it is updated. All of that is reserved when the key is declared and when the
optimizer is set, so that a model that does not fit is refused there, with the sum, and not by the kernel in
the middle of training. What a push or an answer takes on its way is bounded by the protocol's windows, and is
within the fifth of the memory that a server leaves alone by default. Tables grow by pushes, and count what
they hold; with a tier on a disk (:mod:`kvps.core.embedding.tiered`), their rows have what nothing else
takes. Rounds beyond the oldest one are opened while what is left has room for their sums: a push that
would open another is not taken in, and is sent again later.

Memory pressure
---------------
The memory budget counts what values take. It does not see the Python objects of keys and requests, packets on
their way, plug-ins, and other processes of the container. When memory runs out, the kernel kills the largest
process there, which is usually the server. Its job would roll back, grow again, and lose it again.

So a server that is short of memory refuses what would make it grow for good: stores, keys, optimizers, tables
and pushes to them. Rounds ahead of the oldest one wait. What it has, it serves: pushes to keys, pulls and
checkpoints go on. The readings come from outside.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from operator import add
from typing import NamedTuple, NoReturn

from kvps.core.limits import TABLE, remedy
from kvps.core.optim.base import Updater
from kvps.core.placement import EMBEDDING
from kvps.core.server.chunks.slab import Chunks
from kvps.dtypes import BY_NAME, summed_in
from kvps.errors import Overload
from kvps.phrases import and_more, bytes_in_words
from kvps.protocol.stores import Open
from kvps.tensors import TORCH

RELIEF = 0.95
"""New work is taken again below this part of the limit: a reading that wavers does not change the answer each
time."""


class MemoryPressure:
    """The last reading of the memory in use, and what follows from it.

    Args:
        percent_max: percent of the memory in use, from which on new work is refused.

    Example:
        >>> pressure = MemoryPressure(95)
        >>> pressure.take_in(15 << 30, 16 << 30), pressure.is_high
        ('', False)
        >>> pressure.take_in(31 << 29, 16 << 30)
        'is short of memory: 15.5 GiB of 16 GiB are in use (97 %), and new work is refused from 95 % on'
    """

    def __init__(self, percent_max: int = TABLE["used_memory"].default) -> None:
        self._percent_max = percent_max
        self.used_bytes, self.total_bytes = 0, 0
        """The last reading: memory in use, and all that the machine or container has; 0 before the first."""
        self.is_high = False
        """New work is refused."""

    @property
    def used_share(self) -> float:
        """The memory in use as a part of all; 0 before the first reading."""
        return self.used_bytes / self.total_bytes if self.total_bytes else 0.0

    def take_in(self, used_bytes: int, total_bytes: int) -> str:
        """Take in a reading; return a text for the log if a state has changed by it, else "".

        Args:
            used_bytes: memory in use, without what the kernel can free at once.
            total_bytes: memory of the machine or container.
        """
        self.used_bytes, self.total_bytes = used_bytes, total_bytes
        percent = 100 * self.used_share
        was_high = self.is_high
        self.is_high = percent >= self._percent_max * (RELIEF if was_high else 1.0)
        if self.is_high == was_high:
            return ""
        if self.is_high:
            return f"is short of memory: {self}, and new work is refused from {self._percent_max} % on"
        return f"has memory again: {self}, and new work is taken"

    def demand_room(self, what: str) -> None:
        """Check that new work may begin.

        Raises:
            Overload: if the server is short of memory.
        """
        if self.is_high:
            raise Overload(
                f"{what} is refused: {self} on this server's machine or container, and new work is refused "
                f"from {self._percent_max} % on. Give it more memory, end other processes there, or add "
                f"servers; or {remedy('used_memory')}",
                limit="used_memory",
            )

    def __str__(self) -> str:
        return (
            f"{bytes_in_words(self.used_bytes)} of {bytes_in_words(self.total_bytes)} are in use "
            f"({100 * self.used_share:.0f} %)"
        )


class Reservation(NamedTuple):
    """Use -> the bytes that values take for it."""

    weights: int = 0
    copies: int = 0
    sums: int = 0
    state: int = 0
    residuals: int = 0
    tables: int = 0
    publications: int = 0

    def __str__(self) -> str:
        titles = (
            *("weights", "second buffers", "sums of open rounds", "optimizer state"),
            *("residuals", "tables", "publications"),
        )
        terms = [
            f"{title} {bytes_in_words(count)}" for title, count in zip(titles, self, strict=True) if count
        ]
        return f"{' + '.join(terms)} = {bytes_in_words(sum(self))}"


class MemoryTerms(NamedTuple):
    """The memory of one store's keys, besides their weights."""

    gradients: int
    """Gradients that an open round holds: 1, their sum; those of all ranks; 0 where pushes are applied one by
    one."""
    updater: Updater | None
    has_residuals: bool = False
    """Answers are compressed, and their errors kept as residuals."""

    def reserve(self, counts: Mapping[str, int]) -> Reservation:
        """Return what so many elements of each type take."""
        weights = sums = state = residuals = 0
        for dtype, count in counts.items():
            weights += count * BY_NAME[dtype].itemsize
            sums += self.gradients * count * BY_NAME[summed_in(dtype)].itemsize
            if self.updater is not None and BY_NAME[dtype].kind != "int":
                state += count * self.updater.state_bytes(TORCH[dtype])
            if self.has_residuals and dtype == "float32":
                residuals += count * BY_NAME[dtype].itemsize
        return Reservation(weights, weights, sums, state, residuals)


class MemoryBudget:
    """The memory that all stores of a server may take.

    Args:
        chunks: the chunks, which count the elements of each store.
        limit_bytes: the limit; None for no limit.
        workers: how many push.
        keys_max: keys of all stores; each takes 1 to 3 KiB of Python objects, however few its elements.
        used_max: percent of the machine's memory in use from which on new work is refused.
    """

    def __init__(
        self,
        chunks: Chunks,
        limit_bytes: int | None,
        workers: int = 1,
        keys_max: int = TABLE["keys"].default,
        used_max: int = TABLE["used_memory"].default,
    ) -> None:
        self._chunks = chunks
        self._workers = workers
        self._keys_max = keys_max
        self.limit_bytes = limit_bytes
        self.pressure = MemoryPressure(used_max)
        self.terms: dict[str, MemoryTerms] = {}
        """Store -> what its keys take."""
        self.keys: dict[str, Collection[str]] = {}
        """Store -> its keys."""
        self.publications = 0
        """Bytes of the versions that readers may read."""
        self._tier = chunks.tier
        if self._tier is not None:
            self._tier.room = self._room

    def _room(self) -> float:
        """Return the bytes that are left for rows in memory."""
        return math.inf if self.limit_bytes is None else self.limit_bytes - self._fixed(self.reserved())

    def _fixed(self, reserved: Reservation) -> int:
        """Return the bytes of all that cannot go to a disk."""
        return sum(reserved) - (0 if self._tier is None else self._tier.hot_bytes)

    def drop(self, store: str) -> None:
        """Count a store no more."""
        del self.terms[store], self.keys[store]

    def gradients_of(self, opened: Open) -> int:
        """Return how many gradients an open round of a store holds; see :class:`MemoryTerms`."""
        if opened.mode != "sync":
            return 0
        return self._workers if opened.deterministic else 1

    def demand_keys(self, store: str, keys: Sequence[str], changed: Mapping[str, int]) -> None:
        """Check that there is room for keys, or for a table.

        Args:
            store: whose they are.
            keys: their names.
            changed: by element type, how many elements more the store will have.

        Raises:
            Overload: if there is not.
        """
        if sum([len(known) for known in self.keys.values()]) + len(keys) > self._keys_max:
            raise Overload(
                f"{len(keys)} keys of store {store!r} are too many: a server holds {self._keys_max:,} of all "
                "stores. Put several tensors into one key, or rows into a table, or add servers; "
                f"{remedy('keys')}",
                limit="keys",
            )
        if keys:
            kind = "table" if keys[0].startswith(EMBEDDING) else "key"
            name = keys[0].removeprefix(EMBEDDING)
            what = f"{kind} {name!r}{and_more(len(keys) - 1)}"
            self.pressure.demand_room(f"{what} of store {store!r}")
            self._demand(what, store, self.terms[store], changed)

    def demand_optimizer(self, store: str, updater: Updater) -> None:
        """Check that there is room for the state of an optimizer.

        Raises:
            Overload: if there is not.
        """
        what = f"optimizer {updater.hyper.name!r}"
        self.pressure.demand_room(f"{what} of store {store!r}")
        self._demand(what, store, self.terms[store]._replace(updater=updater), {})

    def demand_residuals(self, store: str) -> None:
        """Check, once, that there is room for the residuals of a store whose answers are compressed.

        Raises:
            Overload: if there is not.
        """
        terms = self.terms[store]
        if not terms.has_residuals:
            self.pressure.demand_room(f"compression of the answers of store {store!r}")
            self._demand("residuals", store, terms := terms._replace(has_residuals=True), {})
            self.terms[store] = terms

    def demand_growth(self, table: str) -> None:
        """Check that a table may have more rows: they may be more than there is room for by one push.

        Raises:
            Overload: if there is no room left.
            StorageError: if rows should go to a disk, and cannot.
        """
        self.pressure.demand_room(f"a push to table {table.removeprefix(EMBEDDING)!r}, which grows by it,")
        reserved = self.reserved()
        if self.limit_bytes is not None and self._fixed(reserved) > self.limit_bytes:
            raise Overload(
                f"no room for more rows of table {table.removeprefix(EMBEDDING)!r}: "
                f"{self._account(reserved)} Evict rows (evict=), add servers or raise the limit",
                limit="rows",
            )
        if self._tier is not None:
            self._tier.settle()

    def lacks_room(self, more: int) -> bool:
        """Return whether so many bytes more of publications are too many."""
        return self.limit_bytes is not None and self._fixed(self.reserved()) + more > self.limit_bytes

    def demand_publication(self, what: str, more: int) -> None:
        """Check that there is room for so many bytes more of publications.

        Raises:
            Overload: if there is not.
        """
        self.pressure.demand_room(what)
        if self.lacks_room(more):
            reserved = self.reserved()
            reserved = reserved._replace(publications=reserved.publications + more)
            advice = (
                "Keep fewer versions (keep=), publish a smaller type (dtype=), add servers or raise the limit"
            )
            self._refuse(what, reserved, advice)

    def has_room_for(self, rounds: int) -> bool:
        """Return whether so many rounds may be open beyond the oldest one of each span."""
        if self.pressure.is_high:
            return False
        if self.limit_bytes is None:
            return True
        reserved = self.reserved()
        return self._fixed(reserved) + rounds * reserved.sums <= self.limit_bytes

    def reserved(
        self, store: str = "", terms: MemoryTerms | None = None, changed: Mapping[str, int] | None = None
    ) -> Reservation:
        """Return what all stores take; with ``terms``, if one had these and so many elements more."""
        if self._tier is None:
            tables = sum(self._chunks.table_bytes.values())
        else:
            tables = self._tier.index_bytes + self._tier.hot_bytes
        total = Reservation(tables=tables, publications=self.publications)
        for name, known in self.terms.items():
            counts = self._chunks.counts[name]
            if terms is not None and name == store:
                known, counts = terms, Counter(counts)
                counts.update(changed or {})
            total = Reservation(*map(add, total, known.reserve(counts)))
        return total

    def _demand(self, what: str, store: str, terms: MemoryTerms, changed: Mapping[str, int]) -> None:
        reserved = self.reserved(store, terms, changed)
        if self.limit_bytes is not None and self._fixed(reserved) > self.limit_bytes:
            advice = "Add servers (each holds a part), raise the limit, or use an optimizer with less state"
            self._refuse(f"{what} of store {store!r}", reserved, advice)
        if self._tier is not None:
            self._tier.settle(sum(reserved) - sum(self.reserved()))

    def _refuse(self, what: str, reserved: Reservation, advice: str) -> NoReturn:
        raise Overload(f"no room for {what}: {self._account(reserved)} {advice}", limit="memory")

    def _account(self, reserved: Reservation) -> str:
        assert self.limit_bytes is not None
        return (
            f"{reserved}, and the limit of this server is {bytes_in_words(self.limit_bytes)} "
            "(--memory-limit; by default 80 % of the memory of the machine or its container, divided by the "
            "servers that are started together)."
        )
