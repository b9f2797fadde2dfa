"""Manifests of a job for Kubernetes: a JobSet, a TrainJob of Kubeflow, or a Job and StatefulSets."""
