"""Lists of keys: their names, and the values that are taken as they are."""

import gc
import weakref

import numpy as np
import pytest
import torch

from kvps.core.worker.plan import MANY, Placed
from kvps.dtypes import Spec
from kvps.errors import ConfigError, KeyNotFound
from kvps.store import key_list
from kvps.store.key_list import BLOCK, KeyList, KeyLists, names_of

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


def bound(*names):
    return KeyList(names, True, SPECS)


def fitting():
    return [
        torch.zeros(2, 2),
        torch.nn.Parameter(torch.zeros(3, dtype=torch.float16)),
        torch.tensor(7),
        torch.zeros(0, 3),
    ]


def test_plain_tensors_of_the_right_type_and_shape_fit():
    keys, values = bound(*SPECS), fitting()
    assert keys.rows(values) == tuple(values)
    assert keys.rows(tuple(values)) == tuple(values)
    assert keys.rows(values, as_sinks=True) == tuple(values)
    assert bound().rows([]) == ()
    value = torch.zeros(2, 2)
    assert KeyList(("a",), False, SPECS).rows(value) == (value,)


@pytest.mark.parametrize("count", [BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5])
def test_lists_are_looked_at_to_their_end(count: int) -> None:
    shapes = [(2, 2) if index % 2 else (3,) for index in range(count)]
    specs = {str(index): Spec("float32", shape) for index, shape in enumerate(shapes)}
    keys = KeyList(tuple(specs), True, specs)
    values = [torch.zeros(shape) for shape in shapes]
    assert keys.rows(values) is not None
    assert keys.rows(values, as_sinks=True) is not None
    assert keys.rows(values[1:]) is None
    for index in (0, 1, count // 2, count - 2, count - 1):
        changed = list(values)
        changed[index] = torch.zeros(4, 1) if index % 2 else torch.zeros(4)
        assert keys.rows(changed) is None
        with torch.inference_mode():
            changed[index] = torch.zeros(shapes[index])
        assert keys.rows(changed) is not None
        assert keys.rows(changed, as_sinks=True) is None


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
@pytest.mark.parametrize("before", [0, 2])
def test_anything_else_is_looked_at_by_itself(index, value, before):
    """Also after calls with values that are rows."""
    keys, values = bound(*SPECS), fitting()
    for _ in range(before):
        assert keys.rows(fitting()) is not None
    values[index] = value
    assert keys.rows(values) is None


@pytest.mark.parametrize("has_guards", [True, False])
@pytest.mark.parametrize("is_in_inference_mode", [True, False])
def test_sinks_fit_after_others_as_they_do_alone(
    is_in_inference_mode: bool, has_guards: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A guard knows what all of its tensors are, and inference mode hides a part of that."""
    if not has_guards:
        monkeypatch.delattr(torch._C._dynamo.guards, "TensorGuards")
    keys = KeyList(("a",), True, SPECS)
    ordinary = torch.zeros(2, 2)
    with torch.inference_mode():
        inferred = torch.zeros(2, 2)
    weight = torch.nn.Parameter(torch.zeros(2, 2))
    for _ in range(3):
        with torch.inference_mode(is_in_inference_mode):
            for tensor, fits in [
                (ordinary, True),
                (inferred, False),
                (weight, True),
                (torch._neg_view(ordinary), False),
            ]:
                assert (keys.rows([tensor], as_sinks=True) is not None) == fits
                assert keys.rows([tensor]) is not None
        assert keys.rows([ordinary], as_sinks=True) is not None
        assert keys.rows([inferred], as_sinks=True) is None


def test_sinks_of_inference_mode_are_seen_within_an_operator() -> None:
    """Below autograd, torch's guard takes them for the others that it was made of."""
    keys, fits = KeyList(("a",), True, SPECS), []

    @torch.library.custom_op("kvps_tests::judge", mutates_args=("outs",))
    def judge(outs: list[torch.Tensor]) -> None:
        fits.append(keys.rows(list(outs), as_sinks=True) is not None)

    judge([torch.zeros(2, 2)])
    with torch.inference_mode():
        inferred = torch.zeros(2, 2)
    judge([inferred])
    assert fits == [True, False]


def test_a_list_keeps_no_value_alive() -> None:
    keys, value = bound("a"), torch.zeros(2, 2)
    assert keys.rows([value]) is not None
    held = weakref.ref(value)
    del value
    gc.collect()
    assert held() is None


@pytest.mark.parametrize("values", [None, torch.zeros(2, 2), {"a": 1}, [], [torch.zeros(2, 2)] * 2])
def test_no_list_or_another_length_does_not_fit(values):
    assert bound("a").rows(values) is None


# --- the keys that a store knows ------------------------------------------------------------------

VECTOR, TABLE = Spec("float32", (3,)), Spec("float32", (2, 3))


@pytest.fixture
def keys() -> KeyLists:
    known = KeyLists()
    known.declare([("a", VECTOR), ("3", VECTOR), ("t", TABLE)])
    return known


def test_keys_that_are_not_known_are_named(keys: KeyLists) -> None:
    assert keys.of(["a", "x", "t", "y"]).unknown == ("x", "y")
    keys.demand(("a", "t"))
    with pytest.raises(KeyNotFound, match="key 'x' was never initialised"):
        keys.demand(("a", "x", "y"))


def test_a_list_is_bound_once_and_again_when_a_key_becomes_another(keys: KeyLists) -> None:
    bound = keys.of(["a"])
    assert bound is keys.of(("a",))
    assert bound.rows([torch.zeros(3)]) is not None
    keys.declare([("a", TABLE)])
    assert keys.of(["a"]).rows([torch.zeros(3)]) is None
    keys.forget(["a"])
    assert keys.of(["a"]).unknown == ("a",)


def test_a_key_and_a_list_of_it_are_bound_apart(keys: KeyLists) -> None:
    assert keys.of("a") is keys.of("a")
    assert (keys.of("a").is_many, keys.of(["a"]).is_many) == (False, True)
    assert keys.of(3).names == keys.of("3").names == keys.of([3]).names == ("3",)


@pytest.mark.parametrize("key", [True, 1.0, [1.0], [True], [None], {"1": 1}, [["1"]]])
def test_value_equal_to_a_known_key_is_refused(keys: KeyLists, key: object) -> None:
    keys.declare([("1", VECTOR)])
    assert not keys.of(1).unknown
    assert not keys.of([1]).unknown
    with pytest.raises(ConfigError, match="a key is a str or an int"):
        keys.of(key)


def test_a_name_that_is_a_subclass_of_str_is_a_key(keys: KeyLists) -> None:
    class Name(str):
        __slots__ = ()

    assert keys.of([Name("a")]).names == ("a",)


def test_lists_are_remembered_up_to_a_number(keys: KeyLists, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_list, "LISTS_MAX", 1)
    first = keys.of(["a", 3])
    assert keys.of(["a", 3]) is first
    assert keys.of(["t"]).names == ("t",)
    again = keys.of(["a", 3])
    assert again is not first
    assert again.names == ("a", "3")
    with pytest.raises(ConfigError, match="given twice"):
        keys.of(["a", "a"])


class TestPlacedRows:
    """Of many small rows, whose caller waits, the addresses are known."""

    def many(self) -> tuple[KeyList, list[torch.Tensor]]:
        names = tuple(f"k{at}" for at in range(MANY))
        keys = KeyList(names, True, dict.fromkeys(names, Spec("float32", (4,))))
        return keys, [torch.randn(4) for _ in names]

    def test_their_addresses_are_those_of_the_tensors(self) -> None:
        keys, values = self.many()
        for _ in range(2):
            rows = keys.rows(values, is_waited=True)
            assert isinstance(rows, Placed)
            assert rows.starts is not None
            assert rows.starts.tolist() == [value.data_ptr() for value in values]
            assert all(row is value for row, value in zip(rows, values, strict=True))

    def test_sinks_count_as_changed_from_the_check_on(self) -> None:
        keys, sinks = self.many()
        before = [sink._version for sink in sinks]
        assert type(keys.rows(sinks, as_sinks=True, is_waited=True)) is Placed
        assert all(sink._version > version for sink, version in zip(sinks, before, strict=True))

    def test_a_negated_value_is_not_read_by_its_address(self) -> None:
        keys, values = self.many()
        values[3] = torch._neg_view(values[3])
        for _ in range(2):
            assert type(keys.rows(values, is_waited=True)) is tuple
        with torch.inference_mode():
            assert type(keys.rows(values, is_waited=True)) is tuple

    def test_nothing_is_read_by_address_that_no_guard_knows(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delattr(torch._C._dynamo.guards, "TensorGuards")
        keys, values = self.many()
        assert type(keys.rows(values, is_waited=True)) is tuple

    def test_a_caller_that_does_not_wait_may_give_them_other_memory(self) -> None:
        keys, values = self.many()
        assert type(keys.rows(values)) is tuple
