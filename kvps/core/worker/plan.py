"""Transfer plans: the elements of each chunk that a list of keys stands for.

A plan is made once for a list of keys and used for every push and pull of that list. It turns keys
into *shares*, one for each chunk that holds some of them, and each share into runs of neighbouring
elements. From there on, no code on the path of a gradient knows of keys.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, repeat
from operator import attrgetter, itemgetter
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.autograd.graph import increment_version

from kvps.compression.policy import OFF, CompressionPolicy, KeyCompression
from kvps.dtypes import BY_NAME, Spec
from kvps.protocol.envelope import maker
from kvps.protocol.values import Ask, Run, StepPart
from kvps.tensors import SMALL_BYTES, Memory, to_frame

HERE = ""
"""The route of values that do not leave this process."""
PIECES_MAX = 255
"""Most places in which the elements of one share may be lent."""
MANY = 32
"""Fewest segments that are copied back by numpy at once, which takes 20 us for the first."""
FINE_BYTES, UNIT_BYTES = 16 << 10, 16
"""Most bytes of such segments, in the mean; and fewest of which all are multiples."""


_run = maker(Run)
Rows = list[torch.Tensor] | tuple[torch.Tensor, ...]
"""A contiguous tensor for each key of a plan."""
Numbers = Sequence[int]
"""One number for each key of a plan, or a single one for all of them."""
ANY: Numbers = (0,)
"""The version, or the number of pushes, of a read without a condition."""
Priority = int | Sequence[int]
"""The priority of all keys of a call, or one for each."""
Sizes = npt.NDArray[np.int64]
"""Bytes of each key of a plan."""


class Placed(tuple[torch.Tensor, ...]):
    """Rows whose addresses are known while their caller waits; none shows its memory negated."""

    starts: Sizes | None = None
    """The address of each; None once the caller waits no more, and may give them other memory."""


class PieceLocation(NamedTuple):
    """The place of a piece of a key: its chunk, its first element there, its size, and its offset
    in the key."""

    server: int
    chunk: int
    start: int
    size: int
    offset: int


@dataclass(slots=True, eq=False)
class Progress:
    """How far the pushes and reads of a key have come, or those of several keys that have moved together."""

    number: int = 0
    """The number of this rank's next push."""
    since: int = 0
    """The number after this rank's last push: below ``number`` if rounds closed without this rank
    meanwhile."""
    applied: int = 0
    """Number of pushes that are known to be applied on all parts: the version, if push numbers are
    round numbers; else those of this rank."""
    is_refused: bool = False
    """A push was refused, or this rank was away: the number that is owed next has to be asked."""
    version: int = 0
    """The highest version that this rank knows, if push numbers are no round numbers."""
    heard: int = 0
    """This rank was told of all dropped rounds (or dropped pushes of its own) below this number."""
    others: int | None = None
    """Number of pushes of other ranks in the values that were read last, if push numbers are no
    round numbers."""
    age: int = 0
    """By how many of them the values had moved since the read before: the age of a push between the two."""
    keys: int = 1
    """The number of keys that have it in common."""

    def read(self, others: int) -> None:
        """Note that values with so many pushes of ``others`` were read."""
        if self.others is None:
            self.others = others
        elif others >= self.others:  # else an older answer, that came late
            self.others, self.age = others, others - self.others

    def part(self, keys: int) -> Progress:
        """Split off so many of its keys; return theirs."""
        self.keys -= keys
        return replace(self, keys=keys)


_counts = attrgetter("number", "since", "applied", "is_refused", "version", "heard", "others", "age")
_progress = attrgetter("progress")


def _own(name: str) -> property:
    """Return a property that reads an attribute of :class:`Progress`, and writes that of one key alone."""

    def write(key: Key, value: object) -> None:
        setattr(key.alone(), name, value)

    return property(attrgetter(f"progress.{name}"), write)


class Key:
    """One key, as a worker knows it."""

    __slots__ = ("broadcasts", "name", "pieces", "progress", "spec")

    def __init__(
        self, name: str, spec: Spec, pieces: tuple[PieceLocation, ...] = (), *, is_refused: bool = False
    ) -> None:
        self.name = name
        self.spec = spec
        self.pieces = pieces
        self.broadcasts = 0
        """Number of broadcasts of this key by this rank."""
        self.progress = Progress(is_refused=is_refused)

    number, since, applied, is_refused = _own("number"), _own("since"), _own("applied"), _own("is_refused")
    version, heard, others, age = _own("version"), _own("heard"), _own("others"), _own("age")

    def alone(self) -> Progress:
        """Return the progress of this key, which it has in common with no other from now on."""
        if self.progress.keys > 1:
            self.progress = self.progress.part(1)
        return self.progress

    def read(self, others: int) -> None:
        """Note that values with so many pushes of ``others`` were read."""
        self.alone().read(others)


class CopyVersion(NamedTuple):
    """The content of a copy of a key: all of these pieces, at one version.

    The identity of the tuple counts. A key that was replaced, and any key after a rollback, has
    another tuple, and its versions have nothing to do with this one.
    """

    pieces: tuple[PieceLocation, ...]
    version: int


class KeySlice(NamedTuple):
    """Neighbouring elements of a chunk that belong to one key of the plan."""

    start: int
    size: int
    key: int
    """Index of the key in the plan."""
    offset: int
    """Offset of the elements in the key."""


@dataclass(slots=True)
class ChunkSlice:
    """The part of a plan that lies in one chunk."""

    server: int
    chunk: int
    dtype: str
    setting: KeyCompression | None = None
    """How its values are encoded; None if they travel as they are."""
    segments: list[KeySlice] = field(default_factory=list)
    """In the order of the chunk."""
    blocks: list[tuple[int, int]] = field(default_factory=list)
    """(start, size) of the elements that the segments cover, neighbours joined."""
    size: int = 0
    payload_bytes: int = 0
    """Bytes of all elements of this share."""
    _pick: Callable[[Rows], Rows] | None = None
    """Returns the rows of the keys that lie here, if each is here as a whole."""
    _cuts: list[tuple[int, slice | None]] = field(default_factory=list)
    """(index of the key, slice of its elements) for each segment; None for all elements."""
    _sizes: list[int] = field(default_factory=list)
    _begins: list[int] = field(default_factory=list)
    """Bytes of the share before each segment."""
    is_by_deltas: bool = False
    """Servers answer with encoded changes."""
    _is_flat: bool = True
    """Every segment is one-dimensional, so that no tensor has to be viewed in another shape."""
    octets: type[ctypes.Array[ctypes.c_ubyte]] | None = None
    """The type of its bytes, if it is one segment that is copied without torch."""
    units: tuple[int, Sizes, Sizes] | None = None
    """Bytes of the units of which all segments consist, if they are many and small; for each unit, the index
    of its segment, and its offset there."""
    _at: tuple[Sizes, Sizes] | None = None
    """For each such unit, the index of its key, and its offset in the key."""

    def seal(self, keys: Sequence[Key]) -> None:
        """Prepare for use, once all segments are there."""
        self.segments.sort()
        self.is_by_deltas = self.setting is not None and self.setting.back is not None
        for start, size, index, offset in self.segments:
            if self.blocks and sum(self.blocks[-1]) == start:
                self.blocks[-1] = (self.blocks[-1][0], self.blocks[-1][1] + size)
            else:
                self.blocks.append((start, size))
            whole = size == keys[index].spec.count
            self._cuts.append((index, None if whole else slice(offset, offset + size)))
            self._begins.append(self.size * BY_NAME[self.dtype].itemsize)
            self._sizes.append(size)
            self._is_flat = self._is_flat and not (whole and len(keys[index].spec.shape) != 1)
            self.size += size
        self.payload_bytes = self.size * BY_NAME[self.dtype].itemsize
        if len(self.segments) == 1 and 0 < self.payload_bytes <= SMALL_BYTES:
            self.octets = ctypes.c_ubyte * self.payload_bytes
        if all(cut is None for _, cut in self._cuts):
            order = [index for index, _ in self._cuts]
            stop = order[0] + len(order)
            is_range = order == list(range(order[0], stop))
            self._pick = itemgetter(slice(order[0], stop)) if is_range else itemgetter(*order)
        if len(self.segments) >= MANY and self.payload_bytes <= FINE_BYTES * len(self.segments):
            sizes = np.array(self._sizes, np.int64) * BY_NAME[self.dtype].itemsize
            unit = int(np.gcd.reduce(sizes))
            counts = sizes // unit
            if unit >= min(UNIT_BYTES, sizes.max()):
                whose = np.repeat(np.arange(len(counts)), counts)
                inside = (np.arange(len(whose)) - (counts.cumsum() - counts)[whose]) * unit
                self.units = unit, whose, inside
                indices, begins = np.array([(index, offset) for _, _, index, offset in self.segments]).T
                self._at = indices[whose], begins[whose] * BY_NAME[self.dtype].itemsize + inside

    def runs(self, numbers: Numbers) -> tuple[Run, ...]:
        """Return the runs of a push with these numbers; each of one key, where values are encoded."""
        if self.setting is not None:
            return self.runs_by_key(numbers)
        if len(numbers) == 1:
            (number,) = numbers
            return tuple(map(_run, map(tuple.__add__, self.blocks, repeat((number,)))))
        return tuple([Run(*ask[:3]) for ask in self.asks(numbers, ANY)])

    def runs_by_key(self, numbers: Numbers) -> tuple[Run, ...]:
        """Return the runs of a push with these numbers, each of one key."""
        return tuple([Run(start, size, of_key(numbers, key)) for start, size, key, _ in self.segments])

    def numbers_by_key(self, numbers: Numbers) -> tuple[int, ...]:
        """Return the number of each of :meth:`runs_by_key`."""
        return tuple([of_key(numbers, segment.key) for segment in self.segments])

    def asks(self, after: Numbers, least: Numbers) -> tuple[Ask, ...]:
        """Return the runs of a pull, with each key's conditions; each of one key, if read by deltas."""
        if len(after) == len(least) == 1 and not self.is_by_deltas:
            return tuple([Ask(start, size, after[0], least[0]) for start, size in self.blocks])
        asks: list[Ask] = []
        stop, last = -1, (-1, -1)
        for segment in self.segments:
            conditions = (of_key(after, segment.key), of_key(least, segment.key))
            if segment.start == stop and conditions == last and not self.is_by_deltas:
                asks[-1] = asks[-1]._replace(size=asks[-1].size + segment.size)
            else:
                asks.append(Ask(segment.start, segment.size, *conditions))
            stop, last = segment.start + segment.size, conditions
        return tuple(asks)

    def highest(self, priorities: Priority) -> int:
        """Return the highest priority of the keys in this share."""
        if isinstance(priorities, int):
            return priorities
        return max([priorities[segment.key] for segment in self.segments])

    def gather(self, rows: Rows, memory: Memory, route: str) -> tuple[torch.Tensor, ...]:
        """Return this share's elements of ``rows``, one contiguous tensor per key of the plan.

        They are copied into ``memory``, unless the peer along ``route`` can read them where they
        lie, or they are read :data:`HERE`: then they are returned as they are, neighbours joined.
        """
        starts = self.starts(rows)
        if starts is not None and route != HERE and not memory.lends(route, [rows[self.segments[0].key]]):
            out, (units, at) = memory.empty(self.size, self.dtype), self._units(starts)
            np.frombuffer(to_frame(out), units.dtype)[:] = units[at]
            return (out,)
        parts = self._pick(rows) if self._pick is not None else self._parts(rows)
        if route == HERE:
            return tuple(self._joined(parts))
        if memory.lends(route, parts[:1]):
            pieces = self._joined(parts)
            if len(pieces) <= PIECES_MAX and memory.lends(route, pieces):
                return tuple(pieces)
        out = memory.empty(self.size, self.dtype)
        if self.octets is not None and parts[0].is_cpu and not parts[0].is_neg():
            ctypes.memmove(out.data_ptr(), parts[0].data_ptr(), self.payload_bytes)
        elif len(parts) == 1:
            out.copy_(parts[0] if self._is_flat else parts[0].view(-1))
        else:  # faster than many copies
            torch.cat(parts if self._is_flat else [*map(torch.Tensor.ravel, parts)], out=out)
        return (out,)

    def scatter(self, values: torch.Tensor, rows: Rows) -> None:
        """Copy this share's elements back into ``rows``; any thread may call this."""
        starts = self.starts(rows)
        if starts is None:
            parts = self._pick(rows) if self._pick is not None else self._parts(rows)
            if self.units is None:
                torch._foreach_copy_([*map(torch.Tensor.ravel, parts)], torch.split(values, self._sizes))
                return
            _, whose, inside = self.units
            starts = addresses(parts)[whose] + inside
            increment_version(parts)
        units, at = self._units(starts)
        units[at] = np.frombuffer(to_frame(values), units.dtype)

    def starts(self, rows: Rows) -> Sizes | None:
        """Return the address of each unit in rows that are :class:`Placed`; None where it is not known."""
        known = rows.starts if isinstance(rows, Placed) else None
        return None if known is None or self._at is None else known[self._at[0]] + self._at[1]

    def _units(self, starts: Sizes) -> tuple[npt.NDArray[np.void], Sizes]:
        """Return memory as units, of which one begins at every byte, and where in it those at ``starts`` are.

        So units are read and written by their addresses in one assignment; torch takes 0.6 us a tensor.
        """
        assert self.units is not None
        lowest = starts.min()
        at = starts - lowest
        place = {"version": 3, "data": (int(lowest), False), "typestr": f"|V{self.units[0]}", "strides": (1,)}
        shape = (int(at.max()) + 1,)
        return np.asarray(SimpleNamespace(__array_interface__=place | {"shape": shape})), at

    def paste(self, frame: memoryview, rows: Rows) -> None:
        """Copy this share's elements back from a frame without torch, if it has ``octets``."""
        assert self.octets is not None
        (row,) = self._pick(rows) if self._pick is not None else self._parts(rows)
        memoryview(self.octets.from_address(row.data_ptr())).cast("B")[:] = frame
        increment_version(row)

    def split(self, values: torch.Tensor) -> Iterator[tuple[KeySlice, torch.Tensor]]:
        """Yield the segments and their elements."""
        return zip(self.segments, torch.split(values, self._sizes), strict=True)

    def _joined(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return ``parts`` as flat tensors, those joined that lie side by side in one storage."""
        begins = [part.data_ptr() for part in parts]
        first = begins[0]
        if [begin - first for begin in begins] == self._begins:
            return _one_storage(parts)
        ends = [begin + part.nbytes for begin, part in zip(begins, parts, strict=True)]
        starts = [0, *[at for at in range(1, len(parts)) if begins[at] != ends[at - 1]], len(parts)]
        return [piece for start, stop in pairwise(starts) for piece in _one_storage(parts[start:stop])]

    def _parts(self, rows: Rows) -> Rows:
        """Return the part of each row that lies in this share; a whole row as it is."""
        return [rows[key] if cut is None else rows[key].view(-1)[cut] for key, cut in self._cuts]


def addresses(rows: Rows) -> Sizes:
    """Return where each of these tensors begins."""
    return np.fromiter(map(torch.Tensor.data_ptr, rows), np.int64, len(rows))


def allocate(plan: TransferPlan, memory: Memory) -> list[torch.Tensor]:
    """Return one tensor for each key of ``plan``, contents undefined.

    Keys that lie side by side on a server do so in ``memory``, too; a key that is cut there is
    contiguous here.
    """
    whole_keys: dict[int, torch.Tensor] = {}
    for share in plan.shares:
        segments = [
            segment for segment in share.segments if segment.size == plan.keys[segment.key].spec.count
        ]
        sizes = [segment.size for segment in segments]
        parts = torch.split(memory.empty(sum(sizes), share.dtype), sizes)
        whole_keys.update(zip([segment.key for segment in segments], parts, strict=True))
    for index, key in enumerate(plan.keys):
        if index not in whole_keys:
            whole_keys[index] = memory.empty(key.spec.count, key.spec.dtype)
    return [whole_keys[index].view(key.spec.shape) for index, key in enumerate(plan.keys)]


def _one_storage(parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return neighbours as one tensor; or as they are, if they are neighbours by chance, in two storages."""
    if len(parts) == 1:
        return [parts[0].view(-1)]
    storage, last = parts[0].untyped_storage(), parts[-1]
    if last.data_ptr() + last.nbytes > storage.data_ptr() + storage.nbytes():
        return [part.view(-1) for part in parts]
    count = (last.data_ptr() + last.nbytes - parts[0].data_ptr()) // last.element_size()
    return [parts[0].as_strided((count,), (1,))]


def alike(numbers: Numbers) -> Numbers:
    """Return ``numbers``, or the single number that all of them are."""
    return numbers[:1] if len(numbers) > 1 and numbers.count(numbers[0]) == len(numbers) else numbers


def of_key(numbers: Priority, index: int) -> int:
    """Return the number of one key."""
    if isinstance(numbers, int):
        return numbers
    return numbers[index] if len(numbers) > 1 else numbers[0]


@dataclass(slots=True, eq=False)
class TransferPlan:
    """A list of keys, by chunk, with all that their pushes and pulls need of it."""

    keys: tuple[Key, ...]
    shares: list[ChunkSlice]
    payload_bytes: int = field(init=False)
    """Bytes of all elements of its keys."""
    is_encoded: bool = field(init=False)
    """Whether some shares are encoded."""
    _joint: Progress | None = field(default=None, repr=False)
    """The progress that all its keys had in common last; a key may have parted since."""
    _sizes: Sizes | None = field(default=None, repr=False)
    _digest: tuple[tuple[int, ...], int] = field(default=((), 0), repr=False)
    """The hash of the step that :meth:`step` returned last, and how far its keys were behind."""

    def __post_init__(self) -> None:
        self.payload_bytes = sum([share.payload_bytes for share in self.shares])
        self.is_encoded = any(share.setting is not None for share in self.shares)

    def refuse(self) -> None:
        """A push of these keys was refused, so its number is free again, perhaps."""
        for progress in self.apart():
            progress.is_refused = True

    def joint(self) -> Progress | None:
        """Return the progress that all its keys have in common with no other key; None if there is none."""
        if not self.keys:
            return None
        first = self.keys[0].progress
        is_known = first.keys == len(self.keys) and (first.keys == 1 or first is self._joint)
        return first if is_known else None

    def apart(self) -> Sequence[Progress]:
        """Return the progress of its keys, each once, which no other key has in common with them from now on.

        Keys part where they were moved without others, and join those with equal progress again: as spans do
        on a server, so that a list of keys that are always pushed together is counted as one.
        """
        if len(self.keys) == 1 and self.keys[0].progress.keys == 1:  # usual, and joint() is a call
            return (self.keys[0].progress,)
        if (joint := self.joint()) is not None:
            return (joint,)
        counts = Counter(map(_progress, self.keys))
        own = {of: of if of.keys == keys else of.part(keys) for of, keys in counts.items()}
        found = list(own.values())
        if len(set(map(_counts, found))) == 1:
            self._joint = found[0] if len(found) == 1 else replace(found[0], keys=len(self.keys))
            found = [self._joint]
            own = dict.fromkeys(own, self._joint)
        for key in self.keys:
            key.progress = own[key.progress]
        return found

    def numbers(self) -> Numbers:
        """Return the number of the next push of each of its keys."""
        joint = self.joint()
        return alike([key.number for key in self.keys]) if joint is None else (joint.number,)

    def step(self, store: str, numbers: Sequence[int]) -> dict[int, StepPart]:
        """Return the step that a push of these keys is, by server; every rank comes to the same.

        Args:
            store: the name of the store's present life, in which numbers begin at 0.
            numbers: the push number of each key.
        """
        number = max(numbers, default=0)
        behind = tuple([number - own for own in numbers])
        if self._digest[0] != behind:
            names = store, repr([key.name for key in self.keys]), repr(behind)
            digest = hashlib.blake2b("\n".join(names).encode(), digest_size=7).digest()
            self._digest = behind, int.from_bytes(digest, "little")
        sizes: dict[int, int] = {}
        for share in self.shares:
            sizes[share.server] = sizes.get(share.server, 0) + share.size
        holders = tuple(sorted(sizes))
        return {server: StepPart(self._digest[1], number, size, holders) for server, size in sizes.items()}

    @property
    def sizes(self) -> Sizes:
        """Bytes of each key."""
        if self._sizes is None:
            self._sizes = np.array([key.spec.nbytes for key in self.keys], np.int64)
        return self._sizes


def cut(plan: TransferPlan, most_bytes: int) -> TransferPlan:
    """Return a plan of the same keys with no share larger than ``most_bytes``; it may cut pieces."""
    shares: list[ChunkSlice] = []
    for whole in plan.shares:
        most = max(1, most_bytes // BY_NAME[whole.dtype].itemsize)
        room = 0
        for start, size, key, offset in whole.segments:
            at = 0
            while at < size:
                if not room:
                    shares.append(ChunkSlice(whole.server, whole.chunk, whole.dtype))
                    room = most
                step = min(size - at, room)
                shares[-1].segments.append(KeySlice(start + at, step, key, offset + at))
                at, room = at + step, room - step
    for share in shares:
        share.seal(plan.keys)
    return TransferPlan(plan.keys, shares)


def make(keys: Sequence[Key], first: int = 0, rules: CompressionPolicy = OFF) -> TransferPlan:
    """Return the plan of ``keys``, which begins with server ``first`` and encodes values by ``rules``."""
    shares: dict[tuple[int, int, KeyCompression | None], ChunkSlice] = {}
    for index, key in enumerate(keys):
        setting = rules.setting_of(key.name, key.spec)
        for piece in key.pieces:
            share = shares.get((piece.server, piece.chunk, setting))
            if share is None:
                share = ChunkSlice(piece.server, piece.chunk, key.spec.dtype, setting)
                shares[piece.server, piece.chunk, setting] = share
            share.segments.append(KeySlice(piece.start, piece.size, index, piece.offset))
    for share in shares.values():
        share.seal(keys)
    # Chunk by chunk over the servers, so that all of them have work from the first message on. If
    # every worker begins with another server, each has one worker at a time to listen to.
    servers = 1 + max((server for server, _, _ in shares), default=0)
    rank_in_server: dict[int, int] = {}
    order: list[tuple[int, int, ChunkSlice]] = []
    for share in sorted(shares.values(), key=attrgetter("server", "chunk")):
        rank_in_server[share.server] = rank_in_server.get(share.server, -1) + 1
        order.append((rank_in_server[share.server], (share.server - first) % servers, share))
    return TransferPlan(tuple(keys), [share for _, _, share in sorted(order, key=lambda entry: entry[:2])])
