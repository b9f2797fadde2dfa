"""How a cut comes about: who is asked what, in which order, and what makes it fail."""

import pytest

from kvps.core.scheduler.cut import HALT_MAX_S, Cut, CutStage, Rollback
from kvps.protocol.checkpoint import (
    Commit,
    Committed,
    GiveUp,
    Halt,
    Halted,
    ImageKept,
    ImageSum,
    ImageTaken,
    Proceed,
    Proceeding,
    Recall,
    Restore,
    Restored,
    Shelf,
    StoreSum,
)
from kvps.protocol.envelope import Message, Node, Role

W0, W1 = Node(Role.WORKER, 0), Node(Role.WORKER, 1)
S0, S1 = Node(Role.SERVER, 0), Node(Role.SERVER, 1)


def cut_of(workers: int = 2, servers: int = 2) -> Cut:
    return Cut(7, "best", 3, frozenset(range(workers)), frozenset(range(servers)), 10.0)


def kept(size: int, *stores: StoreSum, error: str = "") -> ImageKept:
    return ImageKept(7, size, f"{size:064x}", stores, error)


def hear(cut: Cut, *said: tuple[Node, Message]) -> Cut:
    for node, message in said:
        cut.hear(node, message)
    return cut


def stand(cut: Cut, number: int = 5) -> Cut:
    return hear(cut, (W0, Halted(7, {"kv": number})), (W1, Halted(7, {"kv": number})))


def to_writing(cut: Cut) -> Cut:
    return hear(stand(cut), (S0, ImageTaken(7)), (S1, ImageTaken(7)))


@pytest.mark.spec("R134")
def test_worker_in_the_middle_of_a_step_takes_the_others_along() -> None:
    """It may wait for a push of those who stand before it."""
    cut = hear(cut_of(), (W0, Halted(7, {"kv": 5})), (W1, Halted(7, {"kv": 6}, stands=False)))
    assert list(cut.outgoing()) == [(W0, Halt(7, {"kv": 6})), (W1, Halt(7, {"kv": 6}))]
    hear(cut, (W0, Halted(7, {"kv": 6})), (W1, Halted(7, {"kv": 6}, stands=False)))
    assert cut.stage is CutStage.HALTING
    hear(cut, (W1, Halted(7, {"kv": 6})))
    assert cut.stage is CutStage.IMAGING


@pytest.mark.spec("R136")
def test_cut_is_committed_when_all_is_on_disks_and_all_workers_had_stood() -> None:
    cut = to_writing(cut_of())
    hear(cut, (S0, kept(1, StoreSum("kv", 2, 5, 5), StoreSum("a", 1, 9, 9))))
    hear(cut, (S1, kept(2, StoreSum("kv", 1, 4, 6))), (W0, Proceeding(7, True)))
    assert cut.stage is CutStage.WRITING
    hear(cut, (W1, Proceeding(7, True)))
    images = (ImageSum(1, f"{1:064x}"), ImageSum(2, f"{2:064x}"))
    commit = Commit(7, "best", 3, images, (StoreSum("kv", 3, 4, 6), StoreSum("a", 1, 9, 9)))
    assert list(cut.outgoing()) == [(S0, commit), (S1, commit)]
    hear(cut, (S1, Committed(7)))
    assert list(cut.outgoing()) == [(S0, commit)]
    assert not cut.is_over
    hear(cut, (S0, Committed(7)))
    assert cut.stage is CutStage.COMPLETE
    assert cut.is_over
    assert not list(cut.outgoing())
    cut.give_up("too late")
    assert cut.stage is CutStage.COMPLETE


@pytest.mark.spec("R137")
@pytest.mark.parametrize(
    ("node", "message", "reason", "by_worker"),
    [
        (W1, Proceeding(7, False), "worker 1 could not wait any longer", True),
        (S1, kept(0, error="/workers: disk full"), "server 1: /workers: disk full", False),
        (S0, Committed(7, "disk full"), "server 0: disk full", False),
    ],
)
def test_any_failure_ends_the_cut(node: Node, message: Message, reason: str, by_worker: bool) -> None:
    cut = hear(to_writing(cut_of()), (node, message))
    assert cut.stage is CutStage.GIVEN_UP
    assert (cut.reason, cut.by_worker) == (reason, by_worker)
    outgoing = list(cut.outgoing())
    assert (S0, GiveUp(7)) in outgoing
    assert (W0, Proceed(7)) in outgoing
    hear(cut, (W0, Proceeding(7, True)), (W1, Proceeding(7, True)))
    assert cut.is_over
    cut.give_up("something else", by_worker=not by_worker)
    assert (cut.reason, cut.by_worker) == (reason, by_worker)


def test_members_that_come_or_go_end_it() -> None:
    both = frozenset({0, 1})
    cut = to_writing(cut_of())
    cut.meet(both, both)
    assert cut.stage is CutStage.WRITING
    cut.meet(frozenset({0}), both)
    assert cut.reason == "a worker joined or left"
    cut = to_writing(cut_of())
    cut.meet(both, frozenset({0}))
    assert cut.reason == "a server joined or was lost"


@pytest.mark.spec("R137")
def test_nobody_stands_for_ever() -> None:
    cut = hear(cut_of(), (W0, Halted(7, {"kv": 5})))
    cut.on_time(10.0 + HALT_MAX_S - 1)
    assert cut.stage is CutStage.HALTING
    cut.on_time(10.0 + HALT_MAX_S)
    assert cut.reason == "workers [1] were in the middle of a step for 30 s"
    cut = hear(stand(cut_of()), (S0, ImageTaken(7)))
    cut.on_time(10.0 + HALT_MAX_S)
    assert cut.reason == "servers [1] still had gradients to apply after 30 s"


def test_strangers_are_not_heard() -> None:
    cut = cut_of(1, 1)
    stranger = (Halted(7, {}), Proceeding(7, False), ImageTaken(7), kept(1), Committed(7, "no"))
    hear(cut, *[(Node(Role.WORKER, 5), item) for item in stranger])
    assert cut == cut_of(1, 1)


# --- how all servers return to one cut ------------------------------------------------------------


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
