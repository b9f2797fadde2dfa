"""Memory that others may read: who gets which part of it, and who may open it at all."""

import fcntl
import gc
import mmap
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import astuple, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvps.errors import ProtocolError
from kvps.net.shm import segment as segments
from kvps.net.shm.segment import PAGE_BYTES, Block, Mapping, Segment, Unshared
from kvps.protocol.transports import Offer

MIB = 1 << 20
PAGES = 64
"""Of a small segment; one of them is its own."""


@pytest.fixture
def segment() -> Iterator[Segment]:
    item = Segment(PAGES * PAGE_BYTES)
    yield item
    item.close()


def take(segment: Segment, size_bytes: int) -> Block:
    block = segment.take(size_bytes)
    assert block is not None
    return block


def start_of(segment: Segment, block: Block) -> int:
    offset = segment.offset_of(block.data)
    assert offset is not None
    return offset


# --- taking and giving back ---------------------------------------------------------------------


def test_blocks_are_whole_pages_and_never_the_first(segment: Segment) -> None:
    blocks = [take(segment, size) for size in (1, PAGE_BYTES, PAGE_BYTES + 1, 5 * PAGE_BYTES)]
    assert [len(block) for block in blocks] == [1, PAGE_BYTES, PAGE_BYTES + 1, 5 * PAGE_BYTES]
    starts = [start_of(segment, block) for block in blocks]
    assert starts == [PAGE_BYTES * page for page in (1, 2, 3, 5)]


def test_released_block_is_taken_again(segment: Segment) -> None:
    first = start_of(segment, take(segment, PAGE_BYTES))
    held = take(segment, PAGE_BYTES)
    assert start_of(segment, held) == first
    assert start_of(segment, take(segment, PAGE_BYTES)) != first


def test_neighbours_are_joined_and_what_is_too_large_is_split(segment: Segment) -> None:
    size = (PAGES - 1) * PAGE_BYTES
    blocks = [take(segment, PAGE_BYTES) for _ in range(PAGES - 1)]
    assert segment.take(1) is None
    blocks.clear()
    whole = take(segment, size)
    del whole
    blocks = [take(segment, 7 * PAGE_BYTES) for _ in range(9)]
    assert segment.take(1) is None
    del blocks[4]
    assert segment.take(8 * PAGE_BYTES) is None
    assert start_of(segment, take(segment, 3 * PAGE_BYTES)) == 29 * PAGE_BYTES


def test_other_sizes_do_not_make_it_grow() -> None:
    """A thousand sizes one after another need no more than the largest."""
    segment = Segment(MIB * 256)
    for pages in range(1000):
        assert segment.take((pages % 500 + 1) * PAGE_BYTES) is not None
    assert segment._backed <= 4 * MIB + segments.BACK_BYTES
    segment.close()


def test_memory_is_there_before_it_is_used() -> None:
    segment = Segment(MIB * 256)
    assert os.fstat(segment.offer.fd).st_blocks * 512 == PAGE_BYTES, "it is empty, however large"
    block = take(segment, 40 * MIB)
    assert os.fstat(segment.offer.fd).st_blocks * 512 == segment._backed >= 40 * MIB
    del block
    segment.close()


def test_where_no_memory_is_left_there_is_no_block(segment: Segment, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    held = take(segment, PAGE_BYTES)
    monkeypatch.setattr(segments.os, "posix_fallocate", full)
    assert segment.take(4 * PAGE_BYTES) is None
    monkeypatch.undo()
    assert segment.take(4 * PAGE_BYTES) is not None
    assert len(held) == PAGE_BYTES


def test_after_the_end_only_what_is_backed_can_be_taken(segment: Segment) -> None:
    take(segment, PAGE_BYTES)
    segment.close()
    segment.close()
    assert segment.take(PAGE_BYTES) is not None
    assert segment.take(40 * PAGE_BYTES) is None


VIEWS: dict[str, Callable[[Block], object]] = {
    "slice": lambda block: block[2:5][1:],
    "array": lambda block: np.asarray(block[1:]),
    "buffer": lambda block: block.data[3:],
    "array of a buffer": lambda block: np.frombuffer(block.data, np.float32)[1:],
    "tensor": lambda block: torch.from_numpy(block)[4:].view(torch.float32),
    "tensor of a buffer": lambda block: torch.frombuffer(block.data, dtype=torch.int32)[1:],
    "frame": lambda block: torch.from_numpy(block)[4:].numpy().data,
}


@pytest.mark.parametrize("view", VIEWS)
def test_any_view_keeps_a_block(segment: Segment, view: str) -> None:
    block = take(segment, PAGE_BYTES)
    start = start_of(segment, block)
    part = VIEWS[view](block)
    del block
    other = take(segment, PAGE_BYTES)
    assert start_of(segment, other) != start
    del part
    assert start_of(segment, take(segment, PAGE_BYTES)) == start


def test_blocks_that_only_a_cycle_refers_to_come_back(segment: Segment) -> None:
    block = take(segment, PAGE_BYTES)
    start = start_of(segment, block)
    cycle: list[object] = [block]
    cycle.append(cycle)
    del block, cycle
    gc.collect()
    assert start_of(segment, take(segment, PAGE_BYTES)) == start


def test_threads_take_and_drop() -> None:
    """No two threads hold one byte: each finds its own mark where it wrote it."""
    segment = Segment(MIB)
    torn: list[int] = []

    def work(mark: int) -> None:
        held: list[Block] = []
        for turn in range(400):
            block = segment.take((turn % 5 + 1) * PAGE_BYTES)
            if block is not None:
                block[:] = mark
                held.append(block)
            if len(held) > 3:
                item = held.pop(turn % 3)
                torn.extend(int(x) for x in item[item != mark][:1])
        torn.extend(int(x) for item in held for x in item[item != mark][:1])

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not torn
    whole = segment.take(segment.size_bytes - PAGE_BYTES)
    assert whole is not None, "all of it came back"
    segment.close()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # that is what it is about
def test_a_forked_process_takes_nothing(segment: Segment) -> None:
    """It has the same memory: what it took, its parent would give to another."""
    take(segment, PAGE_BYTES)
    child = os.fork()
    if child == 0:
        os._exit(0 if segment.take(PAGE_BYTES) is None else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert segment.take(PAGE_BYTES) is not None


class Taking(RuleBasedStateMachine):
    """The arena against a list of what was taken."""

    def __init__(self) -> None:
        super().__init__()
        self.segment = Segment(PAGES * PAGE_BYTES)
        self.taken: list[tuple[Block, int]] = []
        self.marks = 0

    @rule(size_bytes=st.integers(1, 9 * PAGE_BYTES) | st.integers(1, 70 * PAGE_BYTES))
    def take(self, size_bytes: int) -> None:
        block = self.segment.take(size_bytes)
        pages = -(-size_bytes // PAGE_BYTES)
        if block is None:
            assert self.longest_gap() < pages, "there was room for it"
            return
        self.marks = self.marks % 255 + 1
        block[:] = self.marks
        self.taken.append((block, self.marks))

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        self.taken.pop(data.draw(st.integers(0, len(self.taken) - 1)))

    @rule()
    def drop_all(self) -> None:
        self.taken.clear()
        whole = self.segment.take((PAGES - 1) * PAGE_BYTES)
        assert whole is not None, "no room is lost"

    def longest_gap(self) -> int:
        used = {0}
        for block, _ in self.taken:
            start = start_of(self.segment, block) // PAGE_BYTES
            used.update(range(start, start - (-len(block) // PAGE_BYTES)))
        free = "".join(" " if page in used else "x" for page in range(PAGES))
        return max(map(len, free.split(" ")))

    @invariant()
    def nobody_wrote_to_a_block_of_another(self) -> None:
        assert all((block == mark).all() for block, mark in self.taken)

    @invariant()
    def blocks_lie_apart(self) -> None:
        ranges = sorted((start_of(self.segment, item), len(item)) for item, _ in self.taken)
        last = PAGE_BYTES
        for start, size in ranges:
            assert start % PAGE_BYTES == 0
            assert start >= last
            last = start + size
        assert last <= self.segment.size_bytes

    def teardown(self) -> None:
        self.segment.close()


TestTaking = Taking.TestCase
TestTaking.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


# --- where it lies ------------------------------------------------------------------------------


def test_a_frame_is_found_where_it_lies(segment: Segment) -> None:
    block = take(segment, 3 * PAGE_BYTES)
    start = start_of(segment, block)
    assert segment.offset_of(block.data[100:200]) == start + 100
    assert segment.offset_of(memoryview(bytes(100))) is None
    assert segment.offset_of(block.data[:0]) is None
    below = np.frombuffer(mmap.mmap(-1, PAGE_BYTES), np.uint8)
    assert segment.offset_of(below.data) is None


# --- reading another's --------------------------------------------------------------------------


@pytest.mark.spec("R80")
def test_another_reads_what_is_written(segment: Segment) -> None:
    block = take(segment, PAGE_BYTES)
    mapping = Mapping(segment.offer)
    read = mapping.read(start_of(segment, block), PAGE_BYTES, None)
    block[:] = 7
    assert (read == 7).all()
    block[5] = 8
    assert read[5] == 8


@pytest.mark.spec("R80")
def test_a_mapping_can_only_be_read() -> None:
    """A write to it ends the process that writes, and changes nothing."""
    segment = Segment(MIB)
    block = take(segment, PAGE_BYTES)
    block[:] = 7
    program = (
        "import resource, sys, kvps.net.shm.segment as s\n"
        "resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
        "read = s.Mapping(s.Offer(*map(int, sys.argv[1:]))).read(s.PAGE_BYTES, 8, None)\n"
        "print(read[0], flush=True)\n"
        "read[0] = 1\n"
    )
    argv = [sys.executable, "-c", program, *map(str, astuple(segment.offer))]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("7\n", -signal.SIGSEGV), done.stderr
    assert (block == 7).all()
    segment.close()


@pytest.mark.spec("R81")
@pytest.mark.parametrize(
    ("offset", "size_bytes"),
    [
        (0, 8),
        (PAGE_BYTES - 1, 8),
        (PAGES * PAGE_BYTES - 7, 8),
        (PAGES * PAGE_BYTES, 1),
        (2**63 - 1, 1),
        (PAGE_BYTES, PAGES * PAGE_BYTES),
        (PAGE_BYTES, 2**63 - 1),
    ],
)
def test_range_outside_the_segment_is_not_read(segment: Segment, offset: int, size_bytes: int) -> None:
    with pytest.raises(ProtocolError, match=r"are outside a segment of"):
        Mapping(segment.offer).read(offset, size_bytes, None)


def test_the_last_byte_can_be_read(segment: Segment) -> None:
    assert Mapping(segment.offer).read(segment.size_bytes - 1, 1, None).tolist() == [0]


def test_block_that_was_read_keeps_its_mapping_and_its_lease(segment: Segment) -> None:
    block = take(segment, PAGE_BYTES)
    block[:] = 3
    dropped: list[str] = []

    class Lease:
        def __del__(self) -> None:
            dropped.append("lease")

    tensor = torch.frombuffer(
        Mapping(segment.offer).read(start_of(segment, block), 64, Lease()).data, dtype=torch.uint8
    )[8:]
    segment.close()
    assert dropped == []
    assert tensor.eq(3).all()
    del tensor
    assert dropped == ["lease"]


def test_a_reader_sees_that_the_owner_is_gone(segment: Segment) -> None:
    mapping = Mapping(segment.offer)
    assert mapping.is_there
    number = segment.offer.fd
    segment.close()
    assert not mapping.is_there
    with open("/dev/null", "rb") as other:
        if other.fileno() != number:
            os.dup2(other.fileno(), number)
        assert not mapping.is_there, "the number is another file's now"
        if other.fileno() != number:
            os.close(number)


def test_segment_can_be_opened_again_while_it_exists(segment: Segment) -> None:
    mapping = Mapping(segment.offer)
    fd = mapping.open()
    assert fd is not None
    assert os.fstat(fd).st_ino == os.fstat(segment.offer.fd).st_ino
    os.close(fd)
    number = segment.offer.fd
    segment.close()
    assert mapping.open() is None
    with open("/dev/null", "rb") as other:
        os.dup2(other.fileno(), number)
        assert mapping.open() is None, "the number is another file's now"
        if other.fileno() != number:
            os.close(number)


def test_an_owner_that_may_not_be_looked_at_is_not_gone(
    segment: Segment, monkeypatch: pytest.MonkeyPatch
) -> None:
    mapping = Mapping(segment.offer)

    def denied(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(segments.os, "stat", denied)
    assert mapping.is_there


# --- offers that are not what they seem -----------------------------------------------------------


def refused(offer: Offer, match: str) -> None:
    gc.collect()
    open_before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(Unshared, match=match):
        Mapping(offer)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == open_before


@pytest.mark.spec("R78")
def test_another_process_of_the_user_cannot_map_it_for_writing() -> None:
    segment = Segment(1 << 20)
    block = segment.take(4096)
    assert block is not None
    block[:] = 7
    fd = os.open(f"/proc/self/fd/{segment.offer.fd}", os.O_RDWR)
    try:
        with pytest.raises(PermissionError):
            mmap.mmap(fd, 4096)
        with mmap.mmap(fd, 1 << 20, prot=mmap.PROT_READ) as theirs:
            assert theirs[block.nbytes] == 7
    finally:
        os.close(fd)
        segment.close()


def memory(name: str = segments.NAME, size_bytes: int = PAGE_BYTES, seals: int = 7) -> int:
    """A memfd that begins with zeros, and how it is sealed."""
    fd = os.memfd_create(name, os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size_bytes)
    fcntl.fcntl(fd, 1033, seals)
    return fd


@pytest.mark.spec("R79")
def test_an_offer_of_nobody(segment: Segment) -> None:
    refused(replace(segment.offer, pid=2**62), "cannot be opened.*another host, container or user")
    refused(replace(segment.offer, fd=2**62), "cannot be opened")


@pytest.mark.spec("R79")
@pytest.mark.parametrize("what", ["/etc/hostname", "/dev/zero", "fifo", "memfd"])
def test_an_offer_of_a_foreign_file(tmp_path: Path, what: str) -> None:
    if what == "fifo":
        os.mkfifo(tmp_path / what)
        fd = os.open(tmp_path / what, os.O_RDONLY | os.O_NONBLOCK)
    elif what == "memfd":
        fd = memory("other")
    else:
        fd = os.open(what, os.O_RDONLY)
    refused(Offer(os.getpid(), fd, PAGE_BYTES, 0), "not memory of kvps")
    os.close(fd)


@pytest.mark.spec("R79")
def test_an_offer_of_what_may_shrink() -> None:
    for seals in (0, 1, 2, 4, 5, 6):
        fd = memory(seals=seals)
        refused(Offer(os.getpid(), fd, PAGE_BYTES, 0), "could shrink")
        os.close(fd)


@pytest.mark.spec("R79")
def test_an_offer_of_another_size(segment: Segment) -> None:
    size = segment.size_bytes
    for other in (0, size - 1, size + PAGE_BYTES, 2**63 - 1):
        refused(replace(segment.offer, size=other), "announced size")
    fd = memory(size_bytes=0)
    refused(Offer(os.getpid(), fd, 0, 0), "cannot be mapped")
    os.close(fd)


@pytest.mark.spec("R79")
def test_an_offer_with_another_nonce(segment: Segment) -> None:
    refused(replace(segment.offer, nonce=segment.nonce ^ 1), "another process's")


@pytest.mark.spec("R79")
def test_an_offer_of_another_user(segment: Segment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments.os, "geteuid", lambda: 4711)
    refused(segment.offer, f"user {os.getuid()}'s, not user 4711's")


def test_no_two_segments_have_a_nonce() -> None:
    made = [Segment(MIB) for _ in range(8)]
    assert len({item.nonce for item in made}) == 8
    assert all(0 <= item.nonce < 2**63 for item in made)
    for item in made:
        item.close()


# --- where there is none --------------------------------------------------------------------------


def test_a_system_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(segments.os, "memfd_create")
    with pytest.raises(Unshared, match="no memfd_create"):
        Segment(MIB)


def test_a_segment_that_cannot_be_made_leaves_nothing_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(Unshared, match="cannot create a segment of"):
        Segment(1 << 62)
    assert len(os.listdir("/proc/self/fd")) == before


def test_too_little_address_space() -> None:
    program = (
        "import resource, kvps.net.shm.segment as s\n"
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))\n"
        "try: s.Segment(1 << 32)\n"
        "except s.Unshared as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "cannot create a segment of 4294967296 bytes" in done.stdout


@pytest.mark.spec("R78")
def test_nothing_has_a_name_and_nothing_is_left(segment: Segment) -> None:
    """It is no file in any directory, and it ends with the last process that has it."""
    block = take(segment, PAGE_BYTES)
    status = os.fstat(segment.offer.fd)
    assert status.st_nlink == 0
    assert len(block) == PAGE_BYTES
    assert "kvps" not in "".join(os.listdir("/dev/shm"))
