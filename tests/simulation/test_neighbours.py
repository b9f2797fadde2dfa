"""Workers of one machine in virtual time: what leaves it once, and that nothing else changes."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import torch

from kvps.core.worker.host_aggregation import merge_queue
from kvps.errors import Timeout
from kvps.protocol.envelope import Packet
from kvps.protocol.values import Pull, Push
from tests.simulation.cluster import Cluster, Script, Store
from tests.simulation.network import Faults, Process
from tests.simulation.training import FEWER, Job, faults_of, outlive, patient, replayable, train

HERE = 2
"""The machine of the workers; the servers are on another."""
STEPS = 6


def together(**options: object) -> Store:
    return Store(bundles=True, bigarray_bound=64, **options)  # type: ignore[arg-type]


def played(
    script: Callable[[int], Script],
    machines: Sequence[int] = (HERE, HERE, HERE),
    servers: int = 2,
    faults: Faults | None = None,
    watch: Callable[[Process, Process, Packet], None] = lambda *_: None,
) -> Cluster:
    """Let a cluster run to its end; all must end well."""
    faults = faults or Faults(in_order=True)
    cluster = Cluster(len(machines), servers, script, 0, faults, machines)

    def look(source: Process, target: Process, packet: Packet) -> bool:
        watch(source, target, packet)
        return False

    cluster.network.lose = look
    cluster.run()
    cluster.ended_well()
    return cluster


def neighbourly_job(workers: int, servers: int) -> Job:
    job = Job(0, workers, servers, 2, {"w": 200, "b": 1}, has_optimizer=True)
    job.store = together()
    job.faults = Faults(in_order=True)
    job.ways = ["pushpull", "push, pull"]
    job.machines = [HERE] * workers
    return job


# --- what leaves the machine ----------------------------------------------------------------------


class Traffic:
    """What went from workers to servers: the kind, the chunk and the ranks of each packet."""

    def __init__(self) -> None:
        self.pushes: list[tuple[int, tuple[int, ...]]] = []
        self.pulls: list[int] = []

    def __call__(self, source: Process, target: Process, packet: Packet) -> None:
        message = packet.message
        if target.name.startswith("server"):
            if isinstance(message, Push):
                self.pushes.append((message.chunk, message.ranks))
            elif isinstance(message, Pull) and message.values:
                self.pulls.append(message.chunk)


@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("way", ["pushpull", "push, pull"])
def test_each_chunk_is_pushed_once_and_pulled_once(workers: int, way: str) -> None:
    job = neighbourly_job(workers, 2)
    job.steps, job.ways = STEPS, [way] * STEPS
    job.sizes = {"w": 500, "x": 130, "b": 1}
    traffic = Traffic()
    played(lambda rank: train(job, rank), job.machines, watch=traffic)
    everyone = tuple(range(workers))
    assert {ranks for _, ranks in traffic.pushes} == {everyone}
    chunks = Counter(chunk for chunk, _ in traffic.pushes)
    assert len(chunks) > 2
    assert set(chunks.values()) == {STEPS}
    # At the end, everyone reads the weights.
    pulled = Counter(traffic.pulls)
    assert set(pulled) == set(chunks)
    expected = STEPS + 1 if way == "push, pull" else 1
    # A rank that was never here before is not waited for.
    assert all(expected <= count <= expected + 1 for count in pulled.values()), pulled


def test_workers_of_other_machines_push_for_themselves() -> None:
    job = neighbourly_job(5, 2)
    job.machines = [2, 2, 3, 3, 0]
    traffic = Traffic()
    played(lambda rank: train(job, rank), job.machines, watch=traffic)
    assert {ranks for _, ranks in traffic.pushes} == {(0, 1), (2, 3), (4,)}


@pytest.mark.parametrize(
    ("store", "machines"),
    [(Store(), (2, 2)), (together(), (1, 1)), (together(), (0, 0)), (together(), (2, 3))],
    ids=["not wanted", "beside the servers", "unknown", "apart"],
)
def test_where_nothing_is_won_everyone_pushes_for_itself(store: Store, machines: tuple[int, ...]) -> None:
    job = neighbourly_job(2, 2)
    job.store = store
    traffic = Traffic()
    played(lambda rank: train(job, rank), machines, watch=traffic)
    assert {ranks for _, ranks in traffic.pushes} == {(0,), (1,)}


def test_the_leaders_take_turns() -> None:
    """So that no worker adds up all that its neighbours push."""
    job = neighbourly_job(3, 2)
    job.sizes = {"w": 4_000}
    led: Counter[str] = Counter()

    def watch(source: Process, target: Process, packet: Packet) -> None:
        if isinstance(packet.message, Push) and target.name.startswith("server"):
            led[source.name] += 1

    played(lambda rank: train(job, rank), job.machines, watch=watch)
    assert set(led) == {"worker 0", "worker 1", "worker 2"}
    assert max(led.values()) < 2 * min(led.values())


@pytest.mark.spec("R96")
@pytest.mark.parametrize("seed", FEWER)
def test_a_worker_that_is_taken_for_lost_and_is_not(seed: int, request: pytest.FixtureRequest) -> None:
    """The scheduler does not hear of it for a while. It leads on, for those who still ask it."""
    dice = random.Random(seed)
    job = neighbourly_job(dice.choice([2, 3]), dice.choice([1, 2]))
    job.sizes = {"w": dice.choice([200, 500]), "x": 130, "b": 1}
    job.steps, job.seed = 40, seed
    job.ways = [dice.choice(["pushpull", "push, pull", "one by one"]) for _ in range(job.steps)]
    job.faults = Faults(latency_s=0.4, jitter_s=dice.choice([0.0, 0.3]))
    silent = [(f"worker {dice.randrange(job.workers)}", 2.0 + 10 * dice.random(), dice.random())]
    silent += [(f"worker {dice.randrange(job.workers)}", 40.0 + 10 * dice.random(), dice.random())]
    seen: set[str] = set()

    def lose(source: Process, target: Process, packet: Packet) -> bool:
        for name, at, more in silent:
            if {source.name, target.name} == {name, "scheduler"}:
                return at < cluster.network.now < at + 13.0 + 8 * more
        return False

    with replayable(request, (job, silent)):
        cluster = Cluster(
            job.workers, job.servers, lambda rank: train(job, rank), seed, job.faults, job.machines
        )
        cluster.network.lose = lose
        cluster.run()
        for _ in cluster.ended_well():
            seen |= {note.split(",")[0] for note in cluster.scheduler.notes if "lost" in note}
        assert seen, "somebody was taken for lost"


# --- who is not there any more --------------------------------------------------------------------


def rounds_of_some(job: Job) -> Callable[[int], Script]:
    """Each round is the sum over those who were there: all of them, or all but the lost."""

    def script(rank: int) -> Script:
        kv = job.store
        yield from kv.open()
        yield from kv.init({"w": torch.zeros(200), "b": torch.zeros(1)})
        for step in range(job.steps):
            gradients = {"w": torch.full((200,), 10.0**rank), "b": torch.full((1,), 10.0**rank)}
            if step % 2:
                pulled = yield from kv.pushpull(gradients)
            else:
                yield from kv.push(gradients)
                pulled = yield from kv.pull(gradients)
            for values in pulled.values():
                assert set(values.tolist()) <= {111.0, 11.0}, values.unique()
        yield from kv.barrier()

    return script


@pytest.mark.parametrize("seed", FEWER)
def test_shrink_goes_on_without_the_lost(seed: int, request: pytest.FixtureRequest) -> None:
    dice = random.Random(seed)
    job = Job(seed, 3, dice.choice([1, 2]), 40)
    job.faults = faults_of(dice)
    job.store = together(on_worker_lost="shrink")
    job.machines = dice.choice([[2, 2, 2], [2, 2, 2], [2, 3, 2]])
    with replayable(request, job):
        outlive(job, rounds_of_some(job))


@pytest.mark.parametrize("seed", FEWER)
@pytest.mark.parametrize("leaver", [0, 1, 2])
def test_shrink_goes_on_without_one_that_ends_well(
    seed: int, leaver: int, request: pytest.FixtureRequest
) -> None:
    """Each of them leads some of the chunks."""
    dice = random.Random(seed)
    job = Job(seed, 3, 2, 12, {"w": 500, "b": 1})
    job.faults = faults_of(dice)
    job.store = together(on_worker_lost="shrink")
    job.machines = [HERE] * 3
    everyone, others = 111.0, 111.0 - 10.0**leaver

    def script(rank: int) -> Script:
        kv = job.store
        yield from kv.open()
        yield from kv.init({name: torch.zeros(size) for name, size in job.sizes.items()})
        for step in range(job.steps):
            if rank == leaver and step == job.steps // 2:
                return
            gradients = {name: torch.full((size,), 10.0**rank) for name, size in job.sizes.items()}
            if step % 3:
                pulled = yield from kv.pushpull(gradients)
            else:
                yield from kv.push(gradients)
                pulled = yield from kv.pull(gradients)
            expected = everyone if step < job.steps // 2 else others
            for values in pulled.values():
                assert set(values.tolist()) == {expected}, (step, values.unique())

    with replayable(request, job):
        played(script, job.machines, faults=job.faults)


# --- what values they see -------------------------------------------------------------------------


@pytest.mark.spec("R98")
@pytest.mark.parametrize("seed", FEWER)
def test_nobody_reads_values_from_before_a_broadcast(
    seed: int, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if a neighbour's answer is kept for him, because he pushed and did not pull."""
    if seed % 2:
        monkeypatch.setattr("kvps.core.worker.calls.keys.RELAYED_LEAST_BYTES", 0)
        monkeypatch.setattr("kvps.core.worker.calls.keys.PART_LEAST_BYTES", 16)
    dice = random.Random(seed)
    workers, servers = dice.choice([2, 3]), dice.choice([1, 2])
    faults = faults_of(dice)
    pulls = {(rank, step) for rank in range(workers) for step in range(STEPS) if dice.random() < 0.5}
    like = {"w": torch.zeros(200)}

    def script(rank: int) -> Script:
        kv = together()
        yield from kv.open()
        yield from kv.init(like)
        yield from kv.pull(like)
        for step in range(STEPS):
            yield from kv.push({"w": torch.full((200,), 10.0 * step + rank)})
            if (rank, step) in pulls:
                total = 10.0 * step * workers + sum(range(workers))
                assert (yield from kv.pull(like))["w"].unique().tolist() == [total]
            told = yield from kv.broadcast({"w": torch.full((200,), 1000.0 * step - rank)})
            assert told["w"].unique().tolist() == [1000.0 * step]
            for _ in range(1 + ((rank, step) in pulls)):
                assert (yield from kv.pull(like))["w"].unique().tolist() == [1000.0 * step]
            yield from kv.barrier()

    with replayable(request, (workers, servers, faults, pulls)):
        played(script, [HERE] * workers, servers, faults)


@pytest.mark.spec("R97")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_are_added_up_in_float32(dtype: torch.dtype) -> None:
    """Neither a machine's sum nor that of all is rounded before the end."""
    big = {torch.bfloat16: 256.0, torch.float16: 2048.0}[dtype]
    assert (torch.tensor(big, dtype=dtype) + 1).item() == big, "a 1 is lost in this type"

    def script(rank: int) -> Script:
        kv = together()
        values = {"w": torch.full((200,), 1.0 if rank else big, dtype=dtype)}
        yield from kv.open()
        yield from kv.init({"w": torch.zeros(200, dtype=dtype)})
        first = yield from kv.pushpull(values)
        yield from kv.push(values)
        return [first, (yield from kv.pull(values))]

    cluster = played(script, (2, 2, 3, 3))
    for client in cluster.clients.values():
        for pulled in client.result:
            assert pulled["w"].dtype == dtype
            # big + 3 lies in the middle between two numbers, and rounds up
            assert pulled["w"].unique().tolist() == [big + 4]


# --- nobody waits longer than without neighbours --------------------------------------------------


class Clocked:
    """A cluster whose scripts know the time."""

    def __init__(self, script: Callable[[int, Clocked], Script], workers: int = 3) -> None:
        faults = Faults(in_order=True)
        machines = [HERE] * workers
        self.cluster = Cluster(workers, 1, lambda rank: script(rank, self), 0, faults, machines)
        self.cluster.run()
        self.cluster.ended_well()

    @property
    def now(self) -> float:
        return self.cluster.network.now


@pytest.mark.spec("R97")
def test_a_chunk_that_is_cut_differently_is_not_waited_for() -> None:
    """One pushes a list of keys, the others key by key."""
    sizes = {"a": 30, "b": 20, "c": 10}
    took: list[float] = []

    def script(rank: int, clock: Clocked) -> Script:
        kv = together()
        yield from kv.open()
        yield from kv.init({name: torch.zeros(size) for name, size in sizes.items()})
        for step in range(STEPS):
            yield from kv.barrier()
            begun = clock.now
            gradients = {name: torch.full((size,), 10.0 * step + rank) for name, size in sizes.items()}
            for part in (
                [gradients] if rank == 0 else [{gradient: gradients[gradient]} for gradient in gradients]
            ):
                yield from kv.push(part)
            pulled = yield from kv.pull(gradients)
            for values in pulled.values():
                assert values.unique().tolist() == [30.0 * step + 3]
            took.append(clock.now - begun)

    Clocked(script)
    assert len(took) == 3 * STEPS
    assert max(took) < 0.1


@pytest.mark.spec("R97")
@pytest.mark.parametrize("way", ["flush", "barrier", "push and wait"])
@pytest.mark.parametrize("first", [0, 1, 2])
def test_worker_that_waits_for_its_own_push_does_not_wait_for_other_pushes(way: str, first: int) -> None:
    """They push when he has come back, and not before."""
    back: list[float] = []
    like = {"w": torch.zeros(200)}

    def script(rank: int, clock: Clocked) -> Script:
        kv = together()
        yield from kv.open()
        yield from kv.init(like)
        yield from kv.barrier()
        if rank == first:
            begun = clock.now
            if way == "push and wait":
                yield from kv.push({"w": torch.ones(200)}, 0, True)
            else:
                yield from kv.push({"w": torch.ones(200)})
                if way == "flush":
                    yield from kv.flush()
            back.append(clock.now - begun)
        if way == "barrier":
            yield from kv.barrier()
        while not back:
            yield from kv.flush()
        if rank != first:
            yield from kv.push({"w": torch.ones(200)})
        assert (yield from kv.pull(like))["w"].unique().tolist() == [3.0]

    done = Clocked(script)
    limit_s = merge_queue.WAIT_MAX_S if way == "push and wait" else merge_queue.HURRY_S
    assert back[0] < limit_s + 0.1
    assert done.now < 5.0


def test_a_pull_with_a_time_limit_says_who_is_missing() -> None:
    """The leader knows it from the server, and tells those who ask."""
    said: dict[int, str] = {}
    like = {"w": torch.zeros(500)}

    def script(rank: int, clock: Clocked) -> Script:
        kv = together(timeout_s=4.0)
        yield from kv.open()
        yield from kv.init(like)
        if rank == 2:
            while len(said) < 2:
                yield from kv.flush()
            yield from kv.push({"w": torch.ones(500)})
        else:
            yield from kv.push({"w": torch.ones(500)})
            try:
                yield from kv.pull(like)
            except Timeout as error:
                said[rank] = str(error)
        pulled = yield from patient(kv.pull, like)
        assert pulled["w"].unique().tolist() == [3.0]

    Clocked(script)
    for rank in (0, 1):
        assert "round 0 waits for a push of rank 2" in said[rank], said
