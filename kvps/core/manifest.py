"""The manifest of a published version: the name, type and shape of each tensor, and where its bytes lie.

It is JSON: ``[[name, type, shape, [[server, block, start, size, offset], ...]], ...]``, in bytes as they are
read. The row of a tensor of truth values, which are bytes, ends with ``true``. The worker that publishes
writes it, server 0 keeps it, and readers read it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import NamedTuple

from kvps.dtypes import BY_NAME, Spec
from kvps.errors import KvpsError, ProtocolError


class Extent(NamedTuple):
    """Neighbouring bytes of a tensor, and the block that has them."""

    server: int
    block: int
    start: int
    """Where they begin in the block."""
    size: int
    offset: int
    """Where they begin in the tensor."""


class Published(NamedTuple):
    """One tensor of a version."""

    name: str
    spec: Spec
    extents: tuple[Extent, ...]
    is_bool: bool = False
    """Its bytes are truth values."""

    @property
    def size(self) -> int:
        """Its bytes."""
        return self.spec.count * BY_NAME[self.spec.dtype].itemsize


def encode(tensors: Iterable[Published]) -> bytes:
    """Return the bytes of a manifest."""
    rows = [
        (name, spec.dtype, spec.shape, extents, *[True] * is_bool) for name, spec, extents, is_bool in tensors
    ]
    return json.dumps(rows, separators=(",", ":")).encode()


def decode(octets: bytes) -> list[Published]:
    """Return the tensors of a manifest.

    Raises:
        ProtocolError: if it is none, or the extents of a tensor are not exactly its bytes.
    """
    try:
        rows = json.loads(octets)
        tensors = [_published(*row) for row in rows]
        if len({tensor.name for tensor in tensors}) < len(tensors):
            raise ProtocolError("a manifest names a tensor twice")
    except KvpsError as error:
        raise ProtocolError(str(error)) from error
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ProtocolError(f"a version has no readable manifest: {error!r:.200}") from error
    return tensors


def _published(
    name: str, dtype: str, shape: list[int], extents: list[list[int]], is_bool: object = False
) -> Published:
    numbers = [*shape, *[number for extent in extents for number in extent]]
    if type(name) is not str or any(type(number) is not int or not 0 <= number < 2**63 for number in numbers):
        raise ProtocolError("a manifest has a name that is no text, or a number that is no size")
    if not isinstance(is_bool, bool) or (is_bool and dtype != "uint8"):
        raise ProtocolError(f"the truth values of {name!r:.80} in a manifest are no bytes")
    tensor = Published(
        name, Spec(dtype, tuple(shape)), tuple([Extent(*extent) for extent in extents]), is_bool
    )
    end = 0
    for extent in sorted(tensor.extents, key=lambda extent: extent.offset):
        if extent.offset != end:
            break
        end += extent.size
    if end != tensor.size:
        raise ProtocolError(f"the parts of {name!r:.80} in a manifest are not the whole tensor")
    return tensor
