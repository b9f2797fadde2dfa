"""Observability: the metrics of a process, and the HTTP endpoints that show them."""
