"""Manifests: of three kinds, in which a failed process is recreated by itself, and exit code 78 ends the job."""

from dataclasses import replace
from typing import Any

import pytest

from kvps import config
from kvps.core.membership_client import EXIT_CONFIG
from kvps.errors import ConfigError
from kvps.platforms.kubernetes.manifests import KINDS, manifests
from tests.unit.platforms.kubernetes.jobs import (
    FULL,
    JOBS,
    SMALL,
    container,
    job_specs,
    jobset_of,
    mappings,
    objects,
    pods,
    role_of,
    variables,
)

JOBSETS = ("jobset", "trainjob")


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# --- every kind -----------------------------------------------------------------------------------


def test_the_namespace_is_in_each_object_that_has_one(kind: str) -> None:
    for name, item in objects(FULL, kind).items():
        assert item["metadata"].get("namespace") == (None if name.startswith("Cluster") else "team")
    for item in objects(SMALL, kind).values():
        assert "namespace" not in item["metadata"]


@pytest.mark.parametrize("name", JOBS)
def test_the_scheduler_expects_as_many_as_are_started(kind: str, name: str) -> None:
    job = JOBS[name]
    args = container(pods(job, kind)["scheduler"])["args"]
    assert args[args.index("--workers") + 1] == str(job.workers)
    assert args[args.index("--servers") + 1] == str(job.servers)
    assert started(job, kind) == {"scheduler": 1, "server": job.servers, "worker": job.workers}


def started(job: Any, kind: str) -> dict[str, int]:
    """Return how many pods of each role there will be."""
    found = {"server": 0}
    if kind == "k8s":
        for item in objects(job, kind).values():
            if item["kind"] == "StatefulSet":
                found[role_of(item["spec"]["template"])] = item["spec"]["replicas"]
        return found | {"worker": job_specs(job, kind)["worker"]["completions"]}
    for item in jobset_of(job, kind)["replicatedJobs"]:
        spec = item["template"]["spec"]
        assert spec["completions"] == spec["parallelism"]
        found[role_of(spec["template"])] = item["replicas"] * spec["completions"]
    return found


# --- where the scheduler is -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a", "digits", "a" * 40])
def test_members_know_the_name_of_the_scheduler(kind: str, name: str) -> None:
    job = replace(FULL, name=name)
    hosts = {
        "jobset": f"{name}-scheduler-0-0.{name}",
        "trainjob": f"{name}-scheduler-0-0.{name}",
        "k8s": f"{name}-scheduler-0.{name}",
    }
    for pod in pods(job, kind).values():
        # The name of the JobSet is that of the TrainJob, and the pod has it as a label.
        address = variables(pod)["KVPS_SCHEDULER"].replace("$(JOBSET_NAME)", name)
        assert config.as_address("KVPS_SCHEDULER", address) == f"tcp://{hosts[kind]}:9091"
        assert all(len(label) <= 63 for label in hosts[kind].split("."))


# --- how processes end ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", JOBS)
def test_exit_code_78_fails_the_job(kind: str, name: str) -> None:
    for role, spec in job_specs(JOBS[name], kind).items():
        first = spec["podFailurePolicy"]["rules"][0]
        assert first["action"] == "FailJob"
        assert first["onExitCodes"]["operator"] == "In"
        assert first["onExitCodes"]["values"] == [EXIT_CONFIG] == [78]
        assert first["onExitCodes"]["containerName"] == container(spec["template"])["name"], role
        assert spec["template"]["spec"]["restartPolicy"] == "Never"  # else there is no such policy


@pytest.mark.parametrize("kind", JOBSETS)
def test_a_job_that_78_failed_fails_the_jobset(kind: str) -> None:
    first = jobset_of(FULL, kind)["failurePolicy"]["rules"][0]
    assert first["action"] == "FailJobSet"
    assert first.get("onJobFailureReasons", ["PodFailurePolicy"]) == ["PodFailurePolicy"]
    assert "targetReplicatedJobs" not in first


def test_a_server_whose_model_nobody_keeps_is_not_recreated() -> None:
    job = replace(FULL, checkpoint_claim=None, checkpoint_every=0.0)
    rules = jobset_of(job, "jobset")["failurePolicy"]["rules"]
    assert rules[1]["targetReplicatedJobs"] == ["worker"]
    limits = {role: spec["backoffLimitPerIndex"] for role, spec in job_specs(job, "trainjob").items()}
    assert limits == {"scheduler": 0, "server": 0, "worker": 3}
    for kind in JOBSETS:
        for role, spec in job_specs(job, kind).items():
            actions = [item["action"] for item in spec["podFailurePolicy"]["rules"]]
            assert actions == (["FailJob", "Ignore"] if role == "worker" else ["FailJob"])


def test_without_restarts_the_first_failure_ends_the_job() -> None:
    rules = jobset_of(SMALL, "jobset")["failurePolicy"]["rules"]
    assert [rule["action"] for rule in rules] == ["FailJobSet", "FailJobSet"]
    for kind in KINDS:
        for spec in job_specs(SMALL, kind).values():
            assert spec.get("backoffLimit", 0) == spec.get("backoffLimitPerIndex", 0) == 0
            assert [item["action"] for item in spec["podFailurePolicy"]["rules"]] == ["FailJob"]


@pytest.mark.parametrize("kind", ["trainjob", "k8s"])
def test_a_failed_pod_is_recreated_alone(kind: str) -> None:
    for spec in job_specs(FULL, kind).values():
        assert spec["completionMode"] == "Indexed"
        assert spec["backoffLimitPerIndex"] == 3
        assert spec["maxFailedIndexes"] == 0
        assert "backoffLimit" not in spec
        assert spec["podReplacementPolicy"] == "Failed"  # no rank has two processes


def test_a_jobset_counts_the_restarts_of_1024_processes() -> None:
    assert jobset_of(replace(SMALL, workers=1024), "jobset")
    with pytest.raises(ConfigError, match=r"1025 processes .* use --dry-run=trainjob"):
        manifests(replace(SMALL, workers=1025), "jobset")


# --- Kubeflow Trainer -----------------------------------------------------------------------------


# --- no secrets -----------------------------------------------------------------------------------


def test_no_secret_is_in_the_text(kind: str) -> None:
    for manifest in manifests(FULL, kind):
        assert manifest["kind"] != "Secret"
        for mapping in mappings(manifest):
            assert not mapping.keys() & {"data", "stringData"}
