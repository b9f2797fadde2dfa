"""What each call asks of the servers, in which order."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvps.compression.policy import rules_of
from kvps.core.optim.hyperparams import resolve
from kvps.core.placement import home
from kvps.core.worker import calls
from kvps.core.worker.calls.dense import unshare
from kvps.dtypes import BY_NAME, Spec
from kvps.errors import ConfigError, KeyNotFound, Mismatch, NonFinite, Timeout, WorkerLost
from kvps.protocol.envelope import ENTRIES_MAX, WINDOW, Message, Node, Role
from kvps.protocol.membership import (
    Barrier,
    Done,
    Error,
    History,
    HistoryIs,
    Join,
    Joined,
    Released,
    Resume,
    Resumed,
    Return,
    Trait,
)
from kvps.protocol.stores import (
    Declare,
    Declared,
    Entry,
    Field,
    Find,
    Found,
    FoundAll,
    GetState,
    Open,
    Optimize,
    Piece,
    Place,
    Rate,
    SetState,
    StateIs,
    Status,
    StatusIs,
)
from kvps.protocol.values import Ask, Dropped, Load, Pull, Pulled, Push, Run, Stand
from kvps.tensors import PRIVATE, Memory
from tests.support.worker_harness import (
    Bench,
    Readable,
    member,
    opened,
    part_servers,
    pull,
    push,
    server_of,
    spec,
    values_of,
)

VIEWS = calls.Views.VIEWS
FLOAT = BY_NAME["float32"].id
HOT = torch.arange(40.0)
"""A value that is cut over both servers."""


def bench(rank: int = 0, memory: Memory = PRIVATE, **options: object) -> Bench:
    one = Bench(rank=rank, memory=memory)
    one.open(**options)
    return one


def ready(rank: int = 0, memory: Memory = PRIVATE, **options: object) -> Bench:
    """With one key, ``w``, of which server 0 has 16 elements and server 1 the other 24."""
    one = bench(rank, memory, **options)
    one.init({"w": HOT})
    return one


def chunk(one: Bench, server: int) -> int:
    """The chunk of ``w`` on a server."""
    return one.core.stores["kv"].key("w").pieces[server].chunk


def stood(one: Bench, seq: int, server: int, version: int, owed: int = 0) -> None:
    """Answer a pull of ``w`` without values."""
    size = (16, 24)[server]
    runs = (Stand(0, size, version, owed),)
    one.server(server, Pulled(seq, chunk(one, server), FLOAT, False, runs))


def pulled(one: Bench, seq: int, server: int, version: int, value: float = 0.0) -> None:
    """Answer a pull of ``w``."""
    size = (16, 24)[server]
    runs = (Stand(0, size, version, 0),)
    answer = Pulled(seq, chunk(one, server), FLOAT, True, runs)
    one.server(server, answer, torch.full((size,), value))


def answer_all(one: Bench, cls: type[Message], make: type[Done]) -> None:
    """Answer the newest request of a class on each server."""
    for server in range(one.servers):
        one.server(server, make(one.seqs(cls, server)[-1]))


class TestOpen:
    def test_tells_every_server(self) -> None:
        one = Bench(servers=3)
        ticket = one.call(calls.OpenStore("kv", opened(), 60.0))
        assert one.sent(Open) == [opened()] * 3
        one.server(0, Done(1))
        one.server(1, Done(1))
        assert one.finish(ticket) is None
        one.server(2, Done(1))
        assert one.is_done(ticket)

    def test_again_keeps_what_was_counted(self) -> None:
        one = ready()
        one.call(push({"w": HOT}))
        one.open(worker_grace_s=5.0)
        assert one.core.stores["kv"].key("w").number == 1
        assert one.core.stores["kv"].worker_grace_s == 5.0

    def test_refused_options_do_not_stick(self) -> None:
        one = bench()
        ticket = one.call(calls.OpenStore("kv", opened(mode="async"), 60.0))
        one.server(0, Error(one.seqs(Open, 0)[-1], Mismatch.code, "mode differs"))
        assert isinstance(one.error(ticket), Mismatch)
        assert one.core.stores["kv"].ordered


class TestInit:
    def test_rank_0_declares_and_loads(self) -> None:
        one = bench()
        home = part_servers("b", 2)[0]
        values = {"w": HOT, "b": torch.tensor([7.0, 8.0])}
        keys = (("w", spec(40)), ("b", spec(2)))
        ticket = one.call(calls.Init("kv", keys, tuple(values.values())))
        entries = [
            [Entry("w", FLOAT, (40,), 0, 16)],
            [Entry("w", FLOAT, (40,), 16, 24)],
        ]
        entries[home].append(Entry("b", FLOAT, (2,), 0, 2))
        for server in (0, 1):
            assert one.sent(Declare, server) == [Declare("kv", True, 0, tuple(entries[server]))]
        for server in (0, 1):
            size = (16, 24)[server]
            places = [Place(True, (Piece(5, 0, 8), Piece(6, 0, size - 8)))]
            places += [Place(True, (Piece(6, size - 8, 2),))] * (server == home)
            one.server(server, Declared(one.seqs(Declare, server)[0], tuple(places)))
        loads = one.sends(Load)
        assert {(server_of(it), it.packet.message.chunk) for it in loads} == {  # type: ignore[attr-defined]
            (0, 5),
            (1, 5),
            (0, 6),
            (1, 6),
        }
        (last,) = [it for it in loads if it.packet.message.chunk == 6 and server_of(it) == home]  # type: ignore[attr-defined]
        size = (16, 24)[home] - 8
        assert last.packet.message == Load(6, FLOAT, (Run(0, size + 2, 0),))
        begin = (8, 24)[home]
        assert values_of(last) == [*range(begin, begin + size), 7, 8]
        for server in (0, 1):
            assert one.finish(ticket) is None
            one.ack(server, *one.seqs(Load, server))
        assert one.is_done(ticket)

    def test_a_key_is_not_known_before_its_value_is_in(self) -> None:
        """Else an init that is made again after a Timeout would be done too soon."""
        one = bench()
        init = calls.Init("kv", (("w", spec(40)),), (HOT,))
        one.call(init)
        for server in (0, 1):
            place = Place(True, (Piece(1, 0, (16, 24)[server]),))
            one.server(server, Declared(one.seqs(Declare, server)[0], (place,)))
        assert len(one.sent(Load)) == 2
        again = one.call(init)
        assert len(one.sent(Declare)) == 4
        assert one.finish(again) is None

    def test_others_wait_until_it_is_there(self) -> None:
        one = bench(rank=1)
        ticket = one.call(calls.Init("kv", (("w", spec(40)),), (HOT,)))
        assert {message.create for message in one.sent(Declare)} == {False}
        for server in (0, 1):
            place = Place(False, (Piece(1, 0, (16, 24)[server]),))
            one.server(server, Declared(one.seqs(Declare, server)[0], (place,)))
        assert one.is_done(ticket)
        assert not one.sent(Load)

    def test_another_rank_creates_if_the_call_names_it(self) -> None:
        keys = (("b", spec(2)),)
        home = part_servers("b", 2)[0]
        maker, other = bench(rank=1), bench(rank=0)
        for one, is_maker in ((maker, True), (other, False)):
            ticket = one.call(calls.Init("kv", keys, (torch.ones(2),), 1))
            entry = Entry("b", FLOAT, (2,), 0, 2)
            assert one.sent(Declare, home) == [Declare("kv", is_maker, 0, (entry,), 1)]
            place = Place(is_maker, (Piece(5, 0, 2),))
            one.server(home, Declared(one.seqs(Declare, home)[0], (place,)))
            assert len(one.sent(Load)) == is_maker
            assert one.is_done(ticket) is not is_maker, "the maker waits for the ACK of its LOAD"

    def test_a_known_key_is_left_alone(self) -> None:
        one = ready()
        before = len(one.effects)
        assert one.is_done(one.call(calls.Init("kv", (("w", spec(40)),), (HOT,))))
        other = one.call(calls.Init("kv", (("w", spec(9)),), (HOT,)))
        assert isinstance(one.error(other), Mismatch)
        assert "is float32[40] and cannot be initialised as float32[9]" in str(one.error(other))
        assert len(one.effects) == before + 2

    def test_new_keys_go_with_their_own_values(self) -> None:
        one = ready()
        ticket = one.call(calls.Init("kv", (("w", spec(40)), ("v", spec(2))), (HOT, torch.ones(2))))
        home = part_servers("v", 2)[0]
        place = Place(True, (Piece(9, 0, 2),))
        one.server(home, Declared(one.seqs(Declare, home)[-1], (place,)))
        (load,) = one.sends(Load)
        assert values_of(load) == [1, 1]
        one.ack(home, *one.seqs(Load))
        assert one.is_done(ticket)

    def test_many_keys_are_declared_in_batches(self) -> None:
        one = Bench(servers=1)
        one.open()
        keys = {f"k{index}": torch.zeros(1) for index in range(ENTRIES_MAX + 1)}
        one.init(keys)
        assert [len(message.entries) for message in one.sent(Declare)] == [ENTRIES_MAX, 1]
        assert len(one.core.stores["kv"].keys) == ENTRIES_MAX + 1

    def test_a_key_without_elements_is_declared_too(self) -> None:
        one = bench()
        one.init({"nothing": torch.zeros(0)})
        assert one.is_done(one.call(push({"nothing": torch.zeros(0)})))
        assert one.is_done(one.call(pull({"nothing": torch.zeros(0)})))
        versions = one.call(calls.Versions("kv", ("nothing",)))
        assert one.finish(versions).value == [0]  # type: ignore[union-attr]


class TestPush:
    def test_one_message_for_each_chunk(self) -> None:
        one = ready()
        ticket = one.call(push({"w": HOT}))
        assert one.sent(Push) == [
            Push(chunk(one, 0), FLOAT, (0,), 1.0, False, (Run(0, 16, 0),)),
            Push(chunk(one, 1), FLOAT, (0,), 1.0, False, (Run(0, 24, 0),)),
        ]
        assert [values_of(send) for send in one.sends(Push)] == [
            [*range(16)],
            [*range(16, 40)],
        ]
        one.ack(0, *one.seqs(Push, 0))
        assert one.finish(ticket) is None
        one.ack(1, *one.seqs(Push, 1))
        assert one.is_done(ticket)

    def test_is_numbered_key_by_key(self) -> None:
        one = ready()
        for _ in range(3):
            one.call(push({"w": HOT}))
        assert [message.runs[0].number for message in one.sent(Push, 0)] == [0, 1, 2]

    def test_a_thousand_keys_are_a_handful_of_messages(self) -> None:
        one = bench()
        names = [f"k{index}" for index in range(1000)]
        ticket = one.call(calls.Lookup("kv", tuple(names)))
        for server in (0, 1):
            found = tuple(Found(FLOAT, (1,)) for _ in one.sent(Find, server)[0].keys)
            one.server(server, FoundAll(one.seqs(Find, server)[0], found))
        for server in (0, 1):
            entries = one.sent(Declare, server)[0].entries
            places = tuple(Place(False, (Piece(1, at, 1),)) for at in range(len(entries)))
            one.server(server, Declared(one.seqs(Declare, server)[0], places))
        assert one.is_done(ticket)
        one.call(push({name: torch.zeros(1) for name in names}))
        one.call(pull({name: torch.zeros(1) for name in names}))
        assert [len(one.sent(Push)), len(one.sent(Pull))] == [2, 2]
        assert {len(message.runs) for message in one.sent(Push)} == {1}

    def test_with_sinks_it_reads_what_comes_of_it(self) -> None:
        one = ready()
        sink = torch.zeros(40)
        ticket = one.call(push({"w": HOT}, sinks=(sink,), eager=False))
        assert {message.pull for message in one.sent(Push)} == {True}
        for server in (0, 1):
            one.ack(server, *one.seqs(Push, server))
            assert one.finish(ticket) is None
            pulled(one, one.seqs(Push, server)[0], server, 1, 5.0)
        assert one.is_done(ticket)
        assert sink.tolist() == [5.0] * 40

    def test_and_reads_again_what_lags(self) -> None:
        one = ready()
        sink = torch.zeros(40)
        ticket = one.call(push({"w": HOT}, sinks=(sink,), eager=False))
        pulled(one, one.seqs(Push, 0)[0], 0, 2, 5.0)
        pulled(one, one.seqs(Push, 1)[0], 1, 1, 4.0)
        assert one.sent(Pull) == [Pull(chunk(one, 1), True, (Ask(0, 24, 1, 2),))]
        pulled(one, one.seqs(Pull, 1)[0], 1, 2, 5.0)
        assert one.is_done(ticket)
        assert sink.tolist() == [5.0] * 40

    def test_an_unknown_key_is_an_error(self) -> None:
        one = bench()
        assert isinstance(one.error(one.call(push({"w": HOT}))), KeyNotFound)


class TestNothing:
    def test_a_call_without_keys_is_done_at_once(self) -> None:
        one = ready()
        for call in (push({}), pull({}), push({}, sinks=VIEWS), pull({}, views=True)):
            assert one.is_done(one.call(call))
        assert one.finish(one.call(calls.Allocate("kv", ()))).value == []  # type: ignore[union-attr]
        assert one.finish(one.call(calls.Versions("kv", ()))).value == []  # type: ignore[union-attr]
        assert not one.sent(Push)
        assert not one.sent(Pull)


class TestAllocate:
    def test_gives_tensors_like_the_keys(self) -> None:
        one = ready()
        one.init({"b": torch.zeros(2, 3, dtype=torch.int16), "nothing": torch.zeros(0)})
        end = one.finish(one.call(calls.Allocate("kv", ("b", "w", "nothing"))))
        assert end is not None
        assert [(row.dtype, tuple(row.shape)) for row in end.value] == [  # type: ignore[attr-defined]
            (torch.int16, (2, 3)),
            (torch.float32, (40,)),
            (torch.float32, (0,)),
        ]

    def test_a_push_of_them_copies_nothing(self) -> None:
        memory = Readable("server 0", "server 1")
        one = ready(memory=memory)
        end = one.finish(one.call(calls.Allocate("kv", ("w",))))
        assert end is not None
        (row,) = end.value  # type: ignore[misc]
        row.copy_(HOT)
        before = len(memory.blocks)
        one.call(push({"w": row}))
        row[0] = 99
        assert [values_of(send) for send in one.sends(Push)] == [
            [99, *range(1, 16)],
            [*range(16, 40)],
        ]
        one.call(push({"w": HOT}))
        assert len(memory.blocks) == before + 2

    @pytest.mark.parametrize("routes", [("server 0", "server 1"), ("server 0",), ()])
    def test_gives_nothing_that_a_server_would_be_sent_a_copy_of(
        self, routes: tuple[str, ...]
    ) -> None:
        """``w`` lies on both servers, ``b`` on one of them."""
        one = ready(memory=Readable(*routes))
        one.init({"b": torch.zeros(2, 3, dtype=torch.int16)})
        home = one.core.stores["kv"].keys["b"].pieces[0].server
        end = one.finish(one.call(calls.Allocate("kv", ("b", "w"), is_lent=True)))
        assert end is not None
        b, w = end.value  # type: ignore[misc]
        assert (w is not None) == (len(routes) == 2)
        assert (b is not None) == (f"server {home}" in routes)

    def test_where_rounds_close_without_late_ranks_a_push_may_be_read_after_its_call(self) -> None:
        one = ready(memory=Readable("server 0", "server 1"))
        store = one.core.stores["kv"]
        store.opened = replace(store.opened, quorum=1)
        end = one.finish(one.call(calls.Allocate("kv", ("w",), is_lent=True)))
        assert end is not None
        assert end.value == [None]

    def test_of_an_unknown_key_is_an_error(self) -> None:
        one = bench()
        assert isinstance(one.error(one.call(calls.Allocate("kv", ("w",)))), KeyNotFound)


def test_keys_are_located_by_the_chunks_of_their_pieces() -> None:
    one = ready()
    one.init({"b": torch.zeros(2, 3, dtype=torch.int16), "nothing": torch.zeros(0)})
    end = one.finish(one.call(calls.Locate("kv", ("w", "b", "nothing"))))
    assert end is not None
    keys = one.core.stores["kv"].keys
    expected = [{piece[:2] for piece in keys[name].pieces} for name in ("w", "b", "nothing")]
    assert end.value == expected
    assert [len(chunks) for chunks in expected] == [2, 1, 0]


class TestViews:
    def test_of_a_pull(self) -> None:
        one = ready()
        ticket = one.call(pull({"w": HOT}, views=True))
        for server in (0, 1):
            assert one.finish(ticket) is None
            pulled(one, one.seqs(Pull, server)[0], server, 1, 5.0 + server)
        end = one.finish(ticket)
        assert end is not None
        (view,) = end.value  # type: ignore[misc]
        assert view.tolist() == [5.0] * 16 + [6.0] * 24

    def test_held_values_are_those_of_a_push_and_pull(self) -> None:
        one = ready()
        ticket = one.call(push({"w": HOT}, sinks=calls.Views.HELD, eager=False))
        for server in (0, 1):
            pulled(one, one.seqs(Push, server)[0], server, 1, 5.0 + server)
        end = one.finish(ticket)
        assert end is not None
        row = torch.zeros(40)
        end.value.copy_to([row])  # type: ignore[attr-defined]
        assert row.tolist() == [5.0] * 16 + [6.0] * 24

    def test_of_a_push_and_pull_with_what_lags_read_again(self) -> None:
        one = ready()
        ticket = one.call(push({"w": HOT}, sinks=VIEWS, eager=False))
        pulled(one, one.seqs(Push, 0)[0], 0, 2, 5.0)
        pulled(one, one.seqs(Push, 1)[0], 1, 1, 4.0)
        pulled(one, one.seqs(Pull, 1)[0], 1, 2, 5.0)
        end = one.finish(ticket)
        assert end is not None
        (view,) = end.value  # type: ignore[misc]
        assert view.tolist() == [5.0] * 40

    def test_without_them_a_call_ends_with_nothing(self) -> None:
        one = ready()
        ticket = one.call(pull({"w": torch.zeros(40)}))
        for server in (0, 1):
            pulled(one, one.seqs(Pull, server)[0], server, 1, 5.0)
        end = one.finish(ticket)
        assert end is not None
        assert end.value is None

    @pytest.mark.parametrize("first", [(), (0,), (1,)])
    def test_that_nobody_waits_for_any_more(self, first: tuple[int, ...]) -> None:
        """The push stands, and ends when all values are there, as if they had been wanted."""
        one = ready()
        ticket = one.call(push({"w": HOT}, sinks=VIEWS, eager=False), 5.0)
        for server in first:
            pulled(one, one.seqs(Push, server)[0], server, 1)
        one.wait(5.0)
        assert isinstance(one.error(ticket), Timeout)
        for server in {0, 1} - set(first):
            pulled(one, one.seqs(Push, server)[0], server, 1)
        assert one.core.stores["kv"].key("w").applied == 1
        assert not one.core.table.pending


class TestWindow:
    """64 rounds of a key may be under way; the next push waits."""

    def test_of_rounds(self) -> None:
        one = ready()
        for _ in range(64):
            assert one.is_copied(one.call(push({"w": HOT})))
        values = HOT.clone()
        ticket = one.call(push({"w": values}))
        assert len(one.sent(Push, 0)) == 64
        assert not one.is_copied(ticket)
        assert one.sent(Pull) == [
            Pull(chunk(one, 0), False, (Ask(0, 16, 0, 1),)),
            Pull(chunk(one, 1), False, (Ask(0, 24, 0, 1),)),
        ]
        for server in (0, 1):
            stood(one, one.seqs(Pull, server)[0], server, 1)
        assert one.is_copied(ticket)
        assert one.sent(Push, 0)[-1].runs == (Run(0, 16, 64),)
        next_one = one.call(push({"w": HOT}))
        assert not one.is_copied(next_one)
        assert one.sent(Pull)[-1].runs[0].least == 2

    def test_is_counted_from_what_is_known_to_be_applied(self) -> None:
        one = ready()
        one.core.stores["kv"].key("w").applied = 1
        for _ in range(65):
            assert one.is_copied(one.call(push({"w": HOT})))

    def test_of_pushes_that_are_applied_one_by_one(self) -> None:
        """Versions say nothing here: other ranks move them too."""
        one = ready(mode="async")
        for _ in range(64):
            one.call(push({"w": HOT}))
        ticket = one.call(push({"w": HOT}))
        assert not one.is_copied(ticket)
        assert not one.sent(Pull)
        for server in (0, 1):
            one.ack(server, *one.seqs(Push, server))
        assert one.is_copied(ticket)
        assert one.core.stores["kv"].key("w").applied == 64
        for _ in range(63):
            assert one.is_copied(one.call(push({"w": HOT})))
        assert not one.is_copied(one.call(push({"w": HOT})))

    def test_the_values_are_those_of_the_call(self) -> None:
        """Also if its caller stops waiting for room, and uses their memory for others."""
        one = ready()
        for _ in range(64):
            one.call(push({"w": HOT}))
        values = HOT.clone()
        ticket = one.call(push({"w": values}), 1.0)
        one.wait(1.5)
        assert isinstance(one.error(ticket), Timeout)
        values.fill_(-1)
        for server in (0, 1):
            stood(one, one.seqs(Pull, server)[0], server, 1)
        assert values_of(one.sends(Push, 0)[-1]) == [*range(16)]


class TestOptimizerNeeded:
    """Where each push is applied by itself, the call that pushes without an optimizer fails."""

    @pytest.mark.spec("R227")
    @pytest.mark.parametrize("mode", ["async", "ssp"])
    def test_a_push_that_may_be_refused_waits_for_the_answer(self, mode: str) -> None:
        one = ready(mode=mode)
        ticket = one.call(push({"w": HOT}))
        assert len(one.sent(Push)) == 2
        assert not one.is_copied(ticket)
        one.ack(0, one.seqs(Push, 0)[0])
        assert not one.is_copied(ticket)
        one.server(1, Error(one.seqs(Push, 1)[0], ConfigError.code, "no optimizer"))
        assert not one.is_copied(ticket)
        assert isinstance(one.error(ticket), ConfigError)

    @pytest.mark.spec("R227")
    def test_behind_one_that_was_taken_in_they_do_not_wait(self) -> None:
        """Another rank has set the optimizer."""
        one = ready(mode="async")
        ticket = one.call(push({"w": HOT}))
        one.ack(0, one.seqs(Push, 0)[0])
        one.ack(1, one.seqs(Push, 1)[0])
        assert one.is_done(ticket)
        assert one.is_copied(one.call(push({"w": HOT})))

    @pytest.mark.spec("R227")
    def test_behind_an_optimizer_they_do_not_wait(self) -> None:
        one = ready(mode="async")
        ticket = one.call(calls.SetOptimizer("kv", resolve("sgd", {"lr": 0.1})))
        for server in (0, 1):
            one.server(server, Done(one.seqs(Optimize, server)[0]))
        assert one.is_done(ticket)
        assert one.is_copied(one.call(push({"w": HOT})))

    def test_rounds_need_none(self) -> None:
        one = ready(mode="sync")
        assert one.is_copied(one.call(push({"w": HOT})))


class TestRefused:
    """A push that was refused changed nothing, so its number is owed still."""

    def refuse(self, one: Bench) -> int:
        ticket = one.call(push({"w": HOT}))
        one.server(0, Error(one.seqs(Push, 0)[-1], ConfigError.code, "no optimizer"))
        assert isinstance(one.error(ticket), ConfigError)
        return ticket

    @pytest.mark.parametrize("owed", [0, 1])
    def test_the_next_push_asks_for_its_number(self, owed: int) -> None:
        """The other server may have taken its part in."""
        one = ready(mode="async")
        self.refuse(one)
        ticket = one.call(push({"w": HOT}))
        assert one.sent(Pull) == [
            Pull(chunk(one, 0), False, (Ask(0, 16, 0, 0),)),
            Pull(chunk(one, 1), False, (Ask(0, 24, 0, 0),)),
        ]
        assert not one.is_copied(ticket)
        stood(one, one.seqs(Pull, 0)[0], 0, 0, owed)
        stood(one, one.seqs(Pull, 1)[0], 1, 0, 1)
        assert [message.runs[0].number for message in one.sent(Push, 0)] == [0, owed]
        one.call(push({"w": HOT}))
        assert one.sent(Push, 0)[-1].runs[0].number == owed + 1

    def test_two_that_ask_do_not_get_the_same(self) -> None:
        one = ready(mode="async")
        self.refuse(one)
        for _ in range(2):
            one.call(push({"w": HOT}))
        for at in (0, 1):
            for server in (0, 1):
                stood(one, one.seqs(Pull, server)[at], server, 0)
        assert [message.runs[0].number for message in one.sent(Push, 0)] == [0, 0, 1]

    def test_a_pull_does_not_wait_for_it(self) -> None:
        one = ready(mode="async")
        self.refuse(one)
        one.call(pull({"w": torch.zeros(40)}))
        for server in (0, 1):
            stood(one, one.seqs(Pull, server)[0], server, 0)
        assert one.sent(Pull)[-1] == Pull(chunk(one, 1), True, (Ask(0, 24, 0, 0),))


class TestPull:
    def test_is_of_what_this_rank_pushed_at_least(self) -> None:
        one = ready()
        one.call(push({"w": HOT}))
        sink = torch.zeros(40)
        ticket = one.call(pull({"w": sink}, least=7))
        assert one.sent(Pull, 1) == [Pull(chunk(one, 1), True, (Ask(0, 24, 1, 7),))]
        for server in (0, 1):
            pulled(one, one.seqs(Pull, server)[0], server, 7, 3.0)
        assert one.is_done(ticket)
        assert sink.tolist() == [3.0] * 40

    def test_versions_are_those_of_the_part_that_is_behind(self) -> None:
        one = ready()
        one.call(push({"w": HOT}))
        ticket = one.call(calls.Versions("kv", ("w",)))
        assert one.sent(Pull, 1) == [Pull(chunk(one, 1), False, (Ask(0, 24, 1, 0),))]
        stood(one, one.seqs(Pull, 0)[0], 0, 9)
        stood(one, one.seqs(Pull, 1)[0], 1, 8)
        assert one.finish(ticket).value == [8]  # type: ignore[union-attr]


class TestLookup:
    def test_finds_what_others_initialised(self) -> None:
        one = bench(rank=1)
        names = ("w", "b", "c")
        ticket = one.call(calls.Lookup("kv", names))
        shapes = {"w": (40,), "b": (2,)}
        for send in one.sends(Find):
            keys = send.packet.message.keys  # type: ignore[attr-defined]
            found = tuple(
                Found(FLOAT, shapes[name]) if name in shapes else Found(0, ()) for name in keys
            )
            one.server(server_of(send), FoundAll(send.packet.envelope.seq, found))
        for send in one.sends(Declare):
            message = send.packet.message
            assert isinstance(message, Declare)
            assert not message.create
            places = tuple(Place(False, (Piece(1, 0, it.size),)) for it in message.entries)
            one.server(server_of(send), Declared(send.packet.envelope.seq, places))
        assert one.finish(ticket).value == {  # type: ignore[union-attr]
            "w": spec(40),
            "b": spec(2),
            "c": None,
        }
        assert len(one.core.stores["kv"].key("w").pieces) == 2

    def test_does_not_ask_for_what_it_knows(self) -> None:
        one = ready()
        ticket = one.call(calls.Lookup("kv", ("w",)))
        assert one.finish(ticket).value == {"w": spec(40)}  # type: ignore[union-attr]
        assert not one.sent(Find)


def resumed(one: Bench, *known: HistoryIs, replaced: bool = True, **barriers: int) -> None:
    """Answer RESUME, and HISTORY server by server; ``seq`` is filled in."""
    one.scheduler(Resumed(one.seqs(Resume)[-1], replaced, barriers))
    for server, answer in enumerate(known):
        one.server(server, replace(answer, seq=one.seqs(History, server)[-1]))


class TestResume:
    def test_numbers_from_the_lowest_that_is_owed_on_any_part(self) -> None:
        one = ready()
        ticket = one.call(calls.ResumeKeys("kv", ("w",)))
        stood(one, one.seqs(Pull, 0)[0], 0, 3, owed=5)
        stood(one, one.seqs(Pull, 1)[0], 1, 3, owed=4)
        resumed(one, replaced=False)
        assert one.finish(ticket).value == 4  # type: ignore[union-attr]
        one.call(push({"w": HOT}))
        assert one.sent(Push, 0)[-1].runs == (Run(0, 16, 4),)

    def test_waits_for_this_ranks_own_pushes(self) -> None:
        one = ready()
        one.call(push({"w": HOT}))
        one.call(calls.ResumeKeys("kv", ("w",)))
        assert not one.sent(Pull)
        for server in (0, 1):
            one.ack(server, *one.seqs(Push, server))
        assert len(one.sent(Pull)) == 2

    def test_all_is_owed_of_a_key_that_is_not_there(self) -> None:
        one = ready()
        ticket = one.call(calls.ResumeKeys("kv", ("w", "new")))
        (find,) = one.sends(Find)
        one.server(server_of(find), FoundAll(find.packet.envelope.seq, (Found(0, ()),)))
        for server in (0, 1):
            stood(one, one.seqs(Pull, server)[0], server, 3, owed=5)
        resumed(one, replaced=False)
        assert one.finish(ticket).value == 0  # type: ignore[union-attr]

    def begin(self, one: Bench, *known: HistoryIs, **barriers: int) -> int:
        """Take another's place, which owes push 4."""
        ticket = one.call(calls.ResumeKeys("kv", ("w",)))
        for server in (0, 1):
            stood(one, one.seqs(Pull, server)[0], server, 4, owed=4)
        resumed(one, *known, **barriers)
        return ticket

    @pytest.mark.spec("R124")
    def test_a_barrier_behind_it_is_found_by_what_was_pushed_before(self) -> None:
        one = ready(1)
        one.core.stores["kv"].barriers = {"": 3, "epoch": 9}
        assert one.is_done(self.begin(one, *[HistoryIs(0, 0, 0, 0, 0, 0.0, 0, False)] * 2))
        one.call(calls.StandAtBarrier("kv", None))
        assert one.sent(Barrier)[-1] == Barrier("kv", "", 0, True, 4, resumed=True)
        one.scheduler(Released(one.seqs(Barrier)[-1]))  # its predecessor has that one behind it
        one.call(calls.StandAtBarrier("kv", None))
        one.scheduler(Released(one.seqs(Barrier)[-1], 6))
        one.call(calls.StandAtBarrier("kv", None))
        assert one.sent(Barrier)[-1] == Barrier("kv", "", 7, True, 4, resumed=False)

    @pytest.mark.spec("R124")
    def test_without_rounds_barriers_go_on_behind_the_last(self) -> None:
        one = ready(1, mode="async")
        nothing = HistoryIs(0, 0, 0, 0, 0, 0.0, 0, False)
        self.begin(one, nothing, nothing, **{"": 5, "step 8": 1})
        assert one.sent(Resume) == [Resume("kv", None)]
        one.call(calls.StandAtBarrier("kv", None))
        assert one.sent(Barrier)[-1] == Barrier("kv", "", 5, False, 0)
        one.call(
            calls.StandAtBarrier("kv", "step 8")
        )  # its predecessor may have ended before or behind it
        assert one.sent(Barrier)[-1] == Barrier("kv", "step 8", 0, False, 0)
        one.call(calls.StandAtBarrier("kv", "new"))
        assert one.sent(Barrier)[-1] == Barrier("kv", "new", 0, False, 0)

    @pytest.mark.spec("R125")
    def test_rank_0_makes_a_call_with_all_that_some_servers_heard(self) -> None:
        one = ready()
        old, new = (HistoryIs(0, 1, 0, calls_, calls_, 0.25, 0, False) for calls_ in (3, 4))
        ticket = self.begin(one, new, old)
        assert one.sent(Rate) == [Rate("kv", 4, True, 0.25, 4)]
        assert [server_of(send) for send in one.sends(Rate)] == [1]
        one.server(1, Done(one.seqs(Rate)[0]))
        assert one.is_done(ticket)

    @pytest.mark.spec("R125")
    @pytest.mark.parametrize(("after", "number"), [(4, 2), (3, 3)])
    def test_rank_0_makes_the_same_call_again_or_the_next(self, after: int, number: int) -> None:
        one = ready()
        self.begin(one, *[HistoryIs(0, 1, after, 2, after, 0.5, 0, False)] * 2)
        rate = one.call(calls.SetRate("kv", 0.25))
        assert one.sent(Rate)[-1] == Rate("kv", number, True, 0.25, 4, resumed=False)
        for server in (0, 1):
            one.server(server, Done(one.seqs(Rate, server)[-1]))
        assert one.is_done(rate)
        one.call(calls.SetRate("kv", 0.125))
        assert one.sent(Rate)[-1] == Rate("kv", number + 1, True, 0.125, 4, resumed=False)
        one.call(calls.SetOptimizer("kv", resolve("test", {})))
        assert one.sent(Optimize)[-1].call == 1 + (after < 4)

    @pytest.mark.spec("R125")
    def test_without_rounds_it_is_another_call_that_need_not_agree(self) -> None:
        one = ready(mode="async")
        self.begin(one, *[HistoryIs(0, 1, 0, 2, 0, 0.5, 0, False)] * 2)
        one.call(calls.SetRate("kv", 0.25))
        assert one.sent(Rate)[-1] == Rate("kv", 3, True, 0.25, 1, resumed=False)

    @pytest.mark.spec("R126")
    def test_another_rank_says_that_it_does_not_know_the_number(self) -> None:
        one = ready(1)
        self.begin(one, *[HistoryIs(0, 1, 0, 2, 4, 0.5, 0, False)] * 2)
        one.call(calls.SetRate("kv", 0.25))
        assert one.sent(Rate)[-1] == Rate("kv", 2, False, 0.25, 4, resumed=True)
        one.call(calls.SetOptimizer("kv", resolve("test", {})))
        assert one.sent(Optimize)[-1].resumed

    @pytest.mark.spec("R122", "R123")
    def test_it_is_away_if_its_predecessor_was(self) -> None:
        one = ready(1)
        ticket = self.begin(
            one,
            HistoryIs(0, 0, 0, 0, 0, 0.0, 2, True),
            HistoryIs(0, 0, 0, 0, 0, 0.0, 1, True),
        )
        assert one.sent(Join) == [Join("kv", 2, False)], "it may not have been heard of there"
        assert [server_of(send) for send in one.sends(Join)] == [1]
        one.server(1, Joined(one.seqs(Join)[0], 0))
        assert one.sent(Return) == [Return("kv", 2)]
        assert [server_of(send) for send in one.sends(Return)] == [1]
        one.server(1, Done(one.seqs(Return)[0]))
        assert one.is_done(ticket)
        assert "has joined" in str(one.error(one.call(push({"w": HOT}))))
        one.call(calls.JoinStore("kv"))
        assert one.sent(Join)[1:] == [Join("kv", 3, True), Join("kv", 3, False)]


class TestJoin:
    @pytest.mark.spec("R120")
    def test_says_return_to_all_servers_before_it_ends(self) -> None:
        one = ready(1)
        one.call(push({"w": HOT}))
        ticket = one.call(calls.JoinStore("kv"))
        assert not one.sent(Join), "its push is not known to be in"
        for server in (0, 1):
            one.ack(server, *one.seqs(Push, server))
        assert one.sent(Join) == [Join("kv", 1, True), Join("kv", 1, False)]
        one.server(1, Joined(one.seqs(Join, 1)[0], 0))
        assert not one.sent(Return)
        one.server(0, Joined(one.seqs(Join, 0)[0], 0))
        assert one.sent(Return) == [Return("kv", 1)] * 2
        for server in (0, 1):
            assert not one.sent(Pull)
            one.server(server, Done(one.seqs(Return, server)[0]))
        for server in (0, 1):
            stood(one, one.seqs(Pull, server)[0], server, 5, owed=5)
        assert one.finish(ticket).value == 0  # type: ignore[union-attr]
        one.call(push({"w": HOT}))
        assert one.sent(Push, 0)[-1].runs == (Run(0, 16, 5),)
        one.init({"later": HOT})
        assert one.core.stores["kv"].key("later").is_refused, "others may have pushed it"

    def test_one_that_ends_before_it_was_said_is_none(self) -> None:
        one = ready(1)
        one.call(push({"w": HOT}))
        ticket = one.call(calls.JoinStore("kv"))
        one.view(member(Node(Role.WORKER, 0), "gone"))
        assert isinstance(one.error(ticket), WorkerLost)
        assert not one.core.stores["kv"].is_away

    def test_a_push_that_waits_for_room_does_not_come_behind_it(self) -> None:
        one = ready(1)
        for _ in range(WINDOW):
            one.call(push({"w": HOT}, eager=False))
        late = one.call(push({"w": HOT}, eager=False))
        one.core.stores["kv"].is_away = True
        for server in (0, 1):
            stood(one, one.seqs(Pull, server)[0], server, 1, owed=1)
        assert "has joined" in str(one.error(late))

    def test_where_each_push_is_applied_no_number_is_asked(self) -> None:
        one = ready(1, mode="async")
        ticket = one.call(calls.JoinStore("kv"))
        for server in (0, 1):
            one.server(server, Joined(one.seqs(Join, server)[0], 1))
        for server in (0, 1):
            one.server(server, Done(one.seqs(Return, server)[0]))
        assert one.finish(ticket).value == 1  # type: ignore[union-attr]
        assert not one.sent(Pull)


class TestBroadcast:
    def call(self, one: Bench, value: torch.Tensor, sink: torch.Tensor) -> int:
        key = ("w", Spec("float32", tuple(value.shape)))
        return one.call(calls.Broadcast("kv", (key,), (value,), (sink,)))

    def meet(self, one: Bench) -> None:
        one.scheduler(Released(one.seqs(Barrier)[-1]))

    @pytest.mark.parametrize("rank", [0, 1])
    @pytest.mark.parametrize("mode", ["sync", "async"])
    def test_all_meet_and_read_the_value_of_rank_0(self, rank: int, mode: str) -> None:
        one = ready(rank, mode=mode)
        sink = torch.zeros(40)
        ticket = self.call(one, HOT, sink)
        before = len(one.sent(Declare))
        self.meet(one)
        assert [message.call for message in one.sent(Declare)[before:]] == [1, 1]
        for server in (0, 1):
            place = Place(rank == 0, (Piece(chunk(one, server), 0, (16, 24)[server]),))
            one.server(server, Declared(one.seqs(Declare, server)[-1], (place,)))
        assert len(one.sent(Load)) == 2 * (rank == 0)
        for server in (0, 1):
            one.ack(server, *one.seqs(Load, server))
        for server in (0, 1):
            assert one.sent(Pull, server)[0].runs[0].after == 0
            pulled(one, one.seqs(Pull, server)[0], server, 0, 6.0)
        assert sink.tolist() == [6.0] * 40
        if mode == "async":  # a push of another rank could move it before all have read it
            assert one.finish(ticket) is None
            self.meet(one)
        assert one.is_done(ticket)
        assert one.core.stores["kv"].key("w").broadcasts == 1

    @pytest.mark.spec("R392")
    @pytest.mark.parametrize("rank", [0, 1])
    def test_a_value_on_fewer_servers_is_told_to_the_others(self, rank: int) -> None:
        one = ready(rank)
        self.call(one, torch.tensor([6.0, 6.0]), torch.zeros(2))
        before = [len(one.sent(Declare, server)) for server in (0, 1)]
        self.meet(one)
        told = [one.sent(Declare, server)[before[server] :] for server in (0, 1)]
        sizes = {
            server: [entry.size for message in messages for entry in message.entries]
            for server, messages in enumerate(told)
        }
        at = home("w", 2)
        assert sizes == {at: [2], 1 - at: [0] if rank == 0 else []}

    def test_waits_for_the_rounds_that_this_rank_has_pushed(self) -> None:
        one = ready()
        one.call(push({"w": HOT}))
        self.call(one, HOT, torch.zeros(40))
        assert one.sent(Pull)[0].runs[0].after == 1
        assert not one.sent(Barrier)
        for server in (0, 1):
            stood(one, one.seqs(Pull, server)[0], server, 1)
            one.ack(server, *one.seqs(Push, server))
        assert len(one.sent(Barrier)) == 1

    def test_a_new_shape_begins_the_key_anew(self) -> None:
        one = ready(rank=1)
        one.call(push({"w": HOT}))
        for server in (0, 1):
            one.ack(server, *one.seqs(Push, server))
        one.core.stores["kv"].key("w").applied = 1
        self.call(one, torch.zeros(50), torch.zeros(50))
        self.meet(one)
        for server in (0, 1):
            place = Place(False, (Piece(77, 0, (16, 34)[server]),))
            one.server(server, Declared(one.seqs(Declare, server)[-1], (place,)))
        key = one.core.stores["kv"].key("w")
        assert (key.number, key.spec) == (0, spec(50))

    def test_one_that_failed_may_be_made_again(self) -> None:
        one = ready()
        ticket = self.call(one, HOT, torch.zeros(40))
        self.meet(one)
        one.server(0, Error(one.seqs(Declare, 0)[-1], Mismatch.code, "no"))
        assert isinstance(one.error(ticket), Mismatch)
        self.call(one, HOT, torch.zeros(40))
        # All were refused alike, and they meet for the next.
        assert [message.number for message in one.sent(Barrier)] == [0, 1]
        self.meet(one)
        assert [(sent.call, sent.refused) for sent in one.sent(Declare, 0)] == [
            (0, 0),
            (1, 0),
            (1, 1),
        ]

    def test_one_that_was_late_counts_once_when_it_is_made_again(self) -> None:
        """By this count, values from before a broadcast are told from those after it."""
        one = ready()
        key = ("w", Spec("float32", (40,)))
        call = calls.Broadcast("kv", (key,), (HOT,), (torch.zeros(40),))
        for again in range(2):
            ticket = one.call(call, 5.0)
            self.meet(one)
            for server in (0, 1):
                place = Place(again == 0, (Piece(chunk(one, server), 0, (16, 24)[server]),))
                one.server(server, Declared(one.seqs(Declare, server)[-1], (place,)))
            if again == 0:
                for server in (0, 1):
                    one.ack(server, *one.seqs(Load, server))
            assert [message.broadcasts for message in one.sent(Pull)[-2:]] == [1, 1]
            one.wait(5.0)
            assert isinstance(one.error(ticket), Timeout)
        assert one.core.stores["kv"].broadcasts == 0

    def test_creates_a_key(self) -> None:
        one = bench()
        self.call(one, HOT, torch.zeros(40))
        self.meet(one)
        assert [message.call for message in one.sent(Declare)] == [1, 1]


class TestOptimizer:
    HYPER = resolve("sgd", {"lr": 0.5, "lr_mult": {"w": 2.0}, "wd_mult": {"w": 3.0}})

    @pytest.mark.parametrize("rank", [0, 1])
    def test_reaches_every_server_and_rank_0_sets_it(self, rank: int) -> None:
        one = ready(rank)
        ticket = one.call(calls.SetOptimizer("kv", self.HYPER))
        (first, second) = one.sent(Optimize)
        assert first == second
        assert (first.store, first.call, first.create, first.name) == ("kv", 1, rank == 0, "sgd")
        assert (first.numbers["lr"], first.lr_mult, first.wd_mult) == (0.5, {"w": 2}, {"w": 3})
        answer_all(one, Optimize, Done)
        assert one.is_done(ticket)
        one.call(calls.SetRate("kv", 0.25))
        assert one.sent(Rate) == [Rate("kv", 1, rank == 0, 0.25)] * 2

    @pytest.mark.parametrize(
        ("call", "cls"),
        [(calls.SetOptimizer("kv", HYPER), Optimize), (calls.SetRate("kv", 0.1), Rate)],
    )
    def test_waits_for_this_ranks_own_rounds(self, call: calls.Call, cls: type[Message]) -> None:
        one = ready()
        one.call(push({"w": HOT}))
        one.call(call)
        assert one.sent(Pull)[0] == Pull(chunk(one, 0), False, (Ask(0, 16, 1, 0),))
        assert not one.sent(cls)
        for server in (0, 1):
            stood(one, one.seqs(Pull, server)[0], server, 1)
        assert len(one.sent(cls)) == 2

    @pytest.mark.parametrize(
        ("call", "cls"),
        [(calls.SetOptimizer("kv", HYPER), Optimize), (calls.SetRate("kv", 0.1), Rate)],
    )
    def test_or_for_its_pushes_to_be_taken_in(self, call: calls.Call, cls: type[Message]) -> None:
        one = ready(mode="async")
        one.call(push({"w": HOT}))
        one.call(call)
        one.ack(0, *one.seqs(Push, 0))
        assert not one.sent(cls)
        one.ack(1, *one.seqs(Push, 1))
        assert len(one.sent(cls)) == 2

    @pytest.mark.parametrize(
        ("call", "cls"),
        [(calls.SetOptimizer("kv", HYPER), Optimize), (calls.SetRate("kv", 0.1), Rate)],
    )
    def test_a_refused_one_is_not_counted(self, call: calls.Call, cls: type[Message]) -> None:
        one = ready(rank=1)
        ticket = one.call(call)
        one.server(1, Error(one.seqs(cls, 1)[0], Mismatch.code, "rank 0 set another"))
        assert str(one.error(ticket)) == "rank 0 set another"
        one.call(call)
        assert [message.call for message in one.sent(cls, 1)] == [1, 1]  # type: ignore[attr-defined]


class TestState:
    def test_is_collected_from_where_keys_lie(self) -> None:
        one = ready()
        ticket = one.call(calls.SaveState("kv"))
        assert one.sent(GetState) == [
            GetState(chunk(one, 0), 0, 16),
            GetState(chunk(one, 1), 0, 24),
        ]
        for server, size in enumerate((16, 24)):
            fields = (Field("momentum", FLOAT, size), Field("extra", FLOAT, size))[: 2 - server]
            rows = [torch.full((size,), 1.0 + server)] * len(fields)
            one.server(server, StateIs(one.seqs(GetState, server)[0], 5, fields), *rows)
        states = one.finish(ticket).value  # type: ignore[union-attr]
        assert isinstance(states, dict)
        step, rows = states["w"]
        assert step == 5
        assert rows.keys() == {"momentum"}, "a part without it was never updated"
        assert rows["momentum"].tolist() == [1.0] * 16 + [2.0] * 24

    def test_is_put_back_there(self) -> None:
        one = ready()
        ticket = one.call(calls.LoadState("kv", {"w": (5, {"m": HOT, "v": HOT + 100})}))
        for server, (begin, size) in enumerate(((0, 16), (16, 24))):
            (send,) = one.sends(SetState, server)
            fields = (Field("m", FLOAT, size), Field("v", FLOAT, size))
            assert send.packet.message == SetState(chunk(one, server), 0, size, 5, fields)
            assert len(send.packet.payload) == 2
            assert send.packet.payload[1].cast("f")[0] == 100 + begin
            one.server(server, Done(one.seqs(SetState, server)[0]))
        assert one.is_done(ticket)


class TestTogether:
    @pytest.mark.spec("R33")
    def test_barriers_are_numbered_by_store_and_name(self) -> None:
        one = bench()
        one.open("other")
        for store, name in (("kv", None), ("kv", "x"), ("other", None), ("kv", None)):
            one.call(calls.StandAtBarrier(store, name))
            one.scheduler(Released(one.seqs(Barrier)[-1]))
        assert one.sent(Barrier) == [
            Barrier("kv", "", 0),
            Barrier("kv", "x", 0),
            Barrier("other", "", 0),
            Barrier("kv", "", 1),
        ]

    @pytest.mark.spec("R403")
    def test_models_are_compared_at_a_barrier_of_their_own(self) -> None:
        one = bench()
        traits = (Trait("parameter 'w'", "float32[2]"),)
        ticket = one.call(calls.Compare("kv", "Trainer()", traits))
        one.scheduler(Released(one.seqs(Barrier)[-1]))
        assert one.sent(Barrier) == [Barrier("kv", "kvps.same", 0, what="Trainer()", traits=traits)]
        assert one.is_done(ticket)

    def test_a_barrier_waits_until_this_stores_pushes_are_taken_in(self) -> None:
        one = ready()
        one.open("other")
        one.call(push({"w": HOT}))
        one.call(calls.StandAtBarrier("other", None))
        one.call(calls.StandAtBarrier("kv", None))
        assert [message.store for message in one.sent(Barrier)] == ["other"]
        for server in (0, 1):
            one.ack(server, *one.seqs(Push, server))
        assert [message.store for message in one.sent(Barrier)] == ["other", "kv"]

    def test_a_flush_too(self) -> None:
        one = ready()
        assert one.is_done(one.call(calls.Flush("kv")))
        one.call(push({"w": HOT}))
        ticket = one.call(calls.Flush("kv"))
        later = one.call(push({"w": HOT}))
        for server in (0, 1):
            assert one.finish(ticket) is None
            one.ack(server, one.seqs(Push, server)[0])
        assert one.is_done(ticket), "pushes that came later are not waited for"
        assert one.finish(later) is None

    def test_a_barrier_that_was_not_passed_is_not_counted(self) -> None:
        one = bench()
        ticket = one.call(calls.StandAtBarrier("kv", None))
        one.scheduler(Error(one.seqs(Barrier)[0], ConfigError.code, "no"))
        assert isinstance(one.error(ticket), ConfigError)
        one.call(calls.StandAtBarrier("kv", None))
        assert [message.number for message in one.sent(Barrier)] == [0, 0]

    def test_status_is_asked_of_all(self) -> None:
        one = bench()
        ticket = one.call(calls.AskStatus("kv"))
        for server in (0, 1):
            one.server(server, StatusIs(one.seqs(Status, server)[0], (), ()))
        assert [type(it) for it in one.finish(ticket).value] == [StatusIs] * 2  # type: ignore[union-attr, attr-defined]


def told(
    one: Bench, seq: int, server: int, version: int, *rounds: int, owed: int | None = None
) -> None:
    """Answer a pull of ``w``, and name the last of these rounds as dropped."""
    size = (16, 24)[server]
    dropped = tuple(Dropped(0, number, 2, (3,)) for number in rounds[-1:])
    runs = (Stand(0, size, version, version if owed is None else owed),)
    answer = Pulled(seq, chunk(one, server), FLOAT, True, runs, dropped)
    one.server(server, answer, torch.full((size,), 5.0))


class TestDropped:
    @pytest.mark.spec("R107")
    def test_a_pushpull_raises_for_its_round_and_the_next_ones_go_on(self) -> None:
        one = ready()
        for number, rounds in enumerate([(), (1,), (1,), (1, 3)]):
            sink = torch.zeros(40)
            ticket = one.call(push({"w": HOT}, sinks=(sink,)))
            for server in (1, 0):
                assert one.finish(ticket) is None
                told(one, one.seqs(Push, server)[-1], server, number + 1, *rounds)
            if number in (1, 3):
                text = f"round {number} of key 'w' was dropped: 2 values of key 'w' are not finite"
                assert isinstance(one.error(ticket), NonFinite)
                assert text in str(one.error(ticket))
            else:
                assert one.is_done(ticket)
            assert sink.unique().tolist() == [5.0]  # what was kept is there all the same
        assert one.core.stores["kv"].key("w").is_refused is False

    @pytest.mark.spec("R107")
    def test_a_pull_that_nobody_waits_for_any_more_tells_nobody(self) -> None:
        one = ready()
        first = one.call(push({"w": HOT}, sinks=(torch.zeros(40),)), timeout_s=3.0)
        told(one, one.seqs(Push, 0)[-1], 0, 1, 0)
        one.wait(4.0)
        assert isinstance(one.error(first), Timeout)
        told(one, one.seqs(Push, 1)[-1], 1, 1, 0)
        for is_new in (True, False):
            ticket = one.call(pull({"w": torch.zeros(40)}))
            for server in (0, 1):
                told(one, one.seqs(Pull, server)[-1], server, 1, 0)
            assert isinstance(one.error(ticket), NonFinite) if is_new else one.is_done(ticket)

    @pytest.mark.spec("R107")
    def test_of_what_was_dropped_before_a_replacement_came_it_is_not_told(self) -> None:
        one = ready()
        ticket = one.call(calls.ResumeKeys("kv", ("w",)))
        for server, owed in enumerate((4, 5)):
            stood(one, one.seqs(Pull, server)[-1], server, 4, owed)
        resumed(one, replaced=False)
        assert one.is_done(ticket)
        for number in (3, 4):
            ticket = one.call(pull({"w": torch.zeros(40)}))
            for server in (0, 1):
                told(one, one.seqs(Pull, server)[-1], server, 5, number)
            assert isinstance(one.error(ticket), NonFinite) if number == 4 else one.is_done(ticket)

    @pytest.mark.spec("R107")
    def test_parts_that_lag_behind_may_be_the_first_to_tell(self) -> None:
        one = ready()
        ticket = one.call(pull({"w": torch.zeros(40)}))
        told(one, one.seqs(Pull, 0)[-1], 0, 1, owed=0)
        told(one, one.seqs(Pull, 1)[-1], 1, 2, owed=0)
        told(one, one.seqs(Pull, 0)[-1], 0, 3, 2, owed=0)
        told(one, one.seqs(Pull, 1)[-1], 1, 3, 2, owed=0)
        assert "round 2 of key 'w'" in str(one.error(ticket))

    def test_parts_that_wait_for_this_very_rank_are_taken_as_they_are(self) -> None:
        one = ready()  # its predecessor has pushed to the second server only
        ticket = one.call(pull({"w": torch.zeros(40)}))
        told(one, one.seqs(Pull, 0)[-1], 0, 1)
        told(one, one.seqs(Pull, 1)[-1], 1, 2)
        assert one.is_done(ticket)


class TestRelay:
    """A broadcast of many values, which are read while they are loaded."""

    COUNT = 100_000
    KEYS = (("w", Spec("float32", (COUNT,))),)

    def begin(self, one: Bench, timeout_s: float = 300.0) -> tuple[int, torch.Tensor]:
        value = torch.arange(float(self.COUNT)) if one.rank == 0 else torch.zeros(self.COUNT)
        sink = torch.full((self.COUNT,), -1.0)
        ticket = one.call(calls.Broadcast("kv", self.KEYS, (value,), (sink,)), timeout_s)
        one.scheduler(Released(one.seqs(Barrier)[-1]))
        return ticket, sink

    def declared(self, one: Bench, *, fresh: bool = False, stamp: int = 1) -> None:
        for send in one.sends(Declare)[-2:]:
            message = send.packet.message
            assert isinstance(message, Declare)
            (entry,) = message.entries
            server = server_of(send)
            assert server is not None
            place = Place(fresh, (Piece(4 + server, 0, entry.size),))
            one.server(server, Declared(send.packet.envelope.seq, (place,), stamp))

    def answer(self, one: Bench, begin: int, add: float = 0.0) -> None:
        """Answer the pulls from ``begin`` on with the value, to which something is added."""
        for send in one.sends(Pull)[begin:]:
            pull, server = send.packet.message, server_of(send)
            assert isinstance(pull, Pull)
            assert server is not None
            stands = tuple(Stand(ask.start, ask.size, 0, 0) for ask in pull.runs)
            offset = 0 if server == 0 else self.COUNT - one.sent(Declare, 1)[0].entries[0].size
            rows = [torch.arange(ask.start, ask.start + ask.size) + offset for ask in pull.runs]
            payload = (torch.cat(rows).float() + add,) if pull.values else ()
            seq = send.packet.envelope.seq
            one.server(server, Pulled(seq, pull.chunk, 1, pull.values, stands), *payload)

    @pytest.mark.spec("R226")
    def test_others_read_part_by_part_and_ask_at_the_end(self) -> None:
        one = bench(rank=1)
        ticket, sink = self.begin(one)
        assert [message.early for message in one.sent(Declare)] == [True, True]
        self.declared(one)
        pulls = one.sent(Pull)
        assert len(pulls) == 7
        assert {(pull.values, pull.call) for pull in pulls} == {(True, 1)}
        assert max(ask.size for pull in pulls for ask in pull.runs) == (64 << 10) // 4
        assert [message.early for message in one.sent(Declare)] == [True, True, False, False]
        self.answer(one, 0)
        assert torch.equal(sink, torch.arange(float(self.COUNT)))
        assert one.finish(ticket) is None
        self.declared(one)
        assert len(one.sent(Pull)) == 7
        assert one.is_done(ticket)
        assert one.core.stores["kv"].key("w").broadcasts == 1

    @pytest.mark.spec("R226")
    def test_who_may_have_read_two_lives_of_rank_0_reads_again(self) -> None:
        one = bench(rank=1)
        ticket, sink = self.begin(one)
        self.declared(one)
        self.answer(one, 0)
        self.declared(one, stamp=2)
        assert [(pull.values, pull.call) for pull in one.sent(Pull)[7:]] == [(True, None)] * 2
        self.answer(one, 7, add=5.0)
        assert one.is_done(ticket)
        assert torch.equal(sink, torch.arange(float(self.COUNT)) + 5)

    @pytest.mark.spec("R223")
    def test_rank_0_loads_part_by_part_and_reads_nothing(self) -> None:
        one = bench()
        ticket, sink = self.begin(one)
        self.declared(one, fresh=True)
        seen = {0: 0, 1: 0}
        while any(len(one.seqs(Load, server)) > seen[server] for server in seen):
            for server in seen:
                new = one.seqs(Load, server)[seen[server] :]
                seen[server] += len(new)
                one.ack(server, *new)
        loads = one.sent(Load)
        assert len(loads) == 7
        assert sum(run.size for load in loads for run in load.runs) == self.COUNT
        assert not one.sent(Pull)
        assert one.is_done(ticket)
        assert torch.equal(sink, torch.arange(float(self.COUNT)))

    def test_rank_0_reads_what_its_predecessor_has_loaded(self) -> None:
        one = bench()
        ticket, sink = self.begin(one)
        self.declared(one, fresh=False)
        assert not one.sent(Load)
        assert [pull.values for pull in one.sent(Pull)] == [True, True]
        self.answer(one, 0, add=7.0)
        assert one.is_done(ticket)
        assert sink[0] == 7

    def test_what_may_come_by_steps_is_read_as_ever(self) -> None:
        one = bench(rank=1)
        one.core.stores["kv"].feedback.use(rules_of("fp16"))
        self.begin(one)
        assert [message.early for message in one.sent(Declare)] == [False, False]


# --- values and outputs that share memory ---------------------------------------------------------------


def test_values_are_copied_where_others_of_their_call_are_written():
    memory = torch.arange(12.0)
    one, two, three = memory[:4], memory[4:8], memory[8:]
    empty = memory[2:2]
    for values, sinks, copied in [
        ([one], [one], []),
        ([one], [two], []),
        ([one], [memory[1:5]], [0]),
        ([two], [memory[3:7]], [0]),
        ([one, two], [one, two], []),  # each where it is
        ([one, two], [three, torch.empty(4)], []),
        ([one, two], [two, one], [0, 1]),
        ([one, one], [one, two], [1]),
        ([one, two, three], [memory[2:6], torch.empty(4), three], [0, 1]),
        ([one, empty, two], [two, empty, torch.empty(4)], [2]),
        ([empty, one], [memory[1:1], one], []),
        ([one, two, three], [one, torch.empty(4), memory[2:6]], [0, 1]),
    ]:
        given = list(values)
        unshare(given, sinks, np.array([one.nbytes for one in sinks]))
        assert [at for at, (a, b) in enumerate(zip(given, values, strict=True)) if a is not b] == (
            copied
        )
        assert all(torch.equal(*pair) for pair in zip(given, values, strict=True))
