"""What is not finite: found, counted, logged, and told to each worker once."""

import pytest
import torch

from kvps.core.nonfinite import RANKS_MAX, Flaw, count_nonfinite
from kvps.core.server.round_logs import NonFiniteLog
from kvps.protocol.stores import Piece
from kvps.protocol.values import Ask

NAN, INF = float("nan"), float("inf")
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
FLAW = Flaw(2, (3,))


# --- to find ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
def test_values_whose_sum_overflows_are_finite(dtype: torch.dtype) -> None:
    assert count_nonfinite(torch.full((100,), torch.finfo(dtype).max, dtype=dtype)) == 0


# --- to remember ------------------------------------------------------------------------------------


def drops(is_error: bool = True) -> NonFiniteLog:
    return NonFiniteLog("kv", is_error)


def test_drops_are_found_by_range_and_rank() -> None:
    one = drops()
    one.add("b", [Piece(7, 10, 5)], 2, 4, FLAW)
    one.add("a", [Piece(7, 0, 5), Piece(8, 0, 5)], 2, 5, FLAW)
    asks = [Ask(0, 5, 0, 0), Ask(10, 5, 0, 0)]
    assert [drop.number for drop in one.among(7, 2, asks)] == [5, 4]
    assert [drop.number for drop in one.among(8, 2, asks)] == [5]
    assert [drop.number for drop in one.among(7, 2, asks[1:])] == [4]
    assert one.among(7, 2, [Ask(5, 5, 0, 0)]) == ()
    assert one.among(7, 1, asks) == one.among(9, 2, asks) == ()
    one.forget([Piece(7, 0, 5), Piece(8, 0, 5)])
    assert [drop.number for drop in one.among(7, 2, asks)] == [4]
    assert one.among(8, 2, asks) == ()
    assert one.counts == {"a": 1, "b": 1}


# --- to log -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "says"),
    [
        ((1, 5), "(from some of ranks 1, 5, or from their sum)"),
        (tuple(range(RANKS_MAX + 2)), f"{RANKS_MAX - 2}, {RANKS_MAX - 1} and 2 more, or from their sum)"),
    ],
)
def test_several_ranks_are_named(ranks: tuple[int, ...], says: str) -> None:
    one = drops()
    one.add("w", [], None, 0, Flaw(2, ranks))
    (note,) = one.report()
    assert note.text.endswith(says)


# --- to tell ----------------------------------------------------------------------------------------
