"""Updates of some rows of a table, which leave all others alone.

A *table* is a tensor of two or more dimensions, seen as rows: row ``i`` is what its first index ``i``
holds. A gradient that names few of its rows moves those, and no others: their momenta do not
decay, their weights do not decay either, and they are not read. So an update costs what was
touched, however large the table is. torch.optim.SparseAdam and MXNet's ``lazy_update`` do the same.

The rule is the ordinary one (:class:`~kvps.core.optim.base.Updater`): the rows that a gradient names are
gathered, with their rows of every state, updated side by side as if they were a tensor of their own,
and scattered back. What counts steps, the caller, counts those of the whole table; so a row that
is touched for the first time in step 5 is updated by the terms of step 5.

Rules that need norms of the whole tensor cannot be lazy: a norm is one of all rows.
"""

from __future__ import annotations

from typing import TypeAlias

from torch import Tensor

from kvps.core.optim.base import State, Terms, Updater
from kvps.core.optim.rounding import Rounding

Placed: TypeAlias = tuple[Tensor, Tensor]
"""A tensor [n, width], and which of its rows are meant, int64 [k]."""
BLOCK_COUNT = 256 << 10
"""Elements that are gathered at once: rows, and their states, stay in a core's cache meanwhile."""


def may_be_lazy(updater: Updater) -> bool:
    """Return whether ``updater`` can update some rows without the others.

    Example:
        >>> from kvps.core.optim.hyperparams import resolve
        >>> from kvps.core.optim.torch_rules import create
        >>> may_be_lazy(create(resolve("adam", {}))), may_be_lazy(create(resolve("lamb", {})))
        (True, False)
    """
    return not updater.needs_norms


def update_rows(
    weights: Tensor, state: State, ids: Tensor, rows: Tensor, updater: Updater, terms: Terms
) -> None:
    """Update the rows ``ids`` of a table in place; all other rows stay as they are.

    Args:
        weights: the table, [n, width], of any type that ``updater`` takes.
        state: its optimizer state as ``updater.new_state`` makes it: name -> [n, width].
        ids: which rows, int64 [k], each once, all in [0, n). Duplicates have to be summed before
            (:func:`kvps.core.row_gradients.coalesce`): of two rows with one id, one would be lost.
        rows: their gradients, [k, width], contiguous; float32 where the weights are half, else of
            the weights' type. They are used up: their contents are undefined afterwards.
        updater: the rule; one for which :func:`may_be_lazy`.
        terms: the numbers of this update, whose step is that of the whole table.

    Raises:
        ValueError: if the rule needs norms of the whole table.

    Example:
        >>> import torch
        >>> from kvps.core.optim.hyperparams import resolve
        >>> from kvps.core.optim.torch_rules import create
        >>> updater = create(resolve("sgd", {"lr": 0.5}))
        >>> table = torch.zeros(3, 2)
        >>> state = {name: tensor.view(3, 2) for name, tensor in updater.new_state(table.view(-1)).items()}
        >>> update_rows(
        ...     table, state, torch.tensor([1]), torch.ones(1, 2), updater,
        ...     Terms(step=1, lr=0.5, weight_decay=0.0),
        ... )
        >>> table.tolist()
        [[0.0, 0.0], [-0.5, -0.5], [0.0, 0.0]]
    """
    if not may_be_lazy(updater):
        raise ValueError(
            f"{updater.hyper.name} needs norms of the whole tensor; add the rows to a dense gradient"
        )
    placed = {name: (tensor, ids) for name, tensor in state.items()}
    update_placed((weights, ids), placed, rows, updater, terms)


def update_placed(
    weights: Placed,
    state: dict[str, Placed],
    rows: Tensor,
    updater: Updater,
    terms: Terms,
    *,
    is_read: bool = False,
    rounding: Rounding | None = None,
) -> None:
    """Update rows of a table in place, as :func:`update_rows` does, where each column has them elsewhere.

    With ``is_read``, gradients are only read. With ``rounding``, columns are updated in float32 and rounded.
    """
    tensor, ids = weights
    at_once = max(1, BLOCK_COUNT // max(1, tensor.shape[1]))
    for begin in range(0, len(ids), at_once):
        some = slice(begin, begin + at_once)
        weight = tensor.index_select(0, ids[some])
        states = {name: column.index_select(0, at[some]) for name, (column, at) in state.items()}
        stored = {"": weight, **states}
        if rounding is not None:
            weight, states = weight.float(), {name: part.float() for name, part in states.items()}
        shape = weight.shape if updater.is_by_row else (-1,)
        updater.apply(
            weight.view(shape),
            (rows[some].clone() if is_read else rows[some]).view(shape),
            states if updater.is_by_row else {name: part.view(-1) for name, part in states.items()},
            terms,
        )
        if rounding is not None:
            states = rounding[some].rounded({"": weight, **states}, stored)
            weight = states.pop("")
        tensor.index_copy_(0, ids[some], weight)
        for name, (column, at) in state.items():
            column.index_copy_(0, at[some], states[name])


def assign_rows(weights: Tensor, ids: Tensor, rows: Tensor, before: Tensor | None) -> None:
    """Make ``rows`` the value of a table in place: where no row is given, it is 0 from here on.

    A given row may be 0, too, for example where the gradients of two ranks cancel. The first element of
    such a row becomes -0: an optimizer with momenta has to update that row, and none that was not given.

    Args:
        weights: the table, [n, width].
        ids: which rows are given, int64 [k], each once, all in [0, n).
        rows: their values, [k, width], of a type that can be copied to the weights'.
        before: the rows that may not be 0 yet, int64, each in [0, n); None if that is not known, and
            all have to be cleared. Keep ``ids`` for the next call.

    Example:
        >>> import torch
        >>> table = torch.tensor([[1.0], [0.0], [3.0]])
        >>> assign_rows(table, torch.tensor([1]), torch.tensor([[2.0]]), torch.tensor([0, 2]))
        >>> table.tolist()
        [[0.0], [2.0], [0.0]]
    """
    if before is None:
        weights.zero_()
    else:
        weights.index_fill_(0, before, 0)
    values = rows.to(weights.dtype)
    weights.index_copy_(0, ids, values)
    if weights.is_floating_point():
        weights[:, 0].index_fill_(0, ids[~values.any(1)], -0.0)
