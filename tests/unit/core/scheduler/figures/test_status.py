"""What one who looks is shown of seats and rounds."""

from dataclasses import replace

import pytest

from kvps.cli.status import screen
from kvps.core.effects import Send
from kvps.core.membership_client import BeatFigures
from kvps.core.scheduler.figures.status import TOLD_MAX_S, StatusReport, figures
from kvps.core.scheduler.scheduler import ProcessInfo, Scheduler
from kvps.core.scheduler.seat import Seat, State
from kvps.observe.document import document_of
from kvps.protocol.envelope import Envelope, Node, Packet, Role
from kvps.protocol.membership import (
    PING_BYTES_MAX,
    Beat,
    Error,
    Figures,
    HotRows,
    Look,
    Measured,
    OldRound,
    Ping,
    Pong,
    PublicationFigures,
    Seen,
)
from tests.support.effects import taken
from tests.support.scheduler_harness import Stage, sent

NOBODY = Envelope(bytes(16), 0, Role.WORKER, 0, 0, 9)
OLD = OldRound(0, "kv", "w", 7, (1,), 12.0)


def held(*servers: int) -> dict[Node, Seat]:
    nodes = [Node(Role.SERVER, rank) for rank in servers]
    return {node: Seat(node, State.HELD, 1) for node in nodes}


def told(rounds: tuple[OldRound, ...], late: dict[str, float] | None = None) -> Measured:
    """Return the figures that a server sends unasked."""
    return Measured(0, (), (), (), (), rounds, late or {})


def look(stage: Stage) -> Seen:
    stage.peers.setdefault("looker", replace(stage.peers["w0"], incarnation=0))
    (seen,) = sent(stage.say("looker", Look(), envelope=NOBODY), Seen, "looker")
    return seen


@pytest.mark.spec("R129")
def test_of_each_store_the_oldest_round_of_all_servers_is_shown_as_old_as_it_is_now() -> None:
    picture = StatusReport()
    picture.tell(0, told((OLD, OLD._replace(store="other", age_s=30.0))), 100.0)
    picture.tell(1, told((OLD._replace(key="b", age_s=15.0),)), 101.0)
    picture.tell(2, told((OLD._replace(key="c", age_s=3.0),)), 102.0)
    shown = picture.rounds(held(0, 1, 2), 102.0)
    assert [(item.server, item.store, item.key, item.age_s) for item in shown] == [
        (0, "other", "w", 32.0),
        (1, "kv", "b", 16.0),
    ]
    picture.tell(1, told(()), 103.0)
    assert [round_.server for round_ in picture.rounds(held(0, 1, 2), 103.0)] == [0, 0]


@pytest.mark.spec("R129")
def test_a_server_that_is_silent_or_lost_tells_nothing() -> None:
    picture = StatusReport()
    picture.tell(0, told((OLD,)), 100.0)
    seats = held(0)
    assert picture.rounds(seats, 100.0 + TOLD_MAX_S)
    assert not picture.rounds(seats, 100.1 + TOLD_MAX_S)
    seats[Node(Role.SERVER, 0)].lose("its connection broke", 100.0)
    assert not picture.rounds(seats, 100.0)


@pytest.mark.spec("R128")
def test_look_is_answered_at_once_and_changes_nothing() -> None:
    stage = Stage(2, 1)
    stage.hello("w0", "worker")
    before, saved = stage.states(), stage.saved
    seen = look(stage)
    assert (seen.seq, seen.phase) == (9, "forming")
    assert [(member.role, member.state) for member in seen.members] == [
        (2, "held"),
        (2, "empty"),
        (1, "empty"),
    ]
    stage.hello("w1", "worker")
    stage.hello("s0", "server")
    running = look(stage)
    assert running.phase == "running"
    assert {member.state for member in running.members} == {"held"}
    assert before != stage.states()
    now, saved = stage.states(), stage.saved
    look(stage)
    assert (stage.states(), stage.saved) == (now, saved)


@pytest.mark.spec("R129", "R465")
def test_stalled_rounds_of_servers_are_shown() -> None:
    stage = Stage(2, 1)
    stage.form()
    stage.say("s0", told((OLD,)))
    stage.wait(1.0, ["w0", "w1", "s0"])
    (shown,) = look(stage).rounds
    assert shown == OLD._replace(age_s=13.0)
    (error,) = sent(stage.say("w0", told((OLD,))), Error)
    assert "worker 0 sent Measured; only a server or standby may" in error.text


@pytest.mark.spec("R661")
def test_publications_are_shown_as_old_as_they_are_now_and_each_reader_once() -> None:
    stage = Stage(1, 2)
    stage.form()
    row = PublicationFigures("a", 7, 2.0, 10, {"7": 2, "5": 1})
    for server, rows in enumerate(
        [(row, row._replace(name="\x1b")), (row._replace(version=8, readers={"7": 3}),)]
    ):
        stage.say(f"s{server}", Measured(0, (), (), (), (), (), {}, rows))
    stage.wait(1.0, ["w0", "s0", "s1"])
    first, other = look(stage).publications
    assert (first.name, first.size) == ("?", 10)
    assert other == PublicationFigures("a", 8, 3.0, 20, {"7": 3, "5": 1})
    lines = [line.split() for line in screen(document_of(b"job!", look(stage))).splitlines()]
    at = lines.index(["name", "version", "age", "memory", "readers"])
    assert " ".join(lines[at + 2]) == "a 8 3.0 s 20 B 3 at version 7, 1 at version 5"
    stage.wait(TOLD_MAX_S, ["w0", "s0", "s1"])
    assert look(stage).publications == ()


@pytest.mark.spec("R648")
def test_hot_rows_are_those_of_all_servers() -> None:
    stage = Stage(1, 2)
    stage.form()
    uses = {str(10 + at): 7.0 - at for at in range(8)}
    for server, rows in enumerate([(HotRows("kv", "t", uses),), (HotRows("kv", "t", {"3": 1234.4}),)]):
        stage.say(f"s{server}", Measured(0, (), (), (), (), (), hot_rows=(*rows, HotRows("kv", "a", {}))))
    empty, rows = look(stage).hot_rows
    assert empty == HotRows("kv", "a", {})
    assert rows == HotRows("kv", "t", {"3": 1234.4, **{str(10 + at): 7.0 - at for at in range(7)}})
    assert "t      kv     id 3 1,234 uses, id 10 7 uses, " in screen(document_of(b"job!", look(stage)))
    stage.wait(TOLD_MAX_S + 1.0, ["w0", "s0", "s1"])
    assert look(stage).hot_rows == ()


@pytest.mark.spec("R330")
def test_figures_come_from_beats_hellos_and_what_servers_tell() -> None:
    stage = Stage(workers=2, servers=1)
    for route in ("w0", "w1", "s0"):
        stage.hello(route)
    stage.say("w1", Beat(3, "", 7, 100, 50))
    stage.say("s0", Beat(0, "", 0, 50, 100, 4096, 8192))
    stage.say("s0", told((), {"1": 0.25, "0": 0.0}))
    seen = look(stage)
    by_node = {
        (member.role, member.rank): figures
        for member, figures in zip(seen.members, seen.figures, strict=True)
    }
    version = "kvps 0.1"
    assert by_node[Role.WORKER, 1] == Figures(version, 7, 100, 50, 0, 0, 0.25)
    assert by_node[Role.WORKER, 0] == Figures(version, 0, 0, 0, 0, 0, 0.0)
    assert by_node[Role.SERVER, 0] == Figures(version, 0, 50, 100, 4096, 8192, 0.0)
    assert (seen.epoch, seen.checkpoint) == (0, 0)


@pytest.mark.spec("R330")
def test_a_seat_that_is_not_held_has_no_figures_and_old_lateness_is_not_shown() -> None:
    report = StatusReport()
    report.tell(0, told((), {"0": 0.5}), 100.0)
    worker = Seat(Node(Role.WORKER, 0), State.HELD, 1, software="1.0")
    seats = {**held(0), worker.node: worker}
    assert [figure.late_s for figure in figures(seats, report, 100.0)] == [0.5, 0.0]
    assert [figure.late_s for figure in figures(seats, report, 100.1 + TOLD_MAX_S)] == [0.0, 0.0]
    worker.figures = BeatFigures(rounds=7)
    worker.lose("silent", 100.0)
    assert figures(seats, report, 100.0)[0] == Figures("1.0", 0, 0, 0, 0, 0, 0.0)


@pytest.mark.spec("R331")
def test_a_ping_comes_back_with_its_octets_and_the_time() -> None:
    stage = Stage(workers=1, servers=0)
    stage.scheduler = Scheduler(stage.settings, bytes(16), stage.now, ProcessInfo("1.0", lambda: 1.8e9))
    payload = memoryview(b"12345678")
    packet = Packet(NOBODY, Ping(8), (payload,))
    effects = taken(stage.scheduler, stage.scheduler.on_packet(b"x", packet, stage.now))
    (send,) = effects
    assert isinstance(send, Send)
    assert send.packet.message == Pong(9, 1.8e9, 8)
    assert send.packet.payload == (payload,)


@pytest.mark.spec("R331")
def test_a_ping_that_is_too_large_is_refused_and_too_many_are_not_answered() -> None:
    stage = Stage(workers=1, servers=0)
    large = Packet(NOBODY, Ping(PING_BYTES_MAX + 1), (memoryview(bytes(PING_BYTES_MAX + 1)),))
    (refused,) = taken(stage.scheduler, stage.scheduler.on_packet(b"x", large, stage.now))
    assert isinstance(refused, Send)
    assert isinstance(refused.packet.message, Error)
    assert "at most 262144" in refused.packet.message.text
    small = Packet(NOBODY, Ping())
    answers = [taken(stage.scheduler, stage.scheduler.on_packet(b"x", small, stage.now)) for _ in range(30)]
    assert sum([bool(answer) for answer in answers]) == stage.settings.limits.looks
