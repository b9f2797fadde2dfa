"""``kvps-worker``: runs a training command as a worker, and reports how it ended.

Runs COMMAND as a worker of a cluster: joins the job, waits until all workers have joined, starts
COMMAND, and reports how it ended. A plain 'python train.py' with KVPS_SCHEDULER set is a worker,
too; with kvps-worker, the other workers learn at once that it crashed.

example:
  kvps-worker --scheduler tcp://127.0.0.1:9091 -- python train.py --epochs 3

The environment of COMMAND has KVPS_SCHEDULER and the variables that torchrun sets: RANK, WORLD_SIZE,
LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT.

If COMMAND ends with 0, this worker leaves, and the job continues without it. If it ends with any other
exit code, the worker is lost: rounds wait for a replacement of its rank (start this command again with
--rank R). With --no-replacement, the others get WorkerLost at once.

SIGTERM and SIGINT go to COMMAND, which is killed if it does not end in 5 s. With --grace SECONDS, a
COMMAND in Python that gets SIGTERM ends with 0 after its current round, and the others continue without
it; it is killed if this takes longer. COMMAND runs in its own process group. The group ends when COMMAND
or this process ends, for whatever reason.

The exit code is that of COMMAND, or 128 + N if signal N killed it. Before COMMAND starts:
{exit_codes}
environment, where the flag is not given:
  KVPS_SCHEDULER, KVPS_KEYS, KVPS_RANK, KVPS_GRACE, KVPS_JOIN_TIMEOUT (60 s to reach the scheduler),
  KVPS_LOG_LEVEL, KVPS_LOG_FORMAT,
  KVPS_SILENCE_MAX: seconds of silence after which the scheduler counts as lost (12)
  KVPS_TRANSPORT, for COMMAND: how values travel; tcp, shm (shared memory), or auto (shm where it works)
  KVPS_STREAMS=1, for COMMAND: with keys, packets between hosts travel along streams, sealed by AES
  KVPS_HOST_AGGREGATION, for COMMAND: 0 lets the workers of a host push separately
  KVPS_SWITCH_INTERVAL, for COMMAND: the interpreter's switch interval while calls are in flight, in
  seconds (0.0001); 0 leaves it as it is
  KVPS_CHUNK_BYTES, for COMMAND: bytes of a chunk (384 KiB between hosts)
  KVPS_CHECKSUM=0: send packets without checksums, if the network has better checksums
  DMLC_PS_ROOT_URI, DMLC_PS_ROOT_PORT, DMLC_NUM_WORKER, DMLC_NUM_SERVER, as for MXNet
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from shutil import which

from kvps import config
from kvps.cli import flags
from kvps.core.effects import Finish
from kvps.core.supervisor import ASK, END_MAX_S, KILL, START, Supervisor
from kvps.errors import ConfigError
from kvps.launchers.reaper import Reaper, kill
from kvps.net import descriptors
from kvps.net.driver import Inbox, Listener, drive
from kvps.net.zap import KeyPair, Keys, new_pair
from kvps.net.zeromq import ZmqTransport
from kvps.observe import logs
from kvps.protocol.envelope import Role
from kvps.protocol.membership import Welcome
from kvps.runtime.key_files import SESSION, KeyMemory, Section, reader_keys
from kvps.runtime.member_process import on_stop, own_host, own_identity, report

NAME = "kvps-worker"
EXIT_NOT_STARTED = 126
OWN_DESCRIPTORS = 6
"""Beside its transport's: the reaper (2), the port that it keeps (1), a process's start (3)."""


def _parser() -> flags.Parser:
    parser = flags.Parser(NAME, __doc__)
    parser.usage = "%(prog)s [flags] -- COMMAND [ARG ...]"
    parser.add_flags(
        {
            **flags.SCHEDULER,
            "--rank R": "the rank of this worker; KVPS_RANK (that of MPI or Slurm, or any)",
            "--no-replacement": "if COMMAND fails, do not wait for a replacement of this worker",
            **flags.GRACE,
        }
    )
    # Where kvps-launch wants to hear how COMMAND ended, before the scheduler hears it.
    parser.add_argument("--report-fd", type=int, help=argparse.SUPPRESS)
    return parser


@flags.command(NAME)
def main(argv: Sequence[str]) -> int:
    """Run the command."""
    parsed, command = flags.split(_parser(), argv)
    flags.start_log(NAME, parsed)
    scheduler = flags.scheduler_of(parsed)
    rank = flags.setting(parsed, "rank", config.as_whole, config.worker_rank())
    join_max_s = config.join_max_s()
    grace_s = flags.setting(parsed, "grace", config.as_seconds, None)
    demand_command(command)
    descriptors.demand("kvps-worker", descriptors.LEAST + OWN_DESCRIPTORS)
    keys = flags.keys_of(parsed, "worker")
    command_key = None if keys is None else new_pair()
    reaper = Reaper()
    with (
        _offer(scheduler, join_max_s) as master,
        _lent(keys, command_key, parsed.keys or config.keys_path()) as lent,
    ):
        identity = replace(
            own_identity(Role.WORKER, scheduler, keys),
            rank=rank,
            guardian=True,
            master=master,
            join_max_s=join_max_s,
            command_key="" if command_key is None else command_key.public,
        )
        limit_s = END_MAX_S if grace_s is None else grace_s
        core = Supervisor(identity, time.monotonic(), not parsed.no_replacement, limit_s)
        env = lent if grace_s is None else lent | {"KVPS_LEAVE_AT_SIGTERM": "1"}
        if flags.log_format(parsed) == "json":
            env = env | {logs.VARIABLE: "json"}
        logs.speak_as(lambda: logs.Speaker("worker", core.member.rank if core.member.welcome else rank))
        transport = ZmqTransport(checksums=config.checksums(), keys=keys)
        shell = Shell(core, transport, reaper, command, parsed.report_fd, env)
        try:
            return shell.run()
        finally:
            reaper.close()


def demand_command(command: Sequence[str]) -> None:
    """Refuse a command that cannot be run.

    Raises:
        ConfigError: if there is no such program.
    """
    if which(command[0]) is None:
        raise ConfigError(f"there is no program {command[0]!r}; check the command after --")


@contextmanager
def _offer(scheduler: str, join_max_s: float) -> Iterator[str]:
    """Yield HOST:PORT for torch's rendezvous, a port that no other process gets as long as this
    process lives.

    It is bound and not listened on, so that COMMAND may listen on it: both say SO_REUSEADDR.
    """
    host = "127.0.0.1" if config.is_loopback(scheduler) else own_host(scheduler, join_max_s)
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as kept:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind((host, 0))
        yield f"{host}:{kept.getsockname()[1]}"


@contextmanager
def _lent(keys: Keys | None, command_key: KeyPair | None, path: str | None) -> Iterator[dict[str, str]]:
    """Yield the variables by which COMMAND finds the key of its session, as long as this process lives.

    The key of readers is there, too, if it is at ``path``: a command may subscribe.
    """
    if keys is None or command_key is None:
        yield {}
        return
    scheduler = [Section("scheduler", public) for public in keys.scheduler]
    with closing(KeyMemory([Section(SESSION, *command_key), *scheduler, *reader_keys(path)])) as memory:
        yield {"KVPS_KEYS": memory.path}


class Shell(Listener):
    """Carries out the orders of the supervisor's core for the command."""

    def __init__(
        self,
        core: Supervisor,
        transport: ZmqTransport,
        reaper: Reaper,
        command: Sequence[str],
        report_fd: int | None,
        env: dict[str, str],
    ) -> None:
        self._core = core
        self._transport = transport
        self._inbox: Inbox[Supervisor] = Inbox(transport)
        self._reaper = reaper
        self._command = command
        self._report_fd = report_fd
        self._env = env
        """The environment of COMMAND, besides its place in the cluster."""
        self._process: subprocess.Popen[bytes] | None = None

    def run(self) -> int:
        """Hold the seat until the command has ended; return the exit code."""
        self._inbox.put(Supervisor.start)
        signal.signal(signal.SIGCHLD, lambda *_: self._inbox.put(lambda _, now: self._reap(now)))
        try:
            with on_stop(lambda number: self._inbox.put(Supervisor.on_signal, number)):
                ending = drive(self._core, self._transport, self._inbox, self)
        finally:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            if self._process is not None and self._process.returncode is None:
                kill(self._process.pid)
                self._process.wait()
            self._transport.close(0.5)
        if self._process is None:
            return report("worker", ending)
        return ending.code

    def _reap(self, now: float) -> None:
        """Find out whether the command has ended."""
        if self._process is None or self._process.returncode is not None:
            return
        group = self._process.pid
        if os.waitid(os.P_PID, group, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return
        kill(group)  # the processes that it left running; it is still there, so the number is still its own
        code = self._process.wait()
        self._reaper.forget(group)
        reason = f"{self._command[0]} ended"
        if code < 0:
            reason, code = (f"{self._command[0]} was killed by {signal.Signals(-code).name}", 128 - code)
        self._tell(code, reason, now)

    def _tell(self, code: int, reason: str, now: float) -> None:
        if self._report_fd is not None:
            os.write(self._report_fd, f"worker {os.getpid()} {code}\n".encode())
        self._core.on_end(code, reason, now)

    # --- the orders of the core ------------------------------------------------------------------

    def finish(self, effect: Finish) -> None:
        """Start the command, ask it to end, or kill it."""
        if effect.ticket == START and isinstance(effect.value, Welcome):
            self._start(effect.value)
        elif effect.ticket == ASK and isinstance(effect.value, int):
            self._signal(effect.value)
        elif effect.ticket == KILL:
            self._signal(signal.SIGKILL)

    def _start(self, welcome: Welcome) -> None:
        try:
            self._process = self._reaper.start(self._command, env=self._environment(welcome))
        except (OSError, ValueError) as error:  # the latter for a text with a NUL
            reason = f"cannot start {self._command[0]}: {error}"
            self._inbox.put(lambda core, now: self._tell(EXIT_NOT_STARTED, reason, now))
            return

    def _environment(self, welcome: Welcome) -> dict[str, str]:
        changes = self._env | {
            "KVPS_SCHEDULER": self._core.member.identity.scheduler,
            "KVPS_RANK": str(welcome.rank),
            "KVPS_INCARNATION": str(welcome.incarnation),
            "KVPS_JOB": self._core.member.job.hex(),
            "RANK": str(welcome.rank),
            "WORLD_SIZE": str(welcome.workers),
            "LOCAL_RANK": str(welcome.local_rank),
            "LOCAL_WORLD_SIZE": str(welcome.local_size),
        }
        if welcome.most:
            changes["KVPS_MOST_WORKERS"] = str(welcome.most)
        if welcome.master:  # else worker 0 is no kvps-worker, and offers nothing
            changes["MASTER_ADDR"], _, changes["MASTER_PORT"] = welcome.master.rpartition(":")
        return config.environment(changes, {})

    def _signal(self, number: int) -> None:
        if self._process is not None and self._process.returncode is None:
            kill(self._process.pid, number)


if __name__ == "__main__":
    sys.exit(main())
