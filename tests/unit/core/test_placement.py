"""Which server holds what: the same everywhere, near-equal, and nothing twice."""

import math
from hashlib import blake2b

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvps.core.placement import ALIGN, BIGARRAY_BOUND, EMBEDDING, Part, home, lies_by_rows, parts, points
from kvps.dtypes import Spec
from tests.support.placement_reference import MODELS, Shapes, first_rule, loads, moved, reference, resnet50


def test_a_small_key_lives_on_its_home() -> None:
    (part,) = parts("w", 99_999, servers=4)
    assert part == (home("w", 4), 0, 99_999)


def test_a_large_key_is_cut_into_aligned_parts_over_all_servers() -> None:
    got = parts("w", 100_000, servers=3)
    assert [item.server for item in got] == [0, 2, 1]
    assert [item.start for item in got] == [0, 32_768, 66_560]
    assert [item.size for item in got] == [32_768, 33_792, 33_440]


def test_the_hash_is_stable_for_ever() -> None:
    """Checkpoints and processes of other versions rely on it."""
    assert [home(key, 7) for key in ("w", "layer1.0.conv1.weight", "0", "Schlüssel")] == [4, 3, 2, 2]


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
    arrays = {name: math.prod(shape) for name, shape in resnet50().items()}
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
        (2, 60_000, 3, [0, 38_912, 79_872]),  # fewer rows than servers: cut within them
    ],
)
def test_tables_are_cut_between_rows(rows: int, width: int, servers: int, starts: list[int]) -> None:
    got = parts("w", rows * width, servers, width=width)
    assert [item.start for item in got] == starts
    assert sum(item.size for item in got) == rows * width
    spec = Spec("float32", (rows, width))
    by_rows = [lies_by_rows(spec, [(item.start, item.size)]) for item in got]
    assert by_rows == [rows >= servers] * servers


@given(rows=st.integers(1, 5000), width=st.integers(1, 300), servers=st.integers(1, 8))
def test_parts_of_any_table_are_whole_rows_and_none_is_empty(rows: int, width: int, servers: int) -> None:
    got = parts("w", rows * width, servers, 0, width)
    assert [item.start for item in got] == [sum(p.size for p in got[:i]) for i in range(len(got))]
    assert sum(item.size for item in got) == rows * width
    assert all(item.size for item in got)
    if rows >= servers and len(got) > 1:
        assert all(item.start % width == 0 for item in got)
        held, mean = loads({"w": got}, servers), rows * width / servers
        assert max(held) <= mean * (1 + 1 / 16) + width + ALIGN
        assert min(held) > 0


@pytest.mark.parametrize("shape", [(), (12,), (0, 4), (4, 0)])
def test_shape_without_rows_does_not_lie_by_rows(shape: tuple[int, ...]) -> None:
    spec = Spec("float32", shape)
    assert spec.width == (4 if shape == (0, 4) else 1)
    assert not lies_by_rows(spec, [(0, spec.count)])


def test_rows_of_one_element_are_rows() -> None:
    assert lies_by_rows(Spec("float32", (12, 1)), [(0, 5), (5, 7)])


# --- one more server --------------------------------------------------------------------------------


def placed(shapes: Shapes, servers: int) -> dict[str, tuple[Part, ...]]:
    return {
        name: parts(name, math.prod(shape), servers, width=math.prod(shape[1:]) if len(shape) > 1 else 1)
        for name, shape in shapes.items()
    }


@pytest.mark.parametrize("model", MODELS)
def test_a_server_that_comes_or_goes_moves_its_own_share(model: str) -> None:
    """No scheme moves less than 1 / (S + 1) and leaves equal shares."""
    shapes = MODELS[model]
    total, before = sum(map(math.prod, shapes.values())), placed(shapes, 1)
    for servers in range(1, 17):
        after = placed(shapes, servers + 1)
        came = sum(moved(before[key], after[key]) for key in shapes)
        went = sum(moved(after[key], before[key]) for key in shapes)
        assert came == went
        limit = {"ResNet-50": 1.07, "5,000 biases": 1.15}.get(model, 1.01)
        assert came * (servers + 1) / total < limit, servers
        assert loads(after, servers + 1)[servers] == came, "all that moves goes to the new server"
        before = after


@pytest.mark.parametrize("model", ["ResNet-50", "GPT-2 small", "26 tables"])
@pytest.mark.parametrize("servers", range(2, 17))
def test_the_fullest_server_is_no_fuller_than_with_near_equal_cuts(model: str, servers: int) -> None:
    cut = {key: shape for key, shape in MODELS[model].items() if math.prod(shape) >= BIGARRAY_BOUND}
    before = {
        key: first_rule(key, math.prod(shape), servers, 0, math.prod(shape[1:])) for key, shape in cut.items()
    }
    fullest, most = max(loads(placed(cut, servers), servers)), max(loads(before, servers))
    assert fullest <= most * 1.003


@pytest.mark.spec("R480", "R170")
@given(count=st.integers(0, 2**24), width=st.integers(1, 5000), servers=st.integers(1, 40))
@settings(deadline=None)
def test_a_key_lies_as_the_document_says(count: int, width: int, servers: int) -> None:
    count = count // width * width
    names = reference()
    if servers == 1 or count < max(1000, 16 * servers):
        name = f"key {count}"
        digest = int.from_bytes(blake2b(name.encode(), digest_size=8).digest()[:2], "big")
        runs = names["line"](65536, servers, names["unit_of_points"])
        expected = [(0, [server for start, server in runs if start <= digest][-1])]
        got = parts(name, count, servers, 1000, width)
    else:
        expected = names["line"](count, servers, names["unit_of_key"](count, width))
        got = parts("w", count, servers, 1000, width)
    assert [(part.start, part.server) for part in got] == expected


@pytest.mark.parametrize("servers", [1, 2, 3, 4, 16, 17, 100, 256])
def test_points_are_shared_equally(servers: int) -> None:
    counts = np.bincount(points(servers))
    assert len(counts) == servers
    mean = 65536 / servers
    assert counts.max() <= mean * (1 if servers <= 16 else 1 + 1 / 16) + 1
    assert counts.min() >= mean * (1 if servers <= 16 else 1 - 1 / 8) - 1
