"""What follows from a change of seats: phases, views, welcomes, the end, the next job."""

from __future__ import annotations

import pytest

from kvps.core.effects import Effect, Exit, Finish, Save, Send
from kvps.core.scheduler import rate_limits
from kvps.core.scheduler.job import UNUSED, Job, Place, next_job
from kvps.core.scheduler.seat import GOES_ON, NAME_MAX, SEATS, SEATS_MAX, Settings, State
from kvps.protocol.envelope import Envelope, Node, Packet, Role
from kvps.protocol.membership import Beat, Hello, Released, Stop, View, Welcome
from kvps.protocol.wire import decode, encode
from tests.support.scheduler_harness import JOB, Stage, exits, notes, sent, told

WELL = Exit(0, "every worker left (2 of 2)")


def running(workers: int = 2, servers: int = 1, **limits: object) -> Stage:
    stage = Stage(workers, servers, **limits)
    stage.form()
    return stage


@pytest.mark.spec("R27")
def test_the_first_view_goes_to_everyone_when_all_seats_are_taken() -> None:
    stage = Stage(2, 1)
    assert not sent(stage.hello("w0"), View)
    assert not sent(stage.hello("s0"), View)
    effects = stage.hello("w1")
    assert told(effects, View) == ["w0", "s0", "w1"]
    (view, *_) = sent(effects, View)
    assert (view.number, view.phase) == (1, "running")
    assert "info: running: all 3 seats are taken" in notes(effects)


@pytest.mark.spec("R27")
def test_each_later_change_makes_a_view() -> None:
    stage = running()
    numbers = [
        [view.number for view in sent(effects, View, "s0")]
        for effects in (stage.leave("w0", done=False), stage.hello("w5"), stage.leave("w1"), stage.beat("w5"))
    ]
    assert numbers == [[2], [3], [4], []]


def slowly(monkeypatch: pytest.MonkeyPatch) -> Stage:
    """A job of 4 seats to which a view may go once a second, as if it had a thousand."""
    monkeypatch.setattr(rate_limits, "ROWS_PER_S", 16)
    return running(3)


@pytest.mark.spec("R27")
def test_of_changes_that_follow_each_other_many_members_are_told_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage = slowly(monkeypatch)
    assert not sent(stage.leave("w0"), View)
    assert not sent(stage.leave("w1"), View)
    assert not sent(stage.beat("w2"), View), "it will be told with all others"
    effects = stage.wait(5, beating=["s0", "w0", "w1", "w2"])
    assert sorted(told(effects, View)) == ["s0", "w0", "w1", "w2"]
    view = sent(effects, View)[0]
    assert (view.number, [one.state for one in view.members]) == (3, ["held", "left", "left", "held"])


@pytest.mark.spec("R27")
def test_newcomer_gets_the_view_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = slowly(monkeypatch)
    stage.leave("w0")
    assert [view.number for view in sent(stage.hello("w1"), View)] == [2]


def test_a_job_that_is_over_owes_nobody_a_view(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = slowly(monkeypatch)
    stage.leave("w0")
    assert not sent(stage.stop(), View)
    assert not sent(stage.wait(5), View)


def test_a_view_says_for_how_long_one_is_lost() -> None:
    stage = running()
    stage.leave("w1", done=False, code=3)
    stage.wait(5, beating=["s0", "w0"])
    (view,) = sent(stage.attach("w7", "w0"), View)
    assert [(one.lost_for_s, one.reason) for one in view.members if one.state == "lost"] == [
        (5.0, "exit code 3")
    ]


@pytest.mark.spec("R36")
def test_ends_well_when_every_worker_left() -> None:
    stage = running()
    assert not exits(stage.leave("w0"))
    effects = stage.leave("w1")
    assert set(told(effects, Stop)) == {"s0", "w0", "w1"}
    assert sent(effects, Stop, "s0") == [Stop(0, WELL.reason)]
    assert effects[-1] == WELL
    assert stage.scheduler.deadline() is None


@pytest.mark.spec("R36")
def test_ends_badly_when_one_is_gone_and_nobody_is_left() -> None:
    stage = running()
    assert not exits(stage.leave("w0", done=False, code=1, replaceable=False))
    (end,) = exits(stage.leave("w1"))
    assert end == Exit(1, "no worker is present; worker 0 is gone (exit code 1)")


def why_it_waits(effects: list[Effect]) -> list[str]:
    return [note for note in notes(effects) if "no worker is present; waiting" in note]


@pytest.mark.spec("R36", "R210")
def test_waits_for_the_replacement_of_the_last_worker_but_not_for_ever() -> None:
    stage = running()
    stage.leave("w0")
    effects = stage.leave("w1", done=False, code=1)
    effects += stage.wait(29.9, beating=["s0"])
    assert not exits(effects)
    assert why_it_waits(effects) == [
        "warning: no worker is present; waiting 30 s for a replacement, then the job ends: worker 1 is "
        "lost (exit code 1)"
    ]
    effects = stage.wait(0.1, beating=["s0"])
    assert [end.code for end in exits(effects)] == [1]
    assert sent(effects, Stop, "s0")
    assert not why_it_waits(effects)


@pytest.mark.spec("R210")
def test_the_others_may_go_on_for_long_without_one_whom_nobody_waits_for() -> None:
    stage = running()
    effects = stage.leave("w1", done=False)
    effects += stage.wait(300, beating=["s0", "w0"])
    assert not why_it_waits(effects)
    effects = stage.leave("w0")
    assert [end.code for end in exits(effects)] == [1], "it had its time"


@pytest.mark.spec("R210")
def test_remaining_wait_is_told_when_the_others_have_ended() -> None:
    stage = running(3)
    stage.leave("w1", done=False)
    stage.wait(5, beating=["s0", "w0", "w2"])
    stage.leave("w2", done=False)
    stage.wait(10, beating=["s0", "w0"])
    effects = stage.leave("w0")
    assert why_it_waits(effects) == [
        "warning: no worker is present; waiting 20 s for a replacement, then the job ends: worker 1 is "
        "lost (exit code 0), worker 2 is lost (exit code 0)"
    ]
    assert not exits(stage.wait(19.9, beating=["s0"]))
    assert exits(stage.wait(0.1, beating=["s0"]))


@pytest.mark.spec("R210")
def test_all_who_fall_silent_together_are_waited_for_once() -> None:
    stage = running(2)
    effects = stage.wait(41.9, beating=["s0"])
    assert len(why_it_waits(effects)) == 1
    assert not exits(effects)
    assert exits(stage.wait(0.1, beating=["s0"]))


@pytest.mark.spec("R210")
def test_a_scheduler_that_is_started_again_says_for_whom_it_waits() -> None:
    stage = running(1, persist=True)
    stage.leave("w0", done=False)
    effects = stage.restart()
    assert len(why_it_waits(effects)) == 1
    assert exits(stage.wait(30, beating=["s0"]))


@pytest.mark.spec("R210")
def test_a_replacement_keeps_the_job_alive() -> None:
    stage = running(1)
    stage.leave("w0", done=False)
    assert not exits(stage.wait(29, beating=["s0"]))
    stage.hello("w1")
    assert not exits(stage.wait(200, beating=["s0", "w1"]))
    assert why_it_waits(stage.leave("w1", done=False)), "a second wait is told of again"
    stage.hello("w2")
    assert exits(stage.leave("w2")) == [Exit(0, "every worker left (1 of 1)")]


class TestFarewell:
    """A member whose connection is broken when the job ends hears of it, if it comes back soon."""

    def restarted(self) -> Stage:
        stage = Stage(1, 2, persist=True)
        for route in ("s0", "s1", "w0"):
            stage.hello(route)
        stage.restart()
        return stage

    def test_after_a_restart_those_who_have_not_spoken_are_waited_for(self) -> None:
        stage = self.restarted()
        stage.beat("s0")
        effects = stage.leave("w0")
        assert told(effects, Stop) == ["s0", "w0"]
        assert not exits(effects)
        assert not exits(stage.beat("s0"))
        effects = stage.beat("s1")
        assert told(effects, Stop) == ["s1"]
        assert exits(effects) == [Exit(0, "every worker left (1 of 1)")]

    def test_a_newcomer_is_taken_for_none_of_them(self) -> None:
        stage = self.restarted()
        stage.leave("w0")
        assert told(stage.hello("s9"), Stop) == ["s9"]  # in an envelope of rank 0, as it has none
        assert not exits(stage.beat("s1"))
        assert told(effects := stage.beat("s0"), Stop) == ["s0"]
        assert exits(effects)

    def test_but_not_for_long(self) -> None:
        stage = self.restarted()
        assert not exits(stage.leave("w0"))
        assert not exits(stage.wait(2.9))
        assert exits(stage.wait(0.2)) == [Exit(0, "every worker left (1 of 1)")]
        assert not exits(stage.wait(10))
        assert not exits(stage.beat("s0"))

    def test_a_server_that_has_just_broken_off(self) -> None:
        stage = Stage(1, 1)
        stage.hello("s0")
        stage.hello("w0")
        stage.drop("s0")
        assert not exits(stage.leave("w0"))
        assert told(effects := stage.beat("s0"), Stop) == ["s0"]
        assert exits(effects)


class TestForming:
    def test_ends_when_one_is_gone_for_good(self) -> None:
        stage = Stage(2, 1)
        stage.hello("s0")
        stage.hello("w0")
        stage.hello("w1", guardian=True)
        stage.leave("w0")
        stage = Stage(2, 1)
        stage.hello("s0")
        stage.hello("w0")
        stage.hello("s1", "server", rank=0)
        effects = stage.leave("s0", done=False, code=78, replaceable=False)
        assert told(effects, View) == ["s0", "w0"]
        assert (stage.phase, sent(effects, View, "w0")[0].phase) == ("ending", "ending")
        assert [end.code for end in exits(stage.leave("w0", done=False))] == [1]

    def test_does_not_wait_for_ever_for_the_others_to_notice(self) -> None:
        stage = Stage(2, 1)
        stage.hello("w0")
        stage.hello("w1")
        stage.leave("w1", done=False, replaceable=False)
        assert not exits(stage.wait(239, beating=["w0"]))
        assert [end.code for end in exits(stage.wait(1, beating=["w0"]))] == [1]

    def test_gives_up_as_temporary(self) -> None:
        stage = Stage(2, 1, forming_max_s=60.0)
        stage.hello("w0")
        effects = stage.wait(60, beating=["w0"])
        assert exits(effects) == [
            Exit(75, "given up: waiting for 1 of 2 workers (rank 1) and 1 of 1 servers (rank 0)")
        ]
        assert sent(effects, Stop, "w0")[0].exit_code == 75


class TestScriptsWithoutAStore:
    """The commands of workers that end well, and have never spoken to the scheduler."""

    def ended(self, attached: tuple[str, ...] = (), guardian: bool = True, servers: int = 1) -> str:
        """Return the log of the end of a job of two workers, where the scripts ``attached`` have made a store."""
        stage = Stage(2, servers)
        for route in ("w0", "w1"):
            stage.hello(route, guardian=guardian)
        for rank in range(servers):
            stage.hello(f"s{rank}")
        for route in attached:
            stage.attach(f"c{route}", route, pid=8)
        return "\n".join([*notes(stage.leave("w0")), *notes(stage.leave("w1"))])

    def test_are_told_that_they_trained_alone(self) -> None:
        assert f"warning: {UNUSED}\ninfo: job over" in self.ended()

    @pytest.mark.parametrize("attached", [("w1",), ("w0", "w1")])
    def test_a_script_with_a_store_is_not(self, attached: tuple[str, ...]) -> None:
        assert UNUSED not in self.ended(attached)

    def test_a_scheduler_that_was_restarted_does_not_know(self) -> None:
        stage = Stage(2, 1, persist=True)
        for route in ("w0", "w1"):
            stage.hello(route, guardian=True)
        stage.hello("s0")
        stage.restart()
        ended = [*notes(stage.leave("w0")), *notes(stage.leave("w1"))]
        assert not any(UNUSED in note for note in ended)
        assert any("job over" in note for note in ended)


class TestWelcome:
    def test_a_guardian_is_welcomed_when_all_workers_are_here(self) -> None:
        stage = Stage(3, 1)
        for route, host in (("w0", "a"), ("w1", "b")):
            assert not sent(stage.hello(route, guardian=True, host=host, master=f"{host}:1"), Welcome)
        effects = stage.hello("w2", guardian=True, host="a")
        assert [(one.rank, one.local_rank, one.local_size, one.master) for one in sent(effects, Welcome)] == [
            (0, 0, 2, "a:1"),
            (1, 0, 1, "a:1"),
            (2, 1, 2, "a:1"),
        ]
        assert stage.phase == "forming"
        assert stage.scheduler.job.places()[2] == Place(1, 2)

    def test_returned_worker_is_welcomed_with_the_others(self) -> None:
        stage = Stage(2, 0)
        stage.hello("w0", guardian=True)
        stage.wait(12)
        stage.hello("w1", rank=1, guardian=True)
        assert told(stage.hello("w0", guardian=True), Welcome) == ["w0", "w1"]


class TestNextJob:
    def test_keeps_the_servers_and_forgets_the_rest(self) -> None:
        stage = running(2, 1, keep_alive=True, persist=True)
        stage.barrier("w0")
        stage.barrier("w1")
        stage.leave("w0")
        effects = stage.leave("w1")
        assert not exits(effects)
        assert set(told(effects, Stop)) == {"w0", "w1"}
        stop = next(one for one in effects if isinstance(one, Send) and isinstance(one.packet.message, Stop))
        assert stop.packet.envelope.job == JOB
        (view,) = [
            one
            for one in effects
            if isinstance(one, Send) and isinstance(one.packet.message, View) and one.to == "s0"
        ][-1:]
        assert view.packet.envelope.job == next_job(JOB) == stage.scheduler.job.name
        assert isinstance(view.packet.message, View)
        assert (view.packet.message.number, view.packet.message.phase) == (3, "forming")
        assert stage.states() == {"server 0": "held", "worker 0": "empty", "worker 1": "empty"}
        assert stage.hello("w7")
        assert stage.scheduler.job.seats.issued == 4
        effects = stage.hello("w8")
        assert sent(effects, View, "s0")[0].number == 4
        assert not sent(stage.barrier("w7"), Released)


class TestSaving:
    def test_before_anybody_is_told(self) -> None:
        stage = Stage(1, 1, persist=True)
        for effects in (
            stage.hello("s0"),
            stage.hello("w0"),
            stage.barrier("w0"),
            stage.leave("s0", done=False),
        ):
            assert isinstance(effects[0], Save)
        assert not any(isinstance(one, Save) for one in stage.beat("w0"))
        assert not any(isinstance(one, Save) for one in stage.barrier("w0"))
        assert stage.leave("w0")[-2:] == [Save(b""), Exit(0, "every worker left (1 of 1)")]

    def test_a_restored_job_ends_if_it_was_over(self) -> None:
        stage = running(1, 0, persist=True)
        stage.scheduler.job.seats.by_node[Node(Role.WORKER, 0)].state = State.LEFT
        stage.saved = stage.scheduler.snapshot()
        assert exits(stage.restart()) == [Exit(0, "every worker left (1 of 1)")]

    def test_a_job_that_forms_goes_on_forming(self) -> None:
        stage = Stage(2, 1, persist=True)
        stage.hello("w0", guardian=True)
        assert not exits(stage.restart())
        assert stage.phase == "forming"
        effects = stage.hello("w5", guardian=True, host="host-w0")
        assert stage.states()["worker 0"] == "held"
        assert stage.states()["worker 1"] == "empty"
        assert "info: worker 0 is replaced by host-w0:7" in notes(effects)


def test_the_largest_view_fits_into_a_head() -> None:
    workers = SEATS_MAX - 500
    job = Job(Settings(workers, 500), JOB, 0.0)
    for index, seat in enumerate(job.seats.by_node.values()):
        seat.begin(2**40 + index, Hello(1, 0, "", 0, 2, None, "h" * NAME_MAX, 1, "e" * NAME_MAX), 0.0)
        seat.lose("r" * NAME_MAX, 1.0)
    packet = Packet(Envelope(JOB, 1, Role.SCHEDULER, 0, 0, 0), job.view(1e6 / 3))
    assert decode(encode(packet)) == packet  # type: ignore[arg-type]


def test_the_number_of_taken_seats_is_told_until_all_are() -> None:
    def counted(effects: list[Effect]) -> list[object]:
        return [one.value for one in effects if isinstance(one, Finish) and one.ticket == SEATS]

    stage = Stage(workers=1, servers=1, tells_seats=True)
    assert counted(stage.hello("s0")) == [1]
    assert counted(stage.hello("w0")) == [2]
    assert counted(stage.leave("w0", done=False, code=1)) == []
    silent = Stage(workers=1, servers=1)
    assert counted(silent.hello("s0")) == []


def test_launcher_is_told_whether_all_workers_go_on_without_a_lost_worker() -> None:
    def beat(route: str, goes_on: bool) -> list[object]:
        effects = stage.say(route, Beat(0, goes_on=goes_on))
        return [one.value for one in effects if isinstance(one, Finish) and one.ticket == GOES_ON]

    stage = Stage(workers=2, servers=1, tells_seats=True)
    for who in ("s0", "w0", "w1"):
        stage.hello(who)
    assert beat("w0", True) == []
    assert beat("w1", True) == [1]
    assert beat("w1", True) == []
    assert beat("w1", False) == [0]
    effects = stage.leave("w1", done=False, code=1, replaceable=False)
    assert [one.value for one in effects if isinstance(one, Finish)] == [1], "all who are here do"
