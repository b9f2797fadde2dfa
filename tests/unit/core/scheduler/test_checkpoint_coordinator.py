"""When the scheduler has a cut taken, whom it answers, and when the servers return to one."""

from typing import TypeVar

import pytest

from kvps.core.effects import Note
from kvps.core.scheduler import checkpoint_coordinator as module
from kvps.core.scheduler.barriers import RoutedMessage, Waiter
from kvps.core.scheduler.checkpoint_coordinator import CheckpointCoordinator, CheckpointEffect
from kvps.core.scheduler.cut import AGAIN_S, NodeMessage
from kvps.errors import BY_CODE, ConfigError, Overload, StorageError
from kvps.protocol.checkpoint import (
    Checkpoint,
    Checkpointed,
    Committed,
    GiveUp,
    Halt,
    Halted,
    ImageKept,
    ImageTaken,
    Proceed,
    Proceeding,
    Recall,
    Restore,
    Restored,
    Shelf,
)
from kvps.protocol.envelope import Message, Node, Role
from kvps.protocol.membership import Error

SERVERS = WORKERS = 2
W0, W1 = Node(Role.WORKER, 0), Node(Role.WORKER, 1)
S0, S1 = Node(Role.SERVER, 0), Node(Role.SERVER, 1)
EVERY_S = 60.0
E = TypeVar("E")


class Desk:
    """Checkpoints, a clock, and what was said since the last look."""

    def __init__(self, every_s: float = EVERY_S, shelves: bool = True, has_pushed: bool = True) -> None:
        self.core = CheckpointCoordinator(WORKERS, SERVERS)
        self.effects: list[CheckpointEffect] = []
        self.now = 100.0
        if has_pushed:
            self.core.pushed(self.now)
        self.meet()
        if shelves:
            self.shelve(every_s=every_s)
        self.outgoing()

    def meet(self, workers: int = WORKERS, servers: int = SERVERS, is_running: bool = True) -> None:
        self.core.meet(range(workers), range(servers), is_running, self.now)

    def shelve(self, *cuts: int, every_s: float = EVERY_S, keeps: bool = True) -> None:
        """All servers say which cuts they have."""
        for node in (S0, S1):
            shelf = Shelf(self.core.epoch, keeps, every_s, cuts, max(cuts, default=0))
            self.core.hear(node, shelf, self.now)

    def hear(self, *said: tuple[Node, Message]) -> list[NodeMessage]:
        for node, message in said:
            self.core.hear(node, message, self.now)
        return self.outgoing()

    def wait(self, seconds: float) -> list[NodeMessage]:
        self.now += seconds
        self.core.on_time(self.now)
        return self.outgoing()

    def taken(self, kind: type[E]) -> list[E]:
        """Take the effects of one kind; the others stay."""
        self.effects += self.core.take_effects()
        found = [effect for effect in self.effects if isinstance(effect, kind)]
        self.effects = [effect for effect in self.effects if not isinstance(effect, kind)]
        return found

    def outgoing(self) -> list[NodeMessage]:
        return self.taken(NodeMessage)

    def answers(self) -> list[RoutedMessage]:
        return self.taken(RoutedMessage)

    def notes(self) -> list[str]:
        return [note.text for note in self.taken(Note)]

    def ask(self, rank: int, number: int = 1, tag: str = "", store: str = "kv", seq: int = 9) -> None:
        waiter = Waiter(b"w%d" % rank, seq)
        self.core.ask(rank, waiter, Checkpoint(store, tag, number), self.now)

    def take(self, cut: int = 1, until: str = "committed") -> list[NodeMessage]:
        """Let a cut that has begun come so far; return what was said last."""
        said = self.hear(*[(node, Halted(cut, {"kv": 5})) for node in (W0, W1)])
        if until == "halted":
            return said
        said = self.hear(*[(node, ImageTaken(cut)) for node in (S0, S1)])
        said = self.hear(*[(node, Proceeding(cut, True)) for node in (W0, W1)])
        said = self.hear(*[(node, ImageKept(cut, 9, "ab", (), "")) for node in (S0, S1)])
        if until == "kept":
            return said
        return self.hear(*[(node, Committed(cut)) for node in (S0, S1)])


def errors(answers: list[RoutedMessage]) -> list[tuple[object, str]]:
    return [
        (route, f"{BY_CODE[message.code].__name__}: {message.text}")
        for route, message in answers
        if isinstance(message, Error)
    ]


# --- by the clock -----------------------------------------------------------------------------------


class TestByTheClock:
    @pytest.mark.spec("R139")
    def test_a_cut_begins_when_it_is_time_with_a_number_that_nobody_has(self) -> None:
        desk = Desk(shelves=False)
        desk.shelve(3, 8)
        assert desk.wait(EVERY_S - 1) == []
        assert desk.wait(1.0) == [(W0, Halt(9, {})), (W1, Halt(9, {}))]
        assert desk.core.has_changed
        desk.take(9)
        assert desk.wait(EVERY_S) == [(W0, Halt(10, {})), (W1, Halt(10, {}))]

    @pytest.mark.spec("R413")
    def test_none_is_begun_before_a_worker_has_pushed(self) -> None:
        desk = Desk(has_pushed=False)
        assert desk.core.due is None
        assert desk.wait(3 * EVERY_S) == []
        desk.core.pushed(desk.now)
        assert desk.core.due == desk.now + EVERY_S, "the interval begins with the first push"
        assert desk.wait(EVERY_S) == [(W0, Halt(1, {})), (W1, Halt(1, {}))]
        desk.core.pushed(desk.now)
        assert desk.outgoing() == []


# --- the last -------------------------------------------------------------------------------------


class TestTheLast:
    @pytest.mark.spec("R413")
    def test_a_job_that_has_not_pushed_has_none(self) -> None:
        desk = Desk(has_pushed=False)
        desk.core.conclude(desk.now)
        assert desk.core.due == desk.now + module.FIRST_PUSH_MAX_S
        assert desk.wait(module.FIRST_PUSH_MAX_S - 0.1) == []
        assert desk.core.concluded is None
        assert desk.wait(0.1) == []
        assert desk.core.concluded == 0
        assert "no worker has pushed yet" in desk.notes()[0]
        desk.core.pushed(desk.now)
        assert desk.wait(EVERY_S) == []
        assert desk.notes() == []


# --- by request ----------------------------------------------------------------------------------------


class TestByWish:
    @pytest.mark.spec("R146")
    def test_repeated_or_late_request_is_answered_at_once(self) -> None:
        desk = Desk(every_s=0.0)
        desk.ask(0)
        desk.take()
        desk.answers()
        desk.ask(0)
        desk.ask(1, seq=4)
        assert desk.answers() == [(b"w0", Checkpointed(9, 1)), (b"w1", Checkpointed(4, 1))]
        desk.ask(0, number=2)
        assert desk.answers() == []
        assert desk.outgoing()[-1] == (W1, Halt(2, {}))

    @pytest.mark.spec("R244")
    def test_so_many_in_a_minute_and_the_next_waits(self) -> None:
        desk = Desk(every_s=0.0)
        for number in range(1, 7):
            desk.ask(0, number=number)
            desk.take(number)
            desk.wait(1.0)
        desk.answers()
        desk.notes()
        for seq in (9, 10):  # it asks again
            desk.ask(0, number=7, seq=seq)
        assert (desk.outgoing(), desk.answers()) == ([], [])
        (told,) = desk.notes()
        assert told.startswith("a checkpoint of store 'kv' begins in 54 s: workers have asked for 6")
        assert "kvps-scheduler --limit checkpoints=NUMBER" in told
        assert desk.core._counts.values() == {("kvps_overloads_total", "checkpoints"): 1}
        assert desk.core.due == desk.now + 54.0
        assert desk.wait(53.0) == []
        assert desk.wait(1.0) == [(W0, Halt(7, {})), (W1, Halt(7, {}))]
        desk.take(7)
        assert desk.answers() == [(b"w0", Checkpointed(10, 7))]

    @pytest.mark.spec("R244")
    def test_stores_that_wait_and_answers_that_are_kept_are_bounded(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "STORES_MAX", 3)
        desk = Desk(every_s=0.0)
        for store in ("a", "b", "c"):
            desk.ask(0, store=store)
        with pytest.raises(Overload, match="checkpoints of 3 stores wait already"):
            desk.ask(0, store="d")
        desk.ask(1, store="c")
        desk.take()  # for a alone: it has begun before the others asked
        desk.take(2)
        for number, store in enumerate(("d", "e"), 3):
            desk.ask(0, store=store)
            desk.take(number)
        assert list(desk.core._granted) == ["c", "d", "e"]

    @pytest.mark.spec("R244")
    def test_the_interval_of_the_servers_is_not_bounded(self) -> None:
        desk = Desk(every_s=1.0)
        for number in range(1, 20):
            assert desk.wait(1.0) == [(W0, Halt(number, {})), (W1, Halt(number, {}))]
            desk.take(number)
        assert desk.core._counts.values() == {}

    def test_cut_that_wrote_nothing_does_not_count(self) -> None:
        desk = Desk(every_s=0.0)
        for number in range(1, 9):
            desk.ask(0, number=number)
            desk.meet(workers=1)
            desk.hear(*[(node, Proceeding(number, True)) for node in (W0, W1)])
            desk.meet()
        assert desk.core._counts.values() == {}

    @pytest.mark.spec("R146")
    def test_a_full_disk_ends_it(self) -> None:
        desk = Desk(every_s=0.0)
        desk.ask(0)
        desk.take(until="halted")
        desk.hear((S0, ImageKept(1, 0, "", (), "/home/worker: no space left")))
        assert errors(desk.answers()) == [
            (b"w0", "StorageError: checkpoint 1 was abandoned: server 0: /home/worker: no space left")
        ]
        with pytest.raises(StorageError, match="was abandoned: server 0"):
            desk.ask(1)  # who comes late hears the same
        desk.hear(*[(node, Proceeding(1, True)) for node in (W0, W1)])
        assert desk.wait(1e3) == []

    def test_lost_worker_is_not_answered(self) -> None:
        desk = Desk(every_s=0.0)
        desk.ask(0)
        desk.ask(1)
        desk.meet(workers=1)
        desk.hear((W0, Proceeding(1, True)))
        desk.hear((W0, Halted(2, {})))
        desk.hear(*[(node, ImageKept(2, 9, "ab", (), "")) for node in (S0, S1)])
        desk.hear((W0, Proceeding(2, True)), (S0, Committed(2)), (S1, Committed(2)))
        assert desk.answers() == [(b"w0", Checkpointed(9, 2))]

    @pytest.mark.spec("R146")
    def test_without_a_place_it_is_refused(self) -> None:
        desk = Desk(shelves=False)
        desk.shelve(keeps=False)
        with pytest.raises(ConfigError, match="start every kvps-server with --checkpoint-dir"):
            desk.ask(0)
        assert desk.core.due is None


# --- returning --------------------------------------------------------------------------------------


def desk_with_a_cut() -> Desk:
    desk = Desk()
    desk.wait(EVERY_S)
    desk.take()
    desk.notes()
    return desk


class TestReturn:
    @pytest.mark.spec("R140")
    def test_unreadable_cut_is_passed_over(self) -> None:
        desk = desk_with_a_cut()
        desk.core.replaced(1, desk.now)
        desk.shelve(1, 2)
        desk.hear((S0, Restored(1, 2)), (S1, Restored(1, 2, "a bit is flipped")))
        assert desk.wait(AGAIN_S) == [(S0, Restore(1, 1)), (S1, Restore(1, 1))]
        desk.hear((S0, Restored(1, 1)), (S1, Restored(1, 1)))
        assert desk.core.kept == 1
        assert "server 1 cannot roll back: a bit is flipped" in desk.notes()

    @pytest.mark.spec("R140")
    def test_where_all_fails_no_more_cuts_are_taken(self) -> None:
        """They would take the place of those that somebody may still mend."""
        desk = desk_with_a_cut()
        desk.core.replaced(1, desk.now)
        desk.ask(0)
        desk.hear((S0, Shelf(1, True, EVERY_S, (1,), 1)), (S1, Shelf(1, True, EVERY_S, (), 0)))
        assert (desk.core.kept, desk.core.recovery) == (0, None)
        assert errors(desk.answers()) == [(b"w0", f"StorageError: {desk.core.failure}")]
        assert "no cut is complete on every server" in desk.core.failure
        assert desk.wait(10 * EVERY_S) == []
        with pytest.raises(StorageError, match="could not roll back to a checkpoint"):
            desk.ask(0, number=2)
        assert not desk.core.replaced(0, desk.now)

    @pytest.mark.spec("R142")
    def test_request_for_a_cut_ends_unanswered_at_a_rollback(self) -> None:
        desk = desk_with_a_cut()
        desk.ask(0)
        desk.core.replaced(1, desk.now)
        assert desk.answers() == []
        desk.shelve(1)
        desk.hear((S0, Restored(1, 1)), (S1, Restored(1, 1)))
        desk.ask(0)
        assert desk.answers() == [], "numbers are counted anew"

    @pytest.mark.spec("R137")
    def test_a_cut_under_way_is_given_up(self) -> None:
        desk = desk_with_a_cut()
        desk.wait(EVERY_S)
        desk.core.replaced(1, desk.now)
        desk.shelve(1)
        desk.hear((S0, Restored(1, 1)), (S1, Restored(1, 1)))
        assert desk.wait(AGAIN_S) == [(W0, Proceed(2)), (W1, Proceed(2)), (S0, GiveUp(2)), (S1, GiveUp(2))]


class TestRestart:
    @pytest.mark.spec("R137")
    def test_a_cut_under_way_is_given_up(self) -> None:
        desk = Desk(shelves=False)
        desk.core.resume(5, 4, 2, is_returning=False)
        assert [type(message) for _, message in desk.wait(0.0)] == [Proceed, Proceed, GiveUp, GiveUp]
        desk.hear(*[(node, Proceeding(5, True)) for node in (W0, W1)])
        assert desk.notes() == ["checkpoint 5 was abandoned: the scheduler was restarted"]
        assert desk.wait(AGAIN_S) == [(S0, Recall(2)), (S1, Recall(2))]

    @pytest.mark.spec("R140")
    def test_a_return_that_failed_has(self) -> None:
        desk = Desk(shelves=False)
        desk.core.resume(4, 0, 1, is_returning=False)
        assert "could not roll back" in desk.core.failure
