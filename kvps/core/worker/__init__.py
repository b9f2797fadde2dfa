"""The rules of a worker."""
