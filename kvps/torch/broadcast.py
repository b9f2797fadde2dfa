"""Broadcasts from one worker to all, and gathers from all: parameters, optimizer state, objects made of data.

Every worker calls, and the k-th call of a worker matches the k-th call of every other; it sends the root's
*present* values. So a script that loads a checkpoint on rank 0 calls these once, and all workers continue
from it.

Rank 0 sends with the store's own broadcast. For another root, the *bits* are summed as integers, to which all
other ranks add zeros, so the result is exact for every type.

Gathers of objects made of data: from all workers to all, or to one of them.

These take the place of torch's ``all_gather_object`` and ``gather_object``, which pickle: there,
any rank runs code in the ranks that receive. Every worker calls, and the k-th call of a worker
matches the k-th call of every other. The bytes of all objects lie side by side in one key, to
which each worker adds its own, and zeros for the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from kvps.errors import ConfigError, Mismatch
from kvps.store.create import options_of
from kvps.store.kvstore import KVStore
from kvps.tensors import NAMES
from kvps.torch.serialization import bits, pack, unpack
from kvps.torch.sync.parameter_sync import ParameterSync, pairs_of
from kvps.torch.sync.shared_stores import Options, own_store
from kvps.torch.sync.state_dict import without_stored


def broadcast_parameters(
    params: torch.nn.Module | Mapping[str, Any] | Iterable[tuple[str, torch.Tensor]],
    root_rank: int = 0,
    *,
    kvstore: str | KVStore = "dist_sync",
    kvstore_options: Options = None,
) -> None:
    """Set every worker's tensors to the root's present values, in place.

    Args:
        params: a module (its parameters and buffers), a ``state_dict()``, or pairs of name and tensor; of
            the same names, types and shapes on every worker.
        root_rank: the rank that has the values.
        kvstore: a kind of store that sums, or such a store.
        kvstore_options: ``timeout``, ``on_worker_lost`` and ``worker_grace`` as in :func:`kvps.create`, for a
            ``kvstore`` that is named.

    Raises:
        ConfigError: for an object that is not a tensor, or a rank that does not exist.
        Mismatch: if the root has another type or shape. Timeout: if a worker does not call.

    Example:
        >>> import torch, kvps.torch
        >>> model = torch.nn.Linear(2, 1)
        >>> kvps.torch.broadcast_parameters(model)  # doctest: +SKIP
    """
    named = _named(params)
    kv = _store(kvstore, root_rank, kvstore_options)
    if kv.num_workers > 1 and named:
        _send(kv, [f"parameters/{name}"[:256] for name in named], list(named.values()), root_rank)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int = 0,
    *,
    kvstore: str | KVStore = "dist_sync",
    kvstore_options: Options = None,
) -> None:
    """Set every worker's optimizer to the root's present state: momenta, step counts, and rates of groups.

    States that only the root has are created on the other workers, as when only the root has loaded a
    checkpoint; states that the root does not have are dropped.

    Args:
        optimizer: any torch optimizer, over the same parameters in the same order on every worker; or a
            DistributedOptimizer. States in the store are already the same for all workers.
        root_rank: the rank that has the state.
        kvstore: a kind of store that sums, or such a store.
        kvstore_options: ``timeout``, ``on_worker_lost`` and ``worker_grace`` as in :func:`kvps.create`, for a
            ``kvstore`` that is named.

    Raises:
        ConfigError: for a state that is not plain data.
        Mismatch: if the root's optimizer has other groups or parameters.

    Example:
        >>> optimizer.load_state_dict(torch.load(path))  # rank 0 only  # doctest: +SKIP
        >>> kvps.torch.broadcast_optimizer_state(optimizer)  # doctest: +SKIP
    """
    given: object = optimizer
    if not isinstance(given, torch.optim.Optimizer):
        raise ConfigError(f"optimizer: give a torch.optim.Optimizer, got {type(given).__name__}")
    optimizer = getattr(optimizer, "wrapped", optimizer)  # a DistributedOptimizer says so
    kv = _store(kvstore, root_rank, kvstore_options)

    def send(tensors: list[torch.Tensor]) -> None:
        if kv.num_workers > 1 and tensors:
            _send(kv, [f"optimizer/{index}" for index in range(len(tensors))], tensors, root_rank)

    with without_stored(optimizer):
        give_state(
            optimizer, (kv.rank, root_rank), lambda make: _send_packed(kv, "optimizer", make, root_rank), send
        )


def give_state(
    optimizer: torch.optim.Optimizer,
    ranks: tuple[int, int],
    send_packed: Callable[[Callable[[], bytes] | None], bytes],
    send: Callable[[list[torch.Tensor]], object],
) -> None:
    """Give the root's state of an optimizer to the other workers.

    Args:
        optimizer: this worker's.
        ranks: this worker's rank, and the root's.
        send_packed: returns the bytes that its argument makes on the root; on other workers that is None.
        send: puts the root's values into tensors.

    Raises:
        ConfigError: for a state that is not plain data.
        Mismatch: if the root's optimizer has other parameters.
    """
    rank, root = ranks
    tensors: list[torch.Tensor] = []
    is_root = rank == root
    packed = send_packed((lambda: pack(optimizer.state_dict(), tensors)) if is_root else None)
    state = None if is_root else unpack(packed, tensors)
    send(tensors)
    if state is not None:
        try:
            optimizer.load_state_dict(state)
        except ValueError as error:
            raise Mismatch(
                f"the optimizer of rank {root} differs from the optimizer of rank {rank}: {error}; "
                "every worker must create it over the same parameters"
            ) from error


def join(model: ParameterSync, take: Callable[..., object] | None) -> None:
    """Join the other workers, and take the weights and the optimizer's state of the worker that joined last.

    Args:
        model: its parameters and their store.
        take: takes that state, as :func:`broadcast_optimizer_state` does; None where the servers have it.
    """

    def call() -> None:
        last = model.kv.join()
        if take is None:
            model.pull()
            return
        options = options_of(model.kv)
        broadcast_parameters(model.params, last, kvstore_options=options)
        take(last, kvstore_options=options)

    model.survive(call)


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    *,
    kvstore: str | KVStore = "dist_sync",
    kvstore_options: Options = None,
) -> Any:
    """Return the root's ``obj`` on every worker.

    Args:
        obj: None, bool, int, float, complex, str, bytes, tensor or array, or list, tuple, dict, set of
            those. The objects of other workers are ignored. Tensors arrive on the CPU.
        root_rank: the rank that has the object.
        name: pairs this call with calls of that name only.
        kvstore: a kind of store that sums, or such a store.
        kvstore_options: ``timeout``, ``on_worker_lost`` and ``worker_grace`` as in :func:`kvps.create`, for a
            ``kvstore`` that is named.

    Raises:
        ConfigError: on every worker, if the root's object contains anything else; the text names
            its type and place.

    Example:
        >>> start = kvps.torch.broadcast_object({"epoch": 3, "seed": 7})  # doctest: +SKIP
    """
    kv = _store(kvstore, root_rank, kvstore_options)
    is_root = kv.rank == root_rank
    packed = _send_packed(
        kv, f"object/{name or ''}"[:240], (lambda: pack(obj)) if is_root else None, root_rank
    )
    return obj if is_root else unpack(packed)


def _send_packed(kv: KVStore, key: str, make: Any, root: int) -> bytes:
    """Send the result of the root's function; if that fails, send the error, so that the others do
    not wait."""
    alone = kv.num_workers == 1
    return send_packed(
        make, root, lambda part, row: None if alone else _send(kv, [f"{key}/{part}"], [row], root)
    )


def send_packed(
    make: Callable[[], bytes] | None, root: int, send: Callable[[str, torch.Tensor], object]
) -> bytes:
    """Return on every worker the bytes that the root makes.

    Args:
        make: the root's; None on other workers.
        root: its rank.
        send: puts the root's values into a tensor, of which it is told the name.

    Raises:
        ConfigError: on every worker, if the root's function raises it.
    """
    packed, error = (b"", None) if make is None else packed_or_text(make)
    length = torch.tensor([-len(packed) if error is not None else len(packed)], device="cpu")
    send("length", length)
    size = int(length)
    row = torch.frombuffer(bytearray(packed or bytes(abs(size))), dtype=torch.uint8)
    send("bytes", row)
    packed = row.numpy().tobytes()
    if size < 0:
        raise error or ConfigError(f"rank {root} cannot send its object: {packed.decode()}")
    return packed


def packed_or_text(make: Callable[[], bytes]) -> tuple[bytes, ConfigError | None]:
    """Return an object's bytes; or the error that refuses it, and its text for the other workers."""
    try:
        return make(), None
    except ConfigError as error:
        return str(error).encode(), error


@torch.no_grad()
def _send(kv: KVStore, names: Sequence[str], tensors: Sequence[torch.Tensor], root: int) -> None:
    """Put the root's values into ``tensors``."""
    if root:
        flat = torch.cat([bits(tensor).cpu() for tensor in tensors])
        blank = torch.zeros_like(flat)
        kv.broadcast("bits", blank, out=blank)  # a key of that size, whatever it was before
        kv.pushpull("bits", flat if kv.rank == root else blank, out=flat)
        rows = list(torch.split(flat, [tensor.nbytes for tensor in tensors]))
    else:
        rows = [tensor.detach() if tensor.dtype in NAMES else bits(tensor).clone() for tensor in tensors]
        kv.broadcast(list(names), rows, out=rows)
    for tensor, row in zip(tensors, rows, strict=True):
        if row.dtype != tensor.dtype or root:  # it came as bytes
            values = row.clone().view(tensor.dtype).view(tensor.shape)
            tensor.detach().copy_(values)


def _store(kvstore: str | KVStore, root: int, options: Options, owner: str = "broadcast") -> KVStore:
    kv = own_store(owner, kvstore, options)
    count = kv.num_workers
    if type(root) is not int or not 0 <= root < count:
        raise ConfigError(f"root_rank={root!r}: there are {count} workers, so use 0 to {count - 1}")
    return kv


def _named(params: object) -> dict[str, torch.Tensor]:
    named: dict[str, torch.Tensor] = {}
    for pair in pairs_of(params.state_dict() if isinstance(params, torch.nn.Module) else params):
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[1], torch.Tensor)):
            what = (
                f"{pair[0]!r}: {type(pair[1]).__name__}" if isinstance(pair, tuple) else type(pair).__name__
            )
            raise ConfigError(
                "params: give a module, a state_dict(), or pairs of name and tensor; got "
                f"{what}; broadcast_object() sends other data"
            )
        if pair[1].layout is not torch.strided:
            raise ConfigError(f"params: {pair[0]!r} is {pair[1].layout}; use dense tensors")
        named[str(pair[0])] = pair[1]
    return named


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
    found = _gather(obj, name, None, own_store("gather", kvstore, kvstore_options))
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
    return _gather(obj, name, root_rank, _store(kvstore, root_rank, kvstore_options, "gather"))


@torch.no_grad()
def _gather(obj: Any, name: str | None, root: int | None, kv: KVStore) -> list[Any] | None:
    rank = kv.rank
    packed, error = packed_or_text(lambda: pack(obj))
    if kv.num_workers == 1:
        if error is not None:
            raise error
        return [obj]
    key = f"gather/{name or ''}"[:240]
    sizes = _exchanged_sizes(kv, f"{key}/sizes", -len(packed) if error else len(packed))
    # A worker that has all sizes knows that all workers have read the bytes of the call before: the key
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
