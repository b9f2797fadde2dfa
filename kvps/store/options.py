"""The options that all stores of one front end have in common: how long calls may take, and who is
waited for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvps.core.server.options import POLICIES
from kvps.errors import ConfigError
from kvps.runtime.ticket import TIMEOUT_S
from kvps.store.arguments import seconds

WORKER_GRACE_S = 240.0
SERVER_POLICIES = ("checkpoint", "rebuild")
"""The sources of a lost server's values: a checkpoint, or the workers."""
NAMES = ("timeout", "on_worker_lost", "worker_grace", "on_server_lost")
"""The options as users write them."""


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """Options of a store that its front end's other stores take, too; as in :func:`kvps.create`."""

    timeout_s: float = TIMEOUT_S
    on_worker_lost: str = POLICIES[0]
    worker_grace_s: float = WORKER_GRACE_S
    on_server_lost: str = SERVER_POLICIES[0]

    @classmethod
    def of(
        cls,
        timeout: object,
        on_worker_lost: str,
        worker_grace: object,
        on_server_lost: object = SERVER_POLICIES[0],
    ) -> StoreOptions:
        """Return the options, checked.

        Raises:
            ConfigError: for a number or a word that cannot be meant.
        """
        if on_worker_lost not in POLICIES:
            raise ConfigError(f"on_worker_lost={on_worker_lost!r}: use one of {', '.join(POLICIES)}")
        if not isinstance(on_server_lost, str) or on_server_lost not in SERVER_POLICIES:
            raise ConfigError(
                f"on_server_lost={on_server_lost!r:.40}: use one of {', '.join(SERVER_POLICIES)}"
            )
        limits = seconds("timeout", timeout), on_worker_lost, seconds("worker_grace", worker_grace)
        return cls(*limits, on_server_lost)

    @classmethod
    def given(cls, options: Mapping[str, Any] | None) -> StoreOptions:
        """Return the options that the user of a front end gave as ``kvstore_options``; None for the defaults.

        Raises:
            ConfigError: for another option, or a value that cannot be meant.
        """
        given: object = options
        if given is None:
            return cls()
        if not isinstance(given, Mapping) or not set(NAMES).issuperset(given):
            raise ConfigError(
                f"kvstore_options={given!r:.80}: give a dict with some of {', '.join(NAMES)}; for other "
                "options, create the store with kvps.create() and pass it as kvstore="
            )
        return cls.of(
            given.get("timeout", TIMEOUT_S),
            given.get("on_worker_lost", POLICIES[0]),
            given.get("worker_grace", WORKER_GRACE_S),
            given.get("on_server_lost", SERVER_POLICIES[0]),
        )
