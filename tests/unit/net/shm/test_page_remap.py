"""Pages of several segments, mapped side by side and read as one."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvps.net.shm import page_remap
from kvps.net.shm.page_remap import PageRemapper
from kvps.net.shm.segment import PAGE_BYTES, Block, Mapping, Segment

PAGES = 32


class Lent:
    """What lies in a segment, as another process has mapped it."""

    def __init__(self, pages: int = PAGES) -> None:
        self.segment = Segment(pages * PAGE_BYTES)
        self.mapping = Mapping(self.segment.offer)
        self.blocks: list[Block] = []

    def put(self, *pages: int, last_bytes: int = PAGE_BYTES) -> tuple[int, int]:
        """Fill pages with these numbers; return where they are mapped, and their bytes."""
        block = self.segment.take(len(pages) * PAGE_BYTES)
        assert block is not None
        self.blocks.append(block)
        block[:] = np.repeat(np.array(pages, np.uint8), PAGE_BYTES)
        offset = self.segment.offset_of(block.data)
        assert offset is not None
        return self.mapping.address + offset, len(block) - PAGE_BYTES + last_bytes


@pytest.fixture
def lent() -> Iterator[list[Lent]]:
    found = [Lent(), Lent()]
    yield found
    for item in found:
        item.segment.close()


def stitches(lent: list[Lent]) -> PageRemapper:
    return PageRemapper(lambda: [item.mapping for item in lent])


def numbers(block: Block | None) -> list[int]:
    """What the pages of a block hold."""
    assert block is not None
    return [int(page[0]) for page in np.split(block, range(PAGE_BYTES, len(block), PAGE_BYTES))]


def mapped() -> int:
    """How many places of segments this process has mapped."""
    gc.collect()
    return Path("/proc/self/maps").read_text().count("/memfd:kvps")


def test_pages_of_several_segments_are_read_as_one(lent: list[Lent]) -> None:
    first, second = lent
    ranges = (first.put(1, 2), second.put(3), first.put(4, 5, last_bytes=7))
    block = stitches(lent).beside(ranges, None)
    assert numbers(block) == [1, 2, 3, 4, 5]
    assert block is not None
    assert len(block) == 4 * PAGE_BYTES + 7


def test_nothing_is_copied(lent: list[Lent]) -> None:
    first, second = lent
    block = stitches(lent).beside((first.put(1), second.put(2)), None)
    first.blocks[0][:] = 8
    assert numbers(block) == [8, 2]


def test_the_same_arrangement_is_mapped_once(lent: list[Lent]) -> None:
    first, second = lent
    page_remapper, ranges = stitches(lent), (first.put(1), second.put(2))
    block = page_remapper.beside(ranges, None)
    before = mapped()
    again = page_remapper.beside(ranges, None)
    assert mapped() == before
    assert block is not None
    assert again is not None
    assert again.ctypes.data == block.ctypes.data
    other = page_remapper.beside(ranges[::-1], None)
    assert numbers(other) == [2, 1]
    assert mapped() == before + 2


def test_lease_lives_as_long_as_a_view(lent: list[Lent]) -> None:
    class Lease:
        ended = False

        def __del__(self) -> None:
            Lease.ended = True

    first, second = lent
    page_remapper = stitches(lent)
    block = page_remapper.beside((first.put(1), second.put(2)), Lease())
    assert block is not None
    view = block[10:20]
    del block
    gc.collect()
    assert not Lease.ended
    del view
    gc.collect()
    assert Lease.ended


def test_unmappable_ranges_are_not_mapped_side_by_side(lent: list[Lent]) -> None:
    first, second = lent
    page_remapper = stitches(lent)
    address, size_bytes = first.put(1, 2)
    other = second.put(3)
    own = np.zeros(PAGE_BYTES, np.uint8)
    assert page_remapper.beside(((address + 64, PAGE_BYTES), other), None) is None  # begins within a page
    assert page_remapper.beside(((address, PAGE_BYTES + 64), other), None) is None  # ends within one
    assert page_remapper.beside(((own.ctypes.data, PAGE_BYTES), other), None) is None  # is nobody's
    beyond = PAGES * PAGE_BYTES
    assert (
        page_remapper.beside(((first.mapping.address, beyond + 1), other), None) is None
    )  # is not all there
    assert numbers(page_remapper.beside(((address, size_bytes), other), None)) == [1, 2, 3]


def test_not_if_its_owner_is_gone(lent: list[Lent]) -> None:
    first, second = lent
    ranges = (first.put(1), second.put(2))
    second.segment.close()
    before = mapped()
    assert stitches(lent).beside(ranges, None) is None
    assert mapped() == before


def test_a_view_outlives_its_owner_and_the_stitches(lent: list[Lent]) -> None:
    first, second = lent
    block = stitches(lent).beside((first.put(1), second.put(2)), None)
    for item in lent:
        item.segment.close()
        item.blocks.clear()
    assert numbers(block) == [1, 2]


def test_pages_of_those_who_are_gone_are_not_kept() -> None:
    """Also if another has come in the place of one."""
    lent = [Lent(), Lent()]
    page_remapper = stitches(lent)
    ranges = tuple([each.put(1) for each in lent])
    before = mapped()
    assert page_remapper.beside(ranges, None) is not None
    assert mapped() == before + 2
    gone, lent[0] = lent[0], Lent()
    before = mapped()
    assert page_remapper.beside(((0, PAGE_BYTES), ranges[1]), None) is None
    assert mapped() == before - 2
    for each in (gone, *lent):
        each.segment.close()


def test_few_places_are_kept(lent: list[Lent], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_remap, "KEPT_MAX", 5)
    first, second = lent
    page_remapper = stitches(lent)
    ranges = (first.put(1), second.put(2), first.put(3))
    before = mapped()
    for pair in ((0, 1), (1, 2)):
        page_remapper.beside(tuple([ranges[at] for at in pair]), None)
    assert mapped() == before + 4
    assert numbers(page_remapper.beside(ranges, None)) == [1, 2, 3]
    assert mapped() <= before + 3


def test_no_room_is_no_view(lent: list[Lent], monkeypatch: pytest.MonkeyPatch) -> None:
    """What was mapped before it failed is unmapped."""
    first, second = lent
    ranges = (first.put(1), second.put(2))
    calls = iter([True, False])
    mmap = page_remap._libc.mmap

    def fail(*arguments: object) -> object:
        return mmap(*arguments) if next(calls) else page_remap._FAILED

    monkeypatch.setattr(page_remap._libc, "mmap", fail)
    before = mapped()
    descriptors = len(os.listdir("/proc/self/fd"))
    assert stitches(lent).beside(ranges, None) is None
    assert mapped() == before
    assert len(os.listdir("/proc/self/fd")) == descriptors
