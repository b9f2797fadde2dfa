"""``kvps-scheduler``: forms the cluster, and tells every process the members.

Forms a cluster of N workers and S servers, hands out ranks, and keeps the barriers.
No tensor passes through it. Members may start before it or after it, in any order.

example, a cluster on one machine by hand (kvps-launch does all of it):
  kvps-scheduler --workers 2 --servers 1 &
  kvps-server &
  kvps-worker -- python train.py &
  kvps-worker -- python train.py

It ends when the job ends: with 0 if every worker left, with 1 if any was lost permanently.
SIGTERM and SIGINT end the job. At SIGHUP the public keys in --keys are read again. At SIGUSR2 the
servers write a last checkpoint; then stop the job, since no other checkpoint follows.

{exit_codes}
environment, where the flag is not given:
  KVPS_WORKERS, KVPS_SERVERS, KVPS_REPLICAS, KVPS_BIND, KVPS_STATE, KVPS_KEEP_ALIVE, KVPS_SILENCE_MAX,
  KVPS_DROP_GRACE, KVPS_LIMITS, KVPS_KEYS, KVPS_INSECURE, KVPS_HTTP, KVPS_HTTP_TOKEN, KVPS_LOG_LEVEL,
  KVPS_LOG_FORMAT
  KVPS_CHECKSUM=0: send packets without checksums, if the network has better checksums
  DMLC_NUM_WORKER, DMLC_NUM_SERVER, DMLC_PS_ROOT_URI, DMLC_PS_ROOT_PORT, as for MXNet
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from kvps import config
from kvps.cli import flags
from kvps.errors import ConfigError
from kvps.observe import logs
from kvps.runtime.scheduler_process import run_scheduler

NAME = "kvps-scheduler"


WHY_MAX = 1000
"""Characters of the reason that kvps-launch is told: a pipe takes a short text as a whole."""


def _parser() -> flags.Parser:
    parser = flags.Parser(NAME, __doc__, insecure=flags.INSECURE)
    parser.add_flags(
        {
            "--workers N[:MAX]": "number of workers; with MAX, workers may come and go once N have joined, "
            "until there are MAX; KVPS_WORKERS",
            "--servers S": "number of servers; KVPS_SERVERS",
            "--replicas R": "0 or 1: with 1 each server has a copy in another server's process, which takes its "
            "place when it is lost; KVPS_REPLICAS (0)",
            "--bind tcp://HOST:PORT": "address to listen at; port 0: any free port; KVPS_BIND "
            f"({config.DEFAULT_SCHEDULER})",
            "--state DIR": "directory of saved state: a scheduler that is started again with the same DIR "
            "and --bind continues its job; KVPS_STATE",
            "--keep-alive": "when a job is over, begin another with the same servers; KVPS_KEEP_ALIVE=1",
            "--silence-max SECONDS": "silence after which a member is lost, 3 or more; KVPS_SILENCE_MAX (12)",
            "--drop-grace SECONDS": "time for a member to reconnect after its connection breaks, before it "
            "is lost; KVPS_DROP_GRACE (1)",
            **flags.limits_flag("scheduler"),
            "--http HOST:PORT": "serve the dashboard there, and /livez, /readyz, /metrics and /statusz; port "
            "0: any free port; /metrics needs kvps[metrics]; KVPS_HTTP, which takes a free port where its "
            "own is in use (none)",
        }
    )
    # Where kvps-launch wants to hear at which port it listens.
    parser.add_argument("--report-fd", type=int, help=argparse.SUPPRESS)
    return parser


@flags.command(NAME)
def main(argv: Sequence[str]) -> int:
    """Run the command."""
    parsed = _parser().parse_args(argv)
    flags.start_log(NAME, parsed)
    found, fd = config.dmlc_cluster(), parsed.report_fd
    default_size = (found.workers, 0) if found is not None and found.workers is not None else None
    size = flags.setting(parsed, "workers", config.as_range, default_size)
    servers = flags.setting(parsed, "servers", config.as_whole, found.servers if found else None)
    if size is None or servers is None:
        raise ConfigError("the number of members is missing: give --workers N --servers S")
    default = config.DEFAULT_SCHEDULER if found is None else config.scheduler_bind(found.scheduler)
    return run_scheduler(
        size[0],
        servers,
        flags.setting(parsed, "bind", config.as_bind, default),
        keep_alive=bool(parsed.keep_alive) or config.switch("KVPS_KEEP_ALIVE"),
        state=flags.setting(parsed, "state", _folder, None),
        insecure=flags.is_insecure(parsed),
        silence_max_s=config.silence_max_s(parsed.silence_max),
        drop_grace_s=config.drop_grace_s(parsed.drop_grace),
        keys=flags.keys_of(parsed, "scheduler"),
        keys_again=lambda: flags.keys_of(parsed, "scheduler"),
        http=flags.http_of(parsed),
        limits=flags.limits_of(parsed, "scheduler"),
        replicas=flags.setting(parsed, "replicas", config.as_replicas, 0),
        tell=lambda event, value: _tell(fd, event, value, flags.log_format(parsed)),
        is_launched=fd is not None,
        most_workers=size[1],
    )


def _folder(name: str, given: str) -> str:
    if Path(given).exists() and not Path(given).is_dir():
        raise ConfigError(f"{name}={given!r} is not a directory")
    return given


def _tell(fd: int | None, event: str, value: object, log_format: str) -> None:
    """Tell kvps-launch what has happened; without kvps-launch, show a person where the dashboard is."""
    if fd is not None:
        os.write(fd, f"{event} {value!s:.{WHY_MAX}}\n".encode())
    elif event == "dashboard":
        text = f"dashboard: {value}"
        is_json = log_format == "json"
        print(logs.line("info", text, logs.speaker(), {}) if is_json else text, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
