"""How a list of keys travels in collectives."""

import pytest
import torch

from kvps.dtypes import DTYPES, Spec
from kvps.store.allreduce.buckets import BucketPlan, buckets_of


def specs(*shapes, dtype="float32"):
    return [Spec(dtype, shape) for shape in shapes]


def test_small_keys_share_a_bucket_until_it_is_full():
    keys = specs((100,), (2, 50), (57,), (100,), (0,), ())
    buckets = buckets_of(keys, limit_bytes=1028)  # 257 float32 numbers
    assert [bucket.indices for bucket in buckets] == [(0, 1, 2), (3, 4, 5)]
    assert [sum(bucket.sizes) for bucket in buckets] == [257, 101]


@pytest.mark.parametrize("shapes", [((0,),), ((0, 3), (2,)), ((0,), (300,), (0,))])
def test_keys_without_elements_have_a_bucket(shapes):
    keys = specs(*shapes)
    buckets = buckets_of(keys, limit_bytes=1028)
    assert sorted(index for bucket in buckets for index in bucket.indices) == list(range(len(keys)))
    plan = BucketPlan("push", [(str(index), spec) for index, spec in enumerate(keys)], "cpu")
    rows = plan.rows([bucket.blank() for bucket in plan.buckets])
    assert [tuple(row.shape) for row in rows] == list(shapes)


def test_a_large_key_has_a_bucket_of_its_own():
    keys = specs((10,), (1000,), (10,))
    assert [item.indices for item in buckets_of(keys, limit_bytes=100)] == [(0,), (1,), (2,)]
    assert buckets_of([]) == ()


def test_half_types_count_by_what_carries_them():
    halves = buckets_of(specs((20,), (20,), dtype="float16"), limit_bytes=120)
    assert [halve.indices for halve in halves] == [(0,), (1,)]
    assert halves[0].carrier is torch.float32


@pytest.mark.parametrize("dtype", [field.name for field in DTYPES])
def test_values_come_back_in_their_types_and_shapes(dtype):
    kind = getattr(torch, dtype)
    rows = [torch.arange(6).to(kind).view(2, 3), torch.tensor(7).to(kind), torch.empty(0, 4).to(kind)]
    load = BucketPlan(
        "push", list(zip("abc", [Spec(dtype, tuple(array.shape)) for array in rows], strict=True)), "cpu"
    )
    flats = [bucket.filled(rows) for bucket in load.buckets]
    assert all(array.dtype is not torch.float16 and array.dtype is not torch.int16 for array in flats)
    for flat in flats:
        flat.mul_(2)
    for row, back in zip(rows, load.rows(flats), strict=True):
        assert torch.equal(back, row * 2)
        assert back.dtype is kind


def test_types_take_turns_without_mixing():
    keys = [Spec("float32", (2,)), Spec("int64", (3,)), Spec("float32", (4,))]
    load = BucketPlan("push", list(zip("abc", keys, strict=True)), "cpu")
    rows = [torch.ones(2), torch.full((3,), 2**60), torch.full((4,), 3.0)]
    assert [item.indices for item in load.buckets] == [(0, 2), (1,)]
    back = load.rows([bucket.filled(rows) for bucket in load.buckets])
    assert all(torch.equal(item, row) for item, row in zip(back, rows, strict=True))


def test_filling_copies():
    row = torch.ones(3)
    (bucket,) = buckets_of(specs((3,)))
    flat = bucket.filled([row])
    flat.add_(5)
    assert row.tolist() == [1, 1, 1]
    strided = torch.arange(6.0).view(2, 3).T
    (bucket,) = buckets_of(specs((3, 2)))
    assert bucket.filled([strided]).tolist() == [0, 3, 1, 4, 2, 5]
    assert bucket.blank().shape == (6,)


def test_only_the_same_call_has_the_same_digest():
    keys = list(zip("ab", specs((2,), (3,)), strict=True))
    same = BucketPlan("push", keys, "cpu")
    assert BucketPlan("push", keys, "cpu").digest == same.digest
    assert len(same.digest) == 16
    others = [
        BucketPlan("init", keys, "cpu"),
        BucketPlan("push", keys, "cuda"),
        BucketPlan("push", keys[::-1], "cpu"),
        BucketPlan("push", keys[:1], "cpu"),
        BucketPlan("push", list(zip("ab", specs((2,), (3, 1)), strict=True)), "cpu"),
        BucketPlan("push", list(zip("ab", specs((2,), (3,), dtype="int32"), strict=True)), "cpu"),
    ]
    assert len({item.digest for item in (same, *others)}) == 7


def test_a_call_in_words():
    keys = [(f"k{i}", Spec("float32", (i,))) for i in range(5)]
    assert BucketPlan("push", keys[:1], "cuda").words == "push('k0' float32[0] on cuda)"
    assert BucketPlan("init", keys, "cpu").words.endswith("'k2' float32[2] and 2 more keys)")
