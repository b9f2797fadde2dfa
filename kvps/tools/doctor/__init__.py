"""``kvps doctor``: measurements of a process's way to its cluster, and what they mean."""
