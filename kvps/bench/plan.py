"""The plan of a benchmark, parsed from flags: what is measured, how often, and where figures go.

Whatever is wrong with the flags, or missing on this machine, is found here, before the first
process starts: a benchmark may take an hour.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvps import config
from kvps.bench.network_layout import Hosts, bytes_per_s, layout_of
from kvps.bench.networks.namespaces import demand_root
from kvps.bench.report.figures import Case
from kvps.bench.report.sweeps import SIZED, SWEEPS, Sweep
from kvps.bench.report.sweeps import SYSTEMS as COMPARED
from kvps.bench.systems import NETWORKED, PEERS, System, chosen, version_of
from kvps.bench.workloads import FLOAT_BYTES, shapes_of
from kvps.errors import ConfigError

if TYPE_CHECKING:
    import argparse

USUAL_WORKLOADS = ("resnet50", "big", "small")
USUAL_COUNT = "2"
USUAL_RATE = "400mbit"


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be done."""

    cases: Sequence[Case]
    systems: Sequence[System]
    rounds: int
    repeat: int
    interpreters: Mapping[str, str]
    """Of peers that run in one of their own."""
    versions: Mapping[str, str]
    """Of those peers."""
    sweep: Sweep | None
    hosts: Hosts | None
    rate: str
    has_limits: bool
    json: Path | None
    plot: Path | None


def plan_of(parsed: argparse.Namespace) -> Plan:
    """Return the plan that flags describe.

    Raises:
        ConfigError: if they describe none, or it cannot be done here.
    """
    _demand_fitting(parsed)
    hosts = layout_of(parsed.network) if parsed.network else None
    bytes_per_s(parsed.rate or USUAL_RATE)
    sweep = _sweep(parsed.sweep) if parsed.sweep else None
    cases = _cases(parsed, sweep, hosts)
    rounds = _count("--rounds", parsed.rounds)
    repeat = _count("--repeat", parsed.repeat)
    json, plot = _file(parsed.json), _folder(parsed.plot)
    if hosts is not None:
        demand_root()
    interpreters = _interpreters(parsed)
    versions = {peer: version_of(peer, python) for peer, python in interpreters.items()}
    return Plan(
        cases=cases,
        systems=_systems(parsed, interpreters, hosts),
        rounds=rounds,
        repeat=repeat,
        interpreters=interpreters,
        versions=versions,
        sweep=sweep,
        hosts=hosts,
        rate=parsed.rate or USUAL_RATE,
        has_limits=not (parsed.no_limits or sweep or hosts),
        json=json,
        plot=plot,
    )


def _demand_fitting(parsed: argparse.Namespace) -> None:
    """Refuse flags that contradict each other.

    Raises:
        ConfigError: naming the two.
    """
    given = {name for name, value in vars(parsed).items() if value}
    for one, other, why in (
        ("sweep", "network", "measure the one, then the other"),
        ("network", "workers", "the layout says how many: 4x4 is 4 workers, 4 servers"),
        ("network", "servers", "the layout says how many: 4x4 is 4 workers, 4 servers"),
    ):
        if {one, other} <= given:
            raise ConfigError(f"--{one} and --{other} do not go together; {why}")
    for one, other in (("at", "sweep"), ("rate", "network")):
        if one in given and other not in given:
            raise ConfigError(f"--{one} belongs to --{other}, which is not given")
    if parsed.sweep in given:
        raise ConfigError(f"--sweep {parsed.sweep} and --{parsed.sweep} do not go together")
    if parsed.sweep in SIZED and "workloads" in given:
        raise ConfigError(f"--sweep {parsed.sweep} brings its own workload; leave out --workloads")


def _cases(parsed: argparse.Namespace, sweep: Sweep | None, hosts: Hosts | None) -> list[Case]:
    usual = USUAL_WORKLOADS[:1] if sweep or hosts else USUAL_WORKLOADS
    workloads = list(dict.fromkeys(parsed.workloads or usual))
    for workload in workloads:
        try:
            shapes_of(workload)
        except ValueError as error:
            raise ConfigError(f"--workloads: {error}") from error
    workers = hosts.workers if hosts else _count("--workers", parsed.workers or USUAL_COUNT)
    servers = hosts.servers if hosts else _count("--servers", parsed.servers or USUAL_COUNT)
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
    found = chosen(names, interpreters)
    for system in found:
        if hosts is not None and system.name not in NETWORKED:
            raise ConfigError(f"--network measures {', '.join(NETWORKED)}, not {system.name!r}")
    return found


def _sweep(given: str) -> Sweep:
    if given not in SWEEPS:
        raise ConfigError(f"--sweep={given!r}: use one of {', '.join(SWEEPS)}")
    return SWEEPS[given]


def _values(sweep: Sweep, given: Sequence[str]) -> list[int]:
    """Return the values of ``--at``."""
    if sweep.name != "bytes":
        return [_count("--at", one) for one in given]
    values = [config.as_bytes("--at", one) for one in given]
    for value in values:
        if value % FLOAT_BYTES:
            raise ConfigError(
                f"--at={value}: use a multiple of {FLOAT_BYTES}, the bytes of a number"
            )
    return values


def _count(name: str, given: str) -> int:
    count = config.as_whole(name, given)
    if count < 1:
        raise ConfigError(f"{name}={given}: use 1 or more")
    return count


def _interpreters(parsed: argparse.Namespace) -> dict[str, str]:
    """Return an interpreter for each peer that has one: that of its flag, or this one."""
    found = {}
    for peer in PEERS:
        given = getattr(parsed, peer)
        if given is None and importlib.util.find_spec(peer) is not None:
            given = sys.executable
        if given is not None:
            found[peer] = given
    return found


def _file(given: str | None) -> Path | None:
    path = Path(given) if given else None
    if path is not None and (path.is_dir() or not path.resolve().parent.is_dir()):
        raise ConfigError(f"--json={given!r}: name a file in a folder that exists")
    return path


def _folder(given: str | None) -> Path | None:
    if not given:
        return None
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install 'kvps[bench]'")
    path = Path(given)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--plot={given!r}: cannot make this folder: {error}") from error
    return path
