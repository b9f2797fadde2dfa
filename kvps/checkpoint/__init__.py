"""Checkpoints on disk: the images of the servers as files, and what makes them one cut."""
