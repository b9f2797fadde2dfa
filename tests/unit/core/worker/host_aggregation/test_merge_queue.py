"""What a leader asks a server once for several: when it goes, what is in it, and who is told."""

import pytest
import torch

from kvps.core.gradients import DenseGradient
from kvps.core.worker.connection import Request
from kvps.core.worker.host_aggregation import merge_queue
from kvps.core.worker.host_aggregation.merge_queue import (
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
    merged = MergedRequests(5, servers, PRIVATE)
    assert merged.expect(expected) == []
    return merged


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
    return [pushed(request).ranks for request in requests]


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
    def test_at_once_if_all_others_have_pushed_a_later_number(self) -> None:
        """They pushed this one along another way, and do not push it again."""
        merged = leading()
        for rank in (4, 5, 6):
            merged.push(push(rank, number=3), 0.0)
        assert ranks(merged.push(push(4, number=2), 0.0)) == [(4,)]

    def test_when_the_last_that_was_missing_pushes_a_later_number(self) -> None:
        merged = leading()
        merged.push(push(4, number=0), 0.0)
        merged.push(push(5, number=0), 0.0)
        assert ranks(merged.push(push(6, number=1), 0.0)) == [(4, 5)]
        merged.check()

    def test_also_when_it_has_forgotten_who_pushed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of too many ways to cut a chunk, it does not remember who has pushed what."""
        monkeypatch.setattr(merge_queue, "SHAPES_MAX", 2)
        merged = leading(frozenset({4, 5}))
        for start in (0, 4, 8):
            assert merged.push(push(4, 5, runs=((start, 4),)), 0.0) == []
            assert ranks(merged.push(push(5, 5, runs=((start, 4),)), 0.0)) == [(4, 5)]
        assert ranks(merged.push(push(4, 3, runs=((8, 4),)), 0.0)) == [(4,)]
        assert merged.push(push(4, 3, runs=((0, 4),)), 0.0) == [], "this was forgotten"


class TestCutDifferently:
    """Such pushes would wait for each other in vain."""

    @pytest.mark.spec("R97")
    @pytest.mark.parametrize(
        ("whole", "part"), [((0, 10), (0, 5)), ((0, 10), (5, 5)), ((0, 10), (3, 4)), ((3, 4), (0, 10))]
    )
    def test_none_of_a_chunk_waits_any_more(self, whole: tuple[int, int], part: tuple[int, int]) -> None:
        merged = leading()
        assert merged.push(push(4, runs=(whole,)), 0.0) == []
        assert ranks(merged.push(push(5, runs=(part,)), 0.0)) == [(4,), (5,)]
        assert ranks(merged.push(push(6, runs=(part,)), 0.0)) == [(6,)]
        assert merged.push(push(6, runs=(part,), chunk=9), 0.0) == [], "another chunk does"
        merged.check()

    def test_so_do_rounds_that_are_cut_differently(self) -> None:
        """All ranks may push key by key once, and all at once the next time."""
        merged = leading()
        assert merged.push(push(4, number=0, runs=((0, 10),)), 0.0) == []
        assert merged.push(push(4, number=1, runs=((0, 5),)), 0.0) == []
        merged.check()


# --- pushes: what goes ----------------------------------------------------------------------------


class TestPush:
    @pytest.mark.spec("R93")
    @pytest.mark.parametrize("chunk", [6, 7, 8])
    def test_goes_to_the_server_that_the_chunk_names(self, chunk: int) -> None:
        merged = leading(frozenset({5}), servers=3)
        (request,) = merged.push(push(5, chunk=chunk), 0.0)
        assert request.server == chunk % 3
        participant = pull(5)
        participant.message = Pull(chunk, True, (Ask(0, 4, 0, 0),))
        assert asked(merged, participant).server == chunk % 3

    @pytest.mark.spec("R97")
    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_of_half_types_is_of_float32(self, dtype: str) -> None:
        merged = leading()
        big = 2048.0
        merged.push(push(4, 0, big, dtype=dtype), 0.0)
        merged.push(push(5, 0, 1.0, dtype=dtype), 0.0)
        (request,) = merged.push(push(6, 0, 1.0, dtype=dtype), 0.0)
        assert pushed(request).dtype == FLOAT
        assert request.payload_bytes == 16
        assert values_in(request).tolist() == [big + 2] * 4


@pytest.mark.spec("R99")
class TestRefused:
    def test_and_asked_after_if_it_was(self) -> None:
        merged = leading(frozenset({4, 5}))
        merged.push(push(4), 0.0)
        (request,) = merged.push(push(5), 0.0)
        merged.ask_after(merged_of(request), 0.0)
        assert all(merged_of(single).is_asked_after for single in merged.refused(merged_of(request)))

    def test_finally_if_the_server_had_taken_it_in(self) -> None:
        """Its values are refused, then."""
        merged = leading(frozenset({4, 5}))
        merged.push(push(4, pull=True), 0.0)
        (request,) = merged.push(push(5, pull=True), 0.0)
        merged.taken_in(merged_of(request))
        assert merged.refused(merged_of(request)) == []


# --- pulls ----------------------------------------------------------------------------------------


@pytest.mark.spec("R98")
class TestPull:
    def test_of_the_same_rank_again_is_asked_again(self) -> None:
        """It gave the first up; what others ask for goes with the second."""
        merged = leading()
        first, second = asked(merged, pull(4)), asked(merged, pull(4))
        assert merged.pull(pull(6)) is None
        assert list(merged_of(first).participants) == [4]
        assert list(merged_of(second).participants) == [4, 6]
        answer(merged, first, 1.0)
        assert isinstance(merged.pull(pull(5)), Reply)
        assert merged.pull(pull(5)) is None, "the second has no answer yet"

    def test_is_not_kept_for_who_never_pulled(self) -> None:
        merged = leading()
        answer(merged, asked(merged, pull(4)), 1.0)
        assert isinstance(merged.pull(pull(6)), Request)

    @pytest.mark.parametrize("is_there", [False, True])
    def test_of_a_value_that_is_loaded_goes_by_its_life(self, is_there: bool) -> None:
        """Rank 0 was replaced between the two: one answer must not be for both."""
        merged = leading()
        if is_there:
            answer(merged, asked(merged, pull(6, call=1, stamp=3)), 1.0)
        first = asked(merged, pull(4, call=1, stamp=3))
        if is_there:
            answer(merged, first, 1.0)
        assert isinstance(merged.pull(pull(6, call=1, stamp=4)), Request)
        assert isinstance(merged.pull(pull(6)), Request)
        same = merged.pull(pull(6, call=1, stamp=3))
        assert isinstance(same, Reply) if is_there else same is None

    def test_values_that_a_push_asked_for_are_kept_for_nobody(self) -> None:
        """Nobody says of how many broadcasts they are."""
        merged = leading(frozenset({4, 5}))
        answer(merged, asked(merged, pull(4)), 1.0)
        merged.push(push(4), 0.0)
        (request,) = merged.push(push(5, pull=True), 0.0)
        found = answer(merged, request, 2.0)
        assert found.served == {5}
        assert isinstance(merged.pull(pull(4)), Request)


class TestAnswer:
    def test_for_others_lies_in_memory_that_is_lent(self) -> None:
        memory = Readable()
        merged = MergedRequests(5, 1, memory)
        merged.expect(ALL)
        request = asked(merged, pull(4))
        values = torch.ones(4)
        message = Pulled(1, CHUNK, FLOAT, True, (Stand(0, 4, 1, 0),))
        found = merged.answered(merged_of(request), message, values)
        values.fill_(7)  # the server has its memory back
        assert found.values.tolist() == [1.0] * 4
        assert found.values is memory.blocks[0]

    def test_for_the_leader_alone_is_not_copied(self) -> None:
        memory = Readable()
        merged = MergedRequests(5, 1, memory)
        merged.expect(frozenset({5, 6}))
        request = asked(merged, pull(5))
        values = torch.ones(4)
        message = Pulled(1, CHUNK, FLOAT, True, (Stand(0, 4, 1, 0),))
        assert merged.answered(merged_of(request), message, values).values is values
        assert memory.blocks == []
