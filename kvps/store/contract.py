"""The contract that every kind of store implements, and that front ends rely on.

:class:`~kvps.store.local.store.LocalStore` keeps it within the process, :class:`~kvps.store.server_store.DistStore`
over servers, :class:`~kvps.store.allreduce.store.AllReduceStore` among workers. What they have in common
is built on these hooks: the steps of a call in :mod:`kvps.store.calling`, the calls in
:mod:`kvps.store.kvstore`.
"""

from __future__ import annotations

import abc
from typing import Any, ClassVar, NamedTuple

import torch

from kvps.compression.policy import OFF, CompressionPolicy
from kvps.core.embedding.spec import EmbeddingSpec
from kvps.core.optim.hyperparams import HyperParams
from kvps.core.placement import Part
from kvps.core.worker.calls import Sinks
from kvps.core.worker.plan import Numbers
from kvps.dtypes import Spec
from kvps.errors import KvpsError
from kvps.runtime.ticket import Ticket
from kvps.store.arguments import Form
from kvps.store.base import KVStoreBase
from kvps.store.embedding.table import EmbeddingTable
from kvps.store.names import Kind
from kvps.store.optimizer_state import States
from kvps.store.rows import Rows, dense_of


class Straggler(NamedTuple):
    """A rank that an open round waits for."""

    rank: int
    key: str
    """One key of that round."""
    round: int
    age_s: float
    """Seconds since the round was opened."""


class Contract(KVStoreBase, abc.ABC):
    """What a kind of store does in its own way."""

    knows_changes: ClassVar[bool] = False
    """What changed in a table can be had without the rest."""

    def __init__(self, kind: Kind, name: str, timeout_s: float) -> None:
        self._kind = kind
        self._name = name
        self._timeout_s = timeout_s
        self._specs: dict[str, Spec] = {}
        self._names: dict[tuple[object, ...], tuple[str, ...]] = {}
        """Of lists of keys that were used before."""
        self._forms: dict[tuple[str, ...], Form] = {}
        self._hyper: HyperParams | None = None
        self._compression = OFF
        self._tables: dict[str, EmbeddingTable] = {}
        self._is_closed = False
        self._later: list[KvpsError] = []

    # --- hooks --------------------------------------------------------------------------------------

    @abc.abstractmethod
    def _init(
        self, keys: tuple[tuple[str, Spec], ...], rows: tuple[torch.Tensor, ...], limit_s: float
    ) -> None: ...

    @abc.abstractmethod
    def _push(
        self,
        names: tuple[str, ...],
        rows: tuple[torch.Tensor, ...],
        sinks: Sinks,
        priority: Numbers,
        eager: bool,
        limit_s: float,
    ) -> Ticket: ...

    def _push_rows(
        self,
        names: tuple[str, ...],
        rows: tuple[Rows, ...],
        priority: Numbers,
        eager: bool,
        limit_s: float,
    ) -> Ticket:
        """Push some rows of each key; in a store that knows no rows, as dense values."""
        dense = [dense_of(self._specs[name], one) for name, one in zip(names, rows, strict=True)]
        return self._push(names, tuple(dense), None, priority, eager, limit_s)

    @abc.abstractmethod
    def _pull_rows(
        self,
        names: tuple[str, ...],
        ids: tuple[torch.Tensor, ...],
        places: tuple[torch.Tensor, ...],
        priority: Numbers,
        limit_s: float,
    ) -> Ticket:
        """Finish with something of which :meth:`_picked` makes these rows."""

    def _picked(
        self,
        found: Any,
        names: tuple[str, ...],
        ids: tuple[torch.Tensor, ...],
        places: tuple[torch.Tensor, ...],
    ) -> list[torch.Tensor]:
        """Return the rows ``ids`` of each key at their ``places`` in a tensor [k, width] on the CPU.

        ``found`` is what the pull finished with.
        """
        rows: list[torch.Tensor] = found
        return rows

    @abc.abstractmethod
    def _pull(
        self,
        names: tuple[str, ...],
        sinks: Sinks,
        priority: Numbers,
        least: int,
        limit_s: float,
    ) -> Ticket: ...

    @abc.abstractmethod
    def _broadcast(
        self,
        keys: tuple[tuple[str, Spec], ...],
        rows: tuple[torch.Tensor, ...],
        sinks: tuple[torch.Tensor, ...],
        limit_s: float,
    ) -> Ticket: ...

    @abc.abstractmethod
    def _allocate(self, names: tuple[str, ...], limit_s: float) -> list[torch.Tensor]: ...

    @abc.abstractmethod
    def _lookup(self, names: tuple[str, ...], limit_s: float) -> dict[str, Spec]: ...

    @abc.abstractmethod
    def _set_optimizer(self, hyper: HyperParams, limit_s: float) -> None: ...

    @abc.abstractmethod
    def _set_rate(self, hyper: HyperParams, limit_s: float) -> None: ...

    @abc.abstractmethod
    def _compress(self, rules: CompressionPolicy) -> None: ...

    @abc.abstractmethod
    def _rests(self) -> dict[str, torch.Tensor]: ...

    @abc.abstractmethod
    def _set_rests(self, rests: dict[str, torch.Tensor]) -> None: ...

    @abc.abstractmethod
    def _embedding(self, name: str, recipe: EmbeddingSpec, limit_s: float) -> EmbeddingTable:
        """Make a table, or find it; called again for one that exists, which may be gone elsewhere."""

    @abc.abstractmethod
    def _close(self) -> None: ...

    # --- the rest of the contract ---------------------------------------------------------------------

    @property
    @abc.abstractmethod
    def num_dead_nodes(self) -> int:
        """How many members are lost."""

    @abc.abstractmethod
    def version(self, key: object, *, timeout: float | None = None) -> Any:
        """Return the closed rounds (sync) or applied pushes (async) of a key since init."""

    @abc.abstractmethod
    def resume(self, keys: object, *, timeout: float | None = None) -> int:
        """Number the next pushes of ``keys`` from the lowest one that this rank still owes."""

    @abc.abstractmethod
    def barrier(self, name: str | None = None, *, timeout: float | None = None) -> None:
        """Flush, then wait until every worker stands here."""

    @property
    def joins(self) -> int:
        """How many joins are over; a replacement knows it after :meth:`resume`."""
        return 0

    @abc.abstractmethod
    def join(self, timeout: float | None = None) -> int:
        """Let the others go on without this worker until all have joined; return who was last."""

    @abc.abstractmethod
    def placement(self) -> dict[str, tuple[Part, ...]]:
        """Return which elements of each key lie on which server."""

    @abc.abstractmethod
    def staleness(self) -> dict[str, int]:
        """Return for each key by how many pushes this rank is ahead of the slowest live one."""

    @abc.abstractmethod
    def stragglers(self) -> list[Straggler]:
        """Return the ranks that open rounds wait for, oldest round first."""

    @abc.abstractmethod
    def dropped_rounds(self) -> dict[str, int]:
        """Return of how many rounds of each key nothing came, as their sums were not finite.

        Where each push is applied by itself they are pushes. Keys without any are left out; see
        ``on_nonfinite`` of :func:`kvps.create`.
        """

    @abc.abstractmethod
    def save_optimizer_states(self, path: str) -> None:
        """Write the optimizer's state of every key to a safetensors file."""

    @abc.abstractmethod
    def load_optimizer_states(self, path: str) -> None:
        """Put back what :meth:`save_optimizer_states` wrote."""

    @abc.abstractmethod
    def optimizer_states(self) -> States:
        """Return the optimizer's state of every key that was updated, on the CPU.

        Key -> (how many updates, name of the state -> flat tensor). Names are torch.optim's, where
        torch has the optimizer.
        """

    @abc.abstractmethod
    def set_optimizer_states(self, found: States) -> None:
        """Put back what :meth:`optimizer_states` gave; every rank calls, rank 0's counts."""

    @abc.abstractmethod
    def checkpoint(self, tag: str | None = None, *, timeout: float | None = None) -> int:
        """Have everything that the store holds written down; return the checkpoint's number.

        Every worker calls; all pushes of all workers are in it. One with a tag is kept until
        somebody removes it, of the others the newest two. ``kvps checkpoint list`` shows them.

        Args:
            tag: a name to find it by.
            timeout: seconds to wait, instead of the store's.

        Raises:
            ConfigError: without a place for checkpoints (``kvps-server --checkpoint-dir``, or
                ``KVPS_CHECKPOINT_DIR`` for a local store).
            StorageError: if it could not be written; training can go on.
        """

    @abc.abstractmethod
    def restore(self, tag: str | None = None, *, timeout: float | None = None) -> int:
        """Give the store's keys the values of a checkpoint; return the checkpoint's number.

        Every worker calls. Keys, versions, the optimizer and its state come back, and the next
        pushes are numbered from there, also where the number of servers has changed. Keys that the
        checkpoint does not have keep their values. Whoever sets the learning rate later calls
        ``set_optimizer`` in this process, too, before or after; states are kept.

        Args:
            tag: restore the newest with this tag; None for the newest of all.
            timeout: seconds to wait, instead of the store's.

        Raises:
            ConfigError: without a place for checkpoints. StorageError: if there is none, or it
                cannot be read. Mismatch: if a key has another shape or type here.
        """
