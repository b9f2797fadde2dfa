"""Rounds of one span against a model that keeps every push it ever saw."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from kvps.core.gradients import DenseGradient
from kvps.core.server.chunks.rounds import Span, Verdict
from kvps.protocol.envelope import WINDOW
from tests.support.tiers import examples

RANKS = 3
PUSHES = st.tuples(
    st.lists(st.integers(0, RANKS - 1), min_size=1, max_size=2, unique=True), st.integers(-2, 3)
)


@given(
    steps=st.lists(st.one_of(PUSHES, st.frozensets(st.integers(0, RANKS - 1))), max_size=60),
    keep=st.booleans(),
    lent=st.booleans(),
)
@examples(200)
def test_each_rank_counts_once_in_each_round(steps: list[object], keep: bool, lent: bool) -> None:
    """A step is a push (its number given relative to what its first rank owes), or a new set of
    ranks that are waited for."""
    span = Span(0, 1)
    counted: dict[int, dict[int, float]] = {}
    """Round -> rank -> what the push that brought it was worth."""
    closed: list[float] = []
    required = frozenset(range(RANKS))
    for worth, step in enumerate(steps, start=1):
        if isinstance(step, frozenset):
            required = step
        else:
            ranks, relative = step  # type: ignore[misc]
            number = max(0, span.owed(ranks[0]) + relative)
            verdict = span.judge(tuple(ranks), number, None)
            owed = [max(len(closed), first_not_in(counted, rank)) for rank in ranks]
            assert verdict is expected(owed, number, len(closed))
            if verdict is Verdict.COUNTED:
                value = DenseGradient([torch.tensor([float(worth)])], is_lent=lent)
                span.take(tuple(ranks), number, 0.0).add(tuple(ranks), value, keep=keep)
                counted.setdefault(number, {})[ranks[0]] = float(worth)
                counted[number] |= dict.fromkeys(ranks[1:], 0.0)
        while required and not span.missing(required):
            number = span.version
            assert required <= counted[number].keys()
            assert span.rounds.popleft().sum().whole().item() == sum(counted[number].values())
            closed.append(number)
            span.version += 1
        if span.rounds and required:
            assert set(span.missing(required)) == required - counted[span.version].keys()
        span.check()
    assert closed == list(range(span.version))


def first_not_in(counted: dict[int, dict[int, float]], rank: int) -> int:
    return 1 + max((number for number, ranks in counted.items() if rank in ranks), default=-1)


def expected(owed: list[int], number: int, version: int) -> Verdict:
    if number < min(owed):
        return Verdict.DUPLICATE
    if number > min(owed) and number > max(owed):
        return Verdict.EARLY
    if len(set(owed)) > 1:
        return Verdict.EARLY if number > min(owed) else Verdict.CONFLICT
    return Verdict.EARLY if number - version >= WINDOW else Verdict.COUNTED
