"""Traces: spans of time of all processes, gathered by the scheduler; and the clocks by which they are put in order."""
