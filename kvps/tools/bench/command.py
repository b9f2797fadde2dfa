"""``kvps bench``: measures kvps beside torch's gloo, and prints how they compare.

Compares kvps with torch's gloo on this machine. Both push and pull the same arrays, in turns: A, B,
A, B. Every number of every result is checked, outside of the timing.

examples:
  kvps bench                    a table in a minute: kvps beside gloo, 2 workers, 2 servers
  kvps bench --full             all systems, three trials each, and the limits of this machine: ten minutes
  kvps bench --systems kvps "kvps sgd" gloo --workloads transformer
  kvps bench --systems kvps gloo --workloads keys:10000 --workers 4 --json bench.json

workloads: resnet50 (161 arrays, 102 MB), big (one array of 64 MiB), small (1,000 of 1 KiB),
  transformer (148 arrays, 498 MB), bytes:N (one array of N bytes), keys:N (N arrays of 64 numbers)
systems: kvps, 'kvps sgd', 'kvps zero-copy', 'kvps tcp', gloo, 'gloo in place'; only if --systems names
  them, the cost of keys: 'kvps no keys', 'kvps tcp keys'; and compressed both ways: 'kvps fp16',
  'kvps int8', 'kvps 2bit', 'kvps 1bit'

{times}

In a clone of the repository, {compare} also measures MXNet and Ray, sweeps,
and links of a set rate, and draws plots.

{exit_codes}
environment, where the flag is not given:
  KVPS_LOG_LEVEL, KVPS_LOG_FORMAT
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kvps.cli import flags
from kvps.errors import ConfigError
from kvps.launchers.reaper import Reaper
from kvps.runtime.member_process import stopped_by_signals

NAME = "kvps bench"
COMPARE = "python -m benchmarks.compare"
"""The command of the repository that measures more."""
TIMES = """\
A time is that of a push and pull of all arrays, as the slowest worker sees it: the median of the rounds
of a trial, then of the trials. Compare times of the same call only, because the speed of a machine
changes from day to day. Run nothing else on the machine during a measurement."""
MOVED = ("--mxnet", "--ray", "--sweep", "--at", "--network", "--rate", "--plot")
"""Flags that :data:`COMPARE` has."""
MOVED_SYSTEMS = ("kvps apart", "mxnet", "mxnet sgd", "ray")
"""Systems that only :data:`COMPARE` measures."""


def parser() -> flags.Parser:
    """Return the parser of its flags."""
    found = flags.Parser(NAME, __doc__, times=TIMES, compare=COMPARE)
    found.usage = "%(prog)s [flags]"
    found.add_argument(
        "--full",
        action="store_true",
        help="measure all systems, each in three trials, and the limits of the machine",
    )
    add_flags(found)
    for flag in MOVED:
        found.add_argument(flag, nargs="*", help=argparse.SUPPRESS)
    return found


def add_flags(parser: flags.Parser) -> None:
    """Add the flags that :data:`COMPARE` has, too."""
    add = parser.add_argument
    add("--workloads", metavar="W", nargs="+", help="the arrays to push (resnet50 big small)")
    add("--systems", metavar="S", nargs="+", help="the rows of the table to measure (kvps gloo; see below)")
    add("--workers", metavar="N", help="number of workers (2)")
    add("--servers", metavar="S", help="number of servers (2)")
    add("--rounds", metavar="R", default="10", help="measured rounds per trial (10)")
    add("--repeat", metavar="K", help="trials of each system, in turns (1; with --full 3)")
    add("--no-limits", action="store_true", help="do not measure the limits of the machine")
    add("--json", metavar="FILE", help="write all figures to FILE")


def demand_own(parsed: argparse.Namespace, argv: Sequence[str]) -> None:
    """Refuse what only :data:`COMPARE` does.

    Raises:
        ConfigError: with the command that does it.
    """
    moved = [flag for flag in MOVED if vars(parsed)[flag.removeprefix("--")] is not None]
    moved += [repr(name) for name in parsed.systems or () if name in MOVED_SYSTEMS]
    if moved:
        raise ConfigError(
            f"{moved[0]} is not part of kvps bench. In a clone of the repository "
            f"(docs/benchmarks.md) run: {COMPARE} {shlex.join(argv)}"
        )


@flags.command(NAME)
def main(argv: Sequence[str]) -> int:
    """Run the command."""
    parsed = parser().parse_args(argv)
    demand_own(parsed, argv)
    flags.start_log(NAME, parsed)
    with measuring() as reaper:
        # These load rich and numpy, which --help does not wait for.
        from kvps.tools.bench.run import perform, plan_of

        perform(plan_of(parsed), reaper)
    return 0


@contextmanager
def measuring() -> Iterator[Reaper]:
    """Yield the reaper of the processes that are measured, which end with this one, however it ends."""
    reaper = Reaper()  # before anything has threads
    with stopped_by_signals():
        try:
            yield reaper
        finally:
            reaper.close()


if __name__ == "__main__":
    sys.exit(main())
