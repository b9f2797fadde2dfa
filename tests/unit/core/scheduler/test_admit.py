"""The scheduler judges packets by their envelope, and tells strangers little and seldom."""

import pytest

from kvps.core.effects import Note, Send
from kvps.core.limits import Limits
from kvps.core.scheduler.scheduler import REFUSALS_TOLD_MAX, WHERES_PER_LOOK
from kvps.errors import Fenced, KvpsError, Mismatch, ProtocolError
from kvps.protocol.envelope import Envelope, Message, Role
from kvps.protocol.membership import Beat, Evict, Hello, Leave, Look, Ping, Rendezvous, Seen
from kvps.protocol.publications import ServersAre, Where
from tests.support.scheduler_harness import JOB, Stage, notes, sent

NOBODY = bytes(16)


def stage(limits: Limits | None = None) -> Stage:
    scheduler = Stage(2, 1, limits=limits or Limits())
    scheduler.hello("w0")
    scheduler.hello("w1")
    scheduler.hello("s0")
    return scheduler


def envelope(job: bytes = JOB, rank: int = 0, life: int = 1) -> Envelope:
    return Envelope(job, 0, Role.WORKER, rank, life, 1)


@pytest.mark.spec("R240")
def test_members_are_heard_along_any_way() -> None:
    scheduler = stage()
    for route in ("w0", "another", "w1"):
        assert scheduler.scheduler.admit(route, envelope(), Beat)
    assert scheduler.scheduler.admit("w0", envelope(life=0), Beat), "it is known by its connection"


@pytest.mark.spec("R240")
@pytest.mark.parametrize(
    ("said", "error"),
    [
        (envelope(NOBODY), Mismatch),
        (envelope(rank=1), Fenced),
        (envelope(life=99), Mismatch),
        (envelope(life=0), ProtocolError),
        (envelope(rank=9), ProtocolError),
    ],
)
def test_message_without_a_seat_is_refused(said: Envelope, error: type[KvpsError]) -> None:
    scheduler = stage()
    with pytest.raises(error):
        scheduler.scheduler.admit("stranger", said, Beat)
    assert all("stranger" not in seat.links for seat in scheduler.scheduler.job.seats.by_node.values())


@pytest.mark.spec("R242")
def test_strangers_are_not_told_the_name_of_the_job() -> None:
    scheduler = stage()
    scheduler.peers["x"] = scheduler.peers["w0"]

    def names(route: str, message: Message, said: Envelope) -> set[bytes]:
        effects = scheduler.say(route, message, envelope=said)
        return {each.packet.envelope.job for each in effects if isinstance(each, Send)}

    assert names("x", Beat(0), envelope(life=99)) == {NOBODY}
    assert names("x", Hello(1, 0, "k", 0, 2, 7, "h", 7), envelope(NOBODY, 0, 0)) == {NOBODY}
    assert names("x", Look(), envelope(NOBODY, 0, 0)) == {JOB[:4] + bytes(12)}
    for message in (Ping(), Leave(True, 0, True, ""), Evict(2, 0), Rendezvous("run", None)):
        for said in (envelope(NOBODY), envelope(bytes(15) + b"x"), envelope(life=99)):
            assert names("x", message, said) <= {NOBODY}, message
    assert names("w0", Beat(0), envelope()) == {JOB}


@pytest.mark.spec("R128")
def test_looks_are_answered_so_many_times_a_second() -> None:
    scheduler = stage(Limits(looks=3))
    scheduler.peers["x"] = scheduler.peers["w0"]
    answers = [
        bool(sent(scheduler.say("x", Look(), envelope=envelope(NOBODY, 0, 0)), Seen)) for _ in range(4)
    ]
    assert answers == [True] * 3 + [False]
    scheduler.now += 1.0
    assert sent(scheduler.say("x", Look(), envelope=envelope(NOBODY, 0, 0)), Seen)


@pytest.mark.spec("R242", "R551")
def test_readers_are_told_where_the_servers_are_and_of_which_job() -> None:
    scheduler = stage(Limits(looks=1))
    scheduler.peers["x"] = scheduler.peers["w0"]
    said = Envelope(NOBODY, 0, Role.READER, 7, 2**40, 9)
    answers = []
    for _ in range(WHERES_PER_LOOK + 1):
        effects = scheduler.say("x", Where(), envelope=said)
        answers += sent(effects, ServersAre)
        assert {each.packet.envelope.job for each in effects if isinstance(each, Send)} <= {JOB}
    assert len(answers) == WHERES_PER_LOOK
    assert [(member.role, member.rank, member.state) for member in answers[0].members] == [
        (Role.SERVER, 0, "held")
    ]
    assert (answers[0].seq, answers[0].keys) == (9, ())


def test_the_log_tells_of_some_that_were_refused() -> None:
    scheduler = stage()
    scheduler.peers["x"] = scheduler.peers["w0"]

    def refuse() -> list[str]:
        effects = scheduler.say("x", Hello(1, 0, "k", 0, 2, 7, "h", 7), envelope=envelope(NOBODY, 0, 0))
        return notes([each for each in effects if isinstance(each, Note)])

    told = [refuse() for _ in range(REFUSALS_TOLD_MAX + 3)]
    assert [len(lines) for lines in told] == [1] * REFUSALS_TOLD_MAX + [0] * 3
    scheduler.now += 10.0
    (line,) = refuse()
    assert "(3 more were refused before" in line
