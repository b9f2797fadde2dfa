"""Which server holds what: the same everywhere, near-equal, and nothing twice."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvps.core.placement import ALIGN, BIGARRAY_BOUND, EMBEDDING, Part, home, lies_by_rows, parts
from kvps.dtypes import Spec


def test_a_small_key_lives_on_its_home() -> None:
    (part,) = parts("w", 99_999, servers=4)
    assert part == (home("w", 4), 0, 99_999)


def test_a_large_key_is_cut_into_aligned_parts_over_all_servers() -> None:
    got = parts("w", 100_000, servers=3)
    assert [one.server for one in got] == [0, 1, 2]
    assert [one.start for one in got] == [0, 32_768, 66_560]
    assert [one.size for one in got] == [32_768, 33_792, 33_440]


def test_the_hash_is_stable_for_ever() -> None:
    """Checkpoints and processes of other versions rely on it."""
    assert [home(key, 7) for key in ("w", "layer1.0.conv1.weight", "0", "Schlüssel")] == [0, 5, 2, 6]


def test_a_table_has_one_element_on_every_server() -> None:
    key = f"{EMBEDDING}words"
    assert parts(key, 3, 3) == (Part(0, 0, 1), Part(1, 1, 1), Part(2, 2, 1))
    assert parts(key, 1, 1, bound=1) == (Part(0, 0, 1),)


def test_single_server_holds_all() -> None:
    assert parts("w", 10**9, servers=1) == ((0, 0, 10**9),)


@pytest.mark.parametrize("bound", [0, 1])
@pytest.mark.parametrize("count", [0, 1, 4 * ALIGN - 1])
def test_a_key_that_cannot_give_each_server_a_part_is_not_cut(count: int, bound: int) -> None:
    """Its home would not know it, and LARS would wait for norms of servers without a part."""
    (part,) = parts("w", count, servers=4, bound=bound)
    assert part == (home("w", 4), 0, count)
    assert len(parts("w", 4 * ALIGN, servers=4, bound=bound)) == 4


# --- ResNet-50 --------------------------------------------------------------------------------------


def resnet50() -> dict[str, int]:
    """torchvision's names of ResNet-50's 161 arrays, and how many elements each has."""
    arrays = {"conv1.weight": 64 * 3 * 7 * 7, "bn1.weight": 64, "bn1.bias": 64}
    inside = 64
    for layer, (width, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3)), start=1):
        for block in range(blocks):
            path, outside = f"layer{layer}.{block}", 4 * width
            shapes = [(width, inside, 1), (width, width, 9), (outside, width, 1)]
            for number, shape in enumerate(shapes, start=1):
                arrays[f"{path}.conv{number}.weight"] = math.prod(shape)
                arrays |= {f"{path}.bn{number}.{one}": shape[0] for one in ("weight", "bias")}
            if block == 0:
                arrays[f"{path}.downsample.0.weight"] = outside * inside
                arrays |= {f"{path}.downsample.1.{one}": outside for one in ("weight", "bias")}
            inside = outside
    return arrays | {"fc.weight": 1000 * 2048, "fc.bias": 1000}


NAMINGS = {
    "torchvision": lambda index, name: name,
    "number": lambda index, name: str(index),
    "wrapped": lambda index, name: f"module.{name}",
    "all on one server": lambda index, name: f"{name}#{salt(name)}",
}


def salt(name: str) -> int:
    """A suffix that sends ``name`` to server 0 of 4."""
    return next(n for n in range(1000) if home(f"{name}#{n}", 4) == 0)


@pytest.mark.parametrize("naming", NAMINGS)
def test_resnet50_on_4_servers_is_balanced(naming: str) -> None:
    arrays = resnet50()
    assert (len(arrays), sum(arrays.values())) == (161, 25_557_032)
    load = [0] * 4
    for index, (name, count) in enumerate(arrays.items()):
        for part in parts(NAMINGS[naming](index, name), count, 4, BIGARRAY_BOUND):
            load[part.server] += part.size
    assert max(load) <= 1.10 * sum(load) / 4


# --- rows -------------------------------------------------------------------------------------------


@pytest.mark.spec("R170")
@pytest.mark.parametrize(
    ("rows", "width", "servers", "starts"),
    [
        (1_000_000, 64, 3, [0, 21_332_992, 42_665_984]),  # whole pages, and whole rows by that
        (100_000, 48, 2, [0, 2_399_232]),  # 3,072 is the least of both
        (100_000, 49, 2, [0, 2_408_448]),  # 48 times 50,176
        (1_000, 129, 2, [0, 64_500]),  # rows alone
        (2, 60_000, 2, [0, 60_000]),
        (2, 60_000, 3, [0, 39_936, 79_872]),  # fewer rows than servers: cut within them
    ],
)
def test_tables_are_cut_between_rows(rows: int, width: int, servers: int, starts: list[int]) -> None:
    got = parts("w", rows * width, servers, width=width)
    assert [one.start for one in got] == starts
    assert sum(one.size for one in got) == rows * width
    spec = Spec("float32", (rows, width))
    by_rows = [lies_by_rows(spec, [(one.start, one.size)]) for one in got]
    assert by_rows == [rows >= servers] * servers


@given(rows=st.integers(1, 5000), width=st.integers(1, 300), servers=st.integers(1, 8))
def test_parts_of_any_table_are_whole_rows_and_none_is_empty(rows: int, width: int, servers: int) -> None:
    got = parts("w", rows * width, servers, 0, width)
    assert [one.start for one in got] == [sum(p.size for p in got[:i]) for i in range(len(got))]
    assert sum(one.size for one in got) == rows * width
    assert all(one.size for one in got)
    if rows >= servers:
        assert all(one.start % width == 0 for one in got)
        mean = rows * width / len(got)
        assert max(one.size for one in got) <= mean * (1 + 1 / 16) + width + ALIGN


@pytest.mark.parametrize("shape", [(), (12,), (0, 4), (4, 0)])
def test_shape_without_rows_does_not_lie_by_rows(shape: tuple[int, ...]) -> None:
    spec = Spec("float32", shape)
    assert spec.width == (4 if shape == (0, 4) else 1)
    assert not lies_by_rows(spec, [(0, spec.count)])


def test_rows_of_one_element_are_rows() -> None:
    assert lies_by_rows(Spec("float32", (12, 1)), [(0, 5), (5, 7)])
