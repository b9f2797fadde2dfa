"""The arguments of ``publish()``, made into a call of the worker core."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kvps.core.worker import calls
from kvps.dtypes import BY_NAME
from kvps.errors import ConfigError, Mismatch
from kvps.protocol.envelope import KEY_MAX
from kvps.protocol.publications import KEEP_MAX
from kvps.tensors import NAMES, as_tensor, row_of


def call_of(
    store: str,
    rank: int,
    name: Any,
    keys: Sequence[str],
    tensors: Mapping[str, torch.Tensor],
    dtype: str | torch.dtype | None,
    keep: Any,
) -> calls.Publish:
    """Return the call that publishes ``keys``, or ``tensors``, once they are on the CPU.

    Raises:
        ConfigError: for a bad argument.
    """
    if not isinstance(name, str) or not 1 <= len(name) <= KEY_MAX or not name.isprintable():
        raise ConfigError(f"publish({name!r:.80}): a name has 1 to {KEY_MAX} printable characters")
    if not isinstance(keep, int) or isinstance(keep, bool) or not 1 <= keep <= KEEP_MAX:
        raise ConfigError(f"publish({name!r}, keep={keep!r}): 1 to {KEEP_MAX} versions can stay")
    as_dtype = _number_of(name, dtype)
    if not keys and not tensors:
        raise ConfigError(f"publish({name!r}): the source has no tensors")
    rows = {key: _row(name, key, value) for key, value in tensors.items()} if rank == 0 else {}
    unique = tuple(dict.fromkeys(keys))
    return calls.Publish(store, name, keep, as_dtype, 0, unique, tuple(rows), tuple(rows.values()))


def _row(name: str, key: str, value: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the CPU.

    Raises:
        Mismatch: if it cannot be published; the text names it.
    """
    try:
        if value.is_meta:
            raise Mismatch(f"{key!r} is on the meta device, and has no values")
        is_bool = value.dtype is torch.bool and value.layout is torch.strided
        row = row_of(as_tensor(value.view(torch.uint8) if is_bool else value))
        return row.view(torch.bool) if is_bool else row
    except Mismatch as error:
        raise Mismatch(f"publish({name!r}): tensor {key!r:.80}: {error}") from error


def _number_of(name: str, dtype: str | torch.dtype | None) -> int:
    """Return the number of an element type; 0 for None."""
    if dtype is None:
        return 0
    found = NAMES.get(dtype, str(dtype)) if isinstance(dtype, torch.dtype) else dtype
    kinds = {"half", "float"}
    if found not in BY_NAME or BY_NAME[found].kind not in kinds:
        names = ", ".join([known for known, row in BY_NAME.items() if row.kind in kinds])
        raise ConfigError(f"publish({name!r}, dtype={dtype!r}): expected None or one of {names}")
    return BY_NAME[found].id


def tensors_of(source: object) -> Mapping[str, torch.Tensor] | None:
    """Return the tensors of a module or state dict, by name; None for keys.

    Raises:
        Mismatch: for a mapping that has something else.
    """
    if isinstance(source, torch.nn.Module):
        source = source.state_dict()
    if not isinstance(source, Mapping):
        return None
    for name, value in source.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise Mismatch(
                f"publish(): a state dict has tensors by name, got {name!r:.80}: {type(value).__name__}"
            )
    return source
