"""Benchmarks by name, for ``python -m benchmarks.compare TABLE``: each has its peers in the same run."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from typing import NamedTuple


class Named(NamedTuple):
    """A table."""

    shows: str
    beside: str
    """What is measured in the same run; empty for nothing."""
    words: tuple[str, ...]
    """Behind the interpreter."""


def _script(name: str, *words: str) -> tuple[str, ...]:
    return (f"benchmarks/{name}.py", *words)


def _module(name: str, *words: str) -> tuple[str, ...]:
    return ("-m", f"benchmarks.{name}", *words)


_LAUNCHED = ("-m", "kvps.cli.launch", "-n", "1", "-s", "2", "--", sys.executable)
TABLES = {
    "servers": Named("a round by number of servers", "gloo", _module("compare", "--sweep", "servers")),
    "links": Named("a round on links of 400 Mbit/s, root", "gloo", _module("compare", "--network", "4x4")),
    "kills": Named("steps that count under kills", "torchrun, DDP, checkpoints", _module("kills")),
    "resize": Named("goodput of workers that come and go", "", _module("goodput")),
    "recovery": Named("a server's SIGKILL to the next round", "", _module("recovery")),
    "publish": Named(
        "a version published, and read", "a copy of memory, gloo", (*_LAUNCHED, *_script("publish"))
    ),
    "click": Named("a recommender's step", "DDP on gloo, TorchRec", _script("click_model")),
    "latency": Named("push, pull and pushpull by size", "bare ZeroMQ, gloo", _module("latency")),
    "local": Named("local steps on slow links, root", "a gradient per step", _script("local_steps", "links")),
    "sharding": Named("memory of a worker of a sharded model", "DistributedOptimizer", _script("sharding")),
    "slow": Named("one worker slow", "DDP on gloo", _script("stragglers")),
    "codecs": Named("accuracy and bytes of each codec", "none", ("examples/compressed_digits.py",)),
    "overlap": Named("communication behind computation, root", "DDP on gloo", _script("overlap")),
    "predictions": Named("predicted and measured steps, root", "", _module("predictions")),
}


def listing() -> str:
    """Return a line for each table."""
    lines = [
        f"  {name:<12} {table.shows}" + (f"; beside {table.beside}" if table.beside else "")
        for name, table in TABLES.items()
    ]
    return "\n".join(lines)


def run(name: str, flags: Sequence[str]) -> int:
    """Run a table; return its exit code."""
    return subprocess.run([sys.executable, *TABLES[name].words, *flags]).returncode
