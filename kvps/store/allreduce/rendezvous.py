"""The rendezvous of the ranks of an allreduce store, and this process's rank.

torchrun, kvps-worker and kvps-launch say it by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Inside a
:class:`~kvps.LocalCluster` each thread is a rank. A process that nobody told anything is a world of one.
"""

from __future__ import annotations

import ipaddress
import logging
import threading
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from kvps import config
from kvps.errors import ConfigError, Timeout
from kvps.phrases import ranks_in_words
from kvps.runtime.local_cluster import LocalCluster

log = logging.getLogger("kvps")
PREFIX = "kvps.allreduce"


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """One store's ranks, before they are connected."""

    name: str
    """The name of the store, for people."""
    rank: int
    size: int
    board: Store | None
    """The key-value store that all ranks share; None in a world of one."""
    host: str
    """The address at which this rank listens for its neighbours; empty to let gloo choose."""

    def gather(self, timeout_s: float) -> None:
        """Wait until every rank is here.

        Raises:
            ConfigError: if this rank was here before, in a process that ended.
            Timeout: naming the ranks that did not come.
        """
        if self.board is None:
            return
        if self.board.add(f"here/{self.rank}", 1) > 1:
            raise ConfigError(
                f"store {self.name!r}: a process was rank {self.rank} before this one, and a ring "
                "takes no replacement; start all ranks anew, or use dist_sync, which takes one"
            )
        places = [f"here/{rank}" for rank in range(self.size)]
        try:
            self.board.wait(places, timedelta(seconds=timeout_s))
        except (RuntimeError, ValueError) as error:
            away = [rank for rank, place in enumerate(places) if not self.board.check([place])]
            raise Timeout(
                f"store {self.name!r}: {ranks_in_words(away)} did not create it in {timeout_s:g} s, and rank "
                f"{self.rank} waited; every rank makes the same stores in the same order"
            ) from error


class Ranks:
    """The ranks that this process knows; its stores share one rendezvous."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._board: Store | None = None
        self._lives: Counter[str] = Counter()
        self._unnamed: Counter[str] = Counter()
        self._is_told = False

    def meet(
        self, name: str | None, prefix: str, taken: Collection[str], timeout_s: float
    ) -> Rendezvous:
        """Return the rendezvous of one store.

        Args:
            name: the store's; None numbers it by order of creation.
            prefix: what the names of numbered ones begin with.
            taken: the names of those that are open here.
            timeout_s: how long the rendezvous may take.

        Raises:
            ConfigError: for half a description of a world, or a name that is in use.
            Timeout: if the process of rank 0 cannot be reached.
        """
        cluster = LocalCluster.current
        if cluster is not None:
            session = cluster.session()
            session.join(timeout_s)
            own = name or session.next_name(prefix)
            _demand_free(own, taken)
            life = session.next_name(f"{PREFIX}/{own}")
            board = PrefixStore(life, cluster.board)
            return Rendezvous(own, session.rank, cluster.workers, board, "127.0.0.1")
        with self._lock:
            own = name or f"{prefix}-{self._unnamed[prefix]}"
            _demand_free(own, taken)
            meeting = self._meeting(own, timeout_s)
            self._unnamed[prefix] += name is None
            self._lives[own] += 1
            return meeting

    def _meeting(self, name: str, timeout_s: float) -> Rendezvous:
        world = config.world()
        if world is None or world.size == 1:
            if not self._is_told and world is None:
                self._is_told = True
                log.warning(
                    "no other ranks are described (WORLD_SIZE is not set): store %r is a world of "
                    "one worker",
                    name,
                )
            return Rendezvous(name, 0, 1, None, "")
        if self._board is None:
            self._board = _rendezvous(world, timeout_s)
        board = PrefixStore(f"{PREFIX}/{name}/{self._lives[name]}", self._board)
        return Rendezvous(name, world.rank, world.size, board, _listening(world.address))


places = Ranks()


def _demand_free(name: str, taken: Collection[str]) -> None:
    if name in taken:
        raise ConfigError(
            f"this worker has an allreduce store {name!r}; close() it first, or give the second "
            "another name="
        )


def _rendezvous(world: config.World, timeout_s: float) -> Store:
    """Return the key-value store of torch's rendezvous, which init_process_group() shares with us."""
    url = f"tcp://{world.address}:{world.port}"
    limit = timedelta(seconds=timeout_s)
    try:
        board, _, _ = next(iter(rendezvous(url, world.rank, world.size, timeout=limit)))
    except (RuntimeError, ValueError) as error:
        raise Timeout(
            f"rank {world.rank} cannot meet the others at {world.address}:{world.port} (MASTER_ADDR, "
            f"MASTER_PORT) in {timeout_s:g} s: {str(error).splitlines()[0]}. Rank 0's process listens "
            "there from its first allreduce store on; start all ranks"
        ) from error
    assert isinstance(board, Store)
    return board


def _listening(master: str) -> str:
    """Return where to listen: on loopback if all ranks are there."""
    try:
        is_near = ipaddress.ip_address(master).is_loopback
    except ValueError:
        is_near = master == "localhost"
    return "127.0.0.1" if is_near else ""
