"""Chunks: where keys lie, how spans are cut, who may read and write, who waits where."""

import weakref

import pytest
import torch

from kvps.core.server.chunks.slab import OPEN_CHUNKS, PAGE_BYTES, PARTS_MAX, Buffer, Chunk, Chunks, Slab
from kvps.core.server.sessions import PendingRead, Session
from kvps.errors import KeyNotFound, ProtocolError
from kvps.protocol.envelope import RUNS_MAX
from kvps.protocol.stores import Piece
from kvps.protocol.values import Run
from tests.support.server_harness import weight_bytes

CHUNK_BYTES = 1 << 20


def chunk(*sizes: int, filled: bool = True) -> Chunk:
    """A chunk with keys ``k0``, ``k1`` … of these sizes."""
    slab = Chunk(1, "kv", "float32", 100)
    for index, size in enumerate(sizes):
        piece = slab.append(f"k{index}", size)
        if filled:
            slab.fill(piece.start)
    return slab


def shape(chunk: Chunk) -> list[tuple[int, int]]:
    chunk.check()
    return [(span.start, span.stop) for span in chunk.spans]


@pytest.mark.spec("R93")
def test_a_number_names_one_chunk_of_one_server() -> None:
    servers = [Chunks(server=server, servers=3) for server in range(3)]
    numbers = [[item.new("kv", "float32", 10).number for _ in range(4)] for item in servers]
    for server, ones in enumerate(numbers):
        assert {number % 3 for number in ones} == {server}
    assert len({number for ones in numbers for number in ones}) == 12
    assert min(map(min, numbers)) > 0, "0 is the lane of what has none"


def test_a_chunk_whose_keys_are_all_replaced_is_free() -> None:
    chunks = Chunks()
    slab = Slab("kv", "float32", chunks, CHUNK_BYTES)
    slab.expect(20)
    pieces = [*slab.place("a", 10), *slab.place("b", 10)]
    item = weakref.ref(chunks.at(pieces[0].chunk))
    chunks.retire(pieces[:1])
    assert item() is not None
    chunks.retire(pieces[1:])
    assert item() is None, "its room, which may be a chunk's, would stay as long as the store"
    assert slab.place("c", 10)[0].chunk not in {piece.chunk for piece in pieces}


# --- keys and spans ---------------------------------------------------------------------------------


def test_a_narrow_push_cuts_and_a_wide_one_joins() -> None:
    slab = chunk(10, 20, 30)
    (middle,) = slab.cut(10, 30)
    assert shape(slab) == [(0, 10), (10, 30), (30, 60)]
    middle.version = 1
    assert [(s.start, s.stop) for s in slab.cut(0, 60)] == [(0, 10), (10, 30), (30, 60)]
    middle.version = 0
    assert [(s.start, s.stop) for s in slab.cut(0, 60)] == [(0, 60)]
    slab.cut(0, 10)
    slab.cut(30, 60)
    assert [(s.start, s.stop) for s in slab.cut(10, 60)] == [(10, 60)]
    assert [(s.start, s.stop) for s in slab.cut_by_piece(0, 60)] == [(0, 10), (10, 30), (30, 60)]


# --- what peers may ask for -------------------------------------------------------------------------


@pytest.mark.spec("R54")
@pytest.mark.parametrize(
    ("runs", "says"),
    [
        ([], "a request for no elements"),
        ([(0, 0)], "0 to 0 is not a range"),
        ([(50, 20)], "chunk 1 has 60 elements; 50 to 70 is not a range"),
        ([(0, 2**63)], "is not a range"),
        ([(5, 5)], "5 is not the edge of a key"),
        ([(0, 15)], "15 is not the edge of a key"),
        ([(10, 20), (0, 10)], "0 to 10 is not a range of them after 30"),
        ([(0, 10), (0, 10)], "0 to 10 is not a range of them after 10"),
        ([(0, 30), (10, 50)], "10 to 60 is not a range of them after 30"),
    ],
)
def test_runs_are_whole_keys_in_order(runs: list[tuple[int, int]], says: str) -> None:
    slab = chunk(10, 20, 30)
    with pytest.raises(ProtocolError, match=says):
        slab.validate([Run(start, size, 0) for start, size in runs])
    slab.validate([Run(0, 10, 0), Run(30, 30, 0)])
    slab.validate([Run(0, 60, 0)])


def test_a_key_without_a_value_cannot_be_used() -> None:
    slab = chunk(10, 20, filled=False)
    slab.fill(0)
    slab.validate([Run(0, 10, 0)], are_filled=True)
    with pytest.raises(KeyNotFound, match="key 'k1' of store 'kv' has no value yet"):
        slab.validate([Run(0, 30, 0)], are_filled=True)
    slab.fill(10)
    slab.validate([Run(0, 30, 0)], are_filled=True)


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_retired_piece_is_gone_for_ever(index: int) -> None:
    slab = chunk(10, 20, 30)
    starts = [0, 10, 30, 60]
    start, stop = starts[index], starts[index + 1]
    slab.retire(Piece(1, start, stop - start))
    slab.check()
    for run in (Run(start, stop - start, 0), Run(0, 60, 0)):
        with pytest.raises(ProtocolError, match="holds a key that was replaced"):
            slab.validate([run])
    assert all(span.stop <= start or span.start >= stop for span in slab.spans_in(0, 60))
    assert sum(span.stop - span.start for span in slab.spans_in(0, 60)) == 60 - (stop - start)
    for other in {0, 1, 2} - {index}:
        slab.validate([Run(starts[other], starts[other + 1] - starts[other], 0)])
    assert list(slab.spans_in(start, stop)) == []


# --- readers and writers ----------------------------------------------------------------------------


def test_an_update_is_made_in_place_when_nobody_reads() -> None:
    slab = chunk(10)
    before = slab.buffer
    assert slab.writable() is before.tensor


@pytest.mark.spec("R62")
def test_and_in_a_copy_when_somebody_does() -> None:
    slab = chunk(10)
    slab.writable().fill_(1)
    held = slab.buffer.hold().hold()
    slab.writable().fill_(2)
    slab.writable().add_(1)
    assert held.tensor[0] == 1
    assert slab.buffer.tensor[0] == 3
    assert slab.buffer.holds == 0
    held.release()
    held.release()
    assert held.holds == 0


def test_a_buffer_is_in_place_again_once_all_have_read_it() -> None:
    slab = chunk(10)
    slab.buffer.hold().release()
    before = slab.buffer.tensor
    assert slab.writable() is before


def test_the_buffer_before_this_one_is_not_taken_while_it_is_read() -> None:
    slab = chunk(10)
    slab.writable().fill_(1)
    first = slab.buffer.hold()
    slab.writable().fill_(2)
    second = slab.buffer.hold()
    slab.writable().fill_(3)
    assert [held.tensor[:10].tolist() for held in (first, second)] == [[1] * 10, [2] * 10]
    second.release()
    slab.buffer.hold()
    assert slab.writable() is second.tensor
    assert second.tensor[:10].tolist() == [3] * 10


def test_a_buffer_keeps_a_limited_number_of_parts() -> None:
    values = torch.randn(PARTS_MAX + 2)
    buffer = Buffer(values)
    first = buffer.part(0, 1)
    assert buffer.part(0, 1) is first
    for start in range(1, PARTS_MAX + 1):
        assert buffer.part(start, start + 1).equal(values[start : start + 1])
    assert buffer.part(0, 1) is not first


def test_only_what_will_not_be_replaced_is_copied() -> None:
    slab = chunk(10, 20, 30)
    slab.writable()[:60] = 1
    slab.buffer.hold()
    target = slab.overwritable(10, 30).tensor
    target[10:30] = 2
    assert slab.buffer.tensor is target
    assert target[:60].tolist() == [1] * 10 + [2] * 20 + [1] * 30
    slab.buffer.hold()
    older = slab.overwritable(0, 60).tensor  # the first is held, too
    older[:60] = 3
    assert target[:60].tolist() == [1] * 10 + [2] * 20 + [1] * 30


def test_a_key_that_came_later_is_copied_too() -> None:
    """The buffer whose turn it is has not seen it."""
    slab = chunk(10)
    slab.buffer.hold().release()
    slab.buffer.hold()
    first = slab.buffer
    slab.writable().fill_(1)
    first.release()
    slab.append("late", 5)
    slab.writable()[10:15] = 7
    slab.buffer.hold()
    assert slab.writable() is first.tensor
    assert slab.buffer.tensor[:15].tolist() == [1] * 10 + [7] * 5


def test_releasing_too_often_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="released more often than held"):
        Buffer(torch.empty(1)).release()


# --- places -----------------------------------------------------------------------------------------


def test_a_chunk_has_no_more_keys_than_a_message_has_runs() -> None:
    chunks = Chunks()
    slab = Slab("kv", "uint8", chunks, CHUNK_BYTES)
    places = [slab.place(str(index), 1)[0].chunk for index in range(RUNS_MAX + 1)]
    assert places == [1] * RUNS_MAX + [2]
    chunks.by_number[1].check()


def test_few_chunks_are_searched_for_room() -> None:
    chunks = Chunks()
    slab = Slab("kv", "uint8", chunks, CHUNK_BYTES)
    slab.expect(100 * CHUNK_BYTES)
    for index in range(4 * OPEN_CHUNKS):
        slab.place(str(index), CHUNK_BYTES // 5 * 2)
    (piece,) = slab.place("last", 1)
    assert piece.chunk == OPEN_CHUNKS + 1


def test_a_key_of_more_than_half_a_chunk_has_one_without_room() -> None:
    """It takes no place among those that are searched."""
    chunks = Chunks()
    slab = Slab("kv", "uint8", chunks, CHUNK_BYTES)
    slab.expect(100 * CHUNK_BYTES)
    slab.place("half", CHUNK_BYTES // 2)
    for index in range(2 * OPEN_CHUNKS):
        slab.place(str(index), CHUNK_BYTES // 2 + 1)
    assert slab.place("other", 100) == (Piece(2 * OPEN_CHUNKS + 2, 0, 100),)
    assert slab.place("page", PAGE_BYTES) == (Piece(1, CHUNK_BYTES // 2, PAGE_BYTES),)
    capacities = [item.capacity for item in chunks.by_number.values()]
    assert capacities == [CHUNK_BYTES, *[CHUNK_BYTES // 2 + 1] * 2 * OPEN_CHUNKS, CHUNK_BYTES]


def test_keys_that_come_one_by_one_find_as_much_room_as_there_were_before() -> None:
    chunks = Chunks()
    slab = Slab("kv", "uint8", chunks, CHUNK_BYTES)
    for index in range(100):
        slab.expect(10_001)
        slab.place(str(index), 10_001)
    capacities = [item.capacity for item in chunks.by_number.values()]
    assert capacities == sorted(capacities)
    assert len(capacities) < 8
    assert sum(capacities) < 2 * 100 * 10_001


def test_whole_pages_lie_among_whole_pages() -> None:
    """Whatever comes between them, so that each begins at one."""
    chunks = Chunks()
    slab = Slab("kv", "float32", chunks, CHUNK_BYTES)
    page = PAGE_BYTES // 4
    places = [slab.place(str(count), count)[0] for count in (page, 7, 3 * page, page + 1, 2 * page)]
    whole, rest = places[::2], places[1::2]
    assert [(item.chunk, item.start) for item in whole] == [(1, 0), (1, page), (1, 4 * page)]
    assert [(item.chunk, item.start) for item in rest] == [(2, 0), (2, 7)]


def test_a_chunk_without_keys_is_freed_and_its_number_never_used_again() -> None:
    chunks = Chunks()
    slab = Slab("kv", "float32", chunks, CHUNK_BYTES)
    first, second = slab.place("a", 10), slab.place("b", 10)
    waits = PendingRead(Session(0, b"w0", 1), 1, "kv", 1, (), print, at=10)
    chunks.by_number[1].wait(waits)
    assert chunks.retire(first) == []
    assert chunks.retire(second) == [waits]
    assert (chunks.by_number, weight_bytes(chunks)) == ({}, 0)
    assert slab.place("c", 10) == (Piece(2, 0, 10),)
