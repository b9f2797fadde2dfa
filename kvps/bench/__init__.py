"""The ``kvps bench`` command: kvps and its peers push and pull the same arrays, in turns."""
