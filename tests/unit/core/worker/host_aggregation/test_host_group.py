"""One worker among those of its machine: whom it asks, whom it answers, and when."""

import pytest
import torch

from kvps.compression.spec import FP16, CodecSpec
from kvps.core.effects import Connect, Effect, Exit, Listen, Send
from kvps.core.key_roles import near_endpoint
from kvps.core.worker import calls
from kvps.core.worker.host_aggregation.host_group import MUTE_AFTER_S
from kvps.core.worker.host_aggregation.merge_queue import HURRY_S, WAIT_MAX_S
from kvps.dtypes import BY_NAME
from kvps.errors import ConfigError, Fenced, Mismatch, ProtocolError, Timeout
from kvps.protocol.envelope import Envelope, Message, Node, Packet, Role
from kvps.protocol.membership import Beat, Error, Hello, Join, Joined, Pending, Probe, Probed, Welcome
from kvps.protocol.values import Ack, Ask, Pull, Pulled, Push, Receipt, Run, Stand, StepPart
from tests.support.worker_harness import JOB, Bench, pull, push, values_of

FLOAT = BY_NAME["float32"].id
KEYS = {"a": 1, "b": 2, "c": 3}
"""Each key has a chunk of its own."""
HELLO = Hello(1, 0, "kvps", 0, 2, 1, "here", 7)
WELCOME = Welcome(0, 21, 3, 1)
ASKED = Push(3, FLOAT, (1,), 1.0, False, (Run(0, 4, 0),))
"""What worker 1 pushes to the leader of chunk 3: key ``c``."""
ASKED_TOO = Push(3, FLOAT, (1,), 1.0, True, (Run(0, 4, 0),))
WANTED = Pull(3, True, (Ask(0, 4, 1, 0),))
ONES = torch.ones(4)


def bench(rank: int = 0, machines: tuple[int, ...] = (2, 2, 2), knows: bool = True, **more: object) -> Bench:
    """Worker ``rank``, whose neighbours have said HELLO and been answered, in a store with merged requests.

    With three of them, worker 1 leads key a, worker 2 key b and worker 0 key c.
    """
    worker = Bench(len(machines), 1, rank, machines=machines)
    for other in range(len(machines)):
        if knows and other != rank and machines[other] == machines[rank]:
            worker.leader(other, WELCOME)
            worker.neighbour(other, HELLO)
    worker.open(**({"bundles": True} | more))
    worker.init({name: torch.zeros(4) for name in KEYS})
    worker.effects.clear()
    return worker


def said(effects: list[Effect], to: object = None) -> list[Message]:
    """What was sent (to one)."""
    return [
        effect.packet.message for effect in effects if isinstance(effect, Send) and to in (None, effect.to)
    ]


def pushes(worker: Bench, to: str = "server 0") -> list[Push]:
    return [message for message in said(worker.effects, to) if isinstance(message, Push)]


def seq_of(worker: Bench, cls: type[Message], to: str = "server 0") -> int:
    """The number of the last that was sent."""
    sends = [
        send
        for send in worker.effects
        if isinstance(send, Send) and send.to == to and isinstance(send.packet.message, cls)
    ]
    return sends[-1].packet.envelope.seq


def pulled(worker: Bench, cls: type[Message] = Push, value: float = 7.0, version: int = 1) -> list[Effect]:
    """Let the server answer what it was asked last."""
    stands = (Stand(0, 4, version, 0),)
    answer = Pulled(seq_of(worker, cls), 3, FLOAT, True, stands)
    return worker.server(0, answer, torch.full((4,), value))


def answers(effects: list[Effect], rank: int) -> list[tuple[int, list[float]]]:
    """The values that a neighbour gets, by the number of its request."""
    return [
        (effect.packet.message.seq, values_of(effect))
        for effect in effects
        if isinstance(effect, Send)
        and effect.to == b"from %d" % rank
        and isinstance(effect.packet.message, Pulled)
    ]


# --- who they are ---------------------------------------------------------------------------------


class TestMeeting:
    @pytest.mark.spec("R95", "R248")
    def test_where_there_are_keys_nobody_else_can_foresee_the_name(self) -> None:
        worker = Bench(2, 1, 1, machines=(2, 2), keys=("s" * 40, "a" * 40, "b" * 40))
        assert [it for it in worker.effects if isinstance(it, Listen)] == [Listen(near_endpoint("b" * 40))]
        assert [it for it in worker.effects if isinstance(it, Connect)][2:] == [
            Connect("worker 0", near_endpoint("a" * 40), is_near=True)
        ]


@pytest.mark.spec("R94")
class TestLeader:
    """Of a chunk: the neighbour whose turn it is by the chunk's number, or the next."""

    def test_is_not_needed_by_the_last_of_a_machine(self) -> None:
        worker = bench()
        worker.view(*[worker.seat(Node(Role.WORKER, rank), "lost") for rank in (1, 2)])
        worker.call(push(dict.fromkeys(KEYS, ONES)))
        assert len(pushes(worker)) == 3

    def test_is_one_of_the_others_for_who_is_taken_for_lost(self) -> None:
        worker = bench()
        worker.view(worker.seat(Node(Role.WORKER, 0), "lost"))
        worker.effects.clear()
        worker.call(push({"c": ONES}))
        assert len(pushes(worker, "worker 1")) == 1


# --- what is asked of a leader --------------------------------------------------------------------


class TestFollower:
    @pytest.mark.spec("R96")
    def test_asks_the_server_itself_when_the_leader_is_lost(self) -> None:
        worker = bench()
        sink = torch.zeros(4)
        acked = worker.call(push({"a": torch.full((4,), 2.0)}, sinks=(sink,), eager=False))
        worker.leader(1, Ack((Receipt(1, 0),)))
        worker.call(push({"a": torch.full((4,), 3.0)}))
        before = pushes(worker, "worker 1")
        effects = worker.view(worker.seat(Node(Role.WORKER, 1), "lost"))
        sends = [it for it in effects if isinstance(it, Send) and it.to == "server 0"]
        assert [it.packet.message for it in sends] == before
        assert [values_of(it)[0] for it in sends] == [2.0, 3.0]
        first = sends[0].packet.envelope.seq
        worker.server(0, Pulled(first, 1, FLOAT, True, (Stand(0, 4, 1, 0),)), torch.full((4,), 9.0))
        assert worker.is_done(acked)
        assert sink.tolist() == [9.0] * 4

    @pytest.mark.spec("R96")
    def test_does_not_take_an_old_answer_for_a_new_one(self) -> None:
        """A leader that was taken for lost comes back, and answers what it was asked before."""
        worker = bench(machines=(2, 2))
        ticket = worker.call(pull({"a": torch.zeros(4)}, least=1))
        old = seq_of(worker, Pull, "worker 1")
        worker.view(worker.seat(Node(Role.WORKER, 1), "lost"))
        worker.view()
        sink = torch.zeros(4)
        other = worker.call(pull({"c": sink}))
        worker.leader(1, Pulled(old, 1, FLOAT, True, (Stand(0, 4, 1, 0),)), torch.full((4,), 5.0))
        assert not worker.is_done(other)
        assert not worker.is_done(ticket)
        new = seq_of(worker, Pull, "worker 1")
        assert new != old
        worker.leader(1, Pulled(new, 3, FLOAT, True, (Stand(0, 4, 0, 0),)), torch.full((4,), 8.0))
        assert worker.is_done(other)
        assert sink.tolist() == [8.0] * 4

    @pytest.mark.spec("R95")
    def test_stops_where_a_newer_life_has_its_rank(self) -> None:
        worker = bench()
        worker.call(push({"a": ONES}))
        effects = worker.leader(1, Error(0, Fenced.code, "replaced"))
        assert [it.code for it in effects if isinstance(it, Exit)] == [1]


# --- what a leader is asked -----------------------------------------------------------------------


@pytest.mark.spec("R95")
class TestRefuses:
    def refusal(self, worker: Bench, rank: int, message: Message, **more: object) -> Error:
        (error,) = said(worker.neighbour(rank, message, **more), b"from %d" % rank)  # type: ignore[arg-type]
        assert isinstance(error, Error)
        return error

    @pytest.mark.parametrize(
        "more",
        [{"rank": 2}, {"rank": 1, "job": bytes(16)}, {"rank": 1, "role": Role.SERVER}],
        ids=["another machine", "another job", "a server"],
    )
    def test_worker_of_another_machine_is_refused(self, more: dict[str, object]) -> None:
        worker = bench(machines=(2, 2, 3))
        error = self.refusal(worker, message=HELLO, **more)  # type: ignore[arg-type]
        assert error.code == Mismatch.code
        assert "is not a neighbour of worker 0 of job 00010203" in error.text

    def test_an_older_life(self) -> None:
        worker = bench()
        error = self.refusal(worker, 1, HELLO, incarnation=21)
        assert error.code == Fenced.code
        assert error.text == (
            "worker 1 incarnation 21 was replaced by incarnation 22. This process must stop"
        )

    def test_a_new_life_that_has_not_said_hello(self) -> None:
        worker = bench()
        assert not worker.neighbour(1, ASKED, seq=1, incarnation=40), "no view has named it yet"
        assert not worker.neighbour(1, HELLO, incarnation=40)
        worker.view(worker.seat(Node(Role.WORKER, 1), incarnation=40))
        error = self.refusal(worker, 1, ASKED, seq=1, incarnation=40)
        assert (error.seq, error.code) == (1, ProtocolError.code)
        assert "worker 0 expects HELLO first" in error.text

    def test_another_protocol(self) -> None:
        worker = bench()
        hello = Hello(9, 1, "2.0", 0, 2, 1, "here", 7)
        error = self.refusal(worker, 1, hello)
        assert error.code == ProtocolError.code
        assert "protocol 9.1 (kvps 2.0) cannot talk to 1." in error.text

    @pytest.mark.parametrize(
        ("message", "says"),
        [
            (Push(3, FLOAT, (2,), 1.0, False, (Run(0, 4, 0),)), "worker 1 pushes for ranks (2,)"),
            (Push(3, FLOAT, (1, 2), 1.0, False, (Run(0, 4, 0),)), "pushes for ranks (1, 2)"),
            (Pull(3, False, (Ask(0, 4, 0, 0),)), "a worker may not send Pull to a worker"),
            (Beat(0, ""), "a worker may not send Beat to a worker"),
        ],
    )
    def test_message_for_servers_is_refused(self, message: Message, says: str) -> None:
        worker = bench()
        payload = (ONES,) if isinstance(message, Push) else ()
        (error,) = said(worker.neighbour(1, message, *payload, seq=4))
        assert isinstance(error, Error)
        assert (error.seq, error.code) == (4, ProtocolError.code)
        assert says in error.text
        assert said(worker.neighbour(1, Probe((4,)))) == [Probed((4,), ())], "it was not taken in"


class TestLeading:
    def test_answers_along_the_newest_connection_of_a_life(self) -> None:
        worker = bench()
        worker.neighbour(1, WANTED, seq=5)
        envelope = Envelope(JOB, 1, Role.WORKER, 1, 22, 0)
        worker.take(worker.core.on_packet(b"new", Packet(envelope, HELLO), worker.now))
        effects = pulled(worker, Pull)
        assert [type(message) for message in said(effects, b"new")] == [Pulled]

    @pytest.mark.spec("R96")
    def test_gives_values_to_who_asked_for_them(self) -> None:
        """And tells the others as soon as it is known that they are in."""
        worker = bench()
        sink = torch.zeros(4)
        ticket = worker.call(push({"c": ONES}, sinks=(sink,), eager=False))
        worker.neighbour(1, ASKED_TOO, ONES, seq=5)
        worker.neighbour(2, Push(3, FLOAT, (2,), 1.0, False, (Run(0, 4, 0),)), ONES, seq=9)
        assert pushes(worker)[-1].pull
        effects = worker.ack(0, seq_of(worker, Push))
        assert said(effects, b"from 1") == [Ack((Receipt(5, 0),))]
        assert said(effects, b"from 2") == [Ack((Receipt(9, 0),))]
        effects = pulled(worker)
        assert answers(effects, 1) == [(5, [7.0] * 4)]
        assert said(effects, b"from 2") == []
        assert worker.is_done(ticket)
        assert sink.tolist() == [7.0] * 4

    @pytest.mark.spec("R91")
    def test_gives_them_also_if_the_server_did_not_acknowledge_first(self) -> None:
        worker = bench()
        ticket = worker.call(push({"c": ONES}, eager=False))
        worker.neighbour(1, ASKED_TOO, ONES, seq=5)
        worker.neighbour(2, Push(3, FLOAT, (2,), 1.0, False, (Run(0, 4, 0),)), ONES, seq=9)
        effects = pulled(worker)
        assert answers(effects, 1) == [(5, [7.0] * 4)]
        assert said(effects, b"from 2") == [Ack((Receipt(9, 0),))]
        assert worker.is_done(ticket)

    @pytest.mark.spec("R155")
    @pytest.mark.parametrize(
        "more", [{"code": CodecSpec(FP16)}, {"held": (3,)}, {"step": StepPart(1, 0, 4, (0,))}]
    )
    def test_takes_in_nothing_that_is_compressed_or_clipped(self, more: dict[str, object]) -> None:
        worker = bench()
        message = Push(3, FLOAT, (1,), 1.0, True, (Run(0, 4, 0),), **more)  # type: ignore[arg-type]
        values = torch.ones(4).half().view(torch.uint8) if "code" in more else ONES
        (said,) = worker.neighbour(1, message, values, seq=5)
        assert isinstance(said, Send)
        answer = said.packet.message
        assert isinstance(answer, Error)
        assert "these go to the server" in answer.text

    def test_takes_in_once_what_comes_twice(self) -> None:
        worker = bench()
        worker.neighbour(1, ASKED, ONES, seq=5)
        worker.neighbour(1, ASKED, 50 * ONES, seq=5)
        worker.call(push({"c": ONES}))
        worker.neighbour(2, Push(3, FLOAT, (2,), 1.0, False, (Run(0, 4, 0),)), ONES, seq=1)
        assert values_of(worker.sends(Push)[-1]) == [3.0] * 4

    @pytest.mark.spec("R98")
    def test_leaders_own_pull_takes_the_answer_that_is_there(self) -> None:
        worker = bench()
        sink = torch.zeros(4)
        ticket = worker.call(pull({"c": sink}))
        pulled(worker, Pull, 6.0)
        assert worker.is_done(ticket)
        worker.neighbour(1, Pull(3, True, (Ask(0, 4, 0, 0),)), seq=1)
        pulled(worker, Pull, 7.0, version=2)
        assert worker.is_done(worker.call(pull({"c": sink})))
        assert sink.tolist() == [7.0] * 4
        assert len(worker.sent(Pull)) == 2

    def test_does_not_write_where_nobody_waits_any_more(self) -> None:
        worker = bench()
        sink = torch.zeros(4)
        ticket = worker.call(pull({"c": sink}), 1.0)
        worker.wait(1.0)
        assert isinstance(worker.error(ticket), Timeout)
        pulled(worker, Pull)
        assert sink.tolist() == [0.0] * 4


class TestAway:
    """One that has joined pushes nothing: merged requests go without it, until all are back."""

    def test_all_are_back_when_this_worker_is(self) -> None:
        worker = bench()
        worker.neighbour(2, Join("kv", 1, False))
        worker.neighbour(2, Join("other", 1, False))
        worker.neighbour(1, Join("kv", 1, False))
        worker.call(calls.JoinStore("kv"))
        assert said(worker.effects, "worker 1") == [Join("kv", 1, False)] == said(worker.effects, "worker 2")
        assert worker.core.table.neighbours._merged._expected == {0}
        worker.server(0, Joined(seq_of(worker, Join), 0))
        assert worker.core.table.neighbours._merged._expected == {0, 1}, "of another store"
        worker.neighbour(1, Join("kv", 1, False))
        assert worker.core.table.neighbours._merged._expected == {0, 1}, "it came late"
        worker.neighbour(1, Join("kv", 2, False))
        assert worker.core.table.neighbours._merged._expected == {0}


class TestRefusal:
    @pytest.mark.spec("R99")
    def test_of_a_bundle_makes_each_push_go_by_itself(self) -> None:
        """Each has its own answer."""
        worker = bench()
        ticket = worker.call(push({"c": ONES}, eager=False))
        worker.neighbour(1, ASKED, 2 * ONES, seq=5)
        worker.neighbour(2, Push(3, FLOAT, (2,), 1.0, False, (Run(0, 4, 0),)), 3 * ONES, seq=9)
        merged = seq_of(worker, Push)
        effects = worker.server(0, Error(merged, ProtocolError.code, "some were counted"))
        assert [message.ranks for message in pushes(worker)[1:]] == [(0,), (1,), (2,)]
        assert [values_of(send)[0] for send in worker.sends(Push)[1:]] == [1.0, 2.0, 3.0]
        assert said(effects, b"from 1") == said(effects, b"from 2") == []
        assert worker.notes() == [
            "debug: a merged push was refused, and its pushes are sent separately: some were counted"
        ]
        own, first, second = worker.seqs(Push, 0)[1:]
        effects = worker.server(0, Error(first, ConfigError.code, "no optimizer"))
        assert said(effects, b"from 1") == [Error(5, ConfigError.code, "no optimizer")]
        assert said(worker.ack(0, second), b"from 2") == [Ack((Receipt(9, 0),))]
        worker.ack(0, own)
        assert worker.is_done(ticket)

    def test_of_a_pull_is_told_to_all(self) -> None:
        worker = bench()
        ticket = worker.call(pull({"c": ONES.clone()}))
        message = worker.sent(Pull)[-1]
        worker.neighbour(1, message, seq=5)
        effects = worker.server(0, Error(seq_of(worker, Pull), Mismatch.code, "it has another shape"))
        assert said(effects) == [Error(5, Mismatch.code, "it has another shape")]
        assert isinstance(worker.error(ticket), Mismatch)


@pytest.mark.spec("R97")
class TestAskedAfter:
    @pytest.mark.spec("R460")
    @pytest.mark.parametrize("is_for_workers", [False, True])
    def test_tells_whether_it_waits_for_calls_of_workers(self, is_for_workers: bool) -> None:
        worker = bench()
        worker.neighbour(1, WANTED, seq=5)
        worker.neighbour(1, Probe((5,)))
        at = seq_of(worker, Pull)
        known = (at,) if is_for_workers else ()
        effects = worker.server(0, Probed((), (Pending(at, "why"),), known))
        told = (5,) if is_for_workers else ()
        assert said(effects, b"from 1") == [Probed((), (Pending(5, "why"),), told)]

    def test_asks_the_server_as_soon_as_it_has_what_was_asked_after(self) -> None:
        worker = bench()
        worker.neighbour(1, ASKED_TOO, ONES, seq=5)
        worker.neighbour(2, Push(3, FLOAT, (2,), 1.0, False, (Run(0, 4, 0),)), ONES, seq=9)
        worker.neighbour(1, Probe((5,)))
        worker.wait(HURRY_S)
        at = seq_of(worker, Push)
        assert said(worker.ack(0, at), "server 0") == [Probe((at,))]
        effects = worker.server(0, Probed((), (Pending(at, "round 0 waits for rank 0"),)))
        assert said(effects, b"from 1") == [Probed((), (Pending(5, "round 0 waits for rank 0"),))]
        assert said(effects, b"from 2") == [], "it wants no values"


def at_once(worker: Bench) -> None:
    """Let so little time pass that nobody can ask after anything."""
    worker.now += 0.02
    worker.take(worker.core.on_timer(worker.now))


class TestTimeout:
    def test_says_that_neighbours_are_missing(self) -> None:
        worker = bench()
        ticket = worker.call(push({"c": ONES}, eager=False), 0.02)
        at_once(worker)
        says = "other workers of this machine have not made the same push. Nothing was cancelled"
        assert says in str(worker.error(ticket))

    def test_names_the_server_once_it_was_asked(self) -> None:
        worker = bench()
        ticket = worker.call(push({"c": ONES}, eager=False), 5.0)
        worker.wait(5.0)
        assert "server 0 (tcp://s0:1) has not answered, and was last" in str(worker.error(ticket))

    def test_copies_what_is_in_a_bundle(self) -> None:
        worker = bench()
        values = ONES.clone()
        worker.call(push({"c": values}, eager=False), 0.02)
        at_once(worker)
        values.fill_(-1)
        worker.wait(WAIT_MAX_S)
        assert values_of(worker.sends(Push)[-1]) == [1.0] * 4

    def test_a_push_goes_on_after_it(self) -> None:
        worker = bench()
        sink = torch.zeros(4)
        ticket = worker.call(push({"c": ONES}, sinks=(sink,), eager=False), 5.0)
        worker.wait(5.0)
        assert isinstance(worker.error(ticket), Timeout)
        pulled(worker)
        assert sink.tolist() == [0.0] * 4
        assert worker.is_done(worker.call(calls.Flush("kv")))


class TestNewLife:
    def test_answers_go_to_the_life_that_asked(self) -> None:
        """What the old one asked is not told to the new one."""
        worker = bench()
        worker.neighbour(1, ASKED, ONES, seq=5)
        worker.view(worker.seat(Node(Role.WORKER, 1), incarnation=40))
        envelope = Envelope(JOB, 1, Role.WORKER, 1, 40, 0)
        worker.take(worker.core.on_packet(b"new", Packet(envelope, HELLO), worker.now))
        worker.wait(WAIT_MAX_S)
        effects = worker.ack(0, seq_of(worker, Push))
        assert said(effects, b"new") == []
        assert said(effects, b"from 1") == [Ack((Receipt(5, 0),))]


# --- what must not go wrong -----------------------------------------------------------------------


def test_push_of_a_leader_alone_is_a_copy_of_the_users_memory() -> None:
    """After a Timeout he may write there, and what was sent may have to be sent again."""
    worker = bench()
    gradient = torch.ones(4)
    worker.call(push({"c": gradient}, eager=False))
    worker.wait(WAIT_MAX_S)
    assert [message.ranks for message in pushes(worker)] == [(0,)]
    gradient.fill_(77)
    assert values_of(worker.sends(Push)[-1]) == [1.0] * 4


class TestALeaderThatIsHeldAndDoesNotSpeak:
    def test_leads_again_when_it_speaks(self) -> None:
        worker = bench()
        worker.call(push({"a": ONES}))
        worker.wait(MUTE_AFTER_S + 1.1)
        assert [message.chunk for message in pushes(worker)] == [1]
        worker.call(push({"a": ONES}))
        assert [message.chunk for message in pushes(worker, "worker 2")] == [1], "the next one leads"
        worker.leader(1, WELCOME)
        worker.call(push({"a": ONES}))
        assert [message.runs[0].number for message in pushes(worker, "worker 1")] == [0, 2]

    def test_but_not_before_it_has_answered_hello(self) -> None:
        worker = bench()
        worker.call(push({"a": ONES}))
        worker.wait(MUTE_AFTER_S + 1.1)
        worker.leader(1, Probed((), ()))
        worker.call(push({"a": ONES}))
        assert [message.runs[0].number for message in pushes(worker, "worker 1")] == [0]
        assert [message.runs[0].number for message in pushes(worker, "worker 2")] == [1]


def test_a_leader_that_came_back_on_another_machine_is_no_leader() -> None:
    """And the view in which it was lost may never have come."""
    worker = bench()
    worker.call(push({"a": ONES}))
    assert pushes(worker) == []
    worker.view(worker.seat(Node(Role.WORKER, 1), incarnation=99, machine=3))
    assert [message.ranks for message in pushes(worker)] == [(0,)]


def test_nothing_that_was_kept_is_for_a_replacement() -> None:
    worker = bench()
    for rank, seq in ((1, 1), (2, 1)):
        worker.neighbour(rank, WANTED, seq=seq)
    pulled(worker, Pull)
    worker.neighbour(1, WANTED, seq=2)
    pulled(worker, Pull)  # rank 2 has pulled before, so that this is kept for it
    worker.view(worker.seat(Node(Role.WORKER, 2), incarnation=50))
    assert worker.neighbour(2, HELLO, incarnation=50)
    effects = worker.neighbour(2, WANTED, seq=1, incarnation=50)
    assert answers(effects, 2) == []
    assert isinstance(said(effects, "server 0")[0], Pull)


def test_acknowledged_push_is_not_refused_with_the_rest() -> None:
    worker = bench()
    ticket = worker.call(push({"c": ONES}))
    worker.neighbour(1, ASKED_TOO, ONES, seq=4)
    worker.neighbour(2, Push(3, FLOAT, (2,), 1.0, False, (Run(0, 4, 0),)), ONES, seq=5)
    at = seq_of(worker, Push)
    worker.ack(0, at)
    assert worker.is_done(ticket)
    effects = worker.server(0, Error(at, ProtocolError.code, "the key was replaced"))
    assert [type(message) for message in said(effects, b"from 1")] == [Error]
    assert said(effects, b"from 2") == []


@pytest.mark.spec("R141")
class TestEpoch:
    """The servers have returned to a cut: nobody owes anybody an answer of before."""

    def begin(self, worker: Bench) -> None:
        worker.effects.clear()
        worker.view(epoch=1, since=worker.number + 1, cut=1)

    def test_earlier_requests_of_a_neighbour_are_void(self) -> None:
        worker = bench()
        worker.neighbour(1, ASKED, ONES, seq=50)
        self.begin(worker)
        assert said(worker.neighbour(1, Probe((50,)))) == [Probed((50,), ())]
        worker.wait(WAIT_MAX_S + 1)
        assert pushes(worker) == [], "its push goes nowhere"

    def test_request_under_an_older_view_is_ignored(self) -> None:
        worker = bench()
        self.begin(worker)
        assert worker.neighbour(1, ASKED, ONES, seq=51, view=worker.number - 1) == []
        assert said(worker.neighbour(1, Probe((51,)))) == [Probed((51,), ())]
        worker.neighbour(1, ASKED, ONES, seq=51)
        assert said(worker.neighbour(1, Probe((51,))))[0] == Probed((), ()), "it is taken in"
