"""Compression where nothing travels: gradients become what servers would decode.

So a training within one process makes the steps that it would make over servers.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kvps.compression.codecs import decode, encode
from kvps.compression.policy import KeyCompression
from kvps.compression.spec import seeded
from kvps.tensors import Array, as_tensor


class LocalCoding:
    """Error feedback of a local store: the residuals that compression has left so far."""

    def __init__(self) -> None:
        self._residuals: dict[str, torch.Tensor] = {}
        """Key, or ``key@device`` -> flat residual."""

    def residuals(self) -> dict[str, torch.Tensor]:
        """Return copies of all residuals, on the CPU."""
        return {title: row.to("cpu", copy=True) for title, row in self._residuals.items()}

    def put(self, residuals: Mapping[str, torch.Tensor]) -> None:
        """Go on with what :meth:`residuals` gave."""
        self._residuals = {title: row.clone() for title, row in residuals.items()}

    def decoded(
        self, name: str, setting: KeyCompression, version: int, devices: list[Array]
    ) -> list[Array]:
        """Encode one key's values, one per device, and return them decoded.

        Values that are not finite come back as they are; ``on_nonfinite`` decides about those.
        """
        code = seeded(setting.code, version)
        results: list[Array] = []
        for index, value in enumerate(devices):
            tensor = as_tensor(value)
            flat = tensor.contiguous().view(-1)
            if not torch.isfinite(flat.sum()):
                results.append(value)
                continue
            title = f"{name}@{index}" if index else name
            residual = self._residuals.get(title)
            if residual is None or len(residual) != len(flat):  # a broadcast may change its shape
                residual = torch.zeros_like(flat)
            residual = self._residuals[title] = residual.to(flat.device)
            encoded = encode(code, residual, flat)
            results.append(decode(code, encoded, torch.empty_like(flat)).view(tensor.shape))
        return results
