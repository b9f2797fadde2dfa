"""A worker tells all servers and the scheduler of a store that it has closed, and counts the lives of a name."""

import pytest
import torch

from kvps.core.worker import calls, closed_stores
from kvps.core.worker.closed_stores import AGAIN_S, ClosedStores
from kvps.errors import ConfigError, Timeout
from kvps.protocol.membership import Barrier, Done, Released
from kvps.protocol.stores import Close, Closed, Open, StoreLife
from kvps.protocol.values import Push
from tests.support.worker_harness import Bench, opened, pull, push

KV = (StoreLife("kv", 0),)


def bench(**more: object) -> Bench:
    one = Bench(**more)  # type: ignore[arg-type]
    one.open()
    one.init({"w": torch.zeros(4)})
    return one


def close(one: Bench, name: str = "kv") -> None:
    one.take(one.core.on_close(name, one.now))


def routes(one: Bench, since: int = 0) -> list[object]:
    return [send.to for send in one.sends(Close)[since:]]


@pytest.mark.spec("R418")
def test_close_is_said_until_all_have_answered() -> None:
    one = bench()
    close(one)
    assert routes(one) == ["scheduler", "server 0", "server 1"]
    assert set(one.sent(Close)) == {Close(KV)}
    one.scheduler(Closed(KV))
    one.server(0, Closed(KV))
    one.server(0, Closed((StoreLife("kv", 7), StoreLife("other", 0))))
    one.wait(AGAIN_S)
    assert routes(one, 3) == ["server 1"]
    one.server(1, Closed(KV))
    one.wait(3 * AGAIN_S)
    assert len(one.sent(Close)) == 4
    assert "kv" not in one.core.stores
    assert one.core.figures("kv") == {"epoch": 0}


@pytest.mark.spec("R416", "R417")
def test_a_store_that_is_created_again_is_in_its_next_life() -> None:
    one = bench()
    close(one)
    ticket = one.call(calls.OpenStore("kv", opened(), 240.0))
    assert [message.life for message in one.sent(Open)] == [0, 0, 1, 1]
    for server in (0, 1):
        one.server(server, Done(one.seqs(Open, server)[-1]))
    end = one.finish(ticket)
    assert end is not None
    assert end.value == 0
    one.call(calls.StandAtBarrier("kv", None))
    assert one.sent(Barrier) == [Barrier("kvps.life-1.kv", "", 0)]
    one.scheduler(Released(one.seqs(Barrier)[-1]))
    close(one)
    assert one.sent(Close)[-3:] == [
        Close((StoreLife("kvps.life-1.kv", 1),)),
        *[Close((StoreLife("kv", 1),))] * 2,
    ]
    one.scheduler(Closed((StoreLife("kvps.life-1.kv", 1),)))
    one.wait(AGAIN_S)
    assert routes(one)[-2:] == ["server 0", "server 1"]


def test_store_is_closed_when_the_calls_of_the_user_are_over() -> None:
    one = bench()
    ticket = one.call(pull({"w": torch.zeros(4)}))
    close(one)
    assert not one.sent(Close)
    one.wait(5.0)
    assert "kv" in one.core.stores
    one.wait(400.0)
    assert isinstance(one.error(ticket), Timeout)
    assert one.sent(Close)
    assert "kv" not in one.core.stores


def test_store_is_closed_by_the_answer_that_ends_the_last_call() -> None:
    one = bench()
    seqs = len(one.seqs(Push, 0)), len(one.seqs(Push, 1))
    ticket = one.call(push({"w": torch.ones(4)}))
    close(one)
    assert not one.sent(Close)
    for server, since in enumerate(seqs):
        for seq in one.seqs(Push, server)[since:]:
            one.ack(server, seq)
    assert one.is_done(ticket)
    assert one.sent(Close)


def test_calls_under_way_end_when_the_store_is_created_again() -> None:
    one = bench()
    ticket = one.call(pull({"w": torch.zeros(4)}))
    late = one.call(calls.StandAtBarrier("kv", "b"), timeout_s=1.0)
    one.wait(1.5)
    assert isinstance(one.error(late), Timeout)
    close(one)
    one.call(calls.OpenStore("kv", opened(), 240.0))
    assert isinstance(one.error(ticket), ConfigError)
    assert "store 'kv' was closed, and created again" in str(one.error(ticket))
    assert not [note for note in one.notes() if "after its Timeout" in note]
    one.scheduler(Released(one.seqs(Barrier)[-1]))


def test_a_call_of_a_closed_store_is_refused() -> None:
    one = bench()
    close(one)
    error = one.error(one.call(calls.Flush("kv")))
    assert "store 'kv' is closed; create another store" in str(error)


def test_not_more_is_remembered_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closed_stores, "KNOWN_MAX", 2)
    monkeypatch.setattr(closed_stores, "BATCH", 2)
    known = ClosedStores()
    for name in ("a", "b", "c"):
        known.close(name, 0, 0)
    assert list(known.lives) == ["b", "c"]
    assert [len(message.stores) for _, message in known.letters(0.0)] == [2, 1]


def test_a_server_that_has_not_said_welcome_is_told_later() -> None:
    one = bench()
    one.core.table.links[1].ready = False
    close(one)
    assert routes(one) == ["scheduler", "server 0"]
    one.core.table.links[1].ready = True
    one.wait(AGAIN_S)
    assert "server 1" in routes(one)


def test_a_server_says_so_in_parts() -> None:
    known = ClosedStores()
    known.close("a", 0, 1)
    known.close("b", 0, 1)
    known.hear(0, (StoreLife("a", 0),))
    assert [message.stores for server, message in known.letters(0.0) if server == 0] == [(StoreLife("b", 0),)]
