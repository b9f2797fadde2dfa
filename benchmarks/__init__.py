"""Measurements that need a clone of the repository: ``python -m benchmarks.NAME`` in its root."""
