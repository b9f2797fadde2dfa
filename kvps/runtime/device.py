"""Pinned staging buffers between GPUs and the memory that servers read.

Both ways go through page-locked memory, on a stream of their own, so that they run at the speed of
the bus and beside the kernels of the script. Gradients land where the servers read them: in this
process's segment, at the place that :meth:`KVStore.empty_like` would give them. So nothing is copied
but over the bus. Pulled values land in torch's own page-locked memory.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import cache
from typing import TypeVar

import torch

from kvps.tensors import row_of

T = TypeVar("T")


class PageLocks:
    """The page-locked ranges of this process's memory.

    CUDA refuses a copy whose end in memory lies in several locked ranges, or in one half. So
    :meth:`cover` makes one range of all that a block of memory meets.
    """

    def __init__(
        self, lock: Callable[[int, int], bool] | None = None, unlock: Callable[[int], None] | None = None
    ) -> None:
        """Lock by ``lock(address, size_bytes)`` and ``unlock(address)``; by CUDA if not given."""
        self._lock = lock or _lock
        self._unlock = unlock or _unlock
        self._ranges: list[tuple[int, int]] = []
        """(start, stop), in order; none overlaps another."""

    def cover(self, start: int, stop: int) -> bool:
        """Lock the addresses from ``start`` to ``stop``; return whether they are locked."""
        last = bisect_left(self._ranges, (stop, 0))
        first = last
        while first and self._ranges[first - 1][1] > start:
            first -= 1
        met = self._ranges[first:last]
        if len(met) == 1 and met[0][0] <= start and stop <= met[0][1]:
            return True
        del self._ranges[first:last]
        for begin, _ in met:
            self._unlock(begin)
        low, high = (
            min([start, *(range_[0] for range_ in met)]),
            max([stop, *(range_[1] for range_ in met)]),
        )
        if not self._lock(low, high - low):
            return False
        insort(self._ranges, (low, high))
        return True

    def release(self) -> None:
        """Unlock all pages."""
        for begin, _ in self._ranges:
            self._unlock(begin)
        self._ranges.clear()


class Staging:
    """Brings values of GPUs to rows in memory; any thread may call it."""

    def __init__(self, segment: tuple[int, int], locks: PageLocks | None = None) -> None:
        """Lock pages of ``segment`` (address and size in bytes), and of nothing else."""
        self._segment = segment
        self._locks = locks or PageLocks()
        self._mutex = threading.Lock()

    def bring(
        self, values: Sequence[torch.Tensor], allocate: Callable[[list[int]], Sequence[torch.Tensor]]
    ) -> tuple[torch.Tensor, ...]:
        """Return one row for each of ``values``, all of them ready to be read.

        Args:
            values: on any devices.
            allocate: returns new rows for those of ``values`` with these indices.
        """
        rows = [value if value.is_cuda else row_of(value) for value in values]
        away = [index for index, value in enumerate(values) if value.is_cuda]
        if away:
            with self._mutex:  # pages must not be unlocked under a copy
                places = [self._locked(memory_of) for memory_of in allocate(away)]
                for index, row in zip(away, places, strict=True):
                    rows[index] = row
                _copy_down([values[index] for index in away], places)
        return tuple(rows)

    def close(self) -> None:
        """Unlock all pages, before they are unmapped: CUDA would refuse to lock a later mapping there."""
        with self._mutex:
            self._locks.release()

    def _locked(self, row: torch.Tensor) -> torch.Tensor:
        """Return ``row`` with its pages locked; another one if it cannot be done."""
        storage = row.untyped_storage()
        start = storage.data_ptr()
        stop = start + storage.nbytes()
        first, size_bytes = self._segment
        if first <= start and stop <= first + size_bytes and self._locks.cover(start, stop):
            return row
        return torch.empty(row.shape, dtype=row.dtype, pin_memory=True, device="cpu")


class CallsBehindKernels:
    """Makes calls in a thread of its own, behind the kernels that are queued when a call is given.

    The hooks of a backward pass run while most of its kernels are only queued. A push in a hook
    would wait for the kernels that make its gradients, and backward could queue no more meanwhile.

    Args:
        devices: the GPUs on which the values of the calls lie.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._devices = tuple(devices)
        self._thread = ThreadPoolExecutor(1, "kvps-behind-kernels")

    def begin(self, call: Callable[[], T]) -> Future[T]:
        """Have ``call`` made in its turn; kernels that it queues wait for those queued now."""
        events = [torch.cuda.current_stream(device).record_event() for device in self._devices]
        return self._thread.submit(self._make, call, events)

    def _make(self, call: Callable[[], T], events: Sequence[torch.cuda.Event]) -> T:
        with ExitStack() as current:
            for device, event in zip(self._devices, events, strict=True):
                stream = _stream(device, "calls")
                stream.wait_event(event)
                current.enter_context(torch.cuda.stream(stream))
            return call()


def bring_back(copies: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy rows into the user's tensors, given as (target, row), wherever these are.

    What the script does next on a target's current stream waits for the copy; the script does not.
    """
    streams: dict[torch.device, torch.cuda.Stream] = {}
    for target, row in copies:
        if not target.is_cuda:
            target.copy_(row)
            continue
        stream = streams.get(target.device)
        if stream is None:
            streams[target.device] = stream = _stream(target.device, "up")
            stream.wait_stream(torch.cuda.current_stream(target.device))  # it may still read there
        with torch.cuda.stream(stream):
            target.copy_(row, non_blocking=True)
        target.record_stream(stream)
    for device, stream in streams.items():
        torch.cuda.current_stream(device).wait_stream(stream)


def ready_on_device(value: torch.Tensor) -> torch.Tensor:
    """Return a GPU's value as a row there, when the kernels that make it are done: another thread,
    with a stream of its own, will read it."""
    row = value.contiguous()
    torch.cuda.current_stream(value.device).synchronize()
    return row


def _copy_down(values: Sequence[torch.Tensor], rows: Sequence[torch.Tensor]) -> None:
    streams = {device: _stream(device, "down") for device in {value.device for value in values}}
    for device, stream in streams.items():
        stream.wait_stream(torch.cuda.current_stream(device))  # which makes the values
    for value, row in zip(values, rows, strict=True):
        with torch.cuda.stream(streams[value.device]):
            row.copy_(value, non_blocking=True)
        value.record_stream(streams[value.device])
    for stream in streams.values():
        stream.synchronize()


@cache
def _stream(device: torch.device, use: str) -> torch.cuda.Stream:
    """Return the stream of a device for one use: copies down do not wait behind copies up, which
    wait for all that a script has queued."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch has no types there


def _lock(address: int, size_bytes: int) -> bool:
    driver = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    is_locked = int(driver.cudaHostRegister(address, size_bytes, 0)) == 0
    if not is_locked:  # or the next kernel of this thread would raise CUDA's last error
        with suppress(RuntimeError):
            torch.zeros(1, device="cuda")
    return is_locked


def _unlock(address: int) -> None:
    driver = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    driver.cudaHostUnregister(address)
