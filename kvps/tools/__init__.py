"""Tools to look at a job and to measure it, an annex: the rest of kvps reaches it through kvps.annexes."""
