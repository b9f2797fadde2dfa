"""Gradients that leave together, and the answers that they wait for."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvps.errors import ConfigError, KvpsError
from kvps.runtime.ticket import Handle, finished
from kvps.torch.sync.in_flight import (
    BUCKET_BYTES,
    DEVICE_BYTES,
    Answer,
    Buckets,
    GradientBucket,
    bucket_bytes,
)


def bucket_of(value: torch.Tensor, wait: Any, divisor: int = 1) -> GradientBucket:
    kv: Any = SimpleNamespace()
    return GradientBucket({"w": value}, Answer(wait, kv, {"w": value}), divisor, set(), is_marked=False)


def test_a_bucket_divides_once() -> None:
    value = torch.rand(4)
    expected = value / 2
    bucket = bucket_of(value, Handle(finished(), lambda: None).wait, 2)
    bucket.wait()
    bucket.wait()
    assert torch.equal(bucket.gradient("w"), expected)


def test_an_error_is_raised_by_each_wait() -> None:
    failed = finished(error=KvpsError("no server has joined yet"))
    bucket = bucket_of(torch.rand(4), Handle(failed, lambda: None).wait)
    for _ in range(2):
        with pytest.raises(KvpsError, match="no server has joined yet"):
            bucket.wait()


# --- which gradients leave together, and how urgent each bucket is --------------------------------


SIZES = {"a": 4, "b": 6, "c": 10, "d": 1}


def test_a_bucket_leaves_when_it_is_full() -> None:
    buckets = Buckets(SIZES, limit_bytes=10)
    assert [buckets.add(item) for item in ("d", "c", "b", "a")] == [[], ["c", "d"], [], ["a", "b"]]
    assert buckets.flush() == []
    assert buckets.number == 2


def test_the_rest_leaves_when_backward_is_over() -> None:
    buckets = Buckets(SIZES, limit_bytes=100)
    assert [buckets.add(item) for item in ("d", "b")] == [[], []]
    assert buckets.flush() == ["b", "d"], "in the order of the store"
    assert buckets.number == 1


def test_later_buckets_are_more_urgent_and_the_next_step_begins_anew() -> None:
    buckets = Buckets(SIZES, limit_bytes=1)
    numbers = []
    for name in ("d", "c"):
        assert buckets.add(name) == [name]
        numbers.append(buckets.number)
    assert numbers == [1, 2]
    buckets.begin()
    assert buckets.number == 0


def test_gradients_collected_before_an_abandoned_step_are_forgotten() -> None:
    buckets = Buckets(SIZES, limit_bytes=100)
    assert buckets.add("a") == []
    buckets.begin()
    assert buckets.flush() == []


class TestArranged:
    """Buckets that know the chunks."""

    def test_a_bucket_waits_for_the_rest_of_its_chunks(self) -> None:
        buckets = Buckets(dict.fromkeys("abcd", 8), limit_bytes=15)
        buckets.arrange({"a": [1], "b": [1, 2], "c": [2], "d": [3]})
        buckets.begin()
        assert [buckets.add(item) for item in ("d", "c")] == [[], []]
        assert buckets.add("b") == [], "chunk 1 is open"
        assert buckets.add("a") == []
        assert buckets.flush() == ["a", "b", "c", "d"]
        buckets.begin()
        assert [buckets.add(item) for item in ("c", "b")] == [[], []], "chunk 1 is open"
        assert buckets.add("a") == ["a", "b", "c"]

    def test_the_next_step_waits_again(self) -> None:
        buckets = Buckets({"a": 8, "b": 8, "c": 8}, limit_bytes=8)
        buckets.arrange({"a": [1], "b": [1], "c": [2]})
        for _ in range(2):
            buckets.begin()
            assert [buckets.add(item) for item in "bac"] == [[], ["a", "b"], []]
            assert buckets.flush() == ["c"]

    def test_small_gradients_leave_last(self) -> None:
        buckets = Buckets({"a": 100, "x": 1, "b": 100, "y": 1}, limit_bytes=100)
        buckets.arrange({"a": [1], "x": [1], "b": [2], "y": [1]})
        buckets.begin()
        assert [buckets.add(item) for item in ("y", "b", "x", "a")] == [[], ["b"], [], []]
        assert buckets.flush() == ["a", "x", "y"], "with the last of the others"
        assert buckets.number == 2

    def test_many_small_gradients_leave_when_they_fill_a_bucket(self) -> None:
        names = [f"p{number}" for number in range(150)]
        buckets = Buckets({**dict.fromkeys(names, 1), "big": 100}, limit_bytes=100)
        buckets.arrange({name: [1] for name in [*names, "big"]})
        buckets.begin()
        left = [bucket for bucket in map(buckets.add, names) if bucket]
        assert [len(bucket) for bucket in left] == [100]
        assert len(buckets.flush()) == 50


@given(st.lists(st.integers(0, 50), min_size=1, max_size=20), st.integers(1, 60), st.randoms())
def test_each_gradient_of_known_chunks_leaves_once(sizes: list[int], limit: int, dice: Any) -> None:
    names = [f"p{number}" for number in range(len(sizes))]
    buckets = Buckets(dict(zip(names, sizes, strict=True)), limit)
    buckets.arrange({name: {dice.randrange(4), dice.randrange(9)} for name in names})
    arrival = list(names)
    for _ in range(2):
        buckets.begin()
        dice.shuffle(arrival)
        left = [bucket for bucket in map(buckets.add, arrival) if bucket]
        left.append(buckets.flush())
        assert sorted([name for bucket in left for name in bucket]) == sorted(names)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=20), st.integers(1, 60), st.randoms())
def test_each_gradient_leaves_once(sizes: list[int], limit: int, dice: object) -> None:
    names = [f"p{number}" for number in range(len(sizes))]
    by_name = dict(zip(names, sizes, strict=True))
    buckets = Buckets(by_name, limit)
    arrival = list(names)
    dice.shuffle(arrival)  # type: ignore[attr-defined]
    left = [buckets.add(name) for name in arrival]
    full = [bucket for bucket in left if bucket]
    assert all(sum(by_name[name] for name in bucket) >= limit for bucket in full)
    assert sorted([name for bucket in [*full, buckets.flush()] for name in bucket]) == sorted(names)


@pytest.mark.parametrize("limit", [0, -1, 1.5, "4M"])
def test_sizes_that_cannot_be(limit: object) -> None:
    with pytest.raises(ConfigError, match="use a whole number of bytes, 1 or more"):
        Buckets(SIZES, limit)  # type: ignore[arg-type]


def test_buckets_on_a_gpu_are_small_where_chunks_are_large() -> None:
    large = 32 << 20
    assert bucket_bytes(large) == 3 * large
    assert bucket_bytes(large, is_on_device=True) == DEVICE_BYTES
    assert bucket_bytes(1, is_on_device=True) == bucket_bytes(1) == BUCKET_BYTES
