"""The flags of ``kvps-launch --dry-run``, and the text that it prints."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import PurePosixPath

from kvps import config
from kvps.errors import ConfigError
from kvps.launchers.job import JobDescription, Resources
from kvps.launchers.kubernetes import KINDS, manifests
from kvps.launchers.pods import secret_files
from kvps.launchers.yaml_text import document

DEFAULT_NAME = "kvps"
FLAGS = (
    ("image", "IMAGE", "the image of all processes, with kvps and COMMAND in it"),
    ("namespace", "NS", "the namespace in each manifest (none)"),
    ("name", "NAME", f"the name of the job ({DEFAULT_NAME})"),
    ("cpu", "CPU", "processors of a worker, such as 500m or 4 (1)"),
    ("memory", "BYTES", "memory of a worker, such as 8Gi (4Gi)"),
    ("gpu", "G", "GPUs of a worker (0)"),
    ("server-cpu", "CPU", "processors of a server (1)"),
    ("server-memory", "BYTES", "memory of a server (4Gi)"),
    (
        "checkpoint-claim",
        "CLAIM",
        "a PersistentVolumeClaim for checkpoints and for the scheduler's state; a server or scheduler "
        "that fails is started again (none)",
    ),
)
"""Flags, their values and their help."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add ``--dry-run``, and the flags that have a meaning with it alone."""
    group = parser.add_argument_group("Kubernetes", "these flags need --dry-run")
    group.add_argument(
        "--dry-run",
        choices=KINDS,
        help="print manifests to stdout and start nothing: a JobSet, a TrainJob of Kubeflow, or a Job and "
        "StatefulSets (k8s)",
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
    """Return the manifests that these flags of ``kvps-launch`` describe, after the commands that make their secrets.

    Raises:
        ConfigError: for a flag that is missing, malformed, or without a meaning on Kubernetes.
    """
    job = _job(parsed, command)
    objects = [f"---\n{document(one)}" for one in manifests(job, parsed.dry_run)]
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
            lines += f"  kubectl create secret generic {job.name}-{role}-keys{where}{files}".split(
                "\n"
            )
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


def _variables(given: Sequence[str]) -> dict[str, str]:
    pairs = [one.partition("=") for one in given]
    for name, equals, value in pairs:
        if not name or not equals:
            raise ConfigError(f"--env {name + value!r}: write it as NAME=VALUE")
    return {name: value for name, _, value in pairs}
