"""When rows are read: after the right pushes, in every piece of the key, and with what."""

import pytest
import torch

from kvps.dtypes import BY_NAME
from kvps.protocol.membership import Probe, Probed
from kvps.protocol.stores import Piece
from kvps.protocol.values import Ask, Pull, PulledRows, PullRows, PushRows
from kvps.tensors import from_frame
from tests.support.server_harness import Said, ServerStage, heard
from tests.unit.core.server.rules.test_rows import MANY, WIDTH, push, push_whole, stage


def pull(
    server: ServerStage, rank: int, ids: list[int], after: int = 0, least: int = 0, key: str = "t"
) -> list[Said]:
    payload = (torch.tensor(ids),) if ids else ()
    return server.say(rank, PullRows("kv", key, after, least, len(ids)), *payload)


def answers(said: list[Said]) -> dict[int, list[float]]:
    """The first element of each row that was answered, by the number of the request."""
    found = {}
    for effect in said:
        if isinstance(effect.message, PulledRows):
            flat = from_frame(effect.payload[0], BY_NAME["float32"].name)
            found[effect.message.seq] = flat.view(-1, WIDTH)[:, 0].tolist()
    return found


def why(server: ServerStage, rank: int) -> str:
    (probed,) = heard(server.say(rank, Probe((server.seqs[rank],))), Probed)
    (pending,) = probed.pending
    return pending.reason


@pytest.mark.spec("R175")
@pytest.mark.parametrize("count", [4, MANY])
def test_rows_come_when_the_round_of_ones_own_push_is_closed(count: int) -> None:
    server = stage(count)
    push(server, 0, [1, count - 1])
    assert pull(server, 0, [0, 1], after=1) == []
    assert "key 't': round 0 waits for a push of rank 1" in why(server, 0)
    said = push(server, 1, [1], 2.0)
    assert list(answers(said).values()) == [[0.0, 3.0]]
    (answer,) = heard(said, PulledRows)
    assert (answer.lowest, answer.highest, answer.owed, answer.width) == (1, 1, 1, WIDTH)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_rule_that_follows_readers_is_told_of_rows(mode: str) -> None:
    """What a rank has read last is what its next gradient is compensated by."""
    rows_of, whole = stage(MANY, mode=mode), stage(MANY, mode=mode)
    for item in (rows_of, whole):
        item.optimizer("dcasgd", lr=0.1, lamda=0.5)
        for number in range(3):
            for rank in (0, 1):
                push_whole(item, rank, 1.0 + rank, number)
            if item is rows_of:
                assert pull(item, 0, list(range(MANY)), after=number + 1)
            else:
                for piece in item.pieces["t"]:
                    assert read_piece(item, piece, number + 1)
    assert rows_of.values("t") == whole.values("t")


def read_piece(server: ServerStage, piece: Piece, after: int) -> list[Said]:
    return server.say(0, Pull(piece.chunk, True, (Ask(piece.start, piece.size, after, 0),)))


def test_rows_that_fill_several_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    server = stage()
    monkeypatch.setattr("kvps.protocol.values.ROWS_FRAME_BYTES", 2 * WIDTH * 4)
    message = PushRows("kv", "t", 1, (0,), 0, WIDTH, 3)
    halves = (torch.ones(2 * WIDTH), torch.full((WIDTH,), 3.0))
    assert server.say(0, message, torch.tensor([0, 2, 3]), *halves)
    push(server, 1, [])
    (said,) = pull(server, 0, [0, 1, 2, 3], after=1)
    assert [len(frame) for frame in said.payload] == [24, 24]
    got = torch.cat([from_frame(frame, "float32") for frame in said.payload])
    assert got.view(-1, WIDTH)[:, 0].tolist() == [1.0, 0.0, 1.0, 3.0]
