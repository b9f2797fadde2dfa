"""The ids of one call: each once, in order, and cut by server, in few passes over them.

A pull wants the row of each id once, and a push one sum for each. So both sort the ids. The rows of one
server lie side by side in what a pull fills and a push sends: neither moves a row once more to cut by server.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from kvps.core.embedding.id_hash import Ids, servers_of

Places = npt.NDArray[np.int64]
_NUMBER_BITS = 63
"""Bits of an id and a position that are sorted as one number, which has a sign."""


class SplitIds:
    """The distinct ids of one call: by server, and ascending within each.

    Args:
        given: the ids of the call; they may be repeated.
        servers: how many share the rows.

    Example:
        >>> split = SplitIds(np.array([7, 3, 7]), servers=1)
        >>> split.ids.tolist(), split.edges, split.places.tolist()
        ([3, 7], (0, 2), [1, 0, 1])
        >>> split.summed(torch.tensor([[1.0], [2.0], [4.0]])).tolist()
        [[2.0], [5.0]]
    """

    def __init__(self, given: Ids, servers: int) -> None:
        self._order, inorder, self._starts = _runs(given)
        self.ids, self.edges, self._moved = _by_server(inorder.take(self._starts), servers)
        """Server s has the ids from ``edges[s]`` up to ``edges[s + 1]``."""

    def __len__(self) -> int:
        return len(self.ids)

    def of(self, server: int) -> slice:
        """Return which ids are those of a server."""
        return slice(self.edges[server], self.edges[server + 1])

    @cached_property
    def places(self) -> torch.Tensor:
        """The index of each given id among the distinct ones, int64."""
        numbers = np.arange(len(self._starts))
        if self._moved is not None:
            numbers[self._moved] = numbers.copy()
        places = np.empty_like(self._order)
        places[self._order] = np.repeat(numbers, self._counts)
        return torch.from_numpy(places)

    def summed(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the sum of the rows of each distinct id, [len(self), dim].

        They are added to 0 in the order of the call, as :meth:`torch.Tensor.index_add_` does it, to the bit.

        Args:
            rows: one for each given id, of float32 or float64, contiguous.
        """
        if not len(self.ids):
            return rows
        places, starts = self._sources
        return torch.nn.functional.embedding_bag(places, rows, starts, mode="sum")

    @cached_property
    def _sources(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Where the given rows of the first distinct id are, those of the second, and so on; and where
        each begins in that."""
        order, starts = self._order, self._starts
        if self._moved is not None:
            counts = self._counts.take(self._moved)
            starts = np.cumsum(counts) - counts
            order = order.take(
                np.repeat(self._starts.take(self._moved) - starts, counts) + np.arange(len(order))
            )
        return torch.from_numpy(order), torch.from_numpy(starts)

    @property
    def _counts(self) -> Places:
        """How often each distinct id is given, in the order of all ids."""
        return np.diff(self._starts, append=len(self._order))


def _runs(ids: Ids) -> tuple[Places, Ids, Places]:
    """Return the stable order that sorts ``ids``, the ids in it, and where each distinct one begins."""
    count = len(ids)
    bits = count.bit_length()
    if count and ids.min() >= 0 and int(ids.max()) < 1 << _NUMBER_BITS - bits:
        numbers = (ids << bits) | np.arange(count)  # each is there once, so that its order is stable
        numbers.sort()
        inorder = numbers >> bits
        order = np.bitwise_and(numbers, (1 << bits) - 1, out=numbers)
        return order, inorder, _starts(inorder)
    order = np.argsort(ids)
    inorder = ids.take(order)
    starts = _starts(inorder)
    if len(starts) < count:  # the order of equal ids is undefined
        is_first = np.zeros(count, np.int64)
        is_first[starts] = 1 << bits
        numbers = np.cumsum(is_first)
        numbers |= order
        numbers.sort()
        order = np.bitwise_and(numbers, (1 << bits) - 1, out=numbers)
    return order, inorder, starts


def _starts(inorder: Ids) -> Places:
    """Return where each distinct id begins, of ids in order."""
    is_first = np.empty(len(inorder), np.bool_)
    is_first[:1] = True
    np.not_equal(inorder[1:], inorder[:-1], out=is_first[1:])
    return np.flatnonzero(is_first)


def _by_server(unique: Ids, servers: int) -> tuple[Ids, tuple[int, ...], Places | None]:
    """Return distinct ids by server, the edges of the servers, and the order; None if that is as it was."""
    if servers == 1:
        return unique, (0, len(unique)), None
    owners = servers_of(unique, servers)
    counts = np.bincount(owners, minlength=servers)
    # numpy sorts numbers of 16 bits by their digits, in one pass each.
    moved = np.argsort(owners.astype(np.uint16) if servers <= 1 << 16 else owners, kind="stable")
    return unique.take(moved), (0, *np.cumsum(counts).tolist()), moved
