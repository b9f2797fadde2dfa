"""``kvps doctor``: measurements of a process's way to its cluster, with their meaning."""
