"""The systems that are measured, one row of the table each, and how each pushes and pulls.

A system is measured where what it needs is there: MXNet and Ray where an interpreter has them.
"""

from __future__ import annotations

import subprocess
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from kvps.bench.rounds import CODECS
from kvps.errors import ConfigError

BASE = "gloo"
"""The system that all others are compared with."""
PEERS = ("mxnet", "ray")
"""What runs in an interpreter of its own."""
IMPORT_MAX_S = 60.0


@dataclass(frozen=True, slots=True)
class System:
    """One row of the table."""

    name: str
    kind: str
    """What it is a way to use: kvps, gloo, mxnet or ray."""
    what: str
    how: str = "copy"
    """Whether gradients and results are copied (``copy``) or used where they lie (``in-place``); or by
    which codec they are compressed, both ways."""
    rule: str = "sum"
    env: Mapping[str, str] = field(default_factory=dict)


_ALL = (
    System("kvps", "kvps", "pushpull of the sum, copied in and out"),
    System("kvps sgd", "kvps", "the same, with SGD and momentum 0.9 on the servers", rule="sgd"),
    System(
        "kvps zero-copy",
        "kvps",
        "push from kv.empty_like(keys), pull(keys, copy=False)",
        how="in-place",
    ),
    System("kvps tcp", "kvps", "as kvps, through sockets", env={"KVPS_TRANSPORT": "tcp"}),
    System(
        "kvps apart",
        "kvps",
        "as kvps, workers of one host push for themselves (with --network)",
        env={"KVPS_HOST_AGGREGATION": "0"},
    ),
    *[
        System(f"kvps {codec}", "kvps", f"as kvps, compressed by {codec} both ways", how=codec)
        for codec in CODECS
    ],
    System("gloo", "gloo", "all_reduce of 25 MiB buckets, copied in and out"),
    System("gloo in place", "gloo", "the same, gradients already in the buckets", how="in-place"),
    System("mxnet", "mxnet", "MXNet's dist_sync: push, pull, sum"),
    System("mxnet sgd", "mxnet", "the same, with SGD and momentum 0.9 on the servers", rule="sgd"),
    System("ray", "ray", "Ray's actors: servers sum what workers put into the object store"),
)
SYSTEMS = {one.name: one for one in _ALL}
COMPRESSED = tuple(f"kvps {codec}" for codec in CODECS)
NETWORKED = ("kvps", "kvps apart", "kvps sgd", "kvps zero-copy", *COMPRESSED, "gloo")
"""Those that run on several hosts."""
NAMED_ONLY = ("kvps apart", *COMPRESSED)
"""Those that are measured if they are named: they mean something on slow networks only."""


def chosen(names: Sequence[str] | None, interpreters: Collection[str]) -> list[System]:
    """Return the systems to measure: those named, or all that there are.

    Args:
        names: what the user asked for; None for all.
        interpreters: the peers for which there is an interpreter.

    Raises:
        ConfigError: if one that is named cannot be measured.
    """
    lacking = {one.name: _lack(one, interpreters) for one in _ALL}
    if names is None:
        usual = [one for one in _ALL if one.name not in NAMED_ONLY]
        return [one for one in usual if not lacking[one.name]]
    for name in names:
        if name not in SYSTEMS:
            raise ConfigError(f"no system {name!r}; use some of {', '.join(map(repr, SYSTEMS))}")
        if lacking[name]:
            raise ConfigError(f"system {name!r} cannot be measured: {lacking[name]}")
    return [SYSTEMS[name] for name in dict.fromkeys(names)]


def _lack(system: System, interpreters: Collection[str]) -> str:
    """Say why a system cannot be measured; empty if it can."""
    if system.kind in PEERS and system.kind not in interpreters:
        return f"say which Python has it: --{system.kind} PATH/python (docs/benchmarks.md)"
    return ""


def version_of(peer: str, python: str) -> str:
    """Return the version of a peer that an interpreter has.

    Raises:
        ConfigError: if it has none, or is no interpreter.
    """
    code = f"import {peer}; print({peer}.__version__)"
    try:
        asked = subprocess.run(
            [python, "-c", code],
            capture_output=True,
            text=True,
            timeout=IMPORT_MAX_S,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"--{peer}={python}: cannot run it: {error}") from error
    if asked.returncode:
        said = asked.stderr.strip().splitlines() or [f"exit code {asked.returncode}"]
        raise ConfigError(
            f"--{peer}={python}: it cannot import {peer}: {said[-1]}; docs/benchmarks.md tells how "
            "to make an environment that can"
        )
    return asked.stdout.strip().splitlines()[-1]
