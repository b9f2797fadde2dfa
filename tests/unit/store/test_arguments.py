"""From what users give to names, rows and sinks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvps.dtypes import Spec
from kvps.errors import ConfigError, KeyNotFound, Mismatch
from kvps.store import arguments
from kvps.store.arguments import (
    BLOCK,
    Form,
    KnownKeys,
    are_dense,
    as_list,
    check_values,
    names_of,
    outcome_for,
    reduce,
    rows_of,
    values_of,
)

SPECS = {
    "a": Spec("float32", (2, 2)),
    "b": Spec("float16", (3,)),
    "scalar": Spec("int64", ()),
    "nothing": Spec("float32", (0, 3)),
}


@pytest.mark.parametrize(
    ("given", "names", "is_many"),
    [
        ("w", ("w",), False),
        (3, ("3",), False),
        (["a", 1], ("a", "1"), True),
        (("a",), ("a",), True),
        ([], (), True),
    ],
)
def test_keys(given, names, is_many):
    assert names_of(given) == (names, is_many)


@pytest.mark.parametrize("given", [True, None, 1.0, b"w", "", "x" * 257, "a\0", ["a", None]])
def test_keys_that_are_none(given):
    with pytest.raises(ConfigError):
        names_of(given)


def test_a_key_twice():
    with pytest.raises(ConfigError, match="'3' is given twice"):
        names_of([3, "3"])


def test_values_with_and_without_devices():
    one, two = torch.ones(1), torch.zeros(1)
    assert values_of(("w",), False, one) == [[one]]
    assert values_of(("w",), False, [one, two]) == [[one, two]]
    assert values_of(("v", "w"), True, [one, [one, two]]) == [[one], [one, two]]


@pytest.mark.parametrize(
    ("names", "is_many", "given", "says"),
    [
        (("v",), True, torch.ones(1), "list of values"),
        (("v", "w"), True, [torch.ones(1)], "as many values, got 1"),
        (("v",), False, [], "'v'.*empty"),
    ],
)
def test_values_that_do_not_fit_the_keys(names, is_many, given, says):
    with pytest.raises(ConfigError, match=says):
        values_of(names, is_many, given)


def test_values_are_checked_against_their_keys():
    check_values(("a",), [[torch.ones(2, 2), np.ones((2, 2), np.float32)]], SPECS, "push")
    with pytest.raises(KeyNotFound, match="'z' was never"):
        check_values(("z",), [[torch.ones(1)]], SPECS, "push")
    with pytest.raises(Mismatch, match=r"'a' is float32\[2,2\]; cannot push float32\[4\]"):
        check_values(("a",), [[torch.ones(2, 2), torch.ones(4)]], SPECS, "push")


@pytest.mark.parametrize("on_device", [False, True])
def test_a_sum_over_devices_rounds_once(on_device):
    values = [torch.tensor([2048.0]).half()] + [torch.tensor([1.0]).half()] * 2
    assert reduce(list(values), on_device).item() == 2050
    assert [one.item() for one in values] == [2048, 1, 1]


def test_a_row_is_a_view_where_it_can_be():
    value = torch.arange(4.0).view(2, 2)
    (row,) = rows_of([[value]], on_device=False)
    assert row.data_ptr() == value.data_ptr()
    (row,) = rows_of([[value.T]], on_device=False)
    assert row.tolist() == [[0, 2], [1, 3]]
    assert row.is_contiguous()


def test_sinks_write_where_they_can_and_copy_where_they_must():
    direct, strided, array = torch.zeros(2, 2), torch.zeros(2, 2).T, np.zeros((2, 2), np.float32)
    outcome = outcome_for(("a",), False, [strided, direct, array], SPECS)
    outcome.sinks[0].copy_(torch.arange(4.0).view(2, 2))
    assert direct.tolist() == [[0, 1], [2, 3]]
    outcome.result(None)
    assert strided.tolist() == array.tolist() == [[0, 1], [2, 3]]


def test_sinks_of_new_tensors():
    outcome = outcome_for(("a", "b"), True, None, SPECS)
    for row in outcome.sinks:
        row.fill_(1)
    a, b = outcome.result(None)
    assert (a.shape, a.dtype, b.dtype) == ((2, 2), torch.float32, torch.float16)
    with pytest.raises(KeyNotFound):
        outcome_for(("z",), False, None, SPECS)


def test_outputs_that_cannot_be_written():
    with pytest.raises(Mismatch, match="negative strides"):
        outcome_for(("a",), False, np.zeros((2, 2), np.float32)[::-1], SPECS)
    frozen = np.zeros((2, 2), np.float32)
    frozen.flags.writeable = False
    with pytest.raises(Mismatch, match="read-only"):
        outcome_for(("a",), False, frozen, SPECS)


def test_sinks_of_a_thread_that_only_infers():
    """Another thread may not write to such a tensor, so it gets a row beside it."""
    with torch.inference_mode():
        outcome = outcome_for(("a",), False, None, SPECS)
        assert not outcome.sinks[0].is_inference()
        out = torch.zeros(2, 2)
        assert not form("a").fits([out], as_sinks=True)
        outcome = outcome_for(("a",), False, out, SPECS)
        outcome.sinks[0].fill_(3)
        outcome.result(None)
    assert not outcome.sinks[0].is_inference()
    assert out.tolist() == [[3, 3], [3, 3]]


# --- lists that are recognised as a whole ---------------------------------------------------------


def form(*names):
    return Form([SPECS[name] for name in names])


def fitting():
    return [
        torch.zeros(2, 2),
        torch.nn.Parameter(torch.zeros(3, dtype=torch.float16)),
        torch.tensor(7),
        torch.zeros(0, 3),
    ]


def test_plain_tensors_of_the_right_type_and_shape_fit():
    one = form(*SPECS)
    assert one.fits(fitting())
    assert one.fits(tuple(fitting()))
    assert one.fits(fitting(), as_sinks=True)
    assert form().fits([])


@pytest.mark.parametrize("count", [BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5])
def test_lists_are_looked_at_to_their_end(count: int) -> None:
    shapes = [(2, 2) if index % 2 else (3,) for index in range(count)]
    one = Form([Spec("float32", shape) for shape in shapes])
    values = [torch.zeros(shape) for shape in shapes]
    assert one.fits(values)
    assert one.fits(values, as_sinks=True)
    assert not one.fits(values[1:])
    for index in (0, 1, count // 2, count - 2, count - 1):
        changed = list(values)
        changed[index] = torch.zeros(4, 1) if index % 2 else torch.zeros(4)
        assert not one.fits(changed)
        with torch.inference_mode():
            changed[index] = torch.zeros(shapes[index])
        assert one.fits(changed)
        assert not one.fits(changed, as_sinks=True)


class Marked(torch.Tensor):
    """A subclass may mean anything."""


@pytest.mark.parametrize(
    ("index", "value"),
    [
        (0, torch.zeros(4)),
        (0, torch.zeros(4, 1)),
        (0, torch.zeros(1, 4)),
        (0, torch.zeros(2, 2, dtype=torch.float64)),
        (0, torch.zeros(2, 2, device="meta")),
        (0, torch.zeros(2, 4)[:, ::2]),
        (0, torch.zeros(2, 2).T),
        (0, torch.eye(2).to_sparse()),
        (0, torch.zeros(2, 2).to_mkldnn()),
        (0, torch.zeros(2, 2).as_subclass(Marked)),
        (0, np.zeros((2, 2), np.float32)),
        (0, [torch.zeros(2, 2)]),
        (0, None),
        (1, torch.zeros(3)),
        (1, torch.zeros(2, dtype=torch.float16)),
        (1, torch.zeros(3, 1, dtype=torch.float16)),
        (2, torch.tensor([7])),
        (2, torch.tensor(7.0)),
        (3, torch.zeros(0)),
        (3, torch.zeros(3, 0)),
        (3, torch.zeros(1, 3)),
    ],
)
def test_anything_else_is_looked_at_by_itself(index, value):
    values = fitting()
    values[index] = value
    assert not form(*SPECS).fits(values)


@pytest.mark.parametrize("values", [None, torch.zeros(2, 2), {"a": 1}, [], [torch.zeros(2, 2)] * 2])
def test_no_list_or_another_length_does_not_fit(values):
    assert not form("a").fits(values)


def test_lists_of_keys_that_are_equal_mean_equal_names():
    assert as_list(["a", 1]) == ("a", 1) == as_list(("a", 1))
    assert as_list(["1"]) != as_list([1])
    for other in ("a", 1, [True], [None], {"a": 1}, [["a"]]):
        assert as_list(other) is None


# --- the keys that a store knows ------------------------------------------------------------------

VECTOR, TABLE = Spec("float32", (3,)), Spec("float32", (2, 3))


@pytest.fixture
def keys() -> KnownKeys:
    known = KnownKeys()
    known.declare([("a", VECTOR), ("t", TABLE)])
    return known


def test_keys_that_are_not_known_are_named(keys: KnownKeys) -> None:
    assert keys.unknown(("a", "x", "t", "y")) == ("x", "y")
    keys.demand(("a", "t"))
    with pytest.raises(KeyNotFound, match="key 'x' was never initialised"):
        keys.demand(("a", "x", "y"))


def test_a_form_is_forgotten_when_a_key_becomes_another(keys: KnownKeys) -> None:
    form = keys.form(("a",))
    assert form is not None
    assert form is keys.form(("a",))
    assert form.fits([torch.zeros(3)])
    assert keys.form(("a", "x")) is None
    keys.declare([("a", TABLE)])
    changed = keys.form(("a",))
    assert changed is not None
    assert not changed.fits([torch.zeros(3)])


def test_lists_are_remembered_up_to_a_number(keys: KnownKeys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "LISTS_MAX", 1)
    for names in (["a", 3], ["t"], ["a", 3]):
        assert keys.names_of(names) == (tuple(map(str, names)), True)
        keys.form(tuple(map(str, names)))
    assert keys.names_of("a") == (("a",), False)
    with pytest.raises(ConfigError, match="given twice"):
        keys.names_of(["a", "a"])


def test_dense_values_are_plain_tensors() -> None:
    dense, sparse = torch.zeros(2, 3), torch.eye(2, 3).to_sparse()
    assert are_dense([dense, torch.nn.Parameter(dense)])
    assert not are_dense([dense, sparse])
    assert not are_dense([dense, np.zeros(3)])
    assert not are_dense("no list")
