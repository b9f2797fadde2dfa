"""Rows of tables as users give and want them: the rows that a value names, and the outputs of pulled rows.

A *table* is a key of two or more dimensions, and a row what one index of its first dimension holds.
Rows are given as a ``torch.sparse_coo`` tensor of the key's shape, or as a tuple ``(row_ids, rows)``:
numbers in one dimension, and as many rows. That is no list of values, one per device, since no value
of a table has one dimension. All mistakes are found here, before anything is sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from kvps.core.row_gradients import coalesce, numbered
from kvps.dtypes import Spec
from kvps.errors import ConfigError, Mismatch
from kvps.store.arguments import target_of
from kvps.tensors import NAMES, TORCH, as_tensor
from kvps.tensors import ids_of as whole_ids


class Rows(NamedTuple):
    """Some rows of a key, on the CPU."""

    ids: torch.Tensor
    """Their numbers, ascending, each once."""
    places: torch.Tensor
    """The place of each in ``rows``."""
    rows: torch.Tensor
    """[k, width]; perhaps the caller's own."""

    @property
    def inorder(self) -> torch.Tensor:
        """The rows in the order of their numbers, in memory of their own."""
        return self.rows.index_select(0, self.places)


def rows_in(values: Sequence[torch.Tensor]) -> list[Rows]:
    """Return the rows of each key, from a flat list of their three parts."""
    return [Rows(*values[start : start + 3]) for start in range(0, len(values), 3)]


def are_rows(value: object, spec: Spec | None) -> bool:
    """Whether ``value``, or each of a list of values, one per device, is some rows of a table."""
    if isinstance(value, torch.Tensor):
        return value.layout is torch.sparse_coo
    if _is_pair(value) and _is_table(spec):
        return True
    return isinstance(value, list | tuple) and len(value) > 0 and all(are_rows(each, spec) for each in value)


def have_rows(names: tuple[str, ...], values: object, specs: Mapping[str, Spec]) -> bool:
    """Whether some of the values of these keys, one for each, are rows."""
    return isinstance(values, list | tuple) and any(
        are_rows(value, specs.get(name)) for name, value in zip(names, values, strict=False)
    )


def apart(
    names: tuple[str, ...], values: Sequence[object], specs: Mapping[str, Spec]
) -> tuple[list[int], dict[int, Rows]]:
    """Return the indices of the dense values, and the rows of the others by their index.

    Raises:
        ConfigError: if there are more or fewer values than keys.
        Mismatch: if they are not rows of their key.
    """
    if len(values) != len(names):
        raise ConfigError(f"{len(names)} keys need as many values, got {len(values)}")
    dense: list[int] = []
    sparse: dict[int, Rows] = {}
    for index, (name, value) in enumerate(zip(names, values, strict=True)):
        if are_rows(value, specs[name]):
            sparse[index] = rows_of(name, specs[name], value)
        else:
            dense.append(index)
    return dense, sparse


def has_rows(gradient: torch.Tensor) -> bool:
    """Whether a gradient is one of some rows of a table."""
    return gradient.layout is torch.sparse_coo and gradient.dim() > 1


def _is_table(spec: Spec | None) -> bool:
    return spec is not None and len(spec.shape) > 1


def _dims(value: object) -> int:
    """Return how many dimensions ``value`` has, or would have as a tensor; -1 if it would be none."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return value.ndim
    if isinstance(value, list | tuple | range):
        return 1 if all(type(element) is int for element in value) else -1
    return -1


def table_of(name: str, spec: Spec | None) -> Spec:
    """Return what key ``name`` is.

    Raises:
        Mismatch: if it has no rows, or its rows have no elements: a server holds none of these.
    """
    if spec is None or not _is_table(spec):
        raise Mismatch(
            f"key {name!r} is {spec}, and only keys of two or more dimensions have rows; push and pull it as "
            "a whole"
        )
    if 0 in spec.shape[1:]:
        raise Mismatch(f"key {name!r} is {spec}, and its rows have no elements; push and pull it as a whole")
    return spec


def rows_of(name: str, spec: Spec, value: object) -> Rows:
    """Return the rows that ``value`` names, those named more than once summed.

    Half types are summed in float32 and rounded once.

    Args:
        name: the key.
        spec: what it is.
        value: for which :func:`are_rows`.

    Raises:
        Mismatch: if they are not rows of such a key.
    """
    table_of(name, spec)
    given = [value] if isinstance(value, torch.Tensor) or _is_pair(value) else value
    assert isinstance(given, list | tuple)
    each = [_ids_and_rows(name, spec, value) for value in given]
    ids, rows = each[0]
    if len(each) > 1:
        ids = torch.cat([places.cpu() for places, _ in each])
        rows = torch.cat([gradient.to(rows.device) for _, gradient in each])
    unique, places, summed = coalesce(ids.cpu(), rows)
    return Rows(unique, places, summed.cpu())


def _is_pair(value: object) -> bool:
    """Whether ``value`` is numbers of rows and these rows, and not a value per device."""
    return isinstance(value, tuple) and len(value) == 2 and _dims(value[0]) == 1


def _ids_and_rows(name: str, spec: Spec, value: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Return numbers, in any order, and rows, [k, width]."""
    if isinstance(value, torch.Tensor):
        return _of_coo(name, spec, value)
    assert isinstance(value, tuple)
    ids = ids_of(name, spec, value[0])
    rows = as_tensor(value[1])
    shape = (len(ids), *spec.shape[1:])
    if tuple(rows.shape) != shape or NAMES[rows.dtype] != spec.dtype:
        raise Mismatch(
            f"key {name!r} is {spec}; {len(ids)} of its rows are {Spec(spec.dtype, shape)}, got "
            f"{Spec(NAMES[rows.dtype], tuple(rows.shape))}"
        )
    return ids, rows.reshape(len(ids), spec.width)


def _of_coo(name: str, spec: Spec, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    value = value.detach()
    if tuple(value.shape) != spec.shape or value.dtype is not TORCH[spec.dtype]:
        given = f"{value.dtype}{list(value.shape)}"
        raise Mismatch(f"key {name!r} is {spec}; cannot push a sparse {given}")
    if value.sparse_dim() == 1:
        return value._indices()[0], value._values().reshape(-1, spec.width)
    # Single elements: those of one row are put in their places in it.
    value = value.coalesce()
    indices = value.indices()
    ids, places = torch.unique(indices[0], return_inverse=True)
    rows = value.values().new_zeros(len(ids), *spec.shape[1:])
    rows.index_put_((places, *indices[1:]), value.values())
    return ids, rows.view(-1, spec.width)


def ids_of(name: str, spec: Spec | None, given: object) -> torch.Tensor:
    """Return numbers of rows, int64, in their shape.

    Raises:
        Mismatch: unless they are whole numbers and each is that of a row of the key.
    """
    spec = table_of(name, spec)
    ids = whole_ids(given, f"key {name!r}: row_ids").cpu()
    if ids.numel():
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= spec.shape[0]:
            raise Mismatch(
                f"key {name!r} is {spec} and has rows 0 to {spec.shape[0] - 1}; row_ids go from "
                f"{low} to {high}"
            )
    return ids


def dense_of(spec: Spec, rows: Rows) -> torch.Tensor:
    """Return a gradient of all elements of a key, of which some rows are not 0."""
    dense = torch.zeros(spec.shape[0], spec.width, dtype=TORCH[spec.dtype], device="cpu")
    return dense.index_copy_(0, rows.ids, rows.inorder).view(spec.shape)


def taken(table: torch.Tensor, ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return the rows ``ids`` of a table, each at its place, on the CPU."""
    rows = table.index_select(0, ids.to(table.device)).cpu()
    return torch.empty_like(rows).index_copy_(0, places, rows)


class Pick:
    """The rows that a user wants of one key, and where they go."""

    def __init__(self, name: str, spec: Spec | None, row_ids: object, out: object) -> None:
        """Check the arguments of a pull of rows.

        Args:
            name: the key.
            spec: what it is; None if unknown.
            row_ids: numbers of rows, in any order and shape, repeats allowed.
            out: a tensor or array, or a list of them, of the key's shape or of that of the rows;
                None for a new tensor.

        Raises:
            Mismatch: if these are no rows of the key, or ``out`` has no room for them.
        """
        wanted = ids_of(name, spec, row_ids)
        assert spec is not None
        self._shape = (*wanted.shape, *spec.shape[1:])
        flat = wanted.cpu().view(-1)
        self.ids, which = numbered(flat)
        """The numbers of the rows that are asked for, ascending, each once."""
        self.places = torch.arange(len(self.ids), device="cpu")
        """Where each of them is to come: as the user wants them, if he wants each once."""
        self._repeats: torch.Tensor | None = which
        if len(self.ids) == len(flat):
            self.places = torch.empty_like(which).index_copy_(0, which, self.places)
            self._repeats = None
        self._flat = flat
        self._out = out
        outs: Sequence[object] = out if isinstance(out, list | tuple) else [out]
        self._targets: list[torch.Tensor] = []
        for target_given in outs if out is not None else ():
            if not isinstance(target_given, torch.Tensor | np.ndarray):
                raise Mismatch(
                    f"key {name!r}: an output is a tensor or an array, got {type(target_given).__name__}"
                )
            target = target_of(name, target_given)
            fits = tuple(target.shape) in (spec.shape, self._shape)
            if not fits or target.dtype is not TORCH[spec.dtype]:
                raise Mismatch(
                    f"key {name!r} is {spec}: the output must have that shape, or be "
                    f"{Spec(spec.dtype, self._shape)}, got {target.dtype}{list(target.shape)}"
                )
            self._targets.append(target)
        self._whole = spec.shape

    def deliver(self, rows: torch.Tensor) -> object:
        """Hand out rows, [k, width], that are at their places; return what the call returns."""
        inorder = rows if self._repeats is None else rows.index_select(0, self._repeats)
        for target in self._targets:
            if tuple(target.shape) == self._whole:
                shaped = inorder.view(len(self._flat), *self._whole[1:])
                target.index_copy_(0, self._flat.to(target.device), shaped.to(target.device))
            else:
                target.copy_(inorder.view(self._shape))
        return inorder.view(self._shape) if self._out is None else self._out


def picks_of(
    names: tuple[str, ...], is_many: bool, specs: dict[str, Spec], row_ids: object, out: object
) -> list[Pick]:
    """Return the rows to pull of each key.

    Raises:
        ConfigError: if there are not as many ``row_ids``, or outputs, as keys.
        Mismatch: as :class:`Pick`.
    """
    if row_ids is None:
        raise ConfigError("row_sparse_pull() needs row_ids=: the numbers of the rows to pull")
    if not is_many:
        return [Pick(names[0], specs.get(names[0]), row_ids, out)]
    each: list[Sequence[object]] = []
    for what, given in (("row_ids", row_ids), ("outputs", out)):
        if given is None:
            given = [None] * len(names)
        if not isinstance(given, list | tuple) or len(given) != len(names):
            raise ConfigError(f"{len(names)} keys need a list of as many {what}, one for each key")
        each.append(given)
    return [
        Pick(name, specs.get(name), ids, target)
        for name, ids, target in zip(names, each[0], each[1], strict=True)
    ]
