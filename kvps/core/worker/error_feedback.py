"""Error feedback: residuals of compressed pushes, and cached values for compressed pulls.

Each key that is compressed has a *rest* here: what was not written of its gradients so far. It is
added to the next gradient, and what that push cannot say is the new rest. A push is written once,
whatever becomes of it on its way: one that is sent again carries the same bytes.

A gradient that is not finite is sent as it is, and leaves the rest alone: the store decides what
becomes of it, and a NaN in the rest would stay there for ever.

Where servers answer by steps (:mod:`kvps.core.server.chunks.delta_log`), a *copy* of the values is kept here for each
piece of a key: later steps are added to it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import overload

import torch

from kvps.compression import spec
from kvps.compression.codecs import decode, encode
from kvps.compression.policy import OFF, CompressionPolicy, KeyCompression
from kvps.compression.spec import RANDOMK
from kvps.core.worker.connection import Request
from kvps.core.worker.plan import (
    ChunkSlice,
    Given,
    Key,
    KeySlice,
    Numbers,
    TransferPlan,
    make,
    of_key,
)
from kvps.dtypes import BY_NAME
from kvps.errors import ProtocolError
from kvps.protocol.envelope import Packet
from kvps.protocol.values import Ask, Pull, Pulled, Push, Run
from kvps.tensors import Memory, from_frame


@dataclass(frozen=True, slots=True)
class Selected:
    """Some rows of a call; the list may be filled anew before they are read."""

    rows: Given
    indices: Sequence[int]

    def __getitem__(self, index: int, /) -> torch.Tensor:
        """Return that of one key of the group."""
        return self.rows[self.indices[index]]


@dataclass(frozen=True, slots=True)
class CompressionGroup:
    """Those keys of a call that travel alike."""

    plan: TransferPlan
    setting: KeyCompression | None = None
    """None for as they are."""
    indices: tuple[int, ...] | None = None
    """Which keys of the call they are; None for all."""

    @overload
    def numbers(self, numbers: Sequence[int]) -> Sequence[int]: ...

    @overload
    def numbers(self, numbers: Numbers) -> Numbers: ...

    def numbers(self, numbers: Numbers) -> Numbers:
        """Return those of ``numbers``, one for each key of the call, that are theirs."""
        if isinstance(numbers, int) or self.indices is None:
            return numbers
        return [numbers[index] for index in self.indices]

    def rows(self, rows: Given) -> Given:
        """Return those of ``rows``, one for each key of the call, that are theirs."""
        return rows if self.indices is None else Selected(rows, self.indices)


@dataclass(slots=True)
class CachedValues:
    """The values of one piece of a key, as they are at the servers."""

    version: int
    values: torch.Tensor


@dataclass(slots=True)
class ErrorFeedback:
    """How one store compresses, on one worker."""

    rules: CompressionPolicy = OFF
    rests: dict[str, torch.Tensor] = field(default_factory=dict)
    """By key: float32, flat, where the key's values were when it was pushed first."""
    _copies: dict[str, dict[tuple[int, int], CachedValues]] = field(default_factory=dict)
    """By key, then by chunk and where in it the piece begins."""
    _groups: dict[tuple[str, ...], list[CompressionGroup]] = field(default_factory=dict)
    _unwritten: dict[int, deque[Request]] = field(default_factory=dict)
    """By chunk, the pushes that were made and are not written yet, in order."""

    # --- which keys -----------------------------------------------------------------------------

    def use(self, rules: CompressionPolicy) -> None:
        """Compress by ``rules`` from the next push on. The rests stay: they are owed."""
        self.rules = rules
        self._groups.clear()

    def forget(self, names: Iterable[str]) -> None:
        """The values of these keys are new ones, or lie somewhere else."""
        for name in names:
            self._copies.pop(name, None)
        self._groups.clear()

    def begin_anew(self) -> None:
        """Nothing that was pushed or pulled counts any more; what was not written is void."""
        self._copies.clear()
        self._groups.clear()
        self._unwritten.clear()

    def groups(self, plan: TransferPlan, rank: int) -> list[CompressionGroup]:
        """Return the keys of ``plan``, by how they travel."""
        if self.rules.are_off:
            return [CompressionGroup(plan)]
        names = tuple([key.name for key in plan.keys])
        groups = self._groups.get(names)
        if groups is None:
            if len(self._groups) >= 64:
                self._groups.clear()
            groups = self._groups[names] = list(self._grouped(plan, rank))
        return groups

    def _grouped(self, plan: TransferPlan, rank: int) -> Iterator[CompressionGroup]:
        found: dict[KeyCompression | None, list[int]] = {}
        for index, key in enumerate(plan.keys):
            found.setdefault(self.rules.setting_of(key.name, key.spec), []).append(index)
        if len(found) == 1:
            yield CompressionGroup(plan, next(iter(found)))
            return
        for setting, indices in found.items():
            part = make([plan.keys[one] for one in indices], rank)
            yield CompressionGroup(part, setting, tuple(indices))

    # --- the way there --------------------------------------------------------------------------

    def push(
        self,
        group: CompressionGroup,
        share: ChunkSlice,
        message: Push,
        rows: Given,
        memory: Memory,
        numbers: Numbers,
    ) -> Request:
        """Return the request by which a share of ``group`` is pushed.

        Args:
            group: the keys.
            share: what of them lies in one chunk.
            message: the push as it would be without compression.
            rows: the gradients, one for each key of the group.
            memory: from which to send.
            numbers: of the pushes, one for each key of the group.
        """
        setting, keys = group.setting, group.plan.keys
        assert setting is not None
        runs = tuple([Run(one.start, one.size, of_key(numbers, one.key)) for one in share.segments])
        code = setting.code
        if code.codec == RANDOMK:  # the same elements on every worker, others in every round
            code = spec.seeded(code, runs[0].number)
        held: tuple[int, ...] = ()
        if message.pull and setting.back is not None:
            held = self._held(share, keys)
        message = replace(message, runs=runs, code=code, back=setting.back, held=held)
        request = Request(
            share.server, message, payload_bytes=message.payload_sizes()[0], lane=share.chunk
        )

        unwritten = self._unwritten.setdefault(share.chunk, deque())
        unwritten.append(request)

        def fill(route: str) -> tuple[torch.Tensor, ...]:
            while unwritten[0] is not request:  # each rest goes with the push after it
                unwritten[0].freeze()
            unwritten.popleft()
            parts = [(keys[one.key], one, _part(rows[one.key], one)) for one in share.segments]
            if torch.isfinite(sum([part.sum() for _, _, part in parts], torch.tensor(0.0))):
                return (self._written(parts, message, memory),)
            request.message = plain = replace(message, code=None)
            request.payload_bytes = plain.payload_sizes()[0]
            out = memory.empty(share.size, share.dtype)
            return (torch.cat([part.cpu() for _, _, part in parts], out=out),)

        request.fill = fill
        return request

    def _written(
        self,
        parts: list[tuple[Key, KeySlice, torch.Tensor]],
        message: Push,
        memory: Memory,
    ) -> torch.Tensor:
        """Return the bytes of gradients, and keep what they do not say."""
        assert message.code is not None
        out = memory.empty(message.payload_sizes()[0], "uint8")
        begin = 0
        for key, segment, part in parts:
            rest = self.rests.get(key.name)
            if rest is None or len(rest) != key.spec.count:
                rest = torch.zeros(key.spec.count, device=part.device)
            self.rests[key.name] = rest = rest.to(part.device)  # where the gradients are now
            octets = encode(
                message.code, rest[segment.offset : segment.offset + segment.size], part
            )
            out[begin : begin + len(octets)].copy_(octets)
            begin += len(octets)
        return out

    # --- the way back ---------------------------------------------------------------------------

    def pull(self, group: CompressionGroup, share: ChunkSlice, message: Pull) -> Pull:
        """Return ``message`` as it asks for steps."""
        held = self._held(share, group.plan.keys)
        asks = []
        index = 0
        for segment in share.segments:
            while not message.runs[index].start <= segment.start < sum(message.runs[index][:2]):
                index += 1
            ask = message.runs[index]
            asks.append(Ask(segment.start, segment.size, ask.after, ask.least))
        return replace(message, runs=tuple(asks), held=held)

    def _held(self, share: ChunkSlice, keys: Sequence[Key]) -> tuple[int, ...]:
        versions = []
        for segment in share.segments:
            copies = self._copies.get(keys[segment.key].name, {})
            copy = copies.get((share.chunk, segment.start))
            versions.append(-1 if copy is None else copy.version)
        return tuple(versions)

    def values_of(self, packet: Packet, share: ChunkSlice, keys: Sequence[Key]) -> torch.Tensor:
        """Return the values of ``share`` that an answer says, in one piece; they are for reading.

        Raises:
            ProtocolError: if they cannot be what was asked for.
        """
        answer = packet.message
        assert isinstance(answer, Pulled)
        is_whole = not answer.steps
        if not is_whole and len(answer.steps) != len(answer.runs):
            raise ProtocolError(f"{len(answer.runs)} runs, and steps of {len(answer.steps)}")
        if is_whole and not answer.adds:
            return from_frame(packet.payload[0], share.dtype)
        places = [(one.start, one.size) for one in answer.runs]
        if places != [(one.start, one.size) for one in share.segments]:
            raise ProtocolError(f"chunk {share.chunk}: the steps of other pieces than asked for")
        octets = from_frame(packet.payload[0], "uint8")
        values = torch.empty(share.size)
        begin = at = 0
        for index, (segment, stand) in enumerate(zip(share.segments, answer.runs, strict=True)):
            out = values[at : at + segment.size]
            at += segment.size
            copies = self._copies.setdefault(keys[segment.key].name, {})
            place = share.chunk, segment.start
            if is_whole or answer.steps[index].whole:
                end = begin + segment.size * BY_NAME[share.dtype].itemsize
                out.view(torch.uint8).copy_(octets[begin:end])
                if answer.adds:
                    copies[place] = CachedValues(stand.version, out.clone())
                begin = end
                continue
            steps = answer.steps[index].codes
            parts = []
            for code in steps:
                end = begin + spec.size(code, segment.size)
                parts.append((code, octets[begin:end]))
                begin = end
            if answer.adds:
                self._walk(copies.get(place), stand.version, parts, out)
            elif len(parts) != 1:
                raise ProtocolError(f"{len(parts)} steps that do not add up")
            else:
                decode(*parts[0], out)
        return values

    def _walk(
        self,
        copy: CachedValues | None,
        version: int,
        steps: Sequence[tuple[spec.CodecSpec, torch.Tensor]],
        out: torch.Tensor,
    ) -> None:
        """Bring a copy to ``version`` by the last of these steps, and write its values to ``out``."""
        missing = -1 if copy is None else version - copy.version
        if copy is None or not 0 <= missing <= len(steps):
            had = "none" if copy is None else f"version {copy.version}"
            raise ProtocolError(
                f"{len(steps)} steps to version {version}, and the values here are of {had}"
            )
        for code, octets in steps[len(steps) - missing :]:
            copy.values.add_(decode(code, octets, torch.empty(len(out))))
        copy.version = version
        out.copy_(copy.values)


def _part(row: torch.Tensor, segment: KeySlice) -> torch.Tensor:
    """Return the elements of a row that a segment is."""
    return row.view(-1)[segment.offset : segment.offset + segment.size]
