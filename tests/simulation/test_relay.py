"""Readers that pass on what they read, in virtual time: any of them may die at any packet, lie or hang, and the
others have the version to the bit, mostly from one another."""

import heapq
import itertools
import random
from collections import Counter

import pytest
import torch

from kvps import protocol as p
from kvps.core.effects import Connect, Exit, Send
from kvps.core.manifest import Extent, Published
from kvps.core.membership_client import Identity
from kvps.core.reader import RELAY_LATE_S, RELAY_SILENT_S, Reader
from kvps.core.relay import Relay
from kvps.dtypes import Spec
from kvps.protocol.envelope import Envelope, Packet, Role
from kvps.version_memory import VersionMemory
from tests.support.server_harness import ServerStage, over

RANGE = 1 << 14
BLOCK = 24 * RANGE
DELAY_S = 0.001
LINK = 1.6e6
"""Bytes in a second that leave a host."""


@pytest.fixture(autouse=True)
def _ranges_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvps.version_memory.RELAYED_BYTES_MAX", RANGE)


class Host:
    """A reader with its relay."""

    def __init__(self, world: "World", rank: int, machine: int) -> None:
        identity = Identity(Role.READER, "tcp://s:1", "here", 7, "kvps", rank, 2**40, machine=machine)
        self.world, self.rank, self.reader = world, rank, Reader(identity)
        self.reader.endpoint = f"tcp://10.0.0.9:{rank}"
        self.relay = Relay(Envelope(bytes(16), 0, Role.READER, rank, 2**40, 0))
        self.reader.on_range = self.keep
        self.routes: dict[str, str] = {}
        self.memory = VersionMemory(world.published, None)
        self.memory.begin(None, is_given=False, copies=False)
        self.is_dead = self.lies = self.only_waits = False
        self.done_at = 0.0

    def keep(self, place: p.Read, octets: memoryview) -> None:
        self.relay.on_range(place, octets, self.world.now)
        self.world.relayed(self)

    def begin(self) -> None:
        self.relay.on_version("policy", 1, self.world.now)
        asks = self.memory.asks("policy", 1, {}, relayed=[0, 1])
        self.reader.begin(asks, 1e9, "reading", self.world.now)
        self.world.perform(self)


class World:
    """Two servers behind one link, and readers with a link each."""

    def __init__(self, machines: list[int], seed: int = 0) -> None:
        self.now, self.dice = 100.0, random.Random(seed)
        self.stages = [ServerStage(1, 2, rank) for rank in range(2)]
        values = torch.randint(
            0, 256, (2, BLOCK), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
        )
        self.values = values
        for stage, row in zip(self.stages, values, strict=True):
            stage.open()
            stage.say(0, p.Put("kv", "policy", 1, 2, 0, BLOCK), row)
        for stage in reversed(self.stages):
            stage.say(0, p.Announce("kv", "policy", 1, 2, 0))
        extents = [Extent(server, 0, 0, BLOCK, server * BLOCK) for server in range(2)]
        self.published = [Published("w", Spec("uint8", (2 * BLOCK,)), tuple(extents))]
        self.events: list[tuple[float, int, object]] = []
        self.numbers = itertools.count()
        self.free_at: Counter[object] = Counter()
        self.sent: Counter[object] = Counter()
        self.hosts = [Host(self, rank + 1, machine) for rank, machine in enumerate(machines)]
        self.packets = 0

    def run(self, until: float = 60.0) -> None:
        """Have all readers read; return when those that live are done."""
        members = [
            p.Member(Role.SERVER, rank, 1, "held", f"tcp://s:{rank}", "host", 0.0, "", 99)
            for rank in range(2)
        ]
        where = Packet(
            Envelope(self.stages[0].job, 0, Role.SCHEDULER, 0, 1, 0), p.ServersAre(1, tuple(members))
        )
        for host in self.hosts:
            host.reader.begin([], 1e9, "finding", self.now)
            host.reader.on_packet("scheduler", where, self.now)
            host.reader.outbox.take()
        for host in self.hosts:
            host.begin()
        end = self.now + until
        while self.now < end and not all(host.done_at or host.is_dead for host in self.hosts):
            due = min([host.reader.deadline() for host in self.hosts if not (host.done_at or host.is_dead)])
            if self.events and self.events[0][0] <= due:
                self.now, _, call = heapq.heappop(self.events)
                call()  # type: ignore[operator]
                continue
            self.now = max(self.now, due)
            for host in self.hosts:
                if not host.is_dead and not host.done_at and self.now >= host.reader.deadline():
                    host.reader.on_timer(self.now)
                    self.perform(host)
        for stage in self.stages:
            stage.now = self.now

    def perform(self, host: Host) -> None:
        for effect in host.reader.outbox.take():
            match effect:
                case Connect():
                    host.routes[effect.to] = effect.endpoint
                case Exit():
                    assert host.reader.error is None, host.reader.error
                    host.done_at = self.now
                case Send() if effect.to != "scheduler":
                    self.carry(host, str(effect.to), effect.packet)

    def carry(self, host: Host, route: str, packet: Packet) -> None:
        """Bring a packet of a reader to a server or a relay."""
        role, _, number = route.partition(" ")
        if role == "server":
            self.later(host, 0, lambda: self.serve(host, int(number), packet))
        else:
            target = int(host.routes[route].rpartition(":")[2])
            self.later(host, 0, lambda: self.ask(host, route, self.hosts[target - 1], packet))

    def later(self, sender: object, size: int, call: object) -> None:
        """Have something happen when so many bytes have left the link of their sender."""
        self.packets += 1
        left_at = max(self.now, self.free_at[sender]) + size / LINK
        if size:
            self.free_at[sender] = left_at
        self.sent[sender] += size
        at = (
            left_at if size else self.now
        )  # what is short passes the others: each has a connection of its own
        heapq.heappush(self.events, (at + DELAY_S, next(self.numbers), call))

    def serve(self, host: Host, server: int, packet: Packet) -> None:
        stage = self.stages[server]
        stage.now = self.now
        if isinstance(packet.message, p.Hello):
            stage.hear(b"%d" % host.rank, over(packet.envelope, packet.message))
            stage.hear(b"%d" % host.rank, over(packet.envelope, p.Retain("policy", 1)))
        for said in stage.hear(b"%d" % host.rank, over(packet.envelope, packet.message)):
            answer = Packet(Envelope(stage.job, 0, Role.SERVER, server, 1, 0), said.message, said.payload)
            self.later("servers", sum(map(len, said.payload)), self.arrival(host, f"server {server}", answer))

    def arrival(self, host: Host, route: str, packet: Packet) -> object:
        def arrive() -> None:
            if not host.is_dead and not host.done_at:
                host.reader.on_packet(route, packet, self.now)
                self.perform(host)

        return arrive

    def ask(self, host: Host, route: str, target: Host, packet: Packet) -> None:
        if target.is_dead:
            return
        target.relay.on_packet(f"{host.rank}|{route}".encode(), packet, self.now)
        self.relayed(target)

    def relayed(self, target: Host) -> None:
        for effect in target.relay.outbox.take():
            assert isinstance(effect, Send)
            assert isinstance(effect.to, bytes)
            rank, _, route = effect.to.decode().partition("|")
            answer = effect.packet
            if isinstance(answer.message, p.Octets) and target.only_waits:
                answer = answer._replace(message=p.Elsewhere(answer.message.seq), payload=())
            elif isinstance(answer.message, p.Octets) and target.lies:
                answer = answer._replace(payload=(memoryview(bytes(answer.message.size)),))
            size = sum(map(len, answer.payload))
            if effect.hold is not None:
                effect.hold.release()
            self.later(target, size, self.arrival(self.hosts[int(rank) - 1], route, answer))

    def check(self) -> None:
        """All readers that live have all bytes."""
        for host in self.hosts:
            if not host.is_dead:
                assert host.done_at, "it hangs"
                assert torch.equal(host.memory.tensors()["w"], self.values.view(-1))

    @property
    def carried(self) -> float:
        """Models that left by the servers' link."""
        return self.sent["servers"] / (2 * BLOCK)


def test_servers_send_a_version_once_to_readers_of_four_hosts() -> None:
    world = World([1, 2, 3, 4])
    begun = world.now
    world.run()
    world.check()
    assert world.carried == 1.0
    assert max(host.done_at for host in world.hosts) - begun < 1.2 * 2 * BLOCK / LINK


def test_reader_far_away_is_not_slowed_down_by_small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.simulation.test_relay.DELAY_S", 0.04)  # four ranges leave in that time
    world = World([1])
    begun = world.now
    world.run()
    world.check()
    assert world.hosts[0].done_at - begun < 1.5 * 2 * BLOCK / LINK


def test_readers_of_one_host_share_what_came_to_it() -> None:
    world = World([1, 1, 1, 2, 2, 2])
    world.run()
    world.check()
    assert world.carried == 1.0


@pytest.mark.parametrize(("way", "models"), [("lies", 2.0), ("only_waits", 4.0)])
def test_relay_that_gives_no_true_bytes_is_left_for_the_server(way: str, models: float) -> None:
    world = World([1, 2, 3, 4])
    setattr(world.hosts[0], way, True)
    begun = world.now
    world.run()
    world.check()
    assert world.carried <= models
    assert max(host.done_at for host in world.hosts) - begun < 3.0 + RELAY_LATE_S


@pytest.mark.parametrize(
    "seed", [*range(10), *[pytest.param(seed, marks=pytest.mark.thorough) for seed in range(10, 60)]]
)
def test_readers_that_die_at_any_packet_delay_the_others_by_less_than_a_second(seed: int) -> None:
    world = World([1, 2, 3, 3, 4], seed)
    calm = World([1, 2, 3, 3, 4], seed)
    calm.run()
    dies = {world.dice.randrange(calm.packets): host for host in world.dice.sample(world.hosts, 2)}
    carry = world.later

    def later(sender: object, size: int, call: object) -> None:
        carry(sender, size, call)
        if world.packets in dies:
            dies[world.packets].is_dead = True

    world.later = later  # type: ignore[method-assign]
    begun = world.now
    world.run()
    world.check()
    assert world.carried <= 3.0
    ends = [host.done_at for host in world.hosts if not host.is_dead]
    assert max(ends) - begun < 2 * 2 * BLOCK / LINK + 2 * (RELAY_SILENT_S + 0.5)
