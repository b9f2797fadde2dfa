"""Bags of ids: the checked inputs of embedding modules, and the pooled rows of an input."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kvps.errors import Mismatch
from kvps.store.table_batch import ids_of

MODES = ("sum", "mean", "max")
"""The ways to pool rows, by torch's numbers."""


class Bags(NamedTuple):
    """The ids of one input."""

    ids: torch.Tensor
    """int64 [k], on the CPU, without those of padding."""
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
        edges = torch.arange(bags + 1) * width
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
        edges = torch.cat([edges, torch.tensor([count])])
    falls = (edges[1:] < edges[:-1]).nonzero()
    if int(edges[0]) != 0 or int(edges[-1]) != count or len(falls):
        shown = edges[int(falls[0, 0]) :][:2].tolist() if len(falls) else edges[[0, -1]].tolist()
        raise Mismatch(
            f"{where}: offsets ascend from 0 to {count}, the number of ids; got {shown[0]} before {shown[1]}"
        )
    return edges


def _weights(where: str, given: object, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    if not isinstance(given, torch.Tensor) or given.shape != shape or given.dtype != dtype:
        found = (
            f"{given.dtype} {list(given.shape)}" if isinstance(given, torch.Tensor) else type(given).__name__
        )
        raise Mismatch(f"{where}: per_sample_weights are {dtype} {list(shape)}, as the ids; got {found}")
    return given.reshape(-1)


def pooled(
    rows: torch.Tensor,
    ids: torch.Tensor,
    places: torch.Tensor,
    bags: Bags,
    mode: str,
    padding_idx: int | None,
) -> torch.Tensor:
    """Return the rows of one input, of each bag its sum, mean or maximum.

    torch adds up gradients in an order that follows from the comparisons of ids, padding included. Places
    compare as ids do, so the same operator gives the same bits here.

    Args:
        rows: [n, dim], on the device of ``bags``.
        ids: [n], ascending: those of ``rows``.
        places: the index in ``rows`` of each of the ids of ``bags``.
        bags: the input.
        mode: ``"sum"``, ``"mean"`` or ``"max"``; ``"none"`` for rows that are not pooled.
        padding_idx: an id whose row counts as zeros, and gets no gradient.
    """
    padding = -1
    if bags.kept is not None:
        assert padding_idx is not None
        padding = int(torch.searchsorted(ids, padding_idx))
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
        MODES.index(mode),
        False,  # sparse
        bags.weights,
        True,  # include_last_offset
        padding if padding >= 0 else None,
    )[0]
