"""The stores that this worker has closed, until all that need to know have heard of it.

Nobody waits for the answers: a store is closed when its pushes are taken in. So CLOSE is sent
again until CLOSED comes, and to all again when the servers have rolled back, as they may hold the
store again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from kvps.protocol.envelope import KEY_MAX
from kvps.protocol.stores import Close, StoreLife

AGAIN_S = 2.0
"""Seconds after which CLOSE is sent again."""
KNOWN_MAX = 1024
"""Closed stores that are remembered."""
BATCH = 32
"""Stores in one CLOSE."""


def label_of(store: str, life: int) -> str:
    """Return the name by which the scheduler knows a life of a store: no user can give a store such a name.

    Example:
        >>> label_of("model", 0), label_of("model", 2)
        ('model', 'kvps.life-2.model')
    """
    return store if not life else f"kvps.life-{life}.{store}"[:KEY_MAX]


class ClosedStores:
    """The last life of each store that was closed here, and who has not heard of it."""

    SCHEDULER: ClassVar = -1
    """In place of a server's rank."""

    def __init__(self) -> None:
        self.lives: dict[str, int] = {}
        """Store -> its last life that was closed here."""
        self._untold: dict[int, dict[str, StoreLife]] = {}
        """Server, or :attr:`SCHEDULER` -> store -> the life that it has not said CLOSED for."""
        self.again_at = 0.0
        """When CLOSE is sent again, while :attr:`is_untold`."""

    @property
    def is_untold(self) -> bool:
        """Whether somebody has not answered yet."""
        return bool(self._untold)

    def next_life(self, store: str) -> int:
        """Return the life that the next creation of a store begins here."""
        return self.lives.get(store, -1) + 1

    def close(self, store: str, life: int, servers: int) -> None:
        """Note that this worker has closed a life of a store."""
        self.lives.pop(store, None)
        self.lives[store] = life
        if len(self.lives) > KNOWN_MAX:
            del self.lives[next(iter(self.lives))]
        for server in (self.SCHEDULER, *range(servers)):
            name = label_of(store, life) if server == self.SCHEDULER else store
            self._untold.setdefault(server, {})[store] = StoreLife(name, life)

    def begin_epoch(self, servers: int, now: float) -> None:
        """Tell all servers again, when they are back: they hold what they held in a cut."""
        lives = {store: StoreLife(store, life) for store, life in self.lives.items()}
        self._untold = {server: dict(lives) for server in range(servers) if lives}
        self.again_at = now + AGAIN_S

    def letters(self, now: float) -> Iterator[tuple[int, Close]]:
        """Yield the messages that are due, and their receivers."""
        self.again_at = now + AGAIN_S
        for server, stores in self._untold.items():
            lives = tuple(stores.values())
            for start in range(0, len(lives), BATCH):
                yield server, Close(lives[start : start + BATCH])

    def hear(self, server: int, stores: tuple[StoreLife, ...]) -> None:
        """Take in an answer."""
        untold = self._untold.get(server, {})
        for store in [store for store, told in untold.items() if told in stores]:
            del untold[store]
        if not untold:
            self._untold.pop(server, None)
