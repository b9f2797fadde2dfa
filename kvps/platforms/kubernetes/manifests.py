"""Manifests of a job for Kubernetes: a JobSet, a TrainJob of Kubeflow, or Jobs and StatefulSets alone.

==========  ==============================  =================================================
kind        a failed process                exit code 78
==========  ==============================  =================================================
jobset      its Job is recreated            the JobSet fails
trainjob    its pod is recreated            the TrainJob fails
k8s         its pod or container restarts   of a worker: the Job fails; of others: they restart
==========  ==============================  =================================================
"""

from __future__ import annotations

from kvps.core.membership_client import EXIT_CONFIG
from kvps.errors import ConfigError
from kvps.platforms.kubernetes.pods import SCHEDULER_PORT, SERVER_PORT, Data, JobDescription, labels, template

KINDS = ("jobset", "trainjob", "k8s")
JOB_INDEX = "jobset.sigs.k8s.io/job-index"
JOBSET_LABEL = "jobset.sigs.k8s.io/jobset-name"
COMPLETION_INDEX = "batch.kubernetes.io/job-completion-index"
POD_INDEX = "apps.kubernetes.io/pod-index"
GROUP = "trainer.kubeflow.org"
TRAINER_STEP = f"{GROUP}/trainjob-ancestor-step"
JOBSET_MAX = 1024
"""Replicas of a role for which a JobSet counts restarts."""
NODE = "node"
"""The Job, and the container, to which Kubeflow Trainer gives the command and the image of a TrainJob."""


def manifests(job: JobDescription, kind: str) -> list[dict[str, Data]]:
    """Return the objects of ``job``; ``kind`` is in :data:`KINDS`.

    Raises:
        ConfigError: if the job is too large for ``kind``.
    """
    made = {"jobset": _jobset, "trainjob": _trainjob, "k8s": _plain}[kind](job)
    return [_network_policy(job), _disruption_budget(job), *made]


# --- the objects of every kind --------------------------------------------------------------------


def _object(job: JobDescription, api: str, kind: str, spec: Data, name: str = "") -> dict[str, Data]:
    metadata: dict[str, Data] = {"name": name or job.name}
    if job.namespace is not None:
        metadata["namespace"] = job.namespace
    return {"apiVersion": api, "kind": kind, "metadata": metadata | {"labels": labels(job)}, "spec": spec}


def _network_policy(job: JobDescription) -> dict[str, Data]:
    """Return the rule that pods of the job alone reach its pods; workers listen at ports of their
    own choice."""
    selector: Data = {"matchLabels": labels(job)}
    spec: Data = {
        "podSelector": selector,
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [{"podSelector": selector}]}],
    }
    return _object(job, "networking.k8s.io/v1", "NetworkPolicy", spec)


def _disruption_budget(job: JobDescription) -> dict[str, Data]:
    """Return the rule that no server and no scheduler is evicted.

    A budget for pods of Jobs can only name how many must stay.
    """
    held: list[Data] = ["scheduler", "server"]
    role: Data = {"key": "app.kubernetes.io/component", "operator": "In", "values": held}
    spec: Data = {
        "minAvailable": 1 + job.servers,
        "selector": {"matchLabels": labels(job), "matchExpressions": [role]},
    }
    return _object(job, "policy/v1", "PodDisruptionBudget", spec)


def _roles(job: JobDescription) -> dict[str, int]:
    """Return how many processes each role has, in the order of their start."""
    sizes = {"scheduler": 1, "server": job.servers, "worker": job.workers}
    return {role: size for role, size in sizes.items() if size}


def _restarts(job: JobDescription, role: str) -> int:
    """Return how often a process may be started again: the model of a server without a claim is gone."""
    is_kept = role == "worker" or job.checkpoint_claim is not None
    return job.max_restarts if is_kept else 0


def _job_spec(job: JobDescription, role: str, pod: Data, container: str) -> dict[str, Data]:
    """Return a Job of one pod."""
    codes: Data = {"containerName": container, "operator": "In", "values": [EXIT_CONFIG]}
    rules: list[Data] = [{"action": "FailJob", "onExitCodes": codes}]
    if _restarts(job, role):  # the eviction of a pod counts for no restart
        gone: Data = {"type": "DisruptionTarget", "status": "True"}
        rules.append({"action": "Ignore", "onPodConditions": [gone]})
    return {
        "completionMode": "Indexed",
        "completions": 1,
        "parallelism": 1,
        "backoffLimit": 0,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {"rules": rules},
        "template": pod,
    }


def _indexed(job: JobDescription, role: str, count: int, pod: Data, container: str) -> dict[str, Data]:
    """Return a Job of ``count`` pods, each of which is recreated by itself."""
    spec = _job_spec(job, role, pod, container)
    del spec["backoffLimit"]
    more: dict[str, Data] = {"backoffLimitPerIndex": _restarts(job, role), "maxFailedIndexes": 0}
    return spec | {"completions": count, "parallelism": count} | more


# --- JobSet ---------------------------------------------------------------------------------------


def _jobset(job: JobDescription) -> list[dict[str, Data]]:
    most = max(job.workers, job.servers)
    if most > JOBSET_MAX:
        raise ConfigError(
            f"{most} processes of a role are more than the {JOBSET_MAX} that a JobSet starts again one by "
            "one: use --dry-run=trainjob or --dry-run=k8s"
        )
    host = f"{job.name}-scheduler-0-0.{job.name}"
    where: list[Data] = [{"name": "KVPS_SCHEDULER", "value": f"tcp://{host}:{SCHEDULER_PORT}"}]
    jobs: list[Data] = []
    for role, count in _roles(job).items():
        pod = template(job, role, scheduler=where, rank_label=JOB_INDEX)
        spec = _job_spec(job, role, pod, "kvps")
        jobs.append({"name": role, "replicas": count, **_after(job, role), "template": {"spec": spec}})
    wrong: list[Data] = ["PodFailurePolicy"]
    rules: list[Data] = [{"name": "wrongConfiguration", "action": "FailJobSet", "onJobFailureReasons": wrong}]
    returning: list[Data] = [role for role in _roles(job) if _restarts(job, role)]
    if returning:  # none would mean all
        rules.append({"name": "startAgain", "action": "RestartJob", "targetReplicatedJobs": returning})
    rules.append({"name": "lost", "action": "FailJobSet"})
    policy: Data = {"maxRestarts": job.max_restarts, "rules": rules}
    return [_object(job, "jobset.x-k8s.io/v1alpha2", "JobSet", _jobset_spec(jobs, policy, "worker"))]


def _jobset_spec(jobs: list[Data], failure_policy: Data, worker: str) -> dict[str, Data]:
    return {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "successPolicy": {"operator": "All", "targetReplicatedJobs": [worker]},
        "failurePolicy": failure_policy,
        "replicatedJobs": jobs,
    }


def _after(job: JobDescription, role: str) -> dict[str, Data]:
    """Return the dependency of a role: the scheduler listens first, then the servers do."""
    before = {"scheduler": "", "server": "scheduler", "worker": "server" if job.servers else "scheduler"}
    return {"dependsOn": [{"name": before[role], "status": "Ready"}]} if before[role] else {}


# --- Kubeflow Trainer -----------------------------------------------------------------------------


def _trainjob(job: JobDescription) -> list[dict[str, Data]]:
    name = "$(JOBSET_NAME)"  # any TrainJob of the runtime finds its own scheduler
    where: list[Data] = [
        {
            "name": "JOBSET_NAME",
            "valueFrom": {"fieldRef": {"fieldPath": f"metadata.labels['{JOBSET_LABEL}']"}},
        },
        {"name": "KVPS_SCHEDULER", "value": f"tcp://{name}-scheduler-0-0.{name}:{SCHEDULER_PORT}"},
    ]
    jobs: list[Data] = []
    for role, count in _roles(job).items():
        # Trainer overwrites the command of each container of this name, also of other roles.
        called = (NODE, NODE) if role == "worker" else (role, "kvps")
        pod = template(
            job, role, scheduler=where, rank_label=COMPLETION_INDEX, container=called[1], place=name
        )
        inner: dict[str, Data] = {"spec": _indexed(job, role, count, pod, called[1])}
        if role == "worker":
            inner = {"metadata": {"labels": {TRAINER_STEP: "trainer"}}, **inner}
        jobs.append({"name": called[0], "replicas": 1, **_after(job, role), "template": inner})
    policy: Data = {"maxRestarts": 0, "rules": [{"name": "lost", "action": "FailJobSet"}]}
    api = f"{GROUP}/v1alpha1"
    runtime: Data = {
        "mlPolicy": {"numNodes": job.workers},
        "template": {"spec": _jobset_spec(jobs, policy, NODE)},
    }
    marks: dict[str, Data] = labels(job) | {f"{GROUP}/framework": "kvps"}
    shared = _object(job, api, "ClusterTrainingRuntime", runtime)
    shared["metadata"] = {"name": job.name, "labels": marks}  # a runtime belongs to the cluster
    chosen: Data = {
        "runtimeRef": {"apiGroup": GROUP, "kind": "ClusterTrainingRuntime", "name": job.name},
        "trainer": {"numNodes": job.workers, "image": job.image},
    }
    return [shared, _object(job, api, "TrainJob", chosen)]


# --- without custom resources ---------------------------------------------------------------------


def _plain(job: JobDescription) -> list[dict[str, Data]]:
    host = f"{job.name}-scheduler-0.{job.name}"
    where: list[Data] = [{"name": "KVPS_SCHEDULER", "value": f"tcp://{host}:{SCHEDULER_PORT}"}]
    ports: list[Data] = [{"name": "scheduler", "port": SCHEDULER_PORT}]
    if job.servers:
        ports.append({"name": "server", "port": SERVER_PORT})
    service: Data = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": labels(job),
        "ports": ports,
    }
    made = [_object(job, "v1", "Service", service)]
    for role, count in _roles(job).items():
        is_worker = role == "worker"
        pod = template(
            job,
            role,
            scheduler=where,
            rank_label=COMPLETION_INDEX if is_worker else POD_INDEX,
            restart="Never" if is_worker else "Always",
            is_standing=True,
        )
        name = f"{job.name}-{role}"
        if is_worker:
            spec = _indexed(job, role, count, pod, "kvps")
            made.append(_object(job, "batch/v1", "Job", spec, name))
            continue
        stateful: Data = {
            "serviceName": job.name,
            "replicas": count,
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": labels(job, role)},
            "template": pod,
        }
        made.append(_object(job, "apps/v1", "StatefulSet", stateful, name))
    return made
