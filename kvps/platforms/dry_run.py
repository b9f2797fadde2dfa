"""The flags of ``kvps-launch --dry-run``, and the text that it prints."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import PurePosixPath

from kvps import config
from kvps.errors import ConfigError
from kvps.platforms import sbatch
from kvps.platforms.kubernetes.manifests import KINDS, manifests
from kvps.platforms.kubernetes.pods import JobDescription, Resources, document, secret_files

DEFAULT_NAME = "kvps"
SLURM = "sbatch"
DEFAULT_GRACE_S = 60.0
"""How long a job under Slurm may take to write its last checkpoint."""
FLAGS = (
    ("image", "IMAGE", "the image of all processes, with kvps and COMMAND in it"),
    ("namespace", "NS", "the namespace in each manifest (none)"),
    ("name", "NAME", f"the name of the job ({DEFAULT_NAME})"),
    ("cpu", "CPU", "processors of a worker, such as 4; on Kubernetes also 500m (1)"),
    ("memory", "BYTES", "memory of a worker, such as 8Gi (Kubernetes: 4Gi, Slurm: its default)"),
    ("gpu", "G", "GPUs of a worker (0)"),
    ("server-cpu", "CPU", "processors of a server (1)"),
    ("server-memory", "BYTES", "memory of a server (as --memory)"),
    ("nodes", "M", "sbatch: the number of nodes (1)"),
    (
        "checkpoint-claim",
        "CLAIM",
        "a PersistentVolumeClaim for checkpoints and for the scheduler's state; a server or scheduler "
        "that fails is started again (none)",
    ),
)
"""Flags, their values and their help."""
OF_KUBERNETES = ("image", "namespace", "checkpoint-claim")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add ``--dry-run``, and the flags that have a meaning with it alone."""
    group = parser.add_argument_group("Kubernetes and Slurm", "these flags need --dry-run")
    group.add_argument(
        "--dry-run",
        choices=[*KINDS, SLURM],
        help="print to stdout and start nothing. Manifests for Kubernetes: a JobSet, a TrainJob "
        "of Kubeflow, or a Job and StatefulSets (k8s). A batch script for Slurm: sbatch",
    )
    for name, metavar, what in FLAGS:
        group.add_argument(f"--{name}", metavar=metavar, help=what)


def text_if_any(parsed: argparse.Namespace, command: Sequence[str]) -> str:
    """Return the text that these flags of ``kvps-launch`` want printed in place of a start; empty if none.

    Raises:
        ConfigError: for a flag that is missing, malformed, or without a meaning here.
    """
    if parsed.dry_run is not None:
        return text(parsed, command)
    for name, _, _ in FLAGS:
        if vars(parsed)[name.replace("-", "_")] is not None:
            raise ConfigError(
                f"--{name} needs --dry-run: add --dry-run=jobset to print manifests, or omit --{name}"
            )
    return ""


def text(parsed: argparse.Namespace, command: Sequence[str]) -> str:
    """Return the batch script, or the manifests after the commands that make their secrets.

    Raises:
        ConfigError: for a flag that is missing, malformed, or without a meaning there.
    """
    if parsed.replicas not in (None, "0"):
        raise ConfigError(
            "--replicas has no meaning with --dry-run: add it to the kvps-scheduler of the manifest or the "
            "kvps-launch of the script"
        )
    if parsed.dry_run == SLURM:
        return sbatch.script(_batch_job(parsed, command))
    if parsed.nodes is not None:
        raise ConfigError("--nodes is for --dry-run=sbatch: Kubernetes places the pods; omit it")
    job = _job(parsed, command)
    objects = [f"---\n{document(manifest)}" for manifest in manifests(job, parsed.dry_run)]
    return head(job, parsed.keys or "keys") + "".join(objects)


def head(job: JobDescription, keys: str) -> str:
    """Return a comment: the commands that make the secrets of ``job`` from the key directory ``keys``."""
    where = "" if job.namespace is None else f" --namespace {job.namespace}"
    lines = ["Before the first 'kubectl apply', make the keys, and a Secret for each role:", ""]
    lines.append(f"  kvps keygen {shlex.quote(keys)}")
    for role, size in (("scheduler", 1), ("server", job.servers), ("worker", job.workers)):
        if size:
            paths = [shlex.quote(str(PurePosixPath(keys, file))) for file in secret_files(role)]
            files = "".join([f" \\\n    --from-file={path}" for path in paths])
            lines += f"  kubectl create secret generic {job.name}-{role}-keys{where}{files}".split("\n")
    return "".join([f"# {line}".rstrip() + "\n" for line in lines])


def _job(parsed: argparse.Namespace, command: Sequence[str]) -> JobDescription:
    if parsed.image is None:
        raise ConfigError(
            "--image is missing: a pod needs an image with kvps and the command in it. Build it with 'docker "
            "build -f deploy/Dockerfile -t REGISTRY/kvps .', push it, and give --image REGISTRY/kvps"
        )
    if parsed.checkpoint_dir is not None:
        raise ConfigError(
            "--checkpoint-dir names a directory of this machine: give --checkpoint-claim NAME with a "
            "PersistentVolumeClaim instead"
        )
    if parsed.env_server or parsed.env_worker:
        raise ConfigError(
            "--env-server and --env-worker have no manifest: give --env NAME=VALUE for both roles, or set "
            "them in an overlay of kustomize"
        )
    if parsed.http is not None:
        raise ConfigError(
            "--http has no manifest: set KVPS_HTTP=127.0.0.1:9464 of the scheduler in an overlay of "
            "kustomize, and read the page by 'kubectl port-forward'"
        )
    if parsed.insecure:
        raise ConfigError("--insecure has no manifest: jobs on Kubernetes have keys; omit it")
    workers = config.as_whole("-n", parsed.workers)
    servers = workers if parsed.servers is None else config.as_whole("-s", parsed.servers)
    every = parsed.checkpoint_every
    grace = parsed.grace
    gpus = 0 if parsed.gpu is None else config.as_whole("--gpu", parsed.gpu)
    return JobDescription(
        name=parsed.name or DEFAULT_NAME,
        image=parsed.image,
        workers=workers,
        servers=servers,
        command=tuple(command),
        namespace=parsed.namespace,
        env=_variables(parsed.env),
        worker=Resources(parsed.cpu or "1", parsed.memory or "4Gi", gpus),
        server=Resources(parsed.server_cpu or "1", parsed.server_memory or "4Gi"),
        checkpoint_claim=parsed.checkpoint_claim,
        checkpoint_every=0.0 if every is None else config.checkpoint_every_s(every),
        max_restarts=config.as_whole("--max-restarts", parsed.max_restarts),
        grace_s=None if grace is None else config.as_seconds("--grace", grace),
    )


def _batch_job(parsed: argparse.Namespace, command: Sequence[str]) -> sbatch.BatchJob:
    for name in OF_KUBERNETES:
        if vars(parsed)[name.replace("-", "_")] is not None:
            raise ConfigError(f"--{name} is for Kubernetes, and --dry-run=sbatch has none: omit it")
    if parsed.hosts is not None:
        raise ConfigError("-H is for --launcher ssh: Slurm chooses the nodes; omit it")
    workers = config.as_whole("-n", parsed.workers)
    grace_s = None if parsed.grace is None else config.as_seconds("--grace", parsed.grace)
    if grace_s is None and parsed.checkpoint_dir is not None:
        grace_s = DEFAULT_GRACE_S
    every = parsed.checkpoint_every
    if every is not None:
        config.checkpoint_every_s(every)
    restarts = config.as_whole("--max-restarts", parsed.max_restarts)
    flags = {
        "--max-restarts": str(restarts) if restarts else None,
        "--checkpoint-every": every,
        "--keys": parsed.keys,
        "--log-level": parsed.log_level,
        "--log-format": parsed.log_format,
        "--http": parsed.http,
        "--rsh": parsed.rsh,
        "--python": None if parsed.python == sys.executable else parsed.python,
    }
    words = [word for flag, value in flags.items() if value is not None for word in (flag, value)]
    for role in ("server", "worker"):
        for setting in vars(parsed)[f"env_{role}"]:
            words += [f"--env-{role}", setting]
    return sbatch.BatchJob(
        name=parsed.name or DEFAULT_NAME,
        nodes=1 if parsed.nodes is None else config.as_whole("--nodes", parsed.nodes),
        workers=workers,
        servers=workers if parsed.servers is None else config.as_whole("-s", parsed.servers),
        command=command,
        flags=[*words, *(["--insecure"] if parsed.insecure else [])],
        worker=_share("", parsed.cpu, parsed.memory),
        server=_share("server-", parsed.server_cpu, parsed.server_memory),
        gpus=0 if parsed.gpu is None else config.as_whole("--gpu", parsed.gpu),
        checkpoint_dir=parsed.checkpoint_dir,
        grace_s=grace_s,
        env=_variables(parsed.env),
    )


def _share(role: str, cpus: str | None, memory: str | None) -> sbatch.Share:
    return sbatch.Share(
        1 if cpus is None else config.as_whole(f"--{role}cpu", cpus),
        None if memory is None else config.as_bytes(f"--{role}memory", memory),
    )


def _variables(given: Sequence[str]) -> dict[str, str]:
    pairs = [variable.partition("=") for variable in given]
    for name, equals, value in pairs:
        if not name or not equals:
            raise ConfigError(f"--env {name + value!r}: write it as NAME=VALUE")
    return {name: value for name, _, value in pairs}
