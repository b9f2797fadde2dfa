"""The plug-in contract of stores, and the registry of stores from other packages.

The contract is MXNet's: a front end needs ``broadcast``, ``pushpull``, ``type``, ``rank``, ``num_workers``
and ``is_capable``, and works with any class that has them::

    @kvps.KVStoreBase.register
    class MyStore(kvps.KVStoreBase):
        ...

    kv = kvps.create("mystore")
"""

from __future__ import annotations

import warnings
from typing import ClassVar, TypeVar

from kvps.errors import ConfigError

S = TypeVar("S", bound="type[KVStoreBase]")


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
