"""The ``allreduce`` store: torch.distributed's collectives behind the KVStore's contract."""
