"""Creation of stores: by name, in the cluster that the environment describes.

If the environment configures no cluster, a dist store gets an embedded cluster of one worker and one server,
so that a script for a cluster runs unchanged on a laptop; one line of log says so.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from kvps import config
from kvps.core.nonfinite import ACTIONS
from kvps.core.placement import BIGARRAY_BOUND
from kvps.core.server.options import LATE, check_options
from kvps.errors import ConfigError
from kvps.observe import logs
from kvps.phrases import COMING
from kvps.protocol.envelope import KEY_MAX
from kvps.protocol.stores import Open
from kvps.runtime import process
from kvps.runtime.ticket import TIMEOUT_S
from kvps.runtime.worker_session import WorkerSession
from kvps.store.allreduce.rendezvous import places
from kvps.store.allreduce.store import AllreduceStore
from kvps.store.base import KVStoreBase, Store
from kvps.store.device_codec import DeviceCodec
from kvps.store.kvstore import KVStore
from kvps.store.names import Kind, kind_of
from kvps.store.options import SERVER_POLICIES, WORKER_GRACE_S, StoreOptions
from kvps.store.server_store import DistStore

log = logging.getLogger("kvps")
NETWORK_CHUNK_BYTES, LOOPBACK_CHUNK_BYTES = 384 << 10, 8 << 20
SHARED_CHUNK_BYTES, PROCESS_CHUNK_BYTES = 32 << 20, 4 << 20
"""Bytes of a chunk: between hosts, where the first chunk should arrive early; on one host, where
fewer messages are cheaper, through loopback sockets and through shared memory; and within one process."""
STALENESS = 4
OPTION_OF = {"staleness": "ssp", "average": "sync", "quorum": "sync", "on_server_lost": "sync"}
"""Option -> the only mode that has it."""
RESERVED = "kvps."
"""The prefix of the names of the front ends' own stores."""


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
    quorum: int | None = None,
    grace: float | str = "auto",
    late: str = "drop",
    on_server_lost: str = SERVER_POLICIES[0],
    **options: Any,
) -> Any:
    """Return a store.

    A dist store waits until the cluster is complete. In a process that MXNet's variables make a server or the
    scheduler (``DMLC_ROLE``), it runs that role and exits when the job ends.

    Args:
        store: ``local``, ``device``, ``dist_sync``, ``dist_async``, ``dist_ssp``, the last three
            also with ``_device``; ``allreduce``; or a spelling of MXNet's, or a registered
            plug-in, which gets the ``options``.
        name: identifies the store on all workers; without a name, stores are matched by the order
            of creation.
        timeout: seconds that a call of the store may take.
        staleness: in ``dist_ssp``, how many pushes of a key a rank may be ahead of the slowest live rank when
            it pulls (4).
        on_worker_lost: what happens to a round without the push of a worker that ended: ``"wait"`` for a
            replacement, ``"shrink"`` and close without it, or ``"fail"`` at once. (In a store without rounds
            only ``"fail"`` has an effect: it ends the calls of the store.)
        worker_grace: seconds to wait with ``"wait"``.
        deterministic: sum in rank order, so that equal inputs give equal bits.
        bigarray_bound: number of elements from which a key is split over all servers (100,000).
        host_aggregation: in ``dist_sync``, whether the workers of a host merge their pushes to and pulls from
            servers on other hosts; True unless ``KVPS_HOST_AGGREGATION=0``. No effect with ``deterministic``.
        on_nonfinite: what happens to a round (or, where each push is applied by itself, to a push) whose sum
            for a key has NaN or infinity: ``"apply"`` applies it; ``"skip"`` drops it, so that the key and
            its optimizer state do not change on any server; ``"error"`` drops it and raises
            :class:`~kvps.NonFinite` once at every worker (or at the worker that pushed), from the waiting or
            next pull or pushpull of the key. See :meth:`~kvps.KVStore.dropped_rounds`.
        average: in ``dist_sync``, divide the sum of a round by the number of workers in it; ranks that are
            lost, have left or have joined do not count.
        quorum: in ``dist_sync``, close a round when this many workers have pushed and ``grace`` is
            over, without the others; None waits for all. Nobody waits for lost workers then:
            ``"wait"`` means ``"shrink"``. A worker's next push goes to the first round that has
            not closed without it, once it has pulled.
        grace: seconds that a round waits for the other workers after its quorum; ``"auto"`` is a
            quarter of the time since the last round closed.
        late: what happens to a push whose round has closed: ``"drop"`` does not apply it,
            ``"next"`` counts it in the first open round without a push of this worker. With
            either, a push is applied at most once. With ``"next"``, prefer ``rescale_grad=1 /
            num_workers`` to ``average``, although it counts lost workers, too: the mean of a round
            with few workers is as large as that of all, and workers that push in turns would move
            the weights too far.
        on_server_lost: in ``dist_sync``, where the values of a lost server come from: ``"checkpoint"``, or
            ``"rebuild"`` without one. Then each worker keeps the values that it was told last (a copy of the
            model, or a lease of the servers' memory on one host), and gives them to the server that takes
            the lost one's place. Calls wait for that, none is repeated, and sums keep their bits. This is for
            servers that only add up, by ``pushpull``: without optimizer, compression, tables or quorum.

    Raises:
        ConfigError: for an unknown store or option, or an incomplete configuration of a cluster.
        Mismatch: if another worker opened the store with another type or option.
        Timeout, SchedulerLost: if the cluster is not complete in time.

    Example:
        >>> import kvps
        >>> kvps.create("local").type
        'local'
    """
    logs.begin_in_script()
    plugin = KVStoreBase.registry.get(str(store).lower())
    if plugin is not None:
        return plugin(**options)
    kind = kind_of(store, tuple(KVStoreBase.registry))
    if quorum is not None and kind.mode == "local":
        raise ConfigError(f"quorum= is an option of dist_sync, not of {kind.type}")
    if options:
        raise ConfigError(
            f"create({store!r}) has no option {', '.join(sorted(options))}; see help(kvps.create)"
        )
    shared = StoreOptions.of(timeout, on_worker_lost, worker_grace, on_server_lost)
    if on_nonfinite not in ACTIONS:
        raise ConfigError(f"on_nonfinite={on_nonfinite!r}: use one of {', '.join(ACTIONS)}")
    if kind.mode == "local":
        return _local(kind, name or "local", on_nonfinite, shared)
    if kind.mode == "allreduce":
        _refuse_servers_options(
            staleness=staleness,
            on_worker_lost=None if on_worker_lost in ("wait", "fail") else on_worker_lost,
            bigarray_bound=bigarray_bound,
            host_aggregation=host_aggregation,
            on_nonfinite=None if on_nonfinite == ACTIONS[0] else on_nonfinite,
            average=average or None,
            quorum=quorum,
        )
        own = None if name is None else _checked_name(name)
        return _ring(kind, own, "allreduce", shared.timeout_s)
    opened = _opened(
        kind,
        shared,
        staleness=staleness,
        deterministic=deterministic,
        bigarray_bound=bigarray_bound,
        host_aggregation=host_aggregation,
        on_nonfinite=on_nonfinite,
        average=average,
        quorum=quorum,
        grace=grace,
        late=late,
    )
    session = process.session(shared.timeout_s)
    return _in_cluster(kind, session, opened, _named(session, name), shared)


def create_own(store: str, owner: str, options: StoreOptions, *, average: bool = False) -> Store:
    """Return a front end's own store of a kind that its user names, as :func:`create` with the defaults.

    Args:
        store: as in :func:`create`.
        owner: the front end. Its name and the order of creation make the name of the store, which no store of
            a user can have.
        options: those that all stores of the front end have.
        average: as in :func:`create`.
    """
    if store.lower() in KVStoreBase.registry:
        plugin: Store = create(store)
        return plugin
    kind = kind_of(store)
    if kind.mode != "allreduce":
        return create_dist(store, owner, options, average=average)
    logs.begin_in_script()
    if options.on_worker_lost == "shrink":
        _refuse_servers_options(on_worker_lost=options.on_worker_lost)
    return _ring(kind, None, RESERVED + owner, options.timeout_s)


def create_dist(
    store: str,
    owner: str,
    options: StoreOptions,
    *,
    average: bool = False,
    quorum: int | None = None,
    grace: float | str = "auto",
    late: str = LATE[0],
) -> DistStore:
    """Return a front end's own store of a kind with servers, as :func:`create` with the defaults.

    Args:
        store: ``dist_sync``, ``dist_async``, ``dist_ssp``, or a local kind, whose server is in this process.
        owner, options: as for :func:`create_own`.
        average, quorum, grace, late: as in :func:`create`.
    """
    logs.begin_in_script()
    kind = kind_of(store)
    if not kind.is_distributed:
        return _local(kind, "local", ACTIONS[0], StoreOptions())
    # The other stores of a front end hold what no worker does: only rounds are made again.
    kept = options if kind.mode == "sync" else replace(options, on_server_lost=SERVER_POLICIES[0])
    opened = _opened(kind, kept, average=average, quorum=quorum, grace=grace, late=late)
    session = process.session(options.timeout_s)
    return _in_cluster(kind, session, opened, session.next_name(RESERVED + owner), options)


def _in_cluster(
    kind: Kind, session: WorkerSession, opened: Open, name: str, options: StoreOptions
) -> DistStore:
    """Return a store of the cluster, whose workers may come and go.

    Raises:
        ConfigError: if the store needs the workers that there were at the beginning.
    """
    if session.info.most:
        if opened.rebuilds:
            raise ConfigError(
                f"on_server_lost='rebuild' needs the values that all workers hold, and {COMING}; give "
                "on_server_lost='checkpoint'"
            )
        opened = replace(opened, bundles=False)  # a bundle waits for all workers of its host
    opened = replace(opened, store=name, chunk_bytes=default_chunk_bytes(session))
    return DistStore(kind, session, opened, options)


def _local(kind: Kind, name: str, on_nonfinite: str, options: StoreOptions) -> DistStore:
    """Return a store whose server is in this process: with one worker, its sum is the mean."""
    opened = _opened(kind, StoreOptions(), host_aggregation=False, on_nonfinite=on_nonfinite)
    named = replace(opened, store=name, mode="sync", chunk_bytes=PROCESS_CHUNK_BYTES)
    # With it come the rules of servers, which a worker of a cluster should not have to load.
    from kvps.runtime.in_process import InProcessSession

    return DistStore(kind, InProcessSession(config.checkpoint_dir()), named, options, DeviceCodec())


def options_of(kv: Store) -> StoreOptions:
    """Return the options of a store, which the other stores of its front end take."""
    if isinstance(kv, DistStore):
        return kv.options
    return StoreOptions(kv.timeout_s) if isinstance(kv, AllreduceStore) else StoreOptions()


def _ring(kind: Kind, name: str | None, prefix: str, timeout_s: float) -> AllreduceStore:
    """Return an allreduce store when all ranks have created it."""
    endings = process.endings()
    meeting = places.meet(name, prefix, endings.names, timeout_s)
    return AllreduceStore(kind, meeting, endings, timeout_s)


def _refuse_servers_options(**given: object) -> None:
    """Refuse options that need servers.

    Raises:
        ConfigError: for an option that is not None.
    """
    for name, value in given.items():
        if value is not None:
            raise ConfigError(
                f"{name}={value!r} needs servers, which an allreduce store does not have; omit it, "
                "or use dist_sync (staleness= belongs to dist_ssp)"
            )


def _opened(
    kind: Kind,
    shared: StoreOptions,
    *,
    staleness: int | None = None,
    deterministic: bool = False,
    bigarray_bound: int | None = None,
    host_aggregation: bool | None = None,
    on_nonfinite: str = ACTIONS[0],
    average: bool = False,
    quorum: object = None,
    grace: object = "auto",
    late: object = LATE[0],
) -> Open:
    """Return what servers are told of a store; they check that the job has as many workers as its quorum.

    Raises:
        ConfigError: for a number or word that cannot be meant, or an option of another kind of store.
    """
    rebuilds = shared.on_server_lost != SERVER_POLICIES[0]
    wanted = {
        "staleness": staleness is not None,
        "average": average,
        "quorum": quorum is not None,
        "on_server_lost": rebuilds,
    }
    for name, mode in OPTION_OF.items():
        if wanted[name] and kind.mode != mode:
            raise ConfigError(f"{name}= is an option of dist_{mode}, not of {kind.type}")
    bound = STALENESS if staleness is None else staleness
    if type(bound) is not int or not 0 <= bound < 1 << 63:
        raise ConfigError(f"staleness={staleness!r}: use a number of pushes, 0 to 2**63 - 1")
    if quorum is None and (grace != "auto" or late != LATE[0]):
        raise ConfigError("grace= and late= are about rounds that close at a quorum: give quorum=, too")
    if quorum is not None and (type(quorum) is not int or not 1 <= quorum < 1 << 32):
        raise ConfigError(f"quorum={quorum!r:.40}: use a number of workers, 1 or more")
    is_number = isinstance(grace, int | float) and not isinstance(grace, bool)
    if grace != "auto" and not (is_number and 0 <= grace < 1e9):  # type: ignore[operator]  # it is a number
        raise ConfigError(f"grace={grace!r:.40}: use a number of seconds, 0 or more, or 'auto'")
    # A bundle waits for all workers of its host.
    may_bundle = kind.mode == "sync" and not (deterministic or rebuilds or quorum)
    opened = Open(
        "",
        kind.mode,
        bound if kind.mode == "ssp" else 0,
        bool(deterministic),
        shared.on_worker_lost,
        config.bigarray_bound(bigarray_bound, BIGARRAY_BOUND),
        bundles=config.host_aggregation(host_aggregation) and may_bundle,
        on_nonfinite=on_nonfinite,
        average=bool(average),
        rebuilds=rebuilds,
    )
    if rebuilds:
        check_options(replace(opened, chunk_bytes=PROCESS_CHUNK_BYTES))
    if quorum is None:
        return opened
    return replace(
        opened,
        quorum=quorum,
        grace_s=-1.0 if grace == "auto" else float(grace),  # type: ignore[arg-type]  # as above
        late=checked_late(late),
        on_worker_lost="shrink" if opened.on_worker_lost == "wait" else opened.on_worker_lost,
    )


def checked_late(late: object) -> str:
    """Return ``late``, if there is such a value of it.

    Raises:
        ConfigError: if not.
    """
    if not isinstance(late, str) or late not in LATE:
        raise ConfigError(f"late={late!r:.40}: use one of {', '.join(LATE)}")
    return late


def default_chunk_bytes(session: WorkerSession) -> int:
    """Return the size of a chunk in bytes, as the operator or the members' places have it."""
    setting = config.chunk_bytes()
    if setting is not None:
        return setting
    if share_memory(session):
        return SHARED_CHUNK_BYTES
    endpoints = [member.endpoint for member in session.info.members if member.endpoint]
    if all(config.is_loopback(endpoint) for endpoint in endpoints):
        return LOOPBACK_CHUNK_BYTES
    return NETWORK_CHUNK_BYTES


def share_memory(session: WorkerSession) -> bool:
    """Whether all members of the job share memory, so that no payload is under way between them."""
    machines = {member.machine for member in session.info.members}
    return len(machines) == 1 and 0 not in machines  # 0: one of them does not share memory


def _named(session: WorkerSession, name: str | None) -> str:
    return session.next_name("store") if name is None else _checked_name(name)


def _checked_name(name: str) -> str:
    given: object = name
    if not isinstance(given, str) or not 1 <= len(given) <= KEY_MAX or not given.isprintable():
        raise ConfigError(f"name={name!r}: use 1 to {KEY_MAX} printable characters")
    if given.startswith(RESERVED):
        raise ConfigError(f"name={name!r}: names that begin with {RESERVED!r} are reserved for kvps")
    return given


KVStore.create = create
