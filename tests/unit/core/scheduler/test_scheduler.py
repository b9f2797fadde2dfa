"""The conversation: what each message is answered with, and what nobody may say."""

import sys
from dataclasses import replace

import pytest

from kvps.core.effects import Effect, Finish
from kvps.core.liveness import QUIET_AFTER_S
from kvps.core.scheduler.job import CONCLUDED
from kvps.errors import ConfigError, Fenced, Mismatch, ProtocolError, WorkerLost
from kvps.protocol.checkpoint import (
    Checkpoint,
    Committed,
    Halt,
    Halted,
    ImageKept,
    ImageTaken,
    Proceeding,
    Recall,
    Restored,
)
from kvps.protocol.envelope import Envelope, Message, Packet, Role
from kvps.protocol.membership import (
    Alive,
    Barrier,
    Beat,
    Challenge,
    Done,
    Error,
    Left,
    Probed,
    Released,
    Resume,
    Resumed,
    Stop,
    View,
    Welcome,
)
from kvps.protocol.stores import Close, Closed, Status, StoreLife
from kvps.protocol.values import Pull
from tests.support.scheduler_harness import JOB, Stage, exits, notes, sent, told


def running(workers: int = 2, servers: int = 1, **limits: object) -> Stage:
    stage = Stage(workers, servers, **limits)
    stage.form()
    return stage


class TestHello:
    @pytest.mark.spec("R23")
    def test_repeated_takes_no_second_seat(self) -> None:
        stage = Stage(3, 1)
        first = sent(stage.hello("w0"), Welcome)
        assert sent(stage.hello("w0"), Welcome) == first
        assert list(stage.states().values()).count("held") == 1
        for _ in range(2):
            (answer,) = sent(stage.hello("g", "worker", guardian=True), Beat)
            assert answer.reason.startswith("waiting for 1 of 3 workers (rank 2)")
        assert list(stage.states().values()).count("held") == 2

    @pytest.mark.spec("R18")
    @pytest.mark.parametrize(("major", "where"), [(0, "host-w0:7"), (2, "the scheduler")])
    def test_of_another_major_version(self, major: int, where: str) -> None:
        stage = Stage()
        (error,) = sent(stage.hello("w0", major=major, minor=4, software="kvps 9"), Error)
        assert error.code == ProtocolError.code
        assert "speaks protocol 1.0" in error.text
        assert f"(kvps 9) speaks {major}.4: upgrade kvps at {where}" in error.text

    @pytest.mark.spec("R15", "R20")
    def test_refusals_go_to_the_offender_and_the_holder_does_not_notice(self) -> None:
        stage = running()
        before = stage.scheduler.snapshot()
        for rank in (0, 1, 2, None):
            stage.now += 1
            for route in told(stage.hello("x", "worker", rank), Challenge):
                stage.alive(route)
            effects = stage.hello("x", "worker", rank)
            assert told(effects, Error) == ["x"]
            assert sent(effects, Error)[0].code == ConfigError.code
            assert notes(effects)[0].startswith("warning: refused host-x:7: ")
        assert stage.scheduler.snapshot() == before

    @pytest.mark.spec("R215")
    def test_of_a_taken_seat_gets_it_when_the_holder_is_lost(self) -> None:
        stage = running()
        stage.hello("x", "worker", 0)
        stage.wait(11.5, ["s0", "w1"])
        assert not sent(stage.hello("x", "worker", 0), Welcome)
        stage.wait(0.5, ["s0", "w1"])
        (welcome,) = sent(stage.hello("x", "worker", 0), Welcome)
        assert (welcome.rank, welcome.incarnation, welcome.replaces) == (0, 4, True)

    @pytest.mark.spec("R218")
    def test_an_answer_to_what_was_never_asked_proves_nothing(self) -> None:
        """It was asked by the scheduler before this one, and lay in its sender's queue."""
        stage = running(persist=True)
        stage.hello("x", "worker", 0)
        stage.restart()
        stage.hello("x", "worker", 0)
        former = stage.peers["w0"].challenge
        stage.now += 1
        stage.alive("w0")
        assert told(stage.hello("x", "worker", 0), Challenge) == ["w0"]
        stage.say("w0", Alive(former))
        assert not sent(stage.hello("x", "worker", 0), Error)
        stage.alive("w0")
        assert sent(stage.hello("x", "worker", 0), Error)

    @pytest.mark.spec("R217", "R218")
    def test_a_guardian_is_known_by_its_answer_after_a_restart(self) -> None:
        stage = Stage(1, 1, persist=True)
        stage.hello("s0")
        stage.hello("w0", guardian=True)
        stage.attach("wc", "w0", pid=9)
        stage.restart()
        stage.beat("wc")
        assert told(stage.hello("x", "worker", 0), Challenge) == ["wc"]
        stage.alive("wc")
        assert not sent(stage.hello("x", "worker", 0), Error)
        stage.beat("w0")
        assert told(stage.hello("x", "worker", 0), Challenge) == ["w0"]
        stage.alive("w0", guardian=True)
        assert sent(stage.hello("x", "worker", 0), Error)

    @pytest.mark.spec("R219")
    def test_of_another_command_under_a_guardian_waits_for_a_proof(self) -> None:
        stage = Stage(1, 1)
        stage.hello("s0")
        stage.hello("w0", guardian=True)
        stage.attach("a", "w0", pid=8)
        assert told(stage.attach("b", "w0", pid=9), Challenge) == ["a"]
        stage.alive("a")
        (error,) = sent(stage.hello("b", "worker", 0, pid=9), Error)
        assert "host-a:8 already speaks for worker 0" in error.text
        stage.attach("b", "w0", pid=9)
        stage.drop("a")
        assert sent(stage.hello("b", "worker", 0, pid=9), Welcome)

    @pytest.mark.spec("R20")
    def test_of_a_rank_that_left(self) -> None:
        stage = running()
        stage.leave("w1")
        (error,) = sent(stage.hello("w5", rank=1), Error)
        assert "worker 1 is left (done)" in error.text
        (error,) = sent(stage.hello("w1", rank=1), Error)
        assert "worker 1 is left (done)" in error.text

    @pytest.mark.spec("R19")
    def test_of_another_job(self) -> None:
        stage = Stage()
        stage.hello("w0")
        stage.peers["w1"] = replace(stage.peers["w0"], job=b"x" * 16, incarnation=0)
        stage.peers["w2"] = replace(stage.peers["w0"], job=b"x" * 16)
        for route in ("w1", "w2"):
            (error,) = sent(stage.hello(route), Error)
            assert error.code == Mismatch.code
            assert JOB.hex()[:8] in error.text
            assert JOB.hex() not in error.text

    @pytest.mark.spec("R25")
    @pytest.mark.parametrize("breaks", ["connection", "scheduler"])
    @pytest.mark.parametrize(("has_spoken", "incarnation"), [(False, 2), (True, 3)])
    def test_server_that_has_not_spoken_keeps_its_incarnation(
        self, has_spoken: bool, incarnation: int, breaks: str
    ) -> None:
        """The welcome did not reach the server. Of one that has spoken, the next of its name may be another process."""
        stage = Stage(1, 1, persist=True)
        stage.hello("w0")
        stage.hello("s0", endpoint="tcp://a:1")
        if has_spoken:
            stage.beat("s0")
        if breaks == "connection":
            stage.drop("s0")
        else:
            stage.restart()
        answers = stage.hello("s1", endpoint="tcp://a:1", host="host-s0")
        assert [member.incarnation for member in sent(answers, Welcome)] == [incarnation]
        assert has_spoken or notes(answers) == ["info: server 0 joined: host-s0:7"]

    def test_of_a_role_without_seats_or_with_endless_names(self) -> None:
        stage = Stage()
        assert "cannot take a seat" in sent(stage.hello("x", "scheduler"), Error)[0].text
        for name in ("host", "endpoint", "master"):
            (error,) = sent(stage.hello("w0", **{name: "ä" * 101}), Error)
            assert "over 200 bytes" in error.text

    def test_when_the_job_is_ending(self) -> None:
        stage = Stage(3, 1)
        stage.hello("w0")
        stage.hello("g", "worker", guardian=True)
        stage.leave("w0", done=False, replaceable=False)
        for route, text in (("w9", "accepts no new members"), ("g", "the job cannot begin")):
            (error,) = sent(stage.hello(route, "worker"), Error)
            assert error.code == WorkerLost.code
            assert text in error.text


class TestAttach:
    @pytest.mark.spec("R3", "R69")
    def test_brings_a_lost_seat_back(self) -> None:
        stage = running()
        stage.drop("w1")
        stage.wait(2, beating=["s0", "w0"])
        assert stage.states()["worker 1"] == "lost"
        effects = stage.attach("again", "w1")
        assert "info: worker 1 is back" in notes(effects)
        assert stage.states()["worker 1"] == "held"
        assert sent(effects, View, "w0")

    @pytest.mark.spec("R21")
    def test_with_an_older_incarnation(self) -> None:
        stage = running()
        stage.leave("w1", done=False)
        stage.hello("w5")
        (error,) = sent(stage.attach("again", "w1"), Error)
        assert error.code == Fenced.code


class TestBeat:
    @pytest.mark.spec("R30")
    def test_is_answered_by_what_is_missing(self) -> None:
        stage = Stage(2, 2)
        stage.hello("w0")
        assert sent(stage.beat("w0", 17), Beat) == [
            Beat(17, "waiting for 1 of 2 workers (rank 1) and 2 of 2 servers (ranks 0, 1)")
        ]

    def test_of_a_script_that_calls_nothing_any_more_is_worth_a_line(self) -> None:
        stage = running()
        stage.beat("w1", 5)
        quiet = "info: worker 1 alive, but has made no call for 60 s"
        assert notes(stage.wait(QUIET_AFTER_S + 9, ["w0", "w1", "s0"])) == [quiet]
        assert notes(stage.beat("w1", 5)) == []
        assert notes(stage.beat("w1", 6)) == ["info: worker 1 calls again"]

    def test_of_a_guardian_along_another_connection_leaves_the_numbers_of_the_script(self) -> None:
        """As when it changes from the key of its role to its session key: it says no HELLO there."""
        stage = Stage(1, 0)
        stage.hello("w0", guardian=True)
        stage.attach("wc", "w0", pid=9)
        stage.peers["w0 again"] = stage.peers["w0"]
        stage.drop("w0")
        stage.say("wc", Beat(5, rounds=7, in_bytes=100))
        stage.beat("w0 again", 0)
        (seat,) = stage.scheduler.job.seats.by_node.values()
        assert (seat.figures.rounds, seat.figures.in_bytes) == (7, 100)
        stage.say("wc", Beat(5, rounds=8))
        assert seat.figures.rounds == 8

    @pytest.mark.spec("R3", "R69", "R70")
    def test_brings_a_lost_seat_back_along_a_new_route(self) -> None:
        stage = running()
        stage.wait(12, beating=["s0", "w0"])
        stage.peers["new"] = replace(stage.peers["w1"])
        effects = stage.beat("new")
        assert stage.states()["worker 1"] == "held"
        assert [view.number for view in sent(effects, View, "new")] == [3]

    @pytest.mark.spec("R17")
    def test_of_a_stranger(self) -> None:
        stage = running()
        for envelope, cls in (
            (Envelope(bytes(16), 0, Role.WORKER, 0, 0, 3), ProtocolError),
            (Envelope(JOB, 0, Role.SCHEDULER, 0, 1, 3), ProtocolError),
            (Envelope(JOB, 0, Role.WORKER, 0, 99, 3), Mismatch),
            (Envelope(b"x" * 16, 0, Role.WORKER, 0, 2, 3), Mismatch),
        ):
            stage.peers["x"] = replace(stage.peers["w0"])
            (error,) = sent(stage.say("x", Beat(0), envelope=envelope), Error)
            assert (error.seq, error.code) == (3, cls.code)


class TestLeave:
    @pytest.mark.spec("R31", "R32")
    def test_is_answered_each_time_and_counts_once(self) -> None:
        stage = running()
        effects = stage.leave("w1", reason="end of script")
        assert told(effects, Left) == ["w1"]
        assert notes(effects) == ["info: worker 1 left: done: end of script"]
        again = stage.leave("w1", done=False, code=3)
        assert told(again, Left) == ["w1"]
        assert len(again) == 1
        assert stage.states()["worker 1"] == "left"

    @pytest.mark.spec("R32")
    def test_badly(self) -> None:
        stage = running(3)
        assert "info: worker 1 lost: exit code 3" in notes(stage.leave("w1", done=False, code=3))
        assert stage.states()["worker 1"] == "lost"
        stage.leave("w2", done=False, replaceable=False)
        assert stage.states()["worker 2"] == "gone"

    def test_of_a_server_before_the_job_runs_frees_its_seat(self) -> None:
        stage = Stage(1, 1)
        stage.hello("s0")
        stage.leave("s0")
        assert stage.states()["server 0"] == "lost"
        assert sent(stage.hello("s1"), Welcome)


class TestResume:
    def resume(self, stage: Stage, route: str, pushed: int | None = 3) -> list[Effect]:
        return stage.say(route, Resume("kv", pushed), seq=9)

    @pytest.mark.spec("R124")
    @pytest.mark.parametrize("again", [False, True])
    def test_lets_the_others_pass(self, again: bool) -> None:
        stage = running(2, persist=True)
        stage.barrier("w0", seq=4)
        stage.leave("w1", done=False)
        stage.hello("w5")
        effects = self.resume(stage, "w5")
        assert sent(effects, Resumed) == [Resumed(9, True, {})]
        assert told(effects, Released) == ["w0"]
        if again:
            stage.restart()
        assert told(stage.barrier("w0", 1, seq=5), Released) == ["w0"]

    @pytest.mark.spec("R124")
    def test_tells_the_numbers_where_there_are_no_rounds(self) -> None:
        stage = running()
        stage.barrier("w1", 4)
        stage.leave("w1", done=False)
        stage.hello("w5")
        assert sent(self.resume(stage, "w5", None), Resumed) == [Resumed(9, True, {"b": 5})]

    @pytest.mark.spec("R16")
    def test_is_for_workers(self) -> None:
        stage = running()
        (error,) = sent(self.resume(stage, "s0"), Error)
        assert "only a worker may" in error.text

    @pytest.mark.spec("R16")
    def test_worker_that_has_left_cannot_resume(self) -> None:
        stage = running()
        stage.leave("w1", done=True)
        (error,) = sent(self.resume(stage, "w1"), Error)
        assert "worker 1 has left; it cannot resume" in error.text


class TestBarrier:
    @pytest.mark.spec("R127")
    def test_hung_waiting_and_silent_ranks_are_told_apart(self) -> None:
        stage = running(5)
        everybody = ["w0", "w1", "w2", "w3", "s0"]
        for route in ("w1", "w2"):
            stage.beat(route, 7)
        stage.barrier("w0", seq=3)
        stage.wait(8, [*everybody, "w4"])
        stage.say("w2", Beat(8, "pull()"))
        stage.leave("w3", done=False, reason="killed")
        stage.wait(4, ["w0", "w1", "s0"])
        stage.say("w2", Beat(8, "pull()"))
        (answer,) = sent(stage.barrier("w0", seq=4), Probed)
        assert answer.pending[0].reason == (
            "waits for ranks 1 (alive, but no progress for 12 s), 2 (alive, has waited in pull() for 4 s), "
            "3 (lost for 4 s: exit code 0: killed), 4 (silent for 4 s)"
        )

    @pytest.mark.spec("R16")
    def test_is_for_workers_that_are_here(self) -> None:
        stage = running()
        (error,) = sent(stage.say("s0", Barrier("kv", "b", 0), seq=4), Error)
        assert (error.seq, error.code) == (4, ProtocolError.code)
        stage.leave("w1")
        (error,) = sent(stage.barrier("w1"), Error)
        assert "worker 1 has left" in error.text


@pytest.mark.spec("R15", "R16")
def test_takes_no_other_message() -> None:
    stage = running()
    for message in (Pull(0, True, ()), Status("kv"), Done(1), View(9, "running", "", ())):
        (error,) = sent(stage.say("w0", message, seq=6), Error)
        assert (error.seq, error.code) == (6, ProtocolError.code)
        assert type(message).__name__ in error.text


def test_an_error_is_never_answered() -> None:
    stage = running()
    assert stage.say("w0", Error(1, 1, "so there")) == []


@pytest.mark.spec("R70", "R71")
def test_silence_is_a_loss_after_twelve_seconds_and_any_packet_breaks_it() -> None:
    stage = running()
    stage.wait(11, beating=["s0", "w0"])
    stage.barrier("w1")
    assert not sent(stage.wait(11.9, beating=["s0", "w0"]), View)
    assert sent(stage.wait(0.1, beating=["s0", "w0"]), View)


def test_asked_to_stop() -> None:
    stage = running(persist=True)
    effects = stage.stop()
    assert {stop.exit_code for stop in sent(effects, Stop)} == {75}
    assert set(told(effects, Stop)) == {"s0", "w0", "w1"}
    assert [end.code for end in exits(effects)] == [0]
    assert stage.saved == b""
    assert stage.stop() == []
    assert stage.take(stage.scheduler.on_timer(stage.now)) == []
    assert stage.drop("w1") == []
    assert told(stage.beat("w0"), Stop) == ["w0"]
    assert told(stage.hello("w9"), Stop) == ["w9"]


@pytest.mark.spec("R34", "R124")
def test_a_replacement_that_was_not_told_passes_after_a_restart() -> None:
    """The others were told that they may pass; then the scheduler ended."""
    stage = running(persist=True)
    stage.leave("w0", done=False, code=9)
    stage.hello("w2", rank=0)
    stage.say("w2", Resume("kv", 0), 2)
    assert stage.say("w2", Barrier("kv", "b", 0, True, 5, resumed=True), 3) == []
    assert "w2" in told(stage.say("w1", Barrier("kv", "b", 0, True, 5), 4), Released)
    stage.restart()
    again = stage.say("w2", Barrier("kv", "b", 0, True, 5, resumed=True), 3)
    assert sent(again, Released) == [Released(3, 0)]


class TestCuts:
    def returned(self) -> Stage:
        """A job whose servers have returned to cut 1."""
        stage = running(persist=True)
        stage.shelf("s0", keeps=True)
        stage.scheduler.job.checkpoints.kept = 1
        stage.leave("s0", done=False, code=9)
        stage.hello("s1", rank=0, endpoint="tcp://s1:1")
        stage.shelf("s1", 1, epoch=1)
        assert stage.phase == "returning"
        stage.say("s1", Restored(1, 1))
        assert stage.phase == "running"
        return stage

    @pytest.mark.spec("R142")
    def test_request_of_the_epoch_before_is_not_answered(self) -> None:
        stage = self.returned()
        for message in (Barrier("kv", "b", 0), Checkpoint("kv", "", 1)):
            old = stage.peers["w0"].envelope(seq=3)._replace(view=1)
            assert stage.say("w0", message, envelope=old) == []
        stage.barrier("w0")
        assert told(stage.barrier("w1"), Released) == ["w0", "w1"]
        assert "w0" in told(stage.say("w0", Checkpoint("kv", "", 1), 4), Halt)

    def concluded(self, stage: Stage, worker: str) -> bool:
        """Conclude a job of one worker; return whether the last checkpoint is reported."""
        stage.shelf("s0", keeps=True)
        stage.say(worker, Beat(1, rounds=1))
        (halt,) = sent(stage.conclude(), Halt)
        cut = halt.cut
        stage.say(worker, Halted(cut, {"kv": 5}))
        stage.say("s0", ImageTaken(cut))
        stage.say(worker, Proceeding(cut, True))
        stage.say("s0", ImageKept(cut, 9, "ab", (), ""))
        return Finish(CONCLUDED, cut) in stage.say("s0", Committed(cut))

    def test_the_last_one_is_reported_once(self) -> None:
        stage = running(1, 1)
        assert self.concluded(stage, "w0")
        over = stage.leave("w0")
        assert not [item for item in over if isinstance(item, Finish)]
        assert stage.conclude() == [], "the job is over"

    @pytest.mark.spec("R413")
    def test_last_cut_is_skipped_while_no_worker_has_pushed(self) -> None:
        stage = running(1, 1)
        stage.shelf("s0", keeps=True)
        stage.say("s0", Beat(1, rounds=1))
        assert not sent(stage.conclude(), Halt)
        over = stage.wait(3.0, beating=["s0", "w0"])
        assert Finish(CONCLUDED, 0) in over
        assert not sent(over, Halt)

    @pytest.mark.spec("R140")
    def test_a_return_is_known_after_a_restart(self) -> None:
        stage = self.returned()
        stage.leave("s1", done=False, code=9)
        stage.hello("s2", rank=0, endpoint="tcp://s2:1")
        stage.restart()
        assert stage.phase == "returning"
        stage.beat("s2")
        assert sent(stage.wait(1.0, beating=["s2"]), Recall) == [Recall(2)]
        assert stage.scheduler.job.since == 6

    @pytest.mark.spec("R16")
    @pytest.mark.parametrize(
        ("route", "message"),
        [
            ("s0", Halted(1, {})),
            ("s0", Proceeding(1, True)),
            ("s0", Checkpoint("kv", "", 1)),
            ("w0", ImageTaken(1)),
            ("w0", Committed(1)),
            ("w0", Restored(1, 1)),
        ],
    )
    def test_message_of_the_other_role_is_refused(self, route: str, message: Message) -> None:
        stage = running()
        stage.shelf("s0")
        (error,) = sent(stage.say(route, message, 5), Error)
        assert (error.seq, error.code) == (5, ProtocolError.code)


def test_a_beat_costs_the_same_in_a_large_cluster() -> None:
    """Counted in lines that run, which unlike seconds are the same each time."""

    def lines_of_a_beat(workers: int) -> int:
        stage = running(workers)
        packet = Packet(stage.peers["w0"].envelope(), Beat(0))
        lines = 0

        def count(*_: object) -> object:
            nonlocal lines
            lines += 1
            return count

        before = sys.gettrace()
        sys.settrace(count)  # type: ignore[arg-type]
        try:
            stage.scheduler.on_packet("w0", packet, stage.now)
        finally:
            sys.settrace(before)
        return lines

    assert lines_of_a_beat(200) == lines_of_a_beat(2)


@pytest.mark.spec("R451")
def test_workers_hear_how_many_steps_the_others_pass_over() -> None:
    stage = running(workers=3)

    def heard(route: str, replayed: int = 0) -> int:
        (answer,) = sent(stage.say(route, Beat(1, replayed=replayed)), Beat, route)
        return answer.replayed

    assert heard("w0") == 0
    assert heard("w1", 4) == 0, "it knows that itself"
    assert heard("w2", 3) == 4
    assert [heard("w0"), heard("w1", 5)] == [7, 3]
    assert [heard("w0"), heard("s0")] == [8, 8]
    stage.leave("w2", done=False, code=3)
    assert heard("w0") == 5
    heard("w1", 0)
    assert heard("w0") == 0


@pytest.mark.spec("R418")
def test_a_store_that_a_worker_has_closed_is_noted_and_answered() -> None:
    stage = running()
    stores = (StoreLife("kv", 0),)
    assert sent(stage.say("w0", Close(stores)), Closed) == [Closed(stores)]
    assert stage.scheduler.job.barriers.closed == {"kv": {0}}
