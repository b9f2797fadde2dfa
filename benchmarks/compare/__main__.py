"""The command ``python -m benchmarks.compare``: ``kvps bench`` with more systems, sweeps, networks
and plots.

Extends kvps bench: compares with MXNet and Ray if there are interpreters that have them, sweeps one
quantity, and measures on links of a set rate. Run it in the root of a clone.

examples:
  {name} --mxnet mx/bin/python --json bench.json --plot plots
  {name} --sweep bytes --plot plots    one array of 1 KiB to 1 GiB
  {name} --sweep workers --at 1 2 4 --workloads small
  {name} --network 4x4 --rate 400mbit  4 workers and 4 servers, each behind its
                                  own link (root, Linux)
  {name} --network 8@1x4 --systems kvps gloo    8 workers on one host
  {name} --network 2x2 --rate 100mbit --systems kvps "kvps 2bit"
  {name} kills --seconds 60      a table by its name, with the flags of its benchmark

tables, each with its peers in the same run:
{tables}

systems: those of kvps bench, and mxnet, 'mxnet sgd', ray; 'kvps apart' only if --systems names it.
  docs/benchmarks.md explains each, and how to make an environment for MXNet
sweeps: workers (1 to 8), servers (1 to 4), bytes (1 KiB to 1 GiB), keys (1 to 100,000)

{times}

{exit_codes}
environment, where the flag is not given:
  KVPS_LOG_LEVEL
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks.compare import named
from kvps.cli import flags
from kvps.tools.bench import command as bench

NAME = "python -m benchmarks.compare"


def parser() -> flags.Parser:
    """Return the parser of its flags."""
    found = flags.Parser(NAME, __doc__, times=bench.TIMES, tables=named.listing())
    found.usage = "%(prog)s [flags]"
    bench.add_flags(found)
    add = found.add_argument
    add("--mxnet", metavar="PYTHON", help="an interpreter with MXNet (this interpreter, if it has MXNet)")
    add("--ray", metavar="PYTHON", help="an interpreter with Ray (this interpreter, if it has Ray)")
    add("--sweep", metavar="AXIS", help="the quantity to sweep: workers, servers, bytes or keys")
    add("--at", metavar="VALUE", nargs="+", help="only these values of the sweep")
    add("--network", metavar="WxS", help="each process on its own host; W@HxS: the workers on H hosts")
    add("--rate", metavar="RATE", help="rate of each host's link, both ways (400mbit)")
    add("--plot", metavar="DIR", help="draw the figures as PNG into DIR; needs matplotlib")
    return found


@flags.command(NAME)
def main(argv: Sequence[str]) -> int:
    """Run the command."""
    if argv and argv[0] in named.TABLES:
        return named.run(argv[0], argv[1:])
    parsed = parser().parse_args(argv)
    flags.start_log(NAME, parsed)
    with bench.measuring() as reaper:
        # These load rich and numpy, which --help does not wait for.
        from benchmarks.compare.plan import plan_of
        from benchmarks.compare.run import perform

        perform(plan_of(parsed), reaper)
    return 0


if __name__ == "__main__":
    sys.exit(main())
