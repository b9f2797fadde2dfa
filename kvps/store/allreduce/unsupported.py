"""The part of the store's contract that needs servers, refused with what to do instead.

Where there is a true answer it is given: nothing lies on servers, nobody is ahead of anybody. The rest is
refused, with what to do instead and the name of the store that can.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from kvps.compression.policy import CompressionPolicy
from kvps.core.embedding.spec import EmbeddingSpec
from kvps.core.optim.hyperparams import HyperParams
from kvps.core.placement import Part
from kvps.core.worker.plan import Numbers
from kvps.dtypes import Spec
from kvps.errors import ConfigError
from kvps.runtime.ticket import Ticket
from kvps.store.base import KVStoreBase
from kvps.store.embedding.table import EmbeddingTable
from kvps.store.kvstore import KVStore
from kvps.store.optimizer_state import States
from kvps.store.rows import taken


class Serverless(KVStore):
    """The part of a store's contract that needs servers."""

    @staticmethod
    def is_capable(capability: str) -> bool:
        """Whether the store can do ``capability``: there is nobody to run an optimizer."""
        return KVStore.is_capable(capability) and capability != KVStoreBase.OPTIMIZER

    def join(self, timeout: float | None = None) -> int:
        """Is refused: a ring needs every rank in every sum."""
        self._refuse("join()", "give every rank as many batches (kvps.data_sampler does)")

    def placement(self) -> dict[str, tuple[Part, ...]]:
        """Return an empty map: there are no servers."""
        return {}

    def staleness(self) -> dict[str, int]:
        """Return 0 for each key: all ranks have the same values."""
        return dict.fromkeys(self._specs, 0)

    def dropped_rounds(self) -> dict[str, int]:
        """Return an empty map: every sum is taken as it is."""
        return {}

    def _pull_rows(
        self,
        names: tuple[str, ...],
        ids: tuple[torch.Tensor, ...],
        places: tuple[torch.Tensor, ...],
        priority: Numbers,
        limit_s: float,
    ) -> Ticket:
        return self._pull(names, (), priority, 0, limit_s)

    def _picked(
        self,
        found: Any,
        names: tuple[str, ...],
        ids: tuple[torch.Tensor, ...],
        places: tuple[torch.Tensor, ...],
    ) -> list[torch.Tensor]:
        return [
            taken(values.view(-1, self._specs[name].width), some, at)
            for name, values, some, at in zip(names, found, ids, places, strict=True)
        ]

    def save_optimizer_states(self, path: str) -> None:
        """Is refused: the optimizer, if there is one, is in the script."""
        self._optimizer()

    def load_optimizer_states(self, path: str) -> None:
        """Is refused: the optimizer, if there is one, is in the script."""
        self._optimizer()

    def optimizer_states(self) -> NoReturn:
        """Is refused: the optimizer, if there is one, is in the script."""
        self._refuse_optimizer()

    def set_optimizer_states(self, found: States) -> None:
        """Is refused: the optimizer, if there is one, is in the script."""
        self._refuse_optimizer()

    def checkpoint(self, tag: str | None = None, *, timeout: float | None = None) -> int:
        """Is refused: every rank has all values, so rank 0 can save the model."""
        self._refuse("checkpoint()", "save the model on rank 0")

    def restore(self, tag: str | None = None, *, timeout: float | None = None) -> int:
        """Is refused: every rank has all values, and broadcast() gives them rank 0's."""
        self._refuse("restore()", "load the model on rank 0 and broadcast() it")

    # --- hooks --------------------------------------------------------------------------------------

    def _lookup(self, names: tuple[str, ...], limit_s: float) -> dict[str, Spec]:
        return {}

    def _optimizer(self) -> HyperParams:
        self._refuse_optimizer()

    def _refuse_optimizer(self) -> NoReturn:
        raise ConfigError(
            f"store {self._name!r} is allreduce: it has no optimizer, and no servers to run one; update "
            "the weights by the sums that you pull, as kvps.Trainer(..., kvstore='allreduce') does, or "
            "use dist_sync"
        )

    def _compress(self, rules: CompressionPolicy) -> None:
        if not rules.are_off:
            self._refuse(
                "set_gradient_compression()",
                "a ring sums what it is given; use a dist store, or kvps.torch.comm_hook with DDP",
            )

    def _rests(self) -> dict[str, torch.Tensor]:
        return {}

    def _set_rests(self, rests: dict[str, torch.Tensor]) -> None:
        if rests:
            self._refuse("load_compression_state()", "nothing is compressed here")

    def _set_optimizer(self, hyper: HyperParams, limit_s: float) -> None:
        self._optimizer()

    def _set_rate(self, hyper: HyperParams, limit_s: float) -> None:
        self._optimizer()

    def _embedding(self, name: str, recipe: EmbeddingSpec, limit_s: float) -> EmbeddingTable:
        self._refuse("embedding()", "keep an ordinary table, pushed by rows, in the model")

    # --- small things -------------------------------------------------------------------------------

    def _refuse(self, what: str, instead: str) -> NoReturn:
        raise ConfigError(
            f"store {self._name!r} is allreduce, which has no servers, and cannot do {what}; "
            f"{instead}, or use dist_sync, which can"
        )
