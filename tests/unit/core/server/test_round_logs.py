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
    non_finite_log = drops()
    non_finite_log.add("b", [Piece(7, 10, 5)], 2, 4, FLAW)
    non_finite_log.add("a", [Piece(7, 0, 5), Piece(8, 0, 5)], 2, 5, FLAW)
    asks = [Ask(0, 5, 0, 0), Ask(10, 5, 0, 0)]
    assert [drop.number for drop in non_finite_log.among(7, 2, asks)] == [5, 4]
    assert [drop.number for drop in non_finite_log.among(8, 2, asks)] == [5]
    assert [drop.number for drop in non_finite_log.among(7, 2, asks[1:])] == [4]
    assert non_finite_log.among(7, 2, [Ask(5, 5, 0, 0)]) == ()
    assert non_finite_log.among(7, 1, asks) == non_finite_log.among(9, 2, asks) == ()
    non_finite_log.forget([Piece(7, 0, 5), Piece(8, 0, 5)])
    assert [drop.number for drop in non_finite_log.among(7, 2, asks)] == [4]
    assert non_finite_log.among(8, 2, asks) == ()
    assert non_finite_log.counts == {"a": 1, "b": 1}


# --- to log -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "says"),
    [
        ((1, 5), "(from some of ranks 1, 5, or from their sum)"),
        (tuple(range(RANKS_MAX + 2)), f"{RANKS_MAX - 2}, {RANKS_MAX - 1} and 2 more, or from their sum)"),
    ],
)
def test_several_ranks_are_named(ranks: tuple[int, ...], says: str) -> None:
    non_finite_log = drops()
    non_finite_log.add("w", [], None, 0, Flaw(2, ranks))
    (note,) = non_finite_log.report()
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
    server = ServerStage(workers=3)
    server.open()
    server.init("a", [0.0])
    server.init("b", [0.0])
    server.push(0, "a", [1.0], 0)
    server.now += 4
    server.push(0, "b", [1.0], 0)
    server.push(1, "a", [1.0], 0)
    server.notes.clear()
    server.now += 8
    server.take(server.server.on_timer(server.now))
    said = (
        "store 'kv': round 0 of key 'a' has been open for 12 s and waits for rank 2 "
        "(has made no request here yet)"
    )
    assert [note for note in server.notes if isinstance(note, Note)] == [Note("warning", said)]
    server.notes.clear()
    server.push(2, "a", [1.0], 0)
    server.now += 5
    server.take(server.server.on_timer(server.now))
    (note,) = server.notes
    assert note.text.endswith(  # type: ignore[union-attr]
        "key 'b' has been open for 13 s and waits for ranks 1 (alive, but no progress for 13 s), "
        "2 (alive, last request 5 s ago)"
    )
    assert torch.equal(server.chunk().buffer.tensor[:1], torch.tensor([3.0]))


@pytest.mark.spec("R465")
def test_a_server_tells_the_scheduler_of_rounds_that_are_open_and_when_there_are_none() -> None:
    server = ServerStage(workers=3)
    server.open()
    server.init("a", [0.0])

    def told(seconds: float) -> list[tuple[object, ...]]:
        server.now += seconds
        said = server.take(server.server.on_timer(server.now))
        figures = [each.message for each in said if isinstance(each.message, Measured)]
        assert all(
            message == Measured(0, (), (), (), (), message.rounds, message.late) for message in figures
        )
        return [(message.rounds, message.late) for message in figures]

    assert told(10) == []
    server.push(0, "a", [1.0], 0)
    assert told(5) == [((OldRound(0, "kv", "a", 0, (1, 2), 5.0),), {"0": 0.0})]
    server.push(1, "a", [1.0], 0)
    assert told(6) == [((OldRound(0, "kv", "a", 0, (2,), 11.0),), {"1": 5.0, "0": 0.0})]
    assert told(5) == [((OldRound(0, "kv", "a", 0, (2,), 16.0),), {})]
    server.push(2, "a", [1.0], 0)
    assert told(5) == [((), {"2": 16.0, "1": 5.0, "0": 0.0})]
    assert told(5) == []
