"""The comparison of all workers' models, before anything is sent: a model that differs on one rank is refused on every rank."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch

from kvps.phrases import ranks_in_words
from kvps.store.base import Store
from kvps.store.kvstore import KVStore
from kvps.store.server_store import DistStore
from kvps.tensors import NAMES

log = logging.getLogger("kvps")


def demand_same(
    kv: Store,
    front_end: str,
    params: Mapping[str, torch.Tensor],
    buffers: Mapping[str, torch.Tensor],
    **options: object,
) -> None:
    """Compare the front end that is being made with those of the other workers.

    Rounds are per parameter: of a parameter that a worker lacks, or does not train, no round would close.

    Args:
        kv: its store; a plug-in compares nothing.
        front_end: its name, for people.
        params: name -> parameter.
        buffers: name -> tensor that takes rank 0's value.
        options: those that decide which calls it makes.

    Raises:
        Mismatch: on every rank, naming what differs.
    """
    if not isinstance(kv, KVStore) or kv.num_workers == 1:
        return
    traits = {f"the option {name}": str(value) for name, value in options.items()}
    for name, param in params.items():
        state = "trained" if param.requires_grad else "frozen"
        traits[f"parameter {name!r}"] = f"{_form(param)}, {state}"
    traits |= {f"buffer {name!r}": _form(tensor) for name, tensor in buffers.items()}
    kv.demand_same(f"{front_end}()", traits)
    if isinstance(kv, DistStore) and (left := kv.session.info.workers_in("left")):
        log.warning(
            "%s(): %s left the job without it, so its rounds close without them. If the script makes it on some ranks "
            "only, make it on all",
            front_end,
            ranks_in_words(left),
        )


def _form(tensor: torch.Tensor) -> str:
    dtype = NAMES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))
    return f"{dtype}[{','.join(map(str, tensor.shape))}]"
