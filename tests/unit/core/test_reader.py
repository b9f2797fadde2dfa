"""A reader: it finds the servers, asks until it is answered, and says whom it waited for in vain."""

import hashlib
from collections.abc import Callable

import pytest

from kvps import protocol as p
from kvps.core.effects import Connect, Effect, Exit, Note, Send
from kvps.core.membership_client import Identity
from kvps.core.reader import (
    AGAIN_S,
    ALONE_WINDOW,
    LATE_S,
    LOST_S,
    RELAY_AGAIN_S,
    RELAY_AVOIDED_S,
    RELAY_LATE_S,
    RELAY_SILENT_S,
    RELAYS_MAX,
    SHARED_WINDOW,
    WATCH_AGAIN_S,
    WINDOW,
    Ask,
    Reader,
)
from kvps.errors import KeyNotFound, Mismatch, SchedulerLost, ServerLost, Timeout, Unauthorized
from kvps.protocol.envelope import Envelope, Message, Packet, Role
from tests.support.effects import taken

AT = "tcp://127.0.0.1:9091"
JOB = bytes(range(16))
WATCH = p.Watch("policy", 0)


def member(rank: int, incarnation: int = 1, endpoint: str = "tcp://s:1", machine: int = 7) -> p.Member:
    return p.Member(Role.SERVER, rank, incarnation, "held", endpoint, "host", 0.0, "", machine)


class Stage:
    """A reader, and a test that is everybody else."""

    def __init__(self) -> None:
        self.now = 100.0
        self.core = Reader(Identity(Role.READER, AT, "here", 7, "kvps", 3, 2**40, machine=7))
        self.got: list[int] = []

    def begin(self, *servers: int, until: float = 1e9, lasts: int = 0) -> list[Effect]:
        """Ask some servers, which answer ``lasts`` times before the answer counts."""

        def take(packet: Packet) -> bool:
            assert isinstance(packet.message, p.VersionIs)
            self.got.append(packet.message.number)
            return len(self.got) > lasts

        asks = [Ask(server, WATCH, take) for server in servers]
        return taken(self.core, self.core.begin(asks, until, "wait()", self.now))

    def hear(self, message: Message, route: str = "scheduler", job: bytes = JOB) -> list[Effect]:
        role = Role.SCHEDULER if route == "scheduler" else Role.SERVER
        packet = Packet(Envelope(job, 0, role, 0, 1, 0), message)
        return taken(self.core, self.core.on_packet(route, packet, self.now))

    def found(self, *members: p.Member, keys: tuple[str, ...] = ()) -> list[Effect]:
        return self.hear(p.ServersAre(1, members, keys))

    def wait(self, seconds: float) -> list[Effect]:
        """Let time pass, timer by timer."""
        until, effects = self.now + seconds, list[Effect]()
        while (due := self.core.deadline()) <= until and not ended(effects):
            self.now = max(self.now, due)
            effects += taken(self.core, self.core.on_timer(self.now))
        self.now = until
        return effects

    def joined(self) -> None:
        self.begin()
        assert ended(self.found(member(0), member(1, endpoint="tcp://s:2", machine=8), keys=("", "k")))


def ended(effects: list[Effect]) -> bool:
    return any(isinstance(effect, Exit) for effect in effects)


def said(effects: list[Effect], kind: type[Message]) -> list[tuple[object, int]]:
    """To whom a message of this class was sent, and its number."""
    return [
        (effect.to, effect.packet.envelope.seq)
        for effect in effects
        if isinstance(effect, Send) and isinstance(effect.packet.message, kind)
    ]


@pytest.mark.spec("R549", "R551")
def test_reader_finds_the_servers_and_says_hello_first() -> None:
    stage = Stage()
    connect, where = stage.begin()
    assert connect == Connect("scheduler", AT)
    assert isinstance(where, Send)
    assert where.packet.envelope.job == bytes(16)
    assert stage.found() == []
    assert stage.found(member(0, endpoint="")) == [], "the job is forming"
    assert said(stage.wait(AGAIN_S), p.Where)
    effects = stage.found(member(0), member(1, endpoint="tcp://s:2", machine=8), keys=("", "k"))
    assert effects[:2] == [
        Connect("server 0", "tcp://s:1", True, ""),
        Connect("server 1", "tcp://s:2", False, "k"),
    ]
    assert [stage.core.is_near(server) for server in (0, 1)] == [True, False]
    assert ended(effects)
    assert stage.core.servers == 2
    (hello,) = said(stage.begin(0), p.Hello)
    assert hello[0] == "server 0"
    assert not said(stage.wait(0.5), p.Hello)
    assert said(stage.wait(AGAIN_S), p.Hello), "it is repeated"
    ((_, seq),) = said(stage.hear(p.Welcome(3, 2**40, 1, 2), "server 0"), p.Watch)
    assert ended(stage.hear(p.VersionIs(seq, 5), "server 0"))
    assert stage.got == [5]
    assert isinstance(stage.hear(p.VersionIs(seq, 6), "server 0")[0], Note), "it was answered"
    assert stage.got == [5]


@pytest.mark.spec("R548")
def test_requests_are_repeated_and_a_window_is_under_way() -> None:
    stage = Stage()
    stage.joined()
    stage.begin(*[0] * (WINDOW + 1))
    sent = said(stage.hear(p.Welcome(3, 2**40, 1, 2), "server 0"), p.Watch)
    assert len(sent) == WINDOW
    assert said(stage.wait(WATCH_AGAIN_S), p.Watch) == sent
    ((_, last),) = said(stage.hear(p.VersionIs(sent[0][1], 1), "server 0"), p.Watch)
    for _, seq in sent[1:]:
        assert not ended(stage.hear(p.VersionIs(seq, 1), "server 0"))
    assert ended(stage.hear(p.VersionIs(last, 1), "server 0"))


def test_a_server_that_speaks_is_asked_again_and_not_looked_for() -> None:
    stage = Stage()
    stage.joined()
    stage.begin(0)
    stage.hear(p.Welcome(3, 2**40, 1, 2), "server 0")
    stage.now += 0.1
    stage.hear(p.Welcome(3, 2**40, 1, 2), "server 0")
    effects = stage.wait(WATCH_AGAIN_S)
    assert [to for to, _ in said(effects, p.Watch)] == ["server 0"]
    assert not said(effects, p.Where)


def test_an_answer_may_not_be_the_last() -> None:
    stage = Stage()
    stage.joined()
    stage.begin(0, lasts=1)
    ((_, seq),) = said(stage.hear(p.Welcome(3, 2**40, 1, 2), "server 0"), p.Watch)
    assert not ended(stage.hear(p.VersionIs(seq, 0), "server 0"))
    assert ended(stage.hear(p.VersionIs(seq, 1), "server 0"))


def test_server_that_has_forgotten_the_reader_is_greeted_again() -> None:
    stage = Stage()
    stage.joined()
    stage.begin(0)
    ((_, seq),) = said(stage.hear(p.Welcome(3, 2**40, 1, 2), "server 0"), p.Watch)
    for error in (Mismatch("server 0 expects HELLO first"), Mismatch("another job")):
        effects = stage.wait(2 * AGAIN_S)
        effects += stage.hear(p.Error(seq, error.code, str(error)), "server 0")
        assert said(effects, p.Hello)
        assert said(effects, p.Where)
        assert said(stage.hear(p.Welcome(3, 2**40, 1, 2), "server 0"), p.Watch) == [("server 0", seq)]
    stage.hear(p.Error(999, Mismatch.code, "of what is over"), "server 0")
    assert not ended(stage.hear(p.Welcome(3, 2**40, 1, 2), "server 0"))


@pytest.mark.spec("R549")
def test_versions_of_one_job_are_not_read_from_another() -> None:
    stage = Stage()
    stage.joined()
    there = p.ServersAre(1, (member(0, 2), member(1, 2)), ())
    stage.begin(0)
    assert not ended(stage.hear(there, job=bytes(range(1, 17)))), "a new version may be of a new job"
    stage.core.begin([Ask(1, p.Read("policy", 3, 0, 0, 8), bool)], 1e9, "reading version 3", stage.now)
    assert ended(stage.hear(there, job=JOB))
    assert isinstance(stage.core.error, KeyNotFound)
    assert "another job is at tcp://127.0.0.1:9091 by now" in str(stage.core.error)


def test_server_in_anothers_place_is_found() -> None:
    stage = Stage()
    stage.joined()
    stage.begin(0)
    sent = said(stage.hear(p.Welcome(3, 2**40, 1, 2), "server 0"), p.Watch)
    assert said(stage.wait(AGAIN_S), p.Where), "the scheduler is not asked more often"
    effects = stage.found(member(0, 9, "tcp://s:3"), member(1, endpoint="tcp://s:2", machine=8))
    assert effects[0] == Connect("server 0", "tcp://s:3", True, "")
    assert said(effects, p.Hello)
    assert said(stage.hear(p.Welcome(3, 2**40, 1, 2), "server 0"), p.Watch) == sent, "under its number"


@pytest.mark.parametrize(
    ("route", "message", "kind"),
    [
        ("scheduler", p.Error(1, Unauthorized.code, "no"), Unauthorized),
        ("scheduler", p.Stop(0, "done"), SchedulerLost),
        ("server 0", p.Error(0, KeyNotFound.code, "gone"), KeyNotFound),
    ],
)
def test_refusals_end_the_call(route: str, message: Message, kind: type[Exception]) -> None:
    stage = Stage()
    stage.joined()
    stage.begin(0)
    assert ended(stage.hear(message, route))
    assert isinstance(stage.core.error, kind)
    assert stage.hear(p.Welcome(3, 2**40, 1, 2), "server 0") == [], "it is over"


def test_an_error_of_what_is_over_changes_nothing() -> None:
    stage = Stage()
    stage.joined()
    stage.begin(0)
    stage.hear(p.Welcome(3, 2**40, 1, 2), "server 0")
    assert not ended(stage.hear(p.Error(999, KeyNotFound.code, "gone"), "server 0"))
    assert isinstance(stage.hear(p.Done(1))[0], Note)


def test_answers_to_a_call_that_was_given_up_are_not_heard() -> None:
    stage = Stage()
    stage.joined()
    stage.begin(0, 1)
    ((_, first),) = said(stage.hear(p.Welcome(3, 2**40, 1, 2), "server 0"), p.Watch)
    ((_, second),) = said(stage.hear(p.Welcome(3, 2**40, 1, 2), "server 1"), p.Watch)
    assert ended(stage.hear(p.Error(first, KeyNotFound.code, "gone"), "server 0"))
    stage.core.forget()
    assert not ended(stage.hear(p.Error(second, KeyNotFound.code, "gone"), "server 1")), "the next may begin"


def test_late_answer_does_not_end_the_call_that_is_about_to_begin() -> None:
    stage = Stage()
    stage.joined()
    stage.begin(0)
    ((_, seq),) = said(stage.hear(p.Welcome(3, 2**40, 1, 2), "server 0"), p.Watch)
    stage.core.forget()
    assert not ended(stage.hear(p.VersionIs(seq, 1), "server 0"))


def test_every_wait_ends_by_an_error_that_says_for_whom() -> None:
    stage = Stage()
    stage.begin(until=105.0)
    assert ended(stage.wait(10))
    assert isinstance(stage.core.error, Timeout)
    assert "has not said where the servers are" in str(stage.core.error)
    stage = Stage()
    stage.begin()
    assert ended(stage.wait(LOST_S + 1))
    assert isinstance(stage.core.error, SchedulerLost)
    stage = Stage()
    stage.joined()
    stage.begin(1, until=stage.now + 2)
    assert ended(stage.wait(3))
    assert str(stage.core.error) == "wait(): no answer in time"
    stage.begin(1, until=stage.now + 2 * LATE_S)
    assert ended(stage.wait(3 * LATE_S))
    assert str(stage.core.error) == "wait(): no answer in time. Servers [1] are silent"
    stage.begin(1)
    assert ended(stage.wait(LOST_S + 1))
    assert isinstance(stage.core.error, ServerLost)
    assert "server 1 at tcp://s:2 has said nothing for 60 s" in str(stage.core.error)


def test_cancelled_call_ends_at_once_and_only_while_it_lasts() -> None:
    stage = Stage()
    stage.joined()
    stage.core.forget()
    assert not taken(stage.core, stage.core.cancel(stage.now)), "no call is under way"
    stage.begin(0)
    assert ended(taken(stage.core, stage.core.cancel(stage.now)))
    assert isinstance(stage.core.error, Timeout)
    assert str(stage.core.error) == "wait() was cancelled"
    assert not taken(stage.core, stage.core.cancel(stage.now)), "it has ended"


def test_server_that_refuses_again_and_again_is_given_up() -> None:
    stage, effects = Stage(), list[Effect]()
    stage.joined()
    stage.begin(0)
    until = stage.now + LOST_S + 2 * AGAIN_S
    while stage.now < until and not ended(effects):
        for _, seq in said(stage.hear(p.Welcome(3, 2**40, 1, 2), "server 0"), p.Watch):
            stage.hear(p.Error(seq, Mismatch.code, "server 0 serves another job"), "server 0")
        effects = stage.wait(AGAIN_S)
    assert isinstance(stage.core.error, ServerLost)
    assert "has answered no request for 60 s. It says: server 0 serves another job" in str(stage.core.error)


# --- relays ---------------------------------------------------------------------------------------

OCTETS = memoryview(b"abcdefgh")
DIGEST = hashlib.sha256(OCTETS).hexdigest()


class Relayed(Stage):
    """A reader that has asked server 1 for some ranges."""

    def __init__(self, count: int = 1) -> None:
        super().__init__()
        self.core.endpoint, self.core.key = "tcp://me:1", "k"
        self.kept: list[int] = []
        self.core.on_range = lambda place, octets: self.kept.append(place.start)
        self.read: list[int] = []
        self.joined()
        asks = [Ask(1, p.Read("policy", 3, 0, start, 8, True), self.taking(start)) for start in range(count)]
        (hello,) = taken(self.core, self.core.begin(asks, 1e9, "reading", self.now))
        assert isinstance(hello, Send)
        assert isinstance(hello.packet.message, p.Hello)
        assert hello.packet.message.endpoint == "tcp://me:1"
        self.asked = said(self.hear(p.Welcome(3, 2**40, 1, 2), "server 1"), p.Read)

    def taking(self, start: int) -> Callable[[Packet], bool]:
        def take(packet: Packet) -> bool:
            self.read.append(start)
            return True

        return take

    def send_elsewhere(self, relay: int = 5, index: int = 0) -> list[Effect]:
        message = p.Elsewhere(self.asked[index][1], f"tcp://r:{relay}", relay, DIGEST)
        return self.hear(message, "server 1")

    def answer(self, message: Message, *payload: memoryview, route: str = "reader 0") -> list[Effect]:
        packet = Packet(Envelope(JOB, 0, Role.READER, 5, 1, 0), message, payload)
        return taken(self.core, self.core.on_packet(route, packet, self.now))


def reads(effects: list[Effect]) -> list[tuple[object, p.Read]]:
    sent = [effect for effect in effects if isinstance(effect, Send)]
    return [
        (effect.to, effect.packet.message) for effect in sent if isinstance(effect.packet.message, p.Read)
    ]


@pytest.mark.spec("R589")
def test_relay_is_asked_and_its_bytes_are_passed_on() -> None:
    stage = Relayed()
    effects = stage.send_elsewhere()
    assert effects[0] == Connect("reader 0", "tcp://r:5", False, "k")
    assert reads(effects) == [("reader 0", p.Read("policy", 3, 0, 0, 8, server=1))]
    ((_, seq),) = said(effects, p.Read)
    assert not ended(stage.answer(p.Elsewhere(seq)))
    assert not stage.answer(p.Octets(seq + 9, 8), OCTETS), "nobody asked"
    assert not stage.answer(p.Watch("policy", 3))
    assert ended(stage.answer(p.Octets(seq, 8), OCTETS))
    assert stage.read == stage.kept == [0]


@pytest.mark.spec("R589")
def test_false_bytes_send_a_reader_back_to_the_server() -> None:
    stage = Relayed()
    ((_, seq),) = said(stage.send_elsewhere(), p.Read)
    effects = stage.answer(p.Octets(seq, 8), memoryview(b"abcdefgX"))
    assert reads(effects) == [("server 1", p.Read("policy", 3, 0, 0, 8, True, 5))]
    stage.asked = said(effects, p.Read)
    ((_, seq),) = said(stage.send_elsewhere(6), p.Read)
    effects = stage.answer(p.Octets(seq, 0), route="reader 1")  # none at all
    assert reads(effects) == [("server 1", p.Read("policy", 3, 0, 0, 8, False, 6))], "no third relay"
    assert stage.read == []
    ((_, seq),) = said(effects, p.Read)
    assert ended(stage.answer(p.Octets(seq, 8), OCTETS, route="server 1"))


def test_more_requests_are_under_way_to_relays_and_to_servers_that_nobody_else_asks() -> None:
    stage = Relayed(3 * ALONE_WINDOW)
    assert len(stage.asked) == ALONE_WINDOW > SHARED_WINDOW > WINDOW
    effects = [effect for index in range(ALONE_WINDOW) for effect in stage.send_elsewhere(index=index)]
    sent = [to for to, _ in reads(effects)]
    assert (sent.count("reader 0"), sent.count("server 1")) == (ALONE_WINDOW, SHARED_WINDOW)


@pytest.mark.spec("R589")
def test_relay_that_lacks_a_range_stays_for_others() -> None:
    stage = Relayed()
    ((_, seq),) = said(stage.send_elsewhere(), p.Read)
    effects = stage.answer(p.Error(seq, KeyNotFound.code, "gone"))
    assert reads(effects) == [("server 1", p.Read("policy", 3, 0, 0, 8, False, 0))]


@pytest.mark.spec("R589")
def test_silent_relay_is_asked_again_and_then_given_up_with_all_its_ranges() -> None:
    stage = Relayed(WINDOW)
    for index in range(WINDOW):
        stage.send_elsewhere(index=index)
    effects = stage.wait(RELAY_SILENT_S)
    assert {to for to, _ in reads(effects[:WINDOW])} == {"reader 0"}, "again"
    back = [read for to, read in reads(effects) if to == "server 1"]
    assert {read.without for read in back} == {5}
    assert {read.start for read in back} == set(range(WINDOW))


@pytest.mark.spec("R589")
def test_relay_is_asked_one_request_again_at_a_time() -> None:
    stage = Relayed(WINDOW)
    for index in range(WINDOW):
        stage.send_elsewhere(index=index)
    starts = []
    for _ in range(WINDOW):
        ((to, read),) = reads(stage.wait(RELAY_AGAIN_S))
        assert to == "reader 0"
        starts.append(read.start)
    assert sorted(starts) == list(range(WINDOW))


@pytest.mark.spec("R589")
@pytest.mark.parametrize("is_back", [True, False])
def test_relay_that_cannot_be_reached_is_waited_for_once(is_back: bool) -> None:
    stage = Relayed()
    ((_, seq),) = said(stage.send_elsewhere(), p.Read)
    stage.asked = said(stage.wait(RELAY_SILENT_S), p.Read)[-1:]
    effects = stage.send_elsewhere()
    assert [to for to, _ in reads(effects)] == ["server 1"], "nobody waits again"
    (ended,) = taken(stage.core, stage.core.on_packet("server 1", octets_for(effects), stage.now))
    assert isinstance(ended, Exit)
    if is_back:
        stage.answer(p.Octets(seq, 8), OCTETS)
    else:
        stage.now += RELAY_AVOIDED_S
    read = Ask(1, p.Read("policy", 4, 0, 0, 8, True), stage.taking(9))
    stage.asked = said(taken(stage.core, stage.core.begin([read], 1e9, "reading", stage.now)), p.Read)
    assert [to for to, _ in reads(stage.send_elsewhere())] == ["reader 0"], "it is asked again"


def octets_for(effects: list[Effect]) -> Packet:
    ((_, seq),) = said(effects, p.Read)
    return Packet(Envelope(JOB, 0, Role.SERVER, 1, 1, 0), p.Octets(seq, 8), (OCTETS,))


@pytest.mark.spec("R589")
def test_relay_that_only_says_to_wait_is_given_up_later() -> None:
    stage = Relayed()
    ((_, seq),) = said(stage.send_elsewhere(), p.Read)
    begun, back = stage.now, []
    while not back:
        stage.answer(p.Elsewhere(seq))
        back = [read for to, read in reads(stage.wait(RELAY_SILENT_S / 2)) if to == "server 1"]
    assert RELAY_LATE_S <= stage.now - begun < RELAY_LATE_S + 1.0


def test_relays_are_few_and_the_idle_ones_make_place() -> None:
    stage = Relayed()
    for relay in range(RELAYS_MAX):
        ((_, seq),) = said(stage.send_elsewhere(relay), p.Read)
        effects = stage.answer(p.Error(seq, KeyNotFound.code, "gone"), route=f"reader {relay}")
        stage.asked = said(effects, p.Read)
    assert Connect("reader 0", "tcp://r:99", False, "k") in stage.send_elsewhere(99)


def test_busy_relay_that_makes_place_loses_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvps.core.reader.RELAYS_MAX", 1)
    monkeypatch.setattr("kvps.core.reader.WINDOW", 2)
    stage = Relayed(2)
    stage.send_elsewhere(5)
    effects = stage.send_elsewhere(6, 1)
    assert {(to, read.without) for to, read in reads(effects)} == {("server 1", 5), ("reader 0", 0)}


def test_job_that_is_another_ends_what_relays_were_asked() -> None:
    stage = Relayed()
    stage.send_elsewhere()
    members = member(0, 2), member(1, 2, endpoint="tcp://s:2", machine=8)
    effects = stage.hear(p.ServersAre(1, members, ("", "k")), job=bytes(16).replace(b"\0", b"\1"))
    assert ended(effects)
    assert isinstance(stage.core.error, KeyNotFound)
