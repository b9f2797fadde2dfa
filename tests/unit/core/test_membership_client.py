"""A member's side of its talk with the scheduler, from HELLO to LEFT."""

from dataclasses import dataclass, field

import pytest

from kvps.core.effects import Connect, Effect, Exit, Finish, Note, Send
from kvps.core.membership_client import SEATED, Identity, MembershipClient, Quorum
from kvps.errors import Fenced, ProtocolError, Unauthorized
from kvps.protocol.envelope import PROTOCOL, Envelope, Message, Node, Packet, Role
from kvps.protocol.membership import (
    Alive,
    Beat,
    Challenge,
    Enrol,
    Error,
    Hello,
    Leave,
    Left,
    Standing,
    Stop,
    View,
    ViewChanges,
    Welcome,
)
from tests.support.worker_harness import JOB, M, member, sends
from tests.vectors.packets import KEY

WORKERS = [Node(Role.WORKER, rank) for rank in range(5)]


@dataclass
class Talk:
    """A membership, its clock, and what it has said."""

    identity: Identity = field(
        default_factory=lambda: Identity(Role.WORKER, "tcp://sched:1", "here", 7, "kvps 0.1", master="here:2")
    )
    now: float = 100.0

    def __post_init__(self) -> None:
        self.effects: list[Effect] = []
        self._outbox: list[Effect] = []
        self.member = MembershipClient(self.identity, self.now, self._outbox)
        self.take(self.member.start(self.now))

    def take(self, door: None = None) -> list[Effect]:
        taken = self._outbox.copy()
        self._outbox.clear()
        self.effects += taken
        return taken

    def hear(self, message: Message, job: bytes = JOB) -> list[Effect]:
        packet = Packet(Envelope(job, 0, Role.SCHEDULER, 0, 0, 0), message)
        return self.take(self.member.on_packet(packet, self.now))

    def wait(self, seconds: float) -> None:
        end = self.now + seconds
        while (due := self.member.deadline()) is not None and due <= end:
            self.now = due
            self.take(self.member.on_timer(self.now))
        self.now = end

    def said(self, cls: type[M]) -> list[M]:
        assert all(send.to == "scheduler" for send in sends(self.effects, cls))
        return [send.packet.message for send in sends(self.effects, cls)]  # type: ignore[misc]

    def exits(self) -> list[Exit]:
        return [effect for effect in self.effects if isinstance(effect, Exit)]


def joined() -> Talk:
    talk = Talk()
    talk.hear(Welcome(3, 42, 5, 2))
    return talk


def view(number: int, phase: str = "running") -> View:
    return View(number, phase, "", tuple(member(node) for node in WORKERS))


class TestJoining:
    @pytest.mark.spec("R17", "R24")
    def test_hello_is_said_first_and_each_second(self) -> None:
        talk = Talk()
        assert talk.effects[0] == Connect("scheduler", "tcp://sched:1")
        hello = Hello(*PROTOCOL, "kvps 0.1", 0, Role.WORKER, None, "here", 7, "", False, "here:2")
        assert talk.said(Hello) == [hello]
        assert sends(talk.effects, Hello)[0].packet.envelope == Envelope(bytes(16), 0, Role.WORKER, 0, 0, 0)
        talk.wait(3.0)
        assert talk.said(Hello) == [hello] * 4

    def test_a_seat_that_a_guardian_holds_is_named(self) -> None:
        talk = Talk(Identity(Role.WORKER, "s", "here", 7, "kvps", 3, 42, job=JOB))
        envelope = sends(talk.effects, Hello)[0].packet.envelope
        assert (envelope.job, envelope.incarnation) == (JOB, 42)
        assert talk.said(Hello)[0].rank == 3

    @pytest.mark.parametrize("role", [Role.SERVER, Role.WORKER])
    def test_a_server_and_the_guardian_of_a_running_command_do_not_say_it(self, role: Role) -> None:
        talk = Talk(Identity(role, "s", "here", 7, "kvps", guardian=role == Role.WORKER))
        talk.hear(Welcome(0, 1, 5, 2))
        talk.wait(100.0)
        assert not [
            effect for effect in talk.effects if isinstance(effect, Note) and effect.level == "warning"
        ]


class TestLiving:
    @pytest.mark.spec("R28")
    def test_the_newest_view_counts(self) -> None:
        talk = joined()
        assert (talk.member.number, talk.member.running) == (0, False)
        talk.hear(view(4))
        talk.hear(view(3, "ending"))
        talk.hear(view(4, "ending"))
        assert (talk.member.number, talk.member.running) == (4, True)
        talk.hear(view(5, "ending"))
        assert (talk.member.number, talk.member.running) == (5, False)
        assert talk.member.envelope().view == 5

    def test_a_view_before_the_welcome_is_not_for_us_yet(self) -> None:
        """It overtook the WELCOME, and comes again: our beats say which view we know."""
        talk = Talk()
        talk.hear(view(4))
        assert (talk.member.view, talk.member.job) == (None, bytes(16))

    def test_the_quorum_is_that_of_the_view(self) -> None:
        talk = Talk()
        assert talk.member.quorum() == Quorum(frozenset(), frozenset())
        talk.hear(Welcome(3, 42, 5, 2))
        assert talk.member.quorum() == Quorum(frozenset(range(5)), frozenset())
        states = ("held", "lost", "left", "gone", "empty")
        seats = [member(*it) for it in zip(WORKERS, states, strict=True)]
        servers = [member(Node(Role.SERVER, rank)) for rank in range(9)]
        talk.hear(View(1, "running", "", (*seats, *servers)))
        assert talk.member.quorum() == Quorum(frozenset({0, 4}), frozenset({1, 3}))

    @pytest.mark.spec("R484")
    def test_news_are_taken_in_by_those_who_have_their_base(self) -> None:
        talk = joined()
        lost = member(WORKERS[1], "lost")
        talk.hear(ViewChanges(5, 4, "running", "lost", (lost,)))
        assert talk.member.view is None, "a whole view comes before"
        talk.hear(view(4))
        for news in ((7, 5), (4, 3), (3, 2)):
            talk.hear(ViewChanges(*news, "running", "lost", (lost,)))
            assert talk.member.view == view(4)
        talk.hear(ViewChanges(6, 3, "returning", "lost", (lost,), 1, 6, 2))
        known = talk.member.view
        assert known is not None
        assert (known.number, known.phase, known.reason) == (6, "returning", "lost")
        assert (known.epoch, known.since, known.cut, known.keys) == (1, 6, 2, ())
        assert known.members == (*view(4).members[:1], lost, *view(4).members[2:])
        assert talk.member.quorum().lost == {1}
        talk.hear(ViewChanges(7, 6, "running", "", (), keys=()))
        assert talk.member.number == 7

    @pytest.mark.spec("R484")
    def test_news_of_another_job_change_nothing(self) -> None:
        talk = joined()
        talk.hear(view(4))
        talk.hear(ViewChanges(5, 4, "running", "", ()), job=bytes(16))
        assert talk.member.number == 4

    def test_an_error_is_logged_unless_it_fences(self) -> None:
        talk = joined()
        talk.hear(Error(0, ProtocolError.code, "what?"))
        assert talk.effects[-1] == Note("warning", "what?")
        assert talk.member.error is None
        talk.hear(Error(0, Fenced.code, "stop"))
        assert isinstance(talk.member.error, Fenced)
        assert talk.exits() == [Exit(1, "stop")]
        assert talk.member.deadline() is None

    @pytest.mark.spec("R217")
    @pytest.mark.parametrize("guardian", [False, True])
    def test_a_challenge_is_answered_at_once(self, guardian: bool) -> None:
        talk = Talk(Identity(Role.WORKER, "s", "here", 7, "kvps", 3, guardian=guardian))
        talk.hear(Challenge(7))
        assert talk.said(Alive) == [Alive(7, guardian)], "also before the WELCOME has come"

    @pytest.mark.spec("R217")
    @pytest.mark.parametrize("end", ["leaves", "stopped", "fenced"])
    def test_ended_member_is_not_alive(self, end: str) -> None:
        talk = joined()
        if end == "leaves":
            talk.take(talk.member.leave(False, 3, replaceable=True, reason=""))
        else:
            talk.hear(Stop(1, "over") if end == "stopped" else Error(0, Fenced.code, "stop"))
        talk.hear(Challenge(7))
        assert talk.said(Alive) == []


class TestLeaving:
    @pytest.mark.spec("R29", "R31")
    def test_leave_is_said_until_it_is_known_to_be_heard(self) -> None:
        talk = joined()
        talk.take(talk.member.leave(True, 0, replaceable=True, reason="done"))
        talk.wait(2.0)
        assert talk.said(Leave) == [Leave(True, 0, True, "done")] * 3
        assert len(talk.said(Beat)) == 3
        talk.hear(Left())
        assert talk.member.left
        talk.wait(5.0)
        assert talk.take(talk.member.leave(True, 0, replaceable=True, reason="again")) == []
        assert len(talk.said(Leave)) == 3

    def test_process_without_a_seat_leaves_silently(self) -> None:
        talk = Talk()
        assert talk.take(talk.member.leave(True, 0, replaceable=True, reason="")) == []

    @pytest.mark.spec("R29")
    def test_a_stop_ends_all_beats(self) -> None:
        talk = joined()
        talk.hear(view(1))
        stop = Stop(1, "given up")
        talk.hear(stop)
        assert talk.member.stopped == stop
        assert not talk.member.running
        talk.wait(5.0)
        assert len(talk.said(Beat)) == 1


class TestKeys:
    @staticmethod
    def talk(**more: object) -> Talk:
        identity = Identity(Role.WORKER, "tcp://sched:1", "here", 7, "kvps 0.1", **more)  # type: ignore[arg-type]
        return Talk(identity)

    @staticmethod
    def connects(effects: list[Effect]) -> list[bool]:
        return [effect.is_member for effect in effects if isinstance(effect, Connect)]

    @pytest.mark.spec("R247")
    def test_member_enrols_before_each_hello_and_then_uses_its_session_key(self) -> None:
        talk = self.talk(public_key=KEY, command_key=KEY[::-1])
        talk.wait(1.0)
        said = [type(each.packet.message) for each in talk.effects if isinstance(each, Send)]
        assert said == [Enrol, Hello, Enrol, Hello]
        assert sends(talk.effects, Enrol)[0].packet.message == Enrol(KEY, KEY[::-1])
        assert self.connects(talk.effects) == [False]
        effects = talk.hear(Welcome(3, 5, 4, 2))
        assert self.connects(effects) == [True]
        assert isinstance(effects[-1], Send), "and says at once that it is there"
        assert self.connects(talk.hear(Welcome(3, 5, 4, 2))) == []

    def test_keys_of_the_view_belong_to_their_members(self) -> None:
        talk = self.talk(public_key=KEY)
        assert talk.member.key_of(WORKERS[1]) == ""
        talk.hear(Welcome(3, 5, 4, 2))
        members = tuple([member(node) for node in WORKERS[:2]])
        talk.hear(View(1, "running", "", members, keys=(KEY, "")))
        assert talk.member.key_of(WORKERS[0]) == KEY
        assert talk.member.key_of(WORKERS[1]) == talk.member.key_of(WORKERS[4]) == ""

    @pytest.mark.spec("R245")
    @pytest.mark.parametrize("is_member", [False, True])
    def test_unauthorized_process_gives_up(self, is_member: bool) -> None:
        talk = self.talk(public_key=KEY)
        if is_member:
            talk.hear(Welcome(3, 5, 4, 2))
        (end,) = talk.hear(Error(0, Unauthorized.code, "no such key"))
        assert end == Exit(78, "no such key")
        assert isinstance(talk.member.error, Unauthorized)


# --- standbys ------------------------------------------------------------------------------------


@pytest.mark.spec("R522")
def test_a_spare_says_what_it_wants_and_a_standby_how_its_copy_stands() -> None:
    talk = Talk(Identity(Role.SERVER, "tcp://sched:1", "here", 7, "kvps 0.1", standby=True))
    (send,) = sends(talk.effects, Hello)
    assert send.packet.message.features == 1  # type: ignore[attr-defined]
    talk.member.standing = lambda: Standing(copied=43)
    welcome = Welcome(1, 9, 2, 2, follows=True, replicas=1)
    assert Finish(SEATED, welcome) in talk.hear(welcome)
    talk.effects.clear()
    talk.wait(1.0)
    assert [send.packet.message for send in sends(talk.effects, Standing)] == [Standing(copied=43)]
    talk.member.stand()
    assert len(sends(talk.take(), Standing)) == 1


def test_nobody_else_is_told_of_seats_and_says_how_a_copy_stands() -> None:
    talk = Talk()
    effects = talk.hear(Welcome(1, 9, 2, 2, replicas=1))
    assert not [effect for effect in effects if isinstance(effect, Finish)]
    talk.wait(1.0)
    assert not sends(talk.effects, Standing)
