"""``kvps demo``: a job that loses a worker and a server, and no update."""
