"""Optimizer states on disk: one safetensors file, no code in it.

Tensors are called ``key/state``; the step counts, the optimizer's name and its numbers are in the
file's metadata. The file is written aside and renamed, so that a reader sees all of it or none.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from kvps.core.hyper import Hyper
from kvps.errors import Mismatch, StorageError
from kvps.specs import Spec

States = dict[str, tuple[int, dict[str, torch.Tensor]]]
"""key -> (step, state name -> flat tensor)."""


def save(path: str, hyper: Hyper, states: States) -> None:
    """Write ``states`` to ``path``.

    Raises:
        StorageError: if it cannot be written; an older file of that name is kept.
    """
    tensors = {
        f"{key}/{name}": row.contiguous()
        for key, (_, rows) in states.items()
        for name, row in rows.items()
    }
    steps = {key: step for key, (step, _) in states.items()}
    metadata = {"optimizer": hyper.name, "steps": json.dumps(steps)}
    aside = Path(f"{path}.{os.getpid()}.tmp")
    try:
        save_file(tensors, aside, metadata)
        aside.replace(path)
    except (OSError, SafetensorError) as error:
        aside.unlink(missing_ok=True)
        raise StorageError(
            f"cannot write optimizer states to {path}: {error}. An older file there is kept; "
            "free space or choose another path"
        ) from error


def load(path: str, hyper: Hyper, specs: Mapping[str, Spec]) -> States:
    """Read states from ``path`` for the optimizer and the keys of a store.

    Raises:
        StorageError: if the file cannot be read.
        Mismatch: if it holds the states of another optimizer, or of a key that is not there.
    """
    states: States = {}
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            steps = json.loads(metadata.get("steps", "{}"))
            states.update((key, (int(step), {})) for key, step in steps.items())
            for title in file.keys():  # noqa: SIM118  # the file is no mapping
                key, _, name = title.rpartition("/")
                if key in states:
                    states[key][1][name] = file.get_tensor(title)
    except (OSError, SafetensorError, ValueError) as error:
        raise StorageError(f"cannot read optimizer states from {path}: {error}") from error
    if metadata.get("optimizer") != hyper.name:
        raise Mismatch(
            f"{path} holds the states of {metadata.get('optimizer')!r}, the store's optimizer is "
            f"{hyper.name!r}; set that optimizer first"
        )
    for key, (_, rows) in states.items():
        spec = specs.get(key)
        if spec is None or any(len(row) != spec.count for row in rows.values()):
            raise Mismatch(
                f"{path} holds the state of key {key!r}, which the store does not have "
                "with that size; initialise the same keys first"
            )
    return states
