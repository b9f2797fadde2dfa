"""``kvps-launch``: a whole cluster on this machine, from its start to its end.

Starts a scheduler, S servers and N workers on this machine, and ends them all together. Each
worker is a kvps-worker that runs COMMAND. Command lines of MXNet's tools/launch.py work, too.

example:
  kvps-launch -n 2 -- python train.py --epochs 3
  kvps-launch -n 4 -s 2 --max-restarts 1 --env LEVEL=3 -- python train.py
  kvps-launch -n 2 --max-restarts 3 --checkpoint-dir ckpt --checkpoint-every 60 -- python train.py
  kvps-launch -n 4 -s 2 --dry-run=jobset --image REGISTRY/kvps -- python train.py > job.yaml
  kvps-launch -n 4 -s 2 --dry-run=sbatch --nodes 2 -- python train.py > job.sh

Each line of output begins with the role and rank of its process: [worker 0]. With --log-format json each
line is a JSON object, those that COMMAND prints included. The environment of COMMAND
has KVPS_SCHEDULER, KVPS_RANK, and the variables that torchrun sets: RANK, WORLD_SIZE, LOCAL_RANK,
LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT. If they are not set, OMP_NUM_THREADS becomes the number of
cores divided by N + S, but at least 1, and PYTHONUNBUFFERED becomes 1.

If a worker fails (its COMMAND ends with an exit code other than 0), it is started again with the same
rank, as often as --max-restarts allows. After that, the others get WorkerLost and the job ends. With
--checkpoint-dir, a server that fails is started again, too: all servers return to the last checkpoint,
and workers continue. With --replicas 1, a server that fails loses nothing: its copy takes its place, and
the server that is started again holds the next copy. The scheduler is also started again. It keeps its
state in a directory below TMPDIR, and the others do not wait for it.
Ctrl-C and SIGTERM go to each COMMAND, and end the job; a second Ctrl-C kills all processes at once. With
--grace SECONDS, a COMMAND that gets SIGTERM ends after its current round. If a single kvps-worker gets
SIGTERM, its COMMAND ends like this, and the others continue without it. With --grace and --checkpoint-dir,
SIGTERM to kvps-launch, or Ctrl-C, first makes the servers write a last checkpoint.

The job has its own keys, in memory: no other process can join or inspect it. --keys DIR replaces these keys,
and --insecure turns keys off. kvps status needs --keys for such a job; --log-level info shows the directory.

exit codes:
  0    every worker ended with 0
  78   wrong configuration
  128 + N   ended by signal N
  any other: the exit code of the first worker that failed, or else of a server or the scheduler

environment, where the flag is not given:
  KVPS_GRACE, KVPS_HTTP, KVPS_HTTP_TOKEN, KVPS_LOG_LEVEL, KVPS_LOG_FORMAT; for the other processes also
  KVPS_THREADS, KVPS_MEMORY_LIMIT, KVPS_TABLE_DIR, KVPS_LIMITS, KVPS_PLUGIN,
  KVPS_JOIN_TIMEOUT, KVPS_TRANSPORT (how values travel: tcp, shm or auto),
  KVPS_HOST_AGGREGATION (0: the workers of a host push separately), KVPS_CHUNK_BYTES,
  KVPS_CHECKSUM (0: packets have no checksums), KVPS_SILENCE_MAX (12: seconds of silence after which a
  process is lost) and KVPS_DROP_GRACE (1: the same after its connection breaks)
"""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress

from kvps import annexes, config
from kvps.cli import flags
from kvps.cli.worker import demand_command
from kvps.errors import ConfigError
from kvps.launchers.lifecycle import Launch, LaunchPlan
from kvps.launchers.output import OutputMux
from kvps.launchers.reaper import Reaper
from kvps.launchers.remote import Placement, Remote, hostnames, of_slurm, parse_hosts
from kvps.net import descriptors
from kvps.net.zap import keys_can_be
from kvps.observe.place import VARIABLE, WILDCARDS, Place

NAME = "kvps-launch"
LAUNCHERS = ("local", "ssh", "slurm")
SERVERS_PLACE = "servers go round the hosts of -H; omit it"
OF_MXNET = {
    "--launcher mpi": "start kvps-scheduler and kvps-server, and the workers by 'mpirun python "
    "train.py' with KVPS_SCHEDULER set: see docs/configuration.md",
    "--launcher sge": "within the job, use --launcher ssh with the hosts of $PE_HOSTFILE: "
    '-H "$(awk \'{print $1":"$2}\' $PE_HOSTFILE | paste -sd,)"',
    "--launcher yarn": "YARN is not supported: use --launcher ssh on its hosts, or "
    "--dry-run=jobset for Kubernetes",
    "--sync-dst-dir": "kvps-launch copies no files: share the directory, or copy it first, as with "
    "'rsync -a ./ HOST:DIR', and start from DIR",
    "--server-hostfile": SERVERS_PLACE,
    "-SH": SERVERS_PLACE,
    "--byteps-launch": "a script of BytePS needs another import: see docs/migrating/byteps.md",
    "--scheduler-ip": "the scheduler runs where kvps-launch does, at an address that the hosts "
    "reach; omit it",
    "--scheduler-port": "the scheduler takes a port that is free; omit it",
}
"""Flags of MXNet's tools/launch.py without a meaning here, and the advice for each."""
OWN_DESCRIPTORS = 20
"""Beside two for each process: reaper, report, signals, the selector, a port, a process's start;
and spare."""
KEYLESS = "make no keys: any process on this machine can join the job; KVPS_INSECURE=1"


def _parser() -> flags.Parser:
    parser = flags.Parser(NAME, __doc__, insecure=KEYLESS)
    parser.usage = "%(prog)s -n N [-s S] [flags] [--] COMMAND [ARG...]"
    parser.add_argument(
        "-n",
        "--workers",
        "--num-workers",
        metavar="N[:MAX]",
        required=True,
        help="number of workers; with MAX, kvps-worker may add others, and workers come and go, until there "
        "are MAX",
    )
    parser.add_flags(
        {
            "-s --servers --num-servers S[:MAX]": "number of servers (N); with MAX, kvps scale can spread them over "
            "up to MAX processes while the job runs; 0 for a script without servers, as with "
            "the allreduce store",
            "--replicas R": "0 or 1: with 1 each server has a copy in another server's process, which takes its "
            "place when it is lost; needs 2 or more servers; KVPS_REPLICAS (0)",
            "--launcher LAUNCHER": "where workers and servers run; local: on this machine; ssh: on the hosts "
            "of -H; slurm: on the nodes of the allocation that this command runs in (ssh with -H, local without it)",
            "-H --hosts --hostfile HOSTS": "hosts for ssh: 'a:4,b:4', or a file with lines 'a slots=4'; a "
            "host takes as many workers as slots",
            "--rsh COMMAND": "the command that reaches a host, with its options, as 'ssh -p 2222' or 'srun --mem=4G'",
            "--python PATH": "the Python on the other hosts (the path of this one)",
            "--timeline FILE": "write a timeline of the whole job there, for Perfetto and for kvps trace "
            "--explain; KVPS_TIMELINE (none)",
            "--max-restarts K": "how often to start a failed worker or scheduler again, and a failed server "
            "if there are checkpoints (0)",
            "--checkpoint-dir DIR": "where servers write and read checkpoints; KVPS_CHECKPOINT_DIR (none)",
            **flags.CHECKPOINT_EVERY,
            **flags.GRACE,
            "--http HOST:PORT": "let the scheduler serve the dashboard there; port 0: any free port; servers "
            "serve /metrics on free ports, which --log-level info shows; KVPS_HTTP (none)",
            "--env NAME=VALUE ...": "set a variable for all processes; NAME alone: to its value here, which "
            "keeps a secret out of the process list; may be repeated",
            "--env-server NAME=VALUE ...": "set a variable for the servers; may be repeated",
            "--env-worker NAME=VALUE ...": "set a variable for the workers; may be repeated",
        }
    )
    parser.set_defaults(python=sys.executable, max_restarts="0", env=[], env_server=[], env_worker=[])
    parser.add_argument("--p3", action="store_true", help="no effect: kvps sends by priority")
    for flag in OF_MXNET:
        if " " not in flag:
            takes = 0 if flag == "--byteps-launch" else None
            parser.add_argument(flag, action=_Refusal, nargs=takes, help=argparse.SUPPRESS)
    annexes.load("dry-run").add_flags(parser)
    return parser


class _Refusal(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        assert option_string is not None
        raise ConfigError(f"{option_string}: {OF_MXNET[option_string]}")


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the flags, and the command: behind ``--``, or from the first word on that is no flag.

    Raises:
        ConfigError: for a wrong flag, a flag of MXNet without a meaning here, or a missing command.
    """
    parser = _parser()
    if "--" in argv:
        return flags.split(parser, argv)
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parsed = parser.parse_args(argv)
    return flags.split(parser, [*argv[: len(argv) - len(parsed.command)], "--", *parsed.command])


@flags.command(NAME)
def main(argv: Sequence[str]) -> int:
    """Run the command."""
    parsed, command = parse(argv)
    if manifests := annexes.load("dry-run").text_if_any(parsed, command):
        print(manifests, end="")
        return 0
    workers, most_workers = config.as_range("-n", parsed.workers)
    servers, most_servers = workers, 0
    if parsed.servers is not None:
        servers, most_servers = config.as_range("-s", parsed.servers, "server processes")
    if workers < 1:
        raise ConfigError(f"-n {workers}: use 1 or more workers")
    replicas = flags.setting(parsed, "replicas", config.as_replicas, 0)
    if replicas and servers < 2:
        raise ConfigError(
            f"--replicas 1 with {servers} servers: a copy has to lie in another server's process; use -s 2 or more"
        )
    restarts = config.as_whole("--max-restarts", parsed.max_restarts)
    grace_s = flags.setting(parsed, "grace", config.as_seconds, None)
    http = flags.http_of(parsed)
    demand_command(command)
    log_format = flags.log_format(parsed)
    output = OutputMux(
        sys.stdout.buffer, sys.stderr.buffer, config.text("NO_COLOR") is None, is_json=log_format == "json"
    )
    level = flags.start_log(NAME, parsed, _OutputHandler(output))
    config.checkpoint_every_s(parsed.checkpoint_every)  # a bad one is better told now
    env = _environment(_given(parsed.env), workers + servers)
    if parsed.timeline is not None:
        env["KVPS_TIMELINE"] = os.path.abspath(parsed.timeline)
    keys = parsed.keys or config.keys_path()
    remote = _remote(parsed, workers, servers)
    plan = LaunchPlan(
        workers=workers,
        servers=servers,
        most_workers=most_workers,
        most_servers=most_servers,
        max_restarts=restarts,
        env=env,
        role_env=_of_role(parsed, http, is_local=remote is None),
        command=command,
        log_level=level,
        log_format=log_format,
        checkpoint_dir=parsed.checkpoint_dir or config.checkpoint_dir(env),
        checkpoint_every=parsed.checkpoint_every,
        keys=keys,
        is_keyless=keys is None and (flags.is_insecure(parsed) or not keys_can_be()),
        grace_s=grace_s,
        http=parsed.http,
        is_http_insecure=http is not None and flags.is_insecure(parsed),
        remote=remote,
        replicas=replicas,
    )
    need = (2 if plan.remote is None else 3) * (1 + max(workers, most_workers) + servers) + OWN_DESCRIPTORS
    descriptors.demand(f"kvps-launch of {workers} workers and {servers} servers", need)
    reaper = Reaper()
    try:
        return Launch(plan, output, reaper).run()
    finally:
        reaper.close()


def _remote(parsed: argparse.Namespace, workers: int, servers: int) -> Remote | None:
    """Return the other hosts that flags and the environment name; None if there are none.

    Raises:
        ConfigError: if the flags contradict each other, or the hosts have too few slots.
    """
    launcher = parsed.launcher or ("local" if parsed.hosts is None else "ssh")
    if advice := OF_MXNET.get(f"--launcher {launcher}"):
        raise ConfigError(f"--launcher {launcher}: {advice}")
    if launcher not in LAUNCHERS:
        raise ConfigError(f"--launcher {launcher!r}: use one of {', '.join(LAUNCHERS)}")
    if launcher == "local" and parsed.hosts is not None:
        raise ConfigError("-H needs --launcher ssh: with local all processes run on this machine")
    if launcher == "slurm" and parsed.hosts is not None:
        raise ConfigError("--launcher slurm takes the nodes of the allocation: omit -H")
    if launcher == "ssh" and parsed.hosts is None:
        raise ConfigError("--launcher ssh needs hosts: -H a:4,b:4, or -H FILE with lines 'a slots=4'")
    if launcher == "local":
        return None
    given = (
        of_slurm(config.variables("SLURM_"), hostnames) if launcher == "slurm" else parse_hosts(parsed.hosts)
    )
    placement = Placement(given, workers, servers)
    rsh = shlex.split(parsed.rsh or ("srun" if launcher == "slurm" else "ssh"))
    copies = flags.setting(parsed, "replicas", config.as_replicas, 0)
    return Remote(launcher, rsh, placement, parsed.python, _given(parsed.env), copies)


def _given(settings: Sequence[str]) -> dict[str, str]:
    """Return the variables of ``--env``; a name alone keeps the value that it has here."""
    changes = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        here = value if equals else config.text(name)
        if not name or here is None:
            raise ConfigError(
                f"--env {setting!r}: write it as NAME=VALUE, or as the name of a variable that is set here"
            )
        changes[name] = here
    return changes


def _of_role(
    parsed: argparse.Namespace, http: Place | None, *, is_local: bool
) -> Mapping[str, Mapping[str, str]]:
    """Return the variables of ``--env-server`` and ``--env-worker``; MXNet writes them as NAME:VALUE.

    The port of KVPS_HTTP is the scheduler's: each server takes a free port, on any host that has
    such an address.
    """
    found: dict[str, dict[str, str]] = {}
    if http is not None:
        is_everywhere = is_local or http.is_loopback or http.host in WILDCARDS
        found["server"] = {VARIABLE: http.of_members if is_everywhere else ""}
    for role in ("server", "worker"):
        for setting in vars(parsed)[f"env_{role}"]:
            name, separator, value = setting.partition("=" if "=" in setting else ":")
            if not name or not separator:
                raise ConfigError(f"--env-{role} {setting!r}: write it as NAME=VALUE")
            found.setdefault(role, {})[name] = value
    return found


def _environment(changes: dict[str, str], processes: int) -> dict[str, str]:
    threads = max(1, len(os.sched_getaffinity(0)) // processes)
    return config.environment(changes, {"OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"})


class _OutputHandler(logging.Handler):
    """Prints our own lines between the lines of the processes."""

    def __init__(self, output: OutputMux) -> None:
        super().__init__()
        self._output = output

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(BrokenPipeError):
            self._output.write(1, b"", self.format(record).encode().split(b"\n"))


if __name__ == "__main__":
    sys.exit(main())
