"""A server hands its seat to another process, in a job without copies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvps import protocol as p
from kvps.core.effects import Exit, Finish
from kvps.core.membership_client import Identity
from kvps.core.server.chunks.rounds import LateSpan
from kvps.core.server.replicas.handover import GATE_S, PATIENCE_S, PAUSE_S, Handover
from kvps.core.server.server import SILENT_S, STAYS, WANTED, Server
from kvps.protocol.envelope import Role
from tests.support.server_harness import heard
from tests.unit.core.server.test_publications import MANIFEST
from tests.unit.core.server.test_replicas import LIFE, Pair, Stage, of, push

GRADIENT = torch.tensor([2.0, 0.0, 1.0])


class Mover(Pair):
    """A server, and the process that is to have its seat."""

    def __init__(self) -> None:
        self.primary = Stage(2, 1)
        self.standby = Stage(2, 1, welcome={"follows": True}, life=LIFE, standby=LIFE, greeted=False)
        self.said: list[Any] = []

    def rounds(self, count: int, first: int = 0) -> None:
        (piece,) = self.primary.pieces["w"]
        for number in range(first, first + count):
            for rank in range(2):
                self.do(rank, of(rank, push(piece, number)), GRADIENT)

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


def copied(stage: Stage) -> list[tuple[int, int]]:
    """Return start and size of what was sent to the standby."""
    return [
        (packet.message.start, packet.message.size)
        for packet in stage.sent
        if isinstance(packet.message, p.CopyValues)
    ]


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
    pair.name()
    pair.ask()
    pair.pump()
    assert pair.is_level
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
    pair.name()
    pair.ask()
    for packet in pair.standby.sent:
        pair.primary.hear(b"q", packet)
    assert copied(pair.primary) == [(0, 6), (6, 6), (12, 3)]
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
    item = pair.primary
    pair.name()
    pair.ask()
    for packet in pair.standby.sent:
        item.hear(b"q", packet)
    pair.standby.sent.clear()
    assert copied(item) == [(0, 3), (3, 3)], "the window is full"
    all_of(pair, 1, 4)
    sent, item.sent = item.sent, []
    for packet in sent:
        pair.standby.hear("server 0", packet)  # type: ignore[arg-type]
    taken: list[tuple[int, int]] = []
    while not pair.is_level:
        back, pair.standby.sent = pair.standby.sent, []
        for packet in back:
            item.hear(b"q", packet)
        taken += copied(item)
        forth, item.sent = item.sent, []
        for packet in forth:
            pair.standby.hear("server 0", packet)  # type: ignore[arg-type]
        assert back or forth
    assert taken == [(0, 3), (3, 3), (6, 3), (9, 3)]


def test_after_the_first_pass_nothing_is_copied_that_is_about_to_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvps.core.server.replicas.handover.STILL_BYTES", 1)
    pair, piece = training()
    item = pair.primary
    pair.do(0, of(0, push(piece, 2)), GRADIENT)
    pair.name()
    pair.ask()
    pair.pump()
    item.init("other", [4.0, 5.0])
    assert copied(item) == [], "round 2 is open"
    pair.do(1, of(1, push(piece, 2)), GRADIENT)
    assert sorted(copied(item)) == [(0, 3), (3, 2)]
    mover = item.server._replicator
    assert mover is not None
    assert not mover.is_level, "calls would wait until this is there"
    pair.pump()
    assert mover.is_level
    assert pair.is_level


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
