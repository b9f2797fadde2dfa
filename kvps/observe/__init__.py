"""Observability: metrics, findings and logs of a process, and the HTTP endpoints that show them."""
