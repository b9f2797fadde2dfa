"""Schemas: manifests have the fields that Kubernetes, JobSet and Kubeflow Trainer define, and no others."""

from typing import Any

import pytest

from kvps.platforms.kubernetes.manifests import KINDS, manifests
from tests.unit.platforms.kubernetes import custom_resources
from tests.unit.platforms.kubernetes.jobs import JOBS, job_specs, jobset_of

VERSIONS = ("1.29", "1.32", "1.37")
"""From the first in which a Job recreates one index."""


@pytest.fixture
def schemas() -> Any:
    return pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate is not installed: pip install kubernetes-validate"
    )


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("kind", KINDS)
def test_kubernetes_knows_every_field(schemas: Any, kind: str, name: str, version: str) -> None:
    checked = 0
    for manifest in manifests(JOBS[name], kind):
        if (manifest["apiVersion"], manifest["kind"]) not in custom_resources.KINDS:
            schemas.validate(manifest, version, strict=True)
            checked += 1
    assert checked >= 2
    for spec in job_specs(JOBS[name], kind).values():
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "a"}, "spec": spec}
        schemas.validate(job, version, strict=True)


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("kind", ["jobset", "trainjob"])
def test_custom_resources_have_their_structure(kind: str, name: str) -> None:
    checked = 0
    for manifest in manifests(JOBS[name], kind):
        shape = custom_resources.KINDS.get((str(manifest["apiVersion"]), str(manifest["kind"])))
        if shape is not None:
            whole = {"apiVersion!": str, "kind!": str, "metadata!": custom_resources.METADATA, "spec!": shape}
            assert custom_resources.faults(manifest, whole, str(manifest["kind"])) == []
            checked += 1
    assert checked == {"jobset": 1, "trainjob": 2}[kind]


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("kind", ["jobset", "trainjob"])
def test_names_within_a_jobset_refer_to_its_jobs(kind: str, name: str) -> None:
    spec = jobset_of(JOBS[name], kind)
    names = [item["name"] for item in spec["replicatedJobs"]]
    named = [*spec["successPolicy"]["targetReplicatedJobs"]]
    for rule in spec["failurePolicy"]["rules"]:
        named += rule.get("targetReplicatedJobs", [])
    for item in spec["replicatedJobs"]:
        named += [each["name"] for each in item.get("dependsOn", [])]
    assert set(named) <= set(names)
    assert len(names) == len(set(names))
