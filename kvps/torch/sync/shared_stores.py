"""The stores that the functions of this package share, made when first used.

Each has a reserved name, so that no store of the user can be the same. All workers call these functions
in the same order, and so make their stores in the same order.
"""

from __future__ import annotations

import threading

from kvps.errors import ConfigError
from kvps.runtime.local.current import current
from kvps.store.create import create_own
from kvps.store.kvstore import KVStore

SUMMING = ("dist_sync", "dist_sync_device", "allreduce")
"""Stores whose push without an optimizer gives the sum of a round."""

_of_process: dict[tuple[str, str], KVStore] = {}
_of_thread = threading.local()
_lock = threading.Lock()


def own_store(owner: str, kvstore: str | KVStore) -> KVStore:
    """Return the store for one purpose.

    Args:
        owner: the purpose.
        kvstore: the name of a kind of store, or a store of the user's, which is returned as it is.

    Raises:
        ConfigError: for one that does not sum, or that has an optimizer.
    """
    if isinstance(kvstore, KVStore):
        if kvstore.type not in SUMMING or kvstore.has_optimizer:
            raise ConfigError(
                f"kvstore: store {kvstore.name!r} is {kvstore.type}"
                f"{' with an optimizer' if kvstore.has_optimizer else ''}, but sums are needed; give "
                f"one of {', '.join(SUMMING)} without an optimizer"
            )
        return kvstore
    if kvstore not in SUMMING:
        raise ConfigError(f"kvstore={kvstore!r}: use one of {', '.join(SUMMING)}")
    if current() is None:
        with _lock:
            return _made(_of_process, owner, kvstore)
    stores: dict[tuple[str, str], KVStore] | None = getattr(_of_thread, "stores", None)
    if stores is None:
        stores = _of_thread.stores = {}
    return _made(stores, owner, kvstore)


def _made(stores: dict[tuple[str, str], KVStore], owner: str, kind: str) -> KVStore:
    store = stores.get((owner, kind))
    if store is None or store.is_over:
        store = stores[owner, kind] = create_own(kind, owner)
    return store
