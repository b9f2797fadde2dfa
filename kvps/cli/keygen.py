"""``kvps keygen``: makes the keys of a cluster, rotates the key of a role, and retires old keys.

Makes a key for each role, in a directory: ROLE.key, which is secret, and public/ROLE.pub. A process that is
started with --keys DIR needs its own ROLE.key there, and public/scheduler.pub; a server also needs
public/reader.pub, if there are readers; the scheduler needs scheduler.key and all of public/.

examples:
  kvps keygen keys
  kvps-scheduler --workers 2 --servers 2 --bind tcp://0.0.0.0:9091 --keys keys
  kvps status --scheduler tcp://10.0.0.1:9091 --keys keys

another key for a role, while the cluster runs:
  kvps keygen keys --rotate worker    worker.key is new; the scheduler accepts both keys
  kvps keygen keys --retire           when all processes have the new key: refuse the old key
The scheduler reads public/ when it starts, and at SIGHUP. Running members are not affected: each has its own
key. To end a member, use kvps evict.

roles:
  scheduler   runs the cluster: any process with this key can pose as the scheduler
  server      takes the seat of a server, and gets a share of the model
  worker      takes the seat of a worker: reads and changes the model
  look        lists the members (kvps status)
  reader      reads published weights (kvps.subscribe, kvps follow), and nothing else
  admin       lists members, ends them (kvps evict), records traces (kvps trace)

{exit_codes}
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvps.cli import flags
from kvps.core.key_roles import ROLES
from kvps.runtime.key_files import PUBLIC, generate, retire, rotate, write

NAME = "kvps keygen"


@flags.command(NAME)
def main(argv: Sequence[str]) -> int:
    """Run the command."""
    parser = flags.Parser(NAME, __doc__)
    parser.add_argument("folder", metavar="DIR", help="the directory of keys; created if it does not exist")
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--rotate",
        metavar="ROLE",
        choices=ROLES,
        help="make another key for this role; the old key stays valid",
    )
    what.add_argument(
        "--retire", action="store_true", help=f"remove the keys in {PUBLIC}/ without a secret key here"
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
