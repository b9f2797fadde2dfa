"""The ``kvps bench`` command: kvps and gloo push and pull the same arrays, in turns."""
