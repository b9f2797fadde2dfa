"""How a store comes into being: by its name, in the cluster that the environment describes.

Where nothing describes a cluster, a dist store gets an embedded one of one worker and one server,
so that a script for a cluster runs unchanged on a laptop; one line of log says so.
"""

from __future__ import annotations

import atexit
import logging
import sys
import threading
from dataclasses import replace
from typing import Any

from kvps import config
from kvps.core.drops import ACTIONS
from kvps.core.member import EXIT_CONFIG, EXIT_TEMPORARY
from kvps.core.placement import BIGARRAY_BOUND
from kvps.errors import ConfigError, SchedulerLost
from kvps.messages import KEY_MAX, Open
from kvps.store.allreduce import AllreduceStore
from kvps.store.base import KVStoreBase
from kvps.store.calling import seconds
from kvps.store.cluster import LocalCluster, worker_session
from kvps.store.dist import DistStore
from kvps.store.endings import AtExit
from kvps.store.kvstore import TIMEOUT_S
from kvps.store.leaving import leave_if_wished
from kvps.store.local import LocalStore
from kvps.store.meeting import places
from kvps.store.names import Kind, kind_of
from kvps.store.session import Session, leave_at_exit

log = logging.getLogger("kvps")
WORKER_GRACE_S = 240.0
NETWORK_CHUNK_BYTES, LOOPBACK_CHUNK_BYTES, SHARED_CHUNK_BYTES = 384 << 10, 4 << 20, 8 << 20
"""Bytes of a chunk between hosts, where the first should soon be there; and on one host, where fewer
messages count for more."""
STALENESS = 4
ON_WORKER_LOST = ("wait", "shrink", "fail")
RESERVED = "kvps."
"""What the names of the front ends' own stores begin with."""


def create(
    store: str = "local",
    /,
    *,
    name: str | None = None,
    timeout: float = TIMEOUT_S,
    staleness: int | None = None,
    on_worker_lost: str = "wait",
    worker_grace: float = WORKER_GRACE_S,
    deterministic: bool = False,
    bigarray_bound: int | None = None,
    host_aggregation: bool | None = None,
    on_nonfinite: str = ACTIONS[0],
    average: bool = False,
    **options: Any,
) -> Any:
    """Return a store.

    A dist store waits until the cluster is complete. In a process that MXNet's variables make a
    server or the scheduler (``DMLC_ROLE``), it becomes that and exits when the job ends.

    Args:
        store: ``local``, ``device``, ``dist_sync``, ``dist_async``, ``dist_ssp``, the last three
            also with ``_device``; ``allreduce``; or a spelling of MXNet's, or a registered
            plug-in, which gets the ``options``.
        name: by which the workers' stores find each other; without it they are matched by the
            order in which they are created.
        timeout: seconds that a call of the store may take.
        staleness: in ``dist_ssp``, by how many pushes of a key a rank may be ahead of the slowest
            live one when it pulls (4).
        on_worker_lost: what a round does that lacks a worker which ended: ``"wait"`` for a
            replacement, ``"shrink"`` and close without it, or ``"fail"`` at once. (Without rounds
            only ``"fail"`` matters: it ends the calls of the store.)
        worker_grace: seconds that ``"wait"`` waits.
        deterministic: add in the order of ranks, so that the same inputs give the same bits.
        bigarray_bound: elements from which a key is cut over all servers (100,000).
        host_aggregation: in ``dist_sync``, whether workers of one host add up what they push to
            servers on other hosts, and pull it, once for all; True unless
            ``KVPS_HOST_AGGREGATION=0``. Without effect with ``deterministic``.
        on_nonfinite: what becomes of a round (or, where each push is applied by itself, of a push)
            whose sum for a key holds NaN or infinity: ``"apply"`` it like any other; ``"skip"``
            it, so that the key and its optimizer state stay as they are, on all servers; or
            ``"error"``, which skips it and raises :class:`~kvps.NonFinite` at every worker (or
            at the one that pushed), once, from the pull or pushpull of the key that waits for it or
            comes next. See :meth:`~kvps.KVStore.dropped_rounds`.
        average: in ``dist_sync``, divide the sum of a round by how many workers are in it: ranks
            that were lost, that left or that joined do not count.

    Raises:
        ConfigError: for an unknown store or option, or half a description of a cluster.
        Mismatch: if another worker opened the store with another type or option.
        Timeout, SchedulerLost: if the cluster does not get complete in time.

    Example:
        >>> import kvps
        >>> kvps.create("local").type
        'local'
    """
    plugin = KVStoreBase.registry.get(str(store).lower())
    if plugin is not None:
        return plugin(**options)
    kind = kind_of(store, tuple(KVStoreBase.registry))
    if options:
        raise ConfigError(
            f"create({store!r}) has no option {', '.join(sorted(options))}; see help(kvps.create)"
        )
    timeout_s = seconds("timeout", timeout)
    if on_nonfinite not in ACTIONS:
        raise ConfigError(f"on_nonfinite={on_nonfinite!r}: use one of {', '.join(ACTIONS)}")
    if kind.mode == "local":  # one worker: its sum is the mean
        return LocalStore(kind, name or "local", timeout_s, on_nonfinite)
    if kind.mode == "allreduce":
        _refuse_servers_options(
            staleness=staleness,
            on_worker_lost=None if on_worker_lost in ("wait", "fail") else on_worker_lost,
            bigarray_bound=bigarray_bound,
            host_aggregation=host_aggregation,
            on_nonfinite=None if on_nonfinite == ACTIONS[0] else on_nonfinite,
            average=average or None,
        )
        return _ring(kind, None if name is None else _checked_name(name), "allreduce", timeout_s)
    opened = _opened(
        kind,
        staleness,
        on_worker_lost,
        deterministic,
        bigarray_bound,
        host_aggregation,
        on_nonfinite,
        average,
    )
    grace_s = seconds("worker_grace", worker_grace)
    session = _session(timeout_s)
    named = replace(opened, store=_named(session, name), chunk_bytes=_chunk_bytes(session))
    return DistStore(kind, session, named, timeout_s, grace_s)


def create_own(
    store: str,
    owner: str,
    *,
    average: bool = False,
    on_worker_lost: str = ON_WORKER_LOST[0],
    timeout_s: float = TIMEOUT_S,
) -> Any:
    """Return a front end's own store, as :func:`create` with the defaults.

    Args:
        store: as in :func:`create`.
        owner: which front end; the store's name is made of it and the order of creation, and no
            store of a user can have it.
        average, on_worker_lost, timeout_s: as in :func:`create`.
    """
    kind = None if store.lower() in KVStoreBase.registry else kind_of(store)
    if kind is not None and kind.mode == "allreduce":
        return _ring(kind, None, RESERVED + owner, TIMEOUT_S)
    if kind is None or not kind.is_distributed:
        return create(store)
    session = _session(timeout_s)
    opened = _opened(kind, None, on_worker_lost, False, None, None, ACTIONS[0], average)
    name = session.next_name(RESERVED + owner)
    named = replace(opened, store=name, chunk_bytes=_chunk_bytes(session))
    return DistStore(kind, session, named, timeout_s, WORKER_GRACE_S)


def join_as(rank: int | None, timeout_s: float) -> Session:
    """Return this process's session, and wait for the cluster, as :func:`create` does.

    Args:
        rank: to be asked for where the environment names none, and the session begins here.
        timeout_s: how long to wait for the cluster.
    """
    return _session(timeout_s, rank)


def has_joined() -> bool:
    """Whether this process has its session already."""
    if LocalCluster.current is not None:
        return True
    return _process.session is not None and not _process.session.is_over


def end_embedded() -> None:
    """End the cluster that lies inside this process because none was described, if there is one."""
    if _process.embedded is not None:
        _process.end()


def _ring(kind: Kind, name: str | None, prefix: str, timeout_s: float) -> AllreduceStore:
    """Return an allreduce store, once all ranks are there."""
    endings = _process.endings if LocalCluster.current is None else LocalCluster.current.endings()
    meeting = places.meet(name, prefix, endings.names, timeout_s)
    return AllreduceStore(kind, meeting, endings, timeout_s)


def _refuse_servers_options(**given: object) -> None:
    """Refuse what only servers can do.

    Raises:
        ConfigError: for an option that is not None.
    """
    for name, value in given.items():
        if value is not None:
            raise ConfigError(
                f"{name}={value!r} needs servers, which allreduce does without; leave it out, or "
                "use dist_sync (staleness= belongs to dist_ssp)"
            )


def _opened(
    kind: Kind,
    staleness: int | None,
    on_worker_lost: str,
    deterministic: bool,
    bigarray_bound: int | None,
    host_aggregation: bool | None,
    on_nonfinite: str,
    average: bool,
) -> Open:
    if staleness is not None and kind.mode != "ssp":
        raise ConfigError(f"staleness= is an option of dist_ssp, not of {kind.type}")
    bound = STALENESS if staleness is None else staleness
    if type(bound) is not int or bound < 0:
        raise ConfigError(f"staleness={staleness!r}: use a whole number of pushes from 0 on")
    if on_worker_lost not in ON_WORKER_LOST:
        raise ConfigError(
            f"on_worker_lost={on_worker_lost!r}: use one of {', '.join(ON_WORKER_LOST)}"
        )
    if average and kind.mode != "sync":
        raise ConfigError(
            f"average= is an option of dist_sync, not of {kind.type}: each push is applied by itself"
        )
    return Open(
        "",
        kind.mode,
        bound if kind.mode == "ssp" else 0,
        bool(deterministic),
        on_worker_lost,
        config.bigarray_bound(bigarray_bound, BIGARRAY_BOUND),
        bundles=config.host_aggregation(host_aggregation)
        and kind.mode == "sync"
        and not deterministic,
        on_nonfinite=on_nonfinite,
        average=bool(average),
    )


def _chunk_bytes(session: Session) -> int:
    """Return how much should travel at once."""
    wish = config.chunk_bytes()
    if wish is not None:
        return wish
    view = session.core.member.view
    members = view.members if view is not None else ()
    machines = {one.machine for one in members}
    endpoints = [one.endpoint for one in members if one.endpoint]
    if len(machines) == 1 and 0 not in machines:
        return SHARED_CHUNK_BYTES
    if all(config.is_loopback(one) for one in endpoints):
        return LOOPBACK_CHUNK_BYTES
    return NETWORK_CHUNK_BYTES


def _named(session: Session, name: str | None) -> str:
    return session.next_name("store") if name is None else _checked_name(name)


def _checked_name(name: str) -> str:
    given: object = name
    if not isinstance(given, str) or not 1 <= len(given) <= KEY_MAX or not given.isprintable():
        raise ConfigError(f"name={name!r}: use 1 to {KEY_MAX} printable characters")
    if given.startswith(RESERVED):
        raise ConfigError(f"name={name!r}: names that begin with {RESERVED!r} are kvps's own")
    return given


def _session(timeout_s: float, rank: int | None = None) -> Session:
    """Return this process's session, or this thread's inside a LocalCluster, and wait for it."""
    if LocalCluster.current is not None:
        session = LocalCluster.current.session()
    else:
        with _process.lock:
            session = _process.begin(rank)
    session.join(timeout_s)
    return session


class _Process:
    """The session that all dist stores of this process share."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.session: Session | None = None
        self.embedded: LocalCluster | None = None
        self.endings = AtExit()

    def begin(self, rank: int | None = None) -> Session:
        """Return the session, making it if this is the first store; ``rank`` is a wish."""
        if self.session is not None and not self.session.is_over:
            return self.session
        found = config.cluster()
        if found is None:
            self.session = self._embed()
        elif found.role != "worker":
            _become(found)
        else:
            leave_if_wished(config.switch("KVPS_LEAVE_AT_SIGTERM"))
            self.session = worker_session(
                found.scheduler,
                rank if found.rank is None else found.rank,
                found.incarnation,
                found.job,
                config.join_max_s(),
            )
            leave_at_exit(self.session, found.incarnation > 0, TIMEOUT_S)
        assert self.session is not None
        return self.session

    def _embed(self) -> Session:
        self.embedded = LocalCluster(workers=1, servers=1)
        self.embedded.start()
        log.warning(
            "no cluster is described (KVPS_SCHEDULER is not set): this process is a cluster of one "
            "worker and one server at %s",
            self.embedded.scheduler,
        )
        atexit.register(self.end)
        return self.embedded.session()

    def end(self) -> None:
        """Leave the cluster; the next store begins anew."""
        self.endings.end(is_done=True)
        with self.lock:
            session, self.session = self.session, None
            embedded, self.embedded = self.embedded, None
        if embedded is not None:
            embedded.close()
        elif session is not None and not session.is_over:
            session.flush(TIMEOUT_S)
            session.leave(done=True, exit_code=0, reason="shutdown()")


_process = _Process()


def shutdown() -> None:
    """Flush all stores and leave the cluster; rounds close without this worker from then on.

    Inside a LocalCluster the worker is the calling thread. A process that ends well does this by itself. Doing nothing is fine where there is no cluster.

    Example:
        >>> import kvps
        >>> kvps.shutdown()
    """
    if LocalCluster.current is not None:
        LocalCluster.current.leave()
    else:
        _process.end()


def _become(found: config.Cluster) -> None:
    """Be the server or the scheduler that DMLC_ROLE names, and exit with it."""
    try:
        sys.exit(_run(found, config.switch("KVPS_INSECURE")))
    except ConfigError as error:
        log.error("%s", error)  # the text says all
        sys.exit(EXIT_CONFIG)
    except SchedulerLost as error:
        log.error("%s", error)
        sys.exit(EXIT_TEMPORARY)


def _run(found: config.Cluster, insecure: bool) -> int:
    if found.role == "scheduler":
        from kvps.store.roles import run_scheduler

        assert found.workers is not None
        assert found.servers is not None
        bind = config.scheduler_bind(found.scheduler)
        return run_scheduler(found.workers, found.servers, bind, insecure=insecure)

    from kvps.store.serving import run_server

    bind = config.server_bind(found.scheduler, insecure)
    return run_server(
        found.scheduler,
        bind,
        insecure=insecure,
        checkpoint_dir=config.checkpoint_dir(),
        checkpoint_every_s=config.checkpoint_every_s(None),
    )
