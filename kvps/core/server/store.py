"""One store on one server: its keys, their placement, and its optimizer.

A key comes into being in two steps: DECLARE by its creator gives it a place, LOAD fills it. Only then is it
*ready*, and the server answers workers that declared it without creating it. A broadcast is the same two
steps again on a key that exists, counted by ``call``; a replacement of the creator that repeats a call that
is through changes nothing. The creator is rank 0, unless the call names another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeAlias, TypeVar

import torch

from kvps.core.embedding.table import EmbeddingRows
from kvps.core.embedding.tiered import Tier
from kvps.core.optim.base import MASTER, State
from kvps.core.optim.hyperparams import HyperParams
from kvps.core.optim.torch_rules import Updater, create
from kvps.core.placement import EMBEDDING, home, parts
from kvps.core.refusals import RefusedCalls
from kvps.core.server.chunks.rounds import FreeSpan, LateSpan, Span
from kvps.core.server.chunks.slab import Chunk, Chunks, Slab
from kvps.core.server.memory_budget import MemoryBudget, MemoryTerms
from kvps.core.server.options import AGREED, check_options
from kvps.core.server.participation import JoinTracker
from kvps.core.server.round_logs import NonFiniteLog
from kvps.dtypes import BY_ID, BY_NAME, Spec
from kvps.errors import ConfigError, Mismatch, ProtocolError
from kvps.protocol.stores import Entry, Open, Piece, Place
from kvps.protocol.values import Load
from kvps.tensors import TORCH

STEP_MAX = 2**53
"""Maximum updates of a state: beyond it float64 does not represent every whole number."""
T = TypeVar("T")
Run: TypeAlias = tuple[int, int]
"""Where neighbouring elements of a key begin in it, and how many they are."""


@dataclass(slots=True)
class Shard:
    """The part of one key on this server, in one run or in several."""

    key: str
    spec: Spec
    start: int
    count: int
    pieces: tuple[Piece, ...]
    offsets: tuple[int, ...]
    """Where each piece begins in the key, ascending."""
    call: int = -1
    """The last DECLARE whose value is loaded: 0 for init, k + 1 for the k-th broadcast; -1 for none."""
    loading: tuple[int, tuple[int, int]] = (-1, (0, 0))
    """(DECLARE whose value is being loaded, (rank, incarnation) that loads it)."""
    empty: dict[Piece, int] = field(default_factory=dict)
    """Piece that is not fully loaded -> elements loaded so far."""
    stamp: int = 0
    """Serial number of that load in this store."""
    born: int = 0
    """The DECLARE that placed it."""

    @property
    def ready(self) -> bool:
        """Whether the key has a value."""
        return self.call >= 0


@dataclass(slots=True)
class Setting(Generic[T]):
    """The value that rank 0 set last by a collective call."""

    value: T
    calls: int = 0
    """Number of the call, from 1; 0 before the first."""
    after: int = 0
    """Rounds that rank 0 had pushed before the call."""


class ServerStore:
    """A store's keys, slabs and optimizer on one server."""

    def __init__(self, opened: Open, chunks: Chunks, budget: MemoryBudget) -> None:
        check_options(opened)
        self.opened = opened
        self.name = opened.store
        self.ordered = opened.mode == "sync"
        """Whether push numbers are round numbers."""
        self.counts_late = self.ordered and opened.late == "next"
        """Whether a push whose round closed without it counts in a later round."""
        chunks.kinds[self.name] = LateSpan if self.counts_late else Span if self.ordered else FreeSpan
        self.drops: NonFiniteLog | None = None
        """Log of updates dropped as not finite; None if such updates are applied."""
        if opened.on_nonfinite != "apply":
            self.drops = NonFiniteLog(self.name, opened.on_nonfinite == "error")
        self.watches_reads = not self.ordered or self.counts_late or self.drops is not None
        """Something depends on which rank has read what, or is told with the values."""
        self.shards: dict[str, Shard] = {}
        self.updater: Updater | None = None
        self.hyper: HyperParams | None = None
        self.sent_optimizer: Setting[HyperParams | None] = Setting(None)
        """Rank 0's last set_optimizer; ``hyper`` also follows set_learning_rate."""
        self.sent_rate = Setting(0.0)
        """Rank 0's last set_learning_rate."""
        self.refusals = RefusedCalls()
        """Errors of rank 0, or of the creator of keys, kept as the answer for all."""
        self.joins = JoinTracker()
        self.entered: dict[int, int] = {}
        """Rank of a worker that was added and takes part -> its incarnation."""
        self.restored = 0
        """The cut that it was last restored from; 0 for none."""
        self._slabs: dict[str, Slab] = {}
        self.stamps = 0
        """How many values were begun to be loaded."""
        self._chunks = chunks
        self.budget = budget
        budget.keys[self.name] = self.shards
        budget.terms[self.name] = MemoryTerms(budget.gradients_of(opened), None)

    def may_drop(self, dtype: str) -> bool:
        """Return whether updates of such elements are dropped that are not finite."""
        return self.drops is not None and BY_NAME[dtype].kind != "int"

    def use(self, hyper: HyperParams, updater: Updater) -> None:
        """Use an optimizer from now on."""
        self.hyper, self.updater = hyper, updater
        told = not self.ordered or self.counts_late or self.drops is not None
        self.watches_reads = updater.tracks_pulls or told

    def agree(self, opened: Open) -> None:
        """Check that another worker means the same store.

        Raises:
            Mismatch: naming the option in which the two differ.
        """
        for name in AGREED:
            ours, theirs = getattr(self.opened, name), getattr(opened, name)
            if ours != theirs:
                raise Mismatch(
                    f"store {self.name!r} was opened with {name}={ours!r}, and is now requested with "
                    f"{name}={theirs!r}; give the second store another name=, or the same "
                    f"{name}"
                )

    # --- keys -------------------------------------------------------------------------------

    def find(self, entry: Entry, call: int, *, early: bool = False) -> Place | None:
        """Return the place of ``entry``; None while it has no value of ``call``, or (``early``) while
        none is being loaded.

        Raises:
            Mismatch: if the key has one and is of another type or shape.
        """
        shard = self.shards.get(entry.key)
        if shard is None:
            return None
        if shard.call < call and not (early and shard.loading[0] == call):
            return None
        self._same(shard, entry)
        return Place(False, shard.pieces)

    def stamp(self, entries: Sequence[Entry]) -> int:
        """Return a number that grows when the value of one of these keys is loaded anew."""
        return max([self.shards[entry.key].stamp for entry in entries], default=0)

    def lacks(self, chunk: Chunk, start: int, stop: int, call: int) -> int | None:
        """Return the first element without the value of ``call``; None if all have it."""
        for key, begin, end in chunk.pieces(start, stop):
            shard = self.shards[key]
            if shard.call >= call:
                continue
            reached = begin
            if shard.loading[0] == call:
                reached += shard.empty.get(Piece(chunk.number, begin, end - begin), end - begin)
            if reached < min(end, stop):
                return max(reached, start)
        return None

    def create(
        self, entries: Sequence[Entry], call: int, life: tuple[int, int]
    ) -> tuple[tuple[Place, ...], list[Shard]]:
        """Give a place to each key that has none, and expect values for those not through.

        Args:
            entries: the keys.
            call: the number of the DECLARE.
            life: the rank and incarnation that gives the values.

        Returns:
            The places, and the shards that were replaced by others: the caller gives back their
            pieces yet.

        Raises:
            Mismatch: if a key exists with another type or shape and this is no broadcast.
            Overload: if there is no room for all of them.
            ProtocolError: if a key is named twice. In all these cases nothing is changed.
        """
        if len({entry.key for entry in entries}) != len(entries):
            raise ProtocolError("a DECLARE names a key twice")
        table = next((entry.key for entry in entries if entry.key.startswith(EMBEDDING)), None)
        if table is not None:
            raise ProtocolError(f"key {table!r:.60} is the key of a table, which only EMBED can create")
        gone = {entry.key for entry in entries if call and self._lies_elsewhere(entry)}
        new = [entry for entry in entries if entry.key not in gone and self._is_new(entry, call)]
        if self.updater is not None and self.updater.max_norm is not None:
            moved = sorted({*gone, *[entry.key for entry in new]} & self.shards.keys())
            if moved:  # a round of the old key may belong to a step that waits for it
                raise ConfigError(
                    f"key {moved[0]!r} of store {self.name!r} cannot be replaced by another shape while the "
                    "optimizer clips gradients by their global norm; call set_optimizer(..., "
                    "clip_global_norm=None) before"
                )
        self.check_room({entry.key: (BY_ID[entry.dtype].name, entry.size) for entry in new})
        replaced = [
            self.shards.pop(key)
            for key in sorted(gone)
            if key in self.shards and self.shards[key].born < call
        ]
        for dtype in {entry.dtype for entry in new}:
            count = sum(entry.size for entry in new if entry.dtype == dtype)
            self.slab(BY_ID[dtype].name).expect(count)
        for entry in new:
            if entry.key in self.shards:
                replaced.append(self.shards[entry.key])
            self._place(entry, call)
        places = [
            Place(False, ()) if entry.key in gone else self._expect(self.shards[entry.key], call, life)
            for entry in entries
        ]
        return tuple(places), replaced

    def _lies_elsewhere(self, entry: Entry) -> bool:
        """Return whether an entry says that this server, which may hold a part of the key's old
        value, holds none."""
        return not entry.size and home(entry.key, self._chunks.servers) != self._chunks.server

    def wanting(self, entries: Sequence[Entry], call: int) -> list[str]:
        """Return the keys that have no value of ``call`` yet."""
        keys = [entry.key for entry in entries]
        return [key for key in keys if key not in self.shards or self.shards[key].call < call]

    def load(self, chunk: Chunk, message: Load, values: torch.Tensor, rank: int = 0) -> bool | None:
        """Write values that ``rank`` declared; return whether a key became ready by it.

        A piece is filled from its beginning on. Values that belong behind others, which are not here
        yet, are not taken in: None is returned, and nothing was changed.

        Raises:
            ProtocolError: for elements of which no such value is expected; nothing is changed.
        """
        chunk.validate(message.runs, are_whole=False)
        taken = 0
        work: list[tuple[Shard, Piece, int, torch.Tensor]] = []
        reached: dict[Piece, int] = {}
        for run in message.runs:
            for key, start, stop in chunk.pieces(run.start, run.start + run.size):
                shard = self.shards[key]
                begin, end = max(start, run.start), min(stop, run.start + run.size)
                part = values[taken : taken + end - begin]
                taken += end - begin
                if run.number <= shard.call:
                    continue  # again: it is in
                if run.number != shard.loading[0]:
                    raise ProtocolError(
                        f"key {key!r}: value {run.number} was loaded, declared was "
                        f"{max(shard.loading[0], shard.call)}"
                    )
                if rank != shard.loading[1][0]:
                    raise ProtocolError(
                        f"rank {rank} may not load values of key {key!r}; only rank {shard.loading[1][0]} may"
                    )
                piece = Piece(chunk.number, start, stop - start)
                known = reached.get(piece, start + shard.empty.get(piece, piece.size))
                if end <= known:
                    continue  # again: it is in
                if begin > known:
                    return None
                reached[piece] = end
                work.append((shard, piece, begin, part))
        if not work:
            return False
        target = chunk.writable()
        became_ready = False
        for shard, piece, begin, part in work:
            end, stop = begin + len(part), piece.start + piece.size
            target[begin:end].copy_(part)
            chunk.forget_changes(piece.start)
            if end < stop:
                shard.empty[piece] = end - piece.start
                continue
            self.forget_state(chunk, piece.start, stop)
            chunk.fill(piece.start)
            del shard.empty[piece]
            if not shard.empty:
                shard.call = shard.loading[0]
                became_ready = True
        return became_ready

    def _is_new(self, entry: Entry, call: int) -> bool:
        """Return whether ``entry`` needs a new place."""
        shard = self.shards.get(entry.key)
        if shard is None:
            return True
        if shard.call < call and call > 0 and shard.spec != _spec(entry):
            return True
        self._same(shard, entry)
        return False

    def _same(self, shard: Shard, entry: Entry) -> None:
        spec = _spec(entry)
        if shard.spec != spec:
            raise Mismatch(
                f"key {shard.key!r} of store {self.name!r} is {shard.spec} and cannot be "
                f"initialised as {spec}; use the same type and shape on every worker, or "
                "broadcast() to replace the key"
            )
        if (shard.start, shard.count) != (entry.start, entry.size):
            raise Mismatch(
                f"key {shard.key!r} of store {self.name!r}: this server holds {shard.count} "
                f"elements from {shard.start}, not {entry.size} from {entry.start}"
            )

    def check_room(self, new: Mapping[str, tuple[str, int]]) -> None:
        """Check that these keys have room, each of an element type and so many elements.

        Raises:
            Overload: if they have not.
        """
        changed: Counter[str] = Counter()
        for key, (dtype, count) in new.items():
            changed[dtype] += count
            old = self.shards.get(key)
            if old is not None:
                changed[old.spec.dtype] -= old.count
        self.budget.demand_keys(self.name, list(new), changed)

    def _place(self, entry: Entry, call: int) -> None:
        shard = self.shard(entry.key, _spec(entry), self._runs(entry))
        shard.born = call
        self.shards[entry.key] = shard

    def _runs(self, entry: Entry) -> list[Run]:
        """Return the runs of the key on this server; one run if it does not lie as placement says."""
        spec, me = _spec(entry), self._chunks.server
        placed = parts(entry.key, spec.count, self._chunks.servers, self.opened.bigarray_bound, spec.width)
        runs = [(part.start, part.size) for part in placed if part.server == me]
        is_so = bool(runs) and (runs[0][0], sum([size for _, size in runs])) == (entry.start, entry.size)
        return runs if is_so else [(entry.start, entry.size)]

    def shard(self, key: str, spec: Spec, runs: Sequence[Run], *, as_pieces: bool = False) -> Shard:
        """Return a key with memory for the elements of ``runs``; with ``as_pieces``, each run is a piece."""
        slab, pieces, offsets = self.slab(spec.dtype), [], []
        for start, size in runs:
            for piece in slab.place(key, size, [size] if as_pieces else (), spec.width):
                pieces.append(piece)
                offsets.append(start)
                start += piece.size
        return Shard(key, spec, runs[0][0], sum([size for _, size in runs]), tuple(pieces), tuple(offsets))

    def slab(self, dtype: str) -> Slab:
        """Return the slab of an element type."""
        slab = self._slabs.get(dtype)
        if slab is None:
            slab = Slab(self.name, dtype, self._chunks, self.opened.chunk_bytes)
            self._slabs[dtype] = slab
        return slab

    def _expect(self, shard: Shard, call: int, life: tuple[int, int]) -> Place:
        if shard.call >= call:
            return Place(False, shard.pieces)
        if shard.loading != (call, life):  # else the same DECLARE again
            self.stamps += 1
            shard.loading, shard.stamp = (call, life), self.stamps
            shard.empty = dict.fromkeys(shard.pieces, 0)
        if not shard.pieces:
            shard.call = call
        return Place(True, shard.pieces)

    def chunk_at(self, piece: Piece) -> Chunk:
        """Return the chunk in which a piece of one of these keys lies."""
        return self._chunks.by_number[piece.chunk]

    @property
    def tier(self) -> Tier | None:
        """Where rows of tables go that memory does not hold."""
        return self._chunks.tier

    def grow(self, size: int) -> None:
        """Add ``size`` bytes of rows, which may be negative, to the bytes that the server holds."""
        self._chunks.table_bytes[self.name] += size

    def replace_rows(self, chunk: Chunk, rows: EmbeddingRows) -> None:
        """Let a chunk stand for other rows of its table."""
        chunk.embedding = rows
        self._chunks.named.clear()

    # --- the optimizer ----------------------------------------------------------------------

    def optimize(self, hyper: HyperParams) -> None:
        """Install ``hyper``. Under the same rule state is kept, under another it begins anew.

        Raises:
            ConfigError: if it cannot update a key of the store; nothing is changed.
            Overload: if there is no room for its state; nothing is changed.
        """
        opened = self.opened
        hyper.demand_steps(self.name, opened.mode, opened.quorum, opened.on_nonfinite)
        updater = create(hyper)
        updater.demand_keys()
        self.budget.demand_optimizer(self.name, updater)
        same = self.hyper is not None and self.hyper.name == hyper.name
        # A table has an optimizer of its own.
        chunks = [chunk for chunk in self._chunks.of_store(self.name) if chunk.embedding is None]
        adopted = {}
        for chunk in chunks:
            if same and chunk.state is not None:
                state = chunk.own_state()
                assert state is not None
                adopted[chunk.number] = updater.adopt(chunk.buffer.tensor, state)
            elif chunk.is_open:
                updater.new_state(chunk.buffer.tensor[:0])  # refuses types that it cannot update
        if self.updater is None:
            for chunk in chunks:
                if chunk.back is not None:  # what sums lack is nothing that weights should have
                    chunk.back.forget(0, chunk.capacity)
        self.use(hyper, updater)
        self.budget.terms[self.name] = self.budget.terms[self.name]._replace(updater=updater)
        for chunk in chunks:
            chunk.state = adopted.get(chunk.number)
            for span in () if same else chunk.spans:
                span.step = 0

    def set_rate(self, lr: float) -> None:
        """Install another learning rate; state does not depend on it.

        Raises:
            ConfigError: if there is no optimizer, or the rate is out of its range.
        """
        if self.hyper is None:
            raise ConfigError(f"store {self.name!r} has no optimizer; call set_optimizer() first")
        hyper = self.hyper.with_lr(lr)
        updater = create(hyper)
        assert self.updater is not None
        if hyper.number("lr") <= self.hyper.number("lr"):
            updater.take_over(self.updater)
        for dtype in {
            TORCH[chunk.dtype] for chunk in self._chunks.of_store(self.name) if chunk.embedding is None
        }:
            # Integers that no optimizer updates, such as a count of batches, are refused when they
            # are pushed.
            if dtype.is_floating_point or updater.takes_integers:
                updater.demand(dtype)
        self.use(hyper, updater)

    def state_of(self, chunk: Chunk) -> State:
        """Return the optimizer's state of ``chunk``, made when it is first needed.

        Raises:
            ConfigError: if the optimizer cannot update elements of this type.
        """
        assert self.updater is not None
        state = chunk.own_state()
        if state is None:
            state = chunk.state = self.updater.new_state(chunk.buffer.tensor)
        return state

    def restore(self, chunk: Chunk, start: int, stop: int, step: int, rows: dict[str, torch.Tensor]) -> None:
        """Put an optimizer's state, which it had after ``step`` updates, from ``start`` to
        ``stop``.

        Raises:
            ConfigError: if there is no optimizer.
            Mismatch: if its state looks otherwise; nothing is changed.
        """
        if step > STEP_MAX:
            raise Mismatch(f"{step} updates are too many: the limit is 2^53")
        updater = self.updater
        if updater is None:
            raise ConfigError(f"store {self.name!r} has no optimizer; call set_optimizer() first")
        weight = chunk.buffer.tensor
        state = chunk.own_state()
        if state is None:
            state = updater.new_state(weight)  # the chunk's own only if it is not refused
        # An entry that appears on the way begins as the weights; adopt() drops what is foreign.
        basis = state.get(MASTER, weight)
        late = {name: basis.clone() for name in rows if name not in state}
        if late:
            state = updater.adopt(weight, state | late)
        for name, row in rows.items():
            target = state.get(name)
            if target is None or target.dtype != row.dtype or len(row) != stop - start:
                raise Mismatch(
                    f"optimizer {updater.hyper.name!r} has no state {name!r:.40} of {row.dtype}"
                    f"[{len(row)}] for {stop - start} elements of {chunk.dtype}; the states are "
                    "those of another optimizer"
                )
        for name, row in rows.items():
            state[name][start:stop].copy_(row)
        chunk.state = state
        for span in chunk.cut(start, stop):
            span.step = step

    def forget_state(self, chunk: Chunk, start: int, stop: int) -> None:
        """Reset the optimizer's state of these elements: their weights are new."""
        if chunk.back is not None:
            chunk.back.forget(start, stop)
        if chunk.state is None:
            return
        assert self.updater is not None
        weight = chunk.buffer.tensor[start:stop]
        fresh = self.updater.new_state(weight)
        for name, tensor in self.state_of(chunk).items():
            tensor[start:stop] = fresh.get(name, weight)  # what a rank last read is now this
        for span in chunk.cut(start, stop):
            span.step = 0


def _spec(entry: Entry) -> Spec:
    return Spec(BY_ID[entry.dtype].name, entry.shape)
