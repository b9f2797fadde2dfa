"""Whole jobs within one process: in threads, or in the calling thread alone."""
