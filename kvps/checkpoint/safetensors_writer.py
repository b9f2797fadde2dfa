"""Safetensors files written as streams, from the tensors' own memory, without a copy of the model.

The format: 8 bytes with the length of the header, little-endian; the header, JSON; the tensors,
without gaps. A tensor of the file, a :class:`Column`, may be put together from many in memory.
Tensors of wide elements come first, so that each begins at a multiple of its element size.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from kvps.checkpoint.atomic_file import HashedFile
from kvps.core.embedding.stored import StoredRows, loaded
from kvps.dtypes import BY_NAME
from kvps.errors import StorageError
from kvps.tensors import to_frame

HEADER_MAX = 100_000_000
"""Size in bytes of the longest header that safetensors reads."""
JOIN_BYTES = 1 << 20
"""Smaller tensors are put side by side before they are written: a call for each would be slow."""

TITLES = {
    **{"float32": "F32", "float64": "F64", "float16": "F16", "bfloat16": "BF16", "int8": "I8"},
    **{"int16": "I16", "int32": "I32", "int64": "I64", "uint8": "U8"},
    "bool": "BOOL",
}
"""Element type, as in :data:`kvps.dtypes.DTYPES`, or truth values -> its name in safetensors."""
ITEM_BYTES = {name: row.itemsize for name, row in BY_NAME.items()} | {"bool": 1}


@dataclass(slots=True)
class Column:
    """One tensor of the file: its element type, and the flat tensors of one device that make it."""

    dtype: str
    parts: list[torch.Tensor | StoredRows] = field(default_factory=list)
    shape: tuple[int, ...] | None = None
    """None for a flat one."""

    @property
    def count(self) -> int:
        """Number of elements."""
        return sum([part.numel() for part in self.parts])


@dataclass(frozen=True, slots=True)
class Stream:
    """A file that is ready to be written."""

    head: bytes
    columns: tuple[Column, ...]
    size: int
    """Size of the whole file in bytes."""

    def write(self, sink: HashedFile, step: Callable[[int], None] = lambda size: None) -> None:
        """Write the file.

        Args:
            sink: takes the bytes.
            step: called with the number of bytes after each part.

        Raises:
            OSError: if that fails.
        """
        sink.write(self.head)
        step(len(self.head))
        for column in self.columns:
            for tensor in _joined(column.parts):
                sink.write(to_frame(tensor))
                step(tensor.nbytes)


def stream_of(columns: Mapping[str, Column], metadata: Mapping[str, str]) -> Stream:
    """Return the file that holds ``columns`` by their names.

    Raises:
        StorageError: if there are so many that no reader would take the header.
    """
    wide_first = dict(sorted(columns.items(), key=lambda entry: -ITEM_BYTES[entry[1].dtype]))
    head, size = header_of(
        (
            (name, column.dtype, (column.count,) if column.shape is None else column.shape)
            for name, column in wide_first.items()
        ),
        metadata,
    )
    return Stream(head, tuple(wide_first.values()), len(head) + size)


def header_of(
    tensors: Iterable[tuple[str, str, Sequence[int]]], metadata: Mapping[str, str], room: int = 0
) -> tuple[bytes, int]:
    """Return the beginning of a file, and how many bytes of tensors follow it.

    Args:
        tensors: name, element type and shape of each, in the order in which they lie in the file.
        metadata: texts about the file.
        room: pad it to so many bytes; 0 for as few as possible.

    Raises:
        StorageError: if there are so many that no reader would take the header.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, dtype, shape in tensors:
        if name == "__metadata__":
            raise StorageError(
                "a safetensors file can have no tensor of the name '__metadata__': give it another"
            )
        end = offset + math.prod(shape) * ITEM_BYTES[dtype]
        header[name] = {"dtype": TITLES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    octets = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    octets += b" " * max(-len(octets) % 8, room - 8 - len(octets))  # so that tensors begin aligned
    if len(octets) > HEADER_MAX:
        raise StorageError(
            f"the header would have {len(octets)} octets, and safetensors reads {HEADER_MAX}: "
            "there are too many keys, or their names are too long; use more servers"
        )
    return len(octets).to_bytes(8, "little") + octets, offset


def _joined(parts: Sequence[torch.Tensor | StoredRows]) -> Iterator[torch.Tensor]:
    """Yield the same elements in fewer tensors, contiguous ones in this machine's memory."""
    few: list[torch.Tensor] = []
    size = 0
    for part in parts:
        few.append(loaded(part))
        size += part.numel() * part.element_size()
        if size >= JOIN_BYTES:
            *small, last = few
            if last.numel() * last.element_size() < JOIN_BYTES:
                yield _as_one(few)
            else:
                if small:
                    yield _as_one(small)
                yield last.detach().cpu().contiguous()
            few, size = [], 0
    if size:
        yield _as_one(few)


@torch.no_grad()
def _as_one(few: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(few).cpu()
