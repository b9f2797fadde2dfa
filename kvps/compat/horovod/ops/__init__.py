"""The collectives of Horovod's interface."""
