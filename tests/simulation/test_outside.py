"""With on_worker_lost="shrink" no round waits for a replacement that starts, and each of its pushes counts once.

Each worker pushes a one of its own, so the value says how many pushes of each worker it has.
"""

from collections.abc import Callable, Sequence

import pytest
import torch

from tests.simulation.cluster import Cluster, Script, Store
from tests.simulation.network import Faults, Process
from tests.simulation.training import LOST, ON_TIME, named, of_today

SIZES = {"w": 200, "b": 1}
STARTS_S, STEPS = 6.0, 14
"""Seconds from a replacement's seat to its first call, and the steps of all workers."""
PATIENCE_S = 3.0
"""A loss is noticed in 2 s."""
FEW = 8
"""So many packets are alike."""


def ones() -> dict[str, torch.Tensor]:
    return {name: torch.ones(size, dtype=torch.float64) for name, size in SIZES.items()}


class Shrinking:
    """A job of 2 workers in which a process may be killed; replacements start slowly."""

    def __init__(self, mode: str, way: str, faults: Faults, replicas: int = 0) -> None:
        self.kv = Store(
            mode=mode, staleness=2 if mode == "ssp" else 0, on_worker_lost="shrink", bigarray_bound=64
        )
        self.way, self.faults, self.replicas = way, faults, replicas
        self.lives = [0, 0]
        self.counted = [0, 0]
        """The pushes that were made by each rank, of all of its lives."""

    def script(self, rank: int) -> Script:
        life = self.lives[rank] = self.lives[rank] + 1
        kv, network = self.kv, self.cluster.network
        if life > 1:
            yield STARTS_S
        zeros = {name: torch.zeros_like(value) for name, value in ones().items()}
        yield from kv.open()
        yield from kv.init(zeros)
        yield from kv.set_optimizer("test", rescale_grad=1.0)
        begin = (yield from kv.resume(list(SIZES))) if self.way != "again" else 0
        for _ in range(begin, STEPS):
            yield 1.0
            at = network.now
            mine = {name: value * 1000.0**rank for name, value in ones().items()}
            if self.way == "push, pull":
                yield from kv.push(mine)
                yield from kv.pull(zeros)
            else:
                yield from kv.pushpull(mine)
            # From the first push of a script that does not resume, the others wait while it makes all steps again.
            # Without rounds, a read waits for a while where a replaced worker has pushed half of a step.
            is_prompt = self.way == "again" or kv.mode == "ssp" or network.now < at + PATIENCE_S
            assert is_prompt, f"worker {rank} has waited for {network.now - at:.1f} s"
        return (yield from kv.pull(zeros, min_version=STEPS if kv.mode == "sync" else 0))

    def play(
        self,
        fault: Callable[[int, Process, Process], Sequence[float]],
        plan: Callable[[], None] = lambda: None,
    ) -> None:
        """Play it and see it end well; ``plan`` may let something happen."""
        count = 0

        def delays(source: Process, target: Process, packet: object) -> Sequence[float]:
            nonlocal count
            count += 1
            return fault(count, source, target)

        self.lives = [0, 0]
        self.cluster = Cluster(2, 2, self.script, 0, self.faults, replicas=self.replicas)
        self.cluster.network.delays = delays
        plan()
        self.cluster.run(400)
        for client in self.cluster.ended_well():
            self.judge({name: set(value.tolist()) for name, value in client.result.items()})

    def judge(self, values: dict[str, set[float]]) -> None:
        """Each push counts once: no round has two of one rank, and those of the survivor are all there."""
        for found in values.values():
            for value in found:
                assert value % 1000 <= STEPS, value
                assert value // 1000 <= STEPS, value
                if self.kv.mode == "sync" and self.lives[0] == 1:
                    assert value % 1000 == STEPS, value


@pytest.mark.spec("R578")
@pytest.mark.parametrize(
    ("mode", "way", "dies_again"),
    [
        ("sync", "pushpull", False),
        ("sync", "push, pull", True),
        ("sync", "again", False),
        ("ssp", "push, pull", False),
    ],
)
def test_worker_is_replaced_at_each_packet(mode: str, way: str, dies_again: bool) -> None:
    job = Shrinking(mode, way, Faults(in_order=True))
    own: list[int] = []

    def note(count: int, source: Process, target: Process) -> Sequence[float]:
        if "worker 1" in (source.name, target.name):
            own.append(count)
        return ON_TIME

    job.play(note)
    for index in of_today(len(own) // FEW):
        fatal = own[index * FEW - 1]

        def fault(count: int, source: Process, target: Process, fatal: int = fatal) -> Sequence[float]:
            if count != fatal:
                return ON_TIME
            cluster = job.cluster
            now = cluster.network.now
            cluster.kill(1)
            cluster.network.at(now + 2.5, lambda: cluster.replace(1))
            if dies_again:
                cluster.network.at(now + 6.0, lambda: cluster.kill(1))
                cluster.network.at(now + 8.5, lambda: cluster.replace(1))
            return LOST

        with named(f"worker 1 ends at packet {fatal}"):
            job.play(fault)


@pytest.mark.spec("R578")
@pytest.mark.parametrize("way", ["pushpull", "push, pull", "again"])
def test_standbys_take_the_seats_before_a_replacement_starts_or_as_it_enters(way: str) -> None:
    """A standby knows which replacements do not count yet, and that later ones do not."""
    job = Shrinking("sync", way, Faults(in_order=True), replicas=1)

    def lose(server: int) -> None:
        primary, _ = job.cluster.holders(server)
        assert primary is not None
        assert job.cluster.is_level(server)
        job.cluster.network.kill(primary)

    enters = 2.5 + STARTS_S
    for after in [0.5, 3.5, 5.5, *[enters + tick / 250 for tick in of_today(24)]]:

        def strike(after: float = after) -> None:
            job.cluster.kill(1)
            network = job.cluster.network
            network.at(network.now + 2.5, lambda: job.cluster.replace(1))
            for server in range(2):
                network.at(network.now + after, lambda server=server: lose(server))  # type: ignore[misc]

        with named(f"the servers end {after:.3f} s after worker 1"):
            job.play(lambda *_: ON_TIME, lambda: job.cluster.network.at(4.0, strike))
