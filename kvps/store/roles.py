"""How a process runs as scheduler or as server: a core, its sockets, and signals.

The commands ``kvps-scheduler`` and ``kvps-server`` call these, and so does a job script that
``DMLC_ROLE`` makes one of them.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvps import __version__
from kvps.core.effects import Copied, Exit, Finish
from kvps.core.member import Identity
from kvps.core.scheduler import Scheduler, Settings
from kvps.errors import ConfigError, KvpsError, StorageError
from kvps.messages import Role
from kvps.net.driver import Inbox, drive
from kvps.net.zeromq import ZmqTransport

if TYPE_CHECKING:
    from collections.abc import Iterator

log = logging.getLogger("kvps")
EXIT_CONFIG = 78
STATE_FILE = "scheduler.state"


class StateFile:
    """Keeps the scheduler's state where a restart finds it."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._path = self._folder / STATE_FILE

    def read(self) -> bytes | None:
        """Return the state that is there.

        Raises:
            StorageError: if it cannot be read.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            return self._path.read_bytes() if self._path.exists() else None
        except OSError as error:
            raise StorageError(f"cannot read --state {self._folder}: {error}") from error

    def save(self, state: bytes) -> None:
        """Put ``state`` in the place of the old one, whole or not at all."""
        aside = self._path.with_suffix(".tmp")
        with open(aside, "wb") as file:
            file.write(state)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(self._path)
        folder = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def remove(self) -> None:
        """The job is over: a restart begins another."""
        self._path.unlink(missing_ok=True)

    def finish(self, effect: Finish) -> None:
        """The scheduler has no calls."""

    def copied(self, effect: Copied) -> None:
        """The scheduler has no calls."""


@contextmanager
def on_stop(inbox: Inbox[Any], stop: Callable[[Any, float], Any]) -> Iterator[None]:
    """Put ``stop`` into the inbox at SIGTERM and SIGINT, for as long as the block runs."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(one, lambda *_: inbox.put(stop)) for one in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def run_scheduler(
    workers: int,
    servers: int,
    bind: str,
    *,
    keep_alive: bool = False,
    state: str | None = None,
    on_ready: Callable[[str], None] | None = None,
) -> int:
    """Run a scheduler until its job is over; return its exit code."""
    try:
        kept = StateFile(state) if state is not None else None
        settings = Settings(workers, servers, keep_alive=keep_alive, persist=kept is not None)
        transport = ZmqTransport(bind, watch=True)
        snapshot = kept.read() if kept is not None else None
        now = time.monotonic()
        if snapshot is not None:
            core = Scheduler.restore(settings, snapshot, now)
        else:
            core = Scheduler(settings, secrets.token_bytes(16), now)
    except KvpsError as error:
        log.error("%s", error)  # the text says all
        return EXIT_CONFIG if isinstance(error, ConfigError) else 1
    log.info("scheduler of %d workers and %d servers at %s", workers, servers, transport.endpoint)
    if on_ready is not None:
        on_ready(transport.endpoint)
    inbox: Inbox[Scheduler] = Inbox(transport)
    with on_stop(inbox, lambda core, now: core.on_stop(now)):
        wish = drive(core, transport, inbox, kept)
    transport.close(1.0)
    if kept is not None:
        kept.remove()
    return _report("scheduler", wish)


def run_server(
    scheduler: str,
    bind: str = "tcp://127.0.0.1:0",
    *,
    rank: int | None = None,
    memory_limit: int | None = None,
) -> int:
    """Run a server until its job is over; return its exit code."""
    from kvps.core.server import Server

    try:
        transport = ZmqTransport(bind)
    except KvpsError as error:
        log.error("%s", error)  # the text says all
        return EXIT_CONFIG
    identity = Identity(
        Role.SERVER,
        scheduler,
        socket.gethostname(),
        os.getpid(),
        __version__,
        rank,
        endpoint=transport.endpoint,
    )
    core = Server(identity, time.monotonic(), memory_limit)
    inbox: Inbox[Any] = Inbox(transport)
    inbox.put(lambda core, now: core.start(now))
    with on_stop(inbox, _leave_and_exit):
        wish = drive(core, transport, inbox)
    transport.close(0.5)
    return _report(f"server {core.member.rank}", wish)


def _leave_and_exit(core: Any, now: float) -> Iterator[object]:
    yield from core.member.leave(True, 0, True, "asked to stop")
    yield Exit(0, "asked to stop")


def _report(who: str, wish: Exit) -> int:
    level = logging.INFO if wish.code == 0 else logging.ERROR
    log.log(level, "%s ends: %s", who, wish.reason)
    return wish.code
