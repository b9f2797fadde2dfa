"""Checkpoints on disk: the servers' snapshots as files, and the manifest that makes them one cut."""
