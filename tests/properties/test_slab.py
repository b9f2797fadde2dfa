"""Chunks under random use: values that are held never change, and spans always fit."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvps.core.server.chunks.slab import Chunk, Chunks, Slab
from kvps.core.server.sessions import PendingRead, Session
from kvps.protocol.stores import Piece
from tests.support.server_harness import weight_bytes
from tests.support.tiers import examples

SIZES = st.integers(1, 9)

CHUNK_BYTES = 1 << 20


class Held(RuleBasedStateMachine):
    """Writers and readers of one chunk; a reader lets go at some later time, or never."""

    def __init__(self) -> None:
        super().__init__()
        self.chunk = Chunk(1, "kv", "int64", 8)
        self.chunk.append("k", 8)
        self.chunk.buffer.tensor.zero_()
        self.now = [0] * 8
        self.readers: list[tuple[object, torch.Tensor, list[int]]] = []

    @rule(start=st.integers(0, 7), value=st.integers(1, 1000))
    def write(self, start: int, value: int) -> None:
        held = self.chunk.buffer.holds > 0
        before = self.chunk.buffer
        self.chunk.writable()[start:].add_(value)
        assert (self.chunk.buffer is before) is not held
        self.now = self.now[:start] + [item + value for item in self.now[start:]]

    @rule(start=st.integers(0, 7), stop=st.integers(0, 8), value=st.integers(1, 1000))
    def replace(self, start: int, stop: int, value: int) -> None:
        self.chunk.overwritable(start, max(start, stop)).tensor[start:stop].fill_(value)
        self.now[start:stop] = [value] * len(self.now[start:stop])

    @rule(start=st.integers(0, 7))
    def read(self, start: int) -> None:
        buffer = self.chunk.buffer.hold()
        self.readers.append((buffer, buffer.tensor[start:], self.now[start:]))

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.readers) - 1))
        buffer, _, _ = self.readers.pop(index)
        buffer.release()  # type: ignore[attr-defined]

    @invariant()
    def nothing_that_is_held_changes(self) -> None:
        assert self.chunk.buffer.tensor.tolist() == self.now
        for _, view, seen in self.readers:
            assert view.tolist() == seen


TestHeld = pytest.mark.spec("R62")(Held.TestCase)
TestHeld.settings = examples(50, stateful_step_count=30)


class Cuts(RuleBasedStateMachine):
    """Keys come and go, spans are cut and move, readings wait: against a list of elements."""

    def __init__(self) -> None:
        super().__init__()
        self.chunk = Chunk(1, "kv", "uint8", 200)
        self.pieces: list[Piece] = []
        self.versions: dict[int, int] = {}
        self.waiting: list[PendingRead] = []

    @precondition(lambda self: self.chunk.used < 180)
    @rule(size=SIZES)
    def append(self, size: int) -> None:
        piece = self.chunk.append(f"k{len(self.chunk.keys)}", size)
        self.pieces.append(piece)
        self.versions |= dict.fromkeys(range(piece.start, piece.start + size), 0)

    @precondition(lambda self: self.pieces)
    @rule(data=st.data(), moves=st.booleans())
    def push(self, data: st.DataObject, moves: bool) -> None:
        """Cut a run of neighbouring keys, and perhaps move it."""
        first = data.draw(st.integers(0, len(self.pieces) - 1))
        last = first
        while (
            last + 1 < len(self.pieces)
            and self.pieces[last].start + self.pieces[last].size == self.pieces[last + 1].start
            and data.draw(st.booleans())
        ):
            last += 1
        start, stop = self.pieces[first].start, self.pieces[last].start + self.pieces[last].size
        spans = self.chunk.cut(start, stop)
        assert spans == list(self.chunk.spans_in(start, stop))
        assert (spans[0].start, spans[-1].stop) == (start, stop)
        if moves:
            for span in spans:
                span.version += 1
                for element in range(span.start, span.stop):
                    self.versions[element] += 1

    @precondition(lambda self: self.pieces)
    @rule(data=st.data())
    def wait(self, data: st.DataObject) -> None:
        piece = data.draw(st.sampled_from(self.pieces))
        reading = PendingRead(Session(0, b"", 1), 1, "kv", 1, (), print, at=piece.start)
        self.chunk.wait(reading)
        self.waiting.append(reading)

    @precondition(lambda self: self.pieces)
    @rule(data=st.data())
    def wake(self, data: st.DataObject) -> None:
        start, stop = sorted(data.draw(st.tuples(st.integers(0, 200), st.integers(0, 200))))
        woken = self.chunk.woken(start, stop)
        expected = [item for item in self.waiting if start <= item.at < stop]
        assert sorted(map(id, woken)) == sorted(map(id, expected))
        self.waiting = [item for item in self.waiting if item not in woken]

    @precondition(lambda self: self.pieces)
    @rule(data=st.data())
    def retire(self, data: st.DataObject) -> None:
        piece = data.draw(st.sampled_from(self.pieces))
        self.pieces.remove(piece)
        gone = range(piece.start, piece.start + piece.size)
        woken = self.chunk.retire(piece)
        assert all(item.at in gone for item in woken)
        self.waiting = [item for item in self.waiting if item.at not in gone]
        for element in gone:
            del self.versions[element]

    @invariant()
    def spans_tell_the_history_of_each_element(self) -> None:
        self.chunk.check()
        told = {
            element: span.version for span in self.chunk.spans for element in range(span.start, span.stop)
        }
        assert told == self.versions


TestCuts = Cuts.TestCase
TestCuts.settings = examples(60, stateful_step_count=30)


@given(counts=st.lists(st.integers(0, 3 * CHUNK_BYTES), max_size=12))
@examples(60)
def test_places_do_not_overlap_and_hold_all(counts: list[int]) -> None:
    chunks = Chunks()
    slab = Slab("kv", "uint8", chunks, CHUNK_BYTES)
    places = [slab.place(f"k{index}", count) for index, count in enumerate(counts)]
    assert [sum(piece.size for piece in place) for place in places] == counts
    assert weight_bytes(chunks) == sum(counts)
    taken: dict[int, int] = {}
    for piece in sorted(piece for place in places for piece in place):
        assert piece.start == taken.get(piece.chunk, 0)
        taken[piece.chunk] = piece.start + piece.size
    for chunk in chunks.by_number.values():
        chunk.check()
        assert chunk.capacity <= CHUNK_BYTES
