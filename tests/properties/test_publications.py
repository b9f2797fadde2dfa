"""Thousands of versions, with readers that are killed, hang and come back: none is torn, mixed or older, and
no memory is kept."""

import random

import pytest
import torch

from kvps import protocol as p
from kvps.core.server.publications import LEASE_S
from kvps.errors import BY_CODE
from kvps.protocol.envelope import Envelope, Message, Role
from kvps.tensors import from_frame
from tests.support.server_harness import Said, ServerStage, greeting, heard, over

COUNT = 6
KEEP = 2


class Reader:
    """A process that reads from two servers, step by step, and may stop between any two steps."""

    def __init__(self, world: "World") -> None:
        self.world, self.life, self.seen = world, world.dice.getrandbits(60) + 1, 0
        self.steps = self._steps()

    def say(self, server: int, message: Message) -> Said:
        stage = self.world.stages[server]
        envelope = Envelope(stage.job, 0, Role.READER, 5, self.life, self.world.number())
        (said,) = stage.hear(b"%d" % self.life, over(envelope, message))
        return said

    def _steps(self):  # type: ignore[no-untyped-def]
        while True:
            for server in range(2):
                self.say(server, greeting(role=4, rank=5))
            yield
            version = self.say(0, p.Watch("policy", self.seen)).message
            if not isinstance(version, p.VersionIs) or version.number <= self.seen:
                continue
            assert version.number <= self.world.version
            yield
            found = []
            for server in (0, 1):
                kept = self.say(server, p.Retain("policy", version.number)).message
                if isinstance(kept, p.Error):
                    break
                yield
            for server in (0, 1) if not isinstance(kept, p.Error) else ():
                for start in (0, COUNT * 2):  # two requests for each half
                    said = self.say(
                        server, p.Read("policy", version.number, self.world.block[server], start, COUNT * 2)
                    )
                    if isinstance(said.message, p.Error):
                        assert BY_CODE[said.message.code].__name__ in ("KeyNotFound", "ProtocolError")
                        break
                    found += from_frame(said.payload[0], "float32").tolist()
                    yield
            if len(found) == 2 * COUNT:
                assert found == self.world.contents[version.number], "torn, mixed or changed"
                assert version.number > self.seen, "older"
                self.seen = version.number
                self.world.read += 1


class World:
    """Two servers, of which each holds half of a key, and a publisher that pushes between versions."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.stages = [ServerStage(1, 2, rank) for rank in range(2)]
        self.block: list[int] = []
        self.version = self.read = self.rounds = self.count = 0
        self.contents: dict[int, list[float]] = {}
        for stage in self.stages:
            stage.open()
            stage.init("w", torch.zeros(COUNT))
            self.block.append(stage.pieces["w"][0].chunk)

    def number(self) -> int:
        self.count += 1
        return self.count

    def publish(self) -> None:
        for _ in range(self.dice.randrange(3)):
            for stage in self.stages:
                stage.push(0, "w", torch.rand(COUNT), self.rounds)
            self.rounds += 1
        number = self.version + 1
        for stage, block in zip(self.stages, self.block, strict=True):
            assert heard(stage.say(0, p.Freeze("kv", "policy", number, KEEP, 0, (block,))), p.Done)
        self.contents[number] = [value for stage in self.stages for value in stage.values("w")]
        for stage in reversed(self.stages):
            if self.dice.random() < 0.1:  # an announcement comes twice
                stage.say(0, p.Announce("kv", "policy", number, KEEP, 0))
            assert heard(stage.say(0, p.Announce("kv", "policy", number, KEEP, 0)), p.Done)
            self.version = number
        self.contents.pop(number - 200, None)

    def pass_time(self, seconds: float) -> None:
        for stage in self.stages:
            stage.now += seconds
            stage.take(stage.server.on_timer(stage.now))


@pytest.mark.spec("R543", "R545", "R549")
@pytest.mark.parametrize(
    "versions", [300, pytest.param(10_000, marks=[pytest.mark.thorough, pytest.mark.timeout(600)])]
)
def test_no_reader_sees_or_does_harm(versions: int) -> None:
    world = World(7)
    readers = [Reader(world) for _ in range(4)]
    held = []
    for _ in range(versions):
        world.publish()
        for index in range(len(readers)):
            for _ in range(world.dice.randrange(8)):
                next(readers[index].steps)
            if world.dice.random() < 0.05:  # it is killed, and another begins
                readers[index] = Reader(world)
        world.pass_time(1.0)
        held.append(sum(len(stage.server.publications.by_name["policy"].versions) for stage in world.stages))
    assert world.read > versions / 2
    # Those that live use a version each, and so does each that was killed within the time of a lease.
    killed = 4 * 0.05 * LEASE_S
    assert max(held) <= 2 * (KEEP + 1 + 4 + 3 * killed)
    assert sum(held[-100:]) <= 1.5 * sum(held[100:200]), "it does not grow"
    world.pass_time(LEASE_S)
    world.pass_time(LEASE_S)
    for stage in world.stages:
        served = stage.server.publications
        assert not served.readers
        assert len(served.by_name["policy"].versions) == KEEP
        assert len(served._users) <= KEEP
        buffers = KEEP * stage.chunk(world.block[stage.rank]).buffer.tensor.nbytes
        assert stage.server.control.budget.publications <= buffers
