"""The seam to accelerators: their streams, events, page-locked memory and copies are here, and nowhere else.

The seam speaks torch's generic API, so it serves CUDA, XPU and every device that registers itself with torch.
Two things are CUDA's own: the lock of pages that are there already, and the names of the cards for NCCL.

Both ways between devices and the memory that servers read go through page-locked memory, on a stream of their
own, so that they run at the speed of the bus and beside the kernels of the script. Gradients land where the
servers read them: in this process's segment, at the place that :meth:`KVStore.empty_like` would give them. So
nothing is copied but over the bus. Pulled values land in torch's own page-locked memory.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from typing import TypeVar

import torch

from kvps.tensors import row_of

T = TypeVar("T")


def kind() -> str | None:
    """Return the type of this process's accelerator, such as "cuda"; None without one."""
    found = torch.accelerator.current_accelerator()
    return found.type if found else None


def is_accelerator(device: torch.device) -> bool:
    """Whether a device is of the accelerator's type."""
    return device.type != "cpu" and device.type == kind()


def is_away(value: torch.Tensor) -> bool:
    """Whether a tensor lies in the memory of an accelerator."""
    return not value.is_cpu and is_accelerator(value.device)


def pinned(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return an empty row in page-locked memory."""
    with torch.inference_mode(False):  # else only a thread in that mode may write to it
        return torch.empty(shape, dtype=dtype, pin_memory=True, device="cpu")


def select(device: torch.device) -> None:
    """Make a device the current one of this thread."""
    torch.accelerator.set_device_index(device)


@contextmanager
def on(stream: torch.Stream) -> Iterator[None]:
    """Make a stream the current one of this thread; the context of torch's own streams is for one thread."""
    here, there = torch.accelerator.current_stream(), torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)  # and its device the current one
    try:
        yield
    finally:
        torch.accelerator.set_stream(there)
        torch.accelerator.set_stream(here)


@contextmanager
def beside(device: torch.device, use: str) -> Iterator[None]:
    """Queue the work of the block on a stream of its own, and wait at the end until it is done."""
    stream = _stream(device, use)
    with on(stream):
        try:
            yield
        finally:
            stream.synchronize()


def queued(device: torch.device) -> Callable[[], None]:
    """Return a wait, for any thread, for what this thread has queued on a device until now."""
    if not is_accelerator(device):
        return lambda: None
    wait: Callable[[], None] = torch.accelerator.current_stream(device).record_event().synchronize
    return wait


def settle(device: torch.device) -> None:
    """Wait until a device has done what this thread has queued there."""
    if is_accelerator(device):
        torch.accelerator.current_stream(device).synchronize()


def settle_all() -> None:
    """Wait until the current device has done all that was queued there."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def stamp(device: torch.device) -> torch.Event:
    """Return an event that has the time at which the device comes to it."""
    event = torch.Event(device, enable_timing=True)
    event.record(torch.accelerator.current_stream(device))
    return event


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
    """Brings values of accelerators to rows in memory; any thread may call it."""

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
        away = [index for index, value in enumerate(values) if not value.is_cpu and is_away(value)]
        there = set(away)
        rows = [value if index in there else row_of(value) for index, value in enumerate(values)]
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
        return pinned(row.shape, row.dtype)


class CallsBehindKernels:
    """Makes calls in a thread of its own, behind the kernels that are queued when a call is given.

    The hooks of a backward pass run while most of its kernels are only queued. A push in a hook
    would wait for the kernels that make its gradients, and backward could queue no more meanwhile.

    Args:
        devices: the accelerators on which the values of the calls lie.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._devices = tuple(devices)
        self._thread = ThreadPoolExecutor(1, "kvps-behind-kernels")

    def begin(self, call: Callable[[], T]) -> Future[T]:
        """Have ``call`` made in its turn; kernels that it queues wait for those queued now."""
        events = [torch.accelerator.current_stream(device).record_event() for device in self._devices]
        return self._thread.submit(self._make, call, events)

    def _make(self, call: Callable[[], T], events: Sequence[torch.Event]) -> T:
        with ExitStack() as current:
            for device, event in zip(self._devices, events, strict=True):
                stream = _stream(device, "calls")
                stream.wait_event(event)
                current.enter_context(on(stream))
            return call()


def bring_back(copies: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy rows into the user's tensors, given as (target, row), wherever either is.

    What the script does next on a target's current stream waits for the copy; the script does not.
    """
    streams: dict[torch.device, torch.Stream] = {}
    for target, row in copies:
        if not row.is_cpu and is_away(row):
            target.copy_(row)
            row.record_stream(torch.accelerator.current_stream(row.device))
        elif target.is_cpu or not is_away(target):
            target.copy_(row)
        else:
            stream = streams.get(target.device)
            if stream is None:
                streams[target.device] = stream = _stream(target.device, "up")
                stream.wait_stream(torch.accelerator.current_stream(target.device))  # it may still read there
            with on(stream):
                target.copy_(row, non_blocking=True)
            target.record_stream(stream)
    for device, stream in streams.items():
        torch.accelerator.current_stream(device).wait_stream(stream)


def ready_on_device(value: torch.Tensor) -> torch.Tensor:
    """Return a device's value as a row there, when the kernels that make it are done: another thread,
    with a stream of its own, will read it."""
    row = value.contiguous()
    settle(value.device)
    return row


def _copy_down(values: Sequence[torch.Tensor], rows: Sequence[torch.Tensor]) -> None:
    streams = {device: _stream(device, "down") for device in {value.device for value in values}}
    for device, stream in streams.items():
        stream.wait_stream(torch.accelerator.current_stream(device))  # which makes the values
    try:
        for value, row in zip(values, rows, strict=True):
            with on(streams[value.device]):
                row.copy_(value, non_blocking=True)
    finally:  # nobody may use the memory of either end before, also if one of the copies is refused
        for stream in streams.values():
            stream.synchronize()


@cache
def _stream(device: torch.device, use: str) -> torch.Stream:
    """Return the stream of a device for one use: copies down do not wait behind copies up, which
    wait for all that a script has queued."""
    return torch.Stream(device)


# --- CUDA's own -------------------------------------------------------------------------------------


def card_of(device: torch.device) -> str | None:
    """Return the name of a CUDA device's card, which no other card has; None for other devices."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def _lock(address: int, size_bytes: int) -> bool:
    if kind() != "cuda":
        return False
    driver = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    is_locked = int(driver.cudaHostRegister(address, size_bytes, 0)) == 0
    if not is_locked:  # or the next kernel of this thread would raise CUDA's last error
        with suppress(RuntimeError):
            torch.zeros(1, device="cuda")
    return is_locked


def _unlock(address: int) -> None:
    driver = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    driver.cudaHostUnregister(address)
