"""A worker tells all servers and the scheduler of a store that it has closed, and counts the lives of a name."""

import pytest
import torch

from kvps.core.membership_client import EXIT_CONFIG
from kvps.core.worker import calls, closed_stores
from kvps.core.worker.closed_stores import AGAIN_S, ClosedStores
from kvps.errors import ConfigError, Timeout
from kvps.protocol.membership import Barrier, Done, Error, Released
from kvps.protocol.stores import Close, Closed, Open, StoreLife
from kvps.protocol.values import Push
from tests.support.worker_harness import Bench, opened, pull, push

KV = (StoreLife("kv", 0),)


def bench(**more: object) -> Bench:
    worker = Bench(**more)  # type: ignore[arg-type]
    worker.open()
    worker.init({"w": torch.zeros(4)})
    return worker


def close(worker: Bench, name: str = "kv") -> None:
    worker.take(worker.core.on_close(name, worker.now))


def routes(worker: Bench, since: int = 0) -> list[object]:
    return [send.to for send in worker.sends(Close)[since:]]


@pytest.mark.spec("R418")
def test_close_is_said_until_all_have_answered() -> None:
    worker = bench()
    close(worker)
    assert routes(worker) == ["scheduler", "server 0", "server 1"]
    assert set(worker.sent(Close)) == {Close(KV)}
    worker.scheduler(Closed(KV))
    worker.server(0, Closed(KV))
    worker.server(0, Closed((StoreLife("kv", 7), StoreLife("other", 0))))
    worker.wait(AGAIN_S)
    assert routes(worker, 3) == ["server 1"]
    worker.server(1, Closed(KV))
    worker.wait(3 * AGAIN_S)
    assert len(worker.sent(Close)) == 4
    assert "kv" not in worker.core.stores
    assert worker.core.figures("kv") == {"epoch": 0}


def test_process_whose_store_has_ended_is_not_worth_a_restart() -> None:
    worker = bench()
    close(worker)
    ticket = worker.call(calls.OpenStore("kv", opened(), 240.0))
    for server in (0, 1):
        worker.server(server, Error(worker.seqs(Open, server)[-1], ConfigError.code, "its values are gone"))
    error = worker.error(ticket)
    assert isinstance(error, ConfigError)
    assert error.exit_code == EXIT_CONFIG


@pytest.mark.spec("R416", "R417")
def test_a_store_that_is_created_again_is_in_its_next_life() -> None:
    worker = bench()
    close(worker)
    ticket = worker.call(calls.OpenStore("kv", opened(), 240.0))
    assert [message.life for message in worker.sent(Open)] == [0, 0, 1, 1]
    for server in (0, 1):
        worker.server(server, Done(worker.seqs(Open, server)[-1]))
    end = worker.finish(ticket)
    assert end is not None
    assert end.value == 0
    worker.call(calls.StandAtBarrier("kv", None))
    assert worker.sent(Barrier) == [Barrier("kvps.life-1.kv", "", 0)]
    worker.scheduler(Released(worker.seqs(Barrier)[-1]))
    close(worker)
    assert worker.sent(Close)[-3:] == [
        Close((StoreLife("kvps.life-1.kv", 1),)),
        *[Close((StoreLife("kv", 1),))] * 2,
    ]
    worker.scheduler(Closed((StoreLife("kvps.life-1.kv", 1),)))
    worker.wait(AGAIN_S)
    assert routes(worker)[-2:] == ["server 0", "server 1"]


def test_store_is_closed_when_the_calls_of_the_user_are_over() -> None:
    worker = bench()
    ticket = worker.call(pull({"w": torch.zeros(4)}))
    close(worker)
    assert not worker.sent(Close)
    worker.wait(5.0)
    assert "kv" in worker.core.stores
    worker.wait(400.0)
    assert isinstance(worker.error(ticket), Timeout)
    assert worker.sent(Close)
    assert "kv" not in worker.core.stores


def test_store_is_closed_by_the_answer_that_ends_the_last_call() -> None:
    worker = bench()
    seqs = len(worker.seqs(Push, 0)), len(worker.seqs(Push, 1))
    ticket = worker.call(push({"w": torch.ones(4)}))
    close(worker)
    assert not worker.sent(Close)
    for server, since in enumerate(seqs):
        for seq in worker.seqs(Push, server)[since:]:
            worker.ack(server, seq)
    assert worker.is_done(ticket)
    assert worker.sent(Close)


def test_calls_under_way_end_when_the_store_is_created_again() -> None:
    worker = bench()
    ticket = worker.call(pull({"w": torch.zeros(4)}))
    late = worker.call(calls.StandAtBarrier("kv", "b"), timeout_s=1.0)
    worker.wait(1.5)
    assert isinstance(worker.error(late), Timeout)
    close(worker)
    worker.call(calls.OpenStore("kv", opened(), 240.0))
    assert isinstance(worker.error(ticket), ConfigError)
    assert "store 'kv' was closed, and created again" in str(worker.error(ticket))
    assert not [note for note in worker.notes() if "after its Timeout" in note]
    worker.scheduler(Released(worker.seqs(Barrier)[-1]))


def test_a_call_of_a_closed_store_is_refused() -> None:
    worker = bench()
    close(worker)
    error = worker.error(worker.call(calls.Flush("kv")))
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
    worker = bench()
    worker.core.table.links[1].ready = False
    close(worker)
    assert routes(worker) == ["scheduler", "server 0"]
    worker.core.table.links[1].ready = True
    worker.wait(AGAIN_S)
    assert "server 1" in routes(worker)


def test_a_server_says_so_in_parts() -> None:
    known = ClosedStores()
    known.close("a", 0, 1)
    known.close("b", 0, 1)
    known.hear(0, (StoreLife("a", 0),))
    assert [message.stores for server, message in known.letters(0.0) if server == 0] == [(StoreLife("b", 0),)]
