"""``kvps bench``: measures kvps beside its peers, and prints how they compare."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from kvps.cli import flags
from kvps.cli.reaper import Reaper
from kvps.runtime.signals import stopped_by_signals

NAME = "kvps bench"
WHAT = """\
Measures kvps beside torch's gloo, and beside MXNet and Ray where there are interpreters that have
them. All push and pull the same arrays, in turns: A, B, C, A, B, C. Every number of every result is
checked, outside of the timing."""
MORE = f"""\
examples:
  kvps bench                                      the whole table: 2 workers, 2 servers
  kvps bench --workloads small --rounds 2 --repeat 1   a minute's look
  kvps bench --mxnet mx/bin/python --json bench.json --plot plots
  kvps bench --systems kvps "kvps sgd" gloo --workloads transformer
  kvps bench --sweep bytes --plot plots           one array of 1 KiB to 1 GiB
  kvps bench --sweep workers --at 1 2 4 --workloads small
  kvps bench --network 4x4 --rate 400mbit         4 workers and 4 servers, each behind its own link
  kvps bench --network 8@1x4 --systems kvps gloo  8 workers on one host (root, Linux)
  kvps bench --network 2x2 --rate 100mbit --systems kvps "kvps 2bit"   what compression saves

workloads: resnet50 (161 arrays, 102 MB), big (one array of 64 MiB), small (1,000 of 1 KiB),
  transformer (148 arrays, 498 MB), bytes:N (one array of N bytes), keys:N (N arrays of 64 numbers)
systems: kvps, 'kvps sgd', 'kvps zero-copy', 'kvps tcp', gloo, 'gloo in place', mxnet, 'mxnet sgd',
  ray; by name only 'kvps apart', and compressed both ways 'kvps fp16', 'kvps int8', 'kvps 2bit',
  'kvps 1bit'; docs/benchmarks.md tells what each does, and how to make an environment for MXNet
sweeps: workers (1 to 8), servers (1 to 4), bytes (1 KiB to 1 GiB), keys (1 to 100,000)

A time is that of one push and pull of all arrays, as the slowest worker sees it: the median of the
rounds of a trial, then of the trials. Times of one call compare with each other; machines drift, so
times of two days do not. Leave the machine alone meanwhile.

{flags.EXIT_CODES}
environment, where the flag is not given:
  KVPS_LOG_LEVEL
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    return flags.run(NAME, argv, _main)


def _parser() -> flags.Parser:
    parser = flags.Parser(NAME, WHAT, MORE)
    parser.usage = "%(prog)s [flags]"
    add = parser.add_argument
    add("--workloads", metavar="W", nargs="+", help="what to push (resnet50 big small)")
    add("--systems", metavar="S", nargs="+", help="which rows to measure (all that there are)")
    add("--workers", metavar="N", help="how many workers (2)")
    add("--servers", metavar="S", help="how many servers (2)")
    add("--rounds", metavar="R", default="10", help="measured rounds of one trial (10)")
    add("--repeat", metavar="K", default="3", help="trials of each system, in turns (3)")
    add("--mxnet", metavar="PYTHON", help="an interpreter that has MXNet (this one, if it has)")
    add("--ray", metavar="PYTHON", help="an interpreter that has Ray (this one, if it has)")
    add("--sweep", metavar="AXIS", help="let workers, servers, bytes or keys grow")
    add("--at", metavar="VALUE", nargs="+", help="at these values of the sweep only")
    add("--network", metavar="WxS", help="on hosts of their own; W@HxS: the workers on H hosts")
    add("--rate", metavar="RATE", help="of each host's link, both ways (400mbit)")
    add("--no-limits", action="store_true", help="do not measure what the machine can do at best")
    add("--json", metavar="FILE", help="write all figures to FILE")
    add("--plot", metavar="DIR", help="draw them as PNG into DIR; needs matplotlib")
    return parser


def _main(argv: Sequence[str]) -> int:
    parsed = _parser().parse_args(argv)
    flags.start_log(NAME, parsed)
    leash = Reaper()  # before anything has threads
    with stopped_by_signals():
        try:
            # These load rich and numpy, which --help does not wait for.
            from kvps.bench.plan import plan_of
            from kvps.bench.run import perform

            perform(plan_of(parsed), leash)
        finally:
            leash.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
