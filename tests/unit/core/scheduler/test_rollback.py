"""How all servers return to one cut."""

import pytest

from kvps.core.scheduler.cut import Rollback
from kvps.protocol.checkpoint import Recall, Restore, Restored, Shelf
from kvps.protocol.envelope import Node, Role

S0, S1 = Node(Role.SERVER, 0), Node(Role.SERVER, 1)


def shelf(*cuts: int, epoch: int = 4) -> Shelf:
    return Shelf(epoch, True, 60.0, cuts, max(cuts, default=0))


@pytest.mark.spec("R140")
def test_the_newest_cut_that_all_have_is_chosen() -> None:
    recovery = Rollback(4, 2)
    assert list(recovery.outgoing()) == [(S0, Recall(4)), (S1, Recall(4))]
    recovery.hear(0, shelf(3, 5, 8))
    assert list(recovery.outgoing()) == [(S1, Recall(4))]
    recovery.hear(1, shelf(3, 5))
    assert list(recovery.outgoing()) == [(S0, Restore(4, 5)), (S1, Restore(4, 5))]
    recovery.hear(1, Restored(4, 5))
    assert list(recovery.outgoing()) == [(S0, Restore(4, 5))]
    assert not recovery.is_over
    recovery.hear(0, Restored(4, 5))
    assert recovery.is_over
    assert not recovery.failure


@pytest.mark.spec("R140")
def test_a_cut_that_a_server_cannot_read_is_passed_over_by_all() -> None:
    recovery = Rollback(4, 2)
    recovery.hear(0, shelf(7, 8))
    recovery.hear(1, shelf(7, 8))
    recovery.hear(0, Restored(4, 8))
    recovery.hear(1, Restored(4, 8, "a bit is flipped"))
    recovery.hear(1, Restored(4, 8, "a bit is flipped"))
    assert not recovery.failure
    assert list(recovery.outgoing()) == [(S0, Restore(4, 7)), (S1, Restore(4, 7))]
    recovery.hear(0, Restored(4, 8))  # said before it heard of the other
    recovery.hear(1, Restored(4, 7))
    assert not recovery.is_over
    recovery.hear(0, Restored(4, 7, "this one, too"))
    assert recovery.failure == "server 0: this one, too"
