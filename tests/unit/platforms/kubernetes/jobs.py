"""Descriptions of jobs for the tests, and ways into their manifests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvps.platforms.kubernetes.manifests import manifests
from kvps.platforms.kubernetes.pods import JobDescription, Resources

SMALL = JobDescription("digits", "registry.example/kvps:1", 4, 2, ("python", "train.py"))
FULL = JobDescription(
    name="digits",
    image="registry.example/kvps:1",
    workers=4,
    servers=2,
    command=("python", "train.py", "--epochs", "3"),
    namespace="team",
    env={"LEVEL": "3", "PATH_LIKE": "$(HOME)/x"},
    worker=Resources("7500m", "16Gi", 1),
    server=Resources("2", "8Gi"),
    checkpoint_claim="cuts",
    checkpoint_every=60.0,
    max_restarts=3,
    grace_s=19.5,
)
SERVERLESS = JobDescription("digits", "kvps", 2, 0, ("python", "train.py"))
JOBS = {"small": SMALL, "full": FULL, "serverless": SERVERLESS}


def objects(job: JobDescription, kind: str) -> dict[str, Any]:
    """Return the objects by their kind and, if there are several of it, their role."""
    found: dict[str, Any] = {}
    for manifest in manifests(job, kind):
        metadata: Any = manifest["metadata"]
        role = metadata["name"].removeprefix(job.name)
        found[f"{manifest['kind']}{role}"] = manifest
    return found


def jobset_of(job: JobDescription, kind: str) -> Any:
    """Return the specification of the JobSet of a jobset or a trainjob."""
    if kind == "jobset":
        return objects(job, kind)["JobSet"]["spec"]
    return objects(job, kind)["ClusterTrainingRuntime"]["spec"]["template"]["spec"]


def job_specs(job: JobDescription, kind: str) -> dict[str, Any]:
    """Return the specifications of the Jobs by role."""
    if kind == "k8s":
        return {"worker": objects(job, kind)["Job-worker"]["spec"]}
    return {
        role_of(item["template"]["spec"]["template"]): item["template"]["spec"]
        for item in jobset_of(job, kind)["replicatedJobs"]
    }


def role_of(pod: Any) -> str:
    """Return the role of a pod template."""
    role: str = pod["metadata"]["labels"]["app.kubernetes.io/component"]
    return role


def pods(job: JobDescription, kind: str) -> dict[str, Any]:
    """Return the pod templates by role."""
    found = {role: spec["template"] for role, spec in job_specs(job, kind).items()}
    if kind == "k8s":
        for name, item in objects(job, kind).items():
            if name.startswith("StatefulSet"):
                found[role_of(item["spec"]["template"])] = item["spec"]["template"]
    return found


def container(pod: Any) -> Any:
    """Return the only container of a pod template."""
    (found,) = pod["spec"]["containers"]
    return found


def variables(pod: Any) -> dict[str, Any]:
    """Return the environment of a pod template: each value, or the field that it comes from."""
    return {
        item["name"]: item["value"] if "value" in item else item["valueFrom"]["fieldRef"]["fieldPath"]
        for item in container(pod)["env"]
    }


def mappings(data: Any) -> Iterator[dict[str, Any]]:
    """Yield each mapping within ``data``."""
    if isinstance(data, dict):
        yield data
    for each in data.values() if isinstance(data, dict) else data if isinstance(data, list) else ():
        yield from mappings(each)
