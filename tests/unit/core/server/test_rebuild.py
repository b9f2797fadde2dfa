"""A server that has taken another's place makes stores again from what workers tell and give."""

import pytest
import torch

from kvps import protocol as p
from kvps.core.server.rebuild import KEY_BYTES
from tests.support.server_harness import ServerStage, heard, opening, refusal

KEY = p.ToldKey("w", 1, (4,), 0, (p.Piece(3, 2, 4),), (0,))


def stage() -> ServerStage:
    server = ServerStage(2)
    server.pieces["w"] = list(KEY.pieces)
    server.server.control.rebuilds.is_on = True
    return server


def open_of(server: ServerStage, rank: int, **options: object) -> list:  # type: ignore[type-arg]
    return server.say(rank, opening("sync", bundles=False, rebuilds=True, **options))


def tell(
    server: ServerStage, rank: int, *keys: p.ToldKey, reason: str = "", joins: int = 0, waits: bool = False
) -> None:
    assert heard(server.say(rank, p.Tell("kv", joins, reason, waits, keys)), p.Done)


def give(
    server: ServerStage, rank: int, start: int, values: list[float], version: int, broadcasts: int = 0
) -> None:
    message = p.Give("kv", 3, 1, broadcasts, (p.Run(start, len(values), version),))
    assert heard(server.say(rank, message, torch.tensor(values)), p.Ack)


@pytest.mark.spec("R489", "R490")
def test_the_newest_values_count_and_open_waits_for_all() -> None:
    server = stage()
    tell(server, 0, KEY)
    give(server, 0, 2, [1.0, 2.0, 3.0, 4.0], 5)
    assert not heard(open_of(server, 0), p.Done), "one rank has not told"
    (probed,) = heard(server.say(0, p.Probe((server.seqs[0],)), seq=0), p.Probed)
    assert "rank 1 (has made no request here yet) has not told yet" in probed.pending[0].reason
    tell(server, 1, KEY)
    give(server, 1, 2, [5.0, 6.0], 6)
    give(server, 1, 4, [7.0, 8.0], 6)
    give(server, 1, 2, [9.0, 9.0], 4)
    assert len(heard(open_of(server, 1), p.Done)) == 2
    assert server.values("w") == [5.0, 6.0, 7.0, 8.0]
    assert server.span("w").version == 6
    assert server.chunk(3).number == 3
    assert heard(open_of(server, 0), p.Done), "once it is made, OPEN is answered at once"
    server.server.check()


@pytest.mark.spec("R490")
def test_of_one_version_the_last_broadcast_counts() -> None:
    server = stage()
    tell(server, 0, KEY)
    give(server, 0, 2, [1.0, 2.0, 3.0, 4.0], 5, 1)
    give(server, 0, 2, [0.0, 0.0, 0.0, 0.0], 5, 0)
    open_of(server, 0)
    tell(server, 1)
    give(server, 1, 0, [7.0], 9)  # of a key that is no more
    open_of(server, 1)
    assert server.values("w") == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.spec("R491")
@pytest.mark.parametrize(
    ("told", "why"),
    [
        ({"reason": "it has embedding tables"}, "it has embedding tables"),
        ({"joins": 1}, "have ended a join that others have not"),
        ({}, "no worker holds the newest values of key 'w'"),
    ],
)
def test_all_are_refused_where_it_cannot_be_made(told: dict[str, object], why: str) -> None:
    server = stage()
    tell(server, 0, KEY)
    give(server, 0, 2, [1.0, 2.0], 5)
    give(server, 0, 5, [1.0], 5)
    open_of(server, 0)
    tell(server, 1, KEY, **told)  # type: ignore[arg-type]
    said = open_of(server, 1)
    assert [why in error.text for error in heard(said, p.Error)] == [True, True]


@pytest.mark.spec("R491")
@pytest.mark.parametrize(
    "told",
    [
        KEY._replace(pieces=(p.Piece(3, 2, 0),)),
        KEY._replace(pieces=(p.Piece(3, 1 << 40, 4),)),
        KEY._replace(key="v", pieces=(p.Piece(3, 4, 4),)),
    ],
)
def test_keys_that_no_server_has_had_are_refused(told: p.ToldKey) -> None:
    server = stage()
    tell(server, 0, KEY)
    tell(server, 0, told)
    open_of(server, 0)
    tell(server, 1)
    assert "cannot be made again" in heard(open_of(server, 1), p.Error)[0].text
    assert not server.server.context.stores
    assert not server.server.context.chunks.by_number


@pytest.mark.spec("R486")
@pytest.mark.parametrize(
    "options",
    [
        {"mode": "async"},
        {"quorum": 1},
        {"bundles": True},
        {"on_worker_lost": "shrink"},
        {"on_nonfinite": "skip"},
    ],
)
def test_stores_that_cannot_be_made_again_are_refused(options: dict[str, object]) -> None:
    given = {"mode": "sync", "bundles": False, "rebuilds": True, **options}
    server = ServerStage(2)
    assert "on_server_lost='rebuild' needs rounds of all workers" in refusal(server.say(0, opening(**given)))  # type: ignore[arg-type]


@pytest.mark.spec("R489")
def test_a_server_that_took_nobodys_place_makes_it_at_once_and_holds_nothing() -> None:
    server = ServerStage(2)
    tell(server, 0, KEY)
    give(server, 0, 2, [1.0, 2.0, 3.0, 4.0], 5)
    assert not server.server.control.rebuilds.held_bytes
    assert heard(open_of(server, 0), p.Done)


@pytest.mark.spec("R489")
def test_nothing_is_held_of_a_store_that_is_made() -> None:
    server = stage()
    for rank in (0, 1):
        tell(server, rank, KEY)
        give(server, rank, 2, [1.0, 2.0, 3.0, 4.0], 5)
        assert server.server.control.rebuilds.held_bytes == KEY_BYTES + 16
        open_of(server, rank)
    assert server.values("w") == [1.0, 2.0, 3.0, 4.0]
    assert not server.server.control.rebuilds.held_bytes
    tell(server, 0, KEY)
    give(server, 0, 2, [9.0, 9.0, 9.0, 9.0], 6)
    assert not server.server.control.rebuilds.held_bytes
    assert server.values("w") == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("number", [3, 4])
def test_chunks_of_others_are_not_replaced(number: int) -> None:
    server = stage()
    chunks = server.server.context.chunks
    chunks.servers = 2
    chunks.server = 1
    other = chunks.new("other", "float32", 8)
    other.append("x", 8)
    tell(server, 0, KEY._replace(pieces=(p.Piece(number, 2, 4),)))
    open_of(server, 0)
    tell(server, 1)
    assert f"chunk {number} of store 'kv' cannot be here" in heard(open_of(server, 1), p.Error)[0].text
    assert chunks.by_number == {3: other}


@pytest.mark.spec("R491")
def test_a_rank_that_has_left_takes_its_last_pushes_along() -> None:
    server = stage()
    tell(server, 0, KEY, waits=True)
    give(server, 0, 2, [1.0, 2.0, 3.0, 4.0], 5)
    open_of(server, 0)
    said = server.show(w1="left")
    assert "worker 1 has left" in heard(said, p.Error)[0].text


@pytest.mark.spec("R491")
@pytest.mark.parametrize("limit", [KEY_BYTES - 1, KEY_BYTES + 15])
def test_without_room_nothing_is_made(limit: int) -> None:
    server = ServerStage(1, memory_limit=limit)
    server.server.control.rebuilds.is_on = True
    tell(server, 0, KEY)
    give(server, 0, 2, [1.0, 2.0, 3.0, 4.0], 5)
    said = heard(open_of(server, 0), p.Error)[0].text
    assert "cannot be made again" in said
    assert f"it takes more than the {limit} bytes of the server's memory limit" in said
    assert not server.server.context.stores
    assert not server.server.control.rebuilds.held_bytes
