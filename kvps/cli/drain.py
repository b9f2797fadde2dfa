"""``kvps drain``: has other processes take the seats of a server, so that its process can end.

Before a host goes away: the process of the server hands its seats over, with all values and optimizer states,
and ends with 0. No call of a worker fails, and no step is repeated. Spare processes take the seats first, then
those that hold the fewest, on another host where there is one. Where there is none, the command waits for
kvps-server to be started. In a cluster with keys it needs the key of the role admin.

example:
  kvps drain server-1 --scheduler tcp://10.0.0.1:9091

SIGTERM to kvps-server does the same, if another process is there.

{exit_codes}
environment, where the flag is not given:
  KVPS_SCHEDULER, KVPS_KEYS, KVPS_TIMEOUT (seconds that it may take), KVPS_LOG_LEVEL, KVPS_LOG_FORMAT
"""

from __future__ import annotations

from collections.abc import Sequence

from kvps import config
from kvps.cli import flags
from kvps.errors import ConfigError
from kvps.protocol.membership import Done, Drain

NAME = "kvps drain"
TIMEOUT_S = 120.0
ANSWER_S = 5.0
"""How long the scheduler may take to say that the time is over."""


@flags.command(NAME)
def main(argv: Sequence[str]) -> int:
    """Run the command."""
    parser = flags.Parser(NAME, __doc__)
    parser.add_argument("server", metavar="server-R", help="the server, by its rank, as kvps status shows it")
    parser.add_flags(flags.asking(TIMEOUT_S))
    parsed = parser.parse_args(argv)
    role, _, number = parsed.server.partition("-")
    if role != "server":
        raise ConfigError(f"{parsed.server!r} is no server: write server-0 for the server of rank 0")
    rank = config.as_whole("the rank of the server", number)
    flags.ask(NAME, parsed, "admin", TIMEOUT_S, lambda limit_s: Drain(rank, limit_s), Done, ANSWER_S)
    print(f"server-{rank} is drained: other processes hold its seats")
    return 0
