"""Chunks of values: memory, rounds, and the logs of deltas and changed rows."""
