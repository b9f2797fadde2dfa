"""Requests: which differences between two ranks count, and what a request may not say by itself."""

import msgpack
import pytest

from kvps.compat.horovod.negotiation.request import (
    ALLGATHER,
    ALLREDUCE,
    ALLTOALL,
    NAME_MAX,
    CollectiveRequest,
    Part,
    Turn,
    difference,
    pack,
    unpack,
)
from kvps.errors import ProtocolError

ONE = CollectiveRequest("x", ALLREDUCE, parts=(Part("float32", (2, 3)),), op="sum")


def test_a_difference_within_a_group_names_the_tensor() -> None:
    two = ONE._replace(parts=(Part("float32", (1,)), Part("float32", (2,))))
    other = two._replace(parts=(Part("float32", (1,)), Part("float64", (2,))))
    assert difference(0, two, 1, other).startswith("types of tensor 1 differ")


@pytest.mark.parametrize("kind", [ALLGATHER, ALLTOALL])
def test_the_first_dimension_of_an_uneven_operation_may_differ(kind: str) -> None:
    first, other = (CollectiveRequest("x", kind, parts=(Part("int8", (rows, 3)),)) for rows in (2, 5))
    assert not difference(0, first, 1, other)
    assert difference(0, first, 1, CollectiveRequest("x", kind, parts=(Part("int8", (2, 4)),)))
    assert difference(0, first, 1, CollectiveRequest("x", kind, parts=(Part("int8", (2, 3, 1)),)))


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
