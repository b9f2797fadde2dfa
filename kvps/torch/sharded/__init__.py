"""Sharded models: weights that live on the servers and are fetched for each pass."""
