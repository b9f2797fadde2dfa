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
    publish,
    refresh,
    resume,
    rows,
)
from kvps.dtypes import Spec
from kvps.errors import ConfigError, KvpsError, ProtocolError, from_code
from kvps.protocol import envelope
from kvps.tensors import NAMES
from kvps.torch.serialization import Packer, Unpacker, bits, tensor_of

_MODULES: tuple[ModuleType, ...] = (
    *(protocol, envelope, policy, spec, embedding_spec, hyperparams, model, storage, plan),
    *(base, checkpoint, collective, dense, embeddings, keys, optimizer, publish, refresh, resume, rows),
)
ENUM, RECORD, ERROR, RANGE, KEPT, AGAIN, THING = range(32, 39)
"""Numbers of the extensions, beside those of objects that are data (:mod:`kvps.torch.serialization`)."""


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


_MADE: dict[int, Callable[[Any], Any]] = {
    ENUM: lambda head: CLASSES[head[0]][head[1]],  # type: ignore[index]  # an Enum
    RECORD: lambda head: CLASSES[head[0]](*head[1]),
    **{ERROR: lambda head: from_code(*head), RANGE: lambda head: range(*head)},
}
"""Extension -> the function that makes an object of its packed content."""


class Encoder(Packer):
    """Makes bytes of the arguments of one call.

    A tensor that occurs twice, such as a gradient that is also the place of its sum, is written
    once.

    Args:
        place: where an object stands among what the replayed core has asked for; None if it has not.
    """

    def __init__(self, place: Callable[[object], int | None] = lambda _: None) -> None:
        super().__init__()
        self._place = place
        self._seen: dict[tuple[int, tuple[int, ...], torch.dtype], int] = {}

    def extra(self, obj: Any) -> tuple[int, object] | None:
        """Return the extension of an object that only records have, and its packed content."""
        place = self._place(obj)
        if place is not None:
            return THING, place
        match obj:
            case enum.Enum():
                return ENUM, (self._name(obj), obj.name)
            case torch.Tensor():
                return self._kept(obj)
            case KvpsError():
                return ERROR, (obj.code, str(obj))
            case range():
                return RANGE, (obj.start, obj.stop, obj.step)
            case tuple() if hasattr(obj, "_fields"):
                return RECORD, (self._name(obj), tuple(obj))
        if not dataclasses.is_dataclass(obj):
            return None
        fields = [getattr(obj, field.name) for field in dataclasses.fields(obj) if field.init]
        return RECORD, (self._name(obj), fields)

    def _name(self, obj: object) -> str:
        if type(obj) not in _NAMES:
            raise ConfigError(f"a record has no {type(obj).__qualname__}")
        return _NAMES[type(obj)]

    def _kept(self, value: torch.Tensor) -> tuple[int, object]:
        if value.dtype not in NAMES or value.layout is not torch.strided:
            raise ConfigError(f"a record has no tensor of type {value.dtype}")
        identity = value.data_ptr(), tuple(value.shape), value.dtype
        if value.numel() and identity in self._seen:
            return AGAIN, self._seen[identity]
        self._seen[identity] = number = len(self._seen)
        return KEPT, (number, NAMES[value.dtype], list(value.shape), bits(value.cpu()).numpy().tobytes())


class Decoder(Unpacker):
    """Makes the arguments of one call of bytes.

    Args:
        thing: returns what the replayed core has asked for, by its place.
    """

    def __init__(self, thing: Callable[[int], object] = lambda _: None) -> None:
        super().__init__()
        self._thing = thing
        self._tensors: dict[int, torch.Tensor] = {}

    def loads(self, octets: bytes) -> Any:
        """Return the value that ``octets`` are of.

        Raises:
            ConfigError: if they are no value that :class:`Encoder` has written.
        """
        try:
            return self.unpack(octets)
        except (ProtocolError, LookupError) as error:
            raise ConfigError(f"a value of this record is damaged: {error!r:.200}") from error

    def extra(self, code: int, inner: Any) -> Any:
        """Return what an extension of a record has packed."""
        if code == KEPT:
            number, *head = inner
            return self._tensors.setdefault(number, tensor_of(head))
        if code == AGAIN:
            return self._tensors[inner]
        if code == THING:
            return self._thing(inner)
        return _MADE[code](inner) if code in _MADE else super().extra(code, inner)


def dumps(place: Callable[[object], int | None], value: object) -> bytes | None:
    """Return a value as bytes; None if it holds what no record has."""
    try:
        return Encoder(place).pack(value)
    except ConfigError:
        return None
