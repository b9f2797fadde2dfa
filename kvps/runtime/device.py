"""The seam to accelerators: their streams, events, page-locked memory and copies are here, and nowhere else.

The seam speaks torch's generic API, so it serves CUDA, XPU and every device that registers itself with torch.
Two things are CUDA's own: the lock of pages that are there already, and the names of the cards for NCCL.

Both ways between devices and the memory that servers read go through page-locked memory, on a stream of their
own, so that they run at the speed of the bus and beside the kernels of the script. Gradients land where the
servers read them: in this process's segment, at the place that :meth:`KVStore.empty_like` would give them. So
nothing is copied but over the bus. Pulled values land in torch's own page-locked memory.

A copy costs as much as some hundred KiB on the bus. So small tensors whose rows lie side by side in memory
cross it in one copy: a kernel gathers or scatters them on the device, in at most :data:`PIECE_BYTES` there.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import TypeVar

import torch

from kvps.tensors import row_of

T = TypeVar("T")
Pair = tuple[torch.Tensor, torch.Tensor]
"""A tensor of a device, and its row in memory."""

NO_EVENTS: Mapping[torch.device, torch.Event] = MappingProxyType({})
SMALL_BYTES = 512 << 10
"""The most bytes of a tensor that crosses the bus together with others: a copy of 10 us."""
PIECE_BYTES = 8 << 20
"""The most bytes that cross it together, and so of a device's memory that copies take in each direction."""


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


def pinned_rows(targets: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return an empty row in page-locked memory for each tensor; those of small ones lie side by side."""
    rows = list(targets)
    small: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, target in enumerate(targets):
        if target.nbytes <= SMALL_BYTES:
            small.setdefault((target.device, target.dtype), []).append(index)
        else:
            rows[index] = pinned(target.shape, target.dtype)
    for (_, dtype), indices in small.items():
        whole = pinned((sum([targets[index].numel() for index in indices]),), dtype)
        parts = torch.split(whole, [targets[index].numel() for index in indices])
        for index, part in zip(indices, parts, strict=True):
            rows[index] = part.view(targets[index].shape)
    return rows


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
        met.append((start, stop))
        low, high = min(met)[0], max([end for _, end in met])
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
        accelerator = kind()
        away = [index for index, value in enumerate(values) if value.device.type == accelerator]
        rows = [value if value.device.type == accelerator else row_of(value) for value in values]
        if away:
            with self._mutex:  # pages must not be unlocked under a copy
                for index, row in zip(away, self._locked(allocate(away)), strict=True):
                    rows[index] = row
                _copy_down([(values[index], rows[index]) for index in away])
        return tuple(rows)

    def close(self) -> None:
        """Unlock all pages, before they are unmapped: CUDA would refuse to lock a later mapping there."""
        with self._mutex:
            self._locks.release()

    def _locked(self, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return ``rows`` with their pages locked; others in place of those of which it cannot be done."""
        first, size_bytes = self._segment
        blocks: dict[int, bool] = {}
        """The first address of each block of memory, and whether it is locked."""
        found, others = list(rows), []
        for index, row in enumerate(rows):
            block = row.untyped_storage()
            start = block.data_ptr()
            if start not in blocks:
                stop = start + block.nbytes()
                is_there = first <= start and stop <= first + size_bytes
                blocks[start] = is_there and self._locks.cover(start, stop)
            if not blocks[start]:
                others.append(index)
        for index, row in zip(others, pinned_rows([rows[index] for index in others]), strict=True):
            found[index] = row
        return found


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


def reached(tensors: Iterable[torch.Tensor]) -> dict[torch.device, torch.Event]:
    """Return an event behind what this thread has queued until now, for each device of the tensors."""
    accelerator = kind()
    devices = {tensor.device for tensor in tensors if tensor.device.type == accelerator}
    return {device: torch.accelerator.current_stream(device).record_event() for device in devices}


def bring_back(copies: Iterable[Pair], after: Mapping[torch.device, torch.Event] = NO_EVENTS) -> None:
    """Copy rows into the user's tensors, given as (target, row), wherever either is.

    What the script does next on a target's current stream waits for the copy; the script does not.

    Args:
        copies: the targets and rows.
        after: by device, an event behind the last use of the targets (:func:`reached`); without it, copies
            wait for all that this thread has queued there.
    """
    accelerator = kind()
    up: list[Pair] = []
    others: list[Pair] = []
    for target, row in copies:
        is_up = row.is_cpu and not target.is_cpu and target.device.type == accelerator
        (up if is_up else others).append((target, row))
    streams: dict[torch.device, torch.Stream] = {}
    try:
        _cross(up, "up", streams, after)
    finally:
        for target in [target for target, _ in up if target.device in streams]:
            target.record_stream(streams[target.device])
        for device, stream in streams.items():
            torch.accelerator.current_stream(device).wait_stream(stream)
    for target, row in others:
        target.copy_(row)
        if row.device.type == accelerator:
            row.record_stream(torch.accelerator.current_stream(row.device))


def ready_on_device(value: torch.Tensor) -> torch.Tensor:
    """Return a device's value as a row there, when the kernels that make it are done: another thread,
    with a stream of its own, will read it."""
    row = value.contiguous()
    settle(value.device)
    return row


def _copy_down(pairs: Iterable[Pair]) -> None:
    """Copy tensors of devices into their rows; return when all are there."""
    streams: dict[torch.device, torch.Stream] = {}
    try:
        _cross(pairs, "down", streams)  # behind the kernels that make them
    finally:  # nobody may use the memory of either end before, also if one of the copies is refused
        for stream in streams.values():
            stream.synchronize()


@torch.no_grad()
def _cross(
    pairs: Iterable[Pair],
    use: str,
    streams: dict[torch.device, torch.Stream],
    after: Mapping[torch.device, torch.Event] = NO_EVENTS,
) -> None:
    """Copy rows "up" to tensors of devices, or tensors "down" to their rows; note the stream of each device.

    Large tensors go first, in one call of torch: the bus is busy with them while others are sorted.
    """
    is_up = use == "up"
    large: list[Pair] = []
    small: dict[torch.device, list[Pair]] = {}

    def each(pairs: Sequence[Pair]) -> None:
        if pairs:
            tensors, rows = [tensor for tensor, _ in pairs], [row for _, row in pairs]
            into, out_of = (tensors, rows) if is_up else (rows, tensors)
            torch._foreach_copy_(into, out_of, non_blocking=True)

    with ExitStack() as current:
        for pair in pairs:
            tensor, row = pair
            device = tensor.device
            if device not in streams:
                streams[device], small[device] = _stream(device, use), []
                if device in after:
                    streams[device].wait_event(after[device])
                else:
                    streams[device].wait_stream(torch.accelerator.current_stream(device))
                current.enter_context(on(streams[device]))
            (small[device] if row.nbytes <= SMALL_BYTES else large).append(pair)
        each(large)
        rest: list[Pair] = []
        for piece in [piece for pairs_ in small.values() for piece in _pieces(pairs_)]:
            if len(piece.rows) > 1:
                with suppress(torch.OutOfMemoryError):  # then each by itself
                    (piece.scatter if is_up else piece.gather)()
                    continue
            rest += zip(piece.tensors, piece.rows, strict=True)
        each(rest)


@dataclass(slots=True)
class _Piece:
    """Small tensors of a device that cross the bus in one copy."""

    tensors: list[torch.Tensor]
    rows: list[torch.Tensor]
    """Theirs: neighbours in one block of memory."""
    stop: int
    """The address behind the rows."""
    limit: int
    """The last address that they may come to."""

    @property
    def whole(self) -> torch.Tensor:
        """The rows as one."""
        first = self.rows[0]
        return first.as_strided(((self.stop - first.data_ptr()) // first.element_size(),), (1,))

    def gather(self) -> None:
        """Copy the tensors to their rows at once."""
        self.whole.copy_(torch.cat([tensor.reshape(-1) for tensor in self.tensors]), non_blocking=True)

    def scatter(self) -> None:
        """Copy the rows to the device at once, and from there into their tensors."""
        there = self.whole.to(self.tensors[0].device, non_blocking=True)
        parts = torch.split(there, [row.numel() for row in self.rows])
        shaped = [part.view(tensor.shape) for part, tensor in zip(parts, self.tensors, strict=True)]
        torch._foreach_copy_(self.tensors, shaped)


def _pieces(pairs: Sequence[Pair]) -> list[_Piece]:
    """Return the copies of small tensors of one device."""
    found: list[_Piece] = []
    piece: _Piece | None = None
    begins = [row.data_ptr() for _, row in pairs]
    for index in sorted(range(len(pairs)), key=begins.__getitem__):
        tensor, row = pairs[index]
        begin = begins[index]
        stop = begin + row.nbytes
        if begin == stop:
            continue
        if piece and begin == piece.stop and stop <= piece.limit and piece.rows[0].dtype is row.dtype:
            piece.tensors.append(tensor)
            piece.rows.append(row)
            piece.stop = stop
        else:
            block = row.untyped_storage()
            limit = min(begin + PIECE_BYTES, block.data_ptr() + block.nbytes())
            piece = _Piece([tensor], [row], stop, limit)
            found.append(piece)
    return found


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
