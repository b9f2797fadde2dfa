"""Requests: which differences between two ranks count, and what a request may not say by itself."""

from dataclasses import replace

import pytest

from kvps.compat.horovod.negotiation.request import (
    ADD_SET,
    ALLGATHER,
    ALLREDUCE,
    ALLTOALL,
    BROADCAST,
    REDUCESCATTER,
    CollectiveRequest,
    Part,
    difference,
    own_fault,
)

ONE = CollectiveRequest("x", ALLREDUCE, parts=(Part("float32", (2, 3)),), op="sum")


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (ONE, ""),
        (replace(ONE, kind=BROADCAST), "operations differ: rank 0 has allreduce, rank 2 has broadc"),
        (replace(ONE, parts=()), "numbers of tensors differ: rank 0 has 1, rank 2 has 0"),
        (replace(ONE, parts=(Part("int8", (2, 3)),)), "types differ: rank 0 has float32"),
        (replace(ONE, parts=(Part("float32", (2, 4)),)), "rank 2 has float32[2, 4]"),
        (replace(ONE, parts=(Part("float32", (6,)),)), "shapes differ"),
        (replace(ONE, op="average"), "reductions differ: rank 0 has sum, rank 2 has average"),
        (replace(ONE, root=1), "root ranks differ"),
        (replace(ONE, prescale=2.0), "prescale factors differ"),
        (replace(ONE, postscale=2.0), "postscale factors differ"),
        (replace(ONE, ranks=(1,)), "ranks of the process set differ"),
    ],
)
def test_a_difference_names_both_ranks(other: CollectiveRequest, words: str) -> None:
    found = difference(0, ONE, 2, other)
    assert words in found
    assert bool(words) == bool(found)


def test_a_difference_within_a_group_names_the_tensor() -> None:
    two = replace(ONE, parts=(Part("float32", (1,)), Part("float32", (2,))))
    other = replace(two, parts=(Part("float32", (1,)), Part("float64", (2,))))
    assert difference(0, two, 1, other).startswith("types of tensor 1 differ")


@pytest.mark.parametrize("kind", [ALLGATHER, ALLTOALL])
def test_the_first_dimension_of_an_uneven_operation_may_differ(kind: str) -> None:
    one, other = (CollectiveRequest("x", kind, parts=(Part("int8", (rows, 3)),)) for rows in (2, 5))
    assert not difference(0, one, 1, other)
    assert difference(0, one, 1, CollectiveRequest("x", kind, parts=(Part("int8", (2, 4)),)))
    assert difference(0, one, 1, CollectiveRequest("x", kind, parts=(Part("int8", (2, 3, 1)),)))


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (ONE, ""),
        (replace(ONE, fault="no"), "no"),
        (CollectiveRequest("x", BROADCAST, root=3), "root_rank=3 is not in the process set [0, 1]"),
        (CollectiveRequest("x", BROADCAST, root=1), ""),
        (CollectiveRequest("x", ALLGATHER, parts=(Part("int8", ()),)), "got a scalar"),
        (CollectiveRequest("x", REDUCESCATTER, parts=(Part("int8", ()),)), "got a scalar"),
        (CollectiveRequest("x", ALLTOALL, parts=(Part("int8", (3,)),), splits=((1, 2),)), ""),
        (CollectiveRequest("x", ALLTOALL, parts=(Part("int8", (3,)),), splits=((3,),)), "1 splits"),
        (CollectiveRequest("x", ALLTOALL, parts=(Part("int8", (3,)),), splits=((1, 1),)), ""),
        (
            CollectiveRequest("x", ALLTOALL, parts=(Part("int8", (3,)),), splits=((4, -1),)),
            "need more rows than",
        ),
        (CollectiveRequest("x", ALLTOALL, parts=(Part("int8", (3,)),), splits=((2, 2),)), "need more rows"),
        (CollectiveRequest("x", ADD_SET, ranks=(7,)), ""),
    ],
)
def test_a_request_may_be_wrong_by_itself(request_: CollectiveRequest, words: str) -> None:
    found = own_fault(request_, [0, 1])
    assert words in found
    assert bool(words) == bool(found)
