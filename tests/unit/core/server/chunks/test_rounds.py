"""Spans and their rounds: who counts, what closes, what splits and joins."""

import pytest
import torch

from kvps.core.gradients import DenseGradient, GradientSum
from kvps.core.server.chunks.rounds import LENT_MAX, FreeSpan, PendingUpdate, Round, Span, Verdict
from kvps.protocol.envelope import WINDOW

ALL = frozenset({0, 1, 2})


def span(**pushed: int) -> Span:
    """A span of ten elements; ``r0=3``: rank 0 has pushed three times."""
    return Span(0, 10, pushed={int(name[1:]): count for name, count in pushed.items()})


def ones(count: int = 10) -> torch.Tensor:
    return torch.ones(count)


def push(span: Span, rank: int, number: int, gradient: torch.Tensor | None = None) -> None:
    pushed = DenseGradient([ones() if gradient is None else gradient])
    span.take((rank,), number, 0.0).add((rank,), pushed, keep=False)
    span.check()


# --- judging ----------------------------------------------------------------------------------------


def test_at_most_64_rounds_are_open() -> None:
    item = span()
    for number in range(WINDOW):
        assert item.judge((0,), number, None) is Verdict.COUNTED
        push(item, 0, number)
    assert item.judge((0,), WINDOW, None) is Verdict.EARLY
    item.version += 1
    item.rounds.popleft()
    assert item.judge((0,), WINDOW, None) is Verdict.COUNTED
    assert FreeSpan(0, 10, pushed={0: 500}).judge((0,), 500, None) is Verdict.COUNTED


# --- rounds -----------------------------------------------------------------------------------------


def test_a_round_closes_by_ranks_never_by_pushes() -> None:
    item = span()
    assert item.missing(ALL) == (0, 1, 2)
    push(item, 0, 0)
    push(item, 1, 0)
    push(item, 1, 1)
    assert item.missing(ALL) == (2,)
    push(item, 2, 0)
    assert item.missing(ALL) == ()
    assert item.missing(frozenset({0})) == ()


def test_or_in_the_order_of_ranks() -> None:
    item = Round(0, 0.0)
    for rank, value in ((2, 1.0), (0, 1e8), (1, -1e8)):
        item.add((rank,), DenseGradient([torch.tensor([value])]), keep=True)
    assert item.ranks == {0, 1, 2}
    assert item.sum().whole().tolist() == [1.0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("keep", [False, True])
def test_half_types_are_summed_in_float32(dtype: torch.dtype, keep: bool) -> None:
    item = Round(0, 0.0)
    for rank in range(3):
        item.add(
            (rank,),
            DenseGradient([torch.tensor([2048.0 if rank == 0 else 1.0], dtype=dtype)]),
            keep=keep,
        )
    assert item.sum().whole().dtype is torch.float32
    assert item.sum().whole().item() == 2050.0


# --- what is lent ------------------------------------------------------------------------------------


def add(item: Round, rank: int, gradient: torch.Tensor, *, lent: bool) -> None:
    item.add((rank,), DenseGradient([gradient], is_lent=lent), keep=False)


def test_few_that_are_lent_are_left_where_they_lie() -> None:
    item, lent = Round(0, 0.0), [torch.full((2,), 1.0 + rank) for rank in range(LENT_MAX)]
    for rank, gradient in enumerate(lent):
        add(item, rank, gradient, lent=True)
    assert [item.parts[0, (rank,)].joined().data_ptr() for rank in range(LENT_MAX)] == [
        gradient.data_ptr() for gradient in lent
    ]
    assert item.sum().whole().tolist() == [36.0, 36.0]


@pytest.mark.parametrize("count", [LENT_MAX + 1, 2 * LENT_MAX, 2 * LENT_MAX + 1])
def test_more_are_added_up_elsewhere(count: int) -> None:
    item, lent = Round(0, 0.0), [torch.full((2,), 1.0 + rank) for rank in range(count)]
    for rank, gradient in enumerate(lent):
        add(item, rank, gradient, lent=True)
        assert len(item.parts) <= LENT_MAX
    assert item.sum().whole().tolist() == [count * (count + 1) / 2] * 2
    assert [gradient.tolist() for gradient in lent] == [[1.0 + rank] * 2 for rank in range(count)]


@pytest.mark.parametrize("order", ["lclcl", "clllc", "llcc", "cc" + LENT_MAX * "l" + "cl"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int32])
def test_lent_gradients_are_never_written_to(order: str, dtype: torch.dtype) -> None:
    """Whatever has come in frames before, or comes after."""
    item, lent = Round(0, 0.0), []
    for rank, how in enumerate(order):
        gradient = torch.full((3,), rank + 1).to(dtype)
        add(item, rank, gradient, lent=how == "l")
        if how == "l":
            lent.append((rank, gradient))
    expected = sum(range(1, len(order) + 1))
    assert item.sum().whole().tolist() == [expected] * 3
    assert item.sum().whole().tolist() == [expected] * 3, "and looking changes nothing"
    assert all(gradient.tolist() == [rank + 1] * 3 for rank, gradient in lent)


def test_halves_of_what_is_lent_move_apart() -> None:
    left, lent = span(), [torch.arange(10.0), torch.arange(10.0)]
    for rank, gradient in enumerate(lent):
        pieces = DenseGradient(gradient.split([3, 4, 3]), is_lent=True)
        left.take((rank,), 0, 0.0).add((rank,), pieces, keep=False)
    right = left.cut(5)
    for half in (left, right):
        half.check()
    push(right, 2, 0, ones(5))
    assert left.rounds[0].sum().whole().tolist() == [0, 2, 4, 6, 8]
    assert right.rounds[0].sum().whole().tolist() == [11, 13, 15, 17, 19]
    assert all(gradient.equal(torch.arange(10.0)) for gradient in lent)


# --- clocks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pushed", "rank"),
    [({0: 7, 1: 9}, 1), ({0: 7}, 1), ({1: 3}, 1)],
    ids=["it leads", "it never pushed", "nobody else did"],
)
def test_a_replaced_rank_is_never_set_back(pushed: dict[int, int], rank: int) -> None:
    free_span = FreeSpan(0, 10, pushed=pushed)
    free_span.replace(rank, ALL)
    assert not free_span.head_start.get(rank)


# --- cutting and joining ----------------------------------------------------------------------------


def test_both_halves_have_the_history() -> None:
    left = span(r0=1)
    left.head_start[1], left.clock_from[0] = 4, 1
    left.due.append(PendingUpdate(0, (), GradientSum((DenseGradient([torch.arange(10.0)]),))))
    left.take((0,), 1, 5.0).add((0,), DenseGradient([torch.arange(10.0)]), keep=False)
    left.take((0,), 2, 6.0).add((0,), DenseGradient([torch.arange(10.0)]), keep=True)
    right = left.cut(4)
    for half in (left, right):
        half.check()
        assert (half.pushed, half.head_start, half.clock_from) == ({0: 3}, {1: 4}, {0: 1})
        assert [round_.number for round_ in half.rounds] == [1, 2]
    assert (left.start, left.stop, right.start, right.stop) == (0, 4, 4, 10)
    assert right.due[0].sum.whole().tolist() == [4, 5, 6, 7, 8, 9]
    assert left.rounds[0].sum().whole().tolist() == [0, 1, 2, 3]
    assert right.rounds[1].sum().whole().tolist() == [4, 5, 6, 7, 8, 9]


def test_halves_move_apart() -> None:
    left = span()
    push(left, 0, 0)
    right = left.cut(4)
    push(right, 1, 0, ones(6))
    assert left.missing(ALL) == (1, 2)
    assert right.missing(ALL) == (2,)
    assert left.pushed == {0: 1}
    assert left.rounds[0].sum().whole().tolist() == [1] * 4
    assert right.rounds[0].sum().whole().tolist() == [2] * 6
