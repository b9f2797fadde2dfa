"""Descriptions of jobs for Kubernetes, checked; the pods of a job; and YAML.

The description of a job that a platform is to run, checked where it is made.

YAML of plain data: block mappings and lists, and JSON for every scalar.

PyYAML would be a dependency for one command, and its flags decide what the output looks like. A
JSON scalar is a YAML scalar, so what has to be written here is the indentation alone. The tests
read the result with PyYAML.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from kvps.core.key_roles import ROLES
from kvps.core.supervisor import END_MAX_S
from kvps.errors import ConfigError

Data: TypeAlias = "dict[str, Data] | list[Data] | str | int | bool"
_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9./_-]*")
"""Texts that need no quotes, unless YAML 1.1 reads them as another type."""
_OTHER_TYPES = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}
_FOREIGN = re.compile(r"[^ -~]")


def document(data: Data) -> str:
    """Return ``data`` as a YAML document; a mapping keeps its order."""
    return "\n".join(_lines(data)) + "\n"


def _lines(data: Data) -> Iterator[str]:
    if isinstance(data, dict) and data:
        for name, value in data.items():
            is_nested = isinstance(value, dict | list) and value
            first, *more = _lines(value)
            if is_nested:
                yield f"{_scalar(name)}:"
                yield from (f"  {line}" for line in (first, *more))
            else:
                yield f"{_scalar(name)}: {first}"
    elif isinstance(data, list) and data:
        for value in data:
            first, *more = _lines(value)
            yield f"- {first}"
            yield from (f"  {line}" for line in more)
    else:
        yield _scalar(data)


def _scalar(data: Data) -> str:
    is_plain = isinstance(data, str) and _PLAIN.fullmatch(data) and data.lower() not in _OTHER_TYPES
    if is_plain:
        return str(data)
    # Not as JSON escapes them: half of a surrogate pair is no character to YAML.
    return _FOREIGN.sub(lambda m: f"\\U{ord(m[0]):08x}", json.dumps(data, ensure_ascii=False))


NAME_MAX = 40
"""Characters of a name: Kubernetes appends a role, two numbers and five random letters, and allows
63 in all."""
NAMESPACE_MAX = 63
OWN_VARIABLES = (
    *("KVPS_SCHEDULER", "KVPS_BIND", "KVPS_WORKERS", "KVPS_SERVERS", "KVPS_RANK", "KVPS_KEYS"),
    *("KVPS_STATE", "KVPS_CHECKPOINT_DIR", "KVPS_CHECKPOINT_EVERY", "KVPS_GRACE"),
    *("KVPS_INSECURE", "KVPS_ADVERTISE"),
)
"""Variables that the manifests set, or that would contradict them."""
_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
_QUANTITY = re.compile(r"(0*[1-9][0-9]*(\.[0-9]+)?|0*\.[0-9]*[1-9][0-9]*)(m|[kMGTPE]i?)?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True)
class Resources:
    """The resources that one process requests; the memory is its limit, too."""

    cpu: str
    memory: str
    gpu: int = 0


@dataclass(frozen=True, slots=True)
class JobDescription:
    """A job: its processes, their resources, and how often each is started again.

    Raises:
        ConfigError: for a value that the platform or a kvps process would refuse.
    """

    name: str
    image: str
    workers: int
    servers: int
    command: tuple[str, ...]
    namespace: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables of servers and workers."""
    worker: Resources = Resources("1", "4Gi")
    server: Resources = Resources("1", "4Gi")
    scheduler: Resources = Resources("250m", "512Mi")
    checkpoint_claim: str | None = None
    """The PersistentVolumeClaim for checkpoints and for the state of the scheduler; None for neither."""
    checkpoint_every: float = 0.0
    max_restarts: int = 0
    grace_s: float | None = None

    def __post_init__(self) -> None:
        _demand_name("--name", self.name, NAME_MAX)
        if self.namespace is not None:
            _demand_name("--namespace", self.namespace, NAMESPACE_MAX)
        if not self.image or self.image.startswith("-") or any(c.isspace() for c in self.image):
            raise ConfigError(
                f"--image {self.image!r} is not the name of an image: build it with 'docker build -f "
                "deploy/Dockerfile -t REGISTRY/kvps .', push it, and give --image REGISTRY/kvps"
            )
        if self.workers < 1:
            raise ConfigError(f"-n {self.workers}: use 1 or more workers")
        if not self.command:
            raise ConfigError("no command: put it after --, as in '-- python train.py'")
        for flag, given in (
            ("--cpu", self.worker.cpu),
            ("--memory", self.worker.memory),
            ("--server-cpu", self.server.cpu),
            ("--server-memory", self.server.memory),
        ):
            if not _QUANTITY.fullmatch(given):
                raise ConfigError(
                    f"{flag} {given!r} is not a quantity of Kubernetes above 0: write it as 500m, 2 or 4Gi"
                )
        for name in self.env:
            if not _VARIABLE.fullmatch(name):
                raise ConfigError(f"--env {name!r} is not the name of a variable: use letters, digits and _")
            if name in OWN_VARIABLES:
                raise ConfigError(
                    f"--env {name} contradicts the manifest, which sets the place of each process: omit it"
                )
        claim = self.checkpoint_claim
        if claim is not None and not (_SUBDOMAIN.fullmatch(claim) and len(claim) <= 253):
            raise ConfigError(
                f"--checkpoint-claim {claim!r} is not the name of a PersistentVolumeClaim: use lower-case "
                "letters, digits, '-' and '.'"
            )
        if self.checkpoint_every and claim is None:
            raise ConfigError(
                f"--checkpoint-every {self.checkpoint_every:g} has no volume to write to: give "
                "--checkpoint-claim NAME with a PersistentVolumeClaim of the namespace"
            )


def _demand_name(flag: str, given: str, most: int) -> None:
    if not _LABEL.fullmatch(given) or len(given) > most:
        raise ConfigError(
            f"{flag} {given!r} is not an RFC 1123 label that begins with a letter: use lower-case letters, "
            f"digits and '-', {most} characters at most"
        )


USER = 10001
"""The user of deploy/Dockerfile."""
SCHEDULER_PORT, SERVER_PORT = 9091, 9092
KEYS, STATE, CHECKPOINTS = "/keys", "/state", "/checkpoints"
END_MARGIN_S = 10
"""Seconds beyond the grace, for reports and for the last lines of a log."""
JOIN_MAX_S = 600
"""Seconds that a member looks for its scheduler: a node may have to pull the image first."""
KEEPER = """trap 'kill -KILL $!; exit 143' TERM; "$@" & wait $!"""
"""The shell that runs a server or scheduler: at SIGTERM it is lost, with an exit code that says so.

By themselves they would end the job, or their part in it, and end with 0: the platform would see a
pod that is done, and recreate it nowhere else.
"""
READABLE_BY_GROUP = 0o440
"""The mode of a key: a secret volume belongs to root, and fsGroup lets the group of the process read it."""
WHOLE_CPU = 1000
"""Thousandths of a processor."""


def labels(job: JobDescription, role: str | None = None) -> dict[str, Data]:
    """Return the labels of an object, or of the pods of ``role``."""
    found: dict[str, Data] = {"app.kubernetes.io/name": "kvps", "app.kubernetes.io/instance": job.name}
    return found if role is None else found | {"app.kubernetes.io/component": role}


def secret_files(role: str) -> list[str]:
    """Return the files of a key directory that the processes of ``role`` need."""
    if role == "scheduler":  # and the key of kvps status, for its probe
        return ["scheduler.key", "look.key", *(f"public/{each}.pub" for each in ROLES)]
    return [f"{role}.key", "public/scheduler.pub"]


def template(
    job: JobDescription,
    role: str,
    *,
    scheduler: list[Data],
    rank_label: str,
    container: str = "kvps",
    restart: str = "Never",
    place: str = "",
    is_standing: bool = False,
) -> dict[str, Data]:
    """Return the pod template of ``role``.

    Args:
        job: the job.
        role: ``scheduler``, ``server`` or ``worker``.
        scheduler: the environment that says where the scheduler is.
        rank_label: the label of a pod in which the platform writes its index.
        container: the name of the container.
        restart: the restart policy.
        place: the directory of the job on the claim, in which ``$(NAME)`` is a variable; the job's
            name if empty.
        is_standing: the scheduler waits for another job when this one is over.
    """
    volumes, mounts = _volumes(job, role, place or job.name)
    words = _command(job, role, is_standing)
    command = words[:1] if role == "worker" else ["sh", "-c", KEEPER, "kvps"]
    main: dict[str, Data] = {
        "name": container,
        "image": job.image,
        "command": [_literal(word) for word in command],
        "args": [_literal(word) for word in (words[1:] if role == "worker" else words)],
        "env": [*scheduler, *_environment(job, role, rank_label)],
        "resources": _resources(getattr(job, role)),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": mounts,
        **_ports_and_probes(role),
    }
    if role != "worker" and job.grace_s is not None:
        # All pods of a job that is deleted get SIGTERM at once; workers need the others for their last round.
        main["lifecycle"] = {"preStop": {"exec": {"command": ["sleep", str(_grace(job))]}}}
    spec: dict[str, Data] = {
        "restartPolicy": restart,
        "terminationGracePeriodSeconds": _grace(job) + END_MARGIN_S,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [main],
        "volumes": volumes,
    }
    if role == "server":  # a node that is lost takes few of them along
        spec["topologySpreadConstraints"] = [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": labels(job, role)},
            }
        ]
    return {"metadata": {"labels": labels(job, role)}, "spec": spec}


def _grace(job: JobDescription) -> int:
    return math.ceil(END_MAX_S if job.grace_s is None else job.grace_s)


def _command(job: JobDescription, role: str, is_standing: bool) -> list[str]:
    """Return the program of a role and its arguments."""
    if role == "scheduler":
        sizes = ["--workers", str(job.workers), "--servers", str(job.servers)]
        bind = ["--bind", f"tcp://0.0.0.0:{SCHEDULER_PORT}", "--state", STATE]
        return ["kvps-scheduler", *sizes, *bind, *(["--keep-alive"] if is_standing else [])]
    if role == "server":
        every = ["--checkpoint-dir", CHECKPOINTS, "--checkpoint-every", f"{job.checkpoint_every:g}"]
        cuts = [] if job.checkpoint_claim is None else every
        return ["kvps-server", "--bind", f"tcp://0.0.0.0:{SERVER_PORT}", *cuts]
    final = [] if job.max_restarts else ["--no-replacement"]
    grace = [] if job.grace_s is None else ["--grace", f"{job.grace_s:g}"]
    return ["kvps-worker", *final, *grace, "--", *job.command]


def _environment(job: JobDescription, role: str, rank_label: str) -> list[Data]:
    env = {"KVPS_KEYS": KEYS}
    found: list[Data] = []
    if role != "scheduler":
        index: Data = {"fieldRef": {"fieldPath": f"metadata.labels['{rank_label}']"}}
        found.append({"name": "KVPS_RANK", "valueFrom": index})
        # torch counts the processors of the node, and not those that the pod requests.
        threads = _threads(getattr(job, role).cpu)
        env |= {"OMP_NUM_THREADS": str(threads), "KVPS_JOIN_TIMEOUT": str(JOIN_MAX_S)}
        env |= {name: _literal(value) for name, value in job.env.items()}
    found += [{"name": name, "value": value} for name, value in env.items()]
    return found


def _literal(text: str) -> str:
    """Return ``text`` as it is written where Kubernetes replaces ``$(NAME)``."""
    return text.replace("$", "$$")


def _threads(cpu: str) -> int:
    thousandths = float(cpu[:-1]) if cpu.endswith("m") else float(cpu) * WHOLE_CPU
    return max(1, int(thousandths // WHOLE_CPU))


def _resources(wanted: Resources) -> dict[str, Data]:
    limits: dict[str, Data] = {"memory": wanted.memory}
    if wanted.gpu:
        limits["nvidia.com/gpu"] = wanted.gpu
    return {"requests": {"cpu": wanted.cpu, "memory": wanted.memory}, "limits": limits}


def _volumes(job: JobDescription, role: str, place: str) -> tuple[list[Data], list[Data]]:
    items: list[Data] = [{"key": path.removeprefix("public/"), "path": path} for path in secret_files(role)]
    volumes: list[Data] = [
        {
            "name": "keys",
            "secret": {
                "secretName": f"{job.name}-{role}-keys",
                "defaultMode": READABLE_BY_GROUP,
                "items": items,
            },
        },
        {"name": "tmp", "emptyDir": {}},
    ]
    mounts: list[Data] = [
        {"name": "keys", "mountPath": KEYS, "readOnly": True},
        {"name": "tmp", "mountPath": "/tmp", "subPath": "tmp"},
        {"name": "tmp", "mountPath": "/home/kvps", "subPath": "home"},
    ]
    if role == "worker":  # data loaders pass batches through it, and 64 MiB are the default
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory"}})
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})
        return volumes, mounts
    path = STATE if role == "scheduler" else CHECKPOINTS
    if job.checkpoint_claim is not None:
        claim: Data = {"claimName": job.checkpoint_claim}
        volumes.append({"name": "kept", "persistentVolumeClaim": claim})
        mounts.append({"name": "kept", "mountPath": path, "subPathExpr": place + path})
    elif role == "scheduler":  # outlives the container, and not the pod
        volumes.append({"name": "kept", "emptyDir": {}})
        mounts.append({"name": "kept", "mountPath": path})
    return volumes, mounts


def _ports_and_probes(role: str) -> dict[str, Data]:
    """Return the port of a role, and how the platform sees that it listens.

    Only the scheduler has a liveness probe: it watches all other members itself.
    """
    if role == "worker":
        return {}
    port = SCHEDULER_PORT if role == "scheduler" else SERVER_PORT
    found: dict[str, Data] = {
        "ports": [{"name": role, "containerPort": port}],
        "readinessProbe": {"tcpSocket": {"port": port}, "periodSeconds": 5},
    }
    if role == "scheduler":
        address = f"tcp://127.0.0.1:{port}"
        found["livenessProbe"] = {
            "exec": {"command": ["kvps", "status", "--scheduler", address]},
            "initialDelaySeconds": 30,
            "periodSeconds": 30,
            "timeoutSeconds": 15,
            "failureThreshold": 4,
        }
    return found
