"""A small job of each feature: any packet may be lost, come twice or late, and a worker may die at any packet of its own.

:data:`FEATURES` is the table. ``tests/simulation/test_small_scope.py`` has more faults of smaller jobs, without a feature.
"""

from dataclasses import dataclass
from typing import Any

import pytest

from tests.simulation import (
    test_clipping,
    test_cluster,
    test_compression,
    test_embeddings,
    test_joins,
    test_neighbours,
    test_nonfinite,
    test_quorum,
    test_resume,
    test_rows,
)
from tests.simulation.cluster import Store
from tests.simulation.training import LOST, TRAINING, befall_each_packet, kill_at_each_packet

FATES = {"lost": LOST, "twice": (0.0, 0.0), "late": (0.5,)}


@dataclass(frozen=True)
class Feature:
    """A job that takes a second or so, however many packets it has."""

    job: Any
    play: Any = TRAINING
    spec: tuple[str, ...] = ()
    fates: tuple[str, ...] = ("lost",)
    """What befalls a packet every day; the other fates are thorough."""
    dies: tuple[int, ...] = ()
    """The ranks that die every day."""
    resumes: bool = True
    """Whether the script goes on in a replacement, so that each rank may die."""


def compressed(has_optimizer: bool) -> test_compression.Compressed:
    job = test_compression.Compressed(3, 2, 2, 3, {"a": 65, "b": 7}, Store(bigarray_bound=64))
    job.has_optimizer = has_optimizer
    job.ways = ["pushpull", "push, pull", "pushpull"]
    return job


CLIPPING = ("R440", "R441", "R442")
QUORUM = (test_quorum.train, test_quorum.judge)
RESUMPTION = (test_resume.loop, test_resume.is_trained)
REPLACED = ("R124", "R125", "R126")
FEATURES = {
    "dense": Feature(test_cluster.small_job(), dies=(0, 1)),
    "host aggregation": Feature(test_neighbours.neighbourly_job(2, 2), spec=("R96",), dies=(0,)),
    "three of a host": Feature(test_neighbours.neighbourly_job(3, 1), spec=("R96",), dies=(2,)),
    "rows": Feature(test_rows.small(), (test_rows.train, test_rows.is_trained), ("R172",), dies=(1,)),
    "embedding": Feature(
        test_embeddings.small_job(), (test_embeddings.train, test_embeddings.is_whole), dies=(1,)
    ),
    "several tables": Feature(
        test_embeddings.small_job_of_several(),
        (test_embeddings.train_all, test_embeddings.is_trained),
        ("R466",),
        dies=(0, 1),
    ),
    "non-finite": Feature(test_nonfinite.small_job(), test_nonfinite.FLAWED, dies=(0, 1)),
    "clipping": Feature(test_clipping.small_job(), test_clipping.CLIPPED, CLIPPING, dies=(1,)),
    "clipping, one worker": Feature(
        test_clipping.small_job(1), test_clipping.CLIPPED, CLIPPING, fates=(), dies=(0,)
    ),
    "compression": Feature(compressed(True), resumes=False),
    "compression, no optimizer": Feature(compressed(False), fates=(), resumes=False),
    "quorum, late dropped": Feature(test_quorum.smallest("drop"), QUORUM, fates=(), resumes=False),
    "quorum, late counted": Feature(test_quorum.smallest("next"), QUORUM, resumes=False),
    "joins": Feature(
        test_joins.few(), (test_joins.run_out, test_joins.is_joined), ("R121", "R122"), resumes=False
    ),
    **{
        order: Feature(test_resume.small(order), RESUMPTION, REPLACED, fates=(), dies=(rank,))
        for rank, order in enumerate(test_resume.ORDERS)
    },
}


def cases(kind: str) -> list[Any]:
    """Return each feature with each fate, or with each rank that may die."""
    found = []
    for name, feature in FEATURES.items():
        ranks = range(feature.job.workers) if feature.resumes else ()
        everyday = feature.fates if kind == "fates" else feature.dies
        for what in FATES if kind == "fates" else ranks:
            marks = [pytest.mark.spec(*feature.spec)] if feature.spec else []
            marks += [] if what in everyday else [pytest.mark.thorough]
            found.append(pytest.param(name, what, marks=marks, id=f"{name}-{what}"))
    return found


@pytest.mark.parametrize(("name", "fate"), cases("fates"))
def test_any_packet_may_be_lost_or_come_twice_or_late(name: str, fate: str) -> None:
    befall_each_packet(FEATURES[name].job, FATES[fate], FEATURES[name].play)


@pytest.mark.parametrize(("name", "rank"), cases("ranks"))
def test_a_worker_may_die_at_any_packet(name: str, rank: int) -> None:
    kill_at_each_packet(FEATURES[name].job, rank, FEATURES[name].play)
