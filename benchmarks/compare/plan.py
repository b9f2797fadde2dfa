"""The plan of a comparison, parsed from flags: that of ``kvps bench``, with a sweep, a network,
peers and plots."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.compare.networks.layout import Hosts, bytes_per_s, layout_of
from benchmarks.compare.networks.namespaces import demand_root
from benchmarks.compare.sweeps import SIZED, SWEEPS, Sweep
from benchmarks.compare.sweeps import SYSTEMS as COMPARED
from benchmarks.compare.systems import NETWORKED, chosen, interpreters_of, version_of
from kvps import config
from kvps.errors import ConfigError
from kvps.tools.bench import run as plan
from kvps.tools.bench.figures import Case
from kvps.tools.bench.run import FULL_REPEAT, USUAL_COUNT, USUAL_WORKLOADS, Plan, count
from kvps.tools.bench.systems import System
from kvps.tools.bench.workloads import FLOAT_BYTES

if TYPE_CHECKING:
    import argparse

USUAL_RATE = "400mbit"


@dataclass(frozen=True, slots=True)
class Comparison(Plan):
    """A comparison that can be run on this machine."""

    interpreters: Mapping[str, str]
    """Peer -> the interpreter that has it."""
    versions: Mapping[str, str]
    """Peer -> its version."""
    sweep: Sweep | None
    hosts: Hosts | None
    rate: str
    plot: Path | None


def plan_of(parsed: argparse.Namespace) -> Comparison:
    """Return the plan that flags describe.

    Raises:
        ConfigError: if they describe none, or it cannot be done here.
    """
    _demand_fitting(parsed)
    hosts = layout_of(parsed.network) if parsed.network else None
    bytes_per_s(parsed.rate or USUAL_RATE)
    sweep = _sweep(parsed.sweep) if parsed.sweep else None
    cases = _cases(parsed, sweep, hosts)
    rounds = count("--rounds", parsed.rounds)
    repeat = count("--repeat", parsed.repeat or FULL_REPEAT)
    json, plot = plan.file_of(parsed.json), _folder(parsed.plot)
    if hosts is not None:
        demand_root()
    interpreters = interpreters_of(vars(parsed))
    return Comparison(
        cases=cases,
        systems=_systems(parsed, interpreters, hosts),
        rounds=rounds,
        repeat=repeat,
        has_limits=not (parsed.no_limits or sweep or hosts),
        json=json,
        interpreters=interpreters,
        versions={peer: version_of(peer, python) for peer, python in interpreters.items()},
        sweep=sweep,
        hosts=hosts,
        rate=parsed.rate or USUAL_RATE,
        plot=plot,
    )


def _demand_fitting(parsed: argparse.Namespace) -> None:
    """Refuse flags that contradict each other.

    Raises:
        ConfigError: naming the two.
    """
    given = {name for name, value in vars(parsed).items() if value}
    for first, second, why in (
        ("sweep", "network", "measure one after the other"),
        ("network", "workers", "the layout has the numbers: 4x4 is 4 workers, 4 servers"),
        ("network", "servers", "the layout has the numbers: 4x4 is 4 workers, 4 servers"),
    ):
        if {first, second} <= given:
            raise ConfigError(f"--{first} and --{second} cannot be combined; {why}")
    for flag, owner in (("at", "sweep"), ("rate", "network")):
        if flag in given and owner not in given:
            raise ConfigError(f"--{flag} belongs to --{owner}, which is not given")
    if parsed.sweep in given:
        raise ConfigError(f"--sweep {parsed.sweep} and --{parsed.sweep} cannot be combined")
    if parsed.sweep in SIZED and "workloads" in given:
        raise ConfigError(f"--sweep {parsed.sweep} has its own workload; omit --workloads")


def _cases(parsed: argparse.Namespace, sweep: Sweep | None, hosts: Hosts | None) -> list[Case]:
    usual = USUAL_WORKLOADS[:1] if sweep or hosts else USUAL_WORKLOADS
    workers = hosts.workers if hosts else count("--workers", parsed.workers or USUAL_COUNT)
    servers = hosts.servers if hosts else count("--servers", parsed.servers or USUAL_COUNT)
    workloads = plan.workloads_of(parsed.workloads or usual)
    cases = [Case(workload, workers, servers) for workload in workloads]
    if sweep is None:
        return cases
    if len(cases) > 1:
        raise ConfigError(f"--sweep {sweep.name} takes one workload, got {len(cases)}")
    return sweep.cases(cases[0], _values(sweep, parsed.at or ()))


def _systems(
    parsed: argparse.Namespace, interpreters: Mapping[str, str], hosts: Hosts | None
) -> list[System]:
    names = parsed.systems or (COMPARED if parsed.sweep or hosts else None)
    systems = chosen(names, interpreters)
    for system in systems:
        if hosts is not None and system.name not in NETWORKED:
            raise ConfigError(f"--network measures {', '.join(NETWORKED)}, not {system.name!r}")
    return systems


def _sweep(name: str) -> Sweep:
    if name not in SWEEPS:
        raise ConfigError(f"--sweep={name!r}: use one of {', '.join(SWEEPS)}")
    return SWEEPS[name]


def _values(sweep: Sweep, texts: Sequence[str]) -> list[int]:
    """Return the values of ``--at``."""
    if sweep.name != "bytes":
        return [count("--at", text) for text in texts]
    values = [config.as_bytes("--at", text) for text in texts]
    for value in values:
        if value % FLOAT_BYTES:
            raise ConfigError(f"--at={value}: use a multiple of {FLOAT_BYTES}, the bytes of a number")
    return values


def _folder(text: str | None) -> Path | None:
    if not text:
        return None
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install matplotlib")
    path = Path(text)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--plot={text!r}: cannot make this folder: {error}") from error
    return path
