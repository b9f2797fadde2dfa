"""Error feedback: residuals of compressed pushes, and cached values for compressed pulls.

Each compressed key has a *residual* here: the part of its gradients that was not encoded so far. It is added
to the next gradient, and what the encoding of that push loses is the new residual. A push is encoded once;
when it is resent, it carries the same bytes.

A gradient that is not finite is sent as it is and leaves the residual alone: the store decides
what becomes of it, and a NaN in the residual would stay there for ever.

Where servers answer with deltas (:mod:`kvps.core.server.chunks.history`), the values of each piece
of a key are cached here, and later deltas are added to them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch

from kvps.compression import spec
from kvps.compression.codecs import decode, encode
from kvps.compression.policy import OFF, CompressionPolicy
from kvps.core.worker.connection import Request
from kvps.core.worker.plan import ChunkSlice, Key, KeySlice
from kvps.dtypes import BY_NAME
from kvps.errors import ProtocolError
from kvps.protocol.envelope import Packet
from kvps.protocol.values import Pulled, Push
from kvps.tensors import Memory, from_frame


@dataclass(slots=True)
class CachedValues:
    """The values of one piece of a key, as they are at the servers."""

    version: int
    values: torch.Tensor


@dataclass(slots=True)
class ErrorFeedback:
    """The compression of one store, on one worker."""

    rules: CompressionPolicy = OFF
    is_on: bool = False
    """Some key may be compressed."""
    residuals: dict[str, torch.Tensor] = field(default_factory=dict)
    """Key -> float32, flat, on the device of its last gradient."""
    _cached: dict[str, dict[tuple[int, int], CachedValues]] = field(default_factory=dict)
    """Key -> (chunk, first element in it) of a piece -> its values."""
    _unencoded: dict[int, deque[Request]] = field(default_factory=dict)
    """Chunk -> pushes that were made and are not encoded yet, in order."""

    # --- which keys -----------------------------------------------------------------------------

    def use(self, rules: CompressionPolicy) -> None:
        """Compress by ``rules`` from the next push on. Residuals stay: they are owed."""
        self.rules, self.is_on = rules, not rules.are_off

    def forget(self, names: Iterable[str]) -> None:
        """Drop the cached codecs of these keys: they have new values, or lie elsewhere."""
        for name in names:
            self._cached.pop(name, None)

    def begin_anew(self) -> None:
        """Drop what is cached, and pushes that are not encoded: nothing pushed or pulled so far
        counts any more."""
        self._cached.clear()
        self._unencoded.clear()

    # --- pushes ---------------------------------------------------------------------------------

    def push(
        self,
        keys: Sequence[Key],
        share: ChunkSlice,
        message: Push,
        rows: Sequence[torch.Tensor],
        memory: Memory,
    ) -> Request:
        """Return the request by which a share is pushed that is encoded.

        Args:
            keys: those of its plan.
            share: their part in one chunk.
            message: the push as it would be without compression.
            rows: the gradients, one for each key.
            memory: where the payload is made.
        """
        setting = share.setting
        assert setting is not None
        # The same elements on every worker, others in every round, where a codec draws them.
        code = spec.seeded(setting.code, message.runs[0].number)
        held = self.held(share, keys) if message.pull and share.is_by_deltas else ()
        message = replace(message, code=code, back=setting.back, held=held)
        request = Request(share.server, message, payload_bytes=message.payload_sizes()[0], lane=share.chunk)

        unencoded = self._unencoded.setdefault(share.chunk, deque())
        unencoded.append(request)

        def fill(route: str) -> tuple[torch.Tensor, ...]:
            while unencoded[0] is not request:  # a residual goes with the push after it
                unencoded[0].freeze()
            unencoded.popleft()
            parts = [
                (keys[segment.key], segment, _part(rows[segment.key], segment)) for segment in share.segments
            ]
            if torch.isfinite(sum([part.sum() for _, _, part in parts], torch.tensor(0.0))):
                return (self._encoded(parts, message, memory, setting.decay),)
            request.message = plain = replace(message, code=None)
            request.payload_bytes = plain.payload_sizes()[0]
            out = memory.empty(share.size, share.dtype)
            return (torch.cat([part.cpu() for _, _, part in parts], out=out),)

        request.fill = fill
        return request

    def _encoded(
        self, parts: list[tuple[Key, KeySlice, torch.Tensor]], message: Push, memory: Memory, decay: float
    ) -> torch.Tensor:
        """Return the encoded gradients, and keep what they lose; of what was lost before,
        ``decay`` is left."""
        assert message.code is not None
        out = memory.empty(message.payload_sizes()[0], "uint8")
        begin = 0
        for key, segment, part in parts:
            residual = self.residuals.get(key.name)
            if residual is None or len(residual) != key.spec.count:
                residual = torch.zeros(key.spec.count, device=part.device)
            residual = residual.to(part.device)  # where the gradients are now
            self.residuals[key.name] = residual
            owed = _part(residual, segment)
            if decay != 1:
                owed.mul_(decay)
            encoded = encode(message.code, owed, part)
            out[begin : begin + len(encoded)].copy_(encoded)
            begin += len(encoded)
        return out

    # --- pulls ----------------------------------------------------------------------------------

    def held(self, share: ChunkSlice, keys: Sequence[Key]) -> tuple[int, ...]:
        """Return the version of the values that are cached here of each segment of a share; -1 for none."""
        places = [(keys[segment.key].name, (share.chunk, segment.start)) for segment in share.segments]
        cached = [self._cached.get(name, {}).get(piece) for name, piece in places]
        return tuple([-1 if found is None else found.version for found in cached])

    def values_of(self, packet: Packet, share: ChunkSlice, keys: Sequence[Key]) -> torch.Tensor:
        """Return the values of ``share`` in an answer, in one piece; they are for reading.

        Raises:
            ProtocolError: if they do not fit the request.
        """
        answer = packet.message
        assert isinstance(answer, Pulled)
        is_whole = not answer.steps
        if not is_whole and len(answer.steps) != len(answer.runs):
            raise ProtocolError(f"{len(answer.runs)} runs, and steps of {len(answer.steps)}")
        if is_whole and not answer.adds:
            return from_frame(packet.payload[0], share.dtype)
        pieces = [(run.start, run.size) for run in answer.runs]
        if pieces != [(segment.start, segment.size) for segment in share.segments]:
            raise ProtocolError(f"chunk {share.chunk}: deltas of other pieces than requested")
        encoded = from_frame(packet.payload[0], "uint8")
        values = torch.empty(share.size, dtype=torch.float32)
        begin = at = 0
        for index, (segment, stand) in enumerate(zip(share.segments, answer.runs, strict=True)):
            out = values[at : at + segment.size]
            at += segment.size
            cached = self._cached.setdefault(keys[segment.key].name, {})
            piece = share.chunk, segment.start
            if is_whole or answer.steps[index].whole:
                end = begin + segment.size * BY_NAME[share.dtype].itemsize
                out.view(torch.uint8).copy_(encoded[begin:end])
                if answer.adds:
                    cached[piece] = CachedValues(stand.version, out.clone())
                begin = end
                continue
            deltas = []
            for code in answer.steps[index].codes:
                end = begin + spec.size(code, segment.size)
                deltas.append((code, encoded[begin:end]))
                begin = end
            if answer.adds:
                self._add(deltas, cached.get(piece), stand.version, out)
            elif len(deltas) != 1:
                raise ProtocolError(f"{len(deltas)} steps that do not add up")
            else:
                decode(*deltas[0], out)
        return values

    def _add(
        self,
        deltas: Sequence[tuple[spec.CodecSpec, torch.Tensor]],
        cached: CachedValues | None,
        version: int,
        out: torch.Tensor,
    ) -> None:
        """Bring cached values to ``version`` by the last of these deltas, and copy them to ``out``."""
        missing = -1 if cached is None else version - cached.version
        if cached is None or not 0 <= missing <= len(deltas):
            had = "none" if cached is None else f"version {cached.version}"
            raise ProtocolError(f"{len(deltas)} steps to version {version}, and the values here are of {had}")
        for code, encoded in deltas[len(deltas) - missing :]:
            cached.values.add_(decode(code, encoded, torch.empty(len(out), dtype=torch.float32)))
        cached.version = version
        out.copy_(cached.values)


def _part(row: torch.Tensor, segment: KeySlice) -> torch.Tensor:
    """Return the elements of a row in ``segment``, flat."""
    return row.view(-1)[segment.offset : segment.offset + segment.size]
