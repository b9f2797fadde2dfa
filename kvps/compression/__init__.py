"""Gradient compression: codec specifications, their arithmetic, and the user's policy."""
