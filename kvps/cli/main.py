"""``kvps``: the commands for people, each in its own file.

Tools for kvps clusters. The processes of a cluster have their own commands.

commands:
{commands}
examples:
  kvps demo
  kvps status
  kvps top
  kvps doctor --scheduler tcp://10.0.0.1:9091
  kvps trace --seconds 10
  kvps bench
  kvps bench --help
  kvps checkpoint list /ckpt

to start a cluster:
  kvps-launch      the whole cluster, on this machine
  kvps-scheduler, kvps-server, kvps-worker   a single process each, on any machine

{exit_codes}
environment, where the flag is not given:
  KVPS_LOG_LEVEL, KVPS_LOG_FORMAT
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from kvps import annexes
from kvps.cli import flags

NAME = "kvps"
# ``kvps NAME`` is main() of the module that kvps.annexes names, else of kvps/cli/NAME.py.
COMMANDS = {
    "demo": "train on this machine, kill a worker and a server, and see that nothing is lost",
    "status": "show the members of a job, their states, and the ranks that open rounds wait for",
    "top": "show a job live: members, rounds and bytes per second, late workers",
    "doctor": "find out why a process does not reach its cluster, or is slow, and what to do",
    "trace": "record a timeline of all processes, and say what bounds a step",
    "replay": "run a process's core over its record, and compare what it comes to",
    "follow": "write each published version of a model as a safetensors file",
    "keygen": "make the keys of a cluster, rotate the key of a role, retire old keys",
    "evict": "end a live member of a job, so that another process can take its rank",
    "drain": "have other processes take the seats of a server, so that its process can end",
    "scale": "change the number of server processes while the job runs",
    "bench": "compare the speed of kvps and torch's gloo on this machine",
    "checkpoint": "list and verify the checkpoints of servers; export a model",
}


@flags.command(NAME)
def main(argv: Sequence[str]) -> int:
    """Run the command."""
    if not argv or argv[0] not in COMMANDS:
        _refuse(argv)
    code: int = module_of(argv[0]).main(argv[1:])
    return code


def module_of(command: str) -> Any:
    """Return the module of a command, one of :data:`COMMANDS`: only its file is loaded."""
    if command in annexes.MODULES:
        return annexes.load(command)
    return importlib.import_module(f"kvps.cli.{command}")


def _refuse(argv: Sequence[str]) -> NoReturn:
    """Print the help, or the error of a line that does not begin with a command."""
    parser = flags.Parser(
        NAME, __doc__, commands="".join([f"  {name:<10} {what}\n" for name, what in COMMANDS.items()])
    )
    parser.usage = "%(prog)s COMMAND [flags]"
    parser.add_argument("command", metavar="COMMAND", choices=COMMANDS, help="the command to run")
    parsed = parser.parse_args(argv)
    parser.error(f"{argv[0]} comes before the command: write kvps {parsed.command} {argv[0]} ...")


if __name__ == "__main__":
    sys.exit(main())
