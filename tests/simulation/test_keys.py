"""Clusters with keys in virtual time: the same jobs end the same, and strangers change nothing.

A stranger overhears every packet. It sends it again to whom it likes, as it was or in another's name; it
knows all addresses, and has a key that nobody knows, the key of a role, or the session key of one worker.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from unittest import mock

import pytest

from kvps import protocol as p
from kvps.core.effects import Connect, CoreOutbox, Exit, Route, Send
from kvps.core.key_roles import KEY_CHARACTERS
from kvps.protocol.envelope import Envelope, Message, Packet, Role
from tests.simulation.cluster import Cluster
from tests.simulation.faults import drawn
from tests.simulation.keys import ROLES, keys_of
from tests.simulation.network import Process
from tests.simulation.test_swarm import FOURTH
from tests.simulation.training import WAYS, Job, check, replayable, train
from tests.simulation.witness import Witness

UNKNOWN = "x" * KEY_CHARACTERS


class Silent:
    """A core that says nothing by itself."""

    def __init__(self) -> None:
        self.outbox = CoreOutbox()

    def admit(self, route: Route, envelope: Envelope, kind: type[Message]) -> bool:
        return True

    def on_packet(self, route: Route, packet: Packet, now: float) -> None:
        pass

    def on_failure(self, route: Route, envelope: Envelope, error: Exception, now: float) -> None:
        pass

    def on_drop(self, route: Route, now: float) -> None:
        pass

    def on_timer(self, now: float) -> None:
        pass

    def deadline(self) -> float | None:
        return None


@dataclass
class Stranger:
    """A process that speaks in the name of others.

    Args:
        cluster: whose members it annoys.
        key: by which it opens its connections; one that nobody knows is as good as none.
        own: the member whose session key that is, if it is one.
        seed: of its dice.
    """

    cluster: Cluster
    key: str
    own: int | None
    seed: int

    def __post_init__(self) -> None:
        self.sent = 0
        self._dice = random.Random(self.seed)
        self._witness = Witness()
        network = self.cluster.network
        keys = keys_of(Role.WORKER, "stranger")
        keys.role = self.key
        self._process = network.add("stranger", Role.WORKER, Silent(), "sim://stranger", keys)
        network.overhears = self._overhear

    def _overhear(self, source: Process, packet: Packet) -> None:
        self._witness(source, packet)
        if source is self._process or self._dice.random() > 0.3:
            return
        network = self.cluster.network
        copy = packet._replace(payload=tuple([memoryview(bytes(frame)) for frame in packet.payload]))
        network.at(network.now + self._dice.random() * 0.1, lambda: self._say(copy))

    def _say(self, packet: Packet) -> None:
        """Send a packet in another's name to the scheduler or a server."""
        if self.cluster.is_done or not self._has_key():
            return
        dice, network = self._dice, self.cluster.network
        target = dice.choice([self.cluster.scheduler, *self.cluster.servers])
        if not target.alive:
            return
        packet = dice.choice(list(self._variants(packet)))
        if self._is_granted(packet):
            return
        name = f"{target.name} {dice.randrange(3)}"
        known = self._process.routes.get(name)
        if known is None or known.endpoint != target.endpoint:
            network.connect(self._process, Connect(name, target.endpoint))
        self.sent += 1
        network.perform(self._process, iter([Send(name, packet)]))

    def _has_key(self) -> bool:
        """Whether it has its key by now: a session key is made with its worker."""
        client = self.cluster.clients.get(self.own) if self.own is not None else None
        if client is not None:
            assert client.process.keys is not None
            assert self._process.keys is not None
            self._process.keys.role = client.process.keys.session
        return self.own is None or client is not None

    def _variants(self, packet: Packet) -> Iterator[Packet]:
        dice, of = self._dice, packet.envelope
        yield packet
        rank = dice.randrange(self.cluster.workers)
        for envelope in (
            of._replace(rank=rank),
            of._replace(incarnation=of.incarnation + dice.randint(1, 9)),
            of._replace(seq=of.seq + 1),
            of._replace(role=Role.SERVER, rank=0),
        ):
            yield packet._replace(envelope=envelope)
            yield Packet(envelope, p.Leave(True, 0, False, "a stranger says so"))
            yield Packet(envelope, p.Evict("worker", rank))

    def _is_granted(self, packet: Packet) -> bool:
        """Whether the key may say that: a role's may ask for a seat, a member's may speak for itself."""
        if self.own is not None:
            return packet.envelope.role is Role.WORKER and packet.envelope.rank == self.own
        is_claim = isinstance(packet.message, p.Hello | p.Enrol)
        return self.key == ROLES["worker"] and is_claim


@pytest.mark.parametrize("seed", FOURTH)
def test_a_stranger_changes_nothing(seed: int, request: pytest.FixtureRequest) -> None:
    """It speaks in the name of all members, and of all incarnations to come: nobody hears it."""
    dice = random.Random(seed)
    who = dice.choice(["nobody", "role", "member"])
    job = Job(seed, dice.randint(2, 4), dice.randint(1, 3), dice.randint(5, 9))
    job.sizes = {f"k{index}": dice.choice([1, 30, 200, 500]) for index in range(3)}
    job.ways = [dice.choice(WAYS) for _ in range(job.steps)]
    job.machines = [dice.choice([1, 2, 2, 3]) for _ in range(job.workers)]
    faults = replace(drawn(dice, job.workers, job.servers).faults, lose=0.0)
    with replayable(request, (job, who)):
        cluster = Cluster(
            job.workers,
            job.servers,
            lambda rank: train(job, rank),
            seed,
            faults,
            machines=job.machines,
            has_keys=True,
        )
        own = dice.randrange(job.workers) if who == "member" else None
        key = ROLES["worker"] if who == "role" else UNKNOWN
        stranger = Stranger(cluster, key, own, seed)
        cluster.run(3_000)
        cluster.part(400)
        assert stranger.sent, "it has been silent"
        for client in cluster.ended_well():
            check(job.steps, client.result, job.versions[-1])
        for process in (cluster.scheduler, *cluster.servers):
            assert process.exit == Exit(0, mock.ANY), process.exit
        for clients in cluster.started.values():
            assert len(clients) == 1, "it took somebody's seat"
