"""The server's process: a core, its sockets, and its signals.

The command ``kvps-server`` calls this, and so does a job script that ``DMLC_ROLE`` makes a server.
"""

from __future__ import annotations

import importlib
import logging
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial

import torch

from kvps import annexes, config
from kvps.core.limits import Limits
from kvps.core.scheduler.seat import SEATS_MAX
from kvps.core.server.measured import gauges
from kvps.core.server.server import Server
from kvps.errors import ConfigError
from kvps.net import descriptors
from kvps.net.driver import Inbox
from kvps.net.memory import share_bytes
from kvps.net.memory_watch import MemoryWatch
from kvps.net.zap import Keys, new_pair
from kvps.observe import logs
from kvps.observe.place import Place
from kvps.observe.sampler import Sample, Sampler, network_values
from kvps.protocol.envelope import Role
from kvps.runtime.member_process import on_stop, own_host, own_identity, report, serving_if_asked
from kvps.runtime.row_file import tier_in
from kvps.runtime.server_parts import Part, ServerParts
from kvps.runtime.storage_thread import StorageThread
from kvps.runtime.transport import open_transport

log = logging.getLogger("kvps")
WILDCARDS = ("0.0.0.0", "*", "::")
"""Hosts that stand for every address of this machine, and are none to connect to."""


def run_server(
    scheduler: str,
    bind: str,
    *,
    ranks: Sequence[int] = (),
    memory_limit: int | None = None,
    table_dir: str | None = None,
    threads: int | None = None,
    plugins: Sequence[str] = (),
    advertise: str | None = None,
    insecure: bool = False,
    checkpoint_dir: str | None = None,
    checkpoint_every_s: float = 0.0,
    keys: Keys | None = None,
    http: Place | None = None,
    limits: Limits | None = None,
    grace_s: float = 20.0,
) -> int:
    """Run a server until its job is over; return its exit code.

    Args:
        scheduler: where the scheduler listens.
        bind: where to listen.
        ranks: which servers to be; none of them for any one.
        memory_limit: bytes of weights, second buffers, sums of open rounds and optimizer state; keys and
            optimizers beyond it are refused. None is 80 % of what the machine, or the container, has.
        table_dir: where rows of embedding tables lie that are beyond ``memory_limit``; None to refuse them.
        threads: threads that compute, each a part of a block; None leaves it to torch.
        plugins: modules that register optimizers when they are imported.
        advertise: the host that workers are told, if ``bind`` names none.
        insecure: ``bind`` may be where other machines reach it.
        checkpoint_dir: where checkpoints are written and found; None for none.
        checkpoint_every_s: how often one is written; 0 only when workers ask for one.
        keys: its own, and the scheduler's public one; None where there are none.
        http: where to serve metrics; None for nowhere.
        limits: the named limits; None for those of KVPS_LIMITS.
        grace_s: how long other processes may take to hold its seats, at SIGTERM.

    Raises:
        ConfigError: if that cannot be, the port is busy, or there are too few file descriptors.
        SchedulerLost: if the scheduler's name cannot be resolved.
    """
    config.demand_loopback(bind, insecure or keys is not None)
    limits = limits or config.limits()
    for plugin in plugins:
        _load(plugin)
    if threads is not None:
        torch.set_num_threads(threads)
    join_max_s = config.join_max_s()
    descriptors.demand("a server", descriptors.of_server(1, 1) + descriptors.SPARE)
    descriptors.make_room(descriptors.of_server(0, SEATS_MAX))  # how many will come is not known yet
    transport, memory, listens = open_transport(bind, keys, limits)
    log.info("server at %s", listens)
    tier = None if table_dir is None else partial(tier_in, table_dir)
    identity = replace(
        own_identity(Role.SERVER, scheduler, keys),
        rank=ranks[0] if ranks else None,
        endpoint=_reachable(listens, scheduler, advertise, join_max_s),
        join_max_s=join_max_s,
    )
    every_s = None if checkpoint_dir is None else checkpoint_every_s
    limit = share_bytes(max(1, len(ranks))) if memory_limit is None else memory_limit
    lenses = annexes.load("lenses")
    now, threads = time.monotonic(), torch.get_num_threads()
    header = {
        "role": "server",
        "now": now,
        "identity": lenses.identity_of(identity),
        "memory_limit": limit if tier is None else None,  # a replay has all rows in memory
        "threads": threads,
        "checkpoint_every_s": every_s,
        "limits": asdict(limits),
    }
    record = lenses.recorder(header, annexes.load("recorded-values").dumps)
    core = Server(identity, now, limit, lenses.recorded(memory, record), threads, every_s, limits, tier)
    logs.speak_as(lambda: logs.Speaker("server", core.member.rank if core.member.welcome else identity.rank))
    inbox: Inbox[Server] = Inbox(transport)
    inbox.put(Server.start)

    def archive(inbox: Inbox[Server]) -> StorageThread | None:
        tagged = limits.tagged_checkpoints
        return None if checkpoint_dir is None else StorageThread(checkpoint_dir, inbox, tagged)

    def part(rank: int | None) -> Part:
        """Return another server of this process, at a port and with a key of its own."""
        own = None if keys is None else replace(keys, session=new_pair())
        near = f"tcp://{config.host_of(bind)}:0"
        opened, memory, listens = open_transport(near, own, limits)
        endpoint = f"tcp://{config.host_of(identity.endpoint)}:{config.port_of('', listens)}"
        public = "" if own is None else own.session.public
        second = replace(identity, rank=rank, endpoint=endpoint, public_key=public, standby=rank is None)
        core = Server(second, time.monotonic(), limit, memory, threads, every_s, limits, tier)
        inbox: Inbox[Server] = Inbox(opened)
        inbox.put(Server.start)
        lens = lenses.member_lens(Role.SERVER, opened, core.member.envelope, lambda: core.counts)
        return Part(core, opened, inbox, archive(inbox), lens)

    parts = ServerParts(part)
    sampler = Sampler(inbox, state_of, lambda core: core.counts, lambda: network_values(transport.refused))
    with (
        MemoryWatch(lambda used, total: parts.put(Server.on_memory, used, total)),
        serving_if_asked(http, "server", sampler),
        on_stop(
            lambda number: (
                parts.retire("asked to stop", grace_s)
                if number == signal.SIGTERM
                else parts.leave("asked to stop")
            )
        ),
        lenses.dumping_at_signal(inbox, record),
    ):
        lens = lenses.member_lens(Role.SERVER, transport, core.member.envelope, lambda: core.counts, record)
        ending = parts.run(Part(core, transport, inbox, archive(inbox), lens), ranks[1:])
    if record is not None:
        record.close(core)
    who = f"server {core.member.rank}" if core.member.welcome else "server"
    return report(who, ending, is_told=core.member.stopped is not None)


def _reachable(endpoint: str, scheduler: str, advertise: str | None, join_max_s: float) -> str:
    """Return ``endpoint`` as others can connect to it."""
    host = config.host_of(endpoint)
    if advertise is None and host in WILDCARDS:
        advertise = own_host(scheduler, join_max_s)
    return endpoint if advertise is None else f"tcp://{advertise}:{config.port_of('', endpoint)}"


def _load(plugin: str) -> None:
    if "" not in sys.path:
        sys.path.append("")  # this folder, but before no package that is installed
    try:
        importlib.import_module(plugin)
    except ImportError as error:
        raise ConfigError(
            f"cannot import --plugin {plugin}: {error}. It must be a module in this folder or on PYTHONPATH"
        ) from error


def state_of(core: Server, now: float) -> Sample:
    """Return the state of a server."""
    member, budget = core.member, core.control.budget
    reserved, epoch = budget.reserved(), core.checkpointer.epoch
    values = gauges(core.context, core.control, epoch, core.oldest_round_s)
    status: dict[str, object] = {
        "epoch": core.checkpointer.epoch,
        "view": member.number,
        "stores": len(core.context.stores),
        "memory_bytes": reserved._asdict(),
        "memory_limit_bytes": budget.limit_bytes,
        "memory_used_share": budget.pressure.used_share,
        "oldest_round_s": core.oldest_round_s,
    }
    why = "is a member of the job"
    if member.welcome is None:
        why = "waits for the scheduler"
    elif core.checkpointer.is_returning:
        why = "returns to a checkpoint"
    else:
        status["rank"] = member.rank
        status["job"] = member.job.hex()[:8]
        if budget.pressure.is_high:
            why = f"is short of memory: {budget.pressure}"
    is_member = member.welcome is not None and not core.checkpointer.is_returning
    is_ready = is_member and not budget.pressure.is_high
    status = {**status, "ready": is_ready, "reason": why}
    return Sample(values, is_ready=is_ready, why=why, status=status)
