"""The call behind refresh() and pull_changed(): copies brought up to date by their changed rows.

A copy of all of a key as it was at one version has a :class:`~kvps.core.worker.plan.CopyVersion`.
Each server with a part of the key is asked which of its rows changed since, and answers with
these; all other rows of the copy are up to date. A server forgets what changed long ago, and does
not know after a change that was not by rows. So a key without a mark, or of which some server does
not know, is read as a whole, as any pull.

What changed is handed out when all of it is there. A whole value goes straight into the sink.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from kvps.core.worker import consistent_read
from kvps.core.worker.calls.base import Operation, ReadCall, Values, frozen, numbered
from kvps.core.worker.consistent_read import Step, settle_reads
from kvps.core.worker.plan import ANY, CopyVersion, Key, PieceLocation, Priority, of_key
from kvps.core.worker.row_reads import RowRead, ServerPart, ranges
from kvps.core.worker.store import WorkerStore
from kvps.errors import ProtocolError
from kvps.protocol.envelope import Packet
from kvps.protocol.values import Changed, PullChanged, PulledRows
from kvps.tensors import TORCH, from_frame


class Patch(NamedTuple):
    """Some rows of a key: their numbers, ascending, and their values, [k, width]."""

    ids: torch.Tensor
    rows: torch.Tensor


class Fresh(NamedTuple):
    """The way in which a copy came up to date."""

    mark: CopyVersion | None
    """The version that it holds now; None if that is not one version."""
    patches: tuple[Patch, ...] = ()
    """The rows that changed."""
    whole: torch.Tensor | None = None
    """All of its values, where it is not known what changed: the sink, or a tensor where there is none."""


@dataclass(slots=True)
class ChangedRows(ServerPart):
    """The rows of one server that changed."""

    since: int
    patch: Patch | None = field(default=None, init=False)

    def message(self, store: str, after: int, least: int) -> PullChanged:
        """Return the message that asks for them."""
        return PullChanged(store, self.key.name, after, least, self.since)

    def take(self, answer: PulledRows | Changed, payload: Sequence[memoryview]) -> None:
        """Keep the rows; they replace those of an earlier answer."""
        self.patch = self._patch(payload) if answer.count else None

    def _patch(self, payload: Sequence[memoryview]) -> Patch:
        spec, range_ = self.key.spec, self.range
        ids = from_frame(payload[0], "int64").clone()
        if not range_.rows.has(ids) or not bool((ids[1:] > ids[:-1]).all()):
            raise ProtocolError(
                f"server {range_.server} answered rows of key {self.key.name!r} that are not its own, "
                f"{range_.rows}, in order"
            )
        rows = torch.cat([from_frame(frame, spec.dtype) for frame in payload[1:]])
        return Patch(ids, rows.view(-1, spec.width))


@frozen
class Refresh(ReadCall):
    """Bring copies of keys up to date, after this rank's own pushes; finishes with a Fresh for each."""

    title = "refresh()"

    sinks: tuple[torch.Tensor | None, ...]
    """Tensors for keys that have to be read as a whole; None for a new tensor."""
    marks: tuple[CopyVersion | None, ...]
    """The version that each copy holds, if that is known."""
    priority: Priority

    def run(self, store: WorkerStore, values: Values) -> Operation:
        plan = yield from numbered(store, self.keys)
        copies = [_copy(key, self, index) for index, key in enumerate(plan.keys)]
        # What is read now is of these; a broadcast meanwhile makes others of them.
        pieces = [key.pieces for key in plan.keys]
        asked = [copy for copy in copies if copy.parts]
        if asked:
            yield [request for copy in asked for request in copy.asked(store)]
        known = [copy for copy in asked if _is_known(copy)]
        yield from settle_reads(store, known)
        fresh = {index: _fresh(copy, pieces[index]) for index, copy in enumerate(copies) if _is_known(copy)}
        unknown = [index for index in range(len(copies)) if index not in fresh]
        if unknown:
            wholes, versions = yield from read_whole(
                store, [copies[index] for index in unknown], [self.sinks[index] for index in unknown]
            )
            for index, whole in zip(unknown, wholes, strict=True):
                version = versions.get(copies[index].key.name)
                mark = None if version is None else CopyVersion(pieces[index], version)
                fresh[index] = Fresh(mark, whole=whole)
        return [fresh[index] for index in range(len(copies))]


def _copy(key: Key, call: Refresh, index: int) -> RowRead[ChangedRows]:
    mark = call.marks[index]
    copy: RowRead[ChangedRows] = RowRead(key, key.number, of_key(call.priority, index))
    if mark is not None and mark.pieces is key.pieces:
        copy.parts += [ChangedRows(key, rows, mark.version) for rows in ranges(key)]
    return copy


def _is_known(copy: RowRead[ChangedRows]) -> bool:
    """Whether all servers know what changed."""
    answers = [part.told for part in copy.parts]
    return bool(answers) and all(isinstance(answer, Changed) and answer.known for answer in answers)


def _fresh(copy: RowRead[ChangedRows], pieces: tuple[PieceLocation, ...]) -> Fresh:
    answers = [part.told for part in copy.parts]
    versions = {version for answer in answers for version in (answer.lowest, answer.highest)}
    mark = CopyVersion(pieces, versions.pop()) if len(versions) == 1 else None
    return Fresh(mark, tuple([part.patch for part in copy.parts if part.patch is not None]))


def read_whole(
    store: WorkerStore, copies: Sequence[RowRead[Any]], sinks: Sequence[torch.Tensor | None]
) -> Generator[Step, list[Packet], tuple[list[torch.Tensor], dict[str, int]]]:
    """Read keys as they are; return their values, and the versions of those that are at one."""
    wholes = [
        torch.empty(copy.key.spec.shape, dtype=TORCH[copy.key.spec.dtype]) if sink is None else sink
        for copy, sink in zip(copies, sinks, strict=True)
    ]
    plan = store.plan(tuple([copy.key.name for copy in copies]))
    after = [copy.after for copy in copies]
    priority = [copy.priority for copy in copies]
    read = yield from consistent_read.read(store, plan, wholes, after, ANY, priority)
    known: dict[str, int] = {}
    for key, parts in zip(plan.keys, read.by_key(), strict=True):
        versions = {version for version, _ in parts.values()}
        if len(versions) == 1:
            known[key.name] = versions.pop()
    return wholes, known
