"""A record can hold every call of a worker, with every type that a field of a call names."""

import enum
import importlib
import inspect
import pkgutil
import types
import typing
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pytest
import torch

from kvps.core.worker import calls
from kvps.core.worker.calls import Call, EndReplay, Place, TakePlace
from kvps.errors import KvpsError
from kvps.tools.replay.values import CLASSES, Decoder, Encoder

PLAIN = (
    *(type(None), bool, int, float, str, bytes, range, object),
    *(tuple, list, dict, set, frozenset, Sequence, Mapping),
    *(torch.Tensor, np.ndarray, KvpsError),
)
"""Types that a record holds without a number in its table of classes."""


def all_calls() -> list[type[Call]]:
    """Return every concrete call of every module of the package of calls."""
    found = set[type[Call]]()
    for module in pkgutil.iter_modules(calls.__path__, f"{calls.__name__}."):
        for _, cls in inspect.getmembers(importlib.import_module(module.name), inspect.isclass):
            if issubclass(cls, Call) and not inspect.isabstract(cls):
                found.add(cls)
    return sorted(found, key=lambda cls: cls.__qualname__)


def classes_of(hint: object) -> Iterator[type]:
    """Return the classes that a type hint names, and those that the fields of these name."""
    if typing.get_origin(hint) is typing.ClassVar or hint in (Ellipsis, typing.Any):
        return
    elif (origin := typing.get_origin(hint)) is not None:
        if origin is np.ndarray:
            yield origin
            return
        if origin not in (typing.Union, types.UnionType):
            yield origin
        for inner in typing.get_args(hint):
            yield from classes_of(inner)
    else:
        assert isinstance(hint, type), hint
        yield hint
        if hint not in PLAIN and not issubclass(hint, enum.Enum):
            for inner in typing.get_type_hints(hint).values():
                yield from classes_of(inner)


def test_the_walk_finds_the_calls_that_the_package_names() -> None:
    named = {var for var in vars(calls).values() if inspect.isclass(var) and issubclass(var, Call)}
    concrete = {item for item in named if not inspect.isabstract(item)}
    assert {Call, EndReplay} < named
    assert concrete <= set(all_calls())


@pytest.mark.parametrize("call", all_calls(), ids=lambda call: call.__qualname__)
def test_every_call_can_be_written_down(call: type[Call]) -> None:
    missing = {item for item in classes_of(call) if item not in (*PLAIN, *CLASSES.values())}
    assert missing == set()


@pytest.mark.parametrize(
    "value",
    [TakePlace("w", ("a",)), TakePlace("w", ("a",), False), EndReplay("w"), Place(3, 4, True, 1, 2, 0.5)],
    ids=repr,
)
def test_the_calls_of_a_replacement_come_back(value: object) -> None:
    assert Decoder().loads(Encoder().pack(value)) == value
