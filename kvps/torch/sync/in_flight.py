"""Gradients that leave together: the buckets that they are collected in, and their results.

A sum comes back where the gradients were. Weights stay where the servers have them until they are
written to the parameters; from stores that cannot leave them there, they
come where the gradients were.

Gradient buckets: which gradients leave together during backward, and their order.

One message for each gradient would cost more than the gradient; one for all would not leave before the
last is there. So they are collected in the order in which backward makes them, and leave as a *bucket*
whenever enough bytes have come together. Nothing has to be agreed on: the store numbers the pushes of
each key by itself, so another worker may cut its buckets elsewhere, and a parameter that gets no gradient
today holds up no bucket.

A message carries elements of one chunk of the store. So a bucket waits, within limits, for the
gradients that complete its chunks (:meth:`Buckets.arrange`): a chunk that leaves in two parts
costs two messages. Small gradients, which may lie in any chunk, leave with the last bucket.

Backward ends where the next forward pass begins. So each bucket is more urgent than the one before it:
its number is its priority, and the weights that are needed first come back first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from typing import TypeAlias

import torch

from kvps.core.worker.consistent_read import HeldValues
from kvps.errors import ConfigError
from kvps.store.base import Store
from kvps.store.server_store import DistStore
from kvps.torch.sync.sparse_gradients import SparseBucket, sum_of

BUCKET_BYTES = 4 << 20
CHUNKS = 3
"""A bucket is as large as so many chunks, and at least 4 MiB: little against a model, so that the first one
leaves early, and much against a message. Where chunks are large, as on one host, what counts is that few
calls disturb backward; on a network, that the link is never idle."""
DEVICE_BYTES = 8 << 20
"""The most bytes of a bucket of gradients on a GPU, for which no call disturbs backward: what counts
is that little is left when backward is over."""
LATE = 2
"""A bucket leaves at so many times its limit, if its chunks are not complete until then."""
SMALL = 64
"""A gradient is small if so many of its size are below the limit."""


def bucket_bytes(chunk_bytes: int, *, is_on_device: bool = False) -> int:
    """Return the best size of a bucket for a store with chunks of ``chunk_bytes``."""
    best = max(BUCKET_BYTES, CHUNKS * chunk_bytes)
    return min(best, DEVICE_BYTES) if is_on_device else best


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
            raise ConfigError(f"bucket_bytes={limit_bytes!r}: use a whole number of bytes, 1 or more")
        self._sizes = dict(sizes)
        self._place = {name: place for place, name in enumerate(sizes)}
        self._limit_bytes = limit_bytes
        self._collected: list[str] = []
        self._bytes = 0
        self._small: list[str] = []
        self._small_bytes = 0
        self._chunks: Mapping[str, Collection[Hashable]] = {}
        """The chunks of each gradient that is not small; empty while they are not known."""
        self._members: Counter[Hashable] = Counter()
        """Chunk -> the number of these gradients in it."""
        self._missing: Counter[Hashable] = Counter()
        """Chunk -> how many of them have not come in this step."""
        self._open: set[Hashable] = set()
        """The chunks of which some gradients are collected, and some have not come."""
        self._to_come = 0
        """The number of gradients of known chunks that have not come in this step."""
        self.number = 0
        """The number of buckets of this step that have left; the priority of the next."""

    def arrange(self, chunks: Mapping[str, Collection[Hashable]]) -> None:
        """Let chunks leave whole from the next step on, and small gradients last.

        Args:
            chunks: by name, the chunks that a gradient lies in; of all gradients that may come.
        """
        self._chunks = {
            name: own for name, own in chunks.items() if self._sizes[name] * SMALL >= self._limit_bytes
        }
        self._members = Counter(chunk for own in self._chunks.values() for chunk in own)

    def add(self, name: str) -> list[str]:
        """Take in a gradient that is there; return the bucket that leaves now, or nothing."""
        if self._chunks and name not in self._chunks:
            self._small.append(name)
            self._small_bytes += self._sizes[name]
            return self._leave(small=True) if self._small_bytes >= self._limit_bytes else []
        self._collected.append(name)
        self._bytes += self._sizes[name]
        for chunk in self._chunks.get(name, ()):
            self._missing[chunk] -= 1
            (self._open.add if self._missing[chunk] > 0 else self._open.discard)(chunk)
        self._to_come -= 1
        if self._to_come == 0:
            return []  # the rest is small, and comes soon
        is_whole = not self._open or self._bytes >= LATE * self._limit_bytes
        return self._leave(big=True) if self._bytes >= self._limit_bytes and is_whole else []

    def flush(self) -> list[str]:
        """Return the gradients that were collected, as backward is over and no more will come."""
        return self._leave(big=True, small=True)

    def _leave(self, *, big: bool = False, small: bool = False) -> list[str]:
        """Return what leaves, in the order of the keys in the store: neighbours there travel as one run."""
        leaves: list[str] = []
        if big:
            leaves, self._collected, self._bytes = self._collected, [], 0
            self._open.clear()
        if small:
            leaves, self._small, self._small_bytes = leaves + self._small, [], 0
        self.number += bool(leaves)
        return sorted(leaves, key=self._place.__getitem__)

    def begin(self) -> None:
        """A step is over."""
        self._collected, self._bytes, self.number = [], 0, 0
        self._small, self._small_bytes = [], 0
        self._open.clear()
        self._missing = Counter(self._members)
        self._to_come = len(self._chunks)


class Answer:
    """The answer to a push and pull. After a Timeout or an interrupt the next :meth:`wait` waits on.

    The push counts once, and a pull waits for its round. To push again would count it twice.

    Args:
        wait: waits for the end of the call, or makes it; of a store without servers it waits on by itself.
        kv: the store.
        values: by name, the tensors in which the values come back.
    """

    def __init__(self, wait: Callable[[], object], kv: Store, values: dict[str, torch.Tensor]) -> None:
        self._wait = wait
        self._kv = kv
        self.values = values

    def wait(self) -> object:
        """Wait until it is there; return the result of the call, which is another after a wait was cut off.

        Raises:
            KvpsError: if the call failed.
        """
        try:
            result = self._wait()
        except BaseException:
            if isinstance(self._kv, DistStore):
                self._wait = lambda: self._kv.pull(list(self.values), out=list(self.values.values()))
            raise
        self._wait = lambda: result
        return result


class GradientBucket:
    """Gradients that have left as they are in memory, and come back there.

    Args:
        values: by name, the tensors in which they come back.
        answer: to the store's call.
        divisor: of the results.
        sparse: the parameters whose gradients were sparse, and shall be.
        is_marked: as :func:`~kvps.torch.sync.sparse_gradients.sum_of` has it.
    """

    def __init__(
        self,
        values: dict[str, torch.Tensor],
        answer: Answer,
        divisor: int,
        sparse: set[str],
        *,
        is_marked: bool,
    ) -> None:
        self.values = values
        self._answer = answer
        self._divisor = divisor
        self._sparse = sparse
        self._is_marked = is_marked

    def wait(self) -> None:
        """Wait until they are back.

        Raises:
            KvpsError: if they have failed.
        """
        self._answer.wait()
        divisor, self._divisor = self._divisor, 1
        if divisor != 1:
            with torch.no_grad():
                torch._foreach_div_(list(self.values.values()), divisor)

    def gradient(self, name: str) -> torch.Tensor:
        """Return the result, in the layout in which the gradient left."""
        value = self.values[name]
        return sum_of(value, value, is_marked=self._is_marked) if name in self._sparse else value

    def bring(self, names: Iterable[str], params: Mapping[str, torch.Tensor]) -> None:
        """Write weights from where the servers have them, then all, or from where the gradients were."""
        held = self._answer.wait()
        with torch.no_grad():
            if isinstance(held, HeldValues):
                held.copy_to([params[name].detach() for name in self.values])
                return
            for name in names:
                params[name].copy_(self.values[name])


InFlight: TypeAlias = GradientBucket | SparseBucket
"""Gradients that have left together, and their results."""
