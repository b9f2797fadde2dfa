"""The batch script by which Slurm runs a launch: its allocation, and the way back into the queue.

Slurm sends TERM to the shell before the time limit (``--signal=B:``). The shell passes it on to
``kvps-launch``, which ends the job after a last checkpoint, and then puts the job into the queue
again. ``scancel`` and ``scontrol requeue`` also send TERM, to all processes of the job. They are
told apart by the state of the job, which is RUNNING only before the time limit.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvps.errors import ConfigError

END_MARGIN_S = 30
"""Seconds beyond the grace until the time limit: the launch stops its processes, and Slurm gets
the job back."""
NAME_MAX = 200
"""Characters of a name of a job; Slurm itself takes more."""
_MIB = 1 << 20
_AGAIN = """\
launch=$!
asked=
trap 'asked=1; kill -TERM "$launch"' TERM
while kill -0 "$launch" 2>/dev/null; do wait "$launch"; done
wait "$launch"
code=$?
if [ -n "$asked" ] && [ "$code" -eq 143 ] &&
    [ "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)" = RUNNING ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


@dataclass(frozen=True, slots=True)
class Share:
    """The resources that one process adds to the allocation; None leaves the memory to Slurm."""

    cpus: int = 1
    memory: int | None = None
    """In bytes."""


@dataclass(frozen=True, slots=True)
class BatchJob:
    """A launch that Slurm is to run.

    Raises:
        ConfigError: for an allocation that no Slurm grants.
    """

    name: str
    nodes: int
    workers: int
    servers: int
    command: Sequence[str]
    flags: Sequence[str] = ()
    """Flags of kvps-launch besides those that follow from the rest."""
    worker: Share = field(default_factory=Share)
    server: Share = field(default_factory=Share)
    gpus: int = 0
    """GPUs of a worker."""
    checkpoint_dir: str | None = None
    grace_s: float | None = None
    env: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.name or len(self.name) > NAME_MAX or not self.name.isprintable():
            raise ConfigError(f"--name {self.name!r}: use 1 to {NAME_MAX} printable characters")
        if self.workers < 1:
            raise ConfigError(f"-n {self.workers}: use 1 or more workers")
        if not 1 <= self.nodes <= self.workers:
            raise ConfigError(
                f"--nodes {self.nodes}: use 1 to {self.workers} nodes, since each has at least one of the "
                f"{self.workers} workers"
            )
        for flag, cpus in (("--cpu", self.worker.cpus), ("--server-cpu", self.server.cpus)):
            if cpus < 1:
                raise ConfigError(f"{flag} {cpus}: use 1 or more processors")
        memories = [self.worker.memory, *([self.server.memory] if self.servers else [])]
        if None in memories and any(memories):
            raise ConfigError(
                "--memory and --server-memory: give both, since a node needs the sum of its "
                "processes, or neither"
            )

    @property
    def tasks(self) -> int:
        """The workers of a node."""
        return math.ceil(self.workers / self.nodes)

    @property
    def servers_of_node(self) -> int:
        """The most servers that a node has."""
        return math.ceil(self.servers / self.nodes)


def script(job: BatchJob) -> str:
    """Return the batch script of ``job``."""
    lines = [f"#SBATCH {option}\n" for option in _options(job)]
    return f"#!/bin/bash\n{''.join(lines)}{_head(job)}\n{_launch(job)}"


def _options(job: BatchJob) -> list[str]:
    # The servers of a node compute in the processors of its tasks, so each task brings a part of theirs.
    cpus = job.worker.cpus + math.ceil(job.servers_of_node * job.server.cpus / job.tasks)
    options = [
        f"--job-name={shlex.quote(job.name)}",
        f"--nodes={job.nodes}",
        f"--ntasks-per-node={job.tasks}",
        f"--cpus-per-task={cpus}",
    ]
    if job.worker.memory is not None:
        memory = job.tasks * job.worker.memory + job.servers_of_node * (job.server.memory or 0)
        options.append(f"--mem={math.ceil(memory / _MIB)}M")
    if job.gpus:
        options.append(f"--gpus-per-node={job.tasks * job.gpus}")
    if job.checkpoint_dir is None:
        return [*options, "--no-requeue"]
    return [*options, "--requeue", "--open-mode=append", f"--signal=B:TERM@{_signal_s(job)}"]


def _signal_s(job: BatchJob) -> int:
    assert job.grace_s is not None
    return math.ceil(job.grace_s) + END_MARGIN_S


def _head(job: BatchJob) -> str:
    lines = ["Submit it with sbatch. Options of sbatch replace those above, as in:", ""]
    lines += ["  sbatch --time=8:00:00 --partition=PARTITION job.sh", ""]
    if job.checkpoint_dir is None:
        lines.append("Without --checkpoint-dir the job is not put into the queue again.")
    else:
        lines.append(f"{_signal_s(job)} seconds before the time limit, the servers write a last")
        lines.append("checkpoint, and the job goes into the queue again.")
    return "#\n" + "".join([f"# {line}".rstrip() + "\n" for line in lines])


def _launch(job: BatchJob) -> str:
    words = ["kvps-launch", "--launcher", "slurm", "-n", str(job.workers), "-s", str(job.servers)]
    words += job.flags
    if job.checkpoint_dir is not None:
        words += ["--checkpoint-dir", job.checkpoint_dir]
    if job.grace_s is not None:
        words += ["--grace", f"{job.grace_s:g}"]
    for name, value in job.env.items():
        words += ["--env", f"{name}={value}"]
    line = f"{shlex.join(words)} \\\n    -- {shlex.join(job.command)}"
    return f"exec {line}\n" if job.checkpoint_dir is None else f"{line} &\n{_AGAIN}"
