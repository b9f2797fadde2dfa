"""The session that all dist stores of this process share.

It is found in the environment when the first store is created: as a worker of a cluster that is described
there, as a thread of a :class:`~kvps.runtime.local_cluster.LocalCluster`, or in an embedded cluster of its
own. Where MXNet's variables make this process a server or the scheduler (``DMLC_ROLE``), it becomes that.
"""

from __future__ import annotations

import atexit
import logging
import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from kvps import config
from kvps.core.membership_client import EXIT_CONFIG, EXIT_TEMPORARY
from kvps.errors import ConfigError, KvpsError, SchedulerLost
from kvps.observe import logs
from kvps.runtime.current import current
from kvps.runtime.key_files import load_if_any
from kvps.runtime.open_stores import AtExit, OpenStores
from kvps.runtime.preemption import leave_if_asked
from kvps.runtime.ticket import TIMEOUT_S
from kvps.runtime.worker_session import WorkerSession, leave_at_exit, worker_session

if TYPE_CHECKING:
    from kvps.runtime.local_cluster import LocalCluster

log = logging.getLogger("kvps")


def session(timeout_s: float, rank: int | None = None) -> WorkerSession:
    """Return this process's session, or this thread's inside a LocalCluster, and wait for the cluster.

    Args:
        timeout_s: how long to wait for the cluster.
        rank: to be asked for where the environment names none, and the session begins here.
    """
    if (cluster := current()) is not None:
        mine = cluster.session()
    else:
        with _process.lock:
            mine = _process.begin(rank)
    mine.join(timeout_s)
    return mine


def has_joined() -> bool:
    """Whether this process has its session already."""
    if current() is not None:
        return True
    return _process.session is not None and not _process.session.is_over


def embedded() -> LocalCluster | None:
    """Return the embedded cluster, if this process has one."""
    return _process.embedded


def end_embedded() -> None:
    """End the cluster that lies inside this process because none was described, if there is one."""
    if _process.embedded is not None:
        _process.end()


def endings() -> OpenStores:
    """Return those open stores of this process, or of this thread of a LocalCluster, that no session ends."""
    cluster = current()
    return _process.endings if cluster is None else cluster.endings()


def shutdown() -> None:
    """Flush all stores and leave the cluster; rounds close without this worker from then on.

    Inside a LocalCluster the worker is the calling thread. A process that ends well does this by itself.
    Doing nothing is fine where there is no cluster.

    Example:
        >>> import kvps
        >>> kvps.shutdown()
    """
    if (cluster := current()) is not None:
        cluster.leave()
    else:
        _process.end()


def fail(reason: str) -> None:
    """Leave the cluster as a worker that failed, so that a replacement may take its rank; flush nothing."""
    _process.fail(reason)


class _Process:
    """The session that all dist stores of this process share."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.session: WorkerSession | None = None
        self.embedded: LocalCluster | None = None
        self.endings = AtExit()

    def begin(self, rank: int | None = None) -> WorkerSession:
        """Return the session, making it if this is the first store; ``rank`` is the rank to ask for."""
        if self.session is not None and not self.session.is_over:
            return self.session
        found = config.cluster()
        if found is None:
            config.check_alone()
            self.session = self._embed()
        elif found.role != "worker":
            _become(found)
        else:
            leave_if_asked(config.switch("KVPS_LEAVE_AT_SIGTERM"))
            self.session = worker_session(
                found.scheduler,
                rank if found.rank is None else found.rank,
                found.incarnation,
                found.job,
                config.join_max_s(),
                keys=load_if_any(config.keys_path(), "worker"),
            )
            leave_at_exit(self.session, found.incarnation > 0, TIMEOUT_S)
        assert self.session is not None
        logs.speak_as(self.session.speaker)
        return self.session

    def _embed(self) -> WorkerSession:
        from kvps.runtime.local_cluster import LocalCluster

        self.embedded = LocalCluster(workers=1, servers=1)
        self.embedded.start()
        session = self.embedded.session()
        logs.speak_as(session.speaker)
        log.warning(
            "KVPS_SCHEDULER is not set: this process is a cluster of one worker and one server at %s",
            self.embedded.scheduler,
        )
        atexit.register(self.end)
        return session

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

    def fail(self, reason: str) -> None:
        """Leave the cluster; the next store begins anew."""
        with suppress(KvpsError):
            self.endings.end(is_done=False)
        with self.lock:
            session, self.session = self.session, None
        if session is not None and self.embedded is None:
            session.leave(done=False, exit_code=1, reason=reason)


_process = _Process()


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
    keys = load_if_any(config.keys_path(), found.role)
    if found.role == "scheduler":
        from kvps.runtime.scheduler_process import run_scheduler

        assert found.workers is not None
        assert found.servers is not None
        bind = config.scheduler_bind(found.scheduler)
        return run_scheduler(found.workers, found.servers, bind, insecure=insecure, keys=keys)

    from kvps.runtime.server_process import run_server

    bind = config.server_bind(found.scheduler, insecure or keys is not None)
    return run_server(
        found.scheduler,
        bind,
        insecure=insecure,
        keys=keys,
        checkpoint_dir=config.checkpoint_dir(),
        checkpoint_every_s=config.checkpoint_every_s(None),
    )
