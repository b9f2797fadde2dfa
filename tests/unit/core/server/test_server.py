"""Whom a server listens to: jobs, ranks, lives, routes, other servers, and the scheduler."""

from dataclasses import replace

import pytest
import torch

from kvps.core.effects import Connect, Exit, Note, Send, Trust
from kvps.core.membership_client import Identity
from kvps.core.server.server import SILENCES_MAX, TELL_NORMS_EVERY_S, Server
from kvps.core.server.snapshot.model import Snapshot
from kvps.core.server.snapshot.storage import FindCuts, FoundCuts, Loaded, Read
from kvps.errors import Fenced, Mismatch, StorageError
from kvps.protocol.checkpoint import Revive, Revived
from kvps.protocol.envelope import Envelope, Role
from kvps.protocol.membership import Beat, Error, Hello, Leave, Probe, Probed, Stop, Welcome
from kvps.protocol.stores import Declare, Entry, Find, FoundAll, Norms, Status, StatusIs
from kvps.protocol.values import Pulled
from tests.support.effects import taken
from tests.support.server_harness import (
    JOB,
    Seat,
    ServerStage,
    greeting,
    heard,
    opening,
    over,
    pulled,
    refusal,
)

OTHER_JOB = bytes(16 * [7])


def stage(**options: object) -> ServerStage:
    """Two workers, and a key a of two elements in a sync store."""
    server = ServerStage(**({"workers": 2} | options))  # type: ignore[arg-type]
    server.open()
    server.init("a", [0.0, 0.0])
    return server


# --- HELLO ------------------------------------------------------------------------------------------


@pytest.mark.spec("R26")
def test_a_member_is_welcomed_as_what_it_is() -> None:
    server = ServerStage(workers=3, servers=2, rank=1, greeted=False)
    (said,) = server.hello(2)
    assert (said.to, said.message) == (b"w2", Welcome(2, 12, 3, 2))
    assert server.other(0, greeting(role=int(Role.SERVER)))[0].message == Welcome(0, 1, 3, 2)


@pytest.mark.spec("R18")
def test_another_major_version() -> None:
    text = refusal(stage().hello(0, major=2, minor=5, software="9.1"))
    assert text == (
        "ProtocolError: protocol 2.5 (kvps 9.1) cannot talk to 1.0 at server 0; install one "
        "version everywhere"
    )


@pytest.mark.spec("R22")
def test_a_life_that_no_view_has_named_waits_for_one() -> None:
    server = stage()
    server.pull(1, "a", least=1, seq=50)
    before = server.snapshot()
    assert server.hello(1, incarnation=99) == []
    assert "expects HELLO first" in refusal(server.say(1, opening(), incarnation=99))
    assert not heard(server.say(1, opening()), Error), "the true one is heard meanwhile"
    assert server.snapshot() == before
    server.seats[1].incarnation = 99
    (answer,) = heard(server.show(), Welcome)
    assert answer.incarnation == 99
    assert not heard(server.say(1, opening()), Error)


@pytest.mark.spec("R241")
def test_waiting_worker_is_not_welcomed_to_a_session_that_is_about_to_be_dropped() -> None:
    """Its session would be dropped with it, and it would never say HELLO again."""
    server = stage()
    server.hello(1, incarnation=99)
    server.seats[1].incarnation = 99
    assert not heard(server.show(phase="returning", epoch=1, since=server.view + 1), Welcome)
    assert not heard(server.hello(1), Welcome), "before the servers have returned"


@pytest.mark.spec("R22")
def test_waiting_worker_may_have_been_replaced() -> None:
    server = stage()
    server.hello(1, incarnation=50)
    server.seats[1].incarnation = 99
    assert refusal(server.show()).startswith("Fenced: worker 1 incarnation 50 was replaced")


@pytest.mark.spec("R242")
def test_a_stranger_is_not_told_the_name_of_the_job() -> None:
    server = stage()
    for job, name in ((OTHER_JOB, bytes(16)), (JOB, JOB)):
        envelope = Envelope(job, server.view, Role.WORKER, 0, 1, 7)
        error = Mismatch("another cluster")
        (refused,) = taken(server.server, server.server.on_failure(b"x", envelope, error, server.now))
        assert isinstance(refused, Send)
        assert refused.packet.envelope.job == name


@pytest.mark.spec("R3", "R17")
def test_a_member_may_come_back_along_another_route() -> None:
    server = stage()
    server.push(0, "a", [1, 1], 0)
    server.pull(0, "a", after=1, seq=50)
    server.take(server.server.on_drop(b"w0", server.now))
    server.say(0, Probe((50,)), route=b"new")
    (answer,) = [said for said in server.push(1, "a", [1, 1], 0) if isinstance(said.message, Pulled)]
    assert answer.to == b"new"


@pytest.mark.spec("R19")
def test_another_job() -> None:
    server = stage()
    before = server.snapshot()
    for message in (greeting(), opening()):
        text = refusal(server.say(0, message, job=OTHER_JOB))
        assert "Mismatch: server 0 serves job 00010203, not 07070707" in text
    assert server.snapshot() == before


@pytest.mark.parametrize(("role", "rank"), [(Role.WORKER, 2), (Role.SERVER, 1), (Role.SCHEDULER, 0)])
def test_a_place_that_this_job_does_not_have(role: Role, rank: int) -> None:
    server = stage()
    for message in (greeting(role=int(role)), opening()):
        text = refusal(server.say(rank, message, role=role, incarnation=99, seq=1))
        assert f"ProtocolError: there is no {role} {rank} of this job that may talk to server 0" in text


def test_before_it_is_a_member_it_serves_nobody() -> None:
    server = ServerStage(greeted=False)
    server.server = Server(Identity(Role.SERVER, "tcp://s:1", "host", 7, "kvps"), server.now)
    assert "ConfigError: this server is not a member of a job yet" in refusal(server.hello(0))
    for job in (bytes(16), JOB):
        assert "Mismatch: server 0 serves job" in refusal(server.say(0, opening(), job=job))


# --- lives ------------------------------------------------------------------------------------------


@pytest.mark.spec("R21")
def test_an_older_life_is_fenced() -> None:
    server = stage()
    old = server.seats[0].incarnation
    server.seats[0].incarnation += 1
    server.show()
    before = server.snapshot()
    for said in (
        server.hello(0, incarnation=old),
        server.push(0, "a", [5, 5], 0, incarnation=old),
        server.say(0, Status("kv"), incarnation=old),
    ):
        assert refusal(said).startswith(f"{Fenced.__name__}: worker 0 incarnation {old} was repl")
    assert server.snapshot() == before


@pytest.mark.spec("R22")
def test_a_newer_life_drops_what_the_older_one_had_pending_and_keeps_its_pushes() -> None:
    server = stage()
    server.push(0, "a", [1, 1], 0)
    server.pull(0, "a", after=1, seq=50)
    server.say(0, Declare("kv", False, 0, (Entry("later", 1, (1,), 0, 1),)), seq=51)
    server.seats[0].incarnation += 1
    server.show()
    server.hello(0)
    server.seqs[0] = 0
    # The new life has its own requests, under the same numbers.
    assert server.pull(0, "a", after=1, seq=51) == []
    (answer,) = heard(server.say(0, Probe((50, 51)), seq=60), Probed)
    assert (answer.missing, [seq for seq, _ in answer.pending]) == ((50,), [51])
    said = server.push(1, "a", [2, 2], 0)
    assert pulled(said) == {51: [3, 3]}
    assert len(heard(said, Pulled)) == 1


def test_wait_of_a_replaced_worker_ends_with_its_life() -> None:
    server = stage()
    server.say(1, Declare("kv", False, 0, (Entry("later", 1, (2,), 0, 2),)), seq=50)
    server.replace(1)
    server.declare("later", torch.zeros(2))
    assert not [said for said in server.load("later", torch.zeros(2)) if said.to == b"w1"]


@pytest.mark.spec("R23")
def test_a_repeated_hello_changes_nothing() -> None:
    server = stage()
    server.pull(0, "a", least=1, seq=50)
    before = server.snapshot()
    assert heard(server.hello(0), Welcome)
    assert server.snapshot() == before


# --- answers are not answered -----------------------------------------------------------------------


@pytest.mark.spec("R2", "R38")
@pytest.mark.parametrize("job", [JOB, OTHER_JOB])
def test_an_answer_is_never_answered(job: bytes) -> None:
    """Two servers that refuse each other's refusals would never stop."""
    server = stage(servers=2)
    for message in (Error(0, 10, "no"), Error(7, 999, "new"), Welcome(0, 1, 2, 2)):
        envelope = Envelope(job, 1, Role.SERVER, 1, 2, 0)
        packet = over(envelope, message)
        assert server.take(server.server.on_packet("server 1", packet, server.now)) == []
        assert server.take(server.server.on_packet(b"s1", packet, server.now)) == []


# --- other servers ----------------------------------------------------------------------------------


@pytest.mark.spec("R2")
def test_server_connects_to_every_other_server_and_says_hello() -> None:
    server = ServerStage(servers=3, rank=1, greeted=False)
    assert [effect for effect in server.notes if isinstance(effect, Connect)][1:] == [
        Connect("server 0", "tcp://s0:1"),
        Connect("server 2", "tcp://s2:3"),
    ]
    assert server.show() == []  # once
    server.notes.clear()
    said = server.show(servers=[Seat("held", 1), Seat("held", 2), Seat("held", 9)])
    assert server.notes == [Connect("server 2", "tcp://s2:9")]  # it listens elsewhere now
    assert [(each.to, type(each.message)) for each in said] == [("server 2", Hello)]
    assert server.show(servers=[Seat("lost", 1), Seat("held", 2), Seat("empty", 0)]) == []


@pytest.mark.spec("R2", "R16")
def test_another_server_may_tell_norms_and_nothing_else() -> None:
    server = stage(servers=2)
    norms = Norms("kv", "a", None, 0, (1.0, 2.0), True)
    assert server.other(1, norms) == []
    assert "ProtocolError: a server may not send Status" in refusal(server.other(1, Status("kv")))
    assert "Fenced: server 1 incarnation 1" in refusal(server.other(1, norms, incarnation=1))
    assert "Fenced" in refusal(server.other(1, greeting(role=int(Role.SERVER)), incarnation=1))
    assert "does not know this server 1 yet" in refusal(server.other(1, norms, incarnation=9))


def test_before_the_first_view_it_knows_no_other_server() -> None:
    server = stage(servers=2)
    server.server.member.view = None
    assert "does not know this server 1 yet" in refusal(server.other(1, Norms("kv", "a", None, 0, (), True)))


# --- the scheduler ----------------------------------------------------------------------------------


def test_server_beats_every_second_and_sends_norms_by_a_clock_of_its_own() -> None:
    server = stage()
    server.now += 0.25
    assert server.take(server.server.on_timer(server.now)) == []
    for beat in range(1, 4):
        due = server.server.deadline()
        assert due == 100.0 + beat
        server.now = due
        said = server.take(server.server.on_timer(server.now))
        assert [type(each.message) for each in said] == [Beat]
        due = server.server.deadline()
        assert due == 100.25 + beat * TELL_NORMS_EVERY_S
        server.now = due
        assert server.take(server.server.on_timer(server.now)) == []


@pytest.mark.spec("R37")
@pytest.mark.parametrize("code", [0, 1])
def test_stop_is_the_end(code: int) -> None:
    server = stage()
    server.notes.clear()
    assert server.scheduler(Stop(code, "the job is over")) == []
    assert server.notes == [Exit(code, "the job is over")]
    assert server.server.deadline() is None


@pytest.mark.spec("R100")
def test_silence_of_everybody_is_the_end_too() -> None:
    server = stage()
    server.notes.clear()
    limit_s = SILENCES_MAX * server.server.member.identity.silence_max_s
    for _ in range(round(limit_s)):
        server.now += 1
        server.take(server.server.on_timer(server.now))
    assert server.notes == []
    server.now += 1
    server.take(server.server.on_timer(server.now))
    assert server.notes == [Exit(75, "the scheduler and all workers have been silent for 60 s")]


def test_the_next_job_begins_with_nothing() -> None:
    server = stage()
    server.pull(0, "a", least=1, seq=50)
    server.notes.clear()
    server.job, server.view = OTHER_JOB, 0
    server.seats = [Seat("held", 1), Seat("held", 2)]  # even if incarnations began anew
    said = server.show()
    assert said == []
    assert server.notes == [Note("info", "the next job begins; the stores of the last one are dropped")]
    assert "Mismatch" in refusal(server.say(0, Status("kv"), job=JOB, incarnation=10))
    assert "Fenced" in refusal(server.say(0, Status("kv"), incarnation=0))
    assert "expects HELLO first" in refusal(server.say(0, Status("kv")))
    server.hello(0)
    assert "store 'kv' was not opened" in refusal(server.say(0, Status("kv")))
    server.open("async")
    assert heard(server.say(0, Find("kv", ("a",))), FoundAll)[0].found == ((0, (), 0),)
    assert heard(server.say(0, Status("kv")), StatusIs)


def test_a_beat_of_the_scheduler_changes_nothing() -> None:
    server = stage()
    before = server.snapshot()
    assert server.scheduler(Beat(0, "all is well")) == []
    assert server.snapshot() == before


# --- REVIVE -----------------------------------------------------------------------------------------

REVIVE = Revive("kv", "best", 7)


def with_shelf() -> ServerStage:
    return stage(every_s=0.0)


def image_of(*values: float) -> Snapshot:
    """The image of a server whose key ``a`` has these values, after two rounds."""
    server = stage()
    server.init("b", [0.0])
    server.server.context.chunks.at(1).writable()[:2] = torch.tensor(values)
    for number in (0, 1):
        for rank in (0, 1):
            server.push(rank, "b", [1.0], number)
    image, release = server.server.control.snapshot()
    release()
    return image


@pytest.mark.spec("R147")
def test_rank_0_asks_which_cuts_there_are() -> None:
    server = with_shelf()
    assert server.say(0, Revive("kv", "best", 0), seq=50) == []
    (look,) = server.orders()
    assert isinstance(look, FindCuts)
    assert (look.job, look.tag) == (None, "best")
    said = server.disk(FoundCuts((3, 7), 9, look.for_whom))
    assert [(each.to, each.message) for each in said] == [(b"w0", Revived(50, (3, 7)))]


@pytest.mark.spec("R147")
def test_and_gives_a_store_the_values_of_one() -> None:
    server = with_shelf()
    assert server.say(0, REVIVE, seq=50) == []
    assert server.say(0, REVIVE, seq=50) == [], "it is being read already"
    (read,) = server.orders()
    assert isinstance(read, Read)
    assert read.cut == 7
    (probed,) = heard(server.say(0, Probe((50,))), Probed)
    assert probed.pending[0].reason == "it is being read from the disk"
    server.push(0, "a", [1.0, 1.0], 0)  # nothing else changes it
    said = server.disk(Loaded(image_of(3.0, 4.0), read.for_whom))
    assert heard(said, Revived) == [Revived(50, (7,))]
    assert server.values("a") == [3.0, 4.0]
    assert heard(server.say(0, Find("kv", ("b",))), FoundAll)[0].found[0].dtype == 1


def test_restore_refuses_a_read_that_waits_for_pushes_to_the_values_before() -> None:
    server = with_shelf()
    server.init("b", [0.0])
    for number in (0, 1):
        for rank in (0, 1):
            server.push(rank, "b", [1.0], number)
    assert not heard(server.push(1, "b", [1.0], 2, pull=True), Pulled), "rank 0 has not pushed"
    server.say(0, REVIVE)
    (read,) = [order for order in server.orders() if isinstance(order, Read)]
    said = server.disk(Loaded(image_of(3.0, 4.0), read.for_whom))
    assert refusal([each for each in said if each.to == b"w1"]).startswith(
        "ConfigError: restore() gave key 'b' of store 'kv' other values while this call waited for pushes"
    )
    assert heard(said, Revived)
    for rank in (0, 1):
        said = server.push(rank, "b", [1.0], 2, pull=True)
    assert heard(said, Pulled), "the next rounds are numbered from the checkpoint"


@pytest.mark.spec("R147")
def test_other_ranks_may_not_and_without_a_place_nobody_can() -> None:
    assert "rank 1 may not restore a store; only rank 0 may" in refusal(with_shelf().say(1, REVIVE))
    said = refusal(stage().say(0, REVIVE))
    assert said.startswith("ConfigError: server 0 has no directory for checkpoints: start every")


@pytest.mark.parametrize(
    ("answer", "match"),
    [
        (Loaded(None, None, StorageError("a bit is flipped")), "StorageError: a bit is flipped"),
        (Loaded(Snapshot(0, 1, ()), None), "the checkpoint has no store 'kv'; it has none"),
        (FoundCuts(error=StorageError("cannot read")), "StorageError: cannot read"),
    ],
)
def test_unreadable_snapshot_is_reported_and_changes_nothing(answer: Loaded | FoundCuts, match: str) -> None:
    server = with_shelf()
    before = server.snapshot()
    server.say(0, REVIVE)
    (read,) = server.orders()
    said = server.disk(replace(answer, for_whom=read.for_whom))  # type: ignore[union-attr]
    assert match in refusal(said)
    assert server.snapshot() == before


def test_replaced_worker_is_not_answered_after_a_read() -> None:
    server = with_shelf()
    server.say(0, REVIVE)
    (read,) = server.orders()
    server.replace(0)
    assert server.disk(Loaded(image_of(3.0, 4.0), read.for_whom)) == []  # type: ignore[union-attr]
    assert server.values("a") == [0.0, 0.0]


@pytest.mark.spec("R247")
def test_the_session_keys_of_a_view_are_trusted_and_servers_met_by_theirs() -> None:
    server = ServerStage(2, 2)
    view = server.server.member.view
    assert view is not None
    assert not [effect for effect in server.notes if isinstance(effect, Trust)]
    keys = tuple([f"{number}".ljust(40, "k") for number, _ in enumerate(view.members)])
    members = tuple(
        [
            each._replace(incarnation=7, endpoint="tcp://new:1") if tuple(each[:2]) == (1, 1) else each
            for each in view.members
        ]
    )
    server.scheduler(replace(view, number=99, members=members, keys=("", *keys[1:])))
    (trust,) = [effect for effect in server.notes if isinstance(effect, Trust)]
    assert trust.keys == {keys[1]: "worker:1:11", keys[2]: "server:0:1", keys[3]: "server:1:7"}
    connects = [effect for effect in server.notes if isinstance(effect, Connect)][1:]
    assert [(each.endpoint, each.key, each.is_member) for each in connects] == [
        ("tcp://s1:2", "", False),
        ("tcp://new:1", keys[3], True),
    ]


def test_a_server_that_its_operator_ends_says_so() -> None:
    server = stage()
    (said,) = server.take(server.server.leave("interrupted", server.now))
    assert said.message == Leave(True, 0, True, "interrupted")
    assert server.notes[-1] == Exit(0, "interrupted")
