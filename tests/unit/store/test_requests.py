"""A user's arguments, made into calls without a store that starts them."""

import pytest
import torch

from kvps.core.worker import calls
from kvps.core.worker.calls import Fresh
from kvps.errors import ConfigError, Mismatch
from kvps.store.key_list import KeyLists
from kvps.store.requests import Requests

KEYS = ("w", "table")


@pytest.fixture
def keys() -> KeyLists:
    return KeyLists()


def requests(keys: KeyLists, knows_changes: bool = False) -> Requests:
    made = Requests("ours", keys, False, knows_changes)
    call = made.init(["w", "table"], [torch.zeros(2), torch.zeros(3, 2)])
    keys.declare(call.keys)
    return made


def test_whole_values_are_pushed_and_pulled_in_one_call(keys: KeyLists) -> None:
    values = [torch.ones(2), torch.ones(3, 2)]
    request = requests(keys).pushpull(keys.of(KEYS), values, None, True, (3, 1), 1.0, 2.0)
    call = request.call
    assert isinstance(call, calls.PushValues)
    assert list(request.before) == []
    assert [row.tolist() for row in call.rows] == [[2.0, 2.0], [[2.0, 2.0]] * 3]
    assert (call.store, call.keys, call.priority, call.weight) == ("ours", KEYS, (3, 1), 2.0)
    assert isinstance(call.sinks, tuple)
    assert request.result(None) == list(call.sinks)


def test_rows_are_pushed_before_whole_keys_are_pulled(keys: KeyLists) -> None:
    values = [torch.ones(2), ([2, 0, 2], torch.ones(3, 2))]
    request = requests(keys).pushpull(keys.of(KEYS), values, None, True, (3, 1), 1.0, 1.0)
    dense, rows = request.before
    assert isinstance(request.call, calls.PullValues)
    assert request.call.keys == KEYS
    assert isinstance(dense, calls.PushValues)
    assert (dense.keys, dense.priority, dense.sinks) == (("w",), 3, None)
    assert isinstance(rows, calls.PushKeyRows)
    assert (rows.keys, rows.priority) == (("table",), 1)
    assert rows.rows[0].tolist() == [0, 2]


def test_values_that_are_also_outputs_are_written_in_place(keys: KeyLists) -> None:
    values = [torch.randn(2), torch.randn(3, 2)]
    request = requests(keys).pushpull(keys.of(KEYS), values, values, True, 0, 1.0, 1.0)
    assert isinstance(request.call, calls.PushValues)
    assert request.call.rows == request.call.sinks == tuple(values)
    assert request.result(None) is values


def test_weighted_values_that_are_also_outputs_are_pushed_from_copies(keys: KeyLists) -> None:
    values = [torch.randn(2), torch.randn(3, 2)]
    request = requests(keys).pushpull(keys.of(KEYS), values, values, True, 0, 1.0, 2.0)
    assert isinstance(request.call, calls.PushValues)
    assert request.call.sinks == tuple(values)
    assert [row.tolist() for row in request.call.rows] == [(2 * value).tolist() for value in values]


def test_inference_tensor_that_is_also_an_output_is_written_by_its_owner(keys: KeyLists) -> None:
    with torch.inference_mode():
        value = torch.randn(2)
        request = requests(keys).pushpull(keys.of("w"), value, value, True, 0, 1.0, 1.0)
        assert isinstance(request.call, calls.PushValues)
        assert request.call.rows == (value,)
        assert isinstance(request.call.sinks, tuple)
        assert not request.call.sinks[0].is_inference()
        request.call.sinks[0].fill_(7.0)
        assert request.result(None) is value
    assert value.tolist() == [7.0, 7.0]


def test_rows_have_no_weight(keys: KeyLists) -> None:
    pushes = requests(keys).pushes(keys.of("table"), ([0], torch.ones(1, 2)), 0, True, 1.0, 2.0)
    with pytest.raises(ConfigError, match=r"weight=2\.0 with rows"):
        list(pushes)


def test_no_call_is_made_of_a_value_that_does_not_fit(keys: KeyLists) -> None:
    with pytest.raises(Mismatch, match="key 'w'"):
        requests(keys).pushpull(keys.of("w"), torch.ones(3), None, True, 0, 1.0, 1.0)
    with pytest.raises(ConfigError, match="remove out="):
        requests(keys).pull(keys.of("w"), torch.ones(2), False, 0, 0)


@pytest.mark.parametrize("knows_changes", [False, True])
def test_where_changes_are_not_known_all_rows_are_pulled(keys: KeyLists, knows_changes: bool) -> None:
    request = requests(keys, knows_changes).pull_changed(keys.of("table"), None, 0)
    if knows_changes:
        assert isinstance(request.call, calls.Refresh)
        found = request.result([Fresh(None, whole=torch.ones(3, 2))])
    else:
        assert isinstance(request.call, calls.PullValues)
        assert isinstance(request.call.sinks, tuple)
        request.call.sinks[0].fill_(1.0)
        found = request.result(None)
    assert found.row_ids.tolist() == [0, 1, 2]
    assert found.rows.tolist() == [[1.0, 1.0]] * 3
