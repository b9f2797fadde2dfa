"""The actors of a job on Ray: a scheduler, and servers, each with its loop in the main thread of its process.

Theory of operation
-------------------
An actor is first asked for its place, which it tells at once, and then to run. The call of ``run``
lasts for the job. When the process of an actor is killed, Ray starts the actor again and repeats
that call, with the arguments that the owner of the actor has kept. A server then returns to its
checkpoint, and the scheduler to its state. Keys travel from process to process: they are in no
command line, no environment, and not in Ray's Global Control Store, which keeps the arguments of
constructors.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import ray

from kvps import __version__
from kvps.core.membership_client import EXIT_TEMPORARY
from kvps.errors import ConfigError
from kvps.net.zap import Keys
from kvps.platforms.ray.plan import RESTART_MAX_S, demand_same_version
from kvps.platforms.ray.state import KeptState
from kvps.runtime.key_files import of, parse
from kvps.runtime.member_process import let_threads_sleep

log = logging.getLogger("kvps")


def node_address() -> str:
    """Return the address of this node that other nodes reach."""
    return str(ray.util.get_node_ip_address())


class KvpsScheduler:
    """The scheduler of a job."""

    def place(self, version: str) -> str:
        """Return the address of the node.

        Raises:
            ConfigError: if this node has another version of kvps.
        """
        node = node_address()
        demand_same_version(version, __version__, node)
        return node

    def run(
        self,
        endpoint: str,
        workers: int,
        servers: int,
        keys: str,
        settings: Mapping[str, str],
        log_level: str,
        state: Sequence[str],
    ) -> int:
        """Run the scheduler until the job is over; return its exit code.

        One that is started again listens at the same address, and continues from the state in the
        owner's memory.
        """
        _prepare("kvps-scheduler", settings, log_level)
        from kvps import config
        from kvps.runtime.scheduler_process import run_scheduler

        return run_scheduler(
            workers,
            servers,
            endpoint,
            state=KeptState(state) if state else None,
            insecure=not keys,
            silence_max_s=config.silence_max_s(),
            drop_grace_s=config.drop_grace_s(),
            replace_max_s=RESTART_MAX_S,
            keys=_keys(keys, "scheduler"),
        )


class KvpsServer:
    """A server of a job; it loads torch while the job learns its place."""

    def __init__(self) -> None:
        threading.Thread(target=_load, name="kvps load", daemon=True).start()

    def place(self, version: str, folder: str | None) -> str:
        """Return the address of the node, once it is known that a server can run there.

        Raises:
            ConfigError: if this node has another version of kvps, or cannot write to the folder of
                checkpoints.
        """
        node = node_address()
        demand_same_version(version, __version__, node)
        if folder is not None:
            try:
                Path(folder).mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(
                    f"the Ray node {node} cannot write checkpoints to {folder}: {error}. Give "
                    "checkpoint_dir=, a directory that all servers share"
                ) from error
        return node

    def run(
        self,
        scheduler: str,
        rank: int,
        keys: str,
        settings: Mapping[str, str],
        log_level: str,
        folder: str | None,
        every_s: float,
        memory_limit: int | None,
        neighbours: int,
    ) -> int:
        """Run the server until the job is over; return its exit code.

        It shares the memory of its node with its neighbours. The process ends at once if the
        server is to be started again: Ray starts only actors again that died.
        """
        _prepare(f"kvps-server {rank}", settings, log_level)
        from kvps import config
        from kvps.net.memory import share_bytes
        from kvps.runtime.server_process import run_server

        setting = config.text("KVPS_MEMORY_LIMIT")
        if memory_limit is None and setting is not None:
            memory_limit = config.as_bytes("KVPS_MEMORY_LIMIT", setting)
        code = run_server(
            scheduler,
            f"tcp://{node_address()}:0",
            ranks=(rank,),
            memory_limit=share_bytes(neighbours) if memory_limit is None else memory_limit,
            threads=config.whole("KVPS_THREADS"),
            plugins=[plugin for plugin in (config.text("KVPS_PLUGIN") or "").split(",") if plugin],
            insecure=not keys,
            checkpoint_dir=folder,
            checkpoint_every_s=every_s,
            keys=_keys(keys, "server"),
        )
        if code == EXIT_TEMPORARY:
            sys.stderr.flush()
            os._exit(code)
        return code


def _load() -> None:
    """Load what a server needs; the collector would only look again and again at objects that are
    all to stay."""
    gc.disable()
    let_threads_sleep()
    try:
        import kvps.runtime.server_process  # noqa: F401

        gc.freeze()
    finally:
        gc.enable()


def _keys(text: str, role: str) -> Keys | None:
    return of(parse(text, "the job"), role, "of the job") if text else None


def _prepare(name: str, settings: Mapping[str, str], level: str) -> None:
    """Give this process the settings, and send the log to where Ray collects it."""
    os.environ.update(settings)
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"{name}: %(levelname)s: %(message)s"))
    log.handlers[:] = [handler]
    log.setLevel(level.upper())
    log.propagate = False
