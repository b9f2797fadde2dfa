"""What a server's log says of rounds that stay open: once when it begins, changes and ends."""

import pytest
import torch

from kvps.core.effects import Note
from kvps.core.server.round_logs import STALL_AFTER_S, Stall, StragglerLog
from kvps.phrases import ranks_in_words
from kvps.protocol.membership import Measured, OldRound
from tests.support.server_harness import ServerStage


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
