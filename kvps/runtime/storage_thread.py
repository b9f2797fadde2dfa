"""The thread that carries out a server's storage orders, one after another.

Orders are carried out one after another. The thread yields to the serving thread: a checkpoint may take
longer, but rounds should not.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from typing import Any, cast

from kvps import __version__
from kvps.checkpoint.directory import CheckpointDirectory
from kvps.checkpoint.manifest import ImageFile, Manifest, StoreVersions, image_name
from kvps.core.effects import Disk
from kvps.core.limits import TABLE
from kvps.core.server.server import Server
from kvps.core.server.snapshot.storage import (
    Answer,
    AnyOrder,
    Complete,
    Completed,
    FindCuts,
    FoundCuts,
    Loaded,
    Read,
    Remove,
    SnapshotWritten,
    Write,
)
from kvps.errors import KvpsError, StorageError
from kvps.net.driver import Inbox, Listener

log = logging.getLogger("kvps")
NICE = 10
"""Niceness of the thread that writes."""
REST = 4.0
"""Seconds of rest after each second of writing: a round should not wait for the memory bus."""
END_MAX_S = 5.0
"""Seconds that the end of a server waits for a file that is being written."""


class StorageThread(Listener):
    """The disk of one server.

    Args:
        folder: where checkpoints lie.
        inbox: of the server's loop, which hears the answers.
        tagged_max: how many checkpoints with a tag are kept.
    """

    def __init__(
        self, folder: str, inbox: Inbox[Any], tagged_max: int = TABLE["tagged_checkpoints"].default
    ) -> None:
        self._tagged_max = tagged_max
        self._folder = folder
        self._inbox = inbox
        self._orders: queue.SimpleQueue[AnyOrder | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kvps checkpoints", daemon=True)
        self._thread.start()

    def order(self, effect: Disk) -> None:
        """Queue an order on files."""
        self._orders.put(cast("AnyOrder", effect.order))

    def close(self) -> None:
        """Carry out the orders that are queued, and end; an order that takes too long is abandoned."""
        self._orders.put(None)
        self._thread.join(END_MAX_S)

    def _run(self) -> None:
        # Of Linux, where a thread has a priority of its own; elsewhere that of the process stays.
        if hasattr(os, "gettid"):
            os.setpriority(os.PRIO_PROCESS, os.gettid(), NICE)
        while (order := self._orders.get()) is not None:
            try:
                answer = carry_out(self._folder, order, tagged_max=self._tagged_max)
            except Exception as error:  # such as no memory: the next order may be one that can be
                log.exception("carrying out %s failed", type(order).__name__)
                answer = refusal(order, StorageError(f"{type(order).__name__}: {error!r:.200}"))
            del order  # it may hold an image
            if answer is not None:
                self._inbox.put(Server.on_disk, answer)


def carry_out(
    folder: str, order: AnyOrder, rest_s: float = REST, tagged_max: int = TABLE["tagged_checkpoints"].default
) -> Answer | None:
    """Carry out an order; return its answer, or None."""
    try:
        return _carried_out(folder, order, rest_s, tagged_max)
    except KvpsError as error:
        return refusal(order, error)


def _carried_out(folder: str, order: AnyOrder, rest_s: float, tagged_max: int) -> Answer | None:
    began = time.monotonic()
    match order:
        case Write(cut, image):
            written = CheckpointDirectory(folder, image.server, rest_s).write(cut, image)
            log.debug(
                "wrote %d bytes of checkpoint %d in %.2f s", written.size, cut, time.monotonic() - began
            )
            return SnapshotWritten(cut, written.size, written.sha256)
        case Complete():
            shelf = CheckpointDirectory(folder, order.server, tagged_max=tagged_max)
            shelf.commit(manifest_of(order), order.commit.kept, order.is_resumed)
            return Completed(order.commit.cut)
        case Remove(cut, server):
            try:
                CheckpointDirectory(folder, server).drop(cut)
            except KvpsError as error:
                log.warning("%s", error)
            return None
        case FindCuts():
            shelf = CheckpointDirectory(folder, order.server)
            complete = shelf.complete(order.job, order.server, order.servers)
            found = [manifest for manifest in complete if order.tag in ("", manifest.tag)]
            cuts = tuple([manifest.cut for manifest in found])
            versions = tuple([_version(manifest, order.store) for manifest in found if order.store])
            return FoundCuts(cuts, shelf.highest(), order.for_whom, versions=versions)
        case Read():
            shelf = CheckpointDirectory(folder, order.server)
            image = shelf.load(shelf.manifest(order.cut), order.server, order.servers)
            log.info(
                "read %d bytes of checkpoint %d in %.2f s",
                image.size_bytes,
                order.cut,
                time.monotonic() - began,
            )
            return Loaded(image, order.for_whom)


def _version(manifest: Manifest, store: str) -> int:
    """Return one more than the highest version of a store in a cut; 0 for a cut without it."""
    held = manifest.stores.get(store)
    return 0 if held is None else held.highest + 1


def refusal(order: AnyOrder, error: KvpsError) -> Answer | None:
    """Return the answer to a failed order, or None."""
    match order:
        case Write(cut, _):
            return SnapshotWritten(cut, 0, "", error)
        case Complete():
            return Completed(order.commit.cut, error)
        case Remove():
            return None
        case FindCuts():
            return FoundCuts(for_whom=order.for_whom, error=error)
        case Read():
            return Loaded(None, order.for_whom, error)


def manifest_of(order: Complete) -> Manifest:
    """Return the manifest that completes a cut."""
    commit = order.commit
    servers = len(commit.images)
    return Manifest(
        cut=commit.cut,
        job=order.job,
        epoch=commit.epoch,
        workers=order.workers,
        version=__version__,
        images=tuple(
            ImageFile(image_name(server, servers), image.size, image.sha256)
            for server, image in enumerate(commit.images)
        ),
        stores={
            store.store: StoreVersions(store.begins, store.lowest, store.highest) for store in commit.stores
        },
        tag=commit.tag,
        written=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    )
