"""The disks on which simulated servers keep their cuts: what is whole there survives them.

An image is written for a while, during which the server goes on; at the end it must be what it was at
the beginning, unless its cut was given up meanwhile. A server that ends meanwhile leaves nothing. A
disk may be full.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch

from kvps.checkpoint.reshard import regroup
from kvps.core.embedding.stored import loaded
from kvps.core.server.snapshot.model import RowsSnapshot, Snapshot
from kvps.core.server.snapshot.storage import (
    Answer,
    Complete,
    Completed,
    FindCuts,
    FoundCuts,
    Loaded,
    Order,
    Read,
    Remove,
    SnapshotWritten,
    Write,
)
from kvps.errors import StorageError
from kvps.protocol.checkpoint import Commit
from tests.simulation.network import Network, Process

KEPT = 2


def copy_of(image: Snapshot) -> Snapshot:
    """Return an image that nobody else writes to."""
    return replace(
        image,
        stores=tuple(
            replace(
                store,
                keys=tuple(
                    replace(
                        key,
                        portions=tuple(
                            replace(
                                portion,
                                weight=portion.weight.clone(),
                                state={name: row.clone() for name, row in portion.state.items()},
                            )
                            for portion in key.portions
                        ),
                    )
                    for key in store.keys
                ),
                tables=tuple(replace(table, parts=_copies(table.parts)) for table in store.tables),
            )
            for store in image.stores
        ),
    )


def _copies(parts: tuple[RowsSnapshot, ...]) -> tuple[RowsSnapshot, ...]:
    return tuple(
        replace(
            part,
            ids=part.ids.clone(),
            stamps=part.stamps.clone(),
            columns={
                name: tuple([loaded(row).clone() for row in rows]) for name, rows in part.columns.items()
            },
            counts=part.counts.clone(),
        )
        for part in parts
    )


@dataclass
class Folder:
    """The disk of one server."""

    images: dict[int, Snapshot] = field(default_factory=dict)
    manifests: dict[int, tuple[bytes, Commit]] = field(default_factory=dict)

    def tidy(self) -> None:
        """Keep the newest cuts and those with a tag."""
        plain = [cut for cut, (_, commit) in sorted(self.manifests.items()) if not commit.tag]
        for cut in plain[:-KEPT]:
            del self.manifests[cut]
        self.images = {
            cut: image
            for cut, image in self.images.items()
            if cut in self.manifests or cut > max(self.manifests, default=0)
        }


class Shelves:
    """The disks of all servers, which take ``takes_s`` for each order."""

    def __init__(self, network: Network, takes_s: float = 0.05) -> None:
        self.folders: dict[int, Folder] = {}
        self.full: set[int] = set()
        """The servers whose disk is full."""
        self._network = network
        self.takes_s = takes_s
        self._free_at: dict[Process, float] = {}
        self._changed: set[tuple[int, int]] = set()
        """Images that were not kept as they were; no cut may be made of them."""

    def order(self, process: Process, server: int, order: Order) -> None:
        """Carry out what a server orders, after what it ordered before."""
        network = self._network
        begins = max(network.now, self._free_at.get(process, 0.0))
        ends = begins + self.takes_s * (0.5 + network.random.random())
        self._free_at[process] = ends
        former = copy_of(order.snapshot) if isinstance(order, Write) else None

        def end() -> None:
            if not process.alive:
                return  # what it was writing is nothing
            if isinstance(order, Write):
                assert former is not None
                pairs = zip(order.snapshot.tensors(), former.tensors(), strict=True)
                if not all(torch.equal(loaded(now), loaded(then)) for now, then in pairs):
                    self._changed.add((server, order.cut))
            answer = self._answer(server, order, former)
            if answer is not None:
                network.perform(process, process.core.on_disk(answer, network.time(process.name)))

        network.at(ends, end)

    def _answer(self, server: int, order: Order, image: Snapshot | None) -> Answer | None:
        folder = self.folders.setdefault(server, Folder())
        match order:
            case Write(cut):
                assert image is not None
                if server in self.full:
                    return SnapshotWritten(cut, 0, "", StorageError("no space left on device"))
                folder.images[cut] = image
                return SnapshotWritten(cut, image.size_bytes, "ab" * 32)
            case Complete(job, _, _, commit):
                is_changed = (server, commit.cut) in self._changed
                assert not is_changed, f"what cut {commit.cut} keeps was written to"
                if server in self.full:
                    return Completed(commit.cut, StorageError("no space left on device"))
                folder.manifests[commit.cut] = job, commit
                folder.tidy()
                return Completed(commit.cut)
            case Remove(cut):
                if cut not in folder.manifests:
                    folder.images.pop(cut, None)
                return None
            case FindCuts():
                cuts = tuple(self._complete(folder, order))
                held = [
                    {store.store: store.highest for store in folder.manifests[cut][1].stores} for cut in cuts
                ]
                versions = tuple(item.get(order.store, -1) + 1 for item in held if order.store)
                highest = max(folder.images, default=0)
                return FoundCuts(cuts, highest, order.for_whom, versions=versions)
            case Read(server, servers, cut, for_whom):
                return Loaded(copy_of(self._read(server, servers, cut)), for_whom)

    def _complete(self, folder: Folder, look: FindCuts) -> Iterator[int]:
        for cut, (job, commit) in sorted(folder.manifests.items()):
            is_ours = look.job in (None, job) and look.tag in ("", commit.tag)
            is_whole = len(commit.images) == look.servers or all(
                cut in self.folders[item].manifests for item in range(len(commit.images))
            )
            if is_ours and is_whole:
                yield cut

    def _read(self, server: int, servers: int, cut: int) -> Snapshot:
        manifests = [folder.manifests for folder in self.folders.values() if cut in folder.manifests]
        written_by = len(manifests[0][cut][1].images)
        if written_by == servers:
            return self.folders[server].images[cut]
        images = [self.folders[item].images[cut] for item in range(written_by)]
        return regroup(images, server, servers)
