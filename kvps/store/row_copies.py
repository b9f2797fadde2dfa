"""Copies of keys that are kept up to date by the rows that changed.

A copy is a tensor of the caller, which may write to it. torch counts the writes to a tensor. If that number
or the memory has changed since the last call, the whole value is read. numpy does not count the writes to an
array, so an array is read whole each time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from kvps.core.worker.calls import Fresh
from kvps.core.worker.plan import CopyVersion
from kvps.dtypes import Spec
from kvps.errors import ConfigError
from kvps.store.arguments import check_values, is_row, target_of, values_of
from kvps.tensors import TORCH


class Holding:
    """The copy of a key that a caller has since its last call; it gives it to the next call."""

    __slots__ = ("_left", "_mark")

    def __init__(self, mark: CopyVersion | None = None, targets: Sequence[torch.Tensor] = ()) -> None:
        self._mark = mark
        self._left = [(target, target._version) for target in targets] if mark is not None else []

    def mark_of(self, targets: Sequence[torch.Tensor]) -> CopyVersion | None:
        """Return what ``targets`` hold; None unless they are those that were left, and as they were."""
        if len(targets) != len(self._left):
            return None
        for target, (left, writes) in zip(targets, self._left, strict=True):
            is_same = target.data_ptr() == left.data_ptr() and target.stride() == left.stride()
            if not is_same or target._version != writes:
                return None
        return self._mark


class RowChanges(NamedTuple):
    """Some rows of a key: those that changed, or all."""

    row_ids: torch.Tensor
    """Their numbers, int64 [k], ascending."""
    rows: torch.Tensor
    """Their values, [k, ...] with the further dimensions of the key, on the CPU."""
    held: Holding
    """The copy that the caller has now, for the next call."""


Marks = tuple[CopyVersion | None, ...]


def marks_of(
    names: tuple[str, ...],
    is_many: bool,
    held: object,
    targets: Sequence[Sequence[torch.Tensor]] | None = None,
) -> Marks:
    """Return the version of each key that its ``targets`` hold, where it is known.

    Raises:
        ConfigError: for something else than a Holding or None for each key.
    """
    given: Any = held if is_many and held is not None else [held] * len(names)
    if not isinstance(given, list | tuple) or len(given) != len(names):
        raise ConfigError(f"{len(names)} keys need as many entries in held=, from the last call")
    if not all(holding is None or isinstance(holding, Holding) for holding in given):
        raise ConfigError(f"held={held!r:.60}: give the result of the last call, or None")
    places = targets or [()] * len(names)
    return tuple(
        [
            None if holding is None else holding.mark_of(some)
            for holding, some in zip(given, places, strict=True)
        ]
    )


def changes_of(spec: Spec, fresh: Fresh) -> RowChanges:
    """Return the rows of a table that have changed."""
    if fresh.whole is not None:
        return RowChanges(torch.arange(spec.shape[0], device="cpu"), fresh.whole, Holding(fresh.mark))
    ids = torch.cat(
        [torch.empty(0, dtype=torch.int64, device="cpu"), *[patch.ids for patch in fresh.patches]]
    )
    none = torch.empty(0, spec.width, dtype=TORCH[spec.dtype], device="cpu")
    rows = torch.cat([none, *[patch.rows for patch in fresh.patches]])
    return RowChanges(ids, rows.view(len(ids), *spec.shape[1:]), Holding(fresh.mark))


class Copies:
    """The copies of some keys in one call of refresh()."""

    def __init__(
        self,
        names: tuple[str, ...],
        is_many: bool,
        out: object,
        held: object,
        specs: Mapping[str, Spec],
        *,
        is_direct: bool,
    ) -> None:
        """Check what a call is given; ``is_direct`` if whole values may be written as they come.

        Raises:
            ConfigError: for something else than a Holding or None for each key, or without ``out``.
            KeyNotFound, Mismatch: if an output does not fit its key.
        """
        if out is None:
            raise ConfigError("refresh() writes to out; give a tensor of the key's shape")
        outs = values_of(names, is_many, out)
        check_values(names, outs, specs, "write it to")
        self._is_many = is_many
        self._specs = [specs[name] for name in names]
        self._targets = [
            [target_of(name, value) for value in devices] for name, devices in zip(names, outs, strict=True)
        ]
        self._are_counted = [
            all(isinstance(value, torch.Tensor) and not value.is_inference() for value in devices)
            for devices in outs
        ]
        self.sinks = tuple(
            [
                next((target for target in some if is_direct and is_row(target)), None)
                for some in self._targets
            ]
        )
        """For each key the tensor to which it may be written directly."""
        self.marks = marks_of(names, is_many, held, self._targets)

    @torch.no_grad()
    def deliver(self, found: Sequence[Fresh]) -> Holding | list[Holding]:
        """Write the changes; return the state of the copies."""
        held = []
        places = Counter([target.data_ptr() for some in self._targets for target in some])
        for index, fresh in enumerate(found):
            targets, shape = self._targets[index], self._specs[index].shape
            for target in targets:
                if fresh.whole is None:
                    for ids, rows in fresh.patches:
                        some = rows.view(len(ids), *shape[1:]).to(target.device)
                        target.index_copy_(0, ids.to(target.device), some)
                elif fresh.whole is not target:
                    target.copy_(fresh.whole.view(shape))
            is_own = all(places[place.data_ptr()] == 1 for place in targets)
            is_counted = is_own and fresh.mark is not None and self._are_counted[index]
            held.append(Holding(fresh.mark, targets) if is_counted else Holding())
        return held if self._is_many else held[0]
