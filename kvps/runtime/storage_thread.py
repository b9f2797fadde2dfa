"""Carries a server's orders for its disk out, in a thread of its own, and brings back what came of them.

Orders are carried out one after another. The thread gives way to the one that serves: a checkpoint
may take longer, and rounds should not.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from typing import Any

from kvps import __version__
from kvps.checkpoint.manifest import Holding, ImageFile, Manifest, image_name, now_in_words
from kvps.checkpoint.shelf import Shelf
from kvps.core.disk import (
    Answer,
    Complete,
    Completed,
    Found,
    Loaded,
    Look,
    Order,
    Read,
    Remove,
    Write,
    Written,
)
from kvps.core.effects import Disk
from kvps.errors import KvpsError, StorageError
from kvps.net.driver import Inbox, Silent

log = logging.getLogger("kvps")
NICE = 10
"""By how much the thread that writes stands back."""
REST = 4.0
"""For how many seconds it rests for each in which it writes: a round should not wait for the memory."""
END_MAX_S = 5.0
"""How long the end of a server waits for what is being written."""


class Archive(Silent):
    """The disk of one server.

    Args:
        folder: where checkpoints lie.
        inbox: of the server's loop, which hears the answers.
    """

    def __init__(self, folder: str, inbox: Inbox[Any]) -> None:
        self._folder = folder
        self._inbox = inbox
        self._orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kvps checkpoints", daemon=True)
        self._thread.start()

    def order(self, effect: Disk) -> None:
        """Something is to be done with files."""
        self._orders.put(effect.order)

    def close(self) -> None:
        """Carry out what was ordered, and end; what takes too long is left as it is."""
        self._orders.put(None)
        self._thread.join(END_MAX_S)

    def _run(self) -> None:
        # Of Linux, where a thread has a priority of its own; elsewhere that of the process stays.
        if hasattr(os, "gettid"):
            os.setpriority(os.PRIO_PROCESS, os.gettid(), NICE)
        while (order := self._orders.get()) is not None:
            answer = carry_out(self._folder, order)
            del order  # it may hold an image
            if answer is not None:
                self._inbox.put(_bring(answer))


def _bring(answer: Answer) -> Any:
    return lambda core, now: core.on_disk(answer, now)


def carry_out(folder: str, order: Order) -> Answer | None:
    """Do what one order says; return its answer, None for one that has none."""
    began = time.monotonic()
    match order:
        case Write(cut, image):
            try:
                written = Shelf(folder, image.server, REST).write(cut, image)
            except KvpsError as error:
                return Written(cut, 0, "", error)
            log.debug(
                "wrote %d octets of checkpoint %d in %.2f s",
                *(written.size, cut, time.monotonic() - began),
            )
            return Written(cut, written.size, written.sha256)
        case Complete():
            cut = order.commit.cut
            try:
                Shelf(folder, order.server).commit(manifest_of(order), order.commit.kept)
            except KvpsError as error:
                return Completed(cut, error)
            return Completed(cut)
        case Remove(cut, server):
            try:
                Shelf(folder, server).drop(cut)
            except KvpsError as error:
                log.warning("%s", error)
            return None
        case Look():
            return _look(folder, order)
        case Read():
            try:
                shelf = Shelf(folder, order.server)
                image = shelf.load(shelf.manifest(order.cut), order.server, order.servers)
            except KvpsError as error:
                return Loaded(None, order.for_whom, error)
            log.info(
                "read %d octets of checkpoint %d in %.2f s",
                *(image.size_bytes, order.cut, time.monotonic() - began),
            )
            return Loaded(image, order.for_whom)


def _look(folder: str, order: Look) -> Found:
    shelf = Shelf(folder, order.server)
    try:
        complete = shelf.complete(order.job, order.server, order.servers)
        cuts = tuple([one.cut for one in complete if order.tag in ("", one.tag)])
        return Found(cuts, shelf.highest(), order.for_whom)
    except StorageError as error:
        return Found(for_whom=order.for_whom, error=error)


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
            ImageFile(image_name(server, servers), one.size, one.sha256)
            for server, one in enumerate(commit.images)
        ),
        stores={one.store: Holding(one.begins, one.lowest, one.highest) for one in commit.stores},
        tag=commit.tag,
        written=now_in_words(),
    )
