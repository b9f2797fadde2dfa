"""``kvps scale``: changes the number of processes that hold the servers of a job, while it runs.

To fewer: those that hold the fewest seats are drained, as by kvps drain, and end with 0. To more: new processes
take seats from those that hold several. kvps-launch starts the new ones; by hand, start kvps-server once for each.
The number of seats stays, and so does the place of every key. In a cluster with keys it needs the key of the
role admin.

example:
  kvps scale --servers 3 --scheduler tcp://10.0.0.1:9091

{exit_codes}
environment, where the flag is not given:
  KVPS_SCHEDULER, KVPS_KEYS, KVPS_TIMEOUT (seconds that it may take), KVPS_LOG_LEVEL, KVPS_LOG_FORMAT
"""

from __future__ import annotations

from collections.abc import Sequence

from kvps import config
from kvps.cli import flags
from kvps.cli.drain import ANSWER_S, TIMEOUT_S
from kvps.protocol.membership import Done, Scale

NAME = "kvps scale"


@flags.command(NAME)
def main(argv: Sequence[str]) -> int:
    """Run the command."""
    parser = flags.Parser(NAME, __doc__)
    parser.add_argument("--servers", metavar="N", required=True, help="the number of processes")
    parser.add_flags(flags.asking(TIMEOUT_S))
    parsed = parser.parse_args(argv)
    servers = config.as_whole("--servers", parsed.servers)
    flags.ask(NAME, parsed, "admin", TIMEOUT_S, lambda limit_s: Scale(servers, limit_s), Done, ANSWER_S)
    print(f"{servers} processes hold the seats of servers")
    return 0
