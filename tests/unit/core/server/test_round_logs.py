"""What is not finite: found, counted, logged, and told to each worker once."""

import pytest
import torch

from kvps.core.effects import Note
from kvps.core.nonfinite import RANKS_MAX, Flaw, count_nonfinite
from kvps.core.server.round_logs import STALL_AFTER_S, NonFiniteLog, Stall, StragglerLog
from kvps.phrases import ranks_in_words
from kvps.protocol.membership import Measured, OldRound
from kvps.protocol.stores import Piece
from kvps.protocol.values import Ask
from tests.support.server_harness import ServerStage

NAN, INF = float("nan"), float("inf")
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
FLAW = Flaw(2, (3,))


# --- to find ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
def test_values_whose_sum_overflows_are_finite(dtype: torch.dtype) -> None:
    assert count_nonfinite(torch.full((100,), torch.finfo(dtype).max, dtype=dtype)) == 0


# --- to remember ------------------------------------------------------------------------------------


def drops(is_error: bool = True) -> NonFiniteLog:
    return NonFiniteLog("kv", is_error)


def test_drops_are_found_by_range_and_rank() -> None:
    one = drops()
    one.add("b", [Piece(7, 10, 5)], 2, 4, FLAW)
    one.add("a", [Piece(7, 0, 5), Piece(8, 0, 5)], 2, 5, FLAW)
    asks = [Ask(0, 5, 0, 0), Ask(10, 5, 0, 0)]
    assert [drop.number for drop in one.among(7, 2, asks)] == [5, 4]
    assert [drop.number for drop in one.among(8, 2, asks)] == [5]
    assert [drop.number for drop in one.among(7, 2, asks[1:])] == [4]
    assert one.among(7, 2, [Ask(5, 5, 0, 0)]) == ()
    assert one.among(7, 1, asks) == one.among(9, 2, asks) == ()
    one.forget([Piece(7, 0, 5), Piece(8, 0, 5)])
    assert [drop.number for drop in one.among(7, 2, asks)] == [4]
    assert one.among(8, 2, asks) == ()
    assert one.counts == {"a": 1, "b": 1}


# --- to log -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "says"),
    [
        ((1, 5), "(from some of ranks 1, 5, or from their sum)"),
        (tuple(range(RANKS_MAX + 2)), f"{RANKS_MAX - 2}, {RANKS_MAX - 1} and 2 more, or from their sum)"),
    ],
)
def test_several_ranks_are_named(ranks: tuple[int, ...], says: str) -> None:
    one = drops()
    one.add("w", [], None, 0, Flaw(2, ranks))
    (note,) = one.report()
    assert note.text.endswith(says)


# --- to tell ----------------------------------------------------------------------------------------


# --- what a server's log says of rounds that stay open --------------------------------------------


def stall(store: str = "kv", age_s: float = STALL_AFTER_S, *missing: int) -> Stall:
    missing = missing or (3,)
    return Stall(store, "w", 7, age_s, missing, ranks_in_words(missing))


def texts(stalls: StragglerLog, *oldest: Stall) -> list[str]:
    return [note.text for note in stalls.look(oldest)]


def test_not_every_rank_of_a_thousand_is_named() -> None:
    (text,) = texts(StragglerLog(), stall("kv", 10, *range(1000)))
    assert text.endswith("18, 19 and 980 more")


def test_a_server_says_so_of_the_oldest_round_of_a_store() -> None:
    one = ServerStage(workers=3)
    one.open()
    one.init("a", [0.0])
    one.init("b", [0.0])
    one.push(0, "a", [1.0], 0)
    one.now += 4
    one.push(0, "b", [1.0], 0)
    one.push(1, "a", [1.0], 0)
    one.notes.clear()
    one.now += 8
    one.take(one.server.on_timer(one.now))
    said = (
        "store 'kv': round 0 of key 'a' has been open for 12 s and waits for rank 2 "
        "(has made no request here yet)"
    )
    assert [note for note in one.notes if isinstance(note, Note)] == [Note("warning", said)]
    one.notes.clear()
    one.push(2, "a", [1.0], 0)
    one.now += 5
    one.take(one.server.on_timer(one.now))
    (note,) = one.notes
    assert note.text.endswith(  # type: ignore[union-attr]
        "key 'b' has been open for 13 s and waits for ranks 1 (alive, but no progress for 13 s), "
        "2 (alive, last request 5 s ago)"
    )
    assert torch.equal(one.chunk().buffer.tensor[:1], torch.tensor([3.0]))


@pytest.mark.spec("R465")
def test_a_server_tells_the_scheduler_of_rounds_that_are_open_and_when_there_are_none() -> None:
    one = ServerStage(workers=3)
    one.open()
    one.init("a", [0.0])

    def told(seconds: float) -> list[tuple[object, ...]]:
        one.now += seconds
        said = one.take(one.server.on_timer(one.now))
        figures = [each.message for each in said if isinstance(each.message, Measured)]
        assert all(
            message == Measured(0, (), (), (), (), message.rounds, message.late) for message in figures
        )
        return [(message.rounds, message.late) for message in figures]

    assert told(10) == []
    one.push(0, "a", [1.0], 0)
    assert told(5) == [((OldRound(0, "kv", "a", 0, (1, 2), 5.0),), {"0": 0.0})]
    one.push(1, "a", [1.0], 0)
    assert told(6) == [((OldRound(0, "kv", "a", 0, (2,), 11.0),), {"1": 5.0, "0": 0.0})]
    assert told(5) == [((OldRound(0, "kv", "a", 0, (2,), 16.0),), {})]
    one.push(2, "a", [1.0], 0)
    assert told(5) == [((), {"2": 16.0, "1": 5.0, "0": 0.0})]
    assert told(5) == []
