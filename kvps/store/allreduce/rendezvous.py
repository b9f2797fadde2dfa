"""The rendezvous of the ranks of an allreduce store, and this process's rank.

torchrun, kvps-worker and kvps-launch say it by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Inside a
:class:`~kvps.LocalCluster` each thread is a rank. A process without any of these is a world of one.

torch's own rendezvous listens on every address of the host, without authentication. Here rank 0 listens at
MASTER_ADDR alone, and torch's ``init_process_group()`` in that process shares it. In a job with
keys the ranks of several hosts do not meet, as what they say there and by gloo is anybody's to
read and to change.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import threading
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore
from torch.distributed.rendezvous import rendezvous

from kvps import config
from kvps.errors import ConfigError, Timeout
from kvps.phrases import COMING, ranks_in_words
from kvps.runtime.current import current

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
                f"store {self.name!r}: another process was rank {self.rank} before, and a ring accepts "
                "no replacement; restart all ranks, or use dist_sync, which accepts one"
            )
        places = [f"here/{rank}" for rank in range(self.size)]
        try:
            self.board.wait(places, timedelta(seconds=timeout_s))
        except (RuntimeError, ValueError) as error:
            away = [rank for rank, place in enumerate(places) if not self.board.check([place])]
            raise Timeout(
                f"store {self.name!r}: {ranks_in_words(away)} did not create it in {timeout_s:g} s, and rank "
                f"{self.rank} waited; every rank must create the same stores in the same order"
            ) from error


class Ranks:
    """The ranks that this process knows; its stores share one rendezvous."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._board: Store | None = None
        self._lives: Counter[str] = Counter()
        self._unnamed: Counter[str] = Counter()
        self._is_told = False

    def meet(self, name: str | None, prefix: str, taken: Collection[str], timeout_s: float) -> Rendezvous:
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
        cluster = current()
        if config.most_workers() if cluster is None else cluster.most_workers:
            raise ConfigError(
                f"an allreduce store meets all ranks once, and {COMING}: use dist_sync, or start the job "
                "with a fixed number of workers"
            )
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
                log.warning("WORLD_SIZE is not set: store %r is a world of one worker", name)
            return Rendezvous(name, 0, 1, None, "")
        if self._board is None:
            _demand_trust(name, world)
            self._board = _rendezvous(world, timeout_s)
        board = PrefixStore(f"{PREFIX}/{name}/{self._lives[name]}", self._board)
        is_here = config.is_loopback(f"tcp://{world.address}")  # all ranks are
        listens_at = "127.0.0.1" if is_here else ""
        return Rendezvous(name, world.rank, world.size, board, listens_at)


places = Ranks()


def _demand_free(name: str, taken: Collection[str]) -> None:
    if name in taken:
        raise ConfigError(
            f"this worker already has an allreduce store {name!r}; close() it first, or give the second "
            "store another name="
        )


def _demand_trust(name: str, world: config.World) -> None:
    """Refuse to leave a host without authentication, where the job has keys."""
    is_keyed = config.keys_path() is not None and not config.switch("KVPS_INSECURE")
    if is_keyed and not config.is_loopback(f"tcp://{world.address}"):
        raise ConfigError(
            f"store {name!r}: this job has keys (KVPS_KEYS), but the traffic of an allreduce store between "
            f"hosts has none: torch's sockets at {world.address}:{world.port} (MASTER_ADDR, MASTER_PORT) and "
            "gloo's accept any process. Use dist_sync, or set KVPS_INSECURE=1 in a network that you trust"
        )


def _rendezvous(world: config.World, timeout_s: float) -> Store:
    """Return the key-value store of torch's rendezvous, which init_process_group() shares with us."""
    url = f"tcp://{world.address}:{world.port}"
    limit = timedelta(seconds=timeout_s)
    is_torchruns = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        if world.rank == 0 and not is_torchruns and (listening := _listen(world)) is not None:
            return TCPStore(
                world.address,
                world.port,
                world.size,
                is_master=True,
                timeout=limit,
                multi_tenant=True,
                master_listen_fd=listening.detach(),
            )
        board, _, _ = next(iter(rendezvous(url, world.rank, world.size, timeout=limit)))
    except (RuntimeError, ValueError) as error:
        raise Timeout(
            f"rank {world.rank} cannot meet the others at {world.address}:{world.port} (MASTER_ADDR, "
            f"MASTER_PORT) in {timeout_s:g} s: {str(error).splitlines()[0]}. The process of rank 0 "
            "listens there as soon as it creates an allreduce store; start all ranks"
        ) from error
    assert isinstance(board, Store)
    return board


def _listen(world: config.World) -> socket.socket | None:
    """Return a socket that listens where the ranks meet; None where torch listens already, or has to.

    That is so where ``init_process_group()`` came first, and where MASTER_ADDR is an address by which others
    reach this host though it is none of its own.
    """
    try:
        return socket.create_server((world.address, world.port), backlog=2048)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            log.warning(
                "%s (MASTER_ADDR) is not an address of this host: port %d is open on all of its addresses",
                world.address,
                world.port,
            )
        return None
