"""Gradient buckets: which gradients leave together during backward, and their order.

One message for each gradient would cost more than the gradient; one for all would not leave before the
last is there. So they are collected in the order in which backward makes them, and leave as a *bucket*
whenever enough bytes have come together. Nothing has to be agreed on: the store numbers the pushes of
each key by itself, so another worker may cut its buckets elsewhere, and a parameter that gets no gradient
today holds up no bucket.

Backward ends where the next forward pass begins. So each bucket is more urgent than the one before it:
its number is its priority, and what is needed first comes back first.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvps.errors import ConfigError

BUCKET_BYTES = 4 << 20
CHUNKS = 3
"""A bucket is as large as so many chunks, and at least 4 MiB: little against a model, so that the first one
leaves early, and much against a message. Where chunks are large, as on one host, what counts is that few
calls disturb backward; on a network, that the link is never idle."""


def bucket_bytes(chunk_bytes: int) -> int:
    """Return the best size of a bucket for a store with chunks of ``chunk_bytes``."""
    return max(BUCKET_BYTES, CHUNKS * chunk_bytes)


class Buckets:
    """The gradients of one backward pass on their way out.

    Args:
        sizes: bytes of each gradient, by name, in the order in which the store has the keys.
        limit_bytes: a bucket leaves when it has so many.

    Example:
        >>> buckets = Buckets({"weight": 8, "bias": 2}, limit_bytes=8)
        >>> buckets.add("bias"), buckets.add("weight"), buckets.flush()
        ([], ['weight', 'bias'], [])
    """

    def __init__(self, sizes: Mapping[str, int], limit_bytes: int) -> None:
        if type(limit_bytes) is not int or limit_bytes < 1:
            raise ConfigError(
                f"bucket_bytes={limit_bytes!r}: use a whole number of bytes, 1 or more"
            )
        self._sizes = dict(sizes)
        self._place = {name: place for place, name in enumerate(sizes)}
        self._limit_bytes = limit_bytes
        self._collected: list[str] = []
        self._bytes = 0
        self.number = 0
        """The number of buckets of this step that have left; the priority of the next."""

    def add(self, name: str) -> list[str]:
        """Take in a gradient that is there; return the bucket that leaves now, or nothing."""
        self._collected.append(name)
        self._bytes += self._sizes[name]
        return self.flush() if self._bytes >= self._limit_bytes else []

    def flush(self) -> list[str]:
        """Return the gradients that were collected, as backward is over and no more will come.

        They are in the order of the keys in the store: neighbours there travel as one run.
        """
        leaves, self._collected, self._bytes = self._collected, [], 0
        self.number += bool(leaves)
        return sorted(leaves, key=self._place.__getitem__)

    def begin(self) -> None:
        """A step is over."""
        self._collected, self._bytes, self.number = [], 0, 0
