"""What follows from a change of seats: phases, views, welcomes, the end, the next job."""

import pytest

from kvps.core.effects import Effect, Exit, Finish, Save, Send
from kvps.core.scheduler import rate_limits
from kvps.core.scheduler.job import UNUSED, Job
from kvps.core.scheduler.seat import GOES_ON, NAME_MAX, SEATS_MAX, Settings, State
from kvps.protocol.envelope import PROTOCOL, Envelope, Message, Node, Packet, Role
from kvps.protocol.membership import Beat, Hello, Leave, Stop, View, ViewChanges, Welcome
from kvps.protocol.wire import decode, encode
from tests.support.scheduler_harness import JOB, Peer, Stage, exits, notes, sent, told

WELL = Exit(0, "every worker left (2 of 2)")


def running(workers: int = 2, servers: int = 1, **limits: object) -> Stage:
    stage = Stage(workers, servers, **limits)
    stage.form()
    return stage


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
    monkeypatch.setattr(rate_limits, "ROWS_PER_S", 4 * (4 + rate_limits.ROWS_OF_A_MESSAGE))
    return running(3)


def raw(stage: Stage, route: str, message: Message, view: int) -> list[View | ViewChanges]:
    """What the scheduler sends along ``route`` of views, as it sends it."""
    envelope = stage.peers[route].envelope()._replace(view=view)
    stage.scheduler.on_packet(route, Packet(envelope, message), stage.now)
    effects = stage.scheduler.outbox.take()
    stage.saved = next((effect.state for effect in effects if isinstance(effect, Save)), stage.saved)
    said = [effect.packet.message for effect in effects if isinstance(effect, Send) and effect.to == route]
    return [message for message in said if isinstance(message, View | ViewChanges)]


@pytest.mark.spec("R27", "R485")
def test_members_hear_of_what_has_changed_and_more_if_they_have_missed_some() -> None:
    stage = running(5, 1, persist=True)
    assert stage.scheduler.job.number == 1
    for number, route in ((2, "w0"), (3, "w1")):
        (news,) = raw(stage, route, Leave(False, 9, True, "killed"), 1)
        assert isinstance(news, ViewChanges)
        assert (news.number, news.base, [member.rank for member in news.members]) == (
            number,
            number - 1,
            [number - 2],
        )
    assert raw(stage, "w2", Beat(0), 3) == []
    (news,) = raw(stage, "w2", Beat(0), 1)
    assert isinstance(news, ViewChanges)
    assert (news.number, news.base, [member.rank for member in news.members]) == (3, 1, [0, 1])
    (whole,) = raw(stage, "w2", Beat(0), 0)
    assert isinstance(whole, View)
    stage.restart()
    (whole,) = raw(stage, "w2", Beat(0), 1)
    assert isinstance(whole, View), "a restarted scheduler does not know what has changed since"


@pytest.mark.spec("R485")
def test_newcomer_is_told_of_all_seats_and_the_others_of_its_own() -> None:
    stage = running(5, 1)
    stage.leave("w1", done=False, code=9)
    stage.peers["w9"] = Peer(Role.WORKER)
    hello = Hello(*PROTOCOL, "kvps", 0, Role.WORKER, None, "host", 9)
    stage.scheduler.on_packet("w9", Packet(stage.peers["w9"].envelope(), hello), stage.now)
    said = {
        send.to: send.packet.message
        for send in stage.scheduler.outbox.take()
        if isinstance(send, Send) and isinstance(send.packet.message, View | ViewChanges)
    }
    whole = said.pop("w9")
    assert isinstance(whole, View)
    assert set(said) == {"s0", "w0", "w2", "w3", "w4"}
    assert all(isinstance(news, ViewChanges) and len(news.members) == 1 for news in said.values())


@pytest.mark.spec("R27")
def test_newcomer_gets_the_view_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = slowly(monkeypatch)
    stage.leave("w0")
    assert [view.number for view in sent(stage.hello("w1"), View)] == [2]


@pytest.mark.spec("R36")
def test_ends_well_when_every_worker_left() -> None:
    stage = running()
    assert not exits(stage.leave("w0"))
    effects = stage.leave("w1")
    assert set(told(effects, Stop)) == {"s0", "w0", "w1"}
    assert sent(effects, Stop, "s0") == [Stop(0, WELL.reason)]
    assert effects[-1] == WELL
    assert stage.scheduler.deadline() is None


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
def test_all_who_fall_silent_together_are_waited_for_once() -> None:
    stage = running(2)
    effects = stage.wait(41.9, beating=["s0"])
    assert len(why_it_waits(effects)) == 1
    assert not exits(effects)
    assert exits(stage.wait(0.1, beating=["s0"]))


class TestFarewell:
    """A member whose connection is broken when the job ends hears of it, if it comes back soon."""

    def restarted(self) -> Stage:
        stage = Stage(1, 2, persist=True)
        for route in ("s0", "s1", "w0"):
            stage.hello(route)
        stage.restart()
        return stage

    def test_but_not_for_long(self) -> None:
        stage = self.restarted()
        assert not exits(stage.leave("w0"))
        assert not exits(stage.wait(2.9))
        assert exits(stage.wait(0.2)) == [Exit(0, "every worker left (1 of 1)")]
        assert not exits(stage.wait(10))
        assert not exits(stage.beat("s0"))


class TestForming:
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


class TestWelcome:
    def test_returned_worker_is_welcomed_with_the_others(self) -> None:
        stage = Stage(2, 0)
        stage.hello("w0", guardian=True)
        stage.wait(12)
        stage.hello("w1", rank=1, guardian=True)
        assert told(stage.hello("w0", guardian=True), Welcome) == ["w0", "w1"]


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
        assert not any(isinstance(item, Save) for item in stage.beat("w0"))
        assert not any(isinstance(item, Save) for item in stage.barrier("w0"))
        assert stage.leave("w0")[-2:] == [Save(b""), Exit(0, "every worker left (1 of 1)")]

    def test_a_restored_job_ends_if_it_was_over(self) -> None:
        stage = running(1, 0, persist=True)
        stage.scheduler.job.seats.by_node[Node(Role.WORKER, 0)].state = State.LEFT
        stage.saved = stage.scheduler.snapshot()
        assert exits(stage.restart()) == [Exit(0, "every worker left (1 of 1)")]


def test_the_largest_view_fits_into_a_head() -> None:
    workers = SEATS_MAX - 500
    job = Job(Settings(workers, 500), JOB, 0.0)
    for index, seat in enumerate(job.seats.by_node.values()):
        seat.begin(2**40 + index, Hello(1, 0, "", 0, 2, None, "h" * NAME_MAX, 1, "e" * NAME_MAX), 0.0)
        seat.lose("r" * NAME_MAX, 1.0)
    packet = Packet(Envelope(JOB, 1, Role.SCHEDULER, 0, 0, 0), job.view(1e6 / 3))
    assert decode(encode(packet)) == packet  # type: ignore[arg-type]


def test_launcher_is_told_whether_all_workers_go_on_without_a_lost_worker() -> None:
    def beat(route: str, goes_on: bool) -> list[object]:
        effects = stage.say(route, Beat(0, goes_on=goes_on))
        return [effect.value for effect in effects if isinstance(effect, Finish) and effect.ticket == GOES_ON]

    stage = Stage(workers=2, servers=1, tells_seats=True)
    for who in ("s0", "w0", "w1"):
        stage.hello(who)
    assert beat("w0", True) == []
    assert beat("w1", True) == [1]
    assert beat("w1", True) == []
    assert beat("w1", False) == [0]
    effects = stage.leave("w1", done=False, code=1, replaceable=False)
    assert [effect.value for effect in effects if isinstance(effect, Finish)] == [1], "all who are here do"
