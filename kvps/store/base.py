"""The plug-in contract of stores, the registry of stores from other packages, and the contracts of kvps's own
stores and of the session that they use.

The contract is MXNet's: a front end needs ``broadcast``, ``pushpull``, ``type``, ``rank``, ``num_workers``
and ``is_capable``, and works with any class that has them::

    @kvps.KVStoreBase.register
    class MyStore(kvps.KVStoreBase):
        ...

    kv = kvps.create("mystore")
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias, TypeVar

from kvps.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from kvps.runtime.in_process import InProcessSession
    from kvps.runtime.worker_session import WorkerSession
    from kvps.store.optimizer_state import States

S = TypeVar("S", bound="type[KVStoreBase]")
Session: TypeAlias = "WorkerSession | InProcessSession"
"""A worker in a cluster, or without one."""


class KVStoreBase:
    """The plug-in contract: the methods that every store has."""

    OPTIMIZER: ClassVar[str] = "optimizer"
    """The capability of running the optimizer in the store."""
    registry: ClassVar[dict[str, type[KVStoreBase]]] = {}
    """The registered classes, by lower-cased name."""

    @staticmethod
    def register(cls: S) -> S:
        """Make ``create("name")`` return an instance of ``cls``; use it as a decorator.

        Raises:
            ConfigError: for anything but a subclass of KVStoreBase.
        """
        given: object = cls
        if not (isinstance(given, type) and issubclass(given, KVStoreBase)):
            raise ConfigError(f"only subclasses of KVStoreBase can be registered, got {given!r}")
        name = cls.__name__.lower()
        old = KVStoreBase.registry.get(name)
        if old is not None and old is not cls:
            warnings.warn(
                f"store {name!r}: {cls.__module__}.{cls.__qualname__} replaces "
                f"{old.__module__}.{old.__qualname__}",
                stacklevel=2,
            )
        KVStoreBase.registry[name] = cls
        return cls

    @property
    def type(self) -> str:
        """The name of this kind of store."""
        raise NotImplementedError

    @property
    def rank(self) -> int:
        """This worker's number, from 0."""
        raise NotImplementedError

    @property
    def num_workers(self) -> int:
        """The number of workers."""
        raise NotImplementedError

    @property
    def present(self) -> list[int] | None:
        """The ranks of the workers that are there now where workers come and go; None where they do not."""
        return None

    def broadcast(self, key: object, value: object, out: object, priority: int = 0) -> object:
        """Give every worker rank 0's value."""
        raise NotImplementedError

    def pushpull(self, key: object, value: object, out: object = None, priority: int = 0) -> object:
        """Sum values over workers, or update weights by them; return the result."""
        raise NotImplementedError

    @staticmethod
    def is_capable(capability: str) -> bool:
        """Whether the store can do ``capability``."""
        raise NotImplementedError


class Store(Protocol):
    """A store as front ends use it, with the arguments that front ends give.

    A plug-in has the methods of :class:`KVStoreBase`; and if it :meth:`is_capable` of the
    optimizer, the four of the optimizer, too. A front end calls the others only of a
    :class:`~kvps.store.kvstore.KVStore`, which has all.
    """

    # --- what every store has -----------------------------------------------------------------------

    @property
    def type(self) -> str:
        """The name of this kind of store."""

    @property
    def rank(self) -> int:
        """This worker's number, from 0."""

    @property
    def num_workers(self) -> int:
        """The number of workers."""

    def is_capable(self, capability: str) -> bool:
        """Whether the store can do ``capability``."""

    def broadcast(self, key: object, value: object, out: object, priority: int = 0) -> object:
        """Give every worker rank 0's value."""

    def pushpull(
        self,
        key: object,
        value: object,
        out: object = None,
        priority: int | Sequence[int] = 0,
        *,
        async_op: bool = False,
    ) -> Any:
        """Sum values over workers, or update weights by them; return the result, or a handle."""

    # --- the optimizer in the store -----------------------------------------------------------------

    def set_optimizer(
        self, optimizer: str | torch.optim.Optimizer, *, timeout: float | None = None, **hyper: Any
    ) -> None:
        """Update by this optimizer from now on."""

    def set_learning_rate(self, lr: float) -> None:
        """Set the optimizer's learning rate."""

    def save_optimizer_states(self, path: str) -> None:
        """Write the optimizer's states to a file."""

    def load_optimizer_states(self, path: str) -> None:
        """Read the optimizer's states from a file."""

    # --- what the stores of kvps have besides -------------------------------------------------------

    @property
    def name(self) -> str:
        """The name of this store."""

    @property
    def chunk_bytes(self) -> int:
        """How much travels at once."""

    def init(self, key: object, value: object) -> None:
        """Create keys, with rank 0's values."""

    def pull(self, key: object, out: object = None) -> Any:
        """Return values, or write them to ``out``."""

    def resume(self, keys: object) -> int:
        """Return how often this rank has pushed the keys."""

    def optimizer_states(self) -> States:
        """Return the optimizer's states."""

    def set_optimizer_states(self, states: States) -> None:
        """Set the optimizer's states."""

    def set_gradient_compression(self, params: str | Mapping[str, Any]) -> None:
        """Compress what is pushed from now on."""

    def join(self) -> int:
        """Take part in rounds without data until all workers have joined; return the last one's rank."""

    def close(self) -> None:
        """Finish pending calls, and end the store."""
