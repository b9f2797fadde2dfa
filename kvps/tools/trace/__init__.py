"""Timelines: spans of all processes on one clock, as a file for Perfetto, and in words what bounds a step."""
