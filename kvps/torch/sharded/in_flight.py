"""The sender of gradients: each is pushed when it is complete, with a bound on those in flight.

A gradient that has left is freed when the store has it. If the network is slower than backward, gradients
would heap up here, as much as the whole model. So at most *limit* bytes are in flight: the next bucket
waits until earlier ones have arrived, in their order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import cast

import torch

from kvps.runtime.ticket import Handle
from kvps.store.server_store import DistStore
from kvps.torch.sync.buckets import BUCKET_BYTES, Buckets


class GradientSender:
    """The gradients of one worker on their way to a store.

    Args:
        kv: the store.
        sizes: size of each gradient in bytes, by name, in the order in which the store has the keys.
        limit_bytes: the most bytes that may be in flight; at least one bucket is.
    """

    def __init__(self, kv: DistStore, sizes: Mapping[str, int], limit_bytes: int) -> None:
        self._kv = kv
        self._sizes = sizes
        self.limit_bytes = limit_bytes
        """The most bytes that may be in flight."""
        self._buckets = Buckets(sizes, min(BUCKET_BYTES, max(1, limit_bytes)))
        self._collected: dict[str, torch.Tensor] = {}
        self._away: deque[tuple[Handle, int]] = deque()
        self._away_bytes = 0

    def add(self, name: str, gradient: torch.Tensor) -> None:
        """Let a gradient leave, with others.

        Raises:
            KvpsError: what has become of an earlier one.
        """
        self._collected[name] = gradient
        self._send(self._buckets.add(name))

    def flush(self) -> None:
        """Let all gradients leave that were collected.

        Raises:
            KvpsError: as :meth:`add`.
        """
        self._send(self._buckets.flush())

    def begin(self) -> None:
        """Begin the next step; drop the gradients that have not left."""
        self._buckets.begin()
        self._collected.clear()

    def _send(self, names: list[str]) -> None:
        if not names:
            return
        values = [self._collected.pop(name) for name in names]
        size = sum(self._sizes[name] for name in names)
        self.wait(self.limit_bytes - size)
        number = self._buckets.number
        handle = self._kv.push(names, values, priority=number, async_op=True)
        self._away.append((cast("Handle", handle), size))
        self._away_bytes += size

    def wait(self, left_bytes: int = 0) -> None:
        """Wait until at most ``left_bytes`` are in flight.

        Raises:
            KvpsError: what has become of one of them.
        """
        while self._away and (self._away_bytes > left_bytes or self._away[0][0].done()):
            handle, size = self._away.popleft()
            self._away_bytes -= size
            handle.wait()

    def drop(self) -> None:
        """Forget the gradients in flight."""
        self._away.clear()
        self._away_bytes = 0
        self.begin()


class ReplayingSender(GradientSender):
    """The sender of a replacement: it drops the gradients of steps that the lost worker has made."""

    def _send(self, names: list[str]) -> None:
        if self._kv.catch_up is None:
            super()._send(names)
            return
        for name in names:
            del self._collected[name]
