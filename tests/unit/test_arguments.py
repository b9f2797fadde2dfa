"""From what users give to names, rows and sinks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvps.errors import ConfigError, KeyNotFound, Mismatch
from kvps.specs import Spec
from kvps.store.arguments import check_values, names_of, reduce, rows_of, sinks_for, values_of

SPECS = {"a": Spec("float32", (2, 2)), "b": Spec("float16", (3,))}


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
    sinks = sinks_for(("a",), False, [strided, direct, array], SPECS)
    sinks.rows[0].copy_(torch.arange(4.0).view(2, 2))
    assert direct.tolist() == [[0, 1], [2, 3]]
    sinks.deliver()
    assert strided.tolist() == array.tolist() == [[0, 1], [2, 3]]


def test_sinks_of_new_tensors():
    sinks = sinks_for(("a", "b"), True, None, SPECS)
    for row in sinks.rows:
        row.fill_(1)
    a, b = sinks.deliver()
    assert (a.shape, a.dtype, b.dtype) == ((2, 2), torch.float32, torch.float16)
    with pytest.raises(KeyNotFound):
        sinks_for(("z",), False, None, SPECS)


def test_outputs_that_cannot_be_written():
    with pytest.raises(Mismatch, match="negative strides"):
        sinks_for(("a",), False, np.zeros((2, 2), np.float32)[::-1], SPECS)
    frozen = np.zeros((2, 2), np.float32)
    frozen.flags.writeable = False
    with pytest.raises(Mismatch, match="read-only"):
        sinks_for(("a",), False, frozen, SPECS)
