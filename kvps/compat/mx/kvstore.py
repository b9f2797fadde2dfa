"""The KVStore by MXNet's names: its methods, their argument order, and their meaning where MXNet's is sound.

A :class:`KVStore` wraps a store of kvps, which is its ``store``, and has all that MXNet's has not:
timeouts, handles, checkpoints, rows that changed. :doc:`/migrating/mxnet-names` says where a
method differs from MXNet's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

import kvps
from kvps.compat.mx.elsewhere import missing
from kvps.compat.mx.ndarray import plain
from kvps.compat.mx.rule import Optimizer
from kvps.errors import ConfigError
from kvps.store.base import KVStoreBase

SPELLINGS = {"nccl": "device", "horovod": "allreduce", "byteps": "allreduce"}
"""MXNet's stores of other libraries, and the store of kvps that does the same."""
Updater = Callable[[Any, torch.Tensor, torch.Tensor], None]
"""A function ``updater(key, received, stored)`` that changes ``stored``."""
_METHODS = {
    "set_barrier_before_exit": "a worker leaves when its script ends, and no barrier is needed",
    "get_num_dead_node": "use kv.store.num_dead_nodes",
    "num_dead_node": "use kv.store.num_dead_nodes",
    "send_command_to_servers": "servers take no commands; 'kvps status' and --http look at them",
}


class KVStore(KVStoreBase):
    """A store with MXNet's methods; :func:`create` makes it.

    Args:
        store: the store of kvps.
        type_: the name by which it was created.

    Example:
        >>> import kvps.compat.mx as mx
        >>> kv = mx.kv.create("local")
        >>> kv.init("w", mx.nd.zeros((2,)))
        >>> kv.set_optimizer(mx.optimizer.SGD(learning_rate=0.5))
        >>> weight = mx.nd.empty((2,))
        >>> kv.pushpull("w", mx.nd.ones((2,)), out=weight)
        >>> weight.asnumpy().tolist()
        [-0.5, -0.5]
    """

    def __init__(self, store: kvps.KVStore, type_: str) -> None:
        self.store = store
        self._type = type_
        self._updater: Updater | None = None
        self._is_compressed = False

    # --- what it is ---------------------------------------------------------------------------------

    @property
    def type(self) -> str:
        """The name by which the store was created, in lower case."""
        return self._type

    @property
    def rank(self) -> int:
        """This worker's number, from 0."""
        return self.store.rank

    @property
    def num_workers(self) -> int:
        """The number of workers."""
        return self.store.num_workers

    def is_capable(self, capability: str) -> bool:  # type: ignore[override]  # MXNet's is static: it has one native store
        """Return whether the store runs an optimizer.

        Raises:
            ValueError: for another capability than ``"optimizer"``.
        """
        if capability.lower() != KVStoreBase.OPTIMIZER:
            raise ValueError(f"unknown capability {capability!r}; there is {KVStoreBase.OPTIMIZER!r}")
        return self.store.is_capable(capability.lower())

    # --- values -------------------------------------------------------------------------------------

    def init(self, key: object, value: object) -> None:
        """Initialise keys with the values of rank 0.

        Raises:
            Mismatch: if a key exists with another type or shape. The same again changes nothing.
        """
        self.store.init(key, _values(value))

    def push(self, key: object, value: object, priority: int = 0) -> None:
        """Push values; several of one key, one per device, are summed first.

        A list of keys may repeat a key, once for each device.
        """
        keys, values = _grouped(key, _values(value))
        if self._updater is None:
            self.store.push(keys, values, priority)
        else:
            self._update(self._updater, keys, values)

    def pull(self, key: object, out: object = None, priority: int = 0, ignore_sparse: bool = True) -> None:
        """Write values into ``out`` after this worker's pushes of these keys.

        Args:
            key: a str or int, or a list of them.
            out: for each key an array, or a list of them, one per device.
            priority: keys of a higher priority travel first.
            ignore_sparse: without effect, as all outputs are dense.

        Raises:
            ConfigError: without ``out``.
        """
        keys, outs = _grouped(key, _values(_demand("pull", "out", out)))
        self.store.pull(keys, outs, priority)

    def pushpull(self, key: object, value: object, out: object = None, priority: int = 0) -> None:
        """Push, and write the result into ``out``, or into ``value`` if there is none.

        Works with gradient compression, too.
        """
        keys, values = _grouped(key, _values(value))
        outs = values if out is None else _grouped(key, _values(out))[1]
        if self._updater is None:
            self.store.pushpull(keys, values, outs, priority)
        else:
            self._update(self._updater, keys, values)
            self.store.pull(keys, outs, priority)

    def broadcast(self, key: object, value: object, out: object, priority: int = 0) -> None:
        """Write rank 0's value into ``out`` of every worker; the key is created, or replaced."""
        self.store.broadcast(key, _values(value), _values(out), priority)

    def row_sparse_pull(
        self, key: object, out: object = None, priority: int = 0, row_ids: object = None
    ) -> None:
        """Write some rows of keys into ``out``, dense arrays of the keys' shapes; other rows of ``out`` stay.

        Args:
            key: a str or int, or a list of them.
            out: for each key an array, or a list of them, one per device.
            priority: keys of a higher priority travel first.
            row_ids: numbers of rows, of any shape and type; a list of them has one for each ``out``.

        Raises:
            ConfigError: without ``out`` or ``row_ids``, or with another number of them.
        """
        outs = _values(_demand("row_sparse_pull", "out", out))
        ids = _values(_demand("row_sparse_pull", "row_ids", row_ids))
        names = list(key) if isinstance(key, list | tuple) else [key]
        for name, devices in zip(names, outs if isinstance(key, list | tuple) else [outs], strict=True):
            targets = devices if isinstance(devices, list) else [devices]
            wanted = ids if isinstance(ids, list) else [ids] * len(targets)
            if isinstance(key, list | tuple) and isinstance(ids, list):
                wanted = _one_each(names, ids, name, len(targets))
            if len(wanted) == 1:
                wanted = wanted * len(targets)
            if len(wanted) != len(targets):
                raise ConfigError(
                    f"row_sparse_pull: {len(wanted)} row_ids for {len(targets)} outputs of key {name!r}; "
                    "give one for each, or one for all"
                )
            for target, ids_wanted in zip(targets, wanted, strict=True):
                rows = torch.as_tensor(ids_wanted).reshape(-1).to(torch.int64)
                self.store.row_sparse_pull(name, target, rows, priority)

    # --- the optimizer ------------------------------------------------------------------------------

    def set_optimizer(self, optimizer: Optimizer) -> None:
        """Have the store update its keys by an optimizer; every worker calls this, and rank 0's counts.

        Later changes of ``optimizer.lr``, ``set_lr_mult`` and ``set_wd_mult`` reach the store,
        too. Setting it again keeps its state.

        Raises:
            ConfigError: for anything but an optimizer of ``mx.optimizer``.
        """
        if not isinstance(optimizer, Optimizer):
            raise ConfigError(
                "set_optimizer() takes an optimizer such as mx.optimizer.SGD(), not "
                f"{type(optimizer).__name__}; kv.store.set_optimizer() takes names and torch optimizers"
            )
        self._updater = None
        optimizer.bind(self.store)

    def _set_updater(self, updater: Updater) -> None:
        """Have ``updater(key, received, stored)`` change the stored value at each push, in this process.

        Raises:
            ConfigError: in a store of several processes, or one that has an optimizer or compresses.
        """
        if "dist" in self._type or self.store.type == "allreduce":
            raise ConfigError(
                f"_set_updater(): the servers of store {self._type!r} run no code of scripts. Use "
                "set_optimizer(), or pushpull() without an optimizer, which returns the sum, and update the "
                "weights here"
            )
        if self.store.has_optimizer or self._is_compressed:
            raise ConfigError(
                "_set_updater() needs a store without optimizer and without compression; create another"
            )
        self._updater = updater

    set_updater = _set_updater
    """MXNet's name before 1.0."""

    def _update(self, updater: Updater, keys: object, values: object) -> None:
        for key, devices in _pairs(keys, values):
            target = devices if isinstance(devices, list) else [devices]
            received = torch.stack([torch.as_tensor(value).to(target[0].device) for value in target]).sum(0)
            stored = self.store.pull(key)
            number = int(key) if isinstance(key, int) else key
            updater(number, received.to(stored.dtype), stored)
            self.store.push(key, stored)  # which assigns, without an optimizer

    def save_optimizer_states(self, fname: str, dump_optimizer: bool = False) -> None:
        """Write the optimizer's states to a safetensors file, in dist stores, too.

        Args:
            fname: the file.
            dump_optimizer: without effect: the file names the optimizer, and its numbers are in the script.
        """
        self.store.save_optimizer_states(fname)

    def load_optimizer_states(self, fname: str) -> None:
        """Put back what ``save_optimizer_states`` wrote; the same optimizer has to be set before."""
        self.store.load_optimizer_states(fname)

    def set_gradient_compression(self, compression_params: Mapping[str, Any]) -> None:
        """Compress pushes, of keys of any size, as MXNet does.

        Args:
            compression_params: ``type`` (``"2bit"``, ``"1bit"``, or another codec of kvps),
                ``threshold`` (0.5), and ``min_bytes``, below which a key is not compressed (0).

        Raises:
            ConfigError: in a store that is neither of devices nor distributed, for another type,
                or with an updater.
        """
        if "device" not in self._type and "dist" not in self._type and self._type != "nccl":
            raise ConfigError(
                f"set_gradient_compression(): store {self._type!r} does not compress; use a "
                "device or dist store"
            )
        if self._updater is not None:
            raise ConfigError("set_gradient_compression() is not available with an updater")
        self.store.set_gradient_compression({"min_bytes": 0, **compression_params})
        self._is_compressed = True

    # --- the job ------------------------------------------------------------------------------------

    def _barrier(self) -> None:
        """Wait for all workers, and for this worker's pushes."""
        self.store.barrier()

    barrier = _barrier
    """The same; MXNet has the other name alone."""

    def _send_command_to_servers(self, head: int, body: str) -> None:
        """Refuse: servers run no code of scripts.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            f"_send_command_to_servers({head}): servers take no commands of scripts. set_optimizer() sets "
            "the optimizer, 'kvps trace' profiles, and the job ends the servers"
        )

    def close(self) -> None:
        """Flush, and end this store; the end of the script does so, too."""
        self.store.close()

    def __getattr__(self, name: str) -> object:
        raise missing("KVStore", name, _METHODS)


def create(name: str = "local", **options: Any) -> Any:
    """Return a store.

    Args:
        name: as in MXNet; ``nccl`` is ``device``, and ``horovod`` and ``byteps`` are
            ``allreduce``. A registered plug-in is returned as it is.
        options: as :func:`kvps.create` has them.

    Raises:
        TypeError: if ``name`` is no text.
        ConfigError: for a name that MXNet would have taken for ``local``.
    """
    if not isinstance(name, str):
        raise TypeError(f"name must be a string, got {type(name).__name__}")
    lower = name.lower()
    store = kvps.create(SPELLINGS.get(lower, lower), **options)
    return KVStore(store, lower) if isinstance(store, kvps.KVStore) else store


def _demand(method: str, argument: str, value: object) -> object:
    """Return ``value``, which must be given.

    Raises:
        ConfigError: if it is not.
    """
    if value is None:
        raise ConfigError(
            f"{method}() needs {argument}=, as in MXNet; kv.store.{method}() returns new tensors without out="
        )
    return value


def _values(value: object) -> Any:
    """Return values as a store takes them: tensors for arrays, lists for tuples."""
    if isinstance(value, torch.Tensor):
        return value if value.is_sparse else plain(value)
    if isinstance(value, list | tuple):
        return [_values(element) for element in value]
    return value


def _pairs(keys: object, values: Any) -> list[tuple[Any, Any]]:
    """Return each key with its value or values."""
    return list(zip(keys, values, strict=True)) if isinstance(keys, list) else [(keys, values)]


def _grouped(key: object, values: Any) -> tuple[object, Any]:
    """Return keys and values, with the values of a repeated key in one list, in the order of the
    keys' first places.

    Raises:
        ConfigError: if the numbers of keys and values differ.
    """
    if not isinstance(key, list | tuple):
        return key, values
    keys: Sequence[object] = list(key)
    if not isinstance(values, list) or len(values) != len(keys):
        count = len(values) if isinstance(values, list) else 1
        raise ConfigError(f"{len(keys)} keys and {count} values: give as many values as keys")
    if len(set(keys)) == len(keys):
        return keys, values
    found: dict[object, list[Any]] = {}
    for name, value in zip(keys, values, strict=True):
        found.setdefault(name, []).extend(value if isinstance(value, list) else [value])
    return list(found), list(found.values())


def _one_each(names: list[Any], ids: list[Any], name: object, outputs: int) -> list[Any]:
    """Return the row ids of one of several keys."""
    if len(ids) != len(names):
        raise ConfigError(f"row_sparse_pull: {len(ids)} row_ids for {len(names)} keys; give one for each key")
    mine = ids[names.index(name)]
    return mine if isinstance(mine, list) else [mine] * outputs
