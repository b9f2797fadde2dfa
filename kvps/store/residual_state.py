"""Compression settings of a front end, and its residuals in a saved training state.

A store keeps the residuals of each worker's compressed pushes. They belong to this worker alone: another
worker's would be counted twice, and its own would be lost. So a saved state names its rank, and a worker
that loads the state of another rank begins without residuals.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from kvps.errors import ConfigError, StorageError
from kvps.store import optimizer_state
from kvps.store.base import Store
from kvps.store.kvstore import KVStore

State = dict[str, Any]
"""``{"rank": the worker's, "rests": key -> residual}``, or empty."""


def compress(kv: Store | None, params: object, argument: str) -> None:
    """Have a store compress what a front end pushes.

    Args:
        kv: the store.
        params: as for :meth:`kvps.KVStore.set_gradient_compression`; None leaves the store as it is.
        argument: what the front end calls ``params``.

    Raises:
        ConfigError: for something else, or a store that cannot.
    """
    if params is None:
        return
    if not isinstance(params, str | Mapping):
        raise ConfigError(
            f"{argument}={params!r:.40}: give the name of a codec, such as '2bit', or a dict, such as "
            "{'type': '2bit', 'threshold': 0.5}"
        )
    if kv is None:
        raise ConfigError(f"{argument} needs a store; give one, such as kvstore='dist_sync'")
    if not hasattr(kv, "set_gradient_compression"):
        raise ConfigError(
            f"{argument}: store {kv.type!r} is a plug-in without set_gradient_compression(); omit it, "
            "or use a store of kvps"
        )
    kv.set_gradient_compression(params)


def state_of(kv: Store | None) -> State:
    """Return the residuals of this worker's pushes; empty if there are none.

    A plug-in keeps its own. A store that is closed has none any more, and an optimizer that runs here can
    be saved all the same.
    """
    if not isinstance(kv, KVStore) or kv.is_over:
        return {}
    residuals = kv.compression_state()
    return {"rank": kv.rank, "rests": residuals} if residuals else {}


def put(kv: Store | None, state: Mapping[str, Any]) -> None:
    """Go on with the residuals that :func:`state_of` gave this rank; without any if they are another's.

    Raises:
        Mismatch: if it is of another model.
    """
    if isinstance(kv, KVStore) and not kv.is_over:
        is_mine = bool(state) and state["rank"] == kv.rank
        kv.load_compression_state(state["rests"] if is_mine else {})


def save(kv: Store | None, path: str) -> None:
    """Write this worker's residuals beside ``path``, or remove the file that an earlier call wrote there.

    Raises:
        StorageError: if they cannot be written.
    """
    if not isinstance(kv, KVStore):
        return
    state = state_of(kv)
    if state:
        optimizer_state.write(_beside(kv, path), state["rests"], {"rank": str(kv.rank)})
    else:
        Path(_beside(kv, path)).unlink(missing_ok=True)


def load(kv: Store | None, path: str) -> None:
    """Put back the residuals that :func:`save` wrote; none if there is no such file.

    Raises:
        StorageError: if it cannot be read. Mismatch: if it is of another model.
    """
    if not isinstance(kv, KVStore) or kv.is_over:
        return
    residuals: dict[str, torch.Tensor] = {}
    beside = _beside(kv, path)
    if Path(beside).exists():
        try:
            residuals = load_file(beside)
        except (OSError, SafetensorError) as error:
            raise StorageError(
                f"cannot read the compression residuals from {beside}: {error}. Without that file, "
                "residuals start at zero, and training continues"
            ) from error
    kv.load_compression_state(residuals)


def _beside(kv: KVStore, path: str) -> str:
    return f"{path}.rests-{kv.rank}"
