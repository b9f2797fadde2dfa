"""Horovod's DistributedOptimizer: gradients are reduced while backward is still running.

The result is an instance of the given optimizer's own class, with the methods of
:class:`Distributed` before its own; so schedulers and scalers take it for that optimizer. It
shares parameter groups and state with the given one.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from kvps import config
from kvps.compat.horovod.compression import Compression, Compressor, checked
from kvps.compat.horovod.engine.context import current
from kvps.compat.horovod.engine.execution import even_rows
from kvps.compat.horovod.gradient_reduction import Reduction
from kvps.compat.horovod.process_sets import ProcessSet, global_process_set
from kvps.compat.horovod.reductions import Adasum, Average, ReduceOp, Sum


class Distributed(torch.optim.Optimizer):
    """The methods that a distributed optimizer adds to its class."""

    _reduction: Reduction
    _is_watching: bool
    _is_synchronized: bool
    _should_synchronize: bool
    _parameter_names: dict[torch.Tensor, str]
    """Parameter -> its name; Horovod's attribute, which scripts read."""

    @property
    def backward_passes_per_step(self) -> int:
        """The number of backward passes of a step."""
        return self._reduction.passes

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set how many backward passes make a step; call it between steps."""
        self._reduction.reset(_checked_passes(passes))

    def synchronize(self) -> None:
        """Wait until every gradient is reduced; ``.grad`` has the results.

        Raises:
            HorovodInternalError: if the ranks do not fit together, or a rank is lost.
        """
        if self._is_watching:
            self._reduction.finish()
        self._is_synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Have ``step()`` not synchronise: after ``synchronize()`` and a change of gradients, such
        as clipping."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Any = None) -> Any:
        """Synchronise, and update the parameters.

        Raises:
            HorovodInternalError: as :meth:`synchronize`.
        """
        if self._should_synchronize:
            if self._is_synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(): the gradients are reduced twice",
                    stacklevel=2,
                )
            self.synchronize()
        self._is_synchronized = False
        return super().step(closure)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clear the gradients.

        Raises:
            AssertionError: between ``backward()`` and ``step()`` or ``synchronize()``: gradients
                are on their way.
        """
        if self._reduction.is_under_way:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(). This is prohibited as it can cause a race condition."
            )
        super().zero_grad(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Load a state; a step that has begun is forgotten."""
        self._reduction.forget()
        self._is_synchronized = False
        super().load_state_dict(*args, **kwargs)


class DistributedAdasum(Distributed):
    """The methods with ``op=Adasum``: the changes of the parameters are combined, and not the gradients."""

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Refused: the changes are known only in ``step()``.

        Raises:
            AssertionError: always.
        """
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")
        yield

    def synchronize(self) -> None:
        """Do nothing: ``step()`` does all."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Step with the gradients of this rank, and apply the adaptive sum of all ranks' changes.

        Raises:
            HorovodInternalError: if the ranks do not fit together, or a rank is lost.
        """
        params = self._reduction.params
        before = [param.detach().clone() for param in params]
        result = super(Distributed, self).step(closure)
        changes = [param - old for param, old in zip(params, before, strict=True)]
        for param, old, change in zip(params, before, self._reduction.combine(changes), strict=True):
            param.copy_(old + change)
        return result


def DistributedOptimizer(  # noqa: N802  # Horovod's name
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return an optimizer like the given one, whose ``step()`` uses the gradients of all ranks.

    Args:
        optimizer: a torch optimizer, with whose groups and state the new one goes on.
        named_parameters: ``model.named_parameters()``: different names, for each parameter of the optimizer.
        compression: of the gradients.
        backward_passes_per_step: the number of backward passes whose gradients are added up before
            they leave.
        op: Average, Sum, or Adasum of the changes that each rank's step makes.
        gradient_predivide_factor: with Average, divide by this before the sum, and by the rest after it.
        num_groups: deprecated; use ``groups``.
        groups: lists of parameters whose gradients travel together, or the number of such lists.
        sparse_as_dense: send sparse gradients as dense ones.
        process_set: the ranks that take part; on others, the optimizer is the given one's equal.

    Raises:
        ValueError: for an argument that cannot be.

    Example:
        >>> optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())  # doctest: +SKIP
    """
    mine = current().running()
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError(f"optimizer: give a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if op not in (Average, Sum, Adasum):
        raise ValueError(f"op={op!r}: use hvd.Average, hvd.Sum or hvd.Adasum")
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if gradient_predivide_factor <= 0:
        raise ValueError(f"gradient_predivide_factor={gradient_predivide_factor}: it must be > 0")
    if op == Adasum and process_set is not global_process_set:
        raise NotImplementedError("Adasum does not support non-global process sets yet.")
    if num_groups:
        warnings.warn("num_groups has been replaced by groups", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    passes = _checked_passes(backward_passes_per_step)
    named = _named(optimizer, named_parameters)
    reduction = Reduction(
        named,
        _checked_groups(groups, [param for _, param in named]),
        checked(compression),
        passes,
        op,
        gradient_predivide_factor,
        sparse_as_dense,
        process_set,
    )
    is_many = mine.size > 1 or config.switch("HOROVOD_ELASTIC")
    kind = DistributedAdasum if op == Adasum and mine.size > 1 else Distributed
    cls: Any = type(optimizer.__class__.__name__, (kind, optimizer.__class__), {})
    vars(kind.step)["hooked"] = True  # torch need not: the given class's step() calls hooks
    found = cls.__new__(cls)
    found.__dict__.update(optimizer.__dict__)
    found.__dict__.pop("step", None)  # a scheduler's wrapper around the given optimizer's
    found._reduction = reduction
    found._parameter_names = {param: name for name, param in named}
    found._is_watching = is_many and kind is Distributed and process_set.included()
    found._is_synchronized, found._should_synchronize = False, True
    if found._is_watching:
        reduction.watch()
    return found


def _checked_passes(passes: int) -> int:
    if type(passes) is not int or passes <= 0:
        raise ValueError(f"backward_passes_per_step must be > 0, got {passes!r}")
    return passes


def _named(
    optimizer: torch.optim.Optimizer, given: Iterable[tuple[str, torch.Tensor]] | None
) -> list[tuple[str, torch.Tensor]]:
    """Return the names and parameters of an optimizer.

    Raises:
        ValueError: if a parameter has no name, or a name is given twice.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if given is None:
        return [(str(number), param) for number, param in enumerate(params)]
    named: list[Any] = list(given)
    if any(not isinstance(entry, tuple) or len(entry) != 2 for entry in named):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
            "model.named_parameters()."
        )
    counts = Counter(name for name, _ in named)
    if twice := sorted(str(name) for name, number in counts.items() if number > 1):
        raise ValueError(
            f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(twice)}"
        )
    known = {param for _, param in named}
    if unnamed := [number for number, param in enumerate(params) if param not in known]:
        raise ValueError(
            "named_parameters was specified, but one or more model parameters were not named: number "
            f"{unnamed[0]} of the optimizer has shape {list(params[unnamed[0]].shape)}"
        )
    own = set(params)
    return [(str(name), param) for name, param in named if param in own]


def _checked_groups(groups: Any, params: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return the groups as lists.

    Raises:
        ValueError: if they are neither a number nor lists of different parameters.
    """
    if groups is None:
        return []
    if isinstance(groups, int):
        if groups < 0:
            raise ValueError("groups should be a non-negative integer or a list of list of torch.Tensor.")
        wanted = [param for param in params if param.requires_grad]
        rows = even_rows(len(wanted), groups) if groups else []
        starts = [sum(rows[:place]) for place in range(len(rows))]
        return [wanted[start : start + size] for start, size in zip(starts, rows, strict=True)]
    if not isinstance(groups, list | tuple):
        raise ValueError("groups should be a non-negative integer or a list of list of torch.Tensor.")
    members = [param for group in groups for param in group]
    if any(not isinstance(member, torch.Tensor) for member in members):
        raise ValueError("groups must consist of torch.Tensor.")
    if len(set(members)) != len(members):
        raise ValueError("A parameter can only appear once in groups.")
    return [list(group) for group in groups]
