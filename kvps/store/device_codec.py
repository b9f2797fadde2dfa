"""Compression where nothing travels: the values of each device become what a server would decode.

MXNet compresses between the devices of one process, each with a residual of its own; so does a
``local`` or ``device`` store. With one device it makes the steps that it would make over servers.
"""

from __future__ import annotations

from collections import Counter

import torch

from kvps.compression.codecs import decode, encode
from kvps.compression.policy import KeyCompression
from kvps.compression.spec import seeded
from kvps.core.worker import calls
from kvps.runtime.ticket import Ticket, finished
from kvps.tensors import Array, as_tensor

ANSWERED = frozenset({calls.Compress, calls.SaveResiduals, calls.LoadResiduals})
"""The calls that a codec answers in place of servers."""


class DeviceCodec:
    """The residuals of one store."""

    def __init__(self) -> None:
        self._residuals: dict[str, torch.Tensor] = {}
        """Key, or ``key@device`` -> flat residual."""
        self._pushes: Counter[str] = Counter()

    def answer(self, call: calls.Call) -> Ticket:
        """Answer a call about compression: one of :data:`ANSWERED`."""
        if isinstance(call, calls.SaveResiduals):
            return finished({title: row.to("cpu", copy=True) for title, row in self._residuals.items()})
        if isinstance(call, calls.LoadResiduals):
            self._residuals = {title: row.clone() for title, row in call.residuals.items()}
        return finished()

    @torch.no_grad()
    def decoded(self, name: str, setting: KeyCompression, devices: list[Array]) -> list[Array]:
        """Encode one key's values, one per device, and return them decoded.

        Values that are not finite come back as they are; ``on_nonfinite`` decides about those.
        """
        code = seeded(setting.code, self._pushes[name])
        self._pushes[name] += 1
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
            if setting.decay != 1:
                residual.mul_(setting.decay)
            encoded = encode(code, residual, flat)
            results.append(decode(code, encoded, torch.empty_like(flat)).view(tensor.shape))
        return results
