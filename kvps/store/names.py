"""The names of stores: kinds, and MXNet's spellings.

MXNet took any word that contains ``dist`` or ``device`` and made the rest a local store, so that a
typing error trained alone without a word. Here every spelling of MXNet's documents works, and
any other name is an error that lists the valid ones.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvps.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Kind:
    """The behaviour of a kind of store."""

    type: str
    """The name that ``kv.type`` shows."""
    mode: str
    """``local``, ``allreduce``, or how its servers treat a push: ``sync``, ``async``, ``ssp``."""
    on_device: bool
    """A worker's values are reduced on their own device."""

    @property
    def is_distributed(self) -> bool:
        """Whether it needs servers."""
        return self.mode not in ("local", "allreduce")


KINDS: dict[str, Kind] = {
    name: Kind(name, mode, on_device)
    for name, mode, on_device in (
        ("local", "local", False),
        ("device", "local", True),
        ("dist_sync", "sync", False),
        ("dist_sync_device", "sync", True),
        ("dist_async", "async", False),
        ("dist_async_device", "async", True),
        ("dist_ssp", "ssp", False),
        ("dist_ssp_device", "ssp", True),
        ("allreduce", "allreduce", True),
    )
}
SPELLINGS: dict[str, str] = {
    "local_update_cpu": "local",
    "local_allreduce_cpu": "local",
    "local_allreduce_device": "device",
    "dist": "dist_sync",
    "dist_device": "dist_sync_device",
    "dist_device_sync": "dist_sync_device",
    "dist_device_async": "dist_async_device",
    "dist_device_ssp": "dist_ssp_device",
}
"""MXNet's other spellings."""


def kind_of(name: object, plugins: tuple[str, ...] = ()) -> Kind:
    """Return the kind of store that ``name`` means.

    Raises:
        ConfigError: for any other name; the text lists the valid ones.
    """
    if not isinstance(name, str):
        raise ConfigError(f"the type of a store is a str, got {type(name).__name__}")
    lower = name.lower()
    kind = KINDS.get(SPELLINGS.get(lower, lower))
    if kind is None:
        raise ConfigError(f"there is no store type {name!r}; use one of {', '.join((*KINDS, *plugins))}")
    return kind
