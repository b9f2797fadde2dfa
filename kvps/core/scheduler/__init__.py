"""The rules of the scheduler."""
