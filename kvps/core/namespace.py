"""One store as a server sees it: its keys, where they lie, and its optimizer.

A key comes into being in two steps: DECLARE by rank 0 gives it a place, LOAD fills it. Only then
is it *ready*, and those who declared it without creating it are answered. A broadcast is the
same two steps again on a key that exists, counted by ``call``; a replacement of rank 0 that
repeats a call that is through changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from kvps.core.hyper import Hyper
from kvps.core.slab import Chunk, NewChunk, Slab
from kvps.core.updaters import Updater, create
from kvps.errors import Mismatch, Overload, ProtocolError
from kvps.messages import Entry, Load, Open, Piece, Place
from kvps.specs import BY_ID, BY_NAME, Spec


@dataclass(slots=True)
class Shard:
    """The part of one key on this server."""

    key: str
    spec: Spec
    start: int
    count: int
    pieces: tuple[Piece, ...]
    call: int = -1
    """The last DECLARE whose value is in: 0 for init, k + 1 for the k-th broadcast."""
    loading: int = 0
    """The DECLARE whose value is being loaded, while it is above ``call``."""
    empty: set[Piece] = field(default_factory=set)
    """Pieces that the value being loaded has not reached."""

    @property
    def ready(self) -> bool:
        """Whether the key has a value."""
        return self.call >= 0


class Namespace:
    """A store's keys, slabs and optimizer on one server."""

    def __init__(self, opened: Open, new_chunk: NewChunk, limit_bytes: int | None) -> None:
        self.opened = opened
        self.name = opened.store
        self.ordered = opened.mode == "sync"
        self.shards: dict[str, Shard] = {}
        self.updater: Updater | None = None
        self.hyper: Hyper | None = None
        self.sent_hyper: Hyper | None = None
        """What rank 0 last gave to set_optimizer; ``hyper`` also follows set_learning_rate."""
        self.optimize_calls = 0
        self.rate_calls = 0
        self._slabs: dict[str, Slab] = {}
        self._new_chunk = new_chunk
        self._limit_bytes = limit_bytes

    def new_chunk(self, dtype: str, capacity: int) -> Chunk:
        """Return a chunk of this store."""
        chunk = self._new_chunk(dtype, capacity)
        chunk.store = self.name
        return chunk

    def agree(self, opened: Open) -> None:
        """Check that another worker means the same store.

        Raises:
            Mismatch: naming the option in which the two differ.
        """
        for name in ("mode", "staleness", "deterministic", "on_worker_lost", "bigarray_bound"):
            ours, theirs = getattr(self.opened, name), getattr(opened, name)
            if ours != theirs:
                raise Mismatch(
                    f"store {self.name!r} was opened with {name}={ours!r} and is now asked for "
                    f"with {name}={theirs!r}; give the second store another name=, or the same "
                    f"{name}"
                )

    def declare(self, entry: Entry, create: bool, call: int) -> Place | None:
        """Return where ``entry`` lies, placing it if ``create``; None while it must wait.

        Raises:
            Mismatch: if the key exists with another type or shape.
            Overload: if the server has no room for it.
        """
        spec = Spec(BY_ID[entry.dtype].name, entry.shape)
        shard = self.shards.get(entry.key)
        if shard is not None and shard.call >= call:
            self._same(shard, spec)
            return Place(False, shard.pieces)
        if not create:
            return None
        if shard is not None and call == 0:
            self._same(shard, spec)
        elif shard is None or shard.spec != spec:
            shard = self._place(entry, spec, shard)
        shard.loading = call
        shard.empty = set(shard.pieces)
        if not shard.pieces:
            shard.call = call
        return Place(True, shard.pieces)

    def load(self, chunk: Chunk, message: Load, values: torch.Tensor) -> bool:
        """Write values that were declared; return whether a key became ready by it.

        Raises:
            ProtocolError: for elements of which no key is being loaded, or only a part.
        """
        taken = 0
        work: list[tuple[Shard, Piece, torch.Tensor]] = []
        for run in message.runs:
            chunk.covering(run.start, run.start + run.size)
            for key, start, stop in chunk.pieces(run.start, run.start + run.size):
                shard = self.shards[key]
                part = values[taken : taken + stop - start]
                taken += stop - start
                if shard.loading < run.number:
                    raise ProtocolError(f"key {key!r} is loaded without having been declared")
                if run.number > shard.call:
                    work.append((shard, Piece(chunk.number, start, stop - start), part))
        target = chunk.writable() if work else chunk.buffer.tensor
        became_ready = False
        for shard, piece, part in work:
            stop = piece.start + piece.size
            target[piece.start : stop].copy_(part)
            self._forget_state(chunk, piece.start, stop)
            shard.empty.discard(piece)
            if not shard.empty:
                shard.call = shard.loading
                became_ready = True
        return became_ready

    def optimize(self, hyper: Hyper) -> None:
        """Install ``hyper``. Under the same rule state is kept, under another it begins anew."""
        same = self.hyper is not None and self.hyper.name == hyper.name
        self.hyper = hyper
        self.updater = create(hyper)
        for chunk in self._new_chunk.chunks.values():
            if chunk.store != self.name or chunk.state is None:
                continue
            if same:
                chunk.state = self.updater.adopt(chunk.buffer.tensor, chunk.state)
                continue
            chunk.state = None
            for span in chunk.spans:
                span.step = 0

    def _same(self, shard: Shard, spec: Spec) -> None:
        if shard.spec != spec:
            raise Mismatch(
                f"key {shard.key!r} of store {self.name!r} is {shard.spec} and cannot be "
                f"initialised as {spec}; use the same type and shape on every worker, or "
                "broadcast() to replace the key"
            )

    def _place(self, entry: Entry, spec: Spec, old: Shard | None) -> Shard:
        need = entry.size * BY_NAME[spec.dtype].itemsize
        used = self._new_chunk.weight_bytes
        if self._limit_bytes is not None and used + need > self._limit_bytes:
            raise Overload(
                f"no room for key {entry.key!r} ({need} bytes): {used} of the "
                f"{self._limit_bytes} bytes of --memory-limit hold weights; add servers or raise "
                "the limit"
            )
        slab = self._slabs.setdefault(spec.dtype, Slab(spec.dtype))
        for piece in old.pieces if old else ():
            self._new_chunk.chunks[piece.chunk].retire(piece)
        pieces = slab.place(entry.key, entry.size, self.new_chunk) if entry.size else []
        shard = Shard(entry.key, spec, entry.start, entry.size, tuple(pieces))
        self.shards[entry.key] = shard
        return shard

    def _forget_state(self, chunk: Chunk, start: int, stop: int) -> None:
        """Begin the optimizer's state of these elements anew: their weights are new."""
        if chunk.state is None or self.updater is None:
            return
        weight = chunk.buffer.tensor[start:stop]
        fresh = self.updater.new_state(weight)
        for name, tensor in chunk.state.items():
            tensor[start:stop] = fresh.get(name, weight)  # what a rank last read is now this
        for span in chunk.cut(start, stop):
            span.step = 0
