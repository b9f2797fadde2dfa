"""Agreement of all workers: on the same model before anything is sent, on flags in each step, and on a batch
size.

A model that differs on one rank is refused on every rank.

A store whose optimizer updates weights cannot add up anything else, so the flags have a store of
their own, without an optimizer. Alone, a worker agrees with itself.

The batch size by which a store's optimizer divides the sums of gradients is rank 0's first.
"""

from __future__ import annotations

import logging
import math
import numbers
from collections.abc import Mapping
from dataclasses import replace

import torch

from kvps.core.optim.hyperparams import HyperParams
from kvps.errors import ConfigError
from kvps.phrases import ranks_in_words
from kvps.store.base import Store
from kvps.store.catch_up import refuse
from kvps.store.create import create_dist
from kvps.store.kvstore import KVStore
from kvps.store.options import StoreOptions
from kvps.store.server_store import DistStore
from kvps.tensors import NAMES
from kvps.torch.sync.parameter_sync import ParameterSync

log = logging.getLogger("kvps")
KEY = "kvps.batch_size"
"""The key of rank 0's first batch size."""


def demand_same(
    kv: Store,
    front_end: str,
    params: Mapping[str, torch.Tensor],
    buffers: Mapping[str, torch.Tensor],
    **options: object,
) -> None:
    """Compare the front end that is being made with the front ends of the other workers.

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
            "%s(): %s left the job without it, so its rounds close without them. If the script makes it on "
            "some ranks only, make it on all",
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
        options: of the front end's store.
    """

    def __init__(self, workers: int, count: int, options: StoreOptions) -> None:
        self._kv: DistStore | None = None
        if workers > 1:
            self._kv = create_dist("dist_sync", "agreement", options)
            self._kv.init("flags", torch.zeros(count, dtype=torch.float32, device="cpu"))
            if self._kv.resume(["flags"]) > 0:
                refuse(
                    "in each step the workers agree on flags (a GradScaler, find_unused=True), and the "
                    "steps of its predecessor are not known",
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


class AgreedBatch:
    """The batch size that all workers have agreed on, which the store's optimizer has as a factor of
    gradients.

    Args:
        model: the parameters and their store.
    """

    def __init__(self, model: ParameterSync) -> None:
        self._model = model
        self._size: float | None = None
        """None before the first step."""

    def size(self, batch: float) -> float:
        """Return it; at the first call the workers agree on rank 0's ``batch``."""
        if self._size is not None:
            return self._size
        kv = self._model.kv
        if not isinstance(kv, KVStore):
            self._size = 1.0  # a plug-in divides by nothing; this worker does
            return self._size
        shared = torch.tensor([batch], dtype=torch.float64, device="cpu")
        kv.init(KEY, shared)
        kv.pull(KEY, out=shared)
        self._size = float(shared)
        if self._size != 1.0:
            self._model.install(self._rescaled(self._size))
        return self._size

    def take(self) -> None:
        """Learn which batch size was agreed on before this worker replaced a lost worker."""
        shared = torch.zeros(1, dtype=torch.float64, device="cpu")
        self._model.kv.pull(KEY, out=shared)
        self._size = float(shared)
        self._model.hyper = self._rescaled(self._size)

    def _rescaled(self, size: float) -> HyperParams:
        hyper = self._model.hyper
        assert hyper is not None
        rescale = hyper.number("rescale_grad") / size
        return replace(hyper, values={**hyper.values, "rescale_grad": rescale})


def positive(batch_size: object) -> float:
    """Return a batch size as a number.

    Raises:
        ConfigError: if it is not above 0.
    """
    is_number = isinstance(batch_size, numbers.Real) and not isinstance(batch_size, bool)
    value = float(batch_size) if is_number else math.nan  # type: ignore[arg-type]
    if not 0 < value < math.inf:
        raise ConfigError(f"batch_size={batch_size!r}: use a number above 0")
    return value
