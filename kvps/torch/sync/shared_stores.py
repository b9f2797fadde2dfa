"""The stores that the functions of this package share, made when first used.

Each has a reserved name, so that no store of the user can be the same. All workers call these functions
in the same order, and so make their stores in the same order.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, TypeAlias

from kvps.errors import ConfigError
from kvps.runtime.current import current
from kvps.store.create import create_own
from kvps.store.kvstore import KVStore
from kvps.store.options import StoreOptions

SUMMING = ("dist_sync", "dist_sync_device", "allreduce")
"""Stores whose push without an optimizer gives the sum of a round."""

Options: TypeAlias = StoreOptions | Mapping[str, Any] | None
"""The options of a store: of a front end, or as a user gave them."""
_Stores: TypeAlias = dict[tuple[str, str, StoreOptions], KVStore]
_of_process: _Stores = {}
_of_thread = threading.local()
_lock = threading.Lock()


def own_store(owner: str, kvstore: str | KVStore, options: Options = None) -> KVStore:
    """Return the store for one purpose.

    Args:
        owner: the purpose.
        kvstore: the name of a kind of store, or a store of the user's, which is returned as it is.
        options: of the store, if it is made here: of a front end, or as the user gave them.

    Raises:
        ConfigError: for one that does not sum, or that has an optimizer.
    """
    if isinstance(kvstore, KVStore):
        if kvstore.type not in SUMMING or kvstore.has_optimizer:
            raise ConfigError(
                f"kvstore: store {kvstore.name!r} is "
                f"{kvstore.type}{' with an optimizer' if kvstore.has_optimizer else ''}, but sums are "
                f"needed; give one of {', '.join(SUMMING)} without an optimizer"
            )
        if options is not None:
            raise ConfigError(
                "kvstore_options= is for a store that is created here, but kvstore is the store "
                f"{kvstore.name!r}: give the options to the kvps.create() that made it"
            )
        return kvstore
    if kvstore not in SUMMING:
        raise ConfigError(f"kvstore={kvstore!r}: use one of {', '.join(SUMMING)}")
    shared = options if isinstance(options, StoreOptions) else StoreOptions.given(options)
    is_alone = current() is None
    stores: _Stores = _of_process if is_alone else vars(_of_thread).setdefault("stores", {})
    with _lock if is_alone else nullcontext():  # workers in threads make theirs together
        store = stores.get((owner, kvstore, shared))
        if store is None or store.is_over:
            made = create_own(kvstore, owner, shared)
            assert isinstance(made, KVStore), "a kind of kvps"
            store = stores[owner, kvstore, shared] = made
    return store
