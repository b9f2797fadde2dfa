"""From what users give to rows and sinks."""

import numpy as np
import pytest
import torch

from kvps.dtypes import Spec
from kvps.errors import ConfigError, Mismatch
from kvps.store.arguments import are_dense, check_values, outcome_for, reduce, rows_of, values_of
from kvps.store.key_list import KeyList

SPECS = {
    "a": Spec("float32", (2, 2)),
    "b": Spec("float16", (3,)),
    "scalar": Spec("int64", ()),
    "nothing": Spec("float32", (0, 3)),
}


def test_values_with_and_without_devices():
    first, two = torch.ones(1), torch.zeros(1)
    assert values_of(("w",), False, first) == [[first]]
    assert values_of(("w",), False, [first, two]) == [[first, two]]
    assert values_of(("v", "w"), True, [first, [first, two]]) == [[first], [first, two]]


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
    with pytest.raises(Mismatch, match=r"'a' is float32\[2,2\]; cannot push float32\[4\]"):
        check_values(("a",), [[torch.ones(2, 2), torch.ones(4)]], SPECS, "push")


@pytest.mark.parametrize("on_device", [False, True])
def test_a_sum_over_devices_rounds_once(on_device):
    values = [torch.tensor([2048.0]).half()] + [torch.tensor([1.0]).half()] * 2
    assert reduce(list(values), on_device).item() == 2050
    assert [value.item() for value in values] == [2048, 1, 1]


def test_a_row_is_a_view_where_it_can_be():
    value = torch.arange(4.0).view(2, 2)
    (row,) = rows_of([[value]], on_device=False)
    assert row.data_ptr() == value.data_ptr()
    (row,) = rows_of([[value.T]], on_device=False)
    assert row.tolist() == [[0, 2], [1, 3]]
    assert row.is_contiguous()


def test_sinks_write_where_they_can_and_copy_where_they_must():
    direct, strided, array = torch.zeros(2, 2), torch.zeros(2, 2).T, np.zeros((2, 2), np.float32)
    sinks, result = outcome_for(("a",), False, [strided, direct, array], SPECS)
    sinks[0].copy_(torch.arange(4.0).view(2, 2))
    assert direct.tolist() == [[0, 1], [2, 3]]
    result(None)
    assert strided.tolist() == array.tolist() == [[0, 1], [2, 3]]


def test_sinks_of_new_tensors():
    sinks, result = outcome_for(("a", "b"), True, None, SPECS)
    for row in sinks:
        row.fill_(1)
    a, b = result(None)
    assert (a.shape, a.dtype, b.dtype) == ((2, 2), torch.float32, torch.float16)


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
        sinks, _ = outcome_for(("a",), False, None, SPECS)
        assert not sinks[0].is_inference()
        out = torch.zeros(2, 2)
        assert KeyList(("a",), False, SPECS).rows(out, as_sinks=True) is None
        sinks, result = outcome_for(("a",), False, out, SPECS)
        sinks[0].fill_(3)
        result(None)
    assert not sinks[0].is_inference()
    assert out.tolist() == [[3, 3], [3, 3]]


def test_dense_values_are_plain_tensors() -> None:
    dense, sparse = torch.zeros(2, 3), torch.eye(2, 3).to_sparse()
    assert are_dense([dense, torch.nn.Parameter(dense)])
    assert not are_dense([dense, sparse])
    assert not are_dense([dense, np.zeros(3)])
    assert not are_dense("no list")
