"""The protocol of stateless failover, in every state of the smallest jobs (:mod:`tests.simulation.failover`)."""

from __future__ import annotations

import pytest

from tests.simulation.failover import Broken, Rules, explore


@pytest.mark.parametrize(
    "rules",
    [
        Rules(),
        Rules(workers=3, rounds=1),
        Rules(rounds=1, replacements=1),
        pytest.param(Rules(losses=2), marks=pytest.mark.thorough),
        pytest.param(Rules(replacements=1), marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_every_push_counts_once_and_all_ranks_have_the_same_sums(rules: Rules) -> None:
    """Packets come never, late, twice and in any order; whatever has happened, the job can still end well."""
    found = explore(rules)
    assert found.states > 500
    assert not found.stuck, found.stuck[0]


@pytest.mark.parametrize(
    ("rules", "what"),
    [
        (Rules(keeps_sums=False), "is early"),
        (Rules(waits_for_all=False), "is early"),
        (Rules(ignores_old_answers=False), "is early"),
        (Rules(replacements=1, gives_sum_to_new=False), "is early"),
    ],
    ids=["sums are not kept", "one rank is not heard", "an old answer is taken", "a replacement has no sum"],
)
def test_no_rule_may_be_left_out(rules: Rules, what: str) -> None:
    with pytest.raises(Broken, match=what):
        explore(rules)


def test_a_server_waits_for_ever_for_a_worker_that_does_not_tell() -> None:
    assert explore(Rules(rounds=1, replacements=1, new_ones_tell=False)).stuck
