"""Page locks: whatever is covered lies in one locked range, and no byte is locked twice."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvps.runtime.device import CallsBehindKernels, PageLocks, Staging, bring_back, is_away, settle_all


class Cuda:
    """What the driver knows of locked memory; it refuses what overlaps, and above ``limit``."""

    def __init__(self, limit: int = 1 << 60) -> None:
        self.limit = limit
        self.ranges: dict[int, int] = {}
        self.calls = 0

    def lock(self, address: int, size_bytes: int) -> bool:
        self.calls += 1
        stop = address + size_bytes
        assert not any(start < stop and address < end for start, end in self.ranges.items())
        if stop > self.limit:
            return False
        self.ranges[address] = stop
        return True

    def unlock(self, address: int) -> None:
        del self.ranges[address]

    def holds(self, start: int, stop: int) -> bool:
        return any(begin <= start and stop <= end for begin, end in self.ranges.items())


blocks = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), max_size=20)


@given(blocks)
def test_covered_block_lies_in_a_single_locked_range(blocks: list[tuple[int, int]]) -> None:
    cuda = Cuda()
    locks = PageLocks(cuda.lock, cuda.unlock)
    covered: list[tuple[int, int]] = []
    for start, size in blocks:
        assert locks.cover(start, start + size)
        covered.append((start, start + size))
        assert all(cuda.holds(*item) for item in covered)


def test_locked_range_costs_nothing() -> None:
    cuda = Cuda()
    locks = PageLocks(cuda.lock, cuda.unlock)
    for _ in range(3):
        locks.cover(0, 10)
        locks.cover(10, 20)
        locks.cover(12, 18)
    assert cuda.calls == 2


def test_a_refusal_leaves_nothing_that_is_thought_to_be_locked() -> None:
    cuda = Cuda(limit=15)
    locks = PageLocks(cuda.lock, cuda.unlock)
    assert locks.cover(0, 10)
    assert not locks.cover(5, 20)
    assert cuda.ranges == {}
    assert locks.cover(0, 10)


def test_all_pages_are_unlocked_at_the_end() -> None:
    cuda = Cuda()
    locks = PageLocks(cuda.lock, cuda.unlock)
    assert locks.cover(0, 10)
    assert locks.cover(20, 30)
    Staging((0, 100), locks).close()
    assert cuda.ranges == {}
    assert locks.cover(5, 25), "another mapping lies there now"


def test_values_in_memory_are_their_own_rows() -> None:
    def never(indices: list[int]) -> list[torch.Tensor]:
        pytest.fail("nothing has to be brought")

    values = [torch.rand(3, 2), torch.rand(2, 3).T]
    plain, turned = Staging((0, 0)).bring(values, never)
    assert plain is values[0]
    assert turned.is_contiguous()
    assert torch.equal(turned, values[1])


def test_rows_go_to_tensors_in_memory() -> None:
    targets = [torch.zeros(3), torch.zeros(4, 2)[:, 0]]
    rows = [torch.rand(3), torch.rand(4)]
    bring_back(zip(targets, rows, strict=True))
    assert torch.equal(targets[0], rows[0])
    assert torch.equal(targets[1], rows[1])


def test_memory_of_the_host_is_not_away_and_needs_no_wait() -> None:
    assert not is_away(torch.zeros(1))
    settle_all()


@pytest.mark.cuda
class TestOnAGpu:
    def test_values_come_to_the_rows_that_were_allocated(self) -> None:
        whole = torch.empty(3 << 20)  # large enough for pages of its own
        start = whole.data_ptr()
        staging = Staging((start, whole.nbytes))
        values = [torch.rand(1000, device="cuda"), torch.rand(5), torch.rand(3, 4, device="cuda").T]
        rows = staging.bring(values, lambda found: [whole[:1000], whole[1000:1012].view(4, 3)])
        assert rows[0].data_ptr() == start
        assert whole.is_pinned()
        for row, value in zip(rows, values, strict=True):
            assert torch.equal(row, value.cpu())
        torch.cuda.cudart().cudaHostUnregister(start)  # type: ignore[no-untyped-call]

    def test_a_lock_that_is_refused_is_no_error_of_the_next_kernel(self) -> None:
        whole = torch.empty(3 << 20)
        locks = [PageLocks(), PageLocks()]
        start, stop = whole.data_ptr(), whole.data_ptr() + whole.nbytes
        assert [lock.cover(start, stop) for lock in locks] == [True, False]
        assert torch.ones(8, device="cuda").sum().item() == 8
        for lock in locks:
            lock.release()
        assert not whole.is_pinned()

    def test_elsewhere_they_come_to_other_memory_that_is_locked(self) -> None:
        value = torch.rand(100, device="cuda")
        (row,) = Staging((0, 0)).bring([value], lambda found: [torch.empty(100)])
        assert row.is_pinned()
        assert torch.equal(row, value.cpu())

    def test_rows_come_back_before_what_the_script_does_next(self) -> None:
        target = torch.zeros(1 << 22, device="cuda")
        row = torch.rand(1 << 22, pin_memory=True)
        for _ in range(20):
            target.zero_()
            bring_back([(target, row)])
            doubled = target * 2
        assert torch.equal(doubled.cpu(), row * 2)

    def test_calls_behind_kernels_wait_for_them_and_their_caller_does_not(self) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        calls = CallsBehindKernels([device])
        value = torch.zeros(1 << 20, device=device)
        value += torch.rand(value.shape, device=device)  # torch loads kernels before their first use
        calls.begin(value.cpu).result()
        began = torch.cuda.Event()
        torch.cuda._sleep(1 << 28)  # type: ignore[no-untyped-call]  # some 100 ms of cycles
        value += torch.rand(value.shape, device=device)
        began.record()
        found = calls.begin(value.cpu)
        assert not began.query(), "the kernels were over before the call was given"
        assert torch.equal(found.result(), value.cpu())
