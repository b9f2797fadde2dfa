"""Pushes and pulls of dense keys: one message per chunk, and what the answers end."""

import numpy as np
import pytest
import torch

import kvps
from kvps.core.worker import calls, connection
from kvps.core.worker.calls.dense import PushValues, unshare
from kvps.core.worker.plan import MANY, Placed, make
from kvps.errors import KeyNotFound, NonFinite, Timeout
from kvps.protocol.stores import Declare, Declared, Find, Found, FoundAll, Piece, Place
from kvps.protocol.values import Dropped, Pull, Pulled, Push, Stand
from kvps.runtime.ticket import Ticket
from tests.support.worker_harness import Bench, Readable, pull, push, values_of
from tests.support.worker_with_key import FLOAT, HOT, bench, chunk, pulled, ready

VIEWS = calls.Views.VIEWS


def looked_up(worker: Bench, names: list[str], size: int) -> None:
    """Look up keys of one size, which lie side by side in one chunk on each server."""
    ticket = worker.call(calls.Lookup("kv", tuple(names)))
    for server in (0, 1):
        found = tuple(Found(FLOAT, (size,)) for _ in worker.sent(Find, server)[0].keys)
        worker.server(server, FoundAll(worker.seqs(Find, server)[0], found))
    for server in (0, 1):
        entries = worker.sent(Declare, server)[0].entries
        places = tuple(Place(False, (Piece(1, at * size, size),)) for at in range(len(entries)))
        worker.server(server, Declared(worker.seqs(Declare, server)[0], places))
    assert worker.is_done(ticket)


class TestPush:
    def test_a_thousand_keys_are_a_handful_of_messages(self) -> None:
        worker = bench()
        names = [f"k{index}" for index in range(1000)]
        looked_up(worker, names, 1)
        worker.call(push({name: torch.zeros(1) for name in names}))
        worker.call(pull({name: torch.zeros(1) for name in names}))
        assert [len(worker.sent(Push)), len(worker.sent(Pull))] == [2, 2]
        assert {len(message.runs) for message in worker.sent(Push)} == {1}

    def test_an_unknown_key_is_an_error(self) -> None:
        worker = bench()
        assert isinstance(worker.error(worker.call(push({"w": HOT}))), KeyNotFound)


class TestAllocate:
    def test_a_push_of_them_copies_nothing(self) -> None:
        memory = Readable("server 0", "server 1")
        worker = ready(memory=memory)
        end = worker.finish(worker.call(calls.Allocate("kv", ("w",))))
        assert end is not None
        (row,) = end.value  # type: ignore[misc]
        row.copy_(HOT)
        before = len(memory.blocks)
        worker.call(push({"w": row}))
        row[0] = 99
        assert [values_of(send) for send in worker.sends(Push)] == [[99, *range(1, 16)], [*range(16, 40)]]
        worker.call(push({"w": HOT}))
        assert len(memory.blocks) == before + 2

    @pytest.mark.parametrize("routes", [("server 0", "server 1"), ("server 0",), ()])
    def test_gives_nothing_that_a_server_would_be_sent_a_copy_of(self, routes: tuple[str, ...]) -> None:
        """``w`` lies on both servers, ``b`` on one of them."""
        worker = ready(memory=Readable(*routes))
        worker.init({"b": torch.zeros(2, 3, dtype=torch.int16)})
        home = worker.core.stores["kv"].keys["b"].pieces[0].server
        end = worker.finish(worker.call(calls.Allocate("kv", ("b", "w"), is_lent=True)))
        assert end is not None
        b, w = end.value  # type: ignore[misc]
        assert (w is not None) == (len(routes) == 2)
        assert (b is not None) == (f"server {home}" in routes)

    def test_of_an_unknown_key_is_an_error(self) -> None:
        worker = bench()
        assert isinstance(worker.error(worker.call(calls.Allocate("kv", ("w",)))), KeyNotFound)


def test_keys_are_located_by_the_chunks_of_their_pieces() -> None:
    worker = ready()
    worker.init({"b": torch.zeros(2, 3, dtype=torch.int16), "nothing": torch.zeros(0)})
    end = worker.finish(worker.call(calls.Locate("kv", ("w", "b", "nothing"))))
    assert end is not None
    keys = worker.core.stores["kv"].keys
    expected = [{piece[:2] for piece in keys[name].pieces} for name in ("w", "b", "nothing")]
    assert end.value == expected
    assert [len(chunks) for chunks in expected] == [2, 1, 0]


class TestViews:
    def test_of_a_push_and_pull_with_what_lags_read_again(self) -> None:
        worker = ready()
        ticket = worker.call(push({"w": HOT}, sinks=VIEWS, eager=False))
        pulled(worker, worker.seqs(Push, 0)[0], 0, 2, 5.0)
        pulled(worker, worker.seqs(Push, 1)[0], 1, 1, 4.0)
        pulled(worker, worker.seqs(Pull, 1)[0], 1, 2, 5.0)
        end = worker.finish(ticket)
        assert end is not None
        (view,) = end.value  # type: ignore[misc]
        assert view.tolist() == [5.0] * 40

    @pytest.mark.parametrize("first", [(), (0,), (1,)])
    def test_views_of_a_timed_out_push_are_dropped(self, first: tuple[int, ...]) -> None:
        """The push stands, and ends when all values are there, as if they had been wanted."""
        worker = ready()
        ticket = worker.call(push({"w": HOT}, sinks=VIEWS, eager=False), 5.0)
        for server in first:
            pulled(worker, worker.seqs(Push, server)[0], server, 1)
        worker.wait(5.0)
        assert isinstance(worker.error(ticket), Timeout)
        for server in {0, 1} - set(first):
            pulled(worker, worker.seqs(Push, server)[0], server, 1)
        assert worker.core.stores["kv"].key("w").applied == 1
        assert not worker.core.table.pending


def told(worker: Bench, seq: int, server: int, version: int, *rounds: int, owed: int | None = None) -> None:
    """Answer a pull of ``w``, and name the last of these rounds as dropped."""
    size = (16, 24)[server]
    dropped = tuple(Dropped(0, number, 2, (3,)) for number in rounds[-1:])
    runs = (Stand(0, size, version, version if owed is None else owed),)
    answer = Pulled(seq, chunk(worker, server), FLOAT, True, runs, dropped)
    worker.server(server, answer, torch.full((size,), 5.0))


class TestDropped:
    @pytest.mark.spec("R107")
    def test_a_pushpull_raises_for_its_round_and_the_next_ones_go_on(self) -> None:
        worker = ready()
        for number, rounds in enumerate([(), (1,), (1,), (1, 3)]):
            sink = torch.zeros(40)
            ticket = worker.call(push({"w": HOT}, sinks=(sink,)))
            for server in (1, 0):
                assert worker.finish(ticket) is None
                told(worker, worker.seqs(Push, server)[-1], server, number + 1, *rounds)
            if number in (1, 3):
                text = f"round {number} of key 'w' was dropped: 2 values of key 'w' are not finite"
                assert isinstance(worker.error(ticket), NonFinite)
                assert text in str(worker.error(ticket))
            else:
                assert worker.is_done(ticket)
            assert sink.unique().tolist() == [5.0]  # what was kept is there all the same
        assert worker.core.stores["kv"].key("w").is_refused is False

    def test_parts_that_wait_for_this_very_rank_are_taken_as_they_are(self) -> None:
        worker = ready()  # its predecessor has pushed to the second server only
        ticket = worker.call(pull({"w": torch.zeros(40)}))
        told(worker, worker.seqs(Pull, 0)[-1], 0, 1)
        told(worker, worker.seqs(Pull, 1)[-1], 1, 2)
        assert worker.is_done(ticket)


def test_many_small_values_are_copied_before_any_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is written where the next one lies, and the second server's are sent after the first has answered."""
    monkeypatch.setattr(connection, "UPLINK_BYTES", 0)
    monkeypatch.setattr(connection, "UPLINK_LEAST", 1)
    worker = bench()
    names = [f"k{index}" for index in range(8 * MANY)]
    rows = [torch.rand(4) for _ in names]
    looked_up(worker, names, 4)
    before, plan = torch.stack(rows), worker.core.stores["kv"].plan(tuple(names))
    assert len(plan.shares) == 2
    worker.call(push(dict(zip(names, rows, strict=True)), sinks=(*rows[1:], rows[0]), eager=False))
    assert len(worker.sends(Push)) == 1
    for row in rows:
        row.fill_(-1.0)
    first = plan.shares[0]
    runs = tuple([Stand(start, size, 1, 1) for start, size in first.blocks])
    seq = worker.seqs(Push, first.server)[0]
    worker.server(first.server, Pulled(seq, first.chunk, FLOAT, True, runs), torch.full((first.size,), 5.0))
    for share, send in zip(plan.shares, worker.sends(Push), strict=True):
        keys = [segment.key for segment in share.segments]
        assert values_of(send) == before[keys].view(-1).tolist()
        written = {rows[(key + 1) % len(rows)].unique().item() for key in keys}
        assert written == ({5.0} if share is first else {-1.0})


def test_values_are_copied_where_others_of_their_call_are_written():
    memory = torch.arange(12.0)
    first, two, three = memory[:4], memory[4:8], memory[8:]
    empty = memory[2:2]
    for values, sinks, copied in [
        ([first], [first], []),
        ([first], [two], []),
        ([first], [memory[1:5]], [0]),
        ([two], [memory[3:7]], [0]),
        ([first, two], [first, two], []),  # each where it is
        ([first, two], [three, torch.empty(4)], []),
        ([first, two], [two, first], [0, 1]),
        ([first, first], [first, two], [1]),
        ([first, two, three], [memory[2:6], torch.empty(4), three], [0, 1]),
        ([first, empty, two], [two, empty, torch.empty(4)], [2]),
        ([empty, first], [memory[1:1], first], []),
        ([first, two, three], [first, torch.empty(4), memory[2:6]], [0, 1]),
    ]:
        given = list(values)
        unshare(given, sinks, np.array([sink.nbytes for sink in sinks]))
        assert [at for at, (a, b) in enumerate(zip(given, values, strict=True)) if a is not b] == (copied)
        assert all(torch.equal(*pair) for pair in zip(given, values, strict=True))


class TestManySmallRows:
    """They are read and written by their addresses, while their caller waits."""

    def test_an_interrupted_caller_may_give_its_tensors_other_memory(self, monkeypatch) -> None:
        names = [f"k{at}" for at in range(MANY)]
        values, out = [torch.randn(3) for _ in names], [torch.zeros(3) for _ in names]
        begun: list[PushValues] = []

        def interrupt(ticket: Ticket) -> None:
            raise KeyboardInterrupt

        with kvps.create("local") as kv:
            kv.init(names, values)
            kv.pushpull(names, values, out=out)
            assert all(map(torch.equal, out, values))
            start = kv._start
            monkeypatch.setattr(
                kv, "_start", lambda call, limit_s: begun.append(call) or start(call, limit_s)
            )
            with monkeypatch.context() as patch:
                patch.setattr(Ticket, "wait", interrupt)
                with pytest.raises(KeyboardInterrupt):
                    kv.pushpull(names, values, out=out)
        call = begun[0]
        assert isinstance(call.rows, Placed)
        assert isinstance(call.sinks, Placed)
        assert call.rows.starts is call.sinks.starts is None

    def test_values_without_addresses_have_none_to_forget(self) -> None:
        call = PushValues("kv", ("a",), (torch.randn(2),), None, 0, False)
        call.forget_places()
        assert type(call.rows) is tuple

    def test_a_plan_of_no_keys_has_no_progress(self) -> None:
        plan = make([])
        assert plan.joint() is None
        assert not plan.apart()
