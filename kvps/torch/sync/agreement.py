"""Checks of a front end: of its arguments, and of what all workers agree on: model, flags, batch size.

A model that differs on one rank is refused on every rank.

A store whose optimizer updates weights cannot add up anything else, so the flags have a store of
their own, without an optimizer. Alone, a worker agrees with itself.

The batch size by which a store's optimizer divides the sums of gradients is rank 0's first.

The checked arguments of DistributedOptimizer.
"""

from __future__ import annotations

import logging
import math
import numbers
from collections.abc import Mapping
from dataclasses import replace

import torch

from kvps.core.optim.hyperparams import HyperParams
from kvps.errors import ConfigError, KvpsError, Mismatch, Timeout
from kvps.phrases import ranks_in_words
from kvps.store.base import Store
from kvps.store.catch_up import refuse
from kvps.store.create import create_dist
from kvps.store.kvstore import KVStore
from kvps.store.options import StoreOptions
from kvps.store.server_store import DistStore
from kvps.tensors import NAMES
from kvps.torch.sync.in_flight import Answer
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
        self._answer: Answer | None = None
        """To flags that were told; after a Timeout they count."""
        if workers > 1:
            self._kv = create_dist("dist_sync", "agreement", options)
            self._kv.init("flags", torch.zeros(count, dtype=torch.float32, device="cpu"))
            if self._kv.take_owed(["flags"]) > 0:
                refuse(
                    "in each step the workers agree on flags (a GradScaler, find_unused=True), and the "
                    "steps of its predecessor are not known",
                    "use bfloat16, which needs no scaler, and do without find_unused",
                )

    @property
    def is_open(self) -> bool:
        """Whether flags were told, and the wait for the answer was cut off."""
        return self._answer is not None

    def any(self, flags: torch.Tensor) -> torch.Tensor:
        """Return for each flag whether it is set at any worker.

        Args:
            flags: booleans.
        """
        if self._kv is None:
            return flags.bool()
        if self._answer is None:
            found = flags.to("cpu", torch.float32)
            handle = self._kv.pushpull("flags", found, out=found, async_op=True)
            self._answer = Answer(handle.wait, self._kv, {"flags": found})
        try:
            self._answer.wait()
        except KvpsError as error:
            self._answer = self._answer if isinstance(error, Timeout) else None
            raise
        answer, self._answer = self._answer, None
        return answer.values["flags"] > 0


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


def numbered(optimizer: torch.optim.Optimizer) -> list[tuple[str, torch.Tensor]]:
    """Name parameters by group and place, or as their groups do."""
    found: list[tuple[str, torch.Tensor]] = []
    for number, group in enumerate(optimizer.param_groups):
        params = group["params"]
        names = group.get("param_names") or [f"{number}.{place}" for place in range(len(params))]
        found += zip(names, params, strict=True)
    return found


def check_plain(optimizer: torch.optim.Optimizer, owner: str) -> None:
    """Check that an optimizer of another front end was not given.

    Raises:
        ConfigError: if its step() exchanges gradients itself.
    """
    if hasattr(optimizer, "skip_synchronize"):
        raise ConfigError(
            f"optimizer: got a DistributedOptimizer, which exchanges gradients itself; give {owner} the "
            "torch optimizer that it wraps, and use only one of the two"
        )


def buffers_of(given: object) -> dict[str, torch.Tensor]:
    """Return the buffers of a module; of anything else there are none."""
    return dict(given.named_buffers()) if isinstance(given, torch.nn.Module) else {}


def check_norms(given: object, owner: str) -> None:
    """Check that no embedding that is trained writes to its weight in forward passes.

    Raises:
        ConfigError: if one has ``max_norm``: it rescales the rows of a worker's own batch, on that
            worker alone.
    """
    if not isinstance(given, torch.nn.Module):
        return
    for path, submodule in given.named_modules():
        is_table = isinstance(submodule, torch.nn.Embedding | torch.nn.EmbeddingBag)
        if is_table and submodule.max_norm is not None and submodule.weight.requires_grad:
            raise ConfigError(
                f"{path or 'the module'}: {type(submodule).__name__}(max_norm={submodule.max_norm:g}) "
                "rescales rows of its weight in each forward pass, other rows on each worker, so that the "
                f"weights of a {owner} would differ between workers. Create it without max_norm, and limit "
                "norms with the optimizer on the workers: after step(), call "
                f"weight.data.renorm_({submodule.norm_type:g}, 0, {submodule.max_norm:g}) on every worker"
            )


def check_clipping(max_norm: float | None, on_store: bool, overlaps: bool, here: str, option: str) -> None:
    """Check that the servers can clip gradients by their global norm, if that is wanted.

    Args:
        max_norm: the norm; None if it is not wanted.
        on_store: the optimizer runs in the store.
        overlaps: gradients leave during backward.
        here: what to do if it runs on the workers.
        option: the option by which gradients leave during backward.

    Raises:
        ConfigError: if they cannot.
    """
    if max_norm is None:
        return
    if not on_store:
        raise ConfigError(
            f"clip_global_norm={max_norm!r} is for update_on_kvstore=True. With the optimizer on "
            f"the workers {here}"
        )
    if overlaps:
        raise ConfigError(
            f"clip_global_norm={max_norm!r} needs all gradients of a step together, and with {option} they "
            f"leave one by one during backward: leave out {option}"
        )


def divisor_of(kv: Store, op: str) -> int:
    """Return the number by which a worker divides sums that the store does not divide.

    Raises:
        Mismatch: if it has to divide, and cannot know by which number.
    """
    if is_free(str(kv.type)) or kv.num_workers == 1:
        return 1
    takes_means = isinstance(kv, KVStore) and kv.average
    if takes_means and op == "sum":
        raise Mismatch(f"op='sum', but store {kv.name!r} computes means; create it without average=True")
    if op == "sum" or takes_means:
        return 1
    if str(kv.type).startswith("dist"):
        raise Mismatch(
            f"op='average', but store {kv.name!r} computes sums; create it with average=True, or give the "
            "name of a store"
        )
    return int(kv.num_workers)


def is_free(store: str) -> bool:
    """Whether a store of this name or type applies each push by itself, so that nothing is averaged."""
    return store.startswith(("dist_async", "dist_ssp"))
