"""Slabs of chunks: a server's memory for values, and the rules for writing to it.

A *slab* holds all keys of one store and one element type, side by side, in *chunks* of one size,
384 KiB to 32 MiB. A chunk is what travels in one message, what is summed in one addition and updated
in one fused step. Small keys share a chunk; a part larger than a chunk gets several of its own.

The values of a chunk are *immutable while someone reads them*: a frame on its way out holds the
buffer, and an update of a held buffer goes to another one. So a send without copying cannot
tear, and every answer is one version. A chunk whose buffer was left that way keeps it for the next
time: under readers who hold each version until the next, two buffers take turns.

A request that cannot be answered yet waits at an element of a chunk, and is looked at again when
the span that holds this element moves. (Were it noted in the span, every split and join of spans
would have to copy it.)
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, groupby, pairwise

import torch

from kvps.core.embedding.alike import AlikeTables, alike_runs
from kvps.core.embedding.table import EmbeddingRows, TableState
from kvps.core.embedding.tiered import Tier
from kvps.core.optim.torch_rules import State
from kvps.core.placement import whole
from kvps.core.server.chunks.history import NONE, ChangeLog, CompressedHistory
from kvps.core.server.chunks.rounds import Span
from kvps.core.server.sessions import PendingRead
from kvps.dtypes import BY_NAME, summed_in
from kvps.errors import KeyNotFound, ProtocolError
from kvps.protocol.envelope import RUNS_MAX
from kvps.protocol.stores import Piece
from kvps.protocol.values import Ask, Run
from kvps.tensors import PRIVATE, TORCH, Memory, to_frame

ROOM_BYTES = 64 << 10
"""Minimum capacity of a chunk for several keys, in bytes."""
OPEN_CHUNKS = 8
"""Maximum chunks with room left that are searched for a place."""
PAGE_BYTES = 4096
"""Bytes of a page. Pieces of one key begin at whole pages: a reader may map them side by side."""


NAMED_MAX = 64
"""Maximum sets of tables that are known to have been named together."""
PARTS_MAX = 256
"""Parts of a buffer that are kept as tensors."""


class Buffer:
    """Memory with a count of its readers."""

    __slots__ = ("_parts", "holds", "octets", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.octets = to_frame(tensor)
        """Its bytes."""
        self.holds = 0
        self._parts: dict[tuple[int, int], torch.Tensor] = {}

    def part(self, start: int, stop: int) -> torch.Tensor:
        """Return the elements from ``start`` to ``stop``; to slice a tensor takes longer than to find it."""
        found = self._parts.get((start, stop))
        if found is None:
            if len(self._parts) >= PARTS_MAX:
                self._parts.clear()
            found = self._parts[start, stop] = self.tensor[start:stop]
        return found

    def hold(self) -> Buffer:
        """Count one more reader."""
        self.holds += 1
        return self

    def release(self) -> None:
        """Count one reader less."""
        assert self.holds > 0, "released more often than held"
        self.holds -= 1


class Chunk:
    """Some MiB of weights, their optimizer state, and the history of each part."""

    kind: type[Span] = Span

    def __init__(self, number: int, store: str, dtype: str, capacity: int, memory: Memory = PRIVATE) -> None:
        self.number = number
        self.store = store
        self.dtype = dtype
        self.type = BY_NAME[dtype]
        self.summed_in = TORCH[summed_in(dtype)]
        """The type in which gradients of its elements are summed."""
        self.capacity = capacity
        """Elements that fit in."""
        self.buffer = Buffer(memory.empty(capacity, dtype))
        self._other: Buffer | None = None
        """The buffer before this one."""
        self._memory = memory
        self.back: CompressedHistory | None = None
        """Residuals and steps of values that are published compressed; None while none were."""
        self.state: State | None = None
        self._kept_state: State | None = None
        """The state that a snapshot refers to: it is not written to."""
        self.embedding: EmbeddingRows | None = None
        """The embedding table whose element this chunk holds; None for a chunk of keys."""
        self.kept: TableState | None = None
        """The table as a snapshot refers to it."""
        self.keys: list[str] = []
        self.bounds: list[int] = [0]
        """``keys[i]`` lies, or lay, from ``bounds[i]`` to ``bounds[i + 1]``."""
        self.spans: list[Span] = []
        """In order; they cover all elements that are used and not retired."""
        self._starts: list[int] = []
        self._blank: set[int] = set()
        """Starts of pieces that no value was loaded into yet."""
        self._retired: list[int] = []
        """Starts of pieces whose keys were replaced, in order."""
        self.filled_rows: dict[int, torch.Tensor] = {}
        """Start of a piece -> the rows that may differ from 0; absent if unknown."""
        self._changes: dict[int, ChangeLog] = {}
        """Start of a piece -> the rows that its last versions changed, if they came by rows."""
        self.waiting: dict[int, list[PendingRead]] = {}
        """Element -> the reads that wait there."""
        self._waited_at: list[int] = []
        """The keys of ``waiting``, in order."""

    @property
    def table(self) -> EmbeddingRows:
        """The embedding table whose element this chunk holds.

        Raises:
            ProtocolError: if it is none's.
        """
        if self.embedding is None:
            raise ProtocolError(f"chunk {self.number} holds keys, not an embedding table")
        return self.embedding

    @property
    def used(self) -> int:
        """Elements that were given to keys."""
        return self.bounds[-1]

    # --- keys -------------------------------------------------------------------------------

    def append(self, key: str, count: int) -> Piece:
        """Give ``count`` elements to ``key``, behind those given before."""
        piece = Piece(self.number, self.used, count)
        self.keys.append(key)
        self.bounds.append(piece.start + count)
        self.spans.append(self.kind(piece.start, self.used))
        self._starts.append(piece.start)
        self._blank.add(piece.start)
        if len(self.spans) > 1 and self.spans[-2].may_join(self.spans[-1]):
            self._join(len(self.spans) - 2)
        return piece

    def fill(self, start: int) -> None:
        """Note that the piece that begins at ``start`` has a value."""
        self._blank.discard(start)

    def retire(self, piece: Piece) -> list[PendingRead]:
        """Take ``piece`` out of use for ever; return the reads that waited for it."""
        stop = piece.start + piece.size
        self.cut(piece.start, stop)
        index = bisect_left(self._starts, piece.start)
        del self.spans[index], self._starts[index]
        self._blank.discard(piece.start)
        if self.back is not None:
            self.back.forget(piece.start, stop)
        self.filled_rows.pop(piece.start, None)
        self._changes.pop(piece.start, None)
        insort(self._retired, piece.start)
        return self.woken(piece.start, stop)

    def unused(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return where pieces begin whose keys were replaced, and where those do that have no value yet."""
        return tuple(self._retired), tuple(sorted(self._blank))

    def pieces(self, start: int, stop: int) -> Iterator[tuple[str, int, int]]:
        """Yield (key, start, stop) of each piece inside ``start`` to ``stop``."""
        index = bisect_right(self.bounds, start) - 1
        while index < len(self.keys) and self.bounds[index] < stop:
            yield self.keys[index], self.bounds[index], self.bounds[index + 1]
            index += 1

    def edge(self, start: int, size: int) -> int:
        """Return where a piece ends, ``size`` elements after ``start`` at most, or else the first."""
        fits = self.bounds[bisect_right(self.bounds, start + size) - 1]
        return fits if fits > start else self.bounds[bisect_right(self.bounds, start)]

    # --- spans ------------------------------------------------------------------------------

    def validate(
        self, runs: Sequence[Run] | Sequence[Ask], *, are_whole: bool = True, are_filled: bool = False
    ) -> None:
        """Check the ranges that a peer asks for.

        Raises:
            ProtocolError: unless there is a run, and each consists of whole pieces of keys (unless
                ``are_whole`` is false), lies behind the one before it, and holds nothing that was
                retired.
            KeyNotFound: unless all their pieces have a value, if they have to be filled.
        """
        if not runs:
            raise ProtocolError(f"chunk {self.number}: a request for no elements")
        last, used = 0, self.bounds[-1]
        for run in runs:
            stop = run.start + run.size
            if not last <= run.start < stop <= used:
                raise ProtocolError(
                    f"chunk {self.number} has {used} elements; {run.start} to {stop} is not a "
                    f"range of them after {last}"
                )
            for edge in (run.start, stop) if are_whole else ():
                if self.bounds[bisect_left(self.bounds, edge)] != edge:
                    raise ProtocolError(f"chunk {self.number}: {edge} is not the edge of a key")
            last = stop
            if not self._retired:
                continue
            first = self.bounds[bisect_right(self.bounds, run.start) - 1]
            retired = bisect_left(self._retired, first)
            if retired < len(self._retired) and self._retired[retired] < stop:
                raise ProtocolError(
                    f"chunk {self.number}: {run.start} to {stop} holds a key that was replaced"
                )
        for run in runs if are_filled and self._blank else ():
            for key, start, _ in self.pieces(run.start, run.start + run.size):
                if start in self._blank:
                    raise KeyNotFound(f"key {key!r} of store {self.store!r} has no value yet")

    @property
    def is_open(self) -> bool:
        """Whether a span holds gradients that are not applied yet."""
        return any(span.is_open for span in self.spans)

    def spans_in(self, start: int, stop: int) -> Iterator[Span]:
        """Return the spans that ``start`` to ``stop`` touches, in order."""
        low = bisect_right(self._starts, start) - 1
        if low < 0 or self.spans[low].stop <= start:
            low += 1  # what begins here is retired
        return map(self.spans.__getitem__, range(low, bisect_left(self._starts, stop)))

    def cut(self, start: int, stop: int) -> list[Span]:
        """Return spans that tile ``start`` to ``stop`` exactly: split where needed, joined where
        their histories are equal."""
        low = bisect_right(self._starts, start) - 1
        if self._starts[low] == start and self.spans[low].stop == stop:
            return [self.spans[low]]
        if self._starts[low] < start:
            self._split(low, start)
            low += 1
        high = bisect_left(self._starts, stop) - 1
        if self.spans[high].stop > stop:
            self._split(high, stop)
        index = low
        while index < high:
            if self.spans[index].may_join(self.spans[index + 1]):
                self._join(index)
                high -= 1
            else:
                index += 1
        return self.spans[low : high + 1]

    def cut_by_piece(self, start: int, stop: int) -> list[Span]:
        """Return spans that tile ``start`` to ``stop``, one for each piece of a key."""
        return [span for _, begin, end in self.pieces(start, stop) for span in self.cut(begin, end)]

    def _split(self, index: int, at: int) -> None:
        right = self.spans[index].cut(at)
        self.spans.insert(index + 1, right)
        self._starts.insert(index + 1, at)

    def _join(self, index: int) -> None:
        self.spans[index].join(self.spans[index + 1])
        del self.spans[index + 1], self._starts[index + 1]

    # --- what changed -----------------------------------------------------------------------

    def add_change(self, span: Span, rows: int, ids: torch.Tensor) -> None:
        """Remember that the next version of ``span``, which is one piece, differs in ``ids`` of its rows."""
        if span.start not in self._changes:
            self._changes[span.start] = ChangeLog(rows)
        self._changes[span.start].add(span.version + 1, ids)

    def forget_changes(self, start: int) -> None:
        """Forget the changes of the piece that begins at ``start``."""
        self._changes.pop(start, None)

    def changed(self, start: int, since: int) -> torch.Tensor | None:
        """Return the rows that changed in the piece that begins at ``start``; None if unknown.

        Its span may be wider by now: a push of several keys joins theirs before it is applied.
        """
        version = next(self.spans_in(start, start + 1)).version
        if since == version:
            return NONE
        changes = self._changes.get(start)
        return None if changes is None else changes.since(since, version)

    # --- readers and writers ----------------------------------------------------------------

    def writable(self, *, keeps_rows: bool = False) -> torch.Tensor:
        """Return the current values for writing; in another buffer if this one has readers.

        The caller updates :attr:`filled_rows` if it ``keeps_rows``.
        """
        if not keeps_rows:
            self.filled_rows.clear()
        if self.buffer.holds:
            old = self._turn()
            self.buffer.tensor[: self.used].copy_(old[: self.used])
        return self.buffer.tensor

    def overwritable(self, start: int, stop: int) -> Buffer:
        """Return the buffer of the values for writing; those from ``start`` to ``stop`` may hold anything."""
        if self.filled_rows:
            for begin in [begin for begin in self.filled_rows if start <= begin < stop]:
                del self.filled_rows[begin]
        if self.buffer.holds:
            old = self._turn()
            self.buffer.tensor[:start].copy_(old[:start])
            self.buffer.tensor[stop : self.used].copy_(old[stop : self.used])
        return self.buffer

    def own_state(self) -> State | None:
        """Return the optimizer's state for writing; a copy if a snapshot refers to it."""
        if self.state is not None and self.state is self._kept_state:
            self.state = {name: tensor.clone() for name, tensor in self.state.items()}
        return self.state

    def keep(self) -> Callable[[], None]:
        """Freeze the present values and state; return a function that releases them.

        Raises:
            StorageError: if rows of a table cannot be kept on a disk; nothing is frozen.
        """
        releases: list[Callable[[], None]] = []
        if self.embedding is not None:  # first: it may fail
            self.kept, release_rows = self.embedding.keep()
            releases.append(release_rows)
        buffer, self._kept_state = self.buffer.hold(), self.state
        releases.append(buffer.release)
        if self.back is not None:
            releases.append(self.back.keep())

        def release() -> None:
            self._kept_state = self.kept = None
            for let_go in releases:
                let_go()

        return release

    def publish(self) -> None:
        """Keep a compressed history of the values from now on, if they can be compressed."""
        if self.back is None and self.dtype == "float32":
            self.back = CompressedHistory(self.capacity)

    def _turn(self) -> torch.Tensor:
        """Switch to another buffer; return the old one's tensor, which its readers keep."""
        left, other = self.buffer, self._other
        if other is None or other.holds:
            other = Buffer(self._memory.empty(self.capacity, self.dtype))
        self.buffer, self._other = other, left
        return left.tensor

    def wait(self, reading: PendingRead) -> None:
        """Let ``reading`` wait at ``reading.at``."""
        if reading.at not in self.waiting:
            insort(self._waited_at, reading.at)
            self.waiting[reading.at] = []
        self.waiting[reading.at].append(reading)

    def woken(self, start: int, stop: int) -> list[PendingRead]:
        """Return, and remove, the reads that wait at elements from ``start`` to ``stop``."""
        low, high = bisect_left(self._waited_at, start), bisect_left(self._waited_at, stop)
        places = self._waited_at[low:high]
        del self._waited_at[low:high]
        return [reading for at in places for reading in self.waiting.pop(at)]

    def check(self) -> None:
        """Assert the invariants: spans lie in order, inside the chunk, on edges of keys."""
        assert [span.start for span in self.spans] == self._starts
        assert self.used <= self.capacity
        assert len(self.bounds) == len(self.keys) + 1 <= RUNS_MAX + 1
        edges = set(self.bounds)
        last = 0
        for span in self.spans:
            assert last <= span.start
            assert span.start in edges
            assert span.stop in edges
            last = span.stop
            span.check()
        assert self._waited_at == sorted(self.waiting)
        if self.back is not None:
            self.back.check()
        for changes in self._changes.values():
            changes.check()
        for at, readings in self.waiting.items():
            assert any(span.start <= at < span.stop for span in self.spans)
            assert all(reading.at == at and reading.chunk == self.number for reading in readings)


class NamedTables:
    """The tables of some chunks, which requests name together in this order."""

    def __init__(self, chunks: tuple[Chunk, ...]) -> None:
        tables = [chunk.table for chunk in chunks]
        self.chunks = chunks
        self.pieces = tuple([Piece(chunk.number, 0, 1) for chunk in chunks])
        """The element of each table, which counts for all of its rows."""
        self.recipes = tuple([table.recipe for table in tables])
        self.row_bytes = tuple([recipe.dim * BY_NAME[recipe.dtype].itemsize for recipe in self.recipes])
        alike = alike_runs(tables)
        begins = accumulate([len(some.tables) for some in alike], initial=0)
        self.runs = [(some, begin, end) for some, (begin, end) in zip(alike, pairwise(begins), strict=True)]
        """Neighbours that are alike, the index of the first of them, and of the table behind the last."""
        self.groups = [(shape, list(some)) for shape, some in groupby(self.runs, _shape)]
        """Element type and length of the rows of a frame, and the runs of its tables."""


def _shape(run: tuple[AlikeTables, int, int]) -> tuple[str, int]:
    recipe = run[0].tables[0].recipe
    return recipe.dtype, recipe.dim


class Chunks:
    """All chunks of a server, by their number."""

    def __init__(
        self, memory: Memory = PRIVATE, server: int = 0, servers: int = 1, tier: Tier | None = None
    ) -> None:
        self.memory = memory
        """Allocates values, so that other processes may read them."""
        self.tier = tier
        """Where rows of tables go that memory does not hold; None if it holds all."""
        self.server = server
        self.servers = servers
        self.by_number: dict[int, Chunk] = {}
        self.pushed: set[int] = set()
        """Numbers of the chunks that were pushed to since they were seen settled: no other has an
        open span."""
        self.counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
        """Store -> element type -> elements of all keys; the room that is left inside chunks is
        not counted."""
        self.table_bytes: Counter[str] = Counter()
        """Store -> bytes of the rows of its tables."""
        self.named: dict[tuple[int, ...], NamedTables] = {}
        """Numbers of the chunks of tables that requests have named together -> the tables; empty after one of
        any was replaced."""
        self.kinds: dict[str, type[Span]] = {}
        """Store -> the kind of its spans."""
        self._made = 0

    def new(self, store: str, dtype: str, capacity: int) -> Chunk:
        """Return a new chunk, with a number that no other had, here or on another server."""
        self._made += 1
        number = self._made * self.servers + self.server
        chunk = Chunk(number, store, dtype, capacity, self.memory)
        self.adopt(chunk)
        return chunk

    def adopt(self, chunk: Chunk) -> None:
        """Take in a chunk that was made with the number that it had on another server of this rank."""
        chunk.kind = self.kinds.get(chunk.store, Span)
        self.by_number[chunk.number] = chunk
        self.named.clear()
        self._made = max(self._made, chunk.number // self.servers)

    def at(self, number: int) -> Chunk:
        """Return a chunk by its number.

        Raises:
            ProtocolError: if there is none.
        """
        chunk = self.by_number.get(number)
        if chunk is None:
            raise ProtocolError(f"server {self.server} has no chunk {number}")
        return chunk

    def tables(self, numbers: tuple[int, ...]) -> NamedTables:
        """Return the tables of the chunks with these numbers.

        Raises:
            ProtocolError: if there is no such chunk, it holds keys, or the tables are of several stores.
        """
        known = self.named.get(numbers)
        if known is None:
            chunks = tuple([self.at(number) for number in numbers])
            known = NamedTables(chunks)
            if len({chunk.store for chunk in chunks}) != 1:
                raise ProtocolError(f"a request names {len(chunks)} tables, and it needs some of one store")
            if len(self.named) >= NAMED_MAX:
                del self.named[next(iter(self.named))]
            self.named[numbers] = known
        return known

    def open(self) -> Iterator[Chunk]:
        """Yield the chunks with open spans, the oldest chunk first."""
        for number in sorted(self.pushed):
            chunk = self.by_number[number]
            if chunk.is_open:
                yield chunk

    @property
    def is_settled(self) -> bool:
        """Whether no span is open. This is quick to ask after every packet: it looks at one open chunk."""
        while self.pushed:
            number = next(iter(self.pushed))
            if self.by_number[number].is_open:
                return False
            self.pushed.remove(number)
        return True

    def span_at(self, piece: Piece) -> Span:
        """Return the span that a piece of a key lies in."""
        return next(self.at(piece.chunk).spans_in(piece.start, piece.start + 1))

    def retire(self, pieces: Sequence[Piece]) -> list[PendingRead]:
        """Take ``pieces`` away from their key; free chunks without keys; return the waiting requests."""
        waited: list[PendingRead] = []
        for piece in pieces:
            chunk = self.by_number[piece.chunk]
            waited += chunk.retire(piece)
            self.counts[chunk.store][chunk.dtype] -= piece.size
            if not chunk.spans:
                self.free(chunk)
        return waited

    def drop(self, store: str) -> list[int]:
        """Free all chunks of a store; return their numbers."""
        numbers = [chunk.number for chunk in self.of_store(store)]
        for number in numbers:
            del self.by_number[number]
        self.pushed.difference_update(numbers)
        self.named.clear()
        self.counts.pop(store, None)
        self.table_bytes.pop(store, None)
        return numbers

    def free(self, chunk: Chunk) -> None:
        """Free a chunk without keys."""
        del self.by_number[chunk.number]
        self.named.clear()
        self.pushed.discard(chunk.number)

    def of_store(self, store: str) -> list[Chunk]:
        """Return the chunks of one store."""
        return [chunk for chunk in self.by_number.values() if chunk.store == store]

    def check(self) -> None:
        """Assert the invariants of every chunk."""
        assert self.pushed <= self.by_number.keys()
        for chunk in self.by_number.values():
            assert chunk.spans
            assert chunk.number in self.pushed or not chunk.is_open
            chunk.check()


class Slab:
    """All chunks of one store and one element type."""

    def __init__(self, store: str, dtype: str, chunks: Chunks, chunk_bytes: int) -> None:
        self._store = store
        self._dtype = dtype
        self._chunks = chunks
        self._chunk_count = chunk_bytes // BY_NAME[dtype].itemsize
        self._page_count = PAGE_BYTES // BY_NAME[dtype].itemsize
        self._open: dict[bool, list[int]] = {True: [], False: []}
        """The numbers of chunks with room left: those of whole pages, where every piece begins at
        one, and those of the rest. Not the chunks: these are free once all of their keys are replaced."""
        self._count = 0
        self._before = 0
        self._expected = 0

    def expect(self, count: int) -> None:
        """Announce how many elements will be placed next."""
        self._before, self._expected = self._count, self._count + count

    def place(self, key: str, count: int, sizes: Sequence[int] = (), width: int = 1) -> tuple[Piece, ...]:
        """Give ``count`` elements to ``key``: one piece, or several if it is larger than a chunk.

        With ``sizes``, several of these sizes, none of which is larger than a chunk. Several are
        whole rows of ``width`` elements, and whole pages if they can be both.
        """
        self._chunks.counts[self._store][self._dtype] += count
        room = max(self._expected - self._count, self._before)
        self._count += count
        if sizes:
            return tuple([self._new(size).append(key, size) for size in sizes])
        if count <= self._chunk_count:
            return (self._with_room(count, room).append(key, count),) if count else ()
        units = (whole(size, self._page_count, self._chunk_count) for size in (width, 1))
        unit = next(units) or whole(width, 1, self._chunk_count) or next(units)
        number = -(-count // (self._chunk_count // unit * unit))
        step = -(-count // (number * unit)) * unit
        sizes = [min(step, count - start) for start in range(0, count, step)]
        return tuple(self._new(size).append(key, size) for size in sizes)

    def _with_room(self, count: int, room: int) -> Chunk:
        """Return a chunk with room for ``count`` elements; a new chunk has room for ``room``."""
        is_whole = count % self._page_count == 0
        known = self._chunks.by_number
        numbers = [number for number in self._open[is_whole] if number in known][-OPEN_CHUNKS:]
        self._open[is_whole] = numbers
        for chunk in [known[number] for number in numbers]:
            if chunk.capacity - chunk.used >= count and len(chunk.keys) < RUNS_MAX:
                return chunk
        if 2 * count > self._chunk_count:
            return self._new(count)  # room takes memory, used or not: here it seldom would be
        room = max(count, room, ROOM_BYTES // BY_NAME[self._dtype].itemsize)
        chunk = self._new(min(room, self._chunk_count))
        numbers.append(chunk.number)
        return chunk

    def _new(self, capacity: int) -> Chunk:
        return self._chunks.new(self._store, self._dtype, capacity)
