"""Compression where nothing travels: gradients become what servers would decode.

So a training within one process makes the steps that it would make over servers.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kvps.compression.codecs import decode, encode
from kvps.compression.policy import KeyCompression
from kvps.compression.spec import RANDOMK, seeded
from kvps.tensors import Array, as_tensor


class LocalCoding:
    """What compression left out of the gradients of a store so far."""

    def __init__(self) -> None:
        self._rests: dict[str, torch.Tensor] = {}
        """By key and device."""

    def rests(self) -> dict[str, torch.Tensor]:
        """Return copies of all rests, on the CPU."""
        return {title: rest.to("cpu", copy=True) for title, rest in self._rests.items()}

    def put(self, rests: Mapping[str, torch.Tensor]) -> None:
        """Go on with what :meth:`rests` gave."""
        self._rests = {title: rest.clone() for title, rest in rests.items()}

    def read(
        self, name: str, setting: KeyCompression, version: int, devices: list[Array]
    ) -> list[Array]:
        """Write one key's values, one per device, and return what is read of them.

        Values that are not finite come back as they are: what becomes of those is for ``on_nonfinite``
        to say.
        """
        code = setting.code
        if code.codec == RANDOMK:
            code = seeded(code, version)
        found: list[Array] = []
        for index, value in enumerate(devices):
            tensor = as_tensor(value)
            flat = tensor.contiguous().view(-1)
            if not torch.isfinite(flat.sum()):
                found.append(value)
                continue
            title = f"{name}@{index}" if index else name
            rest = self._rests.get(title)
            if rest is None or len(rest) != len(flat):  # a broadcast may change its shape
                rest = torch.zeros_like(flat)
            rest = self._rests[title] = rest.to(flat.device)
            octets = encode(code, rest, flat)
            found.append(decode(code, octets, torch.empty_like(flat)).view(tensor.shape))
        return found
