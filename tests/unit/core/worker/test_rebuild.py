"""A worker keeps the values that it is told, and gives them to a server that has taken another's place."""

import pytest
import torch

from kvps.core.worker import calls
from kvps.core.worker.call_table import PendingCall
from kvps.core.worker.connection import Connection, Request
from kvps.core.worker.kept_values import Held, KeptValues
from kvps.core.worker.plan import ANY, Key, PieceLocation, make
from kvps.core.worker.rebuild import ServerReturns, keep_values, why_not
from kvps.core.worker.store import WorkerStore
from kvps.dtypes import Spec
from kvps.protocol.membership import Member
from kvps.protocol.stores import Open, Tell
from kvps.protocol.values import Run


def key(name: str, start: int, chunk: int = 1) -> Key:
    return Key(name, Spec("float32", (2,)), (PieceLocation(0, chunk, start, 2, 0),))


def held(*keys: Key, version: int = 0) -> Held:
    (share,) = make(keys).shares
    runs = tuple([Run(start, size, version) for start, size in share.blocks])
    return Held(share, 0, runs, torch.zeros(share.size))


@pytest.mark.spec("R487")
def test_values_take_the_place_of_older_ones_that_they_cover() -> None:
    kept, first, second = KeptValues(), key("a", 0), key("b", 4)
    kept.keep(held(first, version=1))
    kept.keep(held(second, version=1))
    kept.keep(held(second, version=2))
    assert kept.versions(0) == {(1, 0): 1, (1, 4): 2}
    kept.keep(held(first, second, version=3))
    assert len(list(kept.of(0))) == 1, "older values are held beside those that cover them"
    kept.keep(held(first, version=4))
    assert kept.versions(0) == {(1, 0): 4, (1, 4): 3}
    assert not list(kept.of(1))
    kept.clear()
    assert not kept.versions(0)


@pytest.mark.spec("R487")
def test_loaded_values_are_kept_as_they_were() -> None:
    kept, item = KeptValues(), key("a", 0)
    rows = [torch.tensor([1.0, 2.0])]
    kept.keep_loaded(make([item]), rows, ANY, 3)
    rows[0].fill_(9.0)
    (found,) = kept.of(0)
    assert (found.broadcasts, found.runs) == (3, (Run(0, 2, 0),))
    assert isinstance(found.frame, torch.Tensor)
    assert found.frame.tolist() == [1.0, 2.0]


@pytest.mark.spec("R492")
def test_reasons_for_which_a_store_cannot_be_made_again() -> None:
    store = WorkerStore(Open("kv", "sync", 0, False, "wait", 9, rebuilds=True), 0, 1, 1.0)
    keep_values(store)
    join = calls.JoinStore("kv")
    assert why_not(store, 0, [calls.JoinStore("other")]) == ""
    assert why_not(store, 0, [join]) == "worker 0 had joined"
    store.is_away = True
    assert why_not(store, 0, []) == "worker 0 had joined"
    store.keys["kvps.embedding:t"] = key("kvps.embedding:t", 0)
    assert why_not(store, 0, []) == "it has embedding tables"
    store.feedback.is_on = True
    assert why_not(store, 0, []) == "its values travel compressed"


def test_values_from_before_a_rollback_are_given_to_nobody() -> None:
    store = WorkerStore(Open("kv", "sync", 0, False, "wait", 9, rebuilds=True), 0, 1, 1.0)
    keep_values(store)
    assert store.kept is not None
    store.kept.keep(held(key("a", 0), version=1))
    store.forget()
    assert not store.kept.versions(0)


def test_a_server_that_is_lost_again_is_told_anew() -> None:
    store = WorkerStore(Open("kv", "sync", 0, False, "wait", 9, rebuilds=True), 0, 1, 1.0)
    keep_values(store)
    returns, link = ServerReturns({"kv": store}), Connection("server 0", "", 1)
    waiting = Request(0, Tell("kv", 0, "", False, ()))
    waiting.dropped = True
    link.outstanding[1] = waiting
    returns.leave(link, member(2), 0)
    assert returns.forsake(member(2), []) == []
    (call,) = returns.begin(0, [])
    assert returns.begin(0, []) == [], "a second WELCOME changes nothing"
    operation = call.run(store, [])
    telling = PendingCall(-1, call, operation, [], 9.0)
    returns.leave(link, member(3), 0)
    assert returns.forsake(member(3), [telling]) == [telling]
    assert returns.begin(0, []) == [call]
    returns.end(0, "kv")
    returns.resume(0, link)
    assert (link.ready, link.is_returning, link.incarnation) == (True, False, 3)
    assert link.head() is None, "what nobody waits for is not sent again"


def member(incarnation: int) -> Member:
    return Member(1, 0, incarnation, "held", f"tcp://s:{incarnation}", "host", 0.0, "")
