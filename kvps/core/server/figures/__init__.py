"""Figures of a server: its counters, and the lateness of each rank."""
