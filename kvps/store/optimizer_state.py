"""Optimizer states on disk: one safetensors file, no code in it.

Tensors are called ``key/state``; the step counts, the optimizer's name and its numbers are in the
file's metadata. The file is replaced whole, so that a reader sees all of it or none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from kvps.checkpoint.atomic_file import replacing
from kvps.core.optim.hyperparams import HyperParams
from kvps.dtypes import Spec
from kvps.errors import Mismatch, StorageError
from kvps.tensors import as_tensor, row_of

States = dict[str, tuple[int, dict[str, torch.Tensor]]]
"""key -> (step, state name -> flat tensor)."""
STEPS_END = 1 << 63
"""Above each number of updates that can be told to a server."""
RESERVED = "__metadata__"
"""A name that no tensor of a safetensors file may have: such a file is written, and cannot be read."""


def save(path: str, hyper: HyperParams, states: States) -> None:
    """Write ``states`` to ``path``.

    Raises:
        StorageError: if it cannot be written; an older file of that name is kept.
    """
    tensors = {
        f"{key}/{name}": row.contiguous() for key, (_, rows) in states.items() for name, row in rows.items()
    }
    steps = {key: step for key, (step, _) in states.items()}
    write(path, tensors, {"optimizer": hyper.name, "steps": json.dumps(steps)})


def write(path: str, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file, whole or not at all.

    Raises:
        StorageError: if it cannot be written; an older file of that name is kept.
    """
    if RESERVED in tensors:
        raise StorageError(
            f"cannot write {path}: a key is named {RESERVED!r}, and safetensors cannot read a "
            "file with a tensor of that name; rename the key"
        )
    try:
        with replacing(Path(path)) as aside:  # several workers may write this file
            save_file(tensors, aside, metadata)
    except (OSError, SafetensorError) as error:
        raise StorageError(
            f"cannot write optimizer states to {path}: {error}. An older file there is kept; "
            "free space or choose another path"
        ) from error


def load(path: str, hyper: HyperParams) -> States:
    """Read states for an optimizer from ``path``.

    Raises:
        StorageError: if the file cannot be read.
        Mismatch: if it holds the states of another optimizer.
    """
    tensors, steps = read(path, hyper.name, "steps")
    states: States = {key: (step, {}) for key, step in steps.items()}
    for title, tensor in tensors.items():
        key, _, name = title.rpartition("/")
        if key in states:
            states[key][1][name] = tensor
    return states


def plain(states: object, source: str) -> States:
    """Return states with each tensor flat and contiguous, in this machine's memory.

    Args:
        states: what was loaded, or what a script gave.
        source: where they come from, for people.

    Raises:
        Mismatch: for anything but a :data:`States` with a number of updates and dense tensors of each key.
    """
    flat: States = {}
    for key, state in (states if isinstance(states, dict) else {"": states}).items():
        match state:
            case (step, dict(rows)) if (
                type(step) is int and 0 <= step < STEPS_END and all(isinstance(name, str) for name in rows)
            ):
                flat[str(key)] = (
                    step,
                    {name: row_of(as_tensor(row).resolve_neg()).view(-1) for name, row in rows.items()},
                )
            case _:
                raise Mismatch(
                    f"{source} has {state!r:.60} for key {key!r}; give the number of its updates, 0 or more, "
                    "and a dict of tensors by name, as optimizer_states() returns them"
                )
    return flat


def demand_fit(states: States, specs: Mapping[str, Spec], source: str) -> None:
    """Check that the tensors of each key are as large as the key.

    Raises:
        Mismatch: for a key whose tensors have another size.
    """
    for key, (_, rows) in states.items():
        spec = specs.get(key)
        if spec is None or any(len(row) != spec.count for row in rows.values()):
            raise Mismatch(
                f"{source} holds the state of key {key!r}, which the store does not have "
                "with that size; initialise the same keys first"
            )


def read(path: str, optimizer: str, table: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the tensors of a file, and one table of its metadata.

    Args:
        path: what :func:`write` wrote.
        optimizer: whose states they must be.
        table: the entry of the metadata that is wanted.

    Raises:
        StorageError: if the file cannot be read.
        Mismatch: if it holds the states of another optimizer.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {title: file.get_tensor(title) for title in file.keys()}  # noqa: SIM118
        entries = json.loads(metadata.get(table, "{}"))
    except (OSError, SafetensorError, ValueError) as error:
        raise StorageError(f"cannot read optimizer states from {path}: {error}") from error
    if metadata.get("optimizer") != optimizer:
        raise Mismatch(
            f"{path} holds the states of {metadata.get('optimizer')!r}, but the optimizer of this store "
            f"is {optimizer!r}; call set_optimizer() with the former first"
        )
    return tensors, entries
