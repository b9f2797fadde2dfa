"""Operations: this rank's side of one collective, from the call to its result."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch

from kvps.compat.horovod.common.exceptions import HorovodInternalError
from kvps.compat.horovod.negotiation.request import CollectiveRequest, Part
from kvps.torch.distributed.host_tensor import Staged


class Operation:
    """One collective of this rank.

    Args:
        request: its part in the negotiation.
        tensors: the tensors that travel, on any device. A reduction and a broadcast leave their result there.
        is_list: whether the result is a list, one for each tensor.
        results: what is returned in place of ``tensors``, whose memory it shares.
    """

    def __init__(
        self,
        request: CollectiveRequest,
        tensors: Sequence[torch.Tensor] = (),
        is_list: bool = False,
        results: Sequence[torch.Tensor] | None = None,
    ) -> None:
        self.request = request
        self.tensors = list(tensors)
        self.staged = [Staged(tensor) for tensor in tensors]
        self.is_list = is_list
        self.is_decided = False
        """Whether all ranks have requested it; until then it can wait for a rank for ever."""
        self.since = 0.0
        """When it was requested, on the engine's clock."""
        outcome = list(tensors if results is None else results)
        self._outcome: Any = outcome if is_list else outcome[0] if outcome else None
        self._over = threading.Event()
        self._error: HorovodInternalError | None = None

    def deliver(self, outcome: Sequence[Any]) -> None:
        """Set the results, one for each tensor."""
        self._outcome = list(outcome) if self.is_list else outcome[0]

    def end(self, error: BaseException | None = None) -> None:
        """The operation is over, or has failed for a reason."""
        if error is not None:
            self._error = HorovodInternalError(str(error) or repr(error))
            self._error.__cause__ = error
        self.staged = []
        self._over.set()

    @property
    def is_over(self) -> bool:
        """Whether it has ended, well or not."""
        return self._over.is_set()

    def wait_for(self, limit_s: float | None) -> bool:
        """Wait for the end; return whether it came in time."""
        return self._over.wait(limit_s)

    def result(self) -> Any:
        """Return the result of an operation that is over.

        Raises:
            HorovodInternalError: if it failed.
        """
        if self._error is not None:
            raise self._error
        return self._outcome


def parts_of(tensors: Sequence[torch.Tensor]) -> tuple[Part, ...]:
    """Return the types and shapes of tensors."""
    return tuple([Part(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for tensor in tensors])
