"""A server hands its seat to another process, in a job without copies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvps import protocol as p
from kvps.core.effects import Exit, Finish
from kvps.core.embedding.spec import message_of
from kvps.core.membership_client import Identity
from kvps.core.server.chunks.rounds import LateSpan
from kvps.core.server.replicas.handover import GATE_S, PATIENCE_S, PAUSE_S, RECENT_S, Handover
from kvps.core.server.server import SILENT_S, STAYS, WANTED, Server
from kvps.protocol.envelope import Packet, Role
from tests.support.server_harness import heard
from tests.support.table_messages import push_table
from tests.unit.core.server.rules.test_table import KEY, recipe
from tests.unit.core.server.test_publications import MANIFEST
from tests.unit.core.server.test_replicas import LIFE, Pair, Stage, of, push

GRADIENT = torch.tensor([2.0, 0.0, 1.0])


class Mover(Pair):
    """A server, and the process that is to have its seat."""

    def __init__(self) -> None:
        self.primary = Stage(2, 1)
        self.standby = Stage(2, 1, welcome={"follows": True}, life=LIFE, standby=LIFE, greeted=False)
        self.said: list[Any] = []
        self.forward: list[Packet] = []

    def forth(self) -> int:
        self.forward += self.primary.sent
        return super().forth()

    def rounds(self, count: int, first: int = 0) -> None:
        (piece,) = self.primary.pieces["w"]
        for number in range(first, first + count):
            for rank in range(2):
                self.do(rank, of(rank, push(piece, number)), GRADIENT)

    def begin(self) -> None:
        """Let the copy begin, and all arrive that leaves at once."""
        self.name()
        self.ask()
        self.pump()

    def wait(self, seconds: float) -> None:
        """Let so much time pass."""
        self.primary.now += seconds
        self.primary.take(self.primary.server.on_timer(self.primary.now))

    def level(self) -> None:
        self.begin()
        self.wait(PATIENCE_S)
        self.pump()
        assert self.is_level

    @property
    def is_level(self) -> bool:
        return bool(self.standby.standings and self.standby.standings[-1].level)


def training(mode: str = "sync") -> tuple[Mover, p.Piece]:
    pair = Mover()
    pair.primary.open(mode=mode)
    pair.primary.init("w", [1.0, 2.0, 3.0])
    pair.primary.optimizer("sgd", lr=1.0, momentum=0.5)
    (piece,) = pair.primary.pieces["w"]
    if mode == "sync":
        pair.rounds(2)
    return pair, piece


def finished(stage: Stage) -> list[tuple[int, object]]:
    return [(note.ticket, note.value) for note in stage.notes if isinstance(note, Finish)]


@pytest.mark.spec("R470")
def test_a_seat_is_handed_over_between_two_rounds() -> None:
    pair, piece = training()
    item = pair.primary
    assert item.server._replicator is None
    assert not heard(pair.do(0, of(0, push(piece, 2)), GRADIENT), p.Pulled)
    pair.name()
    pair.ask()
    pair.pump()
    assert not pair.is_level, "round 2 is open"
    pair.do(1, of(1, push(piece, 2)), GRADIENT)
    pair.pump()
    assert heard(pair.said, p.Pulled), "the standby has what it tells"
    assert pair.is_level
    assert pair.do(0, of(0, push(piece, 3)), GRADIENT) == []
    assert item.span("w").pushed == {0: 3, 1: 3}, "it is left to the next holder"
    pair.standby.pieces = item.pieces
    assert [welcome.promoted for welcome in heard(pair.promote(), p.Welcome)] == [True, True]
    said = [told for rank in range(2) for told in pair.standby.say(rank, of(rank, push(piece, 3)), GRADIENT)]
    assert heard(said, p.Pulled)
    assert pair.standby.server._replicator is None
    assert pair.standby.server.member.standing is None


@pytest.mark.spec("R471")
def test_a_server_goes_on_when_nobody_takes_its_seat_any_more() -> None:
    pair, piece = training()
    pair.level()
    assert pair.is_level
    assert pair.do(0, of(0, push(piece, 2)), GRADIENT) == []
    pair.name(0)
    pair.rounds(1, 2)
    assert pair.primary.span("w").version == 3
    server = pair.primary.server
    assert server._replicator is None
    assert server.member.standing is None
    assert server.context.outbox is server._outbox
    pair.name(LIFE + 1)
    pair.name(LIFE + 2)
    assert server._replicator is not None


@pytest.mark.parametrize("kind", ["dense", "rows"])
def test_no_round_is_opened_once_that_was_waited_for_long_enough(kind: str) -> None:
    pair, piece = training()
    item = pair.primary
    if kind == "rows":
        item.declare("r", torch.ones(3), shape=(3, 1))
        item.load("r", torch.ones(3))
    key, first = ("w", 2) if kind == "dense" else ("r", 0)

    def pushed(rank: int, number: int) -> list[Any]:
        if kind == "dense":
            return pair.do(rank, of(rank, push(piece, first + number)), GRADIENT)
        message = p.PushRows("kv", "r", 1, (rank,), number, 1, 1)
        return pair.do(rank, message, torch.tensor([1]), GRADIENT[:1])

    def counts() -> tuple[int, int]:
        counted = item.span(key).pushed
        return counted.get(0, 0) - first, counted.get(1, 0) - first

    pushed(0, 0)
    pair.name()
    pair.ask()
    pair.pump()
    item.now += PATIENCE_S / 2
    pushed(0, 1)
    pushed(1, 0)
    pair.pump()
    assert counts() == (2, 1), "rank 0 is always ahead"
    item.now += PATIENCE_S
    item.take(item.server.on_timer(item.now))
    assert not pushed(0, 2)
    assert counts() == (2, 1), "this would open a round"
    assert heard(pair.do(0, p.Probe((99,))), p.Probed), "all else is carried out"
    assert heard(pair.do(0, p.PushRows("kv", "unknown", 1, (0,), 0, 1, 0)), p.Error)
    item.now += GATE_S
    pushed(0, 2)
    assert counts() == (3, 1), "the round waits for something that waits for this"
    item.now += PAUSE_S
    pushed(0, 3)
    assert counts() == (3, 1)
    pushed(1, 1)
    pushed(1, 2)
    pair.pump()
    assert pair.is_level


def test_a_push_to_a_table_opens_its_rounds() -> None:
    pair, piece = training()
    pair.name()
    pair.ask()
    mover = pair.primary.server._replicator
    assert isinstance(mover, Handover)
    part = p.TablePart(piece.chunk, 2, 1)
    assert mover._opens_a_round(p.PushTables((0,), (), (part,)))
    assert not mover._opens_a_round(p.PushTables((0,), (), (part._replace(number=1),)))
    assert not mover._opens_a_round(p.PushTables((0,), (), (part._replace(chunk=99),)))


def test_pushes_without_rounds_are_left_when_there_is_no_end_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvps.core.server.replicas.primary.WINDOW_BYTES", 4)
    pair, piece = training("async")
    item = pair.primary
    pair.name()
    pair.ask()
    pair.pump(2)
    number = 0
    for _ in range(3):
        pair.do(0, of(0, push(piece, number)), GRADIENT)
        number += 1
        pair.pump(2)
    item.now += PATIENCE_S + 0.1
    version = item.span("w").version
    pair.do(0, of(0, push(piece, number)), GRADIENT)
    assert item.span("w").version == version
    pair.pump()
    assert pair.is_level


def test_the_process_of_another_server_is_asked_for_a_spare() -> None:
    pair, _ = training()
    item = pair.primary
    listed = [p.Member(Role.STANDBY, 3, 0, "empty", "", "", 0.0, "")]
    view = item.server.member.view
    assert view is not None
    item.view += 1
    item.scheduler(p.View(item.view, "running", "", (*view.members, *listed)))
    assert finished(item) == [(WANTED, None)]
    item.take(item.server.retire("asked to stop", 20.0, item.now))
    item.view += 1
    item.scheduler(p.View(item.view, "running", "", (*view.members, *listed)))
    assert finished(item) == [(WANTED, None)], "not of one that is to end"


@pytest.mark.spec("R475")
def test_a_server_that_is_to_end_asks_until_it_is_told() -> None:
    pair, _ = training()
    item = pair.primary
    said = item.take(item.server.retire("asked to stop", 20.0, item.now))
    assert heard(said, p.Drain) == [p.Drain(0, 20.0)]
    item.now += 1.0
    assert heard(item.take(item.server.on_timer(item.now)), p.Drain)
    item.scheduler(p.Error(0, 3, "no other process"))
    item.scheduler(p.Beat(0))
    assert finished(item) == [(STAYS, "no other process")]
    item.now += SILENT_S + 0.1
    item.take(item.server.on_timer(item.now))
    assert finished(item)[1:] == [(STAYS, "the scheduler does not answer")]


def test_a_process_without_a_seat_ends_at_once() -> None:
    server = Server(Identity(Role.SERVER, "tcp://scheduler:1", "host", 7, "kvps 0.1"), 0.0)
    server.retire("asked to stop", 20.0, 0.0)
    assert [effect for effect in server.outbox.take() if isinstance(effect, Exit)] == [
        Exit(0, "asked to stop")
    ]


def copied(packets: list[Packet]) -> list[tuple[int, int]]:
    """Return start and size of the values in packets to the standby."""
    return [
        (packet.message.start, packet.message.size)
        for packet in packets
        if isinstance(packet.message, p.CopyValues)
    ]


def sent(pair: Mover) -> list[tuple[int, int]]:
    """Return start and size of all values that were sent to the standby."""
    return copied(pair.forward + pair.primary.sent)


def all_of(pair: Mover, number: int, count: int) -> None:
    (first,) = pair.primary.pieces["k0"]
    message = p.Push(first.chunk, 1, (0,), 1.0, True, (p.Run(first.start, 3 * count, number),))
    for rank in range(2):
        pair.do(rank, of(rank, message), torch.arange(3.0 * count) + rank)


def test_a_store_that_counts_late_pushes_moves() -> None:
    pair = Mover()
    pair.primary.open(late="next", quorum=1, grace_s=9.0, bundles=False)
    pair.primary.init("w", [1.0, 2.0, 3.0])
    (piece,) = pair.primary.pieces["w"]
    late = p.Push(piece.chunk, 1, (0,), 1.0, True, (p.Run(piece.start, 3, 0),), since=(0,))
    for rank in range(2):
        pair.do(rank, replace(late, ranks=(rank,)), GRADIENT)
    pair.level()
    span = pair.standby.server.context.chunks.by_number[piece.chunk].spans[0]
    assert isinstance(span, LateSpan)
    assert span.pushed == {0: 1, 1: 1}


def many(count: int) -> Mover:
    """Return a server with keys of 3 elements that were pushed together."""
    pair = Mover()
    pair.primary.open()
    for at in range(count):
        pair.primary.init(f"k{at}", [1.0 * at, 2.0, 3.0])
    pair.primary.optimizer("sgd", lr=1.0, momentum=0.5)
    all_of(pair, 0, count)
    return pair


def test_a_span_is_copied_by_blocks_of_whole_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvps.core.server.replicas.primary.BLOCK", 7)
    pair = many(5)
    pair.wait(RECENT_S)
    pair.name()
    pair.ask()
    for packet in pair.standby.sent:
        pair.primary.hear(b"q", packet)
    assert copied(pair.primary.sent) == [(0, 6), (6, 6), (12, 3)]
    pair.standby.sent.clear()
    pair.pump()
    assert pair.is_level
    pair.standby.pieces = pair.primary.pieces
    for key in pair.primary.pieces:
        assert pair.standby.values(key) == pair.primary.values(key)
    pair.promote()
    (first,) = pair.primary.pieces["k0"]
    message = p.Push(first.chunk, 1, (0,), 1.0, True, (p.Run(first.start, 15, 1),))
    said = [
        told for rank in range(2) for told in pair.standby.say(rank, of(rank, message), torch.arange(15.0))
    ]
    assert [run.size for run in heard(said, p.Pulled)[0].runs] == [15], "one span again"


def test_the_rest_of_a_span_that_has_changed_again_is_not_copied_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvps.core.server.replicas.primary.BLOCK", 2)
    monkeypatch.setattr("kvps.core.server.replicas.primary.WINDOW_BYTES", 25)
    pair = many(4)
    pair.wait(RECENT_S)
    item = pair.primary
    pair.name()
    pair.ask()
    for packet in pair.standby.sent:
        item.hear(b"q", packet)
    pair.standby.sent.clear()
    assert copied(item.sent) == [(0, 3), (3, 3)], "the window is full"
    all_of(pair, 1, 4)
    pair.pump()
    pair.wait(PATIENCE_S)
    pair.pump()
    assert pair.is_level
    assert sent(pair)[2:] == [(0, 3), (3, 3), (6, 3), (9, 3)]


def test_still_values_are_copied_at_once_and_moving_values_after_the_next_round() -> None:
    pair, piece = training()
    item = pair.primary
    item.init("still", [4.0, 5.0])
    pair.do(0, of(0, push(piece, 2)), GRADIENT)
    pair.begin()
    (still,) = item.pieces["still"]
    assert sent(pair) == [(still.start, 2)]
    item.init("other", [6.0])
    pair.pump()
    assert len(sent(pair)) == 2, "round 2 is open"
    pair.do(1, of(1, push(piece, 2)), GRADIENT)
    pair.pump()
    assert sent(pair)[2:] == [(piece.start, 3)], "once"
    assert pair.is_level


def test_no_round_is_opened_while_moving_values_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvps.core.server.replicas.primary.WINDOW_BYTES", 1)
    monkeypatch.setattr("kvps.core.server.replicas.primary.BLOCK", 1)
    monkeypatch.setattr("kvps.core.server.replicas.handover.STILL_BYTES", 1)
    count = 8
    pair = many(count)
    item = pair.primary
    pair.begin()
    assert sent(pair) == []
    all_of(pair, 1, count)
    for at in range(count):
        assert sent(pair) == [(3 * done, 3) for done in range(at + 1)]
        all_of(pair, 2, count)
        assert item.span("k0").version == 2
        assert not pair.is_level
        pair.wait(1.5 * GATE_S / count)  # a copy that goes on is waited for
        pair.forth()
        pair.back()
    pair.pump()
    assert pair.is_level
    assert len(sent(pair)) == count


def test_rounds_are_opened_again_when_nothing_of_the_copy_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvps.core.server.replicas.handover.STILL_BYTES", 1)
    pair, piece = training()
    pair.begin()
    pair.rounds(1, 2)
    pair.primary.now += GATE_S
    pair.rounds(1, 3)
    assert pair.primary.span("w").version == 4
    pair.pump()
    assert pair.is_level
    assert sent(pair) == [(piece.start, 3)] * 2


def test_new_rows_are_copied_before_changed_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvps.core.server.replicas.tables.BLOCK_BYTES", 1)
    monkeypatch.setattr("kvps.core.server.replicas.primary.WINDOW_BYTES", 1)
    pair = Mover()
    pair.primary.open()
    pair.do(0, message_of("kv", KEY, recipe()))
    (table,) = pair.primary.server.context.stores["kv"].shards[KEY].pieces

    def push_rows(number: int, *ids: int) -> None:
        for rank in range(2):
            message = push_table(table.chunk, 1, (rank,), number, 2, len(ids))
            pair.do(rank, message, torch.tensor(ids), torch.ones(2 * len(ids)))

    def rows() -> list[int]:
        packets = pair.forward + pair.primary.sent
        return [packet.message.rows for packet in packets if isinstance(packet.message, p.CopyRows)]

    push_rows(0, 1, 2, 3)
    pair.name()
    pair.ask()
    pair.back()
    assert rows() == [1]
    push_rows(1, 1, 3)
    pair.pump()
    assert rows() == [1] * 3, "the last with what it is now"
    assert not pair.is_level
    pair.wait(PATIENCE_S)
    pair.pump()
    assert rows() == [1] * 4
    assert pair.is_level
    stores = [stage.server.context.stores["kv"] for stage in (pair.primary, pair.standby)]
    here, there = [store.chunk_at(table).table.block(0, 9, with_state=True) for store in stores]
    assert here.ids.tolist() == there.ids.tolist()
    assert all(torch.equal(rows, there.columns[name]) for name, rows in here.columns.items())


@pytest.mark.spec("R470")
def test_published_versions_move_with_the_seat() -> None:
    pair, piece = training()
    row = torch.tensor([1.5, 2.5])
    pair.do(0, p.Freeze("kv", "policy", 1, 2, 0, (piece.chunk,)))
    pair.do(0, p.Put("kv", "policy", 1, 2, 100, row.nbytes), row)
    pair.do(0, p.Announce("kv", "policy", 1, 2, 2), MANIFEST)
    pair.level()
    here, there = [stage.server.publications.by_name["policy"] for stage in (pair.primary, pair.standby)]
    assert (
        bytes(there.versions[1].manifest or b"")
        == bytes(here.versions[1].manifest or b"")
        == MANIFEST.numpy().tobytes()
    )
    assert there.versions[1].blocks.keys() == here.versions[1].blocks.keys()
