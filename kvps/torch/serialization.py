"""Serialization of Python objects: data only, by msgpack, never code.

What msgpack has no type for travels as an extension: tuples, sets, complex and large numbers, tensors and
arrays. Anything else is refused with its type and its place in the object, since pickle, which could, runs
what it is told to when it is read.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np
import torch

from kvps.errors import ConfigError, ProtocolError
from kvps.net.memory import memory_bytes

DEPTH_MAX = 100
TUPLE, SET, FROZENSET, DICT, ORDERED, INT, COMPLEX, TENSOR, ARRAY, SCALAR, ASIDE = range(1, 12)
"""Numbers of the extensions."""
_PLAIN = (type(None), bool, float, str, bytes)
_KINDS = "biufcSUmM"
"""Kinds of numpy's element types that hold no references."""
_DAMAGE = (ValueError, TypeError, RuntimeError, KeyError, AttributeError, MemoryError, OverflowError)
"""Errors that bytes lead to that were not packed here."""


def pack(obj: object, aside: list[torch.Tensor] | None = None) -> bytes:
    """Return ``obj`` as bytes.

    Args:
        obj: None, bool, int, float, complex, str, bytes, tensor, array, and list, tuple, dict, set,
            frozenset of those.
        aside: gets the tensors, of which only type and shape are packed then; None to pack them whole.

    Raises:
        ConfigError: for anything else, naming its type and place.
    """
    return Packer(aside).pack(obj)


def unpack(packed: bytes, aside: list[torch.Tensor] | None = None) -> Any:
    """Return the object that :func:`pack` made bytes of; tensors are on the CPU.

    Args:
        packed: the bytes.
        aside: gets a blank tensor for each one that was put aside, in the same order; these are
            also in the object, and are to be filled.

    Raises:
        ProtocolError: if ``packed`` was not made by :func:`pack`.

    Example:
        >>> unpack(pack({"rates": (0.1, 2**70), 3: None}))
        {'rates': (0.1, 1180591620717411303424), 3: None}
    """
    return Unpacker(aside).unpack(packed)


class Packer:
    """The packing of one object. A subclass packs further types by :meth:`extra`."""

    def __init__(self, aside: list[torch.Tensor] | None = None) -> None:
        self._aside = aside

    def pack(self, obj: object) -> bytes:
        """Return ``obj`` as bytes; see :func:`pack`."""
        return _packed(self._plain(obj, "obj", 0))

    def extra(self, obj: Any) -> tuple[int, object] | None:
        """Return the number of an extension, and its packed content; None for no extension."""
        return None

    def _plain(self, obj: object, at: str, depth: int) -> object:
        """Return ``obj`` as types of msgpack, and extensions."""
        if depth > DEPTH_MAX:
            raise ConfigError(
                f"{at[:60]}...: nested deeper than {DEPTH_MAX}, or an object that contains itself"
            )
        kind = type(obj)
        if kind in _PLAIN:
            return obj

        def inner(value: object, place: str) -> object:
            return self._plain(value, at + place, depth + 1)

        if (found := self.extra(obj)) is not None:
            return msgpack.ExtType(found[0], _packed(inner(found[1], "")))
        if isinstance(obj, int) and kind is int:
            if -(2**63) <= obj < 2**64:
                return obj
            return msgpack.ExtType(INT, obj.to_bytes(obj.bit_length() // 8 + 1, "little", signed=True))
        if isinstance(obj, complex) and kind is complex:
            return msgpack.ExtType(COMPLEX, _packed([obj.real, obj.imag]))
        if isinstance(obj, list | tuple) and kind in (list, tuple, torch.Size):
            some = [inner(element, f"[{index}]") for index, element in enumerate(obj)]
            return some if kind is list else msgpack.ExtType(TUPLE, _packed(some))
        if isinstance(obj, set | frozenset) and kind in (set, frozenset):
            some = [inner(element, "{...}") for element in obj]
            return msgpack.ExtType(SET if kind is set else FROZENSET, _packed(some))
        if isinstance(obj, dict) and kind in (dict, OrderedDict):
            pairs = [
                (inner(key, f" key {key!r:.40}"), inner(element, f"[{key!r:.40}]"))
                for key, element in obj.items()
            ]
            if kind is dict and all(type(key) in (str, int, bool, float) for key, _ in pairs):
                return dict(pairs)
            return msgpack.ExtType(DICT if kind is dict else ORDERED, _packed(pairs))
        if isinstance(obj, torch.Tensor):
            return self._tensor(obj, at)
        if isinstance(obj, np.ndarray | np.generic):
            array = np.asarray(obj)
            if array.dtype.kind not in _KINDS or array.dtype.fields is not None:
                raise ConfigError(
                    f"{at} is an array of {array.dtype}, which is neither a plain number nor text"
                )
            head = [array.dtype.str, list(array.shape), array.tobytes()]
            return msgpack.ExtType(SCALAR if isinstance(obj, np.generic) else ARRAY, _packed(head))
        raise ConfigError(
            f"{at} is a {kind.__module__}.{kind.__qualname__}, but only data can be sent, never code: use "
            "None, bool, int, float, complex, str, bytes, tensors, arrays, and list, tuple, dict, set of "
            "these"
        )

    def _tensor(self, tensor: torch.Tensor, at: str) -> object:
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
            raise ConfigError(f"{at} is a tensor of {tensor.layout}, {tensor.dtype}; send a dense tensor")
        head = [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
        if self._aside is not None:
            self._aside.append(tensor)
            return msgpack.ExtType(ASIDE, _packed(head))
        return msgpack.ExtType(TENSOR, _packed([*head, bits(tensor).cpu().numpy().tobytes()]))


class Unpacker:
    """The reading of one packed object. A subclass reads further extensions by :meth:`extra`."""

    def __init__(self, aside: list[torch.Tensor] | None = None) -> None:
        self._aside = aside
        self._room = 0 if aside is None else memory_bytes()
        self._depth = 0

    def unpack(self, packed: bytes) -> Any:
        """Return the object; see :func:`unpack`."""
        try:
            return self._read(packed)
        except (*_DAMAGE, msgpack.UnpackException) as e:
            raise ProtocolError(f"an object of {len(packed)} bytes cannot be read: {e}") from e

    def extra(self, code: int, inner: Any) -> Any:
        """Return what an extension of a subclass of :class:`Packer` has packed.

        Raises:
            ValueError: if there is no extension of this number.
        """
        raise ValueError(f"extension {code}")

    def _read(self, some: bytes) -> Any:
        self._depth += 1  # each level has a reader of its own, and tens of KiB on the stack
        if self._depth > DEPTH_MAX + 2:  # the object itself, and the numbers of a tensor at its end
            raise ValueError(f"it is nested deeper than {DEPTH_MAX}")
        found = msgpack.unpackb(some, ext_hook=self._extension, strict_map_key=False)
        self._depth -= 1
        return found

    def _extension(self, code: int, given: bytes) -> Any:
        if code == INT:
            return int.from_bytes(given, "little", signed=True)
        inner = self._read(given)
        if code == ASIDE and self._aside is not None:
            self._aside.append(self._blank(*inner))
            return self._aside[-1]
        return _MADE[code](inner) if code in _MADE else self.extra(code, inner)

    def _blank(self, name: str, shape: list[int]) -> torch.Tensor:
        if not all(type(dim) is int and dim >= 0 for dim in shape):
            raise ValueError(f"shape {shape!r:.60}")
        self._room -= math.prod(shape) * _dtype(name).itemsize  # before anything is allocated
        if self._room < 0:
            raise ValueError(f"tensors of more bytes than this machine has, as of shape {shape!r:.60}")
        return torch.empty(shape, dtype=_dtype(name), device="cpu")


def _packed(plain: object) -> bytes:
    packed: bytes = msgpack.packb(plain)
    return packed


def _array(head: Any) -> Any:
    name, shape, row = head
    return np.frombuffer(bytearray(row), np.dtype(name)).reshape(shape)


def tensor_of(head: Any) -> torch.Tensor:
    """Return the tensor of an element type's name, a shape, and bytes."""
    name, shape, row = head
    return torch.from_numpy(np.frombuffer(bytearray(row), np.uint8)).view(_dtype(name)).view(shape)


_MADE: dict[int, Callable[[Any], Any]] = {
    **{TUPLE: tuple, SET: set, FROZENSET: frozenset, DICT: dict, ORDERED: OrderedDict},
    **{COMPLEX: lambda parts: complex(*parts), TENSOR: tensor_of, ARRAY: _array},
    SCALAR: lambda head: _array(head)[()],
}
"""Extension -> the function that makes an object of its packed content."""


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor as a flat tensor on its device; a copy if it is not contiguous."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"element type {name!r:.40}")
    return found
