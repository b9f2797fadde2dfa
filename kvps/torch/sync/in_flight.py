"""Gradients in flight: they have left together, and a sum or weights come back in their place.

A sum comes back where the gradients were. Weights stay where the servers have them until they are
written to the parameters (:class:`HeldBucket`); from stores that cannot leave them there, they
come where the gradients were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import Protocol, cast

import torch

from kvps.core.worker.consistent_read import HeldValues
from kvps.runtime.ticket import Handle
from kvps.torch.sync.sparse_gradients import sum_of


class Pending(Protocol):
    """A call of a store under way."""

    def wait(self) -> object:
        """Wait until it is over, and return its result.

        Raises:
            KvpsError: if it failed.
        """


class BegunElsewhere:
    """A call that another thread begins.

    Args:
        handle: of the call, once it is begun.
    """

    def __init__(self, handle: Future[Handle]) -> None:
        self._handle = handle

    def wait(self) -> object:
        """Wait until the call is begun, and over.

        Raises:
            KvpsError: if it failed, or could not begin.
        """
        return self._handle.result().wait()


class InFlight(Protocol):
    """Gradients that have left together, and what comes back in their place."""

    values: dict[str, torch.Tensor]
    """Name -> the tensor in which its weight or dense sum comes back."""

    def wait(self) -> None:
        """Wait until they are back.

        Raises:
            KvpsError: what has become of them.
        """

    def gradient(self, name: str) -> torch.Tensor:
        """Return what came back, in the layout in which the gradient left."""

    def bring(self, names: Iterable[str], params: Mapping[str, torch.Tensor]) -> None:
        """Write the weights that came back to the parameters ``names``, and perhaps to others of
        this bucket."""


class GradientBucket:
    """Gradients that have left as they are in memory, and come back there.

    Args:
        values: by name, the tensors in which they come back.
        handle: of the store's call.
        divisor: what comes back is divided by it.
        sparse: the parameters whose gradients were sparse, and shall be.
        is_marked: as :func:`~kvps.torch.sync.sparse_gradients.sum_of` has it.
    """

    def __init__(
        self,
        values: dict[str, torch.Tensor],
        handle: Pending,
        divisor: int,
        sparse: set[str],
        *,
        is_marked: bool,
    ) -> None:
        self.values = values
        self._handle = handle
        self._divisor = divisor
        self._sparse = sparse
        self._is_marked = is_marked

    def wait(self) -> None:
        """Wait until they are back.

        Raises:
            KvpsError: what has become of them.
        """
        self._handle.wait()
        if self._divisor != 1:
            with torch.no_grad():
                torch._foreach_div_(list(self.values.values()), self._divisor)
            self._divisor = 1

    def gradient(self, name: str) -> torch.Tensor:
        """Return what came back, in the layout in which the gradient left."""
        value = self.values[name]
        return sum_of(value, value, is_marked=self._is_marked) if name in self._sparse else value

    def bring(self, names: Iterable[str], params: Mapping[str, torch.Tensor]) -> None:
        """Write weights from where the gradients were."""
        with torch.no_grad():
            for name in names:
                params[name].copy_(self.values[name])


class HeldBucket:
    """Gradients that have left as they are in memory; weights come back, and stay where the
    servers have them.

    Args:
        values: the gradients, by name.
        handle: of the store's call, which returns :class:`~kvps.core.worker.consistent_read.HeldValues`.
    """

    def __init__(self, values: dict[str, torch.Tensor], handle: Pending) -> None:
        self.values = values
        self._handle = handle

    def wait(self) -> None:
        """Wait until they are back.

        Raises:
            KvpsError: what has become of them.
        """
        self._handle.wait()

    def gradient(self, name: str) -> torch.Tensor:
        """Return the gradient as it left."""
        return self.values[name]

    def bring(self, names: Iterable[str], params: Mapping[str, torch.Tensor]) -> None:
        """Write all weights of the bucket, once."""
        held = cast("HeldValues", self._handle.wait())
        with torch.no_grad():
            held.copy_to([params[name].detach() for name in self.values])


class SparseBucket:
    """A sparse gradient that has left as rows; rows of its sum, or of the weight, come back.

    Args:
        name: of the parameter.
        value: the parameter, where its weight comes back; else what has left.
        wait: waits for the store's answer and returns it: the parameter, or the sum.
        divisor: a sum is divided by it.
    """

    def __init__(
        self, name: str, value: torch.Tensor, wait: Callable[[], torch.Tensor], divisor: int
    ) -> None:
        self.values = {name: value}
        self._wait = wait
        self._divisor = divisor
        self._found: torch.Tensor | None = None

    def wait(self) -> None:
        """Wait until it is back.

        Raises:
            KvpsError: what has become of it.
        """
        if self._found is None:
            self._found = self._wait()
            if self._found.is_sparse and self._divisor != 1:
                self._found._values().div_(self._divisor)

    def gradient(self, name: str) -> torch.Tensor:
        """Return the sum."""
        assert self._found is not None
        return self._found

    def bring(self, names: Iterable[str], params: Mapping[str, torch.Tensor]) -> None:
        """Do nothing: the rows of a weight were written when they came."""
