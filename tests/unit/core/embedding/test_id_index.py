"""From ids to slots, thousands at once."""

import numpy as np
import pytest

from kvps.core.embedding import id_index as module
from kvps.core.embedding.id_index import CELLS_MIN, FULL, IdIndex


def test_index_grows_as_often_as_it_must() -> None:
    index = IdIndex()
    ids = np.random.default_rng(1).permutation(200_000) * 64  # alike in their last bits
    for begin in range(0, len(ids), 7001):
        index.add(ids[begin : begin + 7001])
    assert np.array_equal(index.find(ids), np.arange(len(ids)))
    assert not (index.find(ids + 1) >= 0).any()
    assert index.size_bytes < 30 * len(ids)
    index.check()


def test_slots_of_dropped_ids_are_used_again_first() -> None:
    index = IdIndex()
    index.add(np.arange(10))
    index.drop(np.array([7, 2, 5]))
    index.check()
    assert index.find(np.arange(10)).tolist() == [0, 1, -1, 3, 4, -1, 6, -1, 8, 9]
    index.drop(np.array([9]))
    index.drop(np.array([], np.int64))
    assert index.drops == 2, "to drop none is no drop"
    index.check()
    assert index.add(np.array([100, 101])).tolist() == [9, 2]
    index.check()
    assert index.add(np.array([102, 103, 104])).tolist() == [7, 5, 10]
    assert index.used == 11
    index.check()


def test_ids_are_put_at_slots_that_are_given() -> None:
    index, dice = IdIndex(), np.random.default_rng(2)
    index.add(np.arange(5))
    index.drop(np.array([1, 3]))
    index.put(np.array([9, 3]), np.array([70, 71]))
    index.check()
    assert index.find(np.array([70, 71, 0, 1])).tolist() == [9, 3, 0, -1]
    slots = np.setdiff1d(dice.permutation(CELLS_MIN * 2), [0, 2, 3, 4, 9])
    index.put(slots, slots + 1000)
    index.check()
    assert np.array_equal(index.find(slots + 1000), slots)
    assert index.add(np.array([-1, -2])).tolist() == [2 * CELLS_MIN, 2 * CELLS_MIN + 1]


def test_growing_leaves_the_dropped_dropped() -> None:
    index = IdIndex()
    index.add(np.arange(600))
    index.drop(np.arange(300))
    index.add(np.arange(1000, 1000 + int(FULL * CELLS_MIN)))
    assert (index.find(np.arange(300)) < 0).all()
    index.check()


def test_slots_end_where_four_octets_cannot_number_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SLOTS_MAX", 10)
    index = IdIndex()
    index.add(np.arange(10))
    with pytest.raises(OverflowError, match="10 slots"):
        index.add(np.array([10]))
