"""The systems that are measured beside those of ``kvps bench``: MXNet, Ray, and kvps without host
aggregation."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence

from kvps.errors import ConfigError
from kvps.tools.bench import systems
from kvps.tools.bench.systems import System

PEERS = ("mxnet", "ray")
"""Systems that run in an interpreter of their own."""
IMPORT_MAX_S = 60.0
_MORE = (
    System(
        "kvps apart",
        "kvps",
        "as kvps, but the workers of a host push separately (with --network)",
        env={"KVPS_HOST_AGGREGATION": "0"},
    ),
    System("mxnet", "mxnet", "MXNet's dist_sync: push, pull, sum"),
    System("mxnet sgd", "mxnet", "the same, with SGD and momentum 0.9 on the servers", rule="sgd"),
    System("ray", "ray", "Ray's actors: servers sum the gradients that workers put into the object store"),
)
SYSTEMS = {**systems.SYSTEMS, **{system.name: system for system in _MORE}}
NETWORKED = (
    *("kvps", "kvps no keys", "kvps apart", "kvps sgd", "kvps zero-copy"),
    *systems.COMPRESSED,
    "gloo",
)
"""Systems that run on several hosts."""
NAMED_ONLY = ("kvps apart", *systems.NAMED_ONLY)
"""Systems that are measured only if they are named: they mean something on slow networks only."""


def chosen(names: Sequence[str] | None, interpreters: Collection[str]) -> list[System]:
    """Return the systems to measure: those named, or all for which there is an interpreter.

    Args:
        names: the systems that the user asked for; None for all.
        interpreters: the peers for which there is an interpreter.

    Raises:
        ConfigError: if one that is named cannot be measured.
    """
    lacking = {
        system.name: f"give a Python that has it: --{system.kind} PATH/python (docs/benchmarks.md)"
        for system in SYSTEMS.values()
        if system.kind in PEERS and system.kind not in interpreters
    }
    for name in names or ():
        if name in lacking:
            raise ConfigError(f"system {name!r} cannot be measured: {lacking[name]}")
    return systems.chosen(names, SYSTEMS, {*NAMED_ONLY, *lacking})


def interpreters_of(flags: Mapping[str, str | None]) -> dict[str, str]:
    """Return an interpreter for each peer that has one: that of its flag, or this one."""
    interpreters: dict[str, str] = {}
    for peer in PEERS:
        python = flags[peer]
        if python is None and importlib.util.find_spec(peer) is not None:
            python = sys.executable
        if python is not None:
            interpreters[peer] = python
    return interpreters


def version_of(peer: str, python: str) -> str:
    """Return the version of a peer that an interpreter has.

    Raises:
        ConfigError: if it has none, or is no interpreter.
    """
    code = f"import {peer}; print({peer}.__version__)"
    try:
        ended = subprocess.run(
            [python, "-c", code],
            capture_output=True,
            text=True,
            timeout=IMPORT_MAX_S,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"--{peer}={python}: cannot run it: {error}") from error
    if ended.returncode:
        said = ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"]
        raise ConfigError(
            f"--{peer}={python}: it cannot import {peer}: {said[-1]}; docs/benchmarks.md explains how "
            "to make an environment that can"
        )
    return ended.stdout.strip().splitlines()[-1]
