"""Barriers: who waits, who passes, and who is told that it is in vain."""

import pytest

from kvps.core.scheduler import barriers as module
from kvps.core.scheduler.barriers import NAME_MAX, OPEN_MAX, Barriers, Passed, RoutedMessage, Waiter
from kvps.errors import ConfigError, Overload, WorkerLost
from kvps.protocol.membership import Barrier, Error, Released


def stand(
    barriers: Barriers, rank: int, number: int = 0, seq: int = 1, name: str = "b"
) -> list[RoutedMessage]:
    answers = barriers.stand(rank, Waiter(f"w{rank}", seq), Barrier("kv", name, number))
    barriers.check({0, 1, 2})
    return answers


def require(barriers: Barriers, *required: int, **gone: str) -> list[RoutedMessage]:
    answers = barriers.require(required, {int(rank[1:]): why for rank, why in gone.items()})
    barriers.check({0, 1, 2})
    return answers


@pytest.mark.spec("R33")
def test_a_rank_counts_once_and_its_last_request_is_answered() -> None:
    barriers = Barriers(range(2))
    for seq in (1, 2, 3):
        assert stand(barriers, 0, seq=seq) == []
    assert stand(barriers, 1, seq=9) == [RoutedMessage("w0", Released(3)), RoutedMessage("w1", Released(9))]


def test_releases_when_a_rank_is_required_no_more() -> None:
    barriers = Barriers(range(3))
    stand(barriers, 0, 0)
    stand(barriers, 1, 0)
    stand(barriers, 0, 1, seq=2)
    stand(barriers, 1, 1, seq=2)
    assert require(barriers, 0, 1, 2) == []
    assert require(barriers, 0, 1) == [
        RoutedMessage("w0", Released(1)),
        RoutedMessage("w1", Released(1)),
        RoutedMessage("w0", Released(2)),
        RoutedMessage("w1", Released(2)),
    ]


@pytest.mark.spec("R35")
def test_waiter_for_a_lost_worker_gets_worker_lost() -> None:
    barriers = Barriers(range(3))
    stand(barriers, 0, seq=8)
    (answer,) = require(barriers, 0, 1, w2="exit code 1")
    assert answer.route == "w0"
    assert isinstance(answer.message, Error)
    assert (answer.message.seq, answer.message.code) == (8, WorkerLost.code)
    assert "worker 2 (exit code 1)" in answer.message.text
    with pytest.raises(WorkerLost, match="number 3"):
        stand(barriers, 1, number=3)
    assert not barriers.open


def test_limits() -> None:
    barriers = Barriers(range(2), names_max=8)
    for number in range(OPEN_MAX):
        stand(barriers, 0, number)
    with pytest.raises(Overload, match="64 open waits"):
        stand(barriers, 0, OPEN_MAX)
    with pytest.raises(ConfigError, match="at most 256 characters"):
        stand(barriers, 0, name="x" * (NAME_MAX + 1))
    for index in range(7):
        barriers.released["kv", str(index)] = 0
        barriers.after["kv", str(index)] = {0: 0}
    with pytest.raises(Overload, match=r"8 names .* kvps-scheduler --limit barrier_names=NUMBER"):
        stand(barriers, 0, name="one more")
    assert stand(barriers, 0, 1, name="5") == []


class TestWithoutWaiting:
    """Stores whose rounds do not wait for the lost: their barriers do not either."""

    def stand(self, barriers: Barriers, rank: int, number: int = 0) -> list[RoutedMessage]:
        at = Barrier("kv", "b", number, waits=False)
        answers = barriers.stand(rank, Waiter(f"w{rank}", 1), at)
        barriers.check({0, 1, 2})
        return answers

    def lose(self, barriers: Barriers, *lost: int, **gone: str) -> list[RoutedMessage]:
        named = {int(rank[1:]): why for rank, why in gone.items()}
        answers = barriers.require(set(range(3)) - named.keys(), named, lost)
        barriers.check({0, 1, 2})
        return answers

    @pytest.mark.spec("R33", "R35")
    def test_nor_are_those_who_are_gone(self) -> None:
        barriers = Barriers(range(3))
        self.lose(barriers, r2="exit code 1")
        assert self.stand(barriers, 0) == []
        assert [send.route for send in self.stand(barriers, 1)] == ["w0", "w1"]


class TestResuming:
    """Who takes another's place does not know the numbers."""

    def stand(
        self, barriers: Barriers, rank: int, number: int, after: int, resumed: bool = False
    ) -> list[RoutedMessage]:
        waiter = Waiter(f"w{rank}", 10 * rank + number, resumed)
        answers = barriers.stand(rank, waiter, Barrier("kv", "b", number, True, after, resumed))
        barriers.check({0, 1, 2})
        return answers

    @pytest.mark.spec("R124")
    def test_nobody_waits_for_it_where_it_has_been(self) -> None:
        barriers = Barriers(range(2))
        self.stand(barriers, 0, 5, after=3)
        assert barriers.resume(1, "other", 9) == []
        assert barriers.resume(1, "kv", 2) == []
        assert barriers.resume(1, "kv", 3) == [RoutedMessage("w0", Released(5))]
        assert self.stand(barriers, 0, 6, after=3) == [RoutedMessage("w0", Released(6))]
        assert self.stand(barriers, 1, 0, after=3, resumed=True) == [RoutedMessage("w1", Released(10))]
        assert self.stand(barriers, 0, 7, after=4) == []

    @pytest.mark.spec("R124")
    def test_barrier_of_a_resumed_worker_floats_until_another_arrives(self) -> None:
        barriers = Barriers(range(3))
        barriers.resume(1, "kv", 3)
        at = Barrier("kv", "b", 0, True, 4, resumed=True)
        assert self.stand(barriers, 1, 0, after=4, resumed=True) == []
        assert barriers.missing(1, at) == (0, 2)
        assert self.stand(barriers, 0, 6, after=3) == []
        assert self.stand(barriers, 2, 6, after=3) != []
        assert self.stand(barriers, 0, 7, after=4) == []
        assert barriers.missing(1, at) == (2,)
        assert barriers.missing(2, Barrier("kv", "b", 7)) == ()
        assert RoutedMessage("w1", Released(10, 7)) in self.stand(barriers, 2, 7, after=4)
        assert not barriers.floating

    @pytest.mark.spec("R124")
    def test_where_all_float_it_is_the_next(self) -> None:
        barriers = Barriers(range(3))
        barriers.restore({("kv", "b"): Passed(4, 0)}, {})
        for rank in (0, 1):
            barriers.resume(rank, "kv", 3)
        assert self.stand(barriers, 1, 0, after=5, resumed=True) == []
        assert self.stand(barriers, 0, 0, after=4, resumed=True) == []
        assert barriers.require([0, 1], {}) == [], "they stand at two"
        assert self.stand(barriers, 1, 0, after=4, resumed=True) == [
            RoutedMessage("w1", Released(10, 5)),
            RoutedMessage("w0", Released(0, 5)),
        ]

    def test_another_is_asked_for_where_it_floats(self) -> None:
        barriers = Barriers(range(2))
        barriers.resume(1, "kv", 3)
        self.stand(barriers, 1, 0, after=4, resumed=True)
        barriers.withdraw(1)
        assert barriers.require([0, 1], {}) == []
        assert self.stand(barriers, 0, 7, after=4) == []

    @pytest.mark.spec("R124")
    def test_without_rounds_it_goes_on_behind_the_last(self) -> None:
        barriers = Barriers(range(2))
        passed = {("kv", "b"): Passed(3, 0), ("kv", "c"): Passed(1, 0), ("other", "d"): Passed(1, 0)}
        barriers.restore(passed, {})
        self.stand(barriers, 1, 4, after=0)
        stand(barriers, 0, 0, name="e")
        assert barriers.next_numbers(1, "kv") == {"b": 5, "c": 2}


@pytest.mark.spec("R419")
def test_the_barriers_of_closed_stores_make_room() -> None:
    barriers = Barriers(range(2), names_max=2)

    def pass_one(store: str, waits: bool = True) -> None:
        for rank in (0, 1):
            barriers.stand(rank, Waiter(f"w{rank}", 1), Barrier(store, "b", 0, waits))
        barriers.check({0, 1})

    barriers.resume(0, "first", 3)
    pass_one("first", waits=False)
    pass_one("second")
    barriers.close(0, ["first", "second"])
    with pytest.raises(Overload):
        pass_one("third")
    barriers.close(1, ["first"])
    pass_one("third")
    assert set(barriers.released) == {("second", "b"), ("third", "b")}
    assert not barriers.resumed
    assert set(barriers.closed) == {"second"}
    barriers.close(1, ["second"])
    barriers.clear(range(2))
    assert not barriers.closed


def test_not_all_closed_stores_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CLOSED_MAX", 2)
    barriers = Barriers(range(2))
    barriers.close(0, ["a", "b", "c"])
    assert set(barriers.closed) == {"b", "c"}
