"""Figures of a server: its counters and the lateness of each rank; and the lines of its log about
rounds and pushes."""
