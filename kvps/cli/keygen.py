"""``kvps keygen``: makes the keys of a cluster, gives a role another one, and retires old ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvps.cli import flags
from kvps.core.keys import ROLES
from kvps.runtime.keys import PUBLIC, generate, retire, rotate, write

NAME = "kvps keygen"
WHAT = """\
Makes a key for each role, in a folder: ROLE.key, which is secret, and public/ROLE.pub. A process that is
started with --keys DIR needs its own ROLE.key there, and public/scheduler.pub; the scheduler needs
scheduler.key and all of public/."""
MORE = f"""\
examples:
  kvps keygen keys
  kvps-scheduler --workers 2 --servers 2 --bind tcp://0.0.0.0:9091 --keys keys
  kvps status --scheduler tcp://10.0.0.1:9091 --keys keys

another key for a role, while the cluster runs:
  kvps keygen keys --rotate worker    worker.key is new; both keys open the door
  kvps keygen keys --retire           once all start with the new one: the old opens it no more
The scheduler reads public/ when it starts, and at SIGHUP. Members that run are not affected: each has a key of
its own. kvps evict ends one.

roles:
  scheduler   is the cluster: whoever has this key can pose as it
  server      takes the seat of a server, and is given a share of the model
  worker      takes the seat of a worker: reads and changes the model
  look        sees who is there (kvps status)
  admin       as look, and ends members (kvps evict)

{flags.EXIT_CODES}
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    return flags.run(NAME, argv, _main)


def _main(argv: Sequence[str]) -> int:
    parser = flags.Parser(NAME, WHAT, MORE)
    parser.add_argument(
        "folder", metavar="DIR", help="the folder of keys; it is made if it is not there"
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--rotate",
        metavar="ROLE",
        choices=ROLES,
        help="give this role another key, beside the old one",
    )
    what.add_argument(
        "--retire", action="store_true", help=f"remove from {PUBLIC}/ what no key here belongs to"
    )
    parsed = parser.parse_args(argv)
    folder = Path(parsed.folder)
    if parsed.rotate is not None:
        files, verb = rotate(folder, parsed.rotate), "wrote"
    elif parsed.retire:
        files, verb = retire(folder), "removed"
    else:
        files, verb = write(folder, generate()), "wrote"
    for path in files:
        print(f"{verb} {path}")
    return 0
