"""Figures of a job, as a scheduler knows it: its state, what servers measured, and the faults of
the last hours."""
