"""Rounds that close at a quorum, against a model: each push counts at most once, with its weight, and late ones later."""

from collections import defaultdict

import torch
from hypothesis import given
from hypothesis import strategies as st

from kvps.core.gradients import DenseGradient
from kvps.core.server.chunks.rounds import LateSpan, Span, Verdict
from tests.support.tiers import examples

RANKS = 4
STEPS = st.one_of(
    st.tuples(st.integers(0, RANKS - 1), st.integers(-2, 2), st.sampled_from([0.5, 1.0, 3.0])),
    st.floats(0.0, 3.0),
)


@given(
    steps=st.lists(STEPS, max_size=80),
    quorum=st.integers(1, RANKS),
    grace_s=st.sampled_from([0.0, 1.0, -1.0]),
    counts_late=st.booleans(),
)
@examples(150)
def test_each_push_counts_at_most_once(
    steps: list[object], quorum: int, grace_s: float, counts_late: bool
) -> None:
    """A step is a push (its number given relative to the rank's next), or time that passes."""
    span = (LateSpan if counts_late else Span)(0, 1)
    now, everybody = 0.0, frozenset(range(RANKS))
    made: dict[int, dict[int, tuple[float, float]]] = defaultdict(dict)
    """Rank -> number -> what the push was worth, and its weight, if it was taken in."""
    applied: list[tuple[set[int], float, float]] = []
    """The ranks of each round that closed, its weighted sum and its weights."""
    for worth, step in enumerate(steps, start=1):
        if isinstance(step, float):
            now += step
        else:
            rank, relative, weight = step  # type: ignore[misc]
            following = max(made[rank], default=-1) + 1
            number = max(0, following + relative)
            verdict = span.judge((rank,), number, number if counts_late else None)
            if number in made[rank]:
                assert verdict is Verdict.DUPLICATE
            if verdict is Verdict.COUNTED:
                round_ = span.take((rank,), number, now)
                assert rank not in round_.ranks
                gradient = DenseGradient([torch.tensor([worth * weight], dtype=torch.float64)])
                round_.add((rank,), gradient, keep=True, weight=weight)
                made[rank][number] = (worth, weight)
        while span.rounds:
            closes_at = span.closes_at(quorum, grace_s, now)
            if span.missing(everybody) and (closes_at is None or closes_at > now):
                break
            closed = span.rounds.popleft()
            assert len(closed.ranks) >= quorum
            total = closed.sum().whole().item()
            mean = closed.mean().sum.whole().item()
            weights = sum(closed.weights)
            assert abs(mean - total / weights) < 1e-9 * max(1.0, abs(mean))
            applied.append((closed.ranks, total, weights))
            span.version, span.moved_at = span.version + 1, now
        span.check()
    waiting = [(item.ranks, item.sum().whole().item(), sum(item.weights)) for item in span.rounds]
    counted = [push for pushes in made.values() for push in pushes.values()]
    assert sum(len(ranks) for ranks, _, _ in applied + waiting) == len(counted)
    assert sum(total for _, total, _ in applied + waiting) == sum(item * by for item, by in counted)
    assert sum(weights for _, _, weights in applied + waiting) == sum(by for _, by in counted)
    if counts_late:
        for pushes in made.values():
            assert sorted(pushes) == list(range(len(pushes))), "a push was left out"
