"""``kvps-server``: holds a part of every model, sums gradients and updates weights.

Holds a share of all keys: sums the pushes of workers, runs the optimizer, and answers pulls.

example, two servers of one cluster:
  kvps-scheduler --workers 2 --servers 2 &
  kvps-server --scheduler tcp://127.0.0.1:9091 &
  kvps-server --scheduler tcp://127.0.0.1:9091 --memory-limit 2G &

It waits up to 60 s (KVPS_JOIN_TIMEOUT) for the scheduler. It ends when the job ends: with 0 if every
worker left, with 1 if any was lost permanently. At SIGTERM other server processes take its seats, with
all values, if there are any: no call fails. SIGINT, a second SIGTERM and the end of --grace end it at once. Its
part of the model is then lost, except for the last checkpoint.

With --checkpoint-dir, all servers save the values of one moment while training continues. If a server is
lost, start it again with its --rank and the --checkpoint-dir that has its files. It then returns to the
last checkpoint, all other servers do the same, and workers get EpochChanged.

A plug-in is a Python module, on PYTHONPATH or in this folder, that calls
kvps.core.optim.torch_rules.register(...) when it is imported.

{exit_codes}
environment, where the flag is not given:
  KVPS_SCHEDULER, KVPS_BIND, KVPS_ADVERTISE, KVPS_RANK, KVPS_THREADS, KVPS_MEMORY_LIMIT, KVPS_TABLE_DIR,
  KVPS_GRACE, KVPS_LIMITS, KVPS_PLUGIN (separated by commas), KVPS_CHECKPOINT_DIR, KVPS_CHECKPOINT_EVERY,
  KVPS_JOIN_TIMEOUT, KVPS_KEYS, KVPS_INSECURE, KVPS_HTTP, KVPS_HTTP_TOKEN, KVPS_LOG_LEVEL, KVPS_LOG_FORMAT
  KVPS_SILENCE_MAX: seconds of silence after which the scheduler counts as lost (12)
  KVPS_TRANSPORT: how values travel; tcp, shm (shared memory), or auto (shm where it works)
  KVPS_STREAMS=1: with keys, packets between hosts travel along streams, sealed by AES
  KVPS_CHECKSUM=0: send packets without checksums, if the network has better checksums
  DMLC_PS_ROOT_URI, DMLC_PS_ROOT_PORT, DMLC_NUM_WORKER, DMLC_NUM_SERVER, as for MXNet
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence

from kvps import config
from kvps.cli import flags
from kvps.errors import ConfigError
from kvps.runtime.member_process import let_threads_sleep

NAME = "kvps-server"
GRACE_S = 20.0


def _parser() -> flags.Parser:
    parser = flags.Parser(NAME, __doc__, insecure=flags.INSECURE)
    parser.add_flags(
        {
            **flags.SCHEDULER,
            "--bind tcp://HOST:PORT": "address to listen at; port 0: any free port; KVPS_BIND (tcp://127.0.0.1:0)",
            "--advertise HOST": "the address that workers connect to, if --bind is tcp://0.0.0.0:...; "
            "KVPS_ADVERTISE (the address of this machine that the scheduler sees)",
            "--rank R[,R...]": "the rank of this server, or of the servers that this process holds; KVPS_RANK (any)",
            "--threads T": "number of compute threads; KVPS_THREADS (torch's default)",
            "--memory-limit BYTES": "refuse keys and optimizers beyond this limit, such as 512M or 2G; "
            "KVPS_MEMORY_LIMIT (80 %% of memory)",
            "--table-dir DIR": "keep rows of embedding tables beyond the memory limit in files here, on a local "
            "disk; KVPS_TABLE_DIR (none)",
            "--plugin MODULE ...": "import a module that registers optimizers; may be repeated; KVPS_PLUGIN",
            "--checkpoint-dir DIR": "write checkpoints here, and return to the last checkpoint after a "
            "server was lost; all servers may share DIR; KVPS_CHECKPOINT_DIR (none)",
            **flags.CHECKPOINT_EVERY,
            "--grace SECONDS": "after SIGTERM, time for other processes to take the seats of this process; "
            f"KVPS_GRACE ({GRACE_S:g})",
            **flags.limits_flag("server"),
            **flags.HTTP,
        }
    )
    return parser


@flags.command(NAME)
def main(argv: Sequence[str]) -> int:
    """Run the command."""
    parsed = _parser().parse_args(argv)
    flags.start_log(NAME, parsed)
    scheduler = flags.scheduler_of(parsed)
    insecure = flags.is_insecure(parsed)
    bind = flags.setting(parsed, "bind", config.as_bind, "")
    threads = flags.setting(parsed, "threads", _threads, None)
    limit = flags.setting(parsed, "memory_limit", config.as_bytes, None)
    limits = flags.limits_of(parsed, "server")
    ranks: tuple[int, ...] = flags.setting(parsed, "rank", config.as_ranks, tuple[int, ...]())
    grace_s = flags.setting(parsed, "grace", config.as_seconds, GRACE_S)
    advertise = flags.setting(parsed, "advertise", lambda _, given: given, None)
    plugins = parsed.plugin or [plugin for plugin in (config.text("KVPS_PLUGIN") or "").split(",") if plugin]
    keys = flags.keys_of(parsed, "server")
    is_allowed = insecure or keys is not None
    if not bind:
        bind = config.server_bind(scheduler, is_allowed)
    config.demand_loopback(bind, is_allowed)
    folder = parsed.checkpoint_dir or config.checkpoint_dir()
    every_s = config.checkpoint_every_s(parsed.checkpoint_every)
    if every_s and folder is None:
        raise ConfigError(
            f"--checkpoint-every {every_s:g} (KVPS_CHECKPOINT_EVERY) has no directory to write to: give "
            "--checkpoint-dir DIR (KVPS_CHECKPOINT_DIR)"
        )

    let_threads_sleep()
    # Loading torch makes a million objects, all to stay. The collector would look at them again
    # and again, for a third of the time that a server takes to start; frozen, they cost later
    # collections nothing either.
    gc.disable()
    from kvps.runtime.server_process import run_server

    gc.freeze()
    gc.enable()
    return run_server(
        scheduler,
        bind,
        ranks=ranks,
        memory_limit=limit,
        table_dir=parsed.table_dir or config.text("KVPS_TABLE_DIR"),
        threads=threads,
        plugins=plugins,
        advertise=advertise,
        insecure=insecure,
        keys=keys,
        http=flags.http_of(parsed),
        limits=limits,
        checkpoint_dir=folder,
        checkpoint_every_s=every_s,
        grace_s=grace_s,
    )


def _threads(name: str, given: str) -> int:
    threads = config.as_whole(name, given)
    if threads < 1:
        raise ConfigError(f"{name}={given}: use 1 or more threads")
    return threads


if __name__ == "__main__":
    sys.exit(main())
