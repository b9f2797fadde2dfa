"""States of elastic training: committed, restored, and sent to a rank that came back.

After a rank was lost, any rank may be the new process, rank 0 too. So the state comes from the
rank that has committed most often, the lowest of them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvps.compat.horovod.elastic.sampler import ElasticSampler
from kvps.compat.horovod.functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)


class State:
    """The values that elastic training keeps; derive from it for a state of your own.

    Attributes:
        commits: how often this process has committed, or the process whose state it has.
    """

    def __init__(self) -> None:
        self.commits = 0
        self._reset_callbacks: list[Callable[[], object]] = []

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], object]]) -> None:
        """Have functions called after each return to a commit, in this order."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Call the reset callbacks; :func:`~kvps.compat.horovod.elastic.run` calls this."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Keep the present values: a failure from now on returns to them."""
        self.save()
        self.commits += 1
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Do nothing: a job of kvps has a fixed number of workers."""

    def on_hosts_updated(self, timestamp: float, update_res: object) -> None:
        """Do nothing: a job of kvps has a fixed number of workers."""

    def reset(self) -> None:
        """Adapt to a new set of ranks; called before the callbacks."""

    def save(self) -> None:
        """Keep the present values."""
        raise NotImplementedError

    def restore(self) -> None:
        """Return to the values that were kept."""
        raise NotImplementedError

    def sync(self) -> None:
        """Take the values of the rank that has committed most often, and keep them."""
        raise NotImplementedError

    def _root(self) -> int:
        """Return the rank that has the state; every rank calls."""
        every = allgather_object(self.commits, "elastic.commits")
        root = every.index(max(every))
        self.commits = every[root]
        return root


class ObjectState(State):
    """A state of objects made of data: each argument becomes an attribute.

    Args:
        values: name -> first value: None, bool, int, float, complex, str, bytes, tensors, arrays,
            and list, tuple, dict, set of those.

    Example:
        >>> state = ObjectState(epoch=0, batch=0)
        >>> state.epoch = 3
        >>> state.restore()
        >>> state.epoch
        0
    """

    def __init__(self, **values: Any) -> None:
        super().__init__()
        values.pop("bcast_object", None)  # of Horovod's signature
        values.pop("get_rank", None)
        self._saved: dict[str, Any] = values
        self._set()

    def _set(self) -> None:
        for name, value in self._saved.items():
            setattr(self, name, copy.deepcopy(value))

    def save(self) -> None:
        """Keep the present values of the attributes."""
        self._saved = {name: copy.deepcopy(getattr(self, name)) for name in self._saved}

    def restore(self) -> None:
        """Set the attributes to the values that were kept."""
        self._set()

    def sync(self) -> None:
        """Take the attributes of the rank that has committed most often."""
        self._sync_from(self._root())

    def _sync_from(self, root: int) -> None:
        if self._saved:
            self.save()
            self._saved = broadcast_object(self._saved, root, "elastic.state")
            self._set()


class TorchState(ObjectState):
    """A state of a model, an optimizer, and anything that is data or an ElasticSampler.

    Args:
        model: any module; None for none.
        optimizer: its optimizer, also a DistributedOptimizer.
        values: as in :class:`ObjectState`; an
            :class:`~kvps.compat.horovod.elastic.ElasticSampler`, and other modules and optimizers,
            are kept by their ``state_dict()``.
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **values: Any,
    ) -> None:
        stateful = (torch.nn.Module, torch.optim.Optimizer, ElasticSampler)
        given = {"model": model, "optimizer": optimizer, **values}
        self._parts = {name: value for name, value in given.items() if isinstance(value, stateful)}
        self._kept = {name: _kept(value) for name, value in self._parts.items()}
        plain = {name: value for name, value in values.items() if name not in self._parts}
        self.model, self.optimizer = model, optimizer
        for name, part in self._parts.items():
            setattr(self, name, part)
        super().__init__(**plain)

    def save(self) -> None:
        """Keep the present values of the model, the optimizer and the attributes."""
        self._kept = {name: _kept(value) for name, value in self._parts.items()}
        super().save()

    def restore(self) -> None:
        """Return to the values that were kept."""
        for name, part in self._parts.items():
            part.load_state_dict(copy.deepcopy(self._kept[name]))
        super().restore()

    def reset(self) -> None:
        """Deal the rest of the data out anew."""
        for part in self._parts.values():
            if isinstance(part, ElasticSampler):
                part.reset()

    def sync(self) -> None:
        """Take model, optimizer and attributes of the rank that has committed most often."""
        root = self._root()
        for name, part in self._parts.items():
            if isinstance(part, torch.nn.Module):
                broadcast_parameters(part.state_dict(), root)
            elif isinstance(part, torch.optim.Optimizer):
                broadcast_optimizer_state(part, root)
            else:
                _sync_sampler(part, name)
        self._sync_from(root)
        self._kept = {name: _kept(value) for name, value in self._parts.items()}


def _kept(holder: Any) -> Any:
    return copy.deepcopy(holder.state_dict())


def _sync_sampler(sampler: ElasticSampler, name: str) -> None:
    """Let every rank know what all ranks have processed."""
    states = allgather_object(sampler.state_dict(), f"elastic.{name}")
    epoch = max(state["epoch"] for state in states)
    done = set().union(*[state["processed_indices"] for state in states if state["epoch"] == epoch])
    sampler.load_state_dict({"epoch": epoch, "processed_indices": sorted(done)})
