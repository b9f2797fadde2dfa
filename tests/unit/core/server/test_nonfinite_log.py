"""What is not finite: found, counted, logged, and told to each worker once."""

from __future__ import annotations

import pytest
import torch

from kvps.core.nonfinite import RANKS_MAX, Flaw, count_nonfinite
from kvps.core.server.round_logs import NonFiniteLog
from kvps.core.worker.failure_policy import complain
from kvps.core.worker.plan import Key
from kvps.dtypes import Spec
from kvps.errors import NonFinite
from kvps.protocol.stores import Piece
from kvps.protocol.values import Ask, Dropped

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


def texts(notes) -> list[str]:  # type: ignore[no-untyped-def]
    return [f"{one.level}: {one.text}" for one in notes]


def test_the_first_is_logged_at_once_and_the_next_ones_together() -> None:
    one = drops()
    assert texts(one.report()) == texts(one.look()) == []
    one.add("fc.w", [], None, 118, Flaw(12, (3,)))
    assert texts(one.report()) == [
        "warning: store 'kv': round 118 dropped: 12 values of key 'fc.w' are not finite (from rank 3)"
    ]
    for number in range(119, 124):
        one.add("fc.w", [], None, number, Flaw(1, ()))
        assert texts(one.report()) == []
    assert texts(one.look()) == [
        "warning: store 'kv': round 119 dropped: 1 value of key 'fc.w' is not finite (every push is finite, "
        "but their sum is not); and 4 more"
    ]
    one.add("b", [], 2, 7, Flaw(1, (2,)))
    assert texts(one.report()) == []  # there was a line a short while ago
    assert len(texts(one.look())) == 1
    assert texts(one.look()) == []
    one.add("b", [], 2, 8, Flaw(1, (2,)))
    assert texts(one.report()) == [
        "warning: store 'kv': push 8 of rank 2 dropped: 1 value of key 'b' is not finite (from rank 2)"
    ]


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


def keys(*names: str) -> dict[str, Key]:
    return {name: Key(name, Spec("float32", (4,))) for name in names}


@pytest.mark.spec("R107")
def test_a_worker_is_told_of_each_round_once() -> None:
    known = keys("a", "b", "c")
    for _ in range(2):
        complain("kv", True, known, {})
    with pytest.raises(NonFinite) as caught:
        complain("kv", True, known, {"a": Dropped(0, 4, 2, (3,)), "b": Dropped(4, 4, 1, ())})
    assert str(caught.value) == (
        "store 'kv': round 4 of key 'a' (and 1 more) was dropped: 2 values of key 'a' are "
        "not finite (from rank 3). The weights and the optimizer's state are unchanged on every server. Continue with the next push; if "
        "this happens again, check the loss and the learning rate"
    )
    complain("kv", True, known, {"a": Dropped(0, 4, 2, (3,)), "b": Dropped(4, 4, 1, ())})
    complain("kv", True, known, {"a": Dropped(0, 3, 2, (3,))})
    with pytest.raises(NonFinite, match="round 5 of key 'b' was dropped"):
        complain("kv", True, known, {"a": Dropped(0, 4, 2, (3,)), "b": Dropped(4, 5, 1, ())})
    with pytest.raises(NonFinite, match="push 0 of this rank of key 'c' was dropped"):
        complain("kv", False, known, {"c": Dropped(0, 0, 1, (0,))})
