"""kvps-worker's side of a seat: when its command starts, how it is ended, and what is said of it."""

import signal
from collections.abc import Iterable

from kvps.core.effects import Effect, Exit, Finish, Note, Send
from kvps.core.membership_client import Identity
from kvps.core.supervisor import ASK, END_MAX_S, KILL, LEAVE_MAX_S, OVER_MAX_S, START, Supervisor
from kvps.errors import ConfigError, Fenced
from kvps.protocol.envelope import Envelope, Message, Packet, Role
from kvps.protocol.membership import Beat, Error, Leave, Left, Member, Stop, View, Welcome
from tests.support.effects import taken

JOB = b"job of the tests"
AT = "tcp://127.0.0.1:9091"
WELCOME = Welcome(2, 7, 4, 1, 0, 2, "10.0.0.1:29500")


class Stage:
    """A supervisor, its clock, and a scheduler that says what the test wants."""

    def __init__(self, is_replaceable: bool = True, **limits: float) -> None:
        identity = Identity(Role.WORKER, AT, "host", 9, "kvps", 2, guardian=True, master="m:1")
        self.now = 100.0
        self.supervisor = Supervisor(identity, self.now, is_replaceable, **limits)
        self.started = taken(self.supervisor, self.supervisor.start(self.now))

    def hear(self, message: Message) -> list[Effect]:
        packet = Packet(Envelope(JOB, 0, Role.SCHEDULER, 0, 0, 0), message)
        return taken(self.supervisor, self.supervisor.on_packet("scheduler", packet, self.now))

    def wait(self, seconds: float) -> list[Effect]:
        """Let time pass; return what was done, but for beats."""
        until, effects = self.now + seconds, list[Effect]()
        while (due := self.supervisor.deadline()) is not None and due <= until:
            if exits(effects):
                break
            assert due >= self.now or not effects, "a deadline that does not move on"
            self.now = max(self.now, due)
            effects += taken(self.supervisor, self.supervisor.on_timer(self.now))
        self.now = until
        return [effect for effect in effects if not isinstance(effect, Send) or said(effect) != Beat(0)]

    def signal(self, number: int) -> list[Effect]:
        return taken(self.supervisor, self.supervisor.on_signal(number, self.now))

    def end(self, code: int, reason: str = "it ended") -> list[Effect]:
        return taken(self.supervisor, self.supervisor.on_end(code, reason, self.now))


def running(is_replaceable: bool = True, **limits: float) -> Stage:
    stage = Stage(is_replaceable, **limits)
    assert Finish(START, WELCOME) in stage.hear(WELCOME)
    return stage


def view(state: str, incarnation: int = 7) -> View:
    return View(3, "running", "", (Member(2, 2, incarnation, state, "", "host", 0.0, ""),))


def said(effect: Effect) -> Message:
    assert isinstance(effect, Send)
    assert effect.to == "scheduler"
    return effect.packet.message


def leaves(effects: Iterable[Effect]) -> list[Leave]:
    sends = [said(effect) for effect in effects if isinstance(effect, Send)]
    return [send for send in sends if isinstance(send, Leave)]


def exits(effects: Iterable[Effect]) -> list[Exit]:
    return [effect for effect in effects if isinstance(effect, Exit)]


class TestJoining:
    def test_waits_as_long_as_the_scheduler_says_so(self) -> None:
        stage = Stage()
        for _ in range(10):
            assert not exits(stage.wait(30))
            assert stage.hear(Beat(0, "waiting for 1 of 4 workers")) == []
        (end,) = exits(stage.wait(61))
        assert end.code == 75
        assert f"no answer from the scheduler at {AT} for 60 s" in end.reason

    def test_comes_too_late(self) -> None:
        for code, exit_code in ((0, 75), (1, 1), (75, 75)):
            assert exits(Stage().hear(Stop(code, "every worker left"))) == [
                Exit(exit_code, "the job is over: every worker left")
            ]

    def test_is_asked_to_stop(self) -> None:
        assert Stage().signal(signal.SIGTERM) == [Exit(143, "asked to stop by SIGTERM")]


class TestRunning:
    def test_starts_the_command_once(self) -> None:
        assert Finish(START, WELCOME) not in running().hear(WELCOME)

    def test_says_that_the_command_is_done(self) -> None:
        stage = running()
        assert leaves(stage.end(0, "done")) == [Leave(True, 0, True, "done")]
        assert stage.hear(Left()) == [Exit(0, "done")]

    def test_a_wrong_configuration_is_not_replaced(self) -> None:
        """Another start would end like this one: nobody has to wait for it."""
        assert leaves(running(True).end(78, "why")) == [Leave(False, 78, False, "why")]

    def test_says_it_again_but_not_for_ever(self) -> None:
        stage = running()
        stage.end(3)
        effects = stage.wait(LEAVE_MAX_S + 1)
        assert len(leaves(effects)) == LEAVE_MAX_S
        assert [effect.text for effect in effects if isinstance(effect, Note)] == [
            "the scheduler did not answer LEAVE in 5 s"
        ]
        assert exits(effects)[0] == Exit(3, "it ended")

    def test_passes_a_signal_on_and_kills_what_does_not_heed_it(self) -> None:
        stage = running()
        assert stage.signal(signal.SIGINT) == [Finish(ASK, signal.SIGINT)]
        assert stage.wait(END_MAX_S - 0.1) == []
        assert stage.wait(0.2) == [Finish(KILL)]
        assert leaves(stage.end(137)) == [Leave(False, 137, True, "it ended")]
        assert not [item for item in stage.wait(60) if isinstance(item, Finish)]

    def test_gives_a_command_that_may_leave_its_time_for_that(self) -> None:
        stage = running(grace_s=30.0)
        assert stage.signal(signal.SIGTERM) == [Finish(ASK, signal.SIGTERM)]
        assert stage.wait(29.9) == []
        assert stage.wait(0.2) == [Finish(KILL)]
        stage = running(grace_s=30.0)
        stage.signal(signal.SIGINT)
        assert stage.wait(END_MAX_S + 0.1) == [Finish(KILL)]

    def test_kills_at_the_second_signal(self) -> None:
        stage = running()
        stage.signal(signal.SIGTERM)
        assert stage.signal(signal.SIGTERM) == [Finish(KILL)]

    def test_is_fenced(self) -> None:
        stage = running()
        note, ask = stage.hear(Error(0, Fenced.code, "another has your rank"))
        assert note == Note("error", "another has your rank; ending the command")
        assert ask == Finish(ASK, signal.SIGTERM)
        assert stage.wait(END_MAX_S + 0.1) == [Finish(KILL)]
        assert exits(stage.end(137)) == [Exit(137, "it ended")]

    def test_another_error_is_only_noted(self) -> None:
        stage = running()
        assert stage.hear(Error(0, ConfigError.code, "well")) == [Note("warning", "well")]


class TestTheJobIsOver:
    def test_a_command_that_does_not_notice_is_ended(self) -> None:
        stage = running()
        stage.hear(Stop(75, "stopped"))
        assert stage.hear(Stop(75, "stopped")) == []
        effects = stage.wait(OVER_MAX_S + END_MAX_S + 1)
        assert effects == [
            Note("error", "the job is over: stopped, and the command goes on; ending it"),
            Finish(ASK, signal.SIGTERM),
            Finish(KILL),
        ]
        assert stage.hear(Stop(75, "stopped")) == []

    def test_a_command_that_has_left_goes_on(self) -> None:
        stage = running()
        stage.hear(view("left"))
        stage.hear(Stop(1, "worker 0 is gone"))
        assert stage.wait(1000) == []
        assert exits(stage.end(0)) == [Exit(0, "it ended")]

    def test_the_former_holder_of_the_seat_had_left(self) -> None:
        stage = running()
        stage.hear(view("left", incarnation=6))
        stage.hear(Stop(1, "worker 0 is gone"))
        assert Finish(ASK, signal.SIGTERM) in stage.wait(1000)
