"""Lateness: a moving mean for each rank, and the ranks that are latest."""

from __future__ import annotations

from kvps.core.server.figures.lateness import SMOOTHING, Lateness, most_late


def test_a_rank_is_as_late_as_at_the_store_where_it_is_latest() -> None:
    one, other = Lateness(), Lateness()
    one.note((0,), 0.0)
    one.note((1, 2), 0.8)
    other.note((1,), 2.0)
    assert most_late([one, other], 9) == {"1": 2.0, "2": 0.8, "0": 0.0}
    assert list(most_late([one, other], 1)) == ["1"]
    for _ in range(SMOOTHING * 8):
        other.note((1,), 0.0)
    assert most_late([one, other], 1)["1"] == 0.8  # what was long ago is forgotten
