"""Two simulated accelerators that punish: what is not waited for has not happened.

Theory of operation
-------------------
A tensor of a device is a :class:`DeviceTensor`: torch knows its shape and its device, and its elements are in
memory that only the simulation reads. Each operation on it is queued on the stream that is current in its thread,
and does nothing before the stream *runs*: until then its result is NaN. So do copies from and to page-locked memory.

A stream runs when somebody waits for it: a thread for the stream or one of its events, or another stream that runs
and comes to such a wait. That is the latest moment that a device may choose. Streams for which ``is_early``
holds run at the earliest instead: at once, up to an event that has not happened. Under either, a program that waits for
what it uses computes the same; a program that forgets a wait reads NaN, or what should have been read before.

Memory that is let go is used again by what is queued on its own stream, unless ``record_stream`` has named
others: a stream that touches it later is a fault. The processor touches no memory of a device, and an operation
takes tensors of one device only.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.backend_registration import _DummyDeviceGuard

from kvps.runtime import device as seam
from kvps.store import arguments, key_list

KIND = torch._C._get_privateuse1_backend_name()
"""The type that torch keeps for devices which it does not know."""
aten = torch.ops.aten
if KIND == "privateuseone":
    torch._C._acc.register_python_privateuseone_device_guard(_DummyDeviceGuard())  # type: ignore[attr-defined]
WAIT = {aten.nonzero, aten.masked_select, aten.index, aten._unique2, aten.repeat_interleave, aten.bincount}
"""Operations whose result has a shape that depends on the elements."""
EMPTY, TO = torch.empty, torch.Tensor.to


def ruin(memory: torch.Tensor) -> None:
    """Make each element one that no test expects."""
    if memory.is_floating_point():
        memory.fill_(float("nan"))
    else:
        memory.fill_(1 if memory.dtype is torch.bool else torch.iinfo(memory.dtype).max // 3)


class Event:
    """A place in the queue of a stream; before it is recorded it has happened."""

    def __init__(self, device: object = None, enable_timing: bool = False) -> None:
        self.stream: Stream | None = None
        self.place = 0
        self.at: int | None = None

    def record(self, stream: Stream) -> None:
        self.stream, self.at = stream, None
        stream.queue_up(self._note)
        self.place = stream.queued

    def _note(self) -> None:
        assert self.stream is not None
        self.at = self.stream.world.clock

    def query(self) -> bool:
        return self.stream is None or self.stream.done >= self.place

    def synchronize(self) -> None:
        if self.stream is not None:
            self.stream.run(self.place)

    def elapsed_time(self, other: Event) -> float:
        """Return the operations between two events, as milliseconds."""
        if self.at is None or other.at is None:
            raise RuntimeError("both events must have been recorded, and have happened")
        return float(other.at - self.at)


class Stream:
    """A queue of operations of one device."""

    def __init__(self, world: World, index: int, name: str) -> None:
        self.world, self.name = world, name
        self.device = torch.device(KIND, index)
        self.queued = self.done = 0
        self._rest: deque[Callable[[], None] | Event] = deque()

    def queue_up(self, work: Callable[[], None] | Event) -> None:
        with self.world.lock:
            self.world.check(self.device)
            self._rest.append(work)
            self.queued += 1
            self.world.advance()

    def run(self, place: int) -> None:
        """Run all before ``place``, and whatever that waits for."""
        with self.world.lock:
            while self.done < place:
                self._step()
            self.world.advance()

    def run_early(self) -> bool:
        """Run up to an event that has not happened; return whether that was anything."""
        before = self.done
        while self._rest and not (isinstance(self._rest[0], Event) and not self._rest[0].query()):
            self._step()
        return self.done > before

    def _step(self) -> None:
        work = self._rest[0]
        if isinstance(work, Event) and not work.query():
            work.synchronize()
            if not self._rest or self._rest[0] is not work:
                return  # this stream has gone on meanwhile
        self._rest.popleft()
        if not isinstance(work, Event):
            work()
            self.world.clock += 1
        self.done += 1

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        place = Event()  # the event may be recorded again
        place.stream, place.place = event.stream, event.place
        self.queue_up(place)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        self.world.check(self.device)
        self.run(self.queued)


class Block:
    """Memory of a device: the stream on which it was made, and others that use it."""

    def __init__(self, world: World, memory: torch.Tensor, index: int) -> None:
        self.state = {"is free": False}
        self.others: set[Stream] = set()
        weakref.finalize(self, world.let_go, memory.detach(), world.current(index), self.others, self.state)


class DeviceTensor(torch.Tensor):
    """A tensor of a simulated device."""

    @staticmethod
    def __new__(
        cls, world: World, elements: torch.Tensor, index: int, block: Block | None = None
    ) -> DeviceTensor:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined, no-any-return]
            cls,
            elements.shape,
            strides=elements.stride(),
            dtype=elements.dtype,
            device=torch.device(KIND, index),
        )

    def __init__(self, world: World, elements: torch.Tensor, index: int, block: Block | None = None) -> None:
        self.world, self.elements = world, elements
        self.block = block or Block(world, elements, index)

    def record_stream(self, stream: Any) -> None:
        self.block.others.add(stream)

    def data_ptr(self) -> int:
        return (1 << 62) + id(self.block)  # where the processor has no memory

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"DeviceTensor({tuple(self.shape)}, {self.device})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [arg for arg in tree_flatten((args, kwargs))[0] if isinstance(arg, DeviceTensor)]
        return given[0].world.call(func, args, dict(kwargs or {}), given)


class World:
    """Two devices, their streams, and the page-locked memory of this process."""

    def __init__(self, is_early: Callable[[Stream], bool] = lambda stream: False) -> None:
        self.lock = threading.RLock()
        self.is_early = is_early
        self.clock = 0
        self.faults: list[str] = []
        self.gone: set[int] = set()
        """The devices that have fallen off the bus."""
        self.room: int | None = None
        """The largest tensor that can still be allocated, in bytes; None for any."""
        self.copies: Counter[str] = Counter()
        """Copies between a device and the host: "down", "up", and of these "pageable", "in the script's stream"."""
        self.octets: Counter[str] = Counter()
        """The bytes that went "down" and "up"."""
        self.scripts = [Stream(self, index, "script") for index in range(2)]
        self.streams = list(self.scripts)
        self._locked: dict[int, int] = {}
        self._graves: list[tuple[list[Event], Stream, torch.Tensor, dict[str, bool]]] = []
        self._of_thread = threading.local()
        self._is_advancing = False

    # --- the devices, as torch.accelerator shows them ---------------------------------------------

    def here(self) -> int:
        return int(getattr(self._of_thread, "index", 0))

    def select(self, device: Any) -> None:
        self._of_thread.index = device if isinstance(device, int) else torch.device(device).index

    def current(self, device: Any = None) -> Stream:
        index = (
            self.here()
            if device is None
            else device
            if isinstance(device, int)
            else torch.device(device).index
        )
        index = self.here() if index is None else index
        found: Stream = getattr(self._of_thread, f"stream{index}", self.scripts[index])
        return found

    def set_stream(self, stream: Stream) -> None:
        self.select(stream.device)
        setattr(self._of_thread, f"stream{stream.device.index}", stream)

    def stream(self, device: Any) -> Stream:
        self.streams.append(Stream(self, torch.device(device).index, f"stream {len(self.streams)}"))
        return self.streams[-1]

    def synchronize(self, device: Any = None) -> None:
        index = self.current(device).device.index
        for stream in [stream for stream in self.streams if stream.device.index == index]:
            stream.synchronize()

    def check(self, device: torch.device) -> None:
        if device.index in self.gone:
            raise torch.AcceleratorError(f"{device} has fallen off the bus")

    def advance(self) -> None:
        """Let early streams run, and memory be used again."""
        if self._is_advancing:
            return
        self._is_advancing = True
        early = [stream for stream in self.streams if self.is_early(stream)]
        while sum(stream.run_early() for stream in early):
            pass
        self._is_advancing = False
        ready = [grave for grave in self._graves if all(event.query() for event in grave[0])]
        self._graves = [grave for grave in self._graves if grave not in ready]
        for _, stream, memory, state in ready:
            stream.queue_up(lambda memory=memory, state=state: self._use_again(memory, state))  # type: ignore[misc]

    def let_go(
        self, memory: torch.Tensor, owner: Stream, others: set[Stream], state: dict[str, bool]
    ) -> None:
        with self.lock:
            if owner.device.index not in self.gone:
                self._graves.append(([stream.record_event() for stream in others], owner, memory, state))
                self.advance()

    def _use_again(self, memory: torch.Tensor, state: dict[str, bool]) -> None:
        state["is free"] = True
        ruin(memory)

    # --- memory -----------------------------------------------------------------------------------

    def empty(self, *shape: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        """Stand for ``torch.empty``."""
        device = torch.device(options.get("device") or "cpu")
        if device.type == KIND:
            return self.make(EMPTY(*shape, **{**options, "device": "cpu"}), device.index or 0)
        if not pin_memory:
            return EMPTY(*shape, **options)
        like = EMPTY(*shape, **options)
        octets = np.empty(max(like.nbytes, 1), np.uint8)
        start = octets.ctypes.data
        self._locked[start] = start + octets.nbytes
        weakref.finalize(octets, self._locked.pop, start)
        row = torch.from_numpy(octets)[: like.nbytes].view(like.dtype).view(like.shape)
        ruin(row)
        return row

    def to(self, tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        """Stand for ``torch.Tensor.to``, which torch itself cannot do from the host."""
        device = args[0] if args and isinstance(args[0], str | torch.device) else options.get("device")
        if isinstance(tensor, DeviceTensor) or device is None or torch.device(device).type != KIND:
            return TO(tensor, *args, **options)
        return self._copy(self.make(tensor, torch.device(device).index or 0), tensor, False)

    def is_pinned(self, row: torch.Tensor) -> bool:
        start = row.data_ptr()
        return any(begin <= start and start + row.nbytes <= end for begin, end in list(self._locked.items()))

    def register(self, address: int, size_bytes: int) -> bool:
        self._locked[address] = address + size_bytes
        return True

    def unregister(self, address: int) -> None:
        del self._locked[address]

    def make(self, like: torch.Tensor, index: int) -> DeviceTensor:
        """Return an empty tensor of a device: full of NaN."""
        self.check(torch.device(KIND, index))
        if self.room is not None and like.nbytes > self.room:
            raise torch.OutOfMemoryError(
                f"{KIND}:{index} out of memory: tried to allocate {like.nbytes} bytes"
            )
        memory = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="cpu")
        ruin(memory)
        return DeviceTensor(self, memory, index)

    def put(self, values: torch.Tensor, index: int = 0) -> DeviceTensor:
        """Return values that a kernel, which is only queued, makes on a device."""
        made, given = self.make(values, index), values.clone()
        elements = made.elements  # and not ``made``, which would stay alive
        self._queue(index, lambda: elements.copy_(given), [made])
        return made

    def _queue(self, device: Any, work: Callable[[], object], touched: list[DeviceTensor]) -> None:
        stream = self.current(device)
        states = [tensor.block.state for tensor in touched]

        def run() -> None:
            if any(state["is free"] for state in states):
                self.faults.append(f"{stream.name} of {stream.device} touched memory that others use again")
            work()

        stream.queue_up(run)

    # --- operations -------------------------------------------------------------------------------

    def call(self, func: Any, args: Any, kwargs: dict[str, Any], given: list[DeviceTensor]) -> Any:
        """Queue one of torch's operations on the current stream of its device."""
        if func is aten.is_pinned.default:
            return False
        if func is aten.copy_.default:
            return self._copy(
                args[0], args[1], bool(args[2] if len(args) > 2 else kwargs.get("non_blocking"))
            )
        if func is aten._foreach_copy_.default:
            for target, source in zip(args[0], args[1], strict=True):
                self._copy(target, source, bool(args[2] if len(args) > 2 else kwargs.get("non_blocking")))
            return None
        if func is aten._to_copy.default:
            return self._to_copy(args[0], **kwargs)
        index = given[0].device.index
        flat = tree_flatten((args, kwargs))[0]
        strangers = [
            arg for arg in flat if isinstance(arg, torch.Tensor) and not isinstance(arg, DeviceTensor)
        ]
        if any(tensor.dim() for tensor in strangers) or len({tensor.device for tensor in given}) > 1:
            raise RuntimeError("Expected all tensors to be on the same device")
        device = kwargs.pop("device", None)
        kwargs.pop("pin_memory", None)

        def of(arg: Any) -> Any:
            return arg.elements if isinstance(arg, DeviceTensor) else arg

        real, options = tree_map(of, args), tree_map(of, kwargs)
        if device is not None and device.type != KIND:
            return func(*real, **options, device=device)
        index = index if device is None else device.index
        if func.is_view:
            block = given[0].block
            return tree_map(lambda out: DeviceTensor(self, out, index, block), func(*real, **options))
        written = [arg for arg in func._schema.arguments if arg.alias_info and arg.alias_info.is_write]
        if written:
            self._queue(index, lambda: func(*real, **options), given)
            names = [argument.name for argument in func._schema.arguments]
            first = (
                kwargs.get(written[0].name)
                if written[0].name in kwargs
                else args[names.index(written[0].name)]
            )
            return first if func._schema.returns else None
        try:
            like = func(*real, **options)  # of NaN, as yet, but of the right shape
        except (RuntimeError, IndexError):
            like = None
        is_known = isinstance(tree_flatten(like)[0][0], torch.Tensor) and func.overloadpacket not in WAIT
        if not is_known:  # torch waits for the elements, on which it depends
            self.current(index).synchronize()
            found = func(*real, **options)
            return tree_map(
                lambda out: DeviceTensor(self, out, index) if isinstance(out, torch.Tensor) else out, found
            )
        made = tree_map(lambda out: self.make(out, index), like)
        outs = [tensor.elements for tensor in tree_flatten(made)[0]]
        is_empty = func.overloadpacket in (aten.empty_like, aten.new_empty, aten.empty_strided)

        def work() -> None:
            for out, found in zip(outs, tree_flatten(func(*real, **options))[0], strict=True):
                out.copy_(found)

        if not is_empty:
            self._queue(index, work, given + tree_flatten(made)[0])
        return made

    def _to_copy(self, source: DeviceTensor, *, non_blocking: bool = False, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device") or source.device
        like = torch.empty_like(source.elements, dtype=kwargs.get("dtype") or source.dtype)
        if device.type != KIND:
            return self._copy(like, source, non_blocking)
        return self._copy(self.make(like, device.index or 0), source, non_blocking)

    def _copy(self, target: torch.Tensor, source: torch.Tensor, is_async: bool) -> torch.Tensor:
        ends = [end for end in (target, source) if isinstance(end, DeviceTensor)]
        into, out_of = ends[0].elements if target is ends[0] else target, getattr(source, "elements", source)
        out_of = out_of.expand(into.shape)  # or it is refused now
        # CUDA copies on the current stream of the source's device; of the other's if the source is the host's.
        index = ends[-1].device.index
        if len(ends) == 2:
            stream, other = self.current(index), self.current(target.device)
            if other is not stream:
                stream.wait_stream(other)
            self._queue(index, lambda: into.copy_(out_of), ends)
            if other is not stream:
                other.wait_stream(stream)
            return target
        host, is_up = (source, True) if ends[0] is target else (target, False)
        is_locked = self.is_pinned(host)
        self.copies["up" if is_up else "down"] += 1
        self.octets["up" if is_up else "down"] += into.nbytes
        self.copies["pageable"] += not is_locked
        self.copies["in the script's stream"] += self.current(index) in self.scripts
        if is_up and not is_locked:
            out_of = out_of.clone()  # the driver stages it before it returns
        elif not is_up:
            ruin(into)
        self._queue(index, lambda: into.copy_(out_of), ends)
        if not (is_async and is_locked):
            self.current(index).synchronize()
        return target


SCHEDULES: dict[str, Callable[[Stream], bool]] = {
    "all late": lambda stream: False,
    "script late": lambda stream: stream.name != "script",
    "script early": lambda stream: stream.name == "script",
}
"""When the devices run a stream; the order of an earlier and a later access shows in one of these."""


@contextmanager
def simulated(schedule: str) -> Iterator[World]:
    """Have torch.accelerator be two simulated devices."""
    world = World(SCHEDULES[schedule])
    with pytest.MonkeyPatch.context() as patch:
        for name, stand_in in {
            "current_accelerator": lambda check_available=False: torch.device(KIND),
            "is_available": lambda: True,
            "device_count": lambda: 2,
            "current_device_index": world.here,
            "set_device_index": world.select,
            "current_stream": world.current,
            "set_stream": world.set_stream,
            "synchronize": world.synchronize,
        }.items():
            patch.setattr(torch.accelerator, name, stand_in)
        patch.setitem(sys.modules, f"torch.{KIND}", SimpleNamespace(_lazy_init=lambda: None))
        for module in (key_list, arguments):  # as torch.Tensor is
            patch.setattr(module, "PLAIN", key_list.PLAIN | {DeviceTensor})
        patch.setattr(torch, "Stream", world.stream)
        patch.setattr(torch, "Event", Event)
        patch.setattr(torch, "empty", world.empty)
        patch.setattr(torch.Tensor, "to", lambda tensor, *args, **options: world.to(tensor, *args, **options))
        seam._stream.cache_clear()
        try:
            yield world
        finally:
            seam._stream.cache_clear()
    assert world.faults == []
