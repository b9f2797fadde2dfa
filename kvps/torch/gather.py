"""Gathers of objects made of data: from all workers to all, or to one of them.

These take the place of torch's ``all_gather_object`` and ``gather_object``, which pickle: there,
any rank runs code in the ranks that receive. Every worker calls, and the k-th call of a worker
matches the k-th call of every other. The bytes of all objects lie side by side in one key, to
which each worker adds its own, and zeros for the others.
"""

from __future__ import annotations

from typing import Any

import torch

from kvps.errors import ConfigError
from kvps.store.kvstore import KVStore
from kvps.torch.serialization import pack, unpack
from kvps.torch.sync.shared_stores import Options, own_store

OWNER = "gather"


def all_gather_object(
    obj: Any,
    name: str | None = None,
    *,
    kvstore: str | KVStore = "dist_sync",
    kvstore_options: Options = None,
) -> list[Any]:
    """Return the objects of all workers, by rank, on every worker.

    Args:
        obj: None, bool, int, float, complex, str, bytes, tensor or array, or list, tuple, dict, set of
            those. Tensors of other workers arrive on the CPU.
        name: pairs this call with calls of that name only.
        kvstore: a kind of store that sums, or such a store.
        kvstore_options: ``timeout``, ``on_worker_lost`` and ``worker_grace`` as in :func:`kvps.create`, for a
            ``kvstore`` that is named.

    Returns:
        One object for each rank; None for a worker that has left.

    Raises:
        ConfigError: on every worker, if an object contains anything else; the text names its rank,
            type and place.
        Timeout: if a worker does not call.

    Example:
        >>> losses = kvps.torch.all_gather_object({"loss": 0.5})  # doctest: +SKIP
    """
    found = _gather(obj, name, None, own_store(OWNER, kvstore, kvstore_options))
    assert found is not None
    return found


def gather_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    *,
    kvstore: str | KVStore = "dist_sync",
    kvstore_options: Options = None,
) -> list[Any] | None:
    """Return the objects of all workers, by rank, on the root; None on the other workers.

    Args:
        obj: as in :func:`all_gather_object`.
        root_rank: the rank that receives the objects.
        name: as in :func:`all_gather_object`.
        kvstore, kvstore_options: as in :func:`all_gather_object`.

    Raises:
        ConfigError: as in :func:`all_gather_object`, or for a rank that does not exist.
        Timeout: if a worker does not call.

    Example:
        >>> losses = kvps.torch.gather_object({"loss": 0.5})  # doctest: +SKIP
    """
    return _gather(obj, name, root_rank, own_store(OWNER, kvstore, kvstore_options))


@torch.no_grad()
def _gather(obj: Any, name: str | None, root: int | None, kv: KVStore) -> list[Any] | None:
    count, rank = kv.num_workers, kv.rank
    if root is not None and (type(root) is not int or not 0 <= root < count):
        raise ConfigError(f"root_rank={root!r}: there are {count} workers, so use 0 to {count - 1}")
    error: ConfigError | None = None
    try:
        packed = pack(obj)
    except ConfigError as raised:  # the other workers are told, so that they do not wait
        error, packed = raised, str(raised).encode()
    if count == 1:
        if error is not None:
            raise error
        return [obj]
    key = f"gather/{name or ''}"[:240]
    sizes = _exchanged_sizes(kv, f"{key}/sizes", -len(packed) if error else len(packed))
    # Whoever has all sizes knows that all workers have read the bytes of the call before: the key
    # may be replaced.
    row = torch.zeros(sum(map(abs, sizes)), dtype=torch.uint8, device="cpu")
    kv.broadcast(f"{key}/bytes", row, out=row)
    row.zero_()
    start = sum(map(abs, sizes[:rank]))
    row[start : start + len(packed)] = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
    is_wanted = root in (None, rank) or min(sizes) < 0
    if is_wanted or kv.type == "allreduce":  # there, all ranks make the same calls
        kv.pushpull(f"{key}/bytes", row, out=row)
    else:
        kv.push(f"{key}/bytes", row)
    if error is not None:
        raise error
    return _unpacked(row, sizes, rank, obj) if is_wanted else None


def _exchanged_sizes(kv: KVStore, key: str, own: int) -> list[int]:
    """Return the size of each rank's bytes; below 0 for the text of an error, and 0 for a worker
    that has left."""
    if key not in kv.keys():  # noqa: SIM118  # it is no dict
        kv.init(key, torch.zeros(kv.num_workers, dtype=torch.int64, device="cpu"))
    sizes = torch.zeros(kv.num_workers, dtype=torch.int64, device="cpu")
    sizes[kv.rank] = own
    kv.pushpull(key, sizes, out=sizes)
    return [int(size) for size in sizes]


def _unpacked(row: torch.Tensor, sizes: list[int], own: int, obj: Any) -> list[Any]:
    parts = torch.split(row, [abs(size) for size in sizes])
    for rank, (size, part) in enumerate(zip(sizes, parts, strict=True)):
        if size < 0:
            raise ConfigError(f"rank {rank} cannot send its object: {part.numpy().tobytes().decode()}")
    return [
        obj if rank == own else unpack(part.numpy().tobytes()) if len(part) else None
        for rank, part in enumerate(parts)
    ]
