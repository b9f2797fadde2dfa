"""The plan of a benchmark, parsed from flags: cases, systems, repetitions, and the file of figures.

Whatever is wrong with the flags, or missing on this machine, is found here, before the first
process starts: a benchmark may take an hour.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvps import config
from kvps.errors import ConfigError
from kvps.tools.bench.figures import Case
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
