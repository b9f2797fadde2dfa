"""The parts that processes of several roles share: their address, how their threads wait, their end at a
signal, and the last line of their log.

A signal becomes an exception, raised wherever the command is, so that it cleans up. Python drops what is
raised in some places: a destructor, a callback of the garbage collector, an import lock. An exception that
came there is raised again a moment later.
"""

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
from kvps.net.locality import machine
from kvps.net.zap import Keys
from kvps.observe.place import Place
from kvps.observe.sampler import Sampler
from kvps.protocol.envelope import Role

if TYPE_CHECKING:
    from kvps.observe.http import Dashboard
import sys
from types import FrameType
from typing import NoReturn, TypeAlias

log = logging.getLogger("kvps")
RESOLVE_EVERY_S = 0.5
AGAIN_S = 0.05
NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
Handler: TypeAlias = Callable[[int, FrameType | None], object] | int | None


def let_threads_sleep() -> None:
    """Let the threads with which torch computes sleep between computations, unless the operator says
    otherwise.

    They otherwise spin for milliseconds after each computation. A server computes at each update, so this
    takes processors from the workers of its host. Call this before torch is loaded.
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
def on_stop(stop: Callable[[int], None]) -> Iterator[None]:
    """Call ``stop`` with the signal at SIGTERM and SIGINT, while the block runs.

    A signal that was ignored before stays so.
    """

    def put(number: int, frame: object) -> None:
        stop(number)

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
    """Serve HTTP at ``place`` as long as the block runs, and yield the URL; without one, not even load a web
    server."""
    if place is None:
        yield None
        return
    from kvps.observe.http import serving

    with serving(place, role, sampler, dashboard) as server:
        yield place.url(server.server_port)


def handle(number: int, handler: Handler) -> Handler:
    """Install a handler, unless the process was started with the signal ignored; return the one before.

    nohup, and ``trap '' INT`` in a shell, start a process so: the signal is not meant for it.
    """
    before = signal.getsignal(number)
    if before is not signal.SIG_IGN:
        signal.signal(number, handler)
    return before


class Stopped(SystemExit):
    """A signal came; the exit code is 128 and its number."""


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Within the block, the first signal of ``NUMBERS`` raises :class:`Stopped`, and later ones nothing.

    One that was ignored before stays so.

    Call it in the main thread.
    """
    was_dropped = sys.unraisablehook

    def on_dropped(dropped: sys.UnraisableHookArgs) -> None:
        if not isinstance(dropped.exc_value, Stopped):
            was_dropped(dropped)
            return
        code = dropped.exc_value.code
        signal.signal(signal.SIGALRM, lambda *_: _stop(code))
        signal.setitimer(signal.ITIMER_REAL, AGAIN_S)  # not here: it would be dropped again

    def on_signal(number: int, frame: object) -> NoReturn:
        for stop_signal in NUMBERS:
            signal.signal(stop_signal, signal.SIG_IGN)
        _stop(128 + number)

    before = {number: handle(number, on_signal) for number in NUMBERS}
    sys.unraisablehook = on_dropped
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        sys.unraisablehook = was_dropped
        for to_handle, handler in before.items():
            signal.signal(to_handle, handler)


def _stop(code: object) -> NoReturn:
    raise Stopped(code)
