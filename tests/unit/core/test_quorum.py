"""Whom a round waits for."""

from __future__ import annotations

import pytest

from kvps.core.quorum import Quorum

QUORUM = Quorum(held=frozenset({0, 2}), lost=frozenset({1}))


@pytest.mark.parametrize("policy", ["wait", "fail"])
def test_a_lost_rank_is_waited_for(policy: str) -> None:
    assert QUORUM.required(policy) == {0, 1, 2}


def test_nothing_is_made_where_nobody_is_lost() -> None:
    """It is asked for each push, and has a member for each worker."""
    held = frozenset(range(1_000))
    assert Quorum(held, frozenset()).required("wait") is held


def test_shrink_goes_on_without_it() -> None:
    assert QUORUM.required("shrink") == {0, 2}


@pytest.mark.spec("R120")
def test_nobody_waits_for_those_who_are_away() -> None:
    quorum = QUORUM.without(frozenset({1, 2}))
    assert quorum.required("wait") == {0}
    assert quorum.members("wait") == {0, 1, 2}
    assert quorum.live == {0}
    assert QUORUM.without(frozenset()) is QUORUM
