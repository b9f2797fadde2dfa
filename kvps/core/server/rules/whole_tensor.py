"""Norms of a whole tensor whose pieces lie in several chunks or on several servers.

One update of one tensor is named by (store, key, rank, number): by the round, or where each push is applied
by itself, by the push. Every server measures its pieces and tells the sums to the other holders; a server
that has all of them updates its pieces. In a round every server measures against the weights that the round
before left, so all reach the same numbers. Where pushes are applied one by one they are measured as they
arrive, so that two servers that see two pushes in different order never wait for each other.

What is measured depends on the store. Sums of squares are for rules that need norms of whole
tensors. Where updates that are not finite are dropped, the first sum *counts* the values that are
not: every server adds up the same counts, so all drop the update or none does. An optimizer may be
set in between, and other sums be told by one server than by another; the counts they have in common.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from functools import reduce
from typing import NamedTuple

import torch

from kvps.core.gradients import DenseGradient, OwnSum
from kvps.core.nonfinite import Flaw, count_nonfinite
from kvps.core.optim.base import Terms, Updater
from kvps.core.row_gradients import RowGradient
from kvps.core.server.chunks.rounds import FreeSpan, PendingUpdate, Span
from kvps.core.server.chunks.slab import Chunks
from kvps.core.server.rules.rule import Gate, Rule, Workshop, segments
from kvps.core.server.store import ServerStore, Shard
from kvps.dtypes import BY_NAME
from kvps.errors import KeyNotFound, Mismatch, ProtocolError
from kvps.protocol.envelope import WINDOW
from kvps.protocol.stores import Norms
from kvps.tensors import TORCH

NormId = tuple[str, str, int | None, int]
"""(store, key, rank or None, number)."""
NO_NUMBER = -1.0
"""Stands for a sum of squares that is NaN or infinity; none is negative."""


class PartialSums(NamedTuple):
    """One server's sums over its part of a tensor."""

    sums: tuple[float, ...]
    """Empty while they are unknown."""
    culprits: tuple[int, ...] = ()
    """Ranks that pushed values that are not finite."""


class PartialNorms:
    """The sums over one tensor for one update, as far as they are known.

    Args:
        number: which update.
        counts: the first of the sums counts what is not finite.
    """

    def __init__(self, number: NormId, counts: bool = False) -> None:
        self.id = number
        self.counts = counts
        self.holders: frozenset[int] = frozenset()
        """The other servers with pieces of it; known once a piece here was measured."""
        self._pieces_left: int | None = None
        self._local: torch.Tensor | None = None
        self._remote: dict[int, torch.Tensor] = {}
        self._culprits: set[int] = set()

    def measure(
        self, sums: torch.Tensor, pieces: int, holders: frozenset[int], culprits: Iterable[int] = ()
    ) -> None:
        """Add the sums of one of the ``pieces`` of this server; ``holders`` have the others.

        ``culprits`` are the ranks among whose pushes the values are that are not finite.
        """
        if self._pieces_left is None:
            self._pieces_left, self.holders = pieces, holders
        assert self._pieces_left, "more pieces measured than there are"
        self._pieces_left -= 1
        sums = torch.where(sums.isfinite(), sums, math.nan)  # as the others will read it
        self._local = sums if self._local is None else _plus(self._local, sums)
        self._culprits.update(culprits)
        for server, heard in list(self._remote.items()):
            if not self.counts and len(heard) != len(sums):
                del self._remote[server]

    def hear(self, server: int, sums: tuple[float, ...], culprits: Iterable[int] = ()) -> None:
        """Take in another server's sums; repetitions are fine.

        Raises:
            Mismatch: if they are not as many as this server's.
        """
        if not self.counts and self._local is not None and len(sums) != len(self._local):
            raise Mismatch(
                f"key {self.id[1]!r}: server {server} sent {len(sums)} sums of squares, expected "
                f"{len(self._local)}; do both have the same optimizer?"
            )
        heard = torch.tensor(sums, dtype=torch.float64)
        self._remote[server] = torch.where(heard < 0, math.nan, heard)
        self._culprits.update(culprits)

    @property
    def mine(self) -> tuple[float, ...]:
        """This server's sums, as they are sent; empty while a piece is missing."""
        if self._pieces_left != 0 or self._local is None:
            return ()
        return tuple(self._local.nan_to_num(NO_NUMBER).tolist())

    @property
    def culprits(self) -> tuple[int, ...]:
        """Ranks that pushed values that are not finite, as far as is known."""
        return tuple(sorted(self._culprits))

    @property
    def told(self) -> PartialSums:
        """This server's sums and culprits."""
        return PartialSums(self.mine, self.culprits)

    @property
    def unheard(self) -> frozenset[int]:
        """The servers whose sums are missing."""
        return self.holders - self._remote.keys()

    @property
    def complete(self) -> bool:
        """Whether the whole tensor is measured."""
        return self._pieces_left == 0 and not self.unheard

    def total(self, me: int) -> torch.Tensor:
        """The sums over the whole tensor, added in the order of the servers' ranks.

        Every server adds the same numbers in the same order, so all get the same bits.
        """
        assert self._local is not None
        known = {me: self._local, **self._remote}
        return reduce(_plus, [known[server] for server in sorted({me, *self.holders})])


def _plus(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Add sums; of sums measured under two rules, the ones that both have."""
    width = min(len(left), len(right))
    return left[:width] + right[:width]


class GlobalNorms:
    """The updates of one server that wait for norms of their whole tensor."""

    def __init__(self, stores: Mapping[str, ServerStore], chunks: Chunks, shop: Workshop) -> None:
        self._stores = stores
        self._chunks = chunks
        self._shop = shop
        self.open: dict[NormId, PartialNorms] = {}
        """Sums for updates that are not made yet."""
        self.closed: dict[NormId, PartialSums] = {}
        """This server's sums for updates that are made, for servers that missed them: the last
        WINDOW of each (store, key, rank)."""

    # --- this server's part -----------------------------------------------------------------

    def begin(self, rule: Rule, span: Span, due: PendingUpdate) -> None:
        """Let ``due`` wait until its whole tensor is measured; measure the part of it that is here."""
        self._add_up(rule, due)
        span.due.append(due)
        if due.rank is None and len(span.due) > 1:
            return  # a round is measured against the weights that the round before it leaves
        self._measure(rule, span, due)

    def _add_up(self, rule: Rule, due: PendingUpdate) -> None:
        """Sum a gradient in memory of its own, for it may be lent and is used twice; note its flaw."""
        updater, may_drop = rule.store.updater, rule.store.may_drop(rule.chunk.dtype)
        if due.sum.is_sparse and not (updater is not None and updater.needs_norms):
            due.flaw, rows = flaw_of_rows(rule, due)
            due.sum = OwnSum((rows,))
            return
        whole = torch.empty(len(due.sum), dtype=rule.chunk.summed_in)
        if may_drop:
            due.flaw = flaw_of(rule, due, whole)
        else:
            due.sum.into(whole, 0, len(whole))
        due.sum = OwnSum((DenseGradient([whole]),))

    def _measure(self, rule: Rule, span: Span, due: PendingUpdate) -> None:
        """Add this piece's sums to those of its tensor."""
        store = rule.store
        ((key, _, _),) = rule.chunk.pieces(span.start, span.stop)
        shard, flaw = store.shards[key], due.flaw
        norm = self._norm(store, (store.name, key, due.rank, due.number))
        counts = [0.0 if flaw is None else float(flaw.values)] if norm.counts else []
        sums = torch.tensor(counts, dtype=torch.float64)
        if flaw is None and store.updater is not None and store.updater.needs_norms:
            sums = torch.cat((sums, squares(rule, store.updater, span, due)))
        culprits = () if flaw is None else flaw.ranks
        norm.measure(sums, len(shard.pieces), self.holders(shard), culprits)
        if norm.mine:
            for server in sorted(norm.holders):
                self._say(norm.id, norm.told, server, reply=server in norm.unheard)
        self.settle(store, norm)

    def _norm(self, store: ServerStore, number: NormId) -> PartialNorms:
        """Return the sums for an update, made if there are none."""
        if number not in self.open:
            self.open[number] = PartialNorms(number, store.may_drop(store.shards[number[1]].spec.dtype))
        return self.open[number]

    def holders(self, shard: Shard) -> frozenset[int]:
        """Return the other servers that hold pieces of a key: all if it is cut, none if it is not."""
        if shard.count == shard.spec.count:
            return frozenset()
        return frozenset(range(self._chunks.servers)) - {self._chunks.server}

    def is_apart(self, shard: Shard) -> bool:
        """Return whether a key is more than one piece, here or over all servers."""
        return len(shard.pieces) > 1 or bool(self.holders(shard))

    def repeat(self) -> None:
        """Tell our sums again to servers that may have missed them, and ask for theirs."""
        for norm in list(self.open.values()):
            for server in sorted(norm.unheard):
                self._say(norm.id, norm.told, server, reply=True)

    def _say(self, number: NormId, told: PartialSums, server: int, *, reply: bool) -> None:
        born = self._stores[number[0]].shards[number[1]].born
        self._shop.say(server, Norms(*number, told.sums, reply, told.culprits, born))

    # --- the others' parts ------------------------------------------------------------------

    def on_norms(self, store: ServerStore, message: Norms, server: int) -> PartialNorms | None:
        """Take in another server's sums of squares, and tell ours if it asks for them.

        Returns:
            The norms to settle, if any.

        Raises:
            KvpsError: if there is no such update; nothing was changed.
        """
        shard = store.shards.get(message.key)
        if shard is not None and shard.born != message.call:
            return None  # another key of this name; who holds the newer one tells again
        number = (message.store, message.key, message.rank, message.number)
        ours = self.told(store, number, len(message.sums))
        norm = self.hear(store, number, server, PartialSums(message.sums, message.culprits))
        if message.reply and ours.sums:
            self._say(number, ours, server, reply=False)
        return norm

    def hear(self, store: ServerStore, number: NormId, server: int, told: PartialSums) -> PartialNorms | None:
        """Take in another server's sums for an update; return the norms to settle, if any.

        Raises:
            KeyNotFound, Mismatch, ProtocolError: if that cannot be; nothing is changed.
        """
        ahead = number[3] - self._applied(store, number)
        if number in self.closed or not 0 <= ahead < WINDOW or not told.sums:
            return None  # the update is made; or so far off that it will have to be told again
        spec, squares = store.shards[number[1]].spec, told.sums
        if store.may_drop(spec.dtype):
            first, squares = told.sums[0], told.sums[1:]
            if not (first.is_integer() and 0 <= first <= spec.count):
                raise ProtocolError(f"key {number[1]!r}: {first:g} values cannot be not finite")
        if any(square < 0 and square != NO_NUMBER for square in squares):
            raise ProtocolError(f"key {number[1]!r}: {min(squares):g} is not a sum of squares")
        if any(rank >= self._shop.workers for rank in told.culprits):
            raise ProtocolError(f"key {number[1]!r}: there is no rank {max(told.culprits)}")
        norm = self._norm(store, number)
        norm.hear(server, *told)
        return norm

    def told(self, store: ServerStore, number: NormId, width: int) -> PartialSums:
        """Return this server's sums for an update; none while they are unknown.

        For an update that was made without, or so long ago that its sums are forgotten, they are ``width``
        zeros: a server that still waits must not wait forever.
        """
        if number in self.closed:
            return self.closed[number]
        if number in self.open:
            return self.open[number].told
        return PartialSums((0.0,) * width if number[3] < self._applied(store, number) else ())

    def _applied(self, store: ServerStore, number: NormId) -> int:
        """Return the lowest update (of this rank) of a tensor that is not made yet."""
        _, key, rank, _ = number
        shard = store.shards.get(key)
        if shard is None or not shard.pieces:
            raise KeyNotFound(f"server {self._chunks.server} holds no part of {key!r}")
        if store.ordered is not (rank is None):
            raise ProtocolError(f"store {store.name!r} is {store.opened.mode}, update {number}")
        span = self._chunks.span_at(shard.pieces[0])
        return span.applied(rank) if isinstance(span, FreeSpan) and rank is not None else span.version

    # --- both -------------------------------------------------------------------------------

    def settle(self, store: ServerStore, norm: PartialNorms) -> None:
        """Update a tensor's pieces here if all its norms are known."""
        if not norm.complete:
            return
        name, key, rank, number = norm.id
        shard = store.shards[key]
        del self.open[norm.id]
        if norm.holders:
            self.closed[norm.id] = norm.told
            self.closed.pop((name, key, rank, number - WINDOW), None)
        sums = norm.total(self._chunks.server)
        flaw = None
        if norm.counts:
            count, sums = int(sums[0]), sums[1:]
            if len(sums) < len(norm.mine) - 1:
                sums = sums[:0]  # some server measured by another rule
            flaw = Flaw(count, norm.culprits) if count else None
        if flaw is not None and store.drops is not None:
            store.drops.add(key, shard.pieces, rank, number, flaw)
        for piece in shard.pieces:
            rule = self._shop.rule(piece.chunk)
            (span,) = rule.chunk.cut(piece.start, piece.start + piece.size)
            due = next(item for item in span.due if (item.rank, item.number) == (rank, number))
            span.due.remove(due)
            if flaw is not None:
                rule.skip(span, due)
            else:
                updater, norms = store.updater, sums
                if updater is not None and updater.needs_norms and not len(sums):
                    norms = squares(rule, updater, span, due)  # the optimizer came after they were measured
                rule.move(span, due, norms)
            if rank is None and span.due:
                self._measure(rule, span, span.due[0])

    def forget(self, store: str, keys: Collection[str] | None = None) -> None:
        """Forget the norms of one store, or of some keys of it."""
        for norms in (self.open, self.closed):
            ours = [number for number in norms if number[0] == store]
            for number in [number for number in ours if keys is None or number[1] in keys]:
                del norms[number]


class WholeTensor(Gate):
    """An update waits for norms of its whole tensor, for an optimizer that needs them."""

    def __init__(self, inner: Rule, norms: GlobalNorms) -> None:
        super().__init__(inner)
        self._norms = norms
        self.cut = inner.chunk.cut_by_piece

    def apply(self, span: Span, due: PendingUpdate, norms: torch.Tensor | None = None) -> None:
        """Let an update wait."""
        self._norms.begin(self, span, due)


def squares(rule: Rule, updater: Updater, span: Span, due: PendingUpdate) -> torch.Tensor:
    """Return the sums of squares of a piece that an optimizer needs."""
    if due.sum.is_sparse:
        due.sum = OwnSum((DenseGradient([due.sum.whole()]),))
    chunk = rule.chunk
    ((_, _, rates),) = segments(updater, chunk, span)
    state = rule.store.state_of(chunk)
    weight = chunk.buffer.tensor[span.start : span.stop]
    if chunk.back is not None and chunk.back.owes(span.start, span.stop):
        weight = weight + chunk.back.residual[span.start : span.stop]
    return updater.partial_norms(
        weight,
        due.sum.parts[0].joined(),
        {name: tensor[span.start : span.stop] for name, tensor in state.items()},
        Terms(span.step + 1, *rates),
    )


# --- what is not finite -----------------------------------------------------------------------------


def flaw_of(rule: Rule, due: PendingUpdate, whole: torch.Tensor, *, is_sum: bool = False) -> Flaw | None:
    """Sum a gradient into ``whole``, unless that is the sum already; return its flaw."""
    kept_as, block_count, count = _kept_as(rule), rule.shop.block_count, 0
    for begin in range(0, len(whole), block_count):
        block = whole[begin : begin + block_count]
        if not is_sum:
            due.sum.into(block, begin, begin + len(block))
        count += count_nonfinite(block.to(kept_as))
    return _flaw(due, count)


def flaw_of_rows(rule: Rule, due: PendingUpdate) -> tuple[Flaw | None, RowGradient]:
    """Sum row gradients; return the flaw and the sum."""
    rows = due.sum.gathered()
    return _flaw(due, count_nonfinite(rows.joined().to(_kept_as(rule)))), rows


def _kept_as(rule: Rule) -> torch.dtype:
    """Return the type in which a sum has to be finite."""
    # Without an optimizer the sum is what the key becomes, and there it may overflow.
    chunk = rule.chunk
    is_half = BY_NAME[chunk.dtype].kind == "half"
    return TORCH[chunk.dtype] if is_half and rule.store.updater is None else chunk.summed_in


def _flaw(due: PendingUpdate, count: int) -> Flaw | None:
    """Return the flaw of a gradient of which so many values are not finite."""
    if not count:
        return None
    culprits: set[int] = set()
    for ranks, part in zip(due.whose, due.sum.parts, strict=True):
        if count_nonfinite(part.joined()):
            culprits.update(ranks)
    return Flaw(count, tuple(sorted(culprits)))
