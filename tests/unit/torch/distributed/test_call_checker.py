"""Calls of ranks compared through torch's store: all ranks in one process, each with its own checker."""

import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
from torch.distributed import HashStore, PrefixStore, Store

from kvps.errors import Mismatch
from kvps.runtime.ticket import Ticket
from kvps.torch.distributed import call_checker
from kvps.torch.distributed.call_checker import (
    GOODBYES_MAX_S,
    CallChecker,
    CheckedCalls,
    await_goodbyes,
    own_connection,
)
from kvps.torch.distributed.ordered_executor import OrderedExecutor, Steps
from kvps.torch.distributed.work import Work

LIMIT = timedelta(seconds=30)


class Rank:
    """One rank of a group of all."""

    def __init__(self, store: Store | None, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.executor = OrderedExecutor()
        self.checker = CallChecker(store, self.executor, rank=rank)
        self.calls: CheckedCalls = self.checker.calls("g", range(size), rank)
        self.tickets: list[Ticket] = []

    def begin(self, text: str) -> Work:
        """Begin a call that ends when the test says so."""
        ticket = Ticket()

        def steps() -> Steps:
            yield [ticket]

        work = Work(text, [])
        self.tickets.append(ticket)
        self.calls.add(text)
        self.executor.begin("g/track", steps(), work, "g")
        return work

    def finish(self) -> None:
        for ticket in self.tickets:
            ticket.end(None, None)

    def close(self) -> None:
        self.finish()
        self.checker.close()
        self.executor.close()


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Rank]]:
    monkeypatch.setattr(call_checker, "EVERY_S", 0.01)
    store = HashStore()
    made = [Rank(store, rank, 3) for rank in range(3)]
    yield made
    for item in made:
        item.close()


def refusals(works: list[Work]) -> set[str]:
    texts = set()
    for work in works:
        with pytest.raises(Mismatch) as caught:
            work.wait(LIMIT)
        texts.add(str(caught.value))
    return texts


@pytest.mark.parametrize("odd", range(3))
def test_every_rank_is_told_which_rank_made_another_call(ranks: list[Rank], odd: int) -> None:
    for rank in ranks:
        work = rank.begin("barrier")
        rank.finish()
        work.wait(LIMIT)
    (text,) = refusals([rank.begin("a" if rank.rank == odd else "b") for rank in ranks])
    assert text.startswith("The ranks of group 'g' made different calls. Number 2 is ")
    assert f"a on rank {odd}" in text
    late = ranks[0].begin("anything")
    assert "made different calls" in str(late.exception()), "the group has ended"


def test_a_call_that_one_rank_was_refused_is_told_to_the_ranks_that_wait(ranks: list[Rank]) -> None:
    ranks[1].calls.add_refused(ValueError("7 is no rank"))
    ranks[1].close()
    (text,) = refusals([item.begin("a") for item in (ranks[0], ranks[2])])
    assert "a call that was refused (7 is no rank) on rank 1" in text


def test_ranks_that_make_the_same_calls_hear_nothing(ranks: list[Rank]) -> None:
    works = [rank.begin(text) for text in "abc" for rank in ranks]
    for rank in ranks:
        rank.close()
    assert all(work.is_success() for work in works)
    assert ranks[0].checker.missing(ranks[0].calls) == []


def test_ranks_that_are_behind_are_missing(ranks: list[Rank]) -> None:
    ranks[0].begin("a")
    ranks[2].begin("a")
    ranks[2].close()
    assert ranks[0].checker.missing(ranks[0].calls) == [1]


def test_messages_are_compared_by_their_receiver(ranks: list[Rank]) -> None:
    for rank, text in ((1, "4 values"), (2, "5 values")):
        calls = ranks[rank].checker.letters("g/letters/1>2/7", "g", (1, 2), rank)
        calls.add(text)
    (text,) = refusals([item.begin("barrier") for item in ranks])
    assert text.startswith("Rank 1 sends to rank 2 what is not received there (g/letters/1>2/7)")


def test_single_rank_compares_nothing() -> None:
    rank = Rank(None, 0, 1)
    work = rank.begin("a")
    rank.calls.add_refused(ValueError())
    rank.close()
    assert work.is_success()


def test_torchs_store_may_end_first() -> None:
    class Ended(Store):
        """The store of a rank that has ended."""

        def check(self, keys: list[str]) -> bool:
            raise RuntimeError("connection reset")

        def set(self, key: str, value: str) -> None:
            raise RuntimeError("connection reset")

    rank = Rank(Ended(), 1, 2)  # type: ignore[no-untyped-call]
    work = rank.begin("a")
    rank.calls.add_refused(ValueError())
    assert rank.checker.missing(rank.calls) == []
    rank.close()
    assert work.is_success()


def test_rank_0_serves_the_store_until_the_others_in_the_job_have_said_goodbye() -> None:
    store, held = HashStore(), [1, 2]
    ranks = [Rank(store, rank, 3) for rank in range(3)]
    ranks[0].close()
    served_on = threading.Thread(target=await_goodbyes, args=(store, lambda: held))
    served_on.start()
    ranks[1].begin("a")
    ranks[1].close()
    assert served_on.is_alive(), "rank 2 may still ask"
    held.remove(2)  # it was killed
    served_on.join(GOODBYES_MAX_S)
    assert not served_on.is_alive()
    ranks[1].calls.add_refused(ValueError("late"))
    assert ranks[1].checker.missing(ranks[1].calls) == [], "no question after the goodbye"
    ranks[2].close()


def test_rank_0_serves_the_store_for_a_limited_time() -> None:
    store = HashStore()
    began = time.monotonic()
    await_goodbyes(store, lambda: [1], limit_s=0.05)
    assert 0.05 <= time.monotonic() - began < GOODBYES_MAX_S


def test_a_store_that_cannot_be_shared_compares_nothing() -> None:
    class Own(Store):
        """A store that cannot be cloned."""

        def clone(self) -> Store:
            raise NotImplementedError

    assert own_connection(Own(), "p") is None  # type: ignore[no-untyped-call]
    shared = own_connection(HashStore(), "p")
    assert isinstance(shared, PrefixStore)
