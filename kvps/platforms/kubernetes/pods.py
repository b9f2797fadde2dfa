"""The pods of a job on Kubernetes: containers, keys, volumes and probes of each role."""

from __future__ import annotations

import math

from kvps.core.keys import ROLES
from kvps.core.supervisor import END_MAX_S
from kvps.platforms.kubernetes.job import JobDescription, Resources
from kvps.platforms.kubernetes.yaml_text import Data

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
