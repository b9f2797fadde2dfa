"""Flat buckets: a list of keys flattened for a collective, and back.

A collective costs about as much for 4 bytes as for 100 KB, so small tensors go side by side. All keys of
a bucket have one element type, and add up in :attr:`Bucket.carrier`: float32 for half types, so that a
sum is rounded once. Buckets follow from the list of keys alone, so all ranks make the same ones, and a
digest of that list tells whether they do.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvps.dtypes import Spec, summed_in
from kvps.phrases import some_of
from kvps.tensors import TORCH

KEYS_SHOWN = 3
"""Keys of a call that a text names."""
BUCKET_BYTES = 25 << 20
"""Bytes of a bucket, as in DistributedDataParallel; a larger tensor has one of its own."""
_CARRIERS = {"int16": "int32"}
"""Types that gloo and NCCL do not add; the sum is cut back to the type, as if it had wrapped."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Keys that are summed in one collective."""

    dtype: torch.dtype
    carrier: torch.dtype
    """The type in which they are added."""
    indices: tuple[int, ...]
    """The places of the keys in the list."""
    shapes: tuple[tuple[int, ...], ...]
    sizes: tuple[int, ...]
    """Their numbers of elements."""

    def filled(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return a new flat tensor with the values of this bucket's keys, ready to be summed.

        Args:
            rows: of all keys of the list, on one device, of any strides.
        """
        return torch.cat([rows[index].reshape(-1) for index in self.indices]).to(self.carrier)

    def blank(self) -> torch.Tensor:
        """Return a flat tensor of that size on the CPU, contents undefined, uncarried."""
        return torch.empty(sum(self.sizes), dtype=self.dtype, device="cpu")

    def parts(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the keys' values in a flat tensor, in their shapes; copied only to change type."""
        pieces = torch.split(flat.to(self.dtype), list(self.sizes))
        return [piece.view(shape) for piece, shape in zip(pieces, self.shapes, strict=True)]


class BucketPlan:
    """A call with a list of keys: its buckets, and the digest by which other ranks know it."""

    def __init__(self, verb: str, keys: Sequence[tuple[str, Spec]], device: str) -> None:
        self.buckets: tuple[Bucket, ...] = buckets_of([spec for _, spec in keys])
        said = "\0".join(f"{name}\0{spec}" for name, spec in keys)
        self.digest = hashlib.blake2b(f"{verb}\0{device}\0{said}".encode(), digest_size=16).digest()
        shown = some_of([f"{name!r} {spec}" for name, spec in keys], KEYS_SHOWN, "keys")
        self.words = f"{verb}({shown}{'' if device == 'cpu' else ' on ' + device})"

    def rows(self, flats: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the value of each key, in the order of the list."""
        by_index: dict[int, torch.Tensor] = {}
        for bucket, flat in zip(self.buckets, flats, strict=True):
            by_index.update(zip(bucket.indices, bucket.parts(flat), strict=True))
        return [by_index[index] for index in range(len(by_index))]


def buckets_of(specs: Sequence[Spec], limit_bytes: int = BUCKET_BYTES) -> tuple[Bucket, ...]:
    """Return the buckets for keys with these types and shapes, in the order of their first keys.

    Example:
        >>> one, half = Spec("float32", (3,)), Spec("float16", (2, 2))
        >>> [(bucket.indices, bucket.carrier) for bucket in buckets_of([one, half, one])]
        [((0, 2), torch.float32), ((1,), torch.float32)]
    """
    groups: list[list[int]] = []
    latest: dict[str, tuple[list[int], int]] = {}
    for index, spec in enumerate(specs):
        size = spec.count * TORCH[_carrier(spec.dtype)].itemsize
        known = latest.get(spec.dtype)
        if known is None or known[1] + size > limit_bytes:
            known = [], 0
            groups.append(known[0])
        group, used = known
        group.append(index)
        latest[spec.dtype] = (group, used + size)
    return tuple(_bucket(group, specs) for group in groups)


def _bucket(indices: list[int], specs: Sequence[Spec]) -> Bucket:
    dtype = specs[indices[0]].dtype
    shapes = tuple(specs[index].shape for index in indices)
    sizes = tuple(specs[index].count for index in indices)
    return Bucket(TORCH[dtype], TORCH[_carrier(dtype)], tuple(indices), shapes, sizes)


def _carrier(dtype: str) -> str:
    return _CARRIERS.get(dtype) or summed_in(dtype)
