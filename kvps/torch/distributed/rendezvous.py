"""Rendezvous of ``init_process_group("kvps")``: the cluster has assigned the ranks.

torch asks the environment for RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun and kvps-worker set
them. A plain process of a cluster has none of these, and neither has a process without a cluster. So if a
cluster is configured, or if torch would fail, the ranks meet in the cluster: rank and size are its own, and
torch's store is at a port of rank 0 that the system chooses; the other ranks learn it through the servers. A
destroyed group can be created again, because no port is used twice. torchrun's agents have a store
already, a new one for each time that they start the ranks, and that is used.

All ranks of a group begin together. Where torchrun starts them all again, they are another
*generation*, and share no store on the servers with their predecessors. A rank that is started
again by itself is refused.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from urllib.parse import urlparse

import torch
import torch.distributed as dist
from torch._C import DisableTorchFunction
from torch._C._distributed_c10d import HashStore, Store, TCPStore

from kvps import config
from kvps.core.membership_client import EXIT_CONFIG
from kvps.errors import ConfigError, KvpsError, WorkerLost
from kvps.phrases import COMING, ranks_in_words
from kvps.runtime import process
from kvps.runtime.current import current
from kvps.runtime.member_process import own_host
from kvps.runtime.worker_session import ending
from kvps.store.create import create_dist
from kvps.store.options import StoreOptions
from kvps.store.server_store import DistStore
from kvps.torch.distributed.call_checker import CallChecker, await_goodbyes, own_connection
from kvps.torch.distributed.collectives import Collectives, Plan
from kvps.torch.distributed.mailbox import Board, open_posts
from kvps.torch.distributed.ordered_executor import OrderedExecutor
from kvps.torch.distributed.process_group import NAME, ProcessGroup

log = logging.getLogger("kvps")
ADDRESS_MAX = 256
"""Bytes of HOST:PORT."""
ALL_HERE_MAX_S = 60.0
"""Seconds until all ranks of a group must have agreed on it, once each was here once."""
RETURN_MAX_S = 30.0
"""Seconds that the replacement of a rank that was lost is waited for: a launcher may be starting
all ranks again."""
LOOK_EVERY_S = 0.02
REFUSED = "kvps.refused"
"""The key of torch's store, with a rank, that says why that rank could not make its group."""
RANKS_AT_ONCE, LOOK_FOR_MISSING_S = 64, 0.2
"""Larger groups look less often, in proportion; seconds between two looks at each missing rank."""


World = tuple[Board, OrderedExecutor, CallChecker]
"""The stores, the executor and the checker of the groups of a process."""


@dataclass(frozen=True, slots=True)
class _Served:
    """torch's store of a group."""

    store: Store
    """It holds what serves the store, if this process does."""
    calls: Store | None
    """The part that the ranks' checkers ask; None if there is only one rank."""
    session: Any
    ranks: Sequence[int]
    """The ranks of the group, by their number in the job."""

    def others(self) -> list[int]:
        """Return the other ranks of the group that are in the job, by the newest view."""
        held = self.session.info.workers_in("held")
        return [rank for rank in self.ranks if rank in held and rank != self.session.rank]


@dataclass(slots=True)
class _Shared:
    """The stores that the groups of this process share, from init_process_group to destroy_process_group."""

    world: World | None = None
    began: bool = False
    """Whether the session began with the rendezvous, or with the first group."""
    served: list[_Served] = field(default_factory=list)
    """torch's stores of all groups of this process. Rank 0 serves them until it ends: others may
    leave a group later."""
    posts: DistStore | None = None
    """That of groups that can be reconfigured: one of few ranks may lack worker 0, which sets the rule."""
    generations: int = 0
    """How often this process has formed the group of all ranks."""


_shared = _Shared()


def meet(
    of_torch: Callable[..., Iterator[Any]], url: str, timeout: timedelta = timedelta(minutes=30), **more: Any
) -> Iterator[Any]:
    """Yield torch's store, the rank and the number of ranks: as torch has them for "env://", or kvps."""
    is_torch_able = config.text("MASTER_ADDR") and config.text("MASTER_PORT")
    _shared.began = not process.has_joined()
    is_torchruns = config.switch("TORCHELASTIC_USE_AGENT_STORE")
    if is_torch_able and (is_torchruns or not _has_servers(timeout.total_seconds())):
        yield from of_torch(url, timeout=timeout, **more)
    else:
        yield _meet(urlparse(url).query, timeout.total_seconds())


def _meet(query: str, timeout_s: float) -> tuple[Store, int, int]:
    """Return torch's store, and the rank and number of workers of this process's cluster."""
    given = dict(field.split("=") for field in query.split("&") if field)
    rank = int(given["rank"]) if "rank" in given else config.whole("RANK")
    size = int(given["world_size"]) if "world_size" in given else config.whole("WORLD_SIZE")
    session = _join(rank, size, timeout_s)
    workers = session.info.workers
    if session.info.most:
        raise ConfigError(
            f"a process group has the ranks that it began with, and {COMING}: use kvps.torch."
            "DistributedOptimizer or kvps.Trainer, or start the job with a fixed number of workers"
        )
    if workers == 1:
        return HashStore(), session.rank, 1
    scheduler = session.scheduler
    host = "127.0.0.1" if config.is_loopback(scheduler) else own_host(scheduler, config.join_max_s())
    limit = timedelta(seconds=timeout_s)
    store: Store | None = None
    row = torch.zeros(ADDRESS_MAX, dtype=torch.uint8, device="cpu")
    if session.rank == 0:
        listening = socket.create_server((host, 0))
        port = int(listening.getsockname()[1])
        store = TCPStore(
            host,
            port,
            is_master=True,
            timeout=limit,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )
        address = f"{host}:{port}".encode()
        row[: len(address)] = torch.frombuffer(bytearray(address), dtype=torch.uint8)
    owner = f"torch.rendezvous.{session.info.incarnation(0)}"
    with create_dist("dist_sync", owner, StoreOptions(timeout_s)) as kv:
        kv.broadcast("address", row, out=row)
        if store is None:
            host, _, port_text = bytes(row.tolist()).rstrip(b"\0").decode().rpartition(":")
            store = TCPStore(host, int(port_text), is_master=False, timeout=limit, wait_for_workers=False)
        kv.barrier()  # torch may refuse an argument now, and then nobody would serve the store
    return store, session.rank, workers


def _has_servers(timeout_s: float) -> bool:
    """Whether this process is in a cluster with servers, through which ranks can meet."""
    return _is_described() and process.session(timeout_s, config.whole("RANK")).info.servers > 0


def _is_described() -> bool:
    """Whether this process is in a cluster, or the environment configures a cluster."""
    return process.has_joined() or current() is not None or config.cluster() is not None


def _join(rank: int | None, size: int | None, timeout_s: float) -> Any:
    """Return this process's session, which must have this rank and number of workers.

    Raises:
        ConfigError: if there is no cluster for several ranks, or it has another order of ranks.
    """
    if not _is_described() and (size or 1) > 1:
        raise ConfigError(
            f"init_process_group({NAME!r}): WORLD_SIZE is {size}, and no cluster is configured. Start "
            "kvps-scheduler and kvps-server, and set KVPS_SCHEDULER=tcp://HOST:PORT in every process; "
            "or start the script with kvps-launch"
        )
    session = process.session(timeout_s, rank)
    workers = session.info.workers
    if size is not None and workers != size:
        raise ConfigError(
            f"init_process_group({NAME!r}): torch has {size} ranks (WORLD_SIZE), but the cluster has "
            f"{workers} workers; start kvps-scheduler with --workers {size}"
        )
    if rank is not None and session.rank != rank:
        raise ConfigError(
            f"init_process_group({NAME!r}): this process is rank {rank} for torch (RANK) and worker "
            f"{session.rank} of the cluster. Call init_process_group before the first kvps.create, or "
            f"set KVPS_RANK to RANK"
        )
    return session


def make(options: Any, more: Any) -> ProcessGroup:
    """Return a process group; torch calls this. Tell other ranks, which wait for this one, if it
    is refused."""
    try:
        with DisableTorchFunction():  # the script's default device is not the device of our tensors
            return _made(options, more)
    except ConfigError as error:
        with suppress(RuntimeError):
            options.store.set(f"{REFUSED}.{options.group_rank}", str(error))
        raise


def _made(options: Any, more: Any) -> ProcessGroup:
    if more is not None:
        raise ConfigError(f"the backend {NAME!r} has no pg_options; remove them")
    timeout_s = options.timeout.total_seconds()
    members = list(options.global_ranks_in_group)
    is_default, name = not members, str(options.group_id)
    can_change = getattr(options, "enable_reconfigure", False)  # torch 2.14 has it
    if not is_default and getattr(dist.group.WORLD, "supports_reconfigure", False):
        raise ConfigError(
            "new_group() beside a group that can be reconfigured is not supported by the backend kvps; "
            "leave enable_reconfigure out, or make the other group with another backend"
        )
    size, rank = options.group_size, options.group_rank
    if not is_default:
        size, rank = dist.get_world_size(), dist.get_rank()
    if _shared.world is None:
        if len(members) not in (0, size):
            raise ConfigError(
                f"new_group(backend={NAME!r}) of {len(members)} ranks is the first group of the backend, and "
                f"needs all ranks: call init_process_group({NAME!r}), or make a group of all ranks first"
            )
        _shared.began = _shared.began or not process.has_joined()
        session = _join(rank, size, timeout_s)
        if can_change:
            if _shared.posts is None or _shared.posts.session is not session:
                _shared.posts = open_posts("torch.posts", StoreOptions(timeout_s, "shrink"))
            change = _Change(name, options.store, session, timeout_s)
            return ProcessGroup(name, rank, size, _close, change.handle(rank), change)
        generation = _agree(options.store, session, timeout_s)
        _shared.world = _begin_world(options.store, session, generation, range(size), timeout_s)
    group = ProcessGroup(name, options.group_rank, options.group_size, _close if is_default else lambda: None)
    board, tracks, checker = _shared.world
    group.enter(Collectives(board, name, members or range(size), timeout_s), tracks, checker)
    return group


def _begin_world(
    store: Store,
    session: Any,
    generation: str,
    ranks: Sequence[int],
    timeout_s: float,
    posts: DistStore | None = None,
) -> World:
    """Make and return what these ranks talk through."""
    tracks = OrderedExecutor()
    calls = own_connection(store, f"kvps.calls.{generation}") if len(ranks) > 1 else None
    _shared.served.append(_Served(store, calls, session, ranks))
    atexit.unregister(_serve_to_the_end)
    atexit.register(_serve_to_the_end)  # while threads can still end, and before the job is left
    is_whole = len(ranks) == session.info.workers
    board = Board(timeout_s, generation, posts, "fail" if is_whole else "shrink")
    watched = ranks if posts else ()  # of other groups, the store of posts ends the calls
    checker = CallChecker(
        calls, tracks, lambda: _is_there(session, 0), session.rank, lambda: _lost(session, watched)
    )
    return board, tracks, checker


@dataclass(slots=True)
class _Change:
    """Changes of the members of a group: each is a world of its own, and begins with new keys."""

    name: str
    store: Store
    session: Any
    timeout_s: float
    used: set[int] = field(default_factory=set)
    """The uuids of the worlds before."""

    def handle(self, rank: int) -> str:
        """Return what names the process that is this rank of the job now."""
        return f"kvps/{rank}/{self.session.info.incarnation(rank)}"

    def __call__(self, group: ProcessGroup, opts: Any) -> Plan:
        """Have a group enter the world that the options name; return the barrier of its members.

        Raises:
            ConfigError: for handles that are not of this job, or lack this process; or hints.
            RuntimeError: for a uuid that was used.
        """
        uuid, hints = int(opts.uuid), dict(opts.hints)
        handles = list(opts.handles) if isinstance(opts.handles, list) else sorted(opts.handles)
        if uuid in self.used:
            raise RuntimeError(f"_reconfigure: uuid {uuid} was already used by this process; give another")
        parts = [handle.split("/") for handle in handles]
        ranks = [int(rank) for kind, rank, *_ in parts if kind == NAME]
        if self.handle(self.session.rank) not in handles or hints or len({*ranks}) < len(handles):
            raise ConfigError(
                f"_reconfigure: give the handle of each member, with that of this process, and no hints; got "
                f"{handles} and {hints}"
            )
        self.used.add(uuid)
        _end_world()
        limit_s = opts.timeout.total_seconds() if opts.timeout else self.timeout_s
        generation = hashlib.blake2b(f"{uuid} {handles}".encode(), digest_size=8).hexdigest()
        _shared.world = _begin_world(self.store, self.session, generation, ranks, limit_s, _shared.posts)
        board, tracks, checker = _shared.world
        label = f"{self.name}.{generation}"
        group.enter(Collectives(board, label, ranks, self.timeout_s), tracks, checker)
        return Collectives(board, f"{label}.entry", ranks, limit_s).barrier()


def _agree(store: Store, session: Any, timeout_s: float) -> str:
    """Return the generation: the same for all ranks, when all are here.

    A launcher that starts the ranks again may give them the same store, with what their
    predecessors wrote. So each rank writes its incarnation, and how often it has done this. A
    generation consists of what all ranks have written, if the members of the job are those; and it
    is agreed on when each rank has said that it sees the same.

    Raises:
        WorkerLost: if another rank does not come, or belongs to an earlier group.
    """
    rank, size = session.rank, session.info.workers
    mine = f"{session.info.incarnation(rank)}.{_shared.generations}"
    _shared.generations += 1
    store.delete_key(f"{REFUSED}.{rank}")  # the refusal of an earlier attempt
    store.set(f"kvps.{rank}", mine)
    _await_all(store, session, time.monotonic() + timeout_s)
    until = time.monotonic() + min(timeout_s, ALL_HERE_MAX_S)
    while True:
        here = [store.get(f"kvps.{index}").decode() for index in range(size)]
        strange = [index for index in range(size) if not _is_member(session, index, here[index])]
        generation = hashlib.blake2b("-".join(here).encode(), digest_size=8).hexdigest()
        if not strange:
            store.set(f"kvps.{generation}.{rank}", "")
            if store.check([f"kvps.{generation}.{index}" for index in range(size)]):
                return generation
        if time.monotonic() > until:
            others = strange or [
                index for index in range(size) if not store.check([f"kvps.{generation}.{index}"])
            ]
            error = WorkerLost(
                f"init_process_group({NAME!r}): {ranks_in_words(others)} did not begin with rank {rank} "
                f"within {min(timeout_s, ALL_HERE_MAX_S):g} s. All ranks of a group begin together: when a "
                "rank was started again, start the others again, too, as torchrun does"
            )
            info = session.info
            if all(info.incarnation(other) < info.incarnation(rank) for other in others):
                error.exit_code = (
                    EXIT_CONFIG  # they go on in an older group: another attempt would end so, too
                )
            raise error
        time.sleep(LOOK_EVERY_S)


def _await_all(store: Store, session: Any, until: float) -> None:
    """Wait until each rank has begun to form the group.

    Raises:
        WorkerLost: if a rank does not come, because it has ended or been refused.
        ConfigError: if a rank was refused.
    """
    ranks = range(session.info.workers)
    pause_s = LOOK_EVERY_S * max(1.0, len(ranks) / RANKS_AT_ONCE)
    begun = time.monotonic()
    look = begun + LOOK_FOR_MISSING_S
    while not store.check([f"kvps.{rank}" for rank in ranks]):
        now = time.monotonic()
        if now > look:
            may_return = now < begun + RETURN_MAX_S
            _demand_others(store, session, is_late=now > until, may_return=may_return)
            look = now + max(LOOK_FOR_MISSING_S, 10 * pause_s)
        time.sleep(pause_s)


def _demand_others(store: Store, session: Any, *, is_late: bool, may_return: bool) -> None:
    """Refuse to wait for a rank that cannot come.

    Raises:
        WorkerLost: if one has ended, or ``is_late``. One that is lost has not, while it ``may_return``.
        ConfigError: if one was refused.
    """
    missing = [rank for rank in range(session.info.workers) if not store.check([f"kvps.{rank}"])]
    for rank in missing:
        if store.check([refused := f"{REFUSED}.{rank}"]):
            raise ConfigError(f"rank {rank} was refused: {store.get(refused).decode()}")
    info = session.info  # one view, which the loop may replace meanwhile
    here = {*info.workers_in("held"), *(info.workers_in("lost") if may_return else [])}
    gone = [rank for rank in missing if rank not in here]
    if missing and (gone or is_late):
        reason = "ended first" if gone else "did not begin in time"
        raise WorkerLost(
            f"init_process_group({NAME!r}): {ranks_in_words(gone or missing)} {reason}; see the output of "
            "the process. All ranks of a group begin together"
        )


def _is_member(session: Any, rank: int, life: str) -> bool:
    """Whether the process that wrote ``life`` holds that seat, by the newest view."""
    info = session.info
    is_held = rank == session.rank or rank in info.workers_in("held")
    return is_held and life.partition(".")[0] == str(info.incarnation(rank))


def _is_there(session: Any, rank: int) -> bool:
    """Whether a rank is still a worker of the job, by the newest view."""
    return rank in session.info.workers_in("held")


def _lost(session: Any, ranks: Sequence[int]) -> list[int]:
    """Return those of some ranks that are lost, by the newest view."""
    info = session.info
    return sorted({*ranks} & {*info.workers_in("lost"), *info.workers_in("gone")})


def _serve_to_the_end() -> None:
    """Serve torch's stores until no other rank asks them, if this process ends well; then end them.

    A rank that fails does not wait: the others shall hear of it.
    """
    for served in _shared.served:
        if served.calls is not None and served.session.rank == 0 and ending.exit_code == 0:
            await_goodbyes(served.calls, served.others)
    _shared.served.clear()


def _close() -> None:
    """End the stores that the groups share.

    The process stays a worker until it ends or calls kvps.shutdown(), so that it may begin another group; but
    an embedded cluster that began with the group ends with it.
    """
    _end_world()
    began, _shared.began = _shared.began, False
    if began:
        process.end_embedded()


def _end_world() -> None:
    if _shared.world is None:
        return
    (board, tracks, checker), _shared.world = _shared.world, None
    checker.close()
    try:
        board.close()
    except KvpsError as error:  # the caller has got it from wait()
        log.warning("destroy_process_group: %s", error)
    tracks.close()
