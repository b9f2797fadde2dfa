"""Tools to look at a job and to measure it, an annex: nothing else in kvps imports it."""
