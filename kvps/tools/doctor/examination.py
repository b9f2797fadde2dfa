"""Measurements for ``kvps doctor``: names, connections, keys, answers, bandwidth, memory and
limits of this process.

Nothing is decided here, but where to stop: what cannot be reached is not measured.
:mod:`kvps.tools.doctor.diagnosis` says what the figures mean.
"""

from __future__ import annotations

import os
import resource
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from kvps import config
from kvps.core.membership_client import ASK_DOCTOR
from kvps.errors import ConfigError, KvpsError, ProtocolError, Unauthorized
from kvps.net.shm.segment import Segment, Unshared
from kvps.net.zap import CURVE, NULL, Keys, greeting_of
from kvps.protocol.envelope import Answer, Message, Packet
from kvps.protocol.membership import PING_BYTES_MAX, Look, Ping, Pong, Seen
from kvps.tools.doctor.diagnosis import FileLimits, Measurements

CONNECT_MAX_S = 3.0
PINGS = 7
SIZES = (4 << 10, 16 << 10, 64 << 10, PING_BYTES_MAX)
ENOUGH_S = 0.1
"""A transfer that takes so long says enough of the bandwidth; a larger one would be asked for
again on its way."""


class AskScheduler(Protocol):
    """Asks the scheduler, as :meth:`kvps.inquiry.Inquirer.ask` does."""

    def __call__(
        self, request: Message, answer: type[Answer], limit_s: float, payload: tuple[memoryview, ...] = ()
    ) -> Packet:
        """Return the answer, of the class ``answer``."""


def of_this_process(bind: str) -> Measurements:
    """Return what can be measured without a scheduler.

    Args:
        bind: an address that a process here is to listen at; empty for none.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = Measurements(
        "",
        limits=FileLimits(len(os.listdir("/proc/self/fd")) - 1, soft, hard),
        shared_memory_error=_shared_memory_error(),
        transport=config.transport(),
    )
    if bind:
        error, holder = _bound(bind)
        found = replace(found, bind=bind, bind_error=error, bind_holder=holder)
    return found


def of_address(found: Measurements, scheduler: str) -> Measurements:
    """Add what a name and a TCP connection say of the scheduler."""
    found = replace(found, scheduler=scheduler)
    host, port = config.host_of(scheduler), config.port_of("--scheduler", scheduler)
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        return replace(found, resolve_error=error.strerror or str(error))
    addresses = tuple(dict.fromkeys([str(info[4][0]) for info in infos]))
    found = replace(found, addresses=addresses)
    began = time.perf_counter()
    try:
        socket.create_connection((host, port), CONNECT_MAX_S).close()
    except ConnectionRefusedError:
        return replace(found, connect_error="refused")
    except TimeoutError:
        return replace(found, connect_error=f"no answer for {CONNECT_MAX_S:g} s")
    except OSError as error:
        return replace(found, connect_error=error.strerror or str(error))
    connect_s = time.perf_counter() - began
    greeting = greeting_of(scheduler, NULL) or greeting_of(scheduler, CURVE)
    return replace(found, connect_s=connect_s, mechanism=greeting.decode(errors="replace"))


def of_scheduler(
    found: Measurements, ask: AskScheduler, limit_s: float, clock: Callable[[], float] = time.time
) -> Measurements:
    """Add what the scheduler answers: the job, round trips, bandwidth and its clock."""
    try:
        answer = ask(Look(), Seen, limit_s)
    except (Unauthorized, ConfigError) as error:
        return replace(found, refusal=str(error))
    except KvpsError as error:
        return replace(found, look_error=str(error).removesuffix(ASK_DOCTOR))
    assert isinstance(answer.message, Seen)
    found = replace(found, seen=answer.message)
    with suppress(KvpsError):  # an old scheduler does not know PING
        found = _round_trips(found, ask, limit_s, clock)
        found = _transfers(found, ask, limit_s)
    return found


def _round_trips(
    found: Measurements, ask: AskScheduler, limit_s: float, clock: Callable[[], float]
) -> Measurements:
    times: list[float] = []
    ahead: list[tuple[float, float]] = []
    for _ in range(PINGS):
        began, sent_at = time.perf_counter(), clock()
        answer = ask(Ping(), Pong, limit_s)
        seconds = time.perf_counter() - began
        times.append(seconds)
        assert isinstance(answer.message, Pong)
        ahead.append((seconds, answer.message.clock_s - (sent_at + seconds / 2)))
    # Of the shortest round trip: whatever delayed the others is not the clock's.
    return replace(found, round_trips_s=tuple(times), clock_ahead_s=min(ahead)[1])


def _transfers(found: Measurements, ask: AskScheduler, limit_s: float) -> Measurements:
    transfers: list[tuple[int, float]] = []
    for size in SIZES:
        payload = (memoryview(os.urandom(size)),)  # a link that compresses would flatter zeros
        began = time.perf_counter()
        ask(Ping(size), Pong, limit_s, payload)
        transfers.append((size, time.perf_counter() - began))
        if transfers[-1][1] > ENOUGH_S:
            break
    return replace(found, transfers=tuple(transfers))


def _shared_memory_error() -> str:
    try:
        segment = Segment()
    except Unshared as error:
        return str(error)
    segment.close()
    return ""


def _bound(bind: str) -> tuple[str, str]:
    """Return why a process cannot listen at an address, and the process that does; empty texts if it can."""
    host, port = config.host_of(bind), config.port_of("--bind", bind)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as libzmq does
        try:
            listener.bind(("" if host == "*" else host, port))
            listener.listen()
        except OSError as error:
            text = error.strerror or str(error)
            return text, _holder(port)
    return "", ""


def _holder(port: int) -> str:
    """Return the process that listens at a port of this host, if it can be seen."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == "0A" and int(words[1].rpartition(":")[2], 16) == port:
                    inodes.add(f"socket:[{words[9]}]")
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        with suppress(OSError):
            for fd in (folder / "fd").iterdir():
                with suppress(OSError):
                    if os.readlink(fd) in inodes:
                        name = (folder / "comm").read_text().strip()
                        return f"process {folder.name} ({name})"
    return ""


def with_keys(found: Measurements, load: Callable[[], Keys | None]) -> tuple[Measurements, Keys | None]:
    """Add whether there are keys; return them, too."""
    try:
        keys = load()
    except (ConfigError, ProtocolError) as error:
        return replace(found, keys_error=str(error), has_keys=True), None
    return replace(found, has_keys=keys is not None), keys
