"""Which ids have been pushed often enough."""

import numpy as np

from kvps.core.embedding.spec import ADMIT_MAX, Admission


def test_admission_is_never_later_however_crowded_the_counters_are() -> None:
    admission = Admission(2, width=64)
    rng = np.random.default_rng(2)
    for _ in range(20):
        once = np.unique(rng.integers(0, 10**9, 8))
        admission.counted = 0  # no halving between
        admission.count(once)
        admission.counted = 0
        assert admission.count(once).all()


def test_counts_are_halved_when_many_were_counted() -> None:
    admission = Admission(4, width=1024)
    admission.count(np.array([1]))
    admission.count(np.array([1]))
    admission.count(np.arange(1000, 1511))  # 513 pushes: more than half of 1024
    assert admission.counted == 0
    assert admission.count(np.array([1])).tolist() == [False]  # 2 // 2 + 1
    assert admission.counted == 1


def test_counts_end_at_what_a_counter_holds() -> None:
    admission = Admission(ADMIT_MAX)
    admitted = [bool(admission.count(np.array([3]))[0]) for _ in range(300)]
    assert admitted == [False] * 254 + [True] * 46
