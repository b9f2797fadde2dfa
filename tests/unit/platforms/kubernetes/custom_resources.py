"""The structure of JobSet v1alpha2 and of Kubeflow Trainer v1alpha1, as far as the manifests use it.

Written from the Go types of JobSet v0.12 and Trainer v2.3. A mapping lists the fields that may occur, a list the values
that a field may have, and a type the type of a value. A field that ends with "!" must occur. ``JOB`` is the template of a
Job, which Kubernetes' own schema describes.
"""

from __future__ import annotations

from typing import Any

JOB = object()
METADATA: dict[str, Any] = {"name!": str, "namespace": str, "labels": None}
DEPENDENCY = {"name!": str, "status!": ["Ready", "Complete"]}
ACTIONS = [
    *("FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"),
    *("RestartJob", "RestartJobAndIgnoreMaxRestarts"),
]
REASONS = [
    "BackoffLimitExceeded",
    "DeadlineExceeded",
    "FailedIndexes",
    "MaxFailedIndexesExceeded",
    "PodFailurePolicy",
]
RULE = {
    "name!": str,
    "action!": ACTIONS,
    "onJobFailureReasons": {"each": REASONS},
    "targetReplicatedJobs": {"each": str},
}
JOBSET_SPEC = {
    "replicatedJobs!": {
        "each": {"name!": str, "replicas": int, "dependsOn": {"each": DEPENDENCY}, "template!": JOB}
    },
    "network": {"enableDNSHostnames": bool, "subdomain": str, "publishNotReadyAddresses": bool},
    "successPolicy": {"operator!": ["All", "Any"], "targetReplicatedJobs": {"each": str}},
    "failurePolicy": {"maxRestarts": int, "rules": {"each": RULE}},
}
REFERENCE = {"name!": str, "apiGroup": str, "kind": ["ClusterTrainingRuntime", "TrainingRuntime"]}
TRAINER = {"image": str, "command": {"each": str}, "args": {"each": str}, "numNodes": int}
KINDS = {
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): JOBSET_SPEC,
    ("trainer.kubeflow.org/v1alpha1", "ClusterTrainingRuntime"): {
        "mlPolicy": {"numNodes": int},
        "template!": {"spec": JOBSET_SPEC},
    },
    ("trainer.kubeflow.org/v1alpha1", "TrainJob"): {"runtimeRef!": REFERENCE, "trainer": TRAINER},
}


def faults(found: Any, shape: Any, place: str) -> list[str]:
    """Return the places in which ``found`` has another structure than ``shape``."""
    if shape is None or shape is JOB:
        return []
    if isinstance(shape, type):
        return [] if type(found) is shape else [f"{place}: {found!r} is no {shape.__name__}"]
    if isinstance(shape, list):
        return [] if found in shape else [f"{place}: {found!r} is none of {shape}"]
    if set(shape) == {"each"}:
        return [
            fault
            for number, item in enumerate(found)
            for fault in faults(item, shape["each"], f"{place}[{number}]")
        ]
    fields = {name.removesuffix("!"): inner for name, inner in shape.items()}
    missing = [
        f"{place}.{name[:-1]} is missing" for name in shape if name.endswith("!") and name[:-1] not in found
    ]
    unknown = [f"{place}.{name} is no field" for name in found if name not in fields]
    known = [
        fault
        for name, item in found.items()
        if name in fields
        for fault in faults(item, fields[name], f"{place}.{name}")
    ]
    return [*missing, *unknown, *known]
