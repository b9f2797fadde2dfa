"""The call behind refresh() and pull_changed(): copies brought up to date by their changed rows.

Who has all of a key as it was at one version holds a :class:`~kvps.core.worker.plan.CopyVersion` for that. Each server with a part of
the key is then asked which of its rows changed since, and answers with these; the rest of the copy is as it
should be. A server forgets what changed long ago, and does not know after a change that was not by rows.
So a key without a mark, or of which some server does not know, is read as a whole, as any pull.

What changed is handed out when all of it is there. A whole value goes straight into the sink.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from kvps.core.worker import consistent_read
from kvps.core.worker.calls.base import Call, OnTimeout, Operation, Values, numbered
from kvps.core.worker.connection import Request
from kvps.core.worker.consistent_read import Step, repair_torn_reads
from kvps.core.worker.failure_policy import complain
from kvps.core.worker.plan import CopyVersion, Key, Numbers, PieceLocation, of_key
from kvps.core.worker.row_reads import RowRead, ServerPart, complain_of_drops, ranges
from kvps.core.worker.store import WorkerStore
from kvps.dtypes import BY_NAME
from kvps.errors import ProtocolError
from kvps.protocol.envelope import Packet
from kvps.protocol.values import Changed, PullChanged, Pulled
from kvps.tensors import TORCH, from_frame


class Patch(NamedTuple):
    """Some rows of a key: their numbers, ascending, and their values, [k, width]."""

    ids: torch.Tensor
    rows: torch.Tensor


class Fresh(NamedTuple):
    """How a copy came up to date."""

    mark: CopyVersion | None
    """What it holds now; None if that is not one version."""
    patches: tuple[Patch, ...] = ()
    """What changed in it."""
    whole: torch.Tensor | None = None
    """All of it, where it is not known what changed: the sink, or a tensor where there is none."""


@dataclass(slots=True)
class ChangedRows(ServerPart[Changed]):
    """Those rows of a server that changed."""

    since: int
    patch: Patch | None = field(default=None, init=False)

    def ask(self, store: str, after: int, least: int, priority: int) -> Request:
        """Return the request for them."""
        return Request(
            self.place.server,
            PullChanged(store, self.key.name, after, least, self.since),
            priority=priority,
            lane=self.place.lane,
            on_reply=self,
        )

    def __call__(self, packet: Packet, wanted: bool) -> None:
        """Take in the answer."""
        answer, spec = packet.message, self.key.spec
        assert isinstance(answer, Changed)
        if answer.width != spec.width or answer.dtype != BY_NAME[spec.dtype].id:
            raise ProtocolError(
                f"server {self.place.server} answered rows of {answer.width} elements of key "
                f"{self.key.name!r}, which is {spec}"
            )
        self.answer, self.patch = answer, None
        if answer.count and wanted:
            self.patch = self._patch(packet.payload)

    def _patch(self, payload: Sequence[memoryview]) -> Patch:
        spec, place = self.key.spec, self.place
        ids = from_frame(payload[0], "int64").clone()
        is_here = place.first <= int(ids[0]) and int(ids[-1]) < place.stop
        if not is_here or not bool((ids[1:] > ids[:-1]).all()):
            raise ProtocolError(
                f"server {place.server} answered rows of key {self.key.name!r} that are not its own, "
                f"{place.first} to {place.stop - 1}, in order"
            )
        rows = torch.cat([from_frame(frame, spec.dtype) for frame in payload[1:]])
        return Patch(ids, rows.view(-1, spec.width))


@dataclass(frozen=True, slots=True)
class Refresh(Call):
    """Bring copies of keys up to date, after this rank's own pushes; finishes with a Fresh for each."""

    title = "refresh()"
    on_timeout = OnTimeout.RETRY
    answers = (Pulled, Changed)

    keys: tuple[str, ...]
    sinks: tuple[torch.Tensor | None, ...]
    """Where those go that have to be read whole; None for a new tensor."""
    marks: tuple[CopyVersion | None, ...]
    """What each copy holds, if that is known."""
    priority: Numbers

    def run(self, store: WorkerStore, values: Values) -> Operation:
        plan = yield from numbered(store, self.keys)
        copies = [_copy(key, self, index) for index, key in enumerate(plan.keys)]
        # What is read now is of these; a broadcast meanwhile makes others of them.
        pieces = [key.pieces for key in plan.keys]
        asked = [one for one in copies if one.portions]
        if asked:
            yield [request for one in asked for request in one.asked(store)]
        known = [one for one in asked if _is_known(one)]
        for one in known:
            one.settle(store.ordered)
        yield from repair_torn_reads(store, known)
        complain_of_drops(store, known)
        found = {
            index: _fresh(one, pieces[index]) for index, one in enumerate(copies) if _is_known(one)
        }
        rest = [index for index in range(len(copies)) if index not in found]
        if rest:
            wholes, versions = yield from _read_whole(
                store, [copies[index] for index in rest], [self.sinks[index] for index in rest]
            )
            for index, whole in zip(rest, wholes, strict=True):
                version = versions.get(copies[index].key.name)
                mark = None if version is None else CopyVersion(pieces[index], version)
                found[index] = Fresh(mark, whole=whole)
        return [found[index] for index in range(len(copies))]


def _copy(key: Key, call: Refresh, index: int) -> RowRead[ChangedRows]:
    mark = call.marks[index]
    one: RowRead[ChangedRows] = RowRead(key, key.number, of_key(call.priority, index))
    if mark is not None and mark.pieces is key.pieces:
        one.portions += [ChangedRows(key, place, mark.version) for place in ranges(key)]
    return one


def _is_known(one: RowRead[ChangedRows]) -> bool:
    """Whether all servers know what changed."""
    return bool(one.portions) and all(portion.told.known for portion in one.portions)


def _fresh(one: RowRead[ChangedRows], pieces: tuple[PieceLocation, ...]) -> Fresh:
    told = [portion.told for portion in one.portions]
    versions = {version for each in told for version in (each.lowest, each.highest)}
    mark = CopyVersion(pieces, versions.pop()) if len(versions) == 1 else None
    return Fresh(mark, tuple([each.patch for each in one.portions if each.patch is not None]))


def _read_whole(
    store: WorkerStore, copies: Sequence[RowRead[ChangedRows]], sinks: Sequence[torch.Tensor | None]
) -> Generator[Step, list[Packet], tuple[list[torch.Tensor], dict[str, int]]]:
    """Read keys as they are; return their values, and the versions of those that are at one."""
    wholes = [
        torch.empty(one.key.spec.shape, dtype=TORCH[one.key.spec.dtype]) if sink is None else sink
        for one, sink in zip(copies, sinks, strict=True)
    ]
    plan = store.plan(tuple([one.key.name for one in copies]))
    after = [one.after for one in copies]
    priority = [one.priority for one in copies]
    tallies = yield from consistent_read.read(
        store, plan, consistent_read.Rows(wholes), after, 0, priority
    )
    found: dict[str, int] = {}
    for tally in tallies:
        if tally.dropped and not tally.is_unwanted:
            complain(store.name, store.ordered, store.keys, tally.dropped)
        for key, parts in zip(tally.plan.keys, tally.by_key(), strict=True):
            versions = {version for version, _ in parts.values()}
            if len(versions) == 1:
                found[key.name] = versions.pop()
    return wholes, found
