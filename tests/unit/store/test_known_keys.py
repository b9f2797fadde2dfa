"""The keys that a store knows, and what it remembers of lists of keys."""

from __future__ import annotations

import pytest
import torch

from kvps.dtypes import Spec
from kvps.errors import ConfigError, KeyNotFound
from kvps.store import known_keys
from kvps.store.known_keys import KnownKeys

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


def test_lists_are_remembered_up_to_a_number(
    keys: KnownKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known_keys, "LISTS_MAX", 1)
    for names in (["a", 3], ["t"], ["a", 3]):
        assert keys.names_of(names) == (tuple(map(str, names)), True)
        keys.form(tuple(map(str, names)))
    assert keys.names_of("a") == (("a",), False)
    with pytest.raises(ConfigError, match="given twice"):
        keys.names_of(["a", "a"])


def test_rows_are_told_from_plain_values(keys: KnownKeys) -> None:
    plain, sparse = torch.zeros(2, 3), torch.eye(2, 3).to_sparse()
    assert not keys.have_rows(("a", "t"), True, [torch.zeros(3), plain])
    assert keys.have_rows(("a", "t"), True, [torch.zeros(3), sparse])
    assert keys.have_rows(("t",), False, ([0], torch.ones(1, 3)))
    assert not keys.have_rows(("a",), True, "no list")
