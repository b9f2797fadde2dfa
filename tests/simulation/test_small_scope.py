"""The smallest jobs, and everything that can befall them once; of the very smallest, also twice.

Two workers, one server, two rounds. Each packet in turn is lost, comes twice, or comes late: behind
all that is under way, or behind what was sent again in its place. Each process in turn ends at each
packet of its own. Whatever it is, all scripts must end well with the right values (I1, I3, I6, I14),
all processes must end by themselves, and every core's ``check()`` must hold after every event (I8).
"""

from collections.abc import Callable
from itertools import count as numbers

import pytest
import torch

from kvps.core.effects import Save
from kvps.core.worker.connection import PROBE_AFTER_S
from tests.simulation.cluster import Cluster, Script, Store
from tests.simulation.faults import restart
from tests.simulation.network import Faults
from tests.simulation.training import (
    LOST,
    ON_TIME,
    TRAINING,
    Job,
    Play,
    all_of,
    befall_each_packet,
    check,
    end_at_each_packet,
    is_trained,
    kill_at_each_packet,
    named,
    of_today,
    play_with,
)

LATE_S = 0.01
"""Behind everything that is on its way at that time."""
STALE_S = PROBE_AFTER_S + 1
"""Behind what was sent in its place."""


def each_once(job: Job, rank: int) -> Script:
    """Push each element once over all ranks and rounds, to a store without rounds."""
    kv, size = job.store, job.workers * job.steps
    zeros = {"hot": torch.zeros(size)}
    yield from kv.open()
    yield from kv.init(zeros)
    yield from kv.set_optimizer("sgd", lr=1.0)
    begin = yield from kv.resume(["hot"])
    for step in range(begin, job.steps):
        hot = torch.zeros(size)
        hot[rank * job.steps + step] = -1
        if job.ways[step] == "pushpull":
            pulled = yield from kv.pushpull({"hot": hot})
        else:
            yield from kv.push({"hot": hot})
            pulled = yield from kv.pull(zeros)
        assert pulled["hot"][rank * job.steps + step] == 1, "a pull does not show what was pushed"
    yield from kv.barrier()
    return (yield from kv.pull(zeros, min_version=size))


def is_each_once(job: Job, values: dict[str, torch.Tensor]) -> None:
    assert values["hot"].tolist() == [1.0] * (job.workers * job.steps), values


EACH_ONCE: Play = (each_once, is_each_once)
PLAYS = {"sync": TRAINING, "async": EACH_ONCE}

each_job = pytest.mark.parametrize(
    ("mode", "way"), [(mode, way) for mode in PLAYS for way in ("pushpull", "push, pull")]
)


def job_of(mode: str, way: str, workers: int = 2, steps: int = 2) -> Job:
    job = Job(0, workers, 1, steps, {"w": 3}, has_optimizer=True)
    job.store = Store(mode=mode)
    job.faults = Faults(in_order=True)
    job.ways = [way] * steps
    return job


# --- one fault ------------------------------------------------------------------------------------


@pytest.mark.pairwise
@each_job
@pytest.mark.parametrize(
    "fate",
    [LOST, (0.0, 0.0), (0.0, LATE_S), (0.0, STALE_S), (LATE_S,), (STALE_S,)],
    ids=["lost", "twice", "twice, once late", "twice, once stale", "late", "stale"],
)
def test_anything_may_befall_any_one_packet(mode: str, way: str, fate: tuple[float, ...]) -> None:
    befall_each_packet(job_of(mode, way), fate, PLAYS[mode], all_of)


@pytest.mark.pairwise
@each_job
@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_may_die_at_any_packet(mode: str, way: str, rank: int) -> None:
    kill_at_each_packet(job_of(mode, way), rank, PLAYS[mode], all_of)


def test_only_a_replacement_finds_elements_that_are_ahead() -> None:
    """It owes the lowest number, and what its predecessor got in elsewhere stands."""
    ahead: set[int] = set()

    def look_first(job: Job, rank: int) -> Script:
        kv, versions = job.store, job.versions
        yield from kv.open()
        yield from kv.init(job.initial())
        yield from kv.set_optimizer("test", rescale_grad=2.0)
        begin = yield from kv.resume(["w"])
        for step in range(begin, job.steps):
            now, next_one = versions[step]["w"], versions[step + 1]["w"]
            found = (yield from kv.pull(job.initial()))["w"]
            assert torch.all((found == now) | (found == next_one)), f"step {step}: {found}"
            if not torch.equal(found, now):
                ahead.add(rank)
            check(step, (yield from kv.pushpull(job.gradients(rank, step))), versions[step + 1])
        yield from kv.barrier()
        return (yield from kv.pull(job.initial()))

    job = job_of("sync", "pushpull")
    job.servers, job.sizes["w"], job.store.bigarray_bound = 2, 40, 1
    kill_at_each_packet(job, 1, (look_first, is_trained), all_of)
    assert ahead == {1}


@pytest.mark.pairwise
@each_job
@pytest.mark.parametrize("after_s", [0.005, 3.0])
def test_the_scheduler_may_be_restarted_at_any_packet(mode: str, way: str, after_s: float) -> None:
    def end(cluster: Cluster) -> None:
        restart(cluster, after_s)

    end_at_each_packet(job_of(mode, way), "scheduler", end, PLAYS[mode], all_of)


@pytest.mark.pairwise
@each_job
@pytest.mark.parametrize("is_written", [False, True], ids=["torn", "written"])
def test_the_scheduler_may_die_at_any_save(mode: str, way: str, is_written: bool) -> None:
    """It writes aside and renames, so that a restart finds the whole of this Save or the one before.

    Nobody has been told what it was to say: the state is saved first.
    """
    job = job_of(mode, way)
    for fatal in numbers(1):
        with named(f"the scheduler dies at save {fatal}"):
            if not dies_at_save(job, fatal, is_written, PLAYS[mode]):
                break
    assert fatal > 5, "too few saves"


def dies_at_save(job: Job, fatal: int, is_written: bool, play: Play) -> bool:
    """Play a job in which the scheduler dies at a Save; return whether there were so many."""
    saves = numbers(1)
    hit = False

    def watch(cluster: Cluster) -> None:
        write = cluster.scheduler.on_save

        def save(effect: Save) -> None:
            nonlocal hit
            is_fatal = effect.state != b"" and next(saves) == fatal
            if is_written or not is_fatal:
                write(effect)
            if is_fatal:
                hit = True
                cluster.network.kill(cluster.scheduler)
                cluster.network.at(cluster.network.now + 0.5, cluster.start_scheduler)

        cluster.scheduler.on_save = save

    play_with(job, lambda *_: ON_TIME, play, watch)
    return hit


# --- two faults -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", PLAYS)
def test_any_two_packets_may_be_lost(mode: str) -> None:
    """Of one round of one worker; also two that are sent only because the first was lost.

    Each day the first is of another eighth of the packets.
    """
    job = job_of(mode, "pushpull", workers=1, steps=1)

    def losing(*lost: int) -> Callable[..., object]:
        return lambda _, number, *ends: LOST if number in lost else ON_TIME

    for first in of_today(play_with(job, losing(), PLAYS[mode])):  # type: ignore[arg-type]
        packets = play_with(job, losing(first), PLAYS[mode])  # type: ignore[arg-type]
        for second in range(first + 1, packets + 1):
            with named(f"packets {first} and {second} are lost"):
                play_with(job, losing(first, second), PLAYS[mode])  # type: ignore[arg-type]
