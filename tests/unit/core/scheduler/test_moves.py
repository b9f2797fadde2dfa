"""Moves: which seats of servers other processes get, in which order, and what the askers are told."""

import pytest

from kvps.core.effects import Effect, Finish
from kvps.core.scheduler.handover import SERVERS
from kvps.core.scheduler.standbys import GATHER_MAX_S
from kvps.errors import ConfigError, ServerLost, Timeout
from kvps.protocol.envelope import Envelope, Node, Role
from kvps.protocol.membership import (
    Beat,
    Done,
    Drain,
    Error,
    Move,
    Scale,
    Standing,
    Stop,
    View,
    Welcome,
)
from tests.support.scheduler_harness import Stage, notes, sent, told
from tests.unit.core.scheduler.test_standbys import copied, row, spare, standby_of

OPERATOR = Envelope(bytes(16), 0, Role.WORKER, 0, 0, 42)


def formed(servers: int = 2, **limits: object) -> Stage:
    stage = Stage(1, servers, **limits)
    stage.form()
    return stage


def ask(stage: Stage, message: Drain | Scale, route: str = "op") -> list[Effect]:
    stage.peers.setdefault(route, stage.peers["w0"].__class__(Role.WORKER))
    return stage.say(route, message, envelope=OPERATOR)


def here(stage: Stage) -> list[str]:
    """The members that have connections."""
    return [str(route) for route in stage.scheduler.job.seats.routes]


def take(stage: Stage, process: str, name: str = "") -> list[Effect]:
    """A process offers itself, gets the seat that moves, and has all."""
    route = name or f"{process}b"
    effects = spare(stage, process, route)
    effects += stage.wait(GATHER_MAX_S, here(stage))
    assert sent(effects, Welcome, route), notes(effects)
    return effects + stage.say(route, Standing(level=True, copied=100))


def lines(stage: Stage) -> dict[str, int]:
    return stage.scheduler.job.view(stage.now).lines


# --- drain ----------------------------------------------------------------------------------------


@pytest.mark.spec("R462", "R469", "R470")
def test_a_seat_moves_to_a_spare_that_has_all() -> None:
    stage = formed(persist=True)
    former = row(stage, Role.SERVER, 1).incarnation
    effects = ask(stage, Drain(1, 60.0))
    assert standby_of(stage, 1) == ("empty", "")
    assert set(told(effects, View)) == {"w0", "s0", "s1"}
    assert stage.scheduler.seen(1, stage.now).moves == (Move(1, "", 0.0, 0.0, False),)
    effects = spare(stage, "s0")
    (welcome,) = sent(effects, Welcome, "s0b")
    assert (welcome.rank, welcome.follows, welcome.replicas) == (1, True, 0)
    assert standby_of(stage, 1) == ("held", "host-s0")
    stage.now += 3.0
    for route in here(stage):
        stage.beat(route)
    assert stage.scheduler.seen(1, stage.now).moves == (Move(1, "host-s0:7", 3.0, 0.0, False),)
    assert stage.scheduler.seen(1, stage.now).copies == ()
    effects = stage.say("s0b", Standing(level=True))
    (stop,) = sent(effects, Stop, "s1")
    assert stop == Stop(0, "server 1 is at host-s0:7 from now on")
    (done,) = sent(effects, Done, "op")
    assert done.seq == 42
    member = row(stage, Role.SERVER, 1)
    assert (member.host, member.state) == ("host-s0", "held")
    assert lines(stage) == {"1": former}
    assert Node(Role.STANDBY, 1) not in stage.scheduler.job.seats.by_node
    assert any("server 1 has moved from host-s1:7 to host-s0:7 in 3.0 s" in note for note in notes(effects))
    assert stage.scheduler.seen(1, stage.now).moves == (Move(1, "host-s0:7", 0.0, 3.0, True),)
    assert stage.scheduler.seen(1, stage.now).promotions == ()
    stage.restart()
    assert lines(stage) == {"1": former}


@pytest.mark.spec("R462")
def test_the_line_of_a_seat_that_moves_again_stays() -> None:
    stage = formed()
    first = row(stage, Role.SERVER, 1).incarnation
    ask(stage, Drain(1, 60.0))
    take(stage, "s0")
    ask(stage, Drain(1, 60.0))  # both are in the process of server 0 now
    take(stage, "s2")
    take(stage, "s2", "s2c")
    assert [row(stage, Role.SERVER, rank).host for rank in range(2)] == ["host-s2", "host-s2"]
    assert lines(stage)["1"] == first
    assert [each.rank for each in stage.scheduler.job.standbys.moves.moved] == [1, 0, 1]


def test_a_server_beside_a_worker_in_one_process_stays() -> None:
    stage = Stage(1, 1)
    stage.hello("s0", rank=0, host="h", pid=3, endpoint="tcp://s0:1")
    stage.hello("w0", rank=0, host="h", pid=3)
    for order in (Drain(0, 60.0), Scale(1, 60.0)):
        (error,) = sent(ask(stage, order), Error, "op")
        assert error.code == ConfigError.code
        assert "server 0 is a thread of a worker's process, as in a LocalCluster" in error.text
    assert not stage.scheduler.job.standbys.moves.orders


def test_two_processes_are_drained_one_after_the_other() -> None:
    stage = formed(3)
    ask(stage, Drain(1, 60.0))
    ask(stage, Drain(2, 60.0), "op2")
    assert not sent(ask(stage, Drain(2, 60.0), "op3"), Error), "it is under way"
    assert standby_of(stage, 1) == ("empty", "")
    assert sent(take(stage, "s0"), Done, "op")
    effects = take(stage, "s0", "s0c")
    assert sent(effects, Done, "op2")
    assert sent(effects, Done, "op3")


@pytest.mark.spec("R463", "R464")
def test_a_spare_of_a_process_that_is_drained_is_told_to_stop() -> None:
    stage = formed()
    ask(stage, Drain(1, 60.0))
    assert sent(spare(stage, "s1"), Stop, "s1b")
    take(stage, "s0")
    ask(stage, Drain(0, 60.0))
    assert sent(spare(stage, "s1"), Stop, "s1b"), "it has been drained, and is about to end"
    stage = copied()
    spare(stage, "s1", "s1c")
    effects = ask(stage, Drain(1, 60.0))
    assert {"s1", "s1b", "s1c"} == set(told(effects, Stop))
    assert row(stage, Role.SERVER, 1).host == "host-s0"
    assert standby_of(stage, 0) == ("empty", ""), "in a job with copies its copy is made again"
    assert sent(effects, Done, "op")


@pytest.mark.spec("R463")
def test_spares_that_wait_are_told_when_no_seat_moves_any_more() -> None:
    stage = formed()
    ask(stage, Drain(1, 60.0))
    (beat,) = sent([*spare(stage, "s0"), *spare(stage, "s2")], Beat, "s2b")
    assert "a spare" in beat.reason
    effects = stage.say("s0b", Standing(level=True))
    assert sent(effects, Stop, "s2b") == [Stop(0, "no seat is moved any more")]
    (error,) = sent(spare(stage, "s2"), Error, "s2b")
    assert "no standbys" in error.text


@pytest.mark.spec("R464")
def test_impossible_orders_are_refused() -> None:
    stage = Stage(1, 2)
    stage.hello("s0", rank=0)
    stage.hello("w0", rank=0)
    for message in (Drain(0, 1.0), Scale(1, 1.0)):
        (error,) = sent(ask(stage, message), Error)
        assert "the job does not run (waiting for" in error.text
    stage.hello("s1", rank=1)
    for message, why in (
        (Drain(7, 1.0), "server 7 is none of the 2 of this job, 0 to 1"),
        (Drain(0, 0.0), "a time limit of 0.0 s is not possible"),
        (
            Scale(0, 1.0),
            "cannot scale to 0: this job has 2 seats of servers, which 1 to 2 processes can hold",
        ),
        (Scale(3, 1.0), "cannot scale to 3"),
    ):
        (error,) = sent(ask(stage, message), Error)
        assert error.code == ConfigError.code
        assert why in error.text
    stage.leave("s0", done=False)
    (error,) = sent(ask(stage, Drain(0, 1.0)), Error)
    assert "server 0 is lost: there is no seat to hand over" in error.text


@pytest.mark.spec("R464", "R475")
def test_a_server_that_asks_itself_is_refused_where_nobody_can_take_its_seat() -> None:
    stage = formed()
    effects = stage.say("s0", Drain(0, 20.0))
    assert not sent(effects, Error)
    assert [beat.reason for beat in sent(effects, Beat, "s0")] == ["its seats are handed over"]
    assert not notes(stage.say("s0", Drain(0, 20.0))), "said again"
    (error,) = sent(stage.say("s1", Drain(1, 20.0)), Error)
    assert "no other process can take the seat of server 1" in error.text
    (error,) = sent(stage.say("w0", Drain(0, 20.0)), Error)
    assert "only servers and operators may" in error.text
    stage = formed(1)
    (error,) = sent(stage.say("s0", Drain(0, 20.0)), Error)
    assert "no other process" in error.text
    assert not sent(ask(stage, Drain(0, 20.0)), Error), "an operator may start one"


@pytest.mark.spec("R473")
def test_an_order_that_takes_too_long_is_given_up() -> None:
    stage = formed()
    ask(stage, Drain(1, 5.0))
    effects = stage.wait(5.5, here(stage))
    (error,) = sent(effects, Error, "op")
    assert error.code == Timeout.code
    assert (
        "drain server 1: it has taken more than 5 s: no process is there that may take the seat" in error.text
    )
    assert Node(Role.STANDBY, 1) not in stage.scheduler.job.seats.by_node
    ask(stage, Drain(1, 5.0))
    spare(stage, "s0")
    effects = stage.wait(5.5, here(stage))
    (error,) = sent(effects, Error, "op")
    assert "host-s0:7 has not taken the seat of server 1" in error.text
    assert sent(effects, Stop, "s0b")
    assert stage.scheduler.job.standbys.moves.begun == {}


@pytest.mark.spec("R474")
@pytest.mark.parametrize("is_target", [False, True], ids=["the server", "the target"])
def test_a_server_that_cannot_be_copied_keeps_its_seat(is_target: bool) -> None:
    stage = formed()
    for target in ("s0b", "s0c"):
        ask(stage, Drain(1, 60.0))
        spare(stage, "s0", target)
        stage.wait(GATHER_MAX_S, here(stage))
        why = f"no room for key {'w' * 200!r}: raise the limit"  # its end says what to do
        effects = stage.say(target if is_target else "s1", Standing(reason=why))
        (error,) = sent(effects, Error, "op")
        assert f"the seat of server 1 cannot be handed over: {why}. The job goes on" in error.text
        assert sent(effects, Stop, target)
        assert row(stage, Role.SERVER, 1).host == "host-s1"
        assert not sent(stage.say("s1", Standing(reason="late")), Error)


@pytest.mark.spec("R474")
def test_a_server_whose_copy_is_known_to_be_impossible_is_refused_at_once() -> None:
    stage = copied()
    stage.say("s0b", Standing(level=False))
    stage.say("s1", Standing(reason="store 'kv' has embedding tables"))
    (error,) = sent(ask(stage, Drain(1, 60.0)), Error, "op")
    assert "store 'kv' has embedding tables" in error.text


@pytest.mark.spec("R472")
def test_a_server_that_is_lost_meanwhile_is_lost_as_ever() -> None:
    stage = formed()
    ask(stage, Drain(1, 60.0))
    spare(stage, "s0")
    effects = stage.leave("s1", done=False, code=1)
    (error,) = sent(effects, Error, "op")
    assert error.code == ServerLost.code
    assert "server 1 was lost before another process had all of its values" in error.text
    assert sent(effects, Stop, "s0b")
    assert row(stage, Role.SERVER, 1).state == "lost"


@pytest.mark.spec("R471")
def test_a_target_that_is_lost_is_replaced_by_another() -> None:
    stage = formed()
    ask(stage, Drain(1, 60.0))
    spare(stage, "s0")
    stage.drop("s0b")
    stage.wait(1.2, ["s0", "s1", "w0"])
    assert standby_of(stage, 1) == ("empty", "")
    take(stage, "s2")
    assert row(stage, Role.SERVER, 1).host == "host-s2"


@pytest.mark.spec("R471")
def test_a_restarted_scheduler_drops_a_copy_unless_it_is_asked_again() -> None:
    stage = formed(persist=True)
    ask(stage, Drain(1, 60.0))
    spare(stage, "s0")
    number = stage.scheduler.job.number
    stage.restart()
    assert Node(Role.STANDBY, 1) not in stage.scheduler.job.seats.by_node
    assert stage.scheduler.job.number > number
    assert not sent(stage.beat("s1"), Stop)


# --- scale ----------------------------------------------------------------------------------------


@pytest.mark.spec("R464", "R470")
def test_processes_go_and_come() -> None:
    stage = formed(3)
    assert sent(ask(stage, Scale(3, 60.0)), Done), "as it is"
    effects = ask(stage, Scale(2, 60.0))
    assert [
        effect.value for effect in effects if isinstance(effect, Finish) and effect.ticket == SERVERS
    ] == [2]
    assert not sent(ask(stage, Scale(2, 60.0)), Error), "asked again"
    (error,) = sent(ask(stage, Scale(1, 60.0)), Error)
    assert "scale to 2 is under way" in error.text
    assert standby_of(stage, 2) == ("empty", "")
    assert sent(take(stage, "s0"), Done)
    assert row(stage, Role.SERVER, 2).host == "host-s0"
    ask(stage, Scale(3, 60.0))
    assert standby_of(stage, 2) == ("empty", ""), "the newest seat of the process that has the most"
    spare(stage, "s1")
    stage.wait(2 * GATHER_MAX_S, here(stage))
    assert standby_of(stage, 2) == ("empty", ""), "a process that has one would have two"
    assert sent(take(stage, "s9"), Done)
    assert [row(stage, Role.SERVER, rank).host for rank in range(3)] == ["host-s0", "host-s1", "host-s9"]


def test_a_change_of_number_joins_a_drain_that_waits() -> None:
    stage = formed()
    ask(stage, Drain(1, 60.0))
    effects = ask(stage, Scale(2, 60.0), "op2")
    assert not sent(effects, Error), notes(effects)
    assert Finish(SERVERS, 3) in effects, "two, and the one that leaves"
    effects = take(stage, "s9")
    assert sent(effects, Done, "op")
    assert sent(effects, Done, "op2")
    assert [row(stage, Role.SERVER, rank).host for rank in range(2)] == ["host-s0", "host-s9"]
    ask(stage, Drain(1, 60.0))
    assert not sent(ask(stage, Scale(1, 60.0), "op2"), Done), "two processes hold seats until that is drained"
    effects = take(stage, "s0", "s0c")
    assert sent(effects, Done, "op")
    assert sent(effects, Done, "op2")


@pytest.mark.parametrize("asks", [1, 0])
def test_a_process_takes_a_lost_seat_if_its_own_is_elsewhere(asks: int) -> None:
    """The seat of rank 1 moved, or the lost one did: in each case the process is not a second one."""
    stage = formed()
    ask(stage, Drain(1, 60.0))
    take(stage, "s9")
    lost = "s0" if asks else "s9b"
    stage.drop(lost)
    effects = stage.hello("again", "server", rank=asks)
    assert sent(effects, Beat, "again"), "whether the holder is alive is not known yet"
    assert not sent(effects, Error)
    effects = stage.wait(3.0, here(stage))
    effects += stage.hello("again", "server", rank=asks)
    (welcome,) = sent(effects, Welcome, "again")
    assert welcome.rank == 1 - asks
    stage.hello("third", "server", rank=asks)
    for route in here(stage):
        stage.alive(route)
    (error,) = sent(stage.hello("third", "server", rank=asks), Error, "third")
    assert "was it started twice?" in error.text


def test_more_processes_are_waited_for() -> None:
    stage = formed()
    ask(stage, Drain(1, 60.0))
    take(stage, "s0")
    ask(stage, Scale(2, 3.0))
    (error,) = sent(stage.wait(3.5, here(stage)), Error, "op")
    assert "no process is there that may take the seat of server 1: start kvps-server" in error.text


@pytest.mark.spec("R470")
def test_in_a_job_with_copies_the_copy_goes_where_the_seat_is_to_go() -> None:
    stage = copied()
    stage.leave("s1", done=False)  # its copy goes on beside server 0
    assert row(stage, Role.SERVER, 1).host == "host-s0"
    spare(stage, "s9", "s9c")
    stage.wait(GATHER_MAX_S, here(stage))
    spare(stage, "s9", "s9d")
    stage.wait(GATHER_MAX_S, here(stage))
    for route in ("s9c", "s9d"):
        stage.say(route, Standing(level=True))
    assert sent(ask(stage, Scale(2, 60.0)), Done)
    assert sorted(row(stage, Role.SERVER, rank).host for rank in range(2)) == ["host-s0", "host-s9"]
