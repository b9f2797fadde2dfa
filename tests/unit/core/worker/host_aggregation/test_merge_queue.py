"""What a leader asks a server once for several: when it goes, what is in it, and who is told."""

from __future__ import annotations

import weakref

import pytest
import torch

from kvps.core.gradients import DenseGradient
from kvps.core.worker.connection import Request
from kvps.core.worker.host_aggregation import merge_queue
from kvps.core.worker.host_aggregation.merge_queue import (
    HURRY_S,
    WAIT_MAX_S,
    MergedRequest,
    MergedRequests,
    Participant,
    Reply,
)
from kvps.dtypes import BY_NAME
from kvps.protocol.values import Ask, Pull, Pulled, Push, Run, Stand
from kvps.tensors import PRIVATE, from_frame, to_frame
from tests.support.worker_harness import Readable

FLOAT = BY_NAME["float32"].id
CHUNK = 7
ALL = frozenset({4, 5, 6})


def leading(expected: frozenset[int] = ALL, servers: int = 2) -> MergedRequests:
    one = MergedRequests(5, servers, PRIVATE)
    assert one.expect(expected) == []
    return one


def push(
    rank: int,
    number: int = 0,
    value: float = 0.0,
    *,
    runs: tuple[tuple[int, int], ...] = ((0, 4),),
    chunk: int = CHUNK,
    pull: bool = False,
    priority: int = 0,
    weight: float = 1.0,
    dtype: str = "float32",
) -> Participant:
    """A push of ``value`` to every element of ``runs``, which are (start, size)."""
    tiles = tuple(Run(start, size, number) for start, size in runs)
    message = Push(chunk, BY_NAME[dtype].id, (rank,), weight, pull, tiles)
    count = sum(size for _, size in runs)
    values = torch.full((count,), value, dtype=getattr(torch, dtype))
    return Participant(rank, message, rank, lambda: DenseGradient([values]), priority)


def pull(
    rank: int,
    after: int = 0,
    least: int = 0,
    broadcasts: int = 0,
    size: int = 4,
    call: int | None = None,
    stamp: int = 0,
) -> Participant:
    asks = (Ask(0, size, after, least),)
    return Participant(rank, Pull(CHUNK, True, asks, broadcasts, (), call, stamp), rank)


def ranks(requests: list[Request]) -> list[tuple[int, ...]]:
    """For whom each of them pushes."""
    return [pushed(one).ranks for one in requests]


def pushed(request: Request) -> Push:
    assert isinstance(request.message, Push)
    return request.message


def values_in(request: Request) -> torch.Tensor:
    """What goes with a push."""
    request.freeze()
    (payload,) = request.payload
    return from_frame(to_frame(payload), {v.id: k for k, v in BY_NAME.items()}[pushed(request).dtype])


def merged_of(request: Request) -> MergedRequest:
    assert isinstance(request.owner, MergedRequest)
    return request.owner


def asked(bundles_: MergedRequests, participant: Participant) -> Request:
    """Pull; the server must be asked."""
    found = bundles_.pull(participant)
    assert isinstance(found, Request)
    return found


def answer(
    bundles_: MergedRequests, request: Request, value: float, version: int = 1, size: int = 4
) -> Reply:
    message = Pulled(1, CHUNK, FLOAT, True, (Stand(0, size, version, 0),))
    return bundles_.answered(merged_of(request), message, torch.full((size,), value))


# --- pushes: when they go -------------------------------------------------------------------------


@pytest.mark.spec("R97")
class TestGoes:
    def test_when_every_neighbour_is_in_it(self) -> None:
        one = leading()
        assert one.push(push(6), 0.0) == []
        assert one.push(push(4), 0.0) == []
        assert ranks(one.push(push(5), 0.0)) == [(4, 5, 6)]
        assert one.deadline() is None
        one.check()

    def test_at_once_if_all_others_have_pushed_a_later_number(self) -> None:
        """They pushed this one along another way, and do not push it again."""
        one = leading()
        for rank in (4, 5, 6):
            one.push(push(rank, number=3), 0.0)
        assert ranks(one.push(push(4, number=2), 0.0)) == [(4,)]

    def test_when_the_last_that_was_missing_pushes_a_later_number(self) -> None:
        one = leading()
        one.push(push(4, number=0), 0.0)
        one.push(push(5, number=0), 0.0)
        assert ranks(one.push(push(6, number=1), 0.0)) == [(4, 5)]
        one.check()

    def test_but_what_was_pushed_of_other_elements_does_not_count(self) -> None:
        one = leading()
        for rank in ALL:
            one.push(push(rank, number=9, runs=((0, 3),)), 0.0)
        assert one.push(push(4, number=0), 0.0) == []
        assert one.push(push(5, number=0), 0.0) == []

    def test_nor_if_only_some_of_the_elements_were_pushed_later(self) -> None:
        one = leading(frozenset({4, 5}))
        mixed = (Run(0, 2, 5), Run(2, 2, 0))
        for rank in (4, 5):
            participant = push(rank)
            participant.message = Push(CHUNK, FLOAT, (rank,), 1.0, False, mixed)
            one.push(participant, 0.0)
        two = push(4, number=1, runs=((0, 2), (2, 2)))
        assert one.push(two, 0.0) == []
        assert ranks(one.push(push(5, number=1, runs=((0, 2), (2, 2))), 0.0)) == [(4, 5)]

    def test_when_who_is_missing_is_lost(self) -> None:
        one = leading()
        one.push(push(4), 0.0)
        one.push(push(5), 0.0)
        assert ranks(one.expect(frozenset({4, 5}))) == [(4, 5)]
        assert one.expect(ALL) == []
        one.check()

    def test_after_a_while_whoever_is_missing(self) -> None:
        one = leading()
        one.push(push(4), 10.0)
        one.push(push(6), 11.0)
        assert one.deadline() == 10.0 + WAIT_MAX_S
        assert one.overdue(10.0 + WAIT_MAX_S - 0.01) == []
        assert ranks(one.overdue(10.0 + WAIT_MAX_S)) == [(4, 6)]
        assert one.deadline() is None
        assert ranks(one.push(push(5), 13.0)) == [(5,)]

    def test_soon_if_somebody_asks_after_it(self) -> None:
        one = leading()
        participant = push(4)
        one.push(participant, 10.0)
        assert participant.merged is not None
        one.ask_after(participant.merged, 10.5)
        assert one.deadline() == 10.5 + HURRY_S
        assert ranks(one.overdue(10.5 + HURRY_S)) == [(4,)]
        one.ask_after(participant.merged, 11.0)
        assert one.deadline() is None, "it has gone"

    def test_each_number_by_itself(self) -> None:
        one = leading(frozenset({4, 5}))
        assert one.push(push(4, number=0), 0.0) == []
        assert one.push(push(4, number=1), 0.0) == []
        (first,) = one.push(push(5, number=0), 0.0)
        assert pushed(first).runs == (Run(0, 4, 0),)
        (second,) = one.push(push(5, number=1), 0.0)
        assert pushed(second).runs == (Run(0, 4, 1),)

    def test_each_chunk_by_itself(self) -> None:
        one = leading(frozenset({4, 5}))
        assert one.push(push(4, chunk=7), 0.0) == []
        assert one.push(push(5, chunk=9), 0.0) == []
        assert [pushed(request).chunk for request in one.push(push(5, chunk=7), 0.0)] == [7]

    def test_also_when_it_has_forgotten_who_pushed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of too many ways to cut a chunk, it does not remember who has pushed what."""
        monkeypatch.setattr(merge_queue, "SHAPES_MAX", 2)
        one = leading(frozenset({4, 5}))
        for start in (0, 4, 8):
            assert one.push(push(4, 5, runs=((start, 4),)), 0.0) == []
            assert ranks(one.push(push(5, 5, runs=((start, 4),)), 0.0)) == [(4, 5)]
        assert ranks(one.push(push(4, 3, runs=((8, 4),)), 0.0)) == [(4,)]
        assert one.push(push(4, 3, runs=((0, 4),)), 0.0) == [], "this was forgotten"


class TestCutDifferently:
    """Such pushes would wait for each other in vain."""

    @pytest.mark.spec("R97")
    @pytest.mark.parametrize(
        ("whole", "part"), [((0, 10), (0, 5)), ((0, 10), (5, 5)), ((0, 10), (3, 4)), ((3, 4), (0, 10))]
    )
    def test_none_of_a_chunk_waits_any_more(self, whole: tuple[int, int], part: tuple[int, int]) -> None:
        one = leading()
        assert one.push(push(4, runs=(whole,)), 0.0) == []
        assert ranks(one.push(push(5, runs=(part,)), 0.0)) == [(4,), (5,)]
        assert ranks(one.push(push(6, runs=(part,)), 0.0)) == [(6,)]
        assert one.push(push(6, runs=(part,), chunk=9), 0.0) == [], "another chunk does"
        one.check()

    def test_neighbouring_elements_wait(self) -> None:
        one = leading()
        for run in ((10, 5), (0, 5), (5, 5), (20, 5)):
            assert one.push(push(4, runs=(run,)), 0.0) == []
        one.check()

    def test_so_do_rounds_that_are_cut_differently(self) -> None:
        """All ranks may push key by key once, and all at once the next time."""
        one = leading()
        assert one.push(push(4, number=0, runs=((0, 10),)), 0.0) == []
        assert one.push(push(4, number=1, runs=((0, 5),)), 0.0) == []
        one.check()


# --- pushes: what goes ----------------------------------------------------------------------------


class TestPush:
    def test_is_the_sum_for_all_ranks(self) -> None:
        one = leading()
        one.push(push(6, 3, 100.0, priority=2, weight=4.0), 0.0)
        one.push(push(4, 3, 1.0, priority=5, weight=2.0, pull=True), 0.0)
        (request,) = one.push(push(5, 3, 10.0, priority=1), 0.0)
        assert pushed(request) == Push(CHUNK, FLOAT, (4, 5, 6), 7.0, True, (Run(0, 4, 3),))
        assert values_in(request).tolist() == [111.0] * 4
        assert (request.priority, request.lane, request.payload_bytes) == (5, CHUNK, 16)

    def test_asks_for_values_only_if_somebody_does(self) -> None:
        one = leading(frozenset({4, 5}))
        one.push(push(4), 0.0)
        (request,) = one.push(push(5), 0.0)
        assert not pushed(request).pull

    @pytest.mark.spec("R93")
    @pytest.mark.parametrize("chunk", [6, 7, 8])
    def test_goes_to_the_server_that_the_chunk_names(self, chunk: int) -> None:
        one = leading(frozenset({5}), servers=3)
        (request,) = one.push(push(5, chunk=chunk), 0.0)
        assert request.server == chunk % 3
        participant = pull(5)
        participant.message = Pull(chunk, True, (Ask(0, 4, 0, 0),))
        assert asked(one, participant).server == chunk % 3

    @pytest.mark.spec("R97")
    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_of_half_types_is_of_float32(self, dtype: str) -> None:
        one = leading()
        big = 2048.0
        one.push(push(4, 0, big, dtype=dtype), 0.0)
        one.push(push(5, 0, 1.0, dtype=dtype), 0.0)
        (request,) = one.push(push(6, 0, 1.0, dtype=dtype), 0.0)
        assert pushed(request).dtype == FLOAT
        assert request.payload_bytes == 16
        assert values_in(request).tolist() == [big + 2] * 4

    def test_of_one_rank_goes_as_it_is(self) -> None:
        one = leading()
        one.push(push(4, 0, 3.0, dtype="bfloat16"), 0.0)
        (request,) = one.overdue(WAIT_MAX_S)
        assert pushed(request).dtype == BY_NAME["bfloat16"].id
        assert request.payload_bytes == 8
        assert values_in(request).tolist() == [3.0] * 4

    @pytest.mark.parametrize("dtype", ["int8", "int64", "float64"])
    def test_of_other_types_keeps_its_type(self, dtype: str) -> None:
        one = leading(frozenset({4, 5}))
        one.push(push(4, 0, 3.0, dtype=dtype), 0.0)
        (request,) = one.push(push(5, 0, 4.0, dtype=dtype), 0.0)
        assert pushed(request).dtype == BY_NAME[dtype].id
        assert values_in(request).tolist() == [7] * 4

    def test_of_a_new_life_takes_the_place_of_the_old(self) -> None:
        one = leading(frozenset({4, 5}))
        one.push(push(4, 0, 1.0), 0.0)
        one.push(push(4, 0, 2.0), 0.0)
        (request,) = one.push(push(5, 0, 10.0), 0.0)
        assert pushed(request).ranks == (4, 5)
        assert values_in(request).tolist() == [12.0] * 4

    def test_is_told_to_all_once(self) -> None:
        one = leading(frozenset({4, 5}))
        participants = [push(4), push(5)]
        one.push(participants[0], 0.0)
        (request,) = one.push(participants[1], 0.0)
        assert one.taken_in(merged_of(request)) == participants
        assert all(participant.gradient is None for participant in participants), (
            "its memory is the sender's again"
        )
        assert one.taken_in(merged_of(request)) == []


@pytest.mark.spec("R99")
class TestRefused:
    def test_is_asked_for_each_by_itself(self) -> None:
        one = leading()
        for rank in (4, 5):
            one.push(push(rank, 0, float(rank), priority=rank, pull=rank == 4), 0.0)
        (request,) = one.push(push(6, 0, 6.0), 0.0)
        again = one.refused(merged_of(request))
        assert ranks(again) == [(4,), (5,), (6,)]
        assert [pushed(single).pull for single in again] == [True, False, False]
        assert [values_in(single)[0].item() for single in again] == [4, 5, 6]
        assert [single.priority for single in again] == [4, 5, 0]
        assert [list(merged_of(single).participants) for single in again] == [[4], [5], [6]]

    def test_and_asked_after_if_it_was(self) -> None:
        one = leading(frozenset({4, 5}))
        one.push(push(4), 0.0)
        (request,) = one.push(push(5), 0.0)
        one.ask_after(merged_of(request), 0.0)
        assert all(merged_of(single).is_asked_after for single in one.refused(merged_of(request)))

    def test_finally_if_it_was_for_one(self) -> None:
        one = leading(frozenset({5}))
        (request,) = one.push(push(5), 0.0)
        assert one.refused(merged_of(request)) == []

    def test_finally_if_the_server_had_taken_it_in(self) -> None:
        """Its values are refused, then."""
        one = leading(frozenset({4, 5}))
        one.push(push(4, pull=True), 0.0)
        (request,) = one.push(push(5, pull=True), 0.0)
        one.taken_in(merged_of(request))
        assert one.refused(merged_of(request)) == []

    def test_a_pull_is_refused_for_all(self) -> None:
        one = leading()
        request = asked(one, pull(4))
        assert one.pull(pull(5)) is None
        assert one.taken_in(merged_of(request)) == []
        assert one.refused(merged_of(request)) == []
        assert isinstance(one.pull(pull(6)), Request), "who comes later asks anew"


# --- pulls ----------------------------------------------------------------------------------------


@pytest.mark.spec("R98")
class TestPull:
    def test_goes_at_once_and_takes_in_who_asks_for_the_same(self) -> None:
        one = leading()
        request = asked(one, pull(4, after=1))
        assert request.message == Pull(CHUNK, True, (Ask(0, 4, 1, 0),))
        assert request.payload_bytes == 0, "it may be dropped"
        assert one.pull(pull(6, after=1)) is None
        assert list(merged_of(request).participants) == [4, 6]
        one.check()

    @pytest.mark.parametrize(
        "other",
        [pull(6, after=2), pull(6, least=1), pull(6, broadcasts=1), pull(6, size=3)],
        ids=["after more", "of a version", "after a broadcast", "other elements"],
    )
    def test_for_something_else_is_asked_by_itself(self, other: Participant) -> None:
        one = leading()
        first = asked(one, pull(4, after=1))
        assert asked(one, other) is not first

    def test_of_the_same_rank_again_is_asked_again(self) -> None:
        """It gave the first up; what others ask for goes with the second."""
        one = leading()
        first, second = asked(one, pull(4)), asked(one, pull(4))
        assert one.pull(pull(6)) is None
        assert list(merged_of(first).participants) == [4]
        assert list(merged_of(second).participants) == [4, 6]
        answer(one, first, 1.0)
        assert isinstance(one.pull(pull(5)), Reply)
        assert one.pull(pull(5)) is None, "the second has no answer yet"

    def test_is_answered_to_who_comes_later_once(self) -> None:
        one = leading()
        answer(one, asked(one, pull(6)), 1.0, version=1)
        answer(one, asked(one, pull(4)), 2.0, version=2)
        # Rank 6 has pulled before: it is likely to come.
        found = one.pull(pull(6, after=2))
        assert isinstance(found, Reply)
        assert found.values.tolist() == [2.0] * 4
        assert isinstance(one.pull(pull(6, after=2)), Request), "twice may mean that it waits"

    def test_is_not_kept_for_who_never_pulled(self) -> None:
        one = leading()
        answer(one, asked(one, pull(4)), 1.0)
        assert isinstance(one.pull(pull(6)), Request)

    def test_is_not_kept_for_the_lost(self) -> None:
        one = leading()
        answer(one, asked(one, pull(6)), 1.0)
        one.expect(frozenset({4, 5}))
        answer(one, asked(one, pull(4)), 2.0)
        assert isinstance(one.pull(pull(6)), Request)

    @pytest.mark.parametrize(
        "other",
        [pull(6, after=3), pull(6, least=3), pull(6, broadcasts=1), pull(6, size=3)],
        ids=["after more", "of a version", "after a broadcast", "other elements"],
    )
    def test_pull_that_the_answer_does_not_meet_is_sent(self, other: Participant) -> None:
        one = leading()
        answer(one, asked(one, pull(6)), 1.0, version=2)
        answer(one, asked(one, pull(4)), 2.0, version=2)
        assert isinstance(one.pull(other), Request)

    @pytest.mark.parametrize("is_there", [False, True])
    def test_of_a_value_that_is_loaded_goes_by_its_life(self, is_there: bool) -> None:
        """Rank 0 was replaced between the two: one answer must not be for both."""
        one = leading()
        if is_there:
            answer(one, asked(one, pull(6, call=1, stamp=3)), 1.0)
        first = asked(one, pull(4, call=1, stamp=3))
        if is_there:
            answer(one, first, 1.0)
        assert isinstance(one.pull(pull(6, call=1, stamp=4)), Request)
        assert isinstance(one.pull(pull(6)), Request)
        same = one.pull(pull(6, call=1, stamp=3))
        assert isinstance(same, Reply) if is_there else same is None

    def test_is_held_against_the_lowest_version_of_each_run(self) -> None:
        one = leading()
        participants = [
            Participant(rank, Pull(CHUNK, True, (Ask(0, 4, 0, 0), Ask(6, 2, after, 0))), rank)
            for rank, after in ((6, 0), (4, 0), (6, 5), (6, 4))
        ]
        stands = (Stand(0, 1, 9, 0), Stand(1, 3, 3, 0), Stand(6, 1, 4, 0), Stand(7, 1, 5, 0))
        message = Pulled(1, CHUNK, FLOAT, True, stands)
        for participant in participants[:2]:
            one.answered(merged_of(asked(one, participant)), message, torch.zeros(6))
        assert isinstance(one.pull(participants[2]), Request)
        assert isinstance(one.pull(participants[3]), Reply)

    def test_an_answer_is_given_up_when_all_have_come_for_it(self) -> None:
        one = leading()
        for version, rank in enumerate((4, 5, 6)):
            answer(one, asked(one, pull(rank, after=version)), 1.0, version)
        kept = answer(one, asked(one, pull(5, after=3)), 2.0, version=3)
        assert one.pull(pull(4, after=3)) is kept
        gone = weakref.ref(kept.values)
        assert one.pull(pull(6, after=3)) is kept
        del kept
        assert gone() is None

    def test_values_that_a_push_asked_for_are_kept_for_nobody(self) -> None:
        """Nobody says of how many broadcasts they are."""
        one = leading(frozenset({4, 5}))
        answer(one, asked(one, pull(4)), 1.0)
        one.push(push(4), 0.0)
        (request,) = one.push(push(5, pull=True), 0.0)
        found = answer(one, request, 2.0)
        assert found.served == {5}
        assert isinstance(one.pull(pull(4)), Request)


class TestAnswer:
    def test_for_others_lies_in_memory_that_is_lent(self) -> None:
        memory = Readable()
        one = MergedRequests(5, 1, memory)
        one.expect(ALL)
        request = asked(one, pull(4))
        values = torch.ones(4)
        message = Pulled(1, CHUNK, FLOAT, True, (Stand(0, 4, 1, 0),))
        found = one.answered(merged_of(request), message, values)
        values.fill_(7)  # the server has its memory back
        assert found.values.tolist() == [1.0] * 4
        assert found.values is memory.blocks[0]

    def test_for_the_leader_alone_is_not_copied(self) -> None:
        memory = Readable()
        one = MergedRequests(5, 1, memory)
        one.expect(frozenset({5, 6}))
        request = asked(one, pull(5))
        values = torch.ones(4)
        message = Pulled(1, CHUNK, FLOAT, True, (Stand(0, 4, 1, 0),))
        assert one.answered(merged_of(request), message, values).values is values
        assert memory.blocks == []
