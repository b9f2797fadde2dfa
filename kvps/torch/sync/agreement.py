"""Agreement of all workers: on the same model before anything is sent, and on flags in each step.

A model that differs on one rank is refused on every rank.

A store whose optimizer updates weights cannot add up anything else, so the flags have a store of
their own, without an optimizer. Alone, a worker agrees with itself.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch

from kvps.phrases import ranks_in_words
from kvps.store.base import Store
from kvps.store.catch_up import refuse
from kvps.store.create import create_dist
from kvps.store.kvstore import KVStore
from kvps.store.options import StoreOptions
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


class Agreement:
    """Flags that each worker sets for itself; all need to know whether any of them is set.

    Every worker makes it, and asks, in the same order.

    Args:
        workers: how many there are.
        count: how many flags.
        options: those of the front end's store.
    """

    def __init__(self, workers: int, count: int, options: StoreOptions) -> None:
        self._kv: DistStore | None = None
        if workers > 1:
            self._kv = create_dist("dist_sync", "agreement", options)
            self._kv.init("flags", torch.zeros(count, dtype=torch.float32, device="cpu"))
            if self._kv.resume(["flags"]) > 0:
                refuse(
                    "in each step the workers agree on flags (a GradScaler, find_unused=True), and the steps of its "
                    "predecessor are not known",
                    "use bfloat16, which needs no scaler, and do without find_unused",
                )

    def any(self, flags: torch.Tensor) -> torch.Tensor:
        """Return for each flag whether it is set at any worker.

        Args:
            flags: booleans.
        """
        if self._kv is None:
            return flags.bool()
        found: torch.Tensor = self._kv.pushpull("flags", flags.to("cpu", torch.float32))
        return found > 0
