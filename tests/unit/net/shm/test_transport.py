"""Payload through shared memory: who agrees with whom, what is lent, and when it comes back."""

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from kvps import protocol as m
from kvps.core.effects import Connect, Hold, Route
from kvps.errors import ConfigError, ProtocolError
from kvps.net.shm import leases, transport
from kvps.net.shm.segment import PAGE_BYTES, Block, Mapping, Segment, Unshared
from kvps.net.shm.transport import POST_EVERY, SHARE_MIN_BYTES, SWEEP_EVERY_S, SharingTransport
from kvps.net.transport import DROPPED, Demanded, Disconnected, Guard, Unserved
from kvps.protocol.envelope import Envelope, Loan, Message, Packet, Role
from kvps.protocol.transports import Offer
from kvps.tensors import to_frame
from tests.support.memory_network import MemoryNetwork
from tests.support.server_harness import ServerStage, opening, refusal

MIB = 1 << 20
JOB = bytes(range(16))
SERVER = Envelope(JOB, 1, Role.SERVER, 0, 1, 0)
WORKER = Envelope(JOB, 1, Role.WORKER, 3, 2, 0)
SEGMENTS: list[Segment | None] = []
"""Of the processes of one test."""
HELLO = m.Hello(1, 0, "test", 0, 2, 3, "here", os.getpid())
WELCOME = m.Welcome(3, 2, 4, 1)


def push(size_bytes: int) -> m.Push:
    return m.Push(1, 9, (3,), 1.0, True, (m.Run(0, size_bytes, 0),))


class Clock:
    """A clock that the test winds."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Buffer:
    """Something that is held while it is read."""

    def __init__(self) -> None:
        self.is_held = True

    def release(self) -> None:
        assert self.is_held, "released twice"
        self.is_held = False


class Process:
    """One end: a transport, its segment, and what it heard."""

    def __init__(
        self,
        network: MemoryNetwork,
        envelope: Envelope,
        bind: str | None = None,
        *,
        shares: bool = True,
        insist: bool = False,
    ) -> None:
        self.envelope = envelope
        self.clock = Clock()
        self.segment = Segment(MIB) if shares else None
        SEGMENTS.append(self.segment)
        self.inner = network.transport(bind)
        self.transport = SharingTransport(
            self.inner, self.segment, why_not="" if shares else "it will not", insist=insist, clock=self.clock
        )
        self.heard: list[tuple[Route, Packet | Disconnected]] = []
        self.refused: list[str] = []

    def say(self, route: Route, message: Message, *payload: memoryview, hold: Hold | None = None) -> None:
        self.transport.send(route, Packet(self.envelope, message, payload), hold)

    def listen(self) -> list[Message | Disconnected]:
        """Take all that came; return the messages of this time."""
        before = len(self.heard)
        arrivals = self.transport.poll(0.0)
        try:
            self.heard += arrivals
        except ProtocolError as error:
            self.refused.append(str(error))
        return [
            packet if isinstance(packet, Disconnected) else packet.message
            for _, packet in self.heard[before:]
        ]

    def idle(self) -> None:
        """Have nothing to do for a moment: what was given back is told."""
        self.heard += self.transport.poll(0.001)

    def take(self, size_bytes: int) -> Block:
        assert self.segment is not None
        block = self.segment.take(size_bytes)
        assert block is not None
        return block

    def payload(self) -> list[memoryview]:
        """That of the packet which was heard last."""
        packet = self.heard[-1][1]
        assert isinstance(packet, Packet)
        return list(packet.payload)

    def last_route(self) -> Route:
        return self.heard[-1][0]

    def forget(self) -> None:
        """Refer to nothing that was heard."""
        self.heard.clear()


@pytest.fixture
def network() -> Iterator[MemoryNetwork]:
    yield MemoryNetwork()
    for item in SEGMENTS:
        if item is not None:
            item.close()
    SEGMENTS.clear()


@pytest.fixture
def full_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no room for postings, so that leases are returned by RELEASE."""
    monkeypatch.setattr(leases, "POSTINGS_MAX", 0)


@pytest.fixture
def carried(network: MemoryNetwork) -> list[Packet]:
    """All packets as they travel."""
    seen: list[Packet] = []

    def note(packet: Packet) -> int:
        seen.append(packet)
        return 1

    network.filter = note
    return seen


def greet(server: Process, worker: Process, name: str = "server 0", is_near: bool | None = True) -> Route:
    """Let ``worker`` connect, and both agree; return the server's route to it."""
    is_near = None if name == "scheduler" else is_near
    worker.transport.connect(Connect(name, server.inner.endpoint, is_near))
    worker.say(name, HELLO)
    assert server.listen() == [HELLO]
    route = server.last_route()
    server.say(route, m.Welcome(worker.envelope.rank, worker.envelope.incarnation, 4, 1))
    settle(worker, server)
    assert worker.heard, "the core hears of the WELCOME"
    return route


def settle(*processes: Process) -> None:
    """Let them say what they have to say to one another."""
    for _ in range(4):
        for process in processes:
            process.listen()


def pair(network: MemoryNetwork) -> tuple[Process, Process, Route]:
    server, worker = Process(network, SERVER, "mem://s"), Process(network, WORKER)
    return server, worker, greet(server, worker)


# --- agreeing -----------------------------------------------------------------------------------


@pytest.mark.spec("R77", "R82", "R83")
def test_the_one_who_connected_offers_and_both_map(network: MemoryNetwork, carried: list[Packet]) -> None:
    server, worker, route = pair(network)
    assert server.segment
    assert worker.segment
    assert [(packet.envelope.role, packet.message) for packet in carried[2:]] == [
        (Role.WORKER, worker.segment.offer),
        (Role.SERVER, server.segment.offer),
        (Role.SERVER, m.Taken(worker.segment.nonce, True, postings=True)),
        (Role.WORKER, m.Taken(server.segment.nonce, True, postings=True)),
    ]
    assert all(packet.envelope.seq == 0 for packet in carried[2:])
    assert [type(item) for item in server.listen() + worker.listen()] == [], "no core hears of it"
    assert worker.segment.readers == {"server 0"}
    assert server.segment.readers == {route}
    assert worker.segment.is_read
    assert server.segment.is_read
    assert len(worker.transport.mappings) == len(server.transport.mappings) == 1


def test_nothing_is_offered_to_a_scheduler(network: MemoryNetwork, carried: list[Packet]) -> None:
    scheduler, worker = Process(network, SERVER, "mem://s"), Process(network, WORKER)
    greet(scheduler, worker, "scheduler")
    assert [type(packet.message) for packet in carried] == [m.Hello, m.Welcome]


def test_nothing_is_offered_to_another_machine(network: MemoryNetwork, carried: list[Packet]) -> None:
    server, worker = Process(network, SERVER, "mem://s"), Process(network, WORKER)
    greet(server, worker, is_near=False)
    assert [type(packet.message) for packet in carried] == [m.Hello, m.Welcome]
    assert worker.transport.mappings == []


@pytest.mark.spec("R77")
def test_workers_of_one_machine_share_with_each_other(network: MemoryNetwork) -> None:
    leader, follower = Process(network, WORKER), Process(network, WORKER._replace(rank=1))
    leader.transport.listen("mem://leader")
    leader.inner.endpoint = "mem://leader"
    route = greet(leader, follower, "worker 3")
    assert leader.segment
    assert follower.segment
    assert follower.segment.readers == {"worker 3"}
    assert leader.segment.readers == {route}


@pytest.mark.spec("R77")
def test_a_second_welcome_changes_nothing(network: MemoryNetwork) -> None:
    server, worker, route = pair(network)
    mappings = server.transport.mappings + worker.transport.mappings
    server.say(route, WELCOME)
    settle(worker, server)
    assert server.transport.mappings + worker.transport.mappings == mappings


@pytest.mark.spec("R84")
def test_payload_travels_by_reference_both_ways(network: MemoryNetwork, carried: list[Packet]) -> None:
    server, worker, route = pair(network)
    assert server.segment
    assert worker.segment
    for item, to, other in ((worker, "server 0", server), (server, route, worker)):
        block = item.take(SHARE_MIN_BYTES)
        block[:] = 5
        item.say(to, push(SHARE_MIN_BYTES), block.data)
        assert item.segment
        offset = item.segment.offset_of(block.data)
        assert carried[-1].payload == ()
        assert carried[-1].loans == (Loan(item.segment.nonce, 1, offset or 0, SHARE_MIN_BYTES),)
        assert other.listen() == [push(SHARE_MIN_BYTES)]
        (frame,) = other.payload()
        assert bytes(frame) == bytes(block)
        block[0] = 6
        assert frame[0] == 6, "it is the same memory"


@pytest.mark.spec("R84")
def test_payload_may_lie_in_several_places(network: MemoryNetwork) -> None:
    server, worker, _ = pair(network)
    blocks = [worker.take(size) for size in (PAGE_BYTES, 100, PAGE_BYTES)]
    for mark, block in enumerate(blocks):
        block[:] = mark
    worker.say("server 0", push(2 * PAGE_BYTES + 100), *[field.data for field in blocks])
    server.listen()
    assert [bytes(frame) for frame in server.payload()] == [bytes(item) for item in blocks]


FRAMES: dict[str, Callable[[Process], Sequence[memoryview]]] = {
    "elsewhere": lambda worker: [memoryview(bytes(2 * PAGE_BYTES))],
    "partly elsewhere": lambda worker: [worker.take(PAGE_BYTES).data, memoryview(bytes(PAGE_BYTES))],
    "small": lambda worker: [worker.take(PAGE_BYTES).data[: SHARE_MIN_BYTES - 1]],
    "small and in two places": lambda worker: [
        worker.take(PAGE_BYTES).data[:1000],
        worker.take(PAGE_BYTES).data[:1000],
    ],
    "in too many places": lambda worker: [worker.take(PAGE_BYTES).data[:32]] * 256,
}


@pytest.mark.parametrize("which", FRAMES)
def test_payload_that_cannot_be_lent_travels_in_a_single_frame(
    network: MemoryNetwork, carried: list[Packet], which: str
) -> None:
    server, worker, _ = pair(network)
    payload = FRAMES[which](worker)
    size = sum(frame.nbytes for frame in payload)
    worker.say("server 0", push(size), *payload)
    assert carried[-1].loans == ()
    assert [frame.nbytes for frame in carried[-1].payload] == [size]
    assert server.listen() == [push(size)]
    assert bytes(server.payload()[0]) == b"".join(payload)


def test_a_message_of_several_frames_keeps_them(network: MemoryNetwork) -> None:
    server, worker, _ = pair(network)
    state = m.SetState(1, 0, 2, 3, (m.Field("a", 9, 3), m.Field("b", 9, 5000)))
    payload = [memoryview(b"abc"), memoryview(bytes(5000))]
    worker.say("server 0", state, *payload)
    assert server.listen() == [state]
    assert [bytes(frame) for frame in server.payload()] == [bytes(frame) for frame in payload]


# --- giving back ----------------------------------------------------------------------------------


@pytest.mark.spec("R85", "R86")
def test_memory_is_held_until_the_reader_drops_it(network: MemoryNetwork) -> None:
    server, worker, _ = pair(network)
    assert worker.segment
    block, hold = worker.take(PAGE_BYTES), Buffer()
    start = worker.segment.offset_of(block.data)
    worker.say("server 0", push(PAGE_BYTES), block.data, hold=hold)
    del block
    server.listen()
    server.idle()
    worker.listen()
    assert hold.is_held
    assert worker.segment.offset_of(worker.take(PAGE_BYTES).data) != start
    server.forget()
    server.idle()
    worker.listen()
    assert not hold.is_held
    taken = {worker.segment.offset_of(field.data) for field in [worker.take(PAGE_BYTES)] * 2}
    assert start in taken


@pytest.mark.spec("R260", "R261")
def test_leases_are_returned_without_a_packet(network: MemoryNetwork, carried: list[Packet]) -> None:
    """The one who lent looks before it serves what comes next, and when it wakes."""
    server, worker, route = pair(network)
    before = len(carried)
    holds = [Buffer() for _ in range(3)]
    for hold in holds[:2]:
        worker.say("server 0", push(PAGE_BYTES), worker.take(PAGE_BYTES).data, hold=hold)
    server.listen()
    server.forget()
    server.idle()
    assert all(item.is_held for item in holds)
    server.say(route, m.Done(0))
    seen: list[bool] = []
    for _ in worker.transport.poll(0.0):
        seen += [item.is_held for item in holds[:2]]
    assert seen == [False, False]
    worker.say("server 0", push(PAGE_BYTES), worker.take(PAGE_BYTES).data, hold=holds[2])
    server.listen()
    server.forget()
    server.idle()
    worker.idle()
    assert not holds[2].is_held
    assert [type(packet.message) for packet in carried[before:]] == [m.Push, m.Push, m.Done, m.Push]


@pytest.mark.spec("R260")
def test_leases_are_posted_between_packets_that_came_together(network: MemoryNetwork) -> None:
    server, worker, _ = pair(network)
    holds = [Buffer() for _ in range(12)]
    for hold in holds:
        worker.say("server 0", push(PAGE_BYTES), worker.take(PAGE_BYTES).data, hold=hold)
    left = []
    for route, packet in server.transport.poll(0.0):
        del route, packet  # it is read
        worker.idle()
        left.append(sum(hold.is_held for hold in holds))
    assert all(held <= 12 - index + POST_EVERY for index, held in enumerate(left)), left
    server.idle()
    worker.idle()
    assert not any(hold.is_held for hold in holds)


@pytest.mark.spec("R261")
def test_release_that_a_posting_cannot_hold_travels_as_a_message(
    network: MemoryNetwork, carried: list[Packet]
) -> None:
    server, worker, _ = pair(network)
    holds = [Buffer() for _ in range(3)]
    for hold in holds:
        worker.say("server 0", push(PAGE_BYTES), worker.take(PAGE_BYTES).data, hold=hold)
    server.listen()
    del server.heard[-2]
    server.idle()
    assert carried[-1].message == m.Release(4, (1, 3))
    worker.listen()
    assert [item.is_held for item in holds] == [True, False, True]
    server.forget()
    server.idle()
    worker.idle()
    assert not any(item.is_held for item in holds)
    assert carried[-1].message == m.Release(4, (1, 3)), "the end was posted"


@pytest.mark.spec("R86")
@pytest.mark.usefixtures("full_pages")
def test_a_busy_reader_tells_of_several_at_once(network: MemoryNetwork, carried: list[Packet]) -> None:
    server, worker, _ = pair(network)
    block = worker.take(PAGE_BYTES)
    for count in range(1, transport.RELEASE_EVERY + 1):
        worker.say("server 0", push(PAGE_BYTES), block.data)
        server.listen()
        server.forget()
        assert not any(isinstance(packet.message, m.Release) for packet in carried), count
    worker.say("server 0", push(PAGE_BYTES), block.data)
    server.listen()
    assert carried[-1].message == m.Release(transport.RELEASE_EVERY + 1, ())


@pytest.mark.spec("R86")
@pytest.mark.usefixtures("full_pages")
def test_lost_packets_hold_memory_until_the_next(network: MemoryNetwork) -> None:
    server, worker, _ = pair(network)
    holds = [Buffer() for _ in range(3)]
    block = worker.take(PAGE_BYTES)
    network.filter = lambda packet: 0
    worker.say("server 0", push(PAGE_BYTES), block.data, hold=holds[0])
    network.filter = lambda packet: 1
    worker.say("server 0", push(PAGE_BYTES), block.data, hold=holds[1])
    server.listen()
    server.forget()
    network.filter = lambda packet: 0  # the RELEASE is lost
    server.idle()
    network.filter = lambda packet: 1
    worker.listen()
    assert all(hold.is_held for hold in holds)
    worker.say("server 0", push(PAGE_BYTES), block.data, hold=holds[2])
    server.listen()
    server.forget()
    server.idle()
    worker.listen()
    assert not any(hold.is_held for hold in holds)


@pytest.mark.spec("R87")
def test_a_packet_that_comes_twice_is_taken_once(network: MemoryNetwork) -> None:
    server, worker, _ = pair(network)
    network.filter = lambda packet: 2
    worker.say("server 0", push(PAGE_BYTES), worker.take(PAGE_BYTES).data)
    assert server.listen() == [push(PAGE_BYTES)]
    assert server.refused == ["lease 1 of worker 3 was already returned"]


def test_a_payload_that_nobody_can_be_sent_is_held_until_the_next(network: MemoryNetwork) -> None:
    server, worker, route = pair(network)
    server.transport._readers[b"nobody"] = server.transport._readers[route]
    hold = Buffer()
    server.say(b"nobody", push(PAGE_BYTES), server.take(PAGE_BYTES).data, hold=hold)
    assert hold.is_held
    server.say(route, push(PAGE_BYTES), server.take(PAGE_BYTES).data)
    worker.listen()
    worker.forget()
    worker.idle()
    server.listen()
    assert not hold.is_held


@pytest.mark.spec("R85")
def test_other_threads_may_drop_what_was_read(network: MemoryNetwork) -> None:
    server, worker, _ = pair(network)
    hold = Buffer()
    worker.say("server 0", push(PAGE_BYTES), worker.take(PAGE_BYTES).data, hold=hold)
    server.listen()
    thread = threading.Thread(target=server.forget)
    thread.start()
    thread.join()
    server.idle()
    worker.listen()
    assert not hold.is_held


# --- coming back, and ending ------------------------------------------------------------------------


def test_a_peer_that_comes_back_another_way_is_the_same(network: MemoryNetwork) -> None:
    server, worker, old = pair(network)
    hold = Buffer()
    worker.say("server 0", push(PAGE_BYTES), worker.take(PAGE_BYTES).data, hold=hold)
    server.listen()
    kept = server.payload()
    server.forget()
    new = greet(server, worker)
    assert new != old
    assert server.segment
    assert worker.segment
    assert server.segment.readers == {new}
    assert worker.segment.readers == {"server 0"}
    server.idle()
    worker.listen()
    assert hold.is_held
    kept.clear()
    server.idle()
    worker.listen()
    assert not hold.is_held
    assert len(server.transport.mappings) == 1


@pytest.mark.spec("R88")
def test_another_incarnation_of_one_process_keeps_its_leases(network: MemoryNetwork) -> None:
    """What the server still reads of the older one must not be given back by the newer."""
    server, worker, _ = pair(network)
    first, second = Buffer(), Buffer()
    worker.say("server 0", push(PAGE_BYTES), worker.take(PAGE_BYTES).data, hold=first)
    server.listen()
    kept = server.payload()
    server.forget()
    worker.envelope = Envelope(JOB, 2, Role.WORKER, 3, 7, 0)
    greet(server, worker)
    worker.say("server 0", push(PAGE_BYTES), worker.take(PAGE_BYTES).data, hold=second)
    assert server.listen() == [push(PAGE_BYTES)]
    server.forget()
    server.idle()
    worker.listen()
    assert (first.is_held, second.is_held) == (True, False)
    kept.clear()
    server.idle()
    worker.listen()
    assert not first.is_held


@pytest.mark.spec("R88")
def test_another_process_of_one_identity_begins_anew(network: MemoryNetwork) -> None:
    server, worker, _ = pair(network)
    worker.say("server 0", push(PAGE_BYTES), worker.take(PAGE_BYTES).data)
    server.listen()
    server.forget()
    server.idle()
    other = Process(network, WORKER)
    greet(server, other)
    hold = Buffer()
    other.say("server 0", push(PAGE_BYTES), other.take(PAGE_BYTES).data, hold=hold)
    assert server.listen() == [push(PAGE_BYTES)], "its lease 1 is another's"
    assert not server.refused
    server.forget()
    server.idle()
    other.listen()
    assert not hold.is_held


def test_a_replacement_at_the_end_of_a_route_is_lent_nothing(
    network: MemoryNetwork, carried: list[Packet]
) -> None:
    """A socket may connect again by itself, and find another process there."""
    server, worker, route = pair(network)
    assert worker.segment
    server.envelope = Envelope(JOB, 2, Role.SERVER, 0, 9, 0)
    server.say(route, m.Beat(1))
    assert worker.listen() == [m.Beat(1)]
    assert worker.segment.readers == set()
    worker.say("server 0", push(PAGE_BYTES), worker.take(PAGE_BYTES).data)
    assert carried[-1].loans == ()


def test_a_broken_connection_ends_the_lending_along_it(network: MemoryNetwork) -> None:
    server, worker, route = pair(network)
    assert server.segment
    worker.inner.close(0.0)
    assert server.listen() == [DROPPED]
    assert server.segment.readers == set()
    server.say(route, push(PAGE_BYTES), server.take(PAGE_BYTES).data)
    assert len(server.transport.mappings) == 1, "it may live"


@pytest.mark.spec("R89")
def test_the_end_of_a_peer_gives_all_back(network: MemoryNetwork) -> None:
    server, worker, route = pair(network)
    assert server.segment
    hold = Buffer()
    server.say(route, push(PAGE_BYTES), server.take(PAGE_BYTES).data, hold=hold)
    worker.say("server 0", push(PAGE_BYTES), memoryview(worker.take(PAGE_BYTES)))
    server.listen()
    (kept,) = server.payload()
    server.forget()
    worker.transport.close(0.0)
    server.listen()
    assert hold.is_held, "a broken connection says nothing about a process"
    server.clock.now += SWEEP_EVERY_S
    server.listen()
    assert not hold.is_held
    assert server.transport.mappings == []
    assert server.segment.readers == set()
    assert bytes(kept) == bytes(PAGE_BYTES), "what it lent can still be read"


def test_ended_reader_of_two_is_forgotten(network: MemoryNetwork) -> None:
    server, worker, _ = pair(network)
    other = Process(network, Envelope(JOB, 1, Role.WORKER, 1, 5, 0))
    route = greet(server, other)
    assert server.segment
    worker.transport.close(0.0)
    server.clock.now += SWEEP_EVERY_S
    settle(server)
    assert server.segment.readers == {route}
    assert len(server.transport.mappings) == 1
    assert other.segment
    other.say("server 0", push(PAGE_BYTES), other.take(PAGE_BYTES).data)
    assert server.listen() == [push(PAGE_BYTES)]


# --- refusing -------------------------------------------------------------------------------------


def answers(network: MemoryNetwork, carried: list[Packet], offer: m.Offer) -> list[Message]:
    """What a server says to a member that makes this offer."""
    server, worker = Process(network, SERVER, "mem://s"), Process(network, WORKER, shares=False)
    greet(server, worker)
    before = len(carried)
    worker.say("server 0", offer)
    settle(server, worker)
    return [packet.message for packet in carried[before + 1 :]]


@pytest.mark.spec("R79", "R82", "R90")
def test_unmappable_segment_is_answered_and_warned_of_once(
    network: MemoryNetwork, carried: list[Packet], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "kvps"):
        (answer,) = answers(network, carried, m.Offer(2**62, 3, MIB, 17))
    assert isinstance(answer, m.Taken)
    assert (answer.nonce, answer.mapped) == (17, False)
    assert "cannot be opened" in answer.reason
    assert [record.message for record in caplog.records] == [
        f"values travel in frames, not in shared memory: worker 3: {answer.reason}"
    ]


@pytest.mark.spec("R90")
def test_the_other_end_warns_once_and_sends_frames(
    network: MemoryNetwork, carried: list[Packet], caplog: pytest.LogCaptureFixture
) -> None:
    server = Process(network, SERVER, "mem://s", shares=False)
    worker = Process(network, WORKER)
    with caplog.at_level(logging.WARNING, "kvps"):
        route = greet(server, worker)
        server.say(route, WELCOME)
        settle(worker, server)
    assert [record.message for record in caplog.records] == [
        "values travel in frames, not in shared memory: server 0 cannot read our memory: it will not"
    ]
    assert worker.segment
    assert not worker.segment.is_read
    worker.say("server 0", push(PAGE_BYTES), worker.take(PAGE_BYTES).data)
    assert carried[-1].loans == ()
    assert server.listen() == [push(PAGE_BYTES)]
    server.transport.close(0.0)


@pytest.mark.spec("R90")
def test_process_that_demands_shared_memory_refuses_another_machine(network: MemoryNetwork) -> None:
    server, worker = Process(network, SERVER, "mem://s"), Process(network, WORKER, insist=True)
    says = r"KVPS_TRANSPORT=shm.*server 0 at mem://s is on another machine.*as one user"
    with pytest.raises(ConfigError, match=says):
        worker.transport.connect(Connect("server 0", server.inner.endpoint, False))
    worker.transport.connect(Connect("scheduler", server.inner.endpoint))


@pytest.mark.spec("R90")
@pytest.mark.parametrize("insists", ["server", "worker"])
def test_connecting_process_that_demands_shared_memory_ends_with_the_reason(
    network: MemoryNetwork, monkeypatch: pytest.MonkeyPatch, insists: str, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(offer: Offer) -> Mapping:
        raise Unshared("as the test wants it")

    monkeypatch.setattr(transport, "Mapping", refuse)
    server = Process(network, SERVER, "mem://s", insist=insists == "server")
    worker = Process(network, WORKER, insist=insists == "worker")
    says = r"KVPS_TRANSPORT=shm.*as the test wants.*as one user"
    with pytest.raises(Demanded, match=says) if insists == "worker" else nullcontext():
        greet(server, worker)
    if insists == "server":  # anybody may come to it, and offer nonsense
        assert any("as the test wants it" in message for message in caplog.messages)


@pytest.mark.spec("R200")
def test_an_error_that_nobody_foresaw_names_the_packet(
    network: MemoryNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(offer: Offer) -> Mapping:
        raise IndexError("of a mapping")

    monkeypatch.setattr(transport, "Mapping", fail)
    server, worker = Process(network, SERVER, "mem://s"), Process(network, WORKER)
    with pytest.raises(Unserved) as caught:
        greet(server, worker)
    assert isinstance(caught.value.__cause__, IndexError)


class Script:
    """An inner transport that yields what it is told to, and notes what is sent."""

    def __init__(self) -> None:
        self.arrivals: deque[tuple[Route, Packet | Disconnected]] = deque()
        self.sent: list[tuple[Route, Packet, Hold | None]] = []
        self.waits: list[float | None] = []
        self.listens: list[str] = []
        self.on_poll: Callable[[], None] = lambda: None
        self.woken = 0
        self.closed: float | None = None

    def connect(self, to: Connect) -> None:
        """Nobody is there."""

    def trust(self, keys: dict[str, str]) -> None:
        self.trusted = keys

    def guard(self, admit: Guard) -> None:
        self.admit = admit

    def listen(self, endpoint: str) -> None:
        self.listens.append(endpoint)

    def send(self, route: Route, packet: Packet, hold: Hold | None) -> None:
        self.sent.append((route, packet, hold))

    def poll(self, timeout_s: float | None) -> Iterator[tuple[Route, Packet | Disconnected]]:
        self.waits.append(timeout_s)
        self.on_poll()
        while self.arrivals:
            yield self.arrivals.popleft()

    def wake(self) -> None:
        self.woken += 1

    def close(self, linger_s: float) -> None:
        self.closed = linger_s

    @property
    def messages(self) -> list[Message]:
        return [packet.message for _, packet, _ in self.sent]


class Lone:
    """A server whose only peer is what the test says it is."""

    def __init__(self) -> None:
        self.inner = Script()
        self.segment, self.peers = Segment(MIB), Segment(MIB)
        self.clock = Clock()
        self.transport = SharingTransport(self.inner, self.segment, clock=self.clock)

    def hear(self, message: Message, *loans: Loan, envelope: Envelope = WORKER) -> list[Packet]:
        """Let the peer say this along its route; return what the core hears."""
        return self.arrive(b"w", Packet(envelope, message, (), loans))

    def arrive(self, route: Route, packet: Packet | Disconnected) -> list[Packet]:
        self.inner.arrivals.append((route, packet))
        return [item for _, item in self.transport.poll(0.0) if isinstance(item, Packet)]

    def share(self) -> None:
        """Agree with the peer."""
        self.transport.send(b"w", Packet(SERVER, WELCOME), None)
        self.hear(self.peers.offer)
        self.hear(m.Taken(self.segment.nonce, True))
        self.inner.sent.clear()

    def loan(self, lease: int, offset: int = PAGE_BYTES, size: int = PAGE_BYTES) -> Loan:
        return Loan(self.peers.nonce, lease, offset, size)


@pytest.fixture
def lone() -> Iterator[Lone]:
    item = Lone()
    yield item
    item.segment.close()
    item.peers.close()


@pytest.mark.spec("R77")
def test_a_stranger_offers_in_vain(lone: Lone) -> None:
    with pytest.raises(ProtocolError, match="worker 3 offers memory before it was welcomed"):
        lone.hear(lone.peers.offer)
    lone.transport.send(b"w", Packet(SERVER, m.Welcome(3, 1, 4, 1)), None)
    with pytest.raises(ProtocolError, match="before it was welcomed"):
        lone.hear(lone.peers.offer)
    assert lone.transport.mappings == []
    assert lone.inner.messages == [m.Welcome(3, 1, 4, 1)]


@pytest.mark.spec("R260")
def test_lease_returned_before_a_packet_is_taken_back_before_the_packet(lone: Lone) -> None:
    """Packets come by the batch, and a lease may be returned while one of them is served."""
    lone.share()
    lone.hear(m.Taken(lone.segment.nonce, True, postings=True))
    block, hold = lone.segment.take(PAGE_BYTES), Buffer()
    assert block is not None
    answer = Packet(SERVER, push(PAGE_BYTES), (block.data,))
    lone.transport.send(b"w", answer, hold)
    lone.inner.arrivals += [(b"w", Packet(WORKER, HELLO))] * 2
    arrivals = lone.transport.poll(0.0)
    next(arrivals)
    assert hold.is_held
    lone.peers.postings.post(lone.segment.nonce, 2)
    next(arrivals)
    assert not hold.is_held


@pytest.mark.spec("R81")
def test_loans_of_what_is_not_mapped(lone: Lone) -> None:
    with pytest.raises(ProtocolError, match="worker 3 lends memory that is not mapped here"):
        lone.hear(push(PAGE_BYTES), lone.loan(1))
    lone.share()
    other = lone.loan(1)._replace(nonce=lone.peers.nonce ^ 1)
    with pytest.raises(ProtocolError, match="not mapped here"):
        lone.hear(push(PAGE_BYTES), other)
    stranger = Envelope(JOB, 1, Role.WORKER, 1, 5, 0)
    with pytest.raises(ProtocolError, match="worker 1 lends memory that is not mapped here"):
        lone.hear(push(PAGE_BYTES), lone.loan(1), envelope=stranger)


@pytest.mark.spec("R84")
def test_loans_of_one_packet_have_one_lease(lone: Lone) -> None:
    lone.share()
    for other in (lone.loan(2), lone.loan(1)._replace(nonce=5)):
        with pytest.raises(ProtocolError, match="several leases"):
            lone.hear(push(2 * PAGE_BYTES), lone.loan(1), other)
    assert len(lone.hear(push(PAGE_BYTES), lone.loan(1))) == 1, "the lease was not used up"


@pytest.mark.spec("R81", "R86")
def test_loans_outside_the_segment_are_given_back(lone: Lone) -> None:
    lone.share()
    for lease, offset in enumerate((0, MIB, 2**63 - 1), start=1):
        with pytest.raises(ProtocolError, match="are outside a segment"):
            lone.hear(push(PAGE_BYTES), lone.loan(lease, offset))
    list(lone.transport.poll(1.0))
    assert lone.inner.messages == [m.Release(4, ())]


def test_the_same_memory_is_not_offered_in_two_ways(lone: Lone) -> None:
    lone.share()
    copy = os.dup(lone.peers.offer.fd)
    with pytest.raises(ProtocolError, match="again, differently"):
        lone.hear(replace(lone.peers.offer, fd=copy))
    os.close(copy)


def test_a_taken_of_another_life_changes_nothing(lone: Lone) -> None:
    lone.transport.send(b"w", Packet(SERVER, WELCOME), None)
    lone.hear(lone.peers.offer)
    lone.hear(m.Taken(lone.segment.nonce ^ 1, True))
    assert lone.segment.readers == set()
    lone.hear(m.Taken(lone.segment.nonce ^ 1, False, "of long ago"))


@pytest.mark.spec("R83")
def test_a_taken_of_one_whose_memory_is_not_mapped_changes_nothing(lone: Lone) -> None:
    lone.transport.send(b"w", Packet(SERVER, WELCOME), None)
    lone.hear(m.Taken(lone.segment.nonce, True))
    assert lone.segment.readers == set()
    assert lone.hear(m.Release(9, ())) == []


@pytest.mark.spec("R83")
def test_nobody_lends_to_one_whose_memory_it_cannot_map(lone: Lone) -> None:
    """Its end could not be seen."""
    lone.transport.send(b"w", Packet(SERVER, WELCOME), None)
    lone.hear(replace(lone.peers.offer, nonce=5))
    lone.hear(m.Taken(lone.segment.nonce, True))
    assert lone.segment.readers == set()
    block = lone.segment.take(PAGE_BYTES)
    assert block is not None
    lone.transport.send(b"w", Packet(SERVER, push(PAGE_BYTES), (block.data,)), None)
    assert lone.inner.sent[-1][1].loans == ()


def test_where_nothing_is_shared_nothing_is_said_of_it() -> None:
    inner = Script()
    alone = SharingTransport(inner, None, why_not="KVPS_TRANSPORT=tcp")
    alone.send("server 0", Packet(WORKER, HELLO), None)
    for message in (WELCOME, m.Taken(1, True), m.Taken(1, False, "no"), m.Release(1, ())):
        inner.arrivals.append(("server 0", Packet(SERVER, message)))
    assert [packet.message for _, packet in alone.poll(2.0) if isinstance(packet, Packet)] == [WELCOME]
    assert inner.messages == [HELLO]
    inner.arrivals.append(("server 0", DROPPED))
    assert list(alone.poll(None)) == [("server 0", DROPPED)]
    alone.connect(Connect("server 0", "somewhere"))
    alone.close(0.5)
    assert inner.closed == 0.5
    assert inner.waits == [2.0, None]


def test_transport_listens_where_it_is_told(lone: Lone) -> None:
    lone.transport.listen("ipc://@somewhere")
    assert lone.inner.listens == ["ipc://@somewhere"]


def test_freed_memory_is_kept_once_frames_come(lone: Lone, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[None] = []
    monkeypatch.setattr(transport, "keep_freed_memory", lambda: kept.append(None))
    lone.share()
    lone.hear(push(PAGE_BYTES), lone.loan(1))
    assert kept == []
    for _ in range(3):
        packet = Packet(WORKER, push(PAGE_BYTES), (memoryview(bytes(PAGE_BYTES)),))
        assert lone.arrive(b"w", packet) == [packet]
    assert kept == [None]


def test_a_closed_one_is_found_by_nobody(lone: Lone) -> None:
    lone.transport.close(0.25)
    assert lone.inner.closed == 0.25
    assert lone.segment.offer.fd == -1


# --- waiting --------------------------------------------------------------------------------------


def test_without_peers_it_waits_at_once(lone: Lone) -> None:
    assert list(lone.transport.poll(3.0)) == []
    assert list(lone.transport.poll(None)) == []
    assert lone.inner.waits == [3.0, None]


def test_with_peers_it_waits_at_once(lone: Lone) -> None:
    lone.share()
    lone.inner.waits.clear()
    assert list(lone.transport.poll(3.0)) == []
    assert lone.inner.waits == [3.0]


def test_where_a_packet_has_to_say_what_was_given_back_it_looks_before_it_waits(lone: Lone) -> None:
    lone.share()
    lone.hear(push(PAGE_BYTES), lone.loan(1))
    lone.inner.waits.clear()
    assert len(lone.hear(push(0))) == 1
    assert lone.inner.waits == [0.0], "what is there is enough"
    assert list(lone.transport.poll(3.0)) == []
    assert lone.inner.waits == [0.0, 0.0]
    assert list(lone.transport.poll(3.0)) == []
    assert lone.inner.waits == [0.0, 0.0, 3.0], "it was told"


def test_released_loans_are_told_before_a_wait(lone: Lone) -> None:
    lone.share()
    lone.hear(push(PAGE_BYTES), lone.loan(1))
    assert lone.inner.messages == []
    told: list[list[Message]] = []
    lone.inner.on_poll = lambda: told.append(lone.inner.messages)
    for _ in range(2):
        list(lone.transport.poll(None))
    assert told == [[], [m.Release(2, ())]]


def test_a_wake_during_the_look_ends_the_wait(lone: Lone) -> None:
    lone.share()
    lone.hear(push(PAGE_BYTES), lone.loan(1))
    lone.inner.waits.clear()
    lone.inner.on_poll = lone.transport.wake
    assert list(lone.transport.poll(None)) == []
    assert lone.inner.waits == [0.0]
    assert lone.inner.woken == 1
    lone.inner.on_poll = lambda: None
    assert list(lone.transport.poll(None)) == []
    assert lone.inner.waits == [0.0, None], "one wake ends one wait"


def test_another_thread_wakes_it(network: MemoryNetwork) -> None:
    server, _, _ = pair(network)
    thread = threading.Timer(0.01, server.transport.wake)
    thread.start()
    assert list(server.transport.poll(None)) == []
    thread.join()


# --- what a server does with what is lent -----------------------------------------------------------


def lend(stage: ServerStage, rank: int, values: list[torch.Tensor], seq: int) -> list[Message]:
    """Let ``rank`` push ``values`` of key "a" as loans, and ask for what comes of it."""
    (piece,) = stage.pieces["a"]
    sizes = [value.nbytes for value in values]
    message = m.Push(piece.chunk, 1, (rank,), 1.0, True, (m.Run(piece.start, piece.size, 0),))
    packet = Packet(
        Envelope(stage.job, stage.view, Role.WORKER, rank, stage.seats[rank].incarnation, seq),
        message,
        tuple([to_frame(value) for value in values]),
        tuple([Loan(1, seq, PAGE_BYTES, size) for size in sizes]),
    )
    return [item.message for item in stage.take(stage.server.on_packet(b"w%d" % rank, packet, stage.now))]


@pytest.mark.spec("R91")
def test_a_lent_pushpull_is_answered_and_not_acknowledged() -> None:
    stage = ServerStage()
    stage.open()
    stage.init("a", [0.0, 0.0, 0.0])
    first = [torch.tensor([1.0, 2.0]), torch.tensor([3.0])]
    assert lend(stage, 0, first, 50) == []
    (probed,) = stage.say(0, m.Probe((50,)))
    assert isinstance(probed.message, m.Probed)
    assert [request.seq for request in probed.message.pending] == [50]
    answers = lend(stage, 1, [torch.ones(3)], 50)
    assert [type(answer) for answer in answers] == [m.Pulled, m.Pulled]
    assert stage.values("a") == [2.0, 3.0, 4.0]
    assert first[0].tolist() + first[1].tolist() == [1, 2, 3], "what is lent is only read"


@pytest.mark.spec("R92")
@pytest.mark.parametrize("chunk_bytes", [1 << 16, 1 << 20, 1 << 25])
def test_the_first_open_says_how_large_chunks_are(chunk_bytes: int) -> None:
    stage = ServerStage()
    stage.open(chunk_bytes=chunk_bytes)
    stage.open(chunk_bytes=1 << 17)
    stage.declare("a", torch.zeros(3 * chunk_bytes // 4))
    assert {4 * piece.size for piece in stage.pieces["a"]} == {chunk_bytes}


@pytest.mark.spec("R92")
@pytest.mark.parametrize("chunk_bytes", [0, (1 << 16) - 1, (1 << 25) + 1, 2**63 - 1])
def test_chunks_of_other_sizes_are_refused(chunk_bytes: int) -> None:
    said = ServerStage().say(0, opening(chunk_bytes=chunk_bytes))
    assert refusal(said).startswith("ConfigError: store 'kv': chunk_bytes")


@pytest.mark.spec("R83")
def test_two_neighbours_lend_along_both_of_their_connections(network: MemoryNetwork) -> None:
    """Each has opened one to the other, since each leads some chunks."""
    process = Process(network, WORKER, "mem://one")
    other = Process(network, WORKER._replace(rank=4), "mem://other")
    to_other = greet(process, other, "worker 3")
    to_one = greet(other, process, "worker 4")
    assert process.segment
    assert other.segment
    assert process.segment.readers == {to_other, "worker 4"}
    assert other.segment.readers == {to_one, "worker 3"}
    for route in ("worker 4", to_other, "worker 4"):
        process.say(route, push(PAGE_BYTES), process.take(PAGE_BYTES).data)
        other.listen()
        packet = other.heard[-1][1]
        assert isinstance(packet, Packet)
        assert packet.loans, route
