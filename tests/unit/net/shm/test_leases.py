"""Leases: whoever still reads is never written over, and in the end all is given back."""

import math
import random
import threading
import time
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvps.net.shm import leases
from kvps.net.shm.leases import Borrowed, Lease, Lent, Postings, PostingsOfPeer
from kvps.protocol.envelope import Envelope, Packet, Role
from kvps.protocol.transports import Release
from kvps.protocol.wire import decode, encode


class Memory:
    """What is lent: held until the lease ends."""

    def __init__(self) -> None:
        self.is_held = True

    def release(self) -> None:
        assert self.is_held, "released twice"
        self.is_held = False


def give(given: Lent, count: int = 1) -> list[Memory]:
    """Lend so many things; they have the next numbers."""
    made = [Memory() for _ in range(count)]
    for item in made:
        given.give(object(), item)
    return made


def take(taken: Borrowed, *numbers: int) -> list[Lease]:
    found = [taken.take(number) for number in numbers]
    return [item for item in found if item is not None]


# --- given --------------------------------------------------------------------------------------


def test_numbers_count_from_1() -> None:
    given = Lent()
    assert [given.give(None, None) for _ in range(3)] == [1, 2, 3]
    assert len(given) == 3


@pytest.mark.spec("R86")
def test_a_release_ends_what_it_does_not_name() -> None:
    given = Lent()
    first, two, three, four = give(given, 4)
    given.release(Release(4, (2,)))
    assert [first.is_held, two.is_held, three.is_held, four.is_held] == [False, True, False, True]
    given.release(Release(4, ()))
    assert not two.is_held
    assert len(given) == 1


@pytest.mark.spec("R86")
def test_a_release_that_comes_again_or_late_changes_nothing() -> None:
    given = Lent()
    made = give(given, 4)
    given.release(Release(5, (3, 4)))
    for again in (Release(5, (3, 4)), Release(3, (1,)), Release(0, ()), Release(1, ())):
        given.release(again)
        assert [item.is_held for item in made] == [False, False, True, True]


def test_a_release_of_what_was_never_given() -> None:
    given = Lent()
    given.release(Release(2**63 - 1, (7,)))
    (later,) = give(given)
    assert later.is_held
    given.release(Release(2**63 - 1, (7,)))
    assert not later.is_held


def test_lent_payload_lives_as_long_as_the_lease() -> None:
    ended: list[int] = []

    class Payload:
        def __del__(self) -> None:
            ended.append(1)

    given = Lent()
    given.give(Payload(), None)
    assert not ended
    given.release(Release(2, ()))
    assert ended


def test_the_end_of_a_reader_ends_its_leases() -> None:
    given = Lent()
    made = give(given, 3)
    given.release(Release(2, ()))
    given.release_below(math.inf)
    given.release_below(math.inf)
    assert not any(item.is_held for item in made)
    assert len(given) == 0


# --- taken --------------------------------------------------------------------------------------


def test_nothing_to_say_while_nothing_was_given_back() -> None:
    taken = Borrowed()
    held = take(taken, 1, 2)
    assert taken.release() is None
    del held[0]
    assert taken.returned == 1
    assert taken.release() == Release(3, (2,))
    assert taken.returned == 0
    assert taken.release() is None


@pytest.mark.spec("R86")
def test_loans_that_never_arrived_are_given_back_too() -> None:
    taken = Borrowed()
    take(taken, 5)
    assert taken.release() == Release(6, ())


@pytest.mark.spec("R87")
def test_loan_that_arrives_after_its_release_is_refused() -> None:
    taken = Borrowed()
    held = take(taken, 1, 4)
    del held[0]
    assert taken.release() == Release(5, (4,))
    for late in (1, 2, 3, 4):
        assert taken.take(late) is None
    assert taken.take(5) is not None


@pytest.mark.spec("R87")
def test_a_lease_is_taken_once() -> None:
    taken = Borrowed()
    held = take(taken, 1)
    assert taken.take(1) is None
    held.clear()
    assert taken.take(1) is None, "it was given back, though nobody was told yet"


def test_loans_may_arrive_in_any_order() -> None:
    taken = Borrowed()
    held = take(taken, 3, 1)
    assert len(held) == 2
    held.clear()
    held = take(taken, 2)
    assert taken.release() == Release(4, (2,))


def test_release_names_a_bounded_number_of_loans(monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes beyond that is told when there is room for it."""
    monkeypatch.setattr(leases, "NAMED_MAX", 2)
    taken = Borrowed()
    held = {number: taken.take(number) for number in range(1, 7)}
    del held[6], held[1]
    assert taken.release() == Release(4, (2, 3))
    assert taken.take(5) is None
    del held[2], held[3], held[4]
    assert taken.release() == Release(7, (5,))


@pytest.mark.spec("R86")
def test_the_longest_release_travels() -> None:
    taken = Borrowed()
    held = take(taken, *range(1, 6000))
    del held[0]
    message = taken.release()
    assert message is not None
    assert len(message.but) == leases.NAMED_MAX
    packet = Packet(Envelope(bytes(16), 1, Role.WORKER, 0, 1, 0), message)
    assert decode(encode(packet)) == packet


# --- postings --------------------------------------------------------------------------------------

NONCE = 2**63 - 5


def page() -> memoryview:
    return memoryview(bytearray(4096))


def test_the_end_of_the_lowest_ends_no_other() -> None:
    given = Lent()
    first, two, three = give(given, 3)
    given.release_below(0)
    given.release_below(3)
    assert [first.is_held, two.is_held, three.is_held] == [False, False, True]
    given.release_below(9)
    given.release_below(9)
    assert len(given) == 0
    assert not three.is_held


@pytest.mark.spec("R261")
def test_a_number_says_all_if_the_lowest_were_given_back() -> None:
    taken, first = Borrowed(), page()
    postings, posted = Postings(first), PostingsOfPeer(first, NONCE)
    held = take(taken, 1, 2, 3, 4)
    assert taken.post(postings, NONCE)
    assert posted.before() == 1
    del held[:2]
    assert taken.returned == 2, "nobody was told yet"
    assert taken.post(postings, NONCE)
    assert posted.before() == 3
    assert taken.returned == 0
    assert taken.release() is None
    assert taken.take(2) is None


@pytest.mark.spec("R261")
def test_a_number_does_not_say_that_one_in_the_middle_was_given_back() -> None:
    taken, first = Borrowed(), page()
    postings, posted = Postings(first), PostingsOfPeer(first, NONCE)
    held = take(taken, 1, 2, 3)
    del held[1]
    assert not taken.post(postings, NONCE)
    assert taken.returned == 1
    assert taken.release() == Release(4, (1, 3))
    del held[1]
    assert not taken.post(postings, NONCE), "2 and 3 lie behind 1"
    assert posted.before() == 0
    del held[0]
    assert taken.post(postings, NONCE)
    assert posted.before() == 4


@pytest.mark.spec("R260")
def test_a_lender_finds_what_is_posted_for_it() -> None:
    first = page()
    postings = Postings(first)
    mine, other = PostingsOfPeer(first, NONCE), PostingsOfPeer(first, 7)
    assert mine.before() == other.before() == 0
    assert postings.post(7, 12)
    assert postings.post(NONCE, 3)
    assert postings.post(7, 2**62)
    assert (mine.before(), other.before()) == (3, 2**62)
    assert first[: 8 * leases.FIRST_POSTING] == bytes(16), "the nonce is there"


@pytest.mark.spec("R260")
def test_a_page_has_room_for_so_many_lenders() -> None:
    first = page()
    postings = Postings(first)
    assert all(postings.post(lender, lender) for lender in range(1, leases.POSTINGS_MAX + 1))
    last = PostingsOfPeer(first, leases.POSTINGS_MAX)
    assert last.before() == leases.POSTINGS_MAX
    assert not postings.post(NONCE, 1)
    postings.forget(NONCE)
    postings.forget(leases.POSTINGS_MAX)
    assert last.before() == 0, "its place is another's soon"
    assert postings.post(NONCE, 1)
    assert PostingsOfPeer(first, NONCE).before() == 1
    assert last.before() == 0


# --- whatever the network does ---------------------------------------------------------------------


class Reading(RuleBasedStateMachine):
    """One process lends to another over a network that loses, doubles and reorders."""

    def __init__(self) -> None:
        super().__init__()
        self.given, self.taken = Lent(), Borrowed()
        self.lent: dict[int, Memory] = {}
        self.loans: list[int] = []
        """On their way to the reader."""
        self.releases: list[Release] = []
        """On their way back."""
        self.read: list[tuple[int, Lease]] = []
        first = page()
        self.postings, self.posted = Postings(first), PostingsOfPeer(first, NONCE)

    def _one(self, data: st.DataObject, many: list[int] | list[Release]) -> int:
        return data.draw(st.integers(0, len(many) - 1))

    @rule()
    def lend(self) -> None:
        memory = Memory()
        number = self.given.give(None, memory)
        self.lent[number] = memory
        self.loans.append(number)

    @precondition(lambda self: self.loans)
    @rule(data=st.data(), copies=st.sampled_from([1, 1, 1, 0, 2]))
    def deliver(self, data: st.DataObject, copies: int) -> None:
        number = self.loans.pop(self._one(data, self.loans))
        self.loans += [number] * max(0, copies - 1)
        lease = self.taken.take(number) if copies else None
        if lease is not None:
            assert self.lent[number].is_held, "it reads what may be written to"
            self.read.append((number, lease))

    @precondition(lambda self: self.read)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        self.read.pop(data.draw(st.integers(0, len(self.read) - 1)))

    @rule()
    def tell(self) -> None:
        message = self.taken.release()
        if message is not None:
            self.releases.append(message)

    @precondition(lambda self: self.releases)
    @rule(data=st.data(), copies=st.sampled_from([1, 1, 1, 0, 2]))
    def hear(self, data: st.DataObject, copies: int) -> None:
        message = self.releases.pop(self._one(data, self.releases))
        self.releases += [message] * max(0, copies - 1)
        if copies:
            self.given.release(message)

    @rule()
    def post(self) -> None:
        self.taken.post(self.postings, NONCE)

    @rule()
    def look(self) -> None:
        self.given.release_below(self.posted.before())

    @invariant()
    def what_is_read_is_held(self) -> None:
        assert all(self.lent[number].is_held for number, _ in self.read)

    def teardown(self) -> None:
        """All is given back in the end: at the latest with the next loan that arrives."""
        self.read.clear()
        memory = Memory()
        lease = self.taken.take(self.given.give(None, memory))
        assert lease is not None
        del lease
        while (message := self.taken.release()) is not None:
            self.given.release(message)
        assert len(self.given) == 0
        assert not any(item.is_held for item in (*self.lent.values(), memory))


def limited(machine: type[Reading]) -> Callable[[], None]:
    """The same, where one RELEASE names few."""

    class Few(machine):  # type: ignore[misc,valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.named_max = leases.NAMED_MAX
            leases.NAMED_MAX = 2

        def teardown(self) -> None:
            try:
                super().teardown()
            finally:
                leases.NAMED_MAX = self.named_max

    return Few.TestCase


TestReading = Reading.TestCase
TestReading.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)
TestReadingWithShortReleases = limited(Reading)
TestReadingWithShortReleases.settings = settings(  # type: ignore[attr-defined]
    max_examples=50, stateful_step_count=60, deadline=None
)


def test_many_leases_are_given_back_by_other_threads() -> None:
    """Leases are dropped anywhere, while the loop tells of them; each memory is released, and once."""
    given, taken = Lent(), Borrowed()
    memories = give(given, 3000)
    held = [taken.take(number) for number in list(given.open)]
    random.Random(0).shuffle(held)
    parts = [held[start::3] for start in range(3)]
    held.clear()
    threads = [threading.Thread(target=part.clear) for part in parts]
    for thread in threads:
        thread.start()
    end = time.monotonic() + 60.0
    while len(given):
        assert time.monotonic() < end, f"{len(given)} of 3000 leases were not given back"
        message = taken.release()
        if message is not None:
            given.release(message)
    for thread in threads:
        thread.join()
    assert not any(memory.is_held for memory in memories)
    assert taken.release() is None
