"""The rules. No socket, clock, thread, randomness, environment or log in here.

A message or the time goes in, effects come out (see :mod:`kvps.core.effects`). Arithmetic on
buffers is allowed; waiting is not. Time is an argument called ``now``, in seconds on a monotonic
clock. The import contracts in ``pyproject.toml`` keep it so.
"""
