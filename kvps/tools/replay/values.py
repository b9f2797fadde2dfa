"""Values in records: the arguments of calls and the answers of disks, as msgpack and back.

A class is named by its number of a table that is made from modules of kvps; a record cannot name another one.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import msgpack
import numpy as np
import torch

from kvps import protocol
from kvps.compression import policy, spec
from kvps.core.effects import Exit
from kvps.core.embedding import spec as embedding_spec
from kvps.core.optim import hyperparams
from kvps.core.server.snapshot import model, storage
from kvps.core.worker import plan
from kvps.core.worker.calls import (
    base,
    checkpoint,
    collective,
    dense,
    embeddings,
    keys,
    optimizer,
    refresh,
    resume,
    rows,
)
from kvps.dtypes import Spec
from kvps.errors import ConfigError, KvpsError, from_code
from kvps.protocol import envelope
from kvps.tensors import NAMES, TORCH

_MODULES: tuple[ModuleType, ...] = (
    *(protocol, envelope, policy, spec, embedding_spec, hyperparams, model, storage, plan),
    *(base, checkpoint, collective, dense, embeddings, keys, optimizer, refresh, resume, rows),
)
DEPTH_MAX = 64


class Unrecordable(Exception):
    """A value has something that cannot be written down."""


def _classes() -> dict[str, type]:
    found: dict[str, type] = {}
    for module in _MODULES:
        for name, cls in inspect.getmembers(module, inspect.isclass):
            is_record = dataclasses.is_dataclass(cls) or hasattr(cls, "_fields")
            if is_record or issubclass(cls, enum.Enum):
                found.setdefault(f"{cls.__module__}.{name}", cls)
    for cls in (Spec, Exit):
        found[f"{cls.__module__}.{cls.__name__}"] = cls
    return found


CLASSES = _classes()
"""The classes whose values may stand in a record."""
_NAMES = {cls: name for name, cls in CLASSES.items()}


class Encoder:
    """Writes values; a tensor that occurs twice is written once.

    Args:
        place: returns the number of a thing that the replay will have by itself, such as an order;
            None for no such thing.
    """

    def __init__(self, place: Callable[[object], int | None] = lambda _: None) -> None:
        self._place = place
        self._seen: dict[tuple[int, tuple[int, ...], torch.dtype], int] = {}

    def dumps(self, value: object) -> bytes:
        """Return ``value`` as bytes.

        Raises:
            Unrecordable: if it has something else than data.
        """
        octets: bytes = msgpack.packb(self._plain(value, 0))
        return octets

    def _plain(self, value: Any, depth: int) -> Any:
        if depth > DEPTH_MAX:
            raise Unrecordable("it is nested too deeply")
        if value is None or isinstance(value, bool | bytes):
            return value
        if isinstance(value, enum.Enum):
            return ["e", self._name(type(value)), value.name]
        if isinstance(value, int):
            return ["i", str(value)] if abs(value) >= 2**63 else int(value)
        if isinstance(value, float):
            return float(value)
        if isinstance(value, str):
            return ["s", value]
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, np.ndarray):
            return ["n", value.dtype.str, list(value.shape), value.tobytes()]
        place = self._place(value)
        if place is not None:
            return ["o", place]
        if isinstance(value, KvpsError):
            return ["x", value.code, str(value)]
        return self._nested(value, depth + 1)

    def _nested(self, value: Any, depth: int) -> Any:
        def inner(values: Any) -> list[Any]:
            return [self._plain(element, depth) for element in values]

        if dataclasses.is_dataclass(value):
            fields = [getattr(value, field.name) for field in dataclasses.fields(value) if field.init]
            return ["c", self._name(type(value)), inner(fields)]
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return ["c", self._name(type(value)), inner(value)]
        if isinstance(value, tuple | list):
            return ["t" if isinstance(value, tuple) else "l", inner(value)]
        if isinstance(value, set | frozenset):
            return ["f" if isinstance(value, frozenset) else "S", inner(sorted(value))]
        if isinstance(value, range):
            return ["r", value.start, value.stop, value.step]
        if isinstance(value, dict):
            return ["d", inner(value), inner(value.values())]
        raise Unrecordable(f"a {type(value).__qualname__}")

    def _name(self, cls: type) -> str:
        if cls not in _NAMES:
            raise Unrecordable(f"a {cls.__qualname__}")
        return _NAMES[cls]

    def _tensor(self, value: torch.Tensor) -> Any:
        if value.dtype not in NAMES or value.layout is not torch.strided:
            raise Unrecordable(f"a tensor of type {value.dtype}")
        identity = value.data_ptr(), tuple(value.shape), value.dtype
        if value.numel() and identity in self._seen:
            return ["a", self._seen[identity]]
        self._seen[identity] = len(self._seen)
        flat = value.detach().cpu().contiguous().reshape(-1)
        octets = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        return ["T", self._seen[identity], NAMES[value.dtype], list(value.shape), octets]


class Decoder:
    """Reads what an :class:`Encoder` wrote.

    Args:
        thing: returns what stands for a number that ``place`` gave.
    """

    def __init__(self, thing: Callable[[int], object] = lambda _: None) -> None:
        self._thing = thing
        self._tensors: dict[int, torch.Tensor] = {}

    def loads(self, octets: bytes) -> Any:
        """Return the value.

        Raises:
            ConfigError: if ``octets`` are none.
        """
        try:
            return self._value(msgpack.unpackb(octets, strict_map_key=True))
        except ConfigError:
            raise
        except Exception as error:  # whatever a damaged file may lead to
            raise ConfigError(f"a value of this record is damaged: {error!r:.200}") from error

    def _value(self, plain: Any) -> Any:
        if not isinstance(plain, list):
            return plain
        kind, *rest = plain
        match kind:
            case "s":
                return rest[0]
            case "i":
                return int(rest[0])
            case "T":
                return self._tensor(*rest)
            case "a":
                return self._tensors[rest[0]]
            case "n":
                return np.frombuffer(bytearray(rest[2]), np.dtype(rest[0])).reshape(rest[1])
            case "o":
                return self._thing(rest[0])
            case "x":
                return from_code(rest[0], rest[1])
            case "e":
                return CLASSES[rest[0]][rest[1]]  # type: ignore[index]  # an Enum
            case "c":
                return CLASSES[rest[0]](*self._all(rest[1]))
            case "r":
                return range(*rest)
            case "d":
                return dict(zip(self._all(rest[0]), self._all(rest[1]), strict=True))
            case _:
                return self._several(kind, rest[0])

    def _several(self, kind: str, values: list[Any]) -> Any:
        return {"t": tuple, "l": list, "f": frozenset, "S": set}[kind](self._all(values))

    def _all(self, values: list[Any]) -> list[Any]:
        return [self._value(element) for element in values]

    def _tensor(self, number: int, dtype: str, shape: list[int], octets: bytes) -> torch.Tensor:
        flat = (
            torch.frombuffer(bytearray(octets), dtype=TORCH[dtype])
            if octets
            else torch.empty(0, dtype=TORCH[dtype])
        )
        self._tensors[number] = flat.reshape(shape)
        return self._tensors[number]


def dumps(place: Callable[[object], int | None], value: object) -> bytes | None:
    """Return ``value`` as bytes; None if it has something else than data."""
    try:
        return Encoder(place).dumps(value)
    except Unrecordable:
        return None
