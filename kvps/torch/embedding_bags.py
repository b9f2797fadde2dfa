"""Bags of ids: the checked inputs of embedding modules, and the pooled rows of an input."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple, Protocol

import torch

from kvps.errors import Mismatch
from kvps.store.table_batch import TableBatch
from kvps.tensors import ids_of

MODES = ("sum", "mean", "max")
"""The ways to pool rows, by torch's numbers."""


class Bags(NamedTuple):
    """The ids of one input."""

    ids: torch.Tensor
    """int64 [k], on the CPU, without the ids of padding."""
    offsets: torch.Tensor | None
    """int64 [bags + 1]: where each bag begins among the given ids, and their number; None if rows are not
    pooled."""
    weights: torch.Tensor | None
    """The factor of each given id's row; None for 1."""
    kept: torch.Tensor | None
    """Whether each of the given ids is not padding, bool; None if all are not."""
    shape: tuple[int, ...]
    """The shape of the given ids."""
    device: torch.device


def ids_read(where: str, given: object, padding_idx: int | None) -> Bags:
    """Return the ids of an input whose rows are not pooled.

    Raises:
        Mismatch: if it holds no ids.
    """
    ids = _ids(where, given)
    flat, kept = _without(ids.reshape(-1).cpu(), padding_idx)
    return Bags(flat, None, None, kept, tuple(ids.shape), ids.device)


def bags_read(
    where: str,
    given: object,
    offsets: object,
    weights: object,
    *,
    padding_idx: int | None,
    has_last: bool,
    dtype: torch.dtype,
) -> Bags:
    """Return the bags of an input, as :meth:`torch.nn.EmbeddingBag.forward` takes it.

    Args:
        where: names the input in errors.
        given: ids of one or two dimensions.
        offsets: where bags begin, for ids of one dimension.
        weights: None, or the factor of each row.
        padding_idx: an id whose row is no part of its bag.
        has_last: the last offset is the number of ids.
        dtype: of the rows, and so of ``weights``.

    Raises:
        Mismatch: saying what does not fit.
    """
    ids = _ids(where, given)
    if ids.dim() == 2:
        if offsets is not None:
            raise Mismatch(f"{where}: ids of two dimensions have a bag in each row; omit the offsets")
        bags, width = ids.shape
        edges = torch.arange(bags + 1, device="cpu") * width
    elif ids.dim() == 1:
        edges = _edges(where, offsets, len(ids), has_last=has_last)
    else:
        raise Mismatch(f"{where}: ids have one or two dimensions, got {list(ids.shape)}")
    if weights is not None:
        weights = _weights(where, weights, ids.shape, dtype)
    flat, kept = _without(ids.reshape(-1).cpu(), padding_idx)
    return Bags(flat, edges, weights, kept, tuple(ids.shape), ids.device)


def _ids(where: str, given: object) -> torch.Tensor:
    if not isinstance(given, torch.Tensor):
        raise Mismatch(f"{where}: ids are a tensor, got {type(given).__name__}")
    return ids_of(given, f"{where}: ids")


def _without(ids: torch.Tensor, padding_idx: int | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    if padding_idx is None:
        return ids, None
    kept = ids != padding_idx
    return (ids, None) if bool(kept.all()) else (ids[kept], kept)


def _edges(where: str, offsets: object, count: int, *, has_last: bool) -> torch.Tensor:
    """Return checked offsets, with the end of the last bag."""
    if not isinstance(offsets, torch.Tensor):
        raise Mismatch(
            f"{where}: ids of one dimension need offsets, a tensor of whole numbers; got "
            f"{type(offsets).__name__}"
        )
    edges = ids_of(offsets, f"{where}: offsets").cpu()
    if edges.dim() != 1 or len(edges) < has_last:
        raise Mismatch(f"{where}: offsets have one dimension, and one for each bag; got {list(edges.shape)}")
    if not has_last:
        edges = torch.cat([edges, torch.tensor([count], device="cpu")])
    falls = (edges[1:] < edges[:-1]).nonzero()
    if int(edges[0]) != 0 or int(edges[-1]) != count or len(falls):
        shown = edges[int(falls[0, 0]) :][:2].tolist() if len(falls) else edges[[0, -1]].tolist()
        raise Mismatch(
            f"{where}: offsets ascend from 0 to {count}, the number of ids; got {shown[0]} before {shown[1]}"
        )
    return edges


def _weights(where: str, given: object, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    found = type(given).__name__
    if isinstance(given, torch.Tensor):
        if (given.shape, given.dtype, given.layout) == (shape, dtype, torch.strided) and not given.is_meta:
            return given.reshape(-1)
        found = f"{given.dtype} {list(given.shape)}, {given.layout} on {given.device}"
    raise Mismatch(f"{where}: per_sample_weights are {dtype} {list(shape)}, as the ids; got {found}")


class Lookup(Protocol):
    """How the rows of an input are looked up."""

    mode: str
    padding_idx: int | None


Feature = tuple[Lookup, Bags]


def pooled(
    leaf: torch.Tensor, batch: TableBatch, group: int, tables: Sequence[Sequence[Feature]]
) -> list[torch.Tensor]:
    """Return the rows of each input of a group of tables; of bags each sum, mean or maximum.

    Args:
        leaf: the rows of the group, [n, dim], on the device of all inputs.
        batch: the ids of all inputs, by table.
        group: its index.
        tables: the features of each table of the group.
    """
    features = [some[0] for some in tables if len(some) == 1]
    (mode, *others) = {lookup.mode for some in tables for lookup, _ in some}
    is_plain = all(bags.kept is None and bags.weights is None for _, bags in features)
    is_summed = leaf.device.type == "cpu" and leaf.dtype in (torch.float32, torch.float64)
    if is_plain and is_summed and len(features) == len(tables) and mode in ("none", "sum") and not others:
        return _pooled_at_once(leaf, batch, group, [bags for _, bags in features])
    # Not views: a script may write to what follows from them, as relu_() does.
    first, stop = batch.tables.groups[group][2:]
    parts = torch.unsafe_split_with_sizes(leaf, batch.sizes[first:stop])
    found = []
    for at, part, some in zip(range(first, stop), parts, tables, strict=True):
        places = batch.split.places[at] - (batch.split.edges[at] - batch.split.edges[first])
        owns = torch.split_with_sizes(places, [len(bags.ids) for _, bags in some])
        found += [
            _pooled_alone(part, batch.ids[at], own, *feature) for feature, own in zip(some, owns, strict=True)
        ]
    return found


class _RowsOfBags(torch.autograd.Function):
    """The rows of some places, summed over bags if ``edges`` says where each begins."""

    @staticmethod
    def forward(
        context: Any, leaf: torch.Tensor, batch: TableBatch, group: int, edges: torch.Tensor | None
    ) -> torch.Tensor:
        context.given = batch, group, edges
        places = batch.split.places_of(group)
        if edges is None:
            return leaf.index_select(0, places)
        return torch.embedding_bag(leaf, places, edges, False, 0, False, None, True)[0]

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        batch, group, edges = context.given
        sources = None
        if edges is not None:
            # As the backward of torch.embedding_bag sorts, feature by feature: not stably.
            _, _, first, stop = batch.tables.groups[group]
            orders = [places.sort()[1] for places in batch.split.places[first:stop]]
            begins = accumulate([len(order) for order in orders[:-1]], initial=0)
            order = torch.cat([order + begin for order, begin in zip(orders, begins, strict=True)])
            sources = torch.repeat_interleave(edges.diff())[order]
        return batch.split.summed_of(group, gradients[0].contiguous(), sources), None, None, None


def _pooled_at_once(
    leaf: torch.Tensor, batch: TableBatch, group: int, inputs: list[Bags]
) -> list[torch.Tensor]:
    """Return the rows of inputs, each of a table of its own, of which none is padding or has a weight."""
    if inputs[0].offsets is None:
        shapes = [bags.shape for bags in inputs]
        edges = None
    else:
        *begins, total = accumulate([len(bags.ids) for bags in inputs], initial=0)
        offsets = [bags.offsets for bags in inputs if bags.offsets is not None]
        shapes = [(len(some) - 1,) for some in offsets]
        firsts = [some[:-1] + begin for some, begin in zip(offsets, begins, strict=True)]
        edges = torch.cat([*firsts, torch.tensor([total], device="cpu")])
    rows = _RowsOfBags.apply(leaf, batch, group, edges)  # type: ignore[no-untyped-call]  # torch has no types
    # Not views: a script may write to them, as relu_() does.
    parts = torch.unsafe_split_with_sizes(rows, [prod(shape) for shape in shapes])
    return [
        part if len(shape) == 1 else part.view(*shape, leaf.shape[1])
        for part, shape in zip(parts, shapes, strict=True)
    ]


def _pooled_alone(
    rows: torch.Tensor, ids: torch.Tensor, places: torch.Tensor, lookup: Lookup, bags: Bags
) -> torch.Tensor:
    """Return the rows of one input.

    torch adds up gradients in an order that follows from the comparisons of ids, padding included. Places
    compare as ids do, so the same operator gives the same bits here.

    Args:
        rows: [n, dim], on the device of ``bags``.
        ids: [n], ascending: the ids of ``rows``.
        places: the index in ``rows`` of each of the ids of ``bags``.
        lookup: how rows are pooled; and an id whose row counts as zeros, and gets no gradient.
        bags: the input.
    """
    padding = -1
    if bags.kept is not None:
        assert lookup.padding_idx is not None
        padding = int(torch.searchsorted(ids, lookup.padding_idx))
        rows = torch.cat([rows[:padding], rows.new_zeros((1, rows.shape[1])), rows[padding:]])
        given = torch.full_like(bags.kept, padding, dtype=torch.int64)
        given[bags.kept] = places + (places >= padding)
        places = given
    places = places.to(rows.device)
    if bags.offsets is None:
        return torch.embedding(rows, places, padding).view(*bags.shape, rows.shape[1])
    return torch.embedding_bag(
        rows,
        places,
        bags.offsets.to(rows.device),
        False,  # scale_grad_by_freq
        MODES.index(lookup.mode),
        False,  # sparse
        bags.weights,
        True,  # include_last_offset
        padding if padding >= 0 else None,
    )[0]
