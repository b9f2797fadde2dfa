"""Requests: which differences between two ranks count, and what a request may not say by itself."""

from dataclasses import replace

import msgpack
import pytest

from kvps.compat.horovod.negotiation.request import (
    ADD_SET,
    ALLGATHER,
    ALLREDUCE,
    ALLTOALL,
    BROADCAST,
    NAME_MAX,
    REDUCESCATTER,
    CollectiveRequest,
    Part,
    Turn,
    difference,
    own_fault,
    pack,
    unpack,
)
from kvps.errors import ProtocolError

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
    first, other = (CollectiveRequest("x", kind, parts=(Part("int8", (rows, 3)),)) for rows in (2, 5))
    assert not difference(0, first, 1, other)
    assert difference(0, first, 1, CollectiveRequest("x", kind, parts=(Part("int8", (2, 4)),)))
    assert difference(0, first, 1, CollectiveRequest("x", kind, parts=(Part("int8", (2, 3, 1)),)))


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


# --- turns as bytes -------------------------------------------------------------------------------


TURN = Turn(
    (
        CollectiveRequest(
            "ä", ALLREDUCE, 3, (Part("float32", (2, 0)), Part("int8", ())), "sum", -1, 0.5, 2.0
        ),
        CollectiveRequest("b", ALLTOALL, splits=((1, 2), ()), ranks=(4,), fault="why"),
    ),
    has_joined=True,
    waits_for=(3, "ä"),
)


@pytest.mark.parametrize("turn", [Turn(), Turn(over="bye"), TURN])
def test_a_turn_comes_back(turn: Turn) -> None:
    assert unpack(pack(turn)) == turn


def row(**changed: object) -> bytes:
    fields = ["a", ALLREDUCE, 0, [["int8", [1]]], "sum", -1, 1.0, 1.0, [], [], ""]
    names = ["name", "kind", "set", "parts", "op", "root", "prescale", "postscale"]
    names += ["splits", "ranks", "fault"]
    for name, value in changed.items():
        fields[names.index(name)] = value
    packed: bytes = msgpack.packb([[fields], False, "", None])
    return packed


@pytest.mark.parametrize(
    "given",
    [
        b"",
        b"\xc1",
        msgpack.packb(None),
        msgpack.packb([[], 1, "", None]),
        msgpack.packb([[], False, None, None]),
        msgpack.packb([[], False, "", [1]]),
        msgpack.packb([[], False, "", ["a", 1]]),
        msgpack.packb([[[]], False, "", None]),
        row(name=1),
        row(name="x" * (NAME_MAX + 1)),
        row(kind="pickle"),
        row(set="0"),
        row(parts=[[1, [1]]]),
        row(parts=[["int8", 1]]),
        row(parts=[["int8", ["1"]]]),
        row(op=None),
        row(root=True),
        row(prescale=1),
        row(postscale="1"),
        row(splits=[1]),
        row(ranks=None),
        row(fault=0),
    ],
)
def test_other_bytes_are_refused(given: bytes) -> None:
    with pytest.raises(ProtocolError, match="cannot be read"):
        unpack(given)
