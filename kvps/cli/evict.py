"""``kvps evict``: ends a live member of a job, so that another process can take its rank.

Ends a live member of a job: its key becomes invalid, and its messages are refused. Its rank is lost, as if its
process had ended, and waits for a replacement. This command needs the key of the role admin.

example:
  kvps evict worker 3 --scheduler tcp://10.0.0.1:9091 --keys keys

The evicted process ends when it gets the message. If it does not, stop it on its host; its messages are refused in
any case. A process with the key of that role may take the rank again. To prevent this, give the role another key
first (kvps keygen --rotate, --retire).

{exit_codes}
environment, where the flag is not given:
  KVPS_SCHEDULER, KVPS_KEYS, KVPS_TIMEOUT (seconds to wait for an answer), KVPS_LOG_LEVEL, KVPS_LOG_FORMAT
"""

from __future__ import annotations

from collections.abc import Sequence

from kvps import config
from kvps.cli import flags
from kvps.protocol.envelope import Role
from kvps.protocol.membership import Done, Evict

NAME = "kvps evict"
TIMEOUT_S = 5.0
ROLES = {"worker": Role.WORKER, "server": Role.SERVER}


@flags.command(NAME)
def main(argv: Sequence[str]) -> int:
    """Run the command."""
    parser = flags.Parser(NAME, __doc__)
    parser.add_argument("role", metavar="ROLE", choices=ROLES, help="worker or server")
    parser.add_argument("rank", metavar="R", help="the rank of the member")
    parser.add_flags(flags.asking(TIMEOUT_S))
    parsed = parser.parse_args(argv)
    rank = config.as_whole("the rank", parsed.rank)
    flags.ask(NAME, parsed, "admin", TIMEOUT_S, lambda _: Evict(ROLES[parsed.role], rank), Done)
    print(f"{parsed.role} {rank} is evicted")
    return 0
