"""The ids of one call: each once for its table, in order, and cut by server, in few passes over them.

A pull wants the row of each id once, and a push one sum for each. So both sort the ids, those of all tables
at once. Tables with rows of one type and width are a *group*, whose rows are one tensor: those of each table,
in the order of its ids. A server's share says where its rows lie in that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt
import torch

from kvps.core.embedding.id_hash import Ids, servers_of

Places = npt.NDArray[np.int64]
_NUMBER_BITS = 63
"""Bits of a table, an id and a position that are sorted as one number, which has a sign."""


@dataclass(frozen=True, slots=True)
class Share:
    """The ids of some tables that lie on one server."""

    ids: Ids
    """int64 [n]: those of each table, ascending, one table after the other."""
    edges: tuple[int, ...]
    """Where the ids of each table begin, and n."""
    places: tuple[range | Places, ...]
    """For each group, the indices of its rows here among all of its rows; a range if they are neighbours."""


class SplitIds:
    """The distinct ids of each table of one call, ascending, and the share of each server.

    Args:
        given: for each table its ids; they may be repeated.
        servers: how many share the rows.
        stops: for each group, the index behind its last table; None for one group.

    Example:
        >>> split = SplitIds([np.array([7, 3, 7]), np.array([5])], servers=1)
        >>> split.ids.tolist(), split.edges
        ([3, 7, 5], (0, 2, 3))
        >>> [places.tolist() for places in split.places]
        [[1, 0, 1], [2]]
        >>> split.summed([torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([[8.0]])])[0].tolist()
        [[2.0], [5.0], [8.0]]
    """

    def __init__(self, given: Sequence[Ids], servers: int, stops: Sequence[int] | None = None) -> None:
        self._sizes = [len(some) for some in given]
        self._begins = [0, *accumulate(self._sizes)]
        self._stops = (0, len(given)) if stops is None else (0, *stops)
        ids = given[0] if len(given) == 1 else np.concatenate(given)
        self._order, inorder, self._starts = runs(ids, self._begins)
        self.ids = inorder.take(self._starts)
        """The distinct ids of all tables, one table after the other."""
        self.edges: tuple[int, ...] = tuple(self._starts.searchsorted(self._begins).tolist())
        """Where the ids of each table begin, and how many ids there are."""
        if servers == 1:
            places = tuple([range(high - low) for low, high in self._ranges])
            self.shares: tuple[Share, ...] = (Share(self.ids, self.edges, places),)
            """The share of each server."""
        else:
            self.shares = self._cut(servers)

    @property
    def _ranges(self) -> list[tuple[int, int]]:
        """For each group, where its ids begin and end."""
        return [(self.edges[first], self.edges[stop]) for first, stop in pairwise(self._stops)]

    def _cut(self, servers: int) -> tuple[Share, ...]:
        owners = servers_of(self.ids, servers)
        moved = owners.argsort(kind="stable")  # of 16 bits: numpy sorts by their digits, in one pass each
        ordered = self.ids.take(moved)
        cuts = [0, *np.bincount(owners, minlength=servers).cumsum().tolist()]
        shares = []
        for low, high in pairwise(cuts):
            mine = moved[low:high]
            edges: list[int] = mine.searchsorted(self.edges).tolist()
            places = [
                mine[edges[first] : edges[stop]] - self.edges[first] for first, stop in pairwise(self._stops)
            ]
            shares.append(Share(ordered[low:high], tuple(edges), tuple(places)))
        return tuple(shares)

    @cached_property
    def places(self) -> tuple[torch.Tensor, ...]:
        """For each table the index of each given id, int64, among the rows of its group."""
        return torch.split_with_sizes(self._places, self._sizes)

    @cached_property
    def _places(self) -> torch.Tensor:
        numbers, places = np.zeros((2, len(self._order)), np.int64)
        numbers[self._starts[1:]] = 1
        places[self._order] = numbers.cumsum()
        for first, stop in pairwise(self._stops[1:]):
            places[self._begins[first] : self._begins[stop]] -= self.edges[first]
        return torch.from_numpy(places)

    def places_of(self, group: int) -> torch.Tensor:
        """Return the index of each given id of a group among its rows, table after table."""
        return self._places[self._begins[self._stops[group]] : self._begins[self._stops[group + 1]]]

    def summed(self, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return for each group the sum of the rows of each distinct id, in the order of its ids.

        They are added to 0 in the order of the call, as :meth:`torch.Tensor.index_add_` does it, to the bit.

        Args:
            rows: of each table one row for each given id, of float32 or float64, contiguous.
        """
        totals = []
        for group, (first, stop) in enumerate(pairwise(self._stops)):
            given = rows[first] if stop - first == 1 else torch.cat([*rows[first:stop]])
            totals.append(self.summed_of(group, given))
        return totals

    def summed_of(self, group: int, given: torch.Tensor, sources: torch.Tensor | None = None) -> torch.Tensor:
        """Return the sum of the rows of each distinct id of a group, in the order of its rows.

        Args:
            group: its index.
            given: rows of float32 or float64, contiguous.
            sources: which of them are those of the first distinct id, in the order in which they are added,
                then those of the second, and so on. None if there is one for each given id.
        """
        low, high = self._ranges[group]
        begin, end = (self._begins[self._stops[at]] for at in (group, group + 1))
        order = torch.from_numpy(self._order[begin:end] - begin) if sources is None else sources
        if not len(order):
            return given[:0]
        starts = torch.from_numpy(self._starts[low:high] - begin)
        return torch.nn.functional.embedding_bag(order, given, starts, mode="sum")


def runs(ids: Ids, begins: Sequence[int]) -> tuple[Places, Ids, Places]:
    """Return the stable order that sorts the ids of each table, the ids in it, and where each distinct one
    begins.

    Args:
        ids: those of each table, one table after the other.
        begins: where the ids of each table begin, and how many ids there are.
    """
    count = len(ids)
    bits, table_bits = count.bit_length(), (len(begins) - 2).bit_length()
    id_bits = int(ids.max()).bit_length() if count and ids.min() >= 0 else _NUMBER_BITS
    if table_bits + id_bits + bits <= _NUMBER_BITS:
        numbers = (ids << bits) | np.arange(count)  # each is there once, so that its order is stable
        if table_bits:
            for table, (begin, end) in enumerate(pairwise(begins)):
                numbers[begin:end] |= table << (id_bits + bits)
        numbers.sort()
        order = np.bitwise_and(numbers, (1 << bits) - 1, out=numbers)
        inorder = ids.take(order)
        return order, inorder, _starts(inorder, begins)
    order = np.concatenate([ids[begin:end].argsort() + begin for begin, end in pairwise(begins)])
    inorder = ids.take(order)
    starts = _starts(inorder, begins)
    if len(starts) < count:  # the order of equal ids is undefined
        is_first = np.zeros(count, np.int64)
        is_first[starts] = 1 << bits
        numbers = is_first.cumsum()
        numbers |= order
        numbers.sort()
        order = np.bitwise_and(numbers, (1 << bits) - 1, out=numbers)
    return order, inorder, starts


def _starts(inorder: Ids, begins: Sequence[int]) -> Places:
    """Return where each distinct id begins, of ids in order; a table has none in common with another."""
    is_first = np.empty(len(inorder) + 1, np.bool_)
    np.not_equal(inorder[1:], inorder[:-1], out=is_first[1:-1])
    is_first[[*begins]] = True
    return is_first[:-1].nonzero()[0]
