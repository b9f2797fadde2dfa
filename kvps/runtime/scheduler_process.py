"""The scheduler's process, and what the processes of all roles share.

The command ``kvps-scheduler`` calls :func:`run_scheduler`, and so does a job script that
``DMLC_ROLE`` makes the scheduler. What a process does to run as a server, which needs torch, is
in :mod:`kvps.runtime.server_process`.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

from kvps import __version__, annexes, config
from kvps.checkpoint import atomic_file
from kvps.core.effects import Exit, Finish
from kvps.core.limits import Limits
from kvps.core.liveness import DROP_GRACE_S, SILENCE_MAX_S
from kvps.core.scheduler.handover import SERVERS, Suspect
from kvps.core.scheduler.job import CONCLUDED
from kvps.core.scheduler.scheduler import ProcessInfo, Scheduler
from kvps.core.scheduler.seat import GOES_ON, REBUILDS, REPLACE_MAX_S, SEATS, Settings
from kvps.errors import ConfigError, KvpsError, StorageError
from kvps.net import descriptors
from kvps.net.driver import Inbox, Listener, drive
from kvps.net.zap import Keys
from kvps.net.zeromq import ZmqTransport
from kvps.observe.document import state_of
from kvps.observe.place import Place
from kvps.observe.sampler import Sampler, network_values
from kvps.protocol.envelope import Role
from kvps.runtime.member_process import on_stop, report, serving_if_asked
from kvps.runtime.suspicion import Suspicions

log = logging.getLogger("kvps")
STATE_FILE = "scheduler.state"
Tell = Callable[[str, object], None]
"""Told an event and its value, as :class:`kvps.launchers.lifecycle.Launch` reads them."""
_EVENTS = {
    CONCLUDED: "checkpoint",
    SEATS: "seats",
    SERVERS: "servers",
    GOES_ON: "goes-on",
    REBUILDS: "rebuilds",
}
THIS_PROCESS = ProcessInfo(__version__, time.time)
"""How often a name is looked up that is not known: its container may not be up yet."""


class StateStorage(Protocol):
    """Where the state of a scheduler is kept."""

    def read(self) -> bytes | None:
        """Return the state that is there; None if none is."""

    def save(self, state: bytes) -> None:
        """Put ``state`` in the place of the old one, whole or not at all."""

    def remove(self) -> None:
        """The job is over: a restart begins another."""

    def close(self) -> None:
        """Let others have it."""


class StateFile:
    """Keeps the scheduler's state where a restart finds it, and others from its folder."""

    def __init__(self, folder: str) -> None:
        """Take ``folder`` for this process, until :meth:`close` or its end, however that comes.

        Raises:
            ConfigError: if another process has it: two schedulers would overwrite each other's state.
            StorageError: if it cannot be made or opened.
        """
        self._folder = Path(folder)
        self._path = self._folder / STATE_FILE
        self._failure = ""
        """Why the last state is not there; empty if it is."""
        try:
            self._folder.mkdir(0o700, parents=True, exist_ok=True)
            self._lock = os.open(self._folder, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise StorageError(f"cannot use --state {self._folder}: {error}") from error
        try:
            # On the folder itself: there is no file that a kill could leave behind.
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = _holder(self._lock)
            os.close(self._lock)
            raise ConfigError(
                f"--state {self._folder} is in use by {holder}: a job has one scheduler. "
                "End that scheduler first, or choose another directory for another job"
            ) from error

    def close(self) -> None:
        """Let others have the folder."""
        os.close(self._lock)

    def read(self) -> bytes | None:
        """Return the state that is there.

        Raises:
            ConfigError: if another user owns it or may change it: it decides which processes are
            in the job.
            StorageError: if it cannot be read.
        """
        try:
            if not self._path.exists():
                return None
            with open(os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
                status = os.fstat(file.fileno())
                state = file.read()
        except OSError as error:
            raise StorageError(f"cannot read --state {self._folder}: {error}") from error
        if status.st_uid not in (os.geteuid(), 0) or status.st_mode & 0o022:
            raise ConfigError(
                f"{self._path} is user {status.st_uid}'s with mode {status.st_mode & 0o7777:04o}, and any "
                "user that can change it decides which processes are in the job: use a directory of your "
                "own (chmod 700), or remove that file"
            )
        return state

    def save(self, state: bytes) -> None:
        """Put ``state`` in the place of the old one, whole or not at all.

        A disk that is full or fails does not end a job that does not need it: only a restart would.
        The log says so when it begins and when it is over; each later state is tried again.
        """
        aside = self._path.with_suffix(".tmp")
        try:
            aside.unlink(missing_ok=True)  # left by a scheduler that was killed as it wrote
            atomic_file.put(self._path, lambda sink: sink.write(state), aside)
        except OSError as error:
            self._tell(f"{error.strerror or error}")
        else:
            self._tell("")

    def _tell(self, failure: str) -> None:
        if failure and failure != self._failure:
            log.error(
                "cannot save the scheduler's state (%s): %s. The job continues, and the earlier state "
                "is kept. But a restarted scheduler would not know the changes since then, "
                "and the job would have to start over. Free space there: the next save "
                "includes every change",
                self._path,
                failure,
            )
        elif self._failure and not failure:
            log.warning("the scheduler's state is saved again (%s)", self._path)
        self._failure = failure

    def remove(self) -> None:
        """The job is over: a restart begins another."""
        self._path.unlink(missing_ok=True)


def _holder(lock: int) -> str:
    """Return the holder of the lock on the file that is open as ``lock``, as far as the kernel tells."""
    with suppress(OSError):
        inode = os.fstat(lock).st_ino
        for line in Path("/proc/locks").read_text().splitlines():
            words = line.split()  # 1: FLOCK ADVISORY WRITE 4711 08:01:1234 0 EOF
            if words[1] == "FLOCK" and words[5].endswith(f":{inode}") and words[4] != "0":
                return f"process {words[4]}"  # 0 is one of another container
    return "another process"


def run_scheduler(
    workers: int,
    servers: int,
    bind: str,
    *,
    keep_alive: bool = False,
    state: str | StateStorage | None = None,
    insecure: bool = False,
    silence_max_s: float = SILENCE_MAX_S,
    drop_grace_s: float = DROP_GRACE_S,
    replace_max_s: float = REPLACE_MAX_S,
    keys: Keys | None = None,
    keys_again: Callable[[], Keys | None] | None = None,
    http: Place | None = None,
    tell: Tell = lambda event, value: None,
    is_launched: bool = False,
    limits: Limits | None = None,
    replicas: int = 0,
    most_workers: int = 0,
) -> int:
    """Run a scheduler until its job is over; return its exit code.

    Args:
        workers: how many the job has.
        servers: how many the job has.
        bind: where to listen.
        keep_alive: begin another job when a job is over.
        state: the directory of the state that a restart needs, or another storage of it, which is
            closed at the end.
        insecure: other machines may reach ``bind``.
        silence_max_s: seconds of silence after which a member is lost.
        drop_grace_s: seconds without a new connection after which a member whose connection broke is lost.
        replace_max_s: seconds for which a job with no worker left waits for the replacement of a lost one.
        keys: its own keys, and the public keys of processes that may connect; None admits any process.
        keys_again: reads the keys again, at SIGHUP.
        http: where to serve the dashboard and metrics; None for nowhere.
        tell: called with an event and its value: "scheduler" and its address when it listens; "dashboard"
            and its URL, before that; "seats" and their number, each time it changes until all are taken;
            "goes-on" and 1 when all workers that are here go on without a lost one, 0 when not; "checkpoint"
            and the number of the last one, which SIGUSR2 asks for, 0 if nothing was to be kept; "servers"
            and how many processes are to hold them, when that changes; "ended" and the reason for the end of
            the job.
        is_launched: ``tell`` reaches kvps-launch: seats are told, and the reason for the end is not logged.
        limits: the named limits; None for those of KVPS_LIMITS.
        replicas: how many standbys each server has, 0 or 1.
        most_workers: workers may be added until there are so many; 0 if none may.

    Raises:
        ConfigError: if that cannot be, the port or ``state`` is another's, or there are too few file
            descriptors.
        StorageError: if ``state`` cannot be read.
    """
    config.demand_loopback(bind, insecure or keys is not None)
    most = max(workers, most_workers)
    need = descriptors.of_scheduler(most, servers * (1 + max(replicas, 0))) + descriptors.SPARE
    descriptors.demand(f"the scheduler of {most} workers and {servers} servers", need)
    descriptors.make_room(2 * need)  # of a connection that broke, its successor may come before its end
    settings = Settings(
        workers,
        servers,
        silence_max_s,
        drop_grace_s,
        keep_alive=keep_alive,
        replace_max_s=replace_max_s,
        persist=state is not None,
        tells_seats=is_launched,
        has_keys=keys is not None,
        limits=limits or config.limits(),
        replicas=replicas,
        most_workers=most_workers,
    )
    storage = StateFile(state) if isinstance(state, str) else state
    with nullcontext() if storage is None else closing(storage) as kept:
        listener = _Listener(kept, tell)
        ending = _run_scheduler(settings, bind, listener, keys, keys_again, http)
    tell("ended", ending.reason)
    return report("scheduler", ending, is_told=is_launched)


class _Listener(Listener):
    """Keeps the scheduler's state, and tells what the launcher of this process waits to hear."""

    def __init__(self, kept: StateStorage | None, tell: Tell) -> None:
        self.kept, self.tell = kept, tell
        self.inbox: Inbox[Scheduler] | None = None
        self._suspicions = Suspicions()

    def save(self, state: bytes) -> None:
        if self.kept is not None:
            self.kept.save(state)

    def finish(self, effect: Finish) -> None:
        if isinstance(effect.value, Suspect):
            assert self.inbox is not None
            self._suspicions.look_into(effect.value, self.inbox)
        elif effect.ticket in _EVENTS:
            self.tell(_EVENTS[effect.ticket], effect.value)


def _run_scheduler(
    settings: Settings,
    bind: str,
    listener: _Listener,
    keys: Keys | None,
    keys_again: Callable[[], Keys | None] | None,
    http: Place | None,
) -> Exit:
    transport = ZmqTransport(
        bind, watch=True, checksums=config.checksums(), role=Role.SCHEDULER, keys=keys, limits=settings.limits
    )
    try:
        snapshot = listener.kept.read() if listener.kept is not None else None
        now = time.monotonic()
        job = secrets.token_bytes(16)
        header = {
            "role": "scheduler",
            "now": now,
            "settings": asdict(settings),
            "software": THIS_PROCESS.software,
            "job": job.hex(),
            "state": (snapshot or b"").hex(),
        }
        lenses = annexes.load("lenses")
        record = lenses.recorder(header)
        if snapshot:  # an empty one says that the job was over
            core = Scheduler.restore(settings, snapshot, now, THIS_PROCESS)
            transport.trust(core.job.seats.sessions())  # before the first of them comes back
        else:
            core = Scheduler(settings, job, now, THIS_PROCESS)
    except KvpsError:
        transport.close(0.0)
        raise
    inbox: Inbox[Scheduler] = Inbox(transport)
    listener.inbox = inbox
    again = (
        nullcontext()
        if keys is None or keys_again is None
        else _at(signal.SIGHUP, inbox, lambda core, now: _open_again(transport, keys_again))
    )
    dashboard = annexes.load("dashboard").Dashboard()
    timeline = lenses.Timeline(transport, config.text("KVPS_TIMELINE"), record)
    sampler = Sampler(
        inbox,
        state_of,
        lambda core: core.job.counts,
        lambda: network_values(transport.refused),
        also=Scheduler.on_measure,
        document=dashboard.add,
    )
    last = _at(signal.SIGUSR2, inbox, Scheduler.on_conclude)
    with (
        serving_if_asked(http, "scheduler", sampler, dashboard) as url,
        again,
        last,
        on_stop(lambda number: inbox.put(Scheduler.on_stop)),
        lenses.dumping_at_signal(inbox, record),
    ):
        log.info(  # from here on it may get signals
            "scheduler of %s workers and %d servers at %s",
            settings.workers_range,
            settings.servers,
            transport.endpoint,
        )
        if url is not None:
            listener.tell("dashboard", url)
        listener.tell("scheduler", transport.endpoint)
        ending = drive(core, transport, inbox, listener, lens=timeline.lens)
        timeline.close()
        if record is not None:
            record.close(core)
    transport.close(1.0)
    if listener.kept is not None:
        listener.kept.remove()
    return ending


@contextmanager
def _at(number: int, inbox: Inbox[Scheduler], door: Callable[[Scheduler, float], None]) -> Iterator[None]:
    """Put ``door`` into the inbox at a signal, for as long as the block runs."""
    before = signal.signal(number, lambda *_: inbox.put(door))
    try:
        yield
    finally:
        signal.signal(number, before)


def _open_again(transport: ZmqTransport, keys_again: Callable[[], Keys | None]) -> None:
    """Let the door be opened by the keys of roles that are there now; sessions go on."""
    try:
        keys = keys_again()
    except ConfigError as error:
        log.error("the keys are unchanged: %s", error)
    else:
        if keys is not None:
            transport.open_by(keys.opens)
            log.warning("the scheduler now accepts %d keys of roles", len(keys.opens))
