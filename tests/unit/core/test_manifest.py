"""The manifest of a version: what is written is read, and nothing else is believed."""

import json

import pytest

from kvps.core.manifest import Extent, Published, decode, encode
from kvps.dtypes import Spec
from kvps.errors import ProtocolError

WEIGHT = Published("weight", Spec("bfloat16", (2, 3)), (Extent(1, 7, 64, 8, 4), Extent(0, 3, 0, 4, 0)))
EMPTY = Published("nothing", Spec("float32", (0, 3)), ())
MASK = Published("mask", Spec("uint8", (4,)), (Extent(0, 3, 64, 4, 0),), is_bool=True)


def test_manifest_survives_the_wire() -> None:
    assert decode(encode([WEIGHT, EMPTY, MASK])) == [WEIGHT, EMPTY, MASK]
    assert WEIGHT.size == 12


@pytest.mark.parametrize(
    "octets",
    [
        b"\xff",
        b"{}{}",
        b"3",
        b"[3]",
        b"[[1]]",
        b"[" * 100_000,
        json.dumps([["w", "float33", [1], []]]).encode(),
        json.dumps([["w", "float32", [-1], []]]).encode(),
        json.dumps([["w", "float32", [2**50], []]]).encode(),
        json.dumps([["w", "float32", [1.0], [[0, 0, 0, 4, 0]]]]).encode(),
        json.dumps([["w", "float32", [True], [[0, 0, 0, 4, 0]]]]).encode(),
        json.dumps([[7, "float32", [1], [[0, 0, 0, 4, 0]]]]).encode(),
        json.dumps([["w", "float32", [1], [[0, 0, 0, 4]]]]).encode(),
        json.dumps([["w", "float32", [1], [[0, 0, 0, 4, 4]]]]).encode(),
        json.dumps([["w", "float32", [2], [[0, 0, 0, 4, 0]]]]).encode(),
        json.dumps([["w", "float32", [0], []]] * 2).encode(),
        json.dumps([["w", "float32", [1], [[0, 2**63, 0, 4, 0]]]]).encode(),
        json.dumps([["w", "float32", [1], [[0, 0, 0, 4, 0]], True]]).encode(),
        json.dumps([["w", "uint8", [1], [[0, 0, 0, 1, 0]], 1]]).encode(),
        json.dumps([["w", "float32", [1], [[0, 0, 2**70, 4, 0]]]]).encode(),
    ],
)
def test_anything_else_is_refused(octets: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(octets)
