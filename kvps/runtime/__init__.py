"""Processes: a core, its loop, its sockets and its end, for each role."""
