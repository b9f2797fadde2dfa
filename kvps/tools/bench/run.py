"""A plan carried out: systems measured in turns, then a table and a document.

Upper bounds of this machine: bytes copied, bytes summed, bytes through loopback TCP.

Each figure is the best of some attempts, since a limit is what nothing else held up, in GB of
payload per second: a copy of 1 GB counts as 1, though it reads and writes, and so does a sum of
1 GB and 1 GB. All blocks are larger than caches.

The plan of a benchmark, parsed from flags: cases, systems, repetitions, and the file of figures.

Whatever is wrong with the flags, or missing on this machine, is found here, before the first
process starts: a benchmark may take an hour.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from kvps import config
from kvps.errors import ConfigError, StorageError
from kvps.launchers.reaper import Reaper
from kvps.tools.bench import figures, local
from kvps.tools.bench.figures import Case, Measurement, TrialTimes
from kvps.tools.bench.systems import System, chosen
from kvps.tools.bench.workloads import shapes_of

USUAL_WORKLOADS = ("resnet50", "big", "small")
USUAL_COUNT = "2"
QUICK_SYSTEMS = ("kvps", "gloo")
QUICK_REPEAT, FULL_REPEAT = "1", "3"


@dataclass(frozen=True, slots=True)
class Plan:
    """A benchmark that can be run on this machine."""

    cases: Sequence[Case]
    systems: Sequence[System]
    rounds: int
    repeat: int
    has_limits: bool
    json: Path | None


def plan_of(parsed: argparse.Namespace) -> Plan:
    """Return the plan that flags describe.

    Raises:
        ConfigError: if they describe none, or it cannot be done here.
    """
    workers, servers = (
        count(f"--{name}", vars(parsed)[name] or USUAL_COUNT) for name in ("workers", "servers")
    )
    workloads = workloads_of(parsed.workloads or USUAL_WORKLOADS)
    return Plan(
        cases=[Case(workload, workers, servers) for workload in workloads],
        systems=chosen(parsed.systems or (None if parsed.full else QUICK_SYSTEMS)),
        rounds=count("--rounds", parsed.rounds),
        repeat=count("--repeat", parsed.repeat or (FULL_REPEAT if parsed.full else QUICK_REPEAT)),
        has_limits=parsed.full and not parsed.no_limits,
        json=file_of(parsed.json),
    )


def workloads_of(names: Sequence[str]) -> list[str]:
    """Return the workloads that a user named, each once.

    Raises:
        ConfigError: for an unknown name.
    """
    workloads = list(dict.fromkeys(names))
    for workload in workloads:
        try:
            shapes_of(workload)
        except ValueError as error:
            raise ConfigError(f"--workloads: {error}") from error
    return workloads


def count(name: str, text: str) -> int:
    """Return the value of a flag that is a number over 0.

    Raises:
        ConfigError: if it is something else.
    """
    number = config.as_whole(name, text)
    if number < 1:
        raise ConfigError(f"{name}={text}: use 1 or more")
    return number


def file_of(text: str | None) -> Path | None:
    """Return the file of ``--json``; None if there is none.

    Raises:
        ConfigError: if it cannot be written.
    """
    path = Path(text) if text else None
    if path is not None and (path.is_dir() or not path.resolve().parent.is_dir()):
        raise ConfigError(f"--json={text!r}: name a file in an existing directory")
    return path


WIDTH = 120
"""Columns of a table that goes into a file."""
SAY_EVERY_S = 15.0
"""How often a line says how far it is, where no terminal shows a bar."""
REFRESH_PER_S = 1
"""Updates of the bar in a second: it shares the cores with the measured systems."""


def perform(plan: Plan, reaper: Reaper) -> None:
    """Measure, print and write.

    Raises:
        KvpsError: if a system fails.
    """
    console = console_of_stdout()
    machine = figures.described()
    console.print(figures.headline(machine), soft_wrap=True)
    limit = limits_of_machine() if plan.has_limits else {}
    rows = rows_of(plan, lambda system, case: local.measure(system, case, plan.rounds, reaper))
    case = plan.cases[0]
    console.print(caption(plan, sizes(case)), soft_wrap=True)
    console.print(figures.table_of(rows))
    if limit:
        console.print(figures.table_of_limits(limit))
    else:
        console.print("All systems, in turns, and the limits of this machine: kvps bench --full")
    if plan.json is not None:
        settings: dict[str, object] = {"rounds": plan.rounds, "repeat": plan.repeat}
        write(plan.json, figures.document(rows, machine, settings, limit))


def console_of_stdout() -> Console:
    """Return the console that tables are printed to."""
    return Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)


def rows_of(plan: Plan, measure: Callable[[System, Case], TrialTimes]) -> list[Measurement]:
    """Measure all systems in all cases, in turns, beside a bar that shows how far that is."""
    by_name = {system.name: system for system in plan.systems}
    screen = Console(stderr=True)
    begin = said_at = time.monotonic()
    done, total = 0, len(plan.cases) * plan.repeat * len(by_name)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed} of {task.total} trials{task.fields[left]}"),
        console=screen,
        transient=True,
        disable=not screen.is_terminal,
        refresh_per_second=REFRESH_PER_S,
    ) as progress:
        task = progress.add_task("", total=total, left="")

        def trial_of(case: Case, name: str) -> TrialTimes:
            nonlocal done, said_at
            progress.update(task, description=f"{case.workload}: {name}")
            trial = measure(by_name[name], case)
            done, now = done + 1, time.monotonic()
            left = time_left((now - begin) / done * (total - done))
            progress.update(task, advance=1, left=left)
            if not screen.is_terminal and done < total and now >= said_at + SAY_EVERY_S:
                said_at = now
                screen.print(f"{done} of {total} trials{left}", soft_wrap=True, highlight=False)
            return trial

        return figures.alternate(plan.cases, list(by_name), plan.repeat, trial_of)


def time_left(seconds: float) -> str:
    """Return how long the rest takes, for the end of a line; empty for nothing.

    Example:
        >>> time_left(200), time_left(7), time_left(0)
        (', about 3 min left', ', about 10 s left', '')
    """
    if seconds <= 0:
        return ""
    minutes = round(seconds / 60)
    what = f"{minutes} min" if minutes >= 2 else f"{10 * math.ceil(seconds / 10)} s"
    return f", about {what} left"


def caption(plan: Plan, what: str) -> str:
    """Return the line above a table of times."""
    trials = f", then of trials in turns ({plan.repeat})" if plan.repeat > 1 else ""
    return (
        f"{what}; ms of a push and pull of all arrays: median of {plan.rounds} rounds{trials}; "
        "ratios below 1 beat gloo"
    )


def sizes(case: Case, grown: str = "") -> str:
    """Return how many workers and servers there are, but for the quantity that grows."""
    counts = [("workers", case.workers), ("servers", case.servers)]
    return ", ".join(
        f"{number} {name.removesuffix('s') if number == 1 else name}"
        for name, number in counts
        if name != grown
    )


def write(path: Path, document: dict[str, object]) -> None:
    """Write all figures.

    Raises:
        StorageError: if that fails.
    """
    try:
        path.write_text(json.dumps(document, indent=2) + "\n")
    except OSError as error:
        raise StorageError(f"cannot write --json {path}: {error}") from error


BLOCK_BYTES = 128 << 20
TCP_BYTES = 512 << 20
FRAME_BYTES = 1 << 20
ATTEMPTS = 5
SEED = 1


def limits_of_machine() -> dict[str, float]:
    """Return each limit by its name, in GB per second."""
    cores = len(os.sched_getaffinity(0))
    limits = {}
    for name, work in (("copy", _copy), ("add", _add)):
        alone = [work(BLOCK_BYTES)]
        limits[f"{name}, one core"] = _best(partial(_together, alone, BLOCK_BYTES))
        works = [work(BLOCK_BYTES // cores) for _ in range(cores)]
        limits[f"{name}, all {cores} cores"] = _best(partial(_together, works, BLOCK_BYTES))
    limits["loopback TCP, one connection"] = _best(lambda: _tcp(1, both_ways=False))
    limits["loopback TCP, 4 connections both ways"] = _best(lambda: _tcp(4, both_ways=True))
    return limits


def _best(attempt: Callable[[], float]) -> float:
    return max(attempt() for _ in range(ATTEMPTS))


def _together(works: Sequence[Callable[[], object]], count_bytes: int) -> float:
    """Return the GB per second that threads do together, outside of the interpreter lock."""
    gate = threading.Barrier(len(works) + 1)

    def run(work: Callable[[], object]) -> None:
        gate.wait()
        work()
        gate.wait()

    started = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in started:
        thread.start()
    gate.wait()
    began = time.perf_counter()
    gate.wait()
    took_s = time.perf_counter() - began
    for thread in started:
        thread.join()
    return count_bytes / took_s / 1e9


def _copy(count_bytes: int) -> Callable[[], object]:
    source, target = _random(count_bytes), _random(count_bytes)
    return lambda: np.copyto(target, source)


def _add(count_bytes: int) -> Callable[[], object]:
    addend, other, target = (_random(count_bytes) for _ in range(3))
    return lambda: np.add(addend, other, out=target)


def _random(count_bytes: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """Return random numbers, in memory that has been written to: zeros may lie nowhere."""
    row = np.empty(count_bytes // 4, np.float32)
    np.random.default_rng(SEED).random(out=row, dtype=np.float32)
    return row


def _tcp(connections: int, *, both_ways: bool) -> float:
    """Return how many GB per second all connections carry together, in all directions."""
    frame = _random(FRAME_BYTES).tobytes()
    frames = TCP_BYTES // FRAME_BYTES // connections // (2 if both_ways else 1)
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        works: list[Callable[[], object]] = []
        for _ in range(connections):
            near = stack.enter_context(socket.create_connection(server.getsockname()))
            far = stack.enter_context(server.accept()[0])
            for sender, receiver in ((near, far), (far, near)) if both_ways else ((near, far),):
                works.append(partial(_send, sender, frame, frames))
                works.append(partial(_receive, receiver, frames * FRAME_BYTES))
        return _together(works, TCP_BYTES)


def _send(sender: socket.socket, frame: bytes, count: int) -> None:
    for _ in range(count):
        sender.sendall(frame)


def _receive(receiver: socket.socket, count_bytes: int) -> None:
    buffer = bytearray(FRAME_BYTES)
    while count_bytes:
        count_bytes -= receiver.recv_into(buffer)
