"""The parts that processes of several roles share: their address, how their threads wait, their end at a signal, and the
last line of their log."""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kvps import __version__, config
from kvps.core.effects import Exit
from kvps.core.membership_client import Identity
from kvps.errors import SchedulerLost
from kvps.net.driver import Inbox, Item
from kvps.net.locality import machine
from kvps.net.zap import Keys
from kvps.observe.place import Place
from kvps.observe.sampler import Sampler
from kvps.protocol.envelope import Role
from kvps.runtime.signals import handle

if TYPE_CHECKING:
    from kvps.observe.http import Dashboard

log = logging.getLogger("kvps")
RESOLVE_EVERY_S = 0.5


def let_threads_sleep() -> None:
    """Let the threads with which torch computes sleep between computations, unless the operator says otherwise.

    They otherwise spin for milliseconds after each computation. A server computes at each update, so this takes processors
    from the workers of its host. Call this before torch is loaded.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"} & os.environ.keys():
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"


def own_machine() -> int:
    """Return by which number others know that they are near; 0 where all payload goes in frames."""
    return 0 if config.transport() == "tcp" else machine()


def own_identity(role: Role, scheduler: str, keys: Keys | None) -> Identity:
    """Return the identity of this process as a member; what depends on its role is the caller's to add."""
    return Identity(
        role,
        scheduler,
        socket.gethostname(),
        os.getpid(),
        __version__,
        silence_max_s=config.silence_max_s(),
        machine=own_machine(),
        public_key="" if keys is None else keys.session.public,
    )


def own_host(scheduler: str, patience_s: float) -> str:
    """Return this machine's address on the way to the scheduler.

    Raises:
        SchedulerLost: if its name is not known, or there is no way, for ``patience_s``.
    """
    there = config.host_of(scheduler), config.port_of("--scheduler", scheduler)
    until = time.monotonic() + patience_s
    while True:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(there)  # of a datagram socket: nothing is sent
                found: str = probe.getsockname()[0]
                return found
            except OSError as error:
                if time.monotonic() >= until:
                    raise SchedulerLost(
                        f"cannot reach the scheduler at {scheduler} for {patience_s:g} s: {error}. "
                        "Check the name in --scheduler or KVPS_SCHEDULER, and start this process again"
                    ) from error
        time.sleep(RESOLVE_EVERY_S)


def report(who: str, ending: Exit, *, is_told: bool = False) -> int:
    """Say in the log why a process ends; return its exit code.

    Args:
        who: the process.
        ending: its exit code and the reason.
        is_told: it ends because others ended, who have said why.
    """
    level = logging.INFO if ending.code == 0 or is_told else logging.ERROR
    log.log(level, "%s ends: %s", who, ending.reason)
    return ending.code


@contextmanager
def on_stop(inbox: Inbox[Any], stop: Callable[[int], Item[Any]]) -> Iterator[None]:
    """Put what ``stop`` returns for the signal into the inbox at SIGTERM and SIGINT, while the block runs.

    A signal that was ignored before stays so.
    """

    def put(number: int, frame: object) -> None:
        inbox.put(stop(number))

    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [handle(signal_number, put) for signal_number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


@contextmanager
def serving_if_asked(
    place: Place | None, role: str, sampler: Sampler[Any], dashboard: Dashboard | None = None
) -> Iterator[str | None]:
    """Serve HTTP at ``place`` as long as the block runs, and yield the URL; without one, not even load a web server."""
    if place is None:
        yield None
        return
    from kvps.observe.http import serving

    with serving(place, role, sampler, dashboard) as server:
        yield place.url(server.server_port)
