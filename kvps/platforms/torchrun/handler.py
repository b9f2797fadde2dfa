"""torchrun's rendezvous handler over the scheduler, and its steps at each round.

torch's own :class:`DynamicRendezvousHandler` decides which nodes take part and which rank each
gets. Here it keeps its state on the scheduler, and not on the first node. Each round needs a
key-value store for what the agents exchange besides, and for the workers' MASTER_ADDR and
MASTER_PORT. The agent with rank 0 opens a new one for each round, so that a node that is lost,
also the first one, costs a round and no more.
"""

from __future__ import annotations

import logging
import time
from datetime import timedelta
from functools import partial

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousSettings,
    RendezvousTimeout,
)

from kvps import config
from kvps.errors import ConfigError, KvpsError
from kvps.inquiry import inquire
from kvps.net.zap import Keys
from kvps.platforms.torchrun.holder import Doing, Holder, Meeting
from kvps.protocol.envelope import KEY_MAX
from kvps.protocol.membership import Rendezvous, RendezvousIs
from kvps.runtime.key_files import load_if_any
from kvps.runtime.member_process import own_host

log = logging.getLogger("kvps")
NAME = "kvps"
PATIENCE_S = 20
"""Seconds that an agent that joins waits for the scheduler; ``--rdzv-conf read_timeout=SECONDS``."""
KEEP_ALIVE_S, ATTEMPTS = 5, 3
"""torch's defaults: a heartbeat every so many seconds, and a node is dead after so many that are missing."""
LOOK_EVERY_S = 0.1
"""How often an agent looks where its round meets."""


class _MeetingLost(RendezvousConnectionError):
    """The agent with rank 0 ended before the others met it."""


class Handler(DynamicRendezvousHandler):
    """The handler.

    Args:
        settings: of the rendezvous.
        address: of this host, as other agents reach it.
        holder: this agent's copy of the state.
    """

    def __init__(self, settings: RendezvousSettings, address: str, holder: Holder) -> None:
        node = self._node_desc_generator.generate(address)
        # torch names the store of the first round here; ours come with the rounds, in _get_store.
        super().__init__(node, settings, NAME, dist.HashStore(), holder)
        self._holder = holder

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the next round, and return this node's rank in it.

        Raises:
            RendezvousConnectionError: if the scheduler does not answer, or refuses.
            RendezvousTimeoutError: if too few nodes came within ``--rdzv-conf join_timeout``.
            RendezvousClosedError: if the run is over.
        """
        self._holder.doing = Doing.JOINING
        while True:
            try:
                info = super().next_rendezvous()
            except _MeetingLost as error:
                log.warning("torchrun joins another round: %s", error)
            else:
                self._holder.doing = Doing.RUNNING
                return info

    def shutdown(self) -> bool:
        """Close the rendezvous: the run is over. Return whether that could be told to the scheduler."""
        self._holder.doing = Doing.CLOSING
        return super().shutdown()

    def _get_store(self) -> dist.Store:
        """Return the key-value store of this round.

        torch calls this once a round, when its ranks are known, and then looks for the address that the
        workers meet at: that is the same.
        """
        rank, _ = self._get_world()
        if rank == 0:
            address = self._this_node.addr
            server = self._create_tcp_store_server(address, 0)
            self._shared_tcp_store_server = server
            meeting = Meeting(self._holder.state.round, address, server.port)
            with self._heartbeat_lock:
                self._holder.meet(meeting)
            store: dist.Store = server
        else:
            meeting = self._await_meeting()
            store = self._connect(meeting)
        self._bootstrap_store_info = RendezvousStoreInfo(meeting.host, meeting.port)
        return self._wrap_store(store)

    def _await_meeting(self) -> Meeting:
        current = self._holder.state.round
        until = time.monotonic() + self._settings.timeout.join.total_seconds()
        while True:
            with self._heartbeat_lock:
                self._holder.refresh()
                state, meeting = self._holder.state, self._holder.meeting
            if meeting is not None and meeting.round == current:
                return meeting
            is_led = 0 in state.participants.values()
            if state.round != current or not is_led or time.monotonic() > until:
                raise _MeetingLost(f"the first node of round {current} ended before the others met")
            time.sleep(LOOK_EVERY_S)

    def _connect(self, meeting: Meeting) -> dist.Store:
        limit = timedelta(seconds=self._holder.patience_s)
        try:
            return dist.TCPStore(meeting.host, meeting.port, is_master=False, timeout=limit)
        except (RuntimeError, TimeoutError) as error:
            raise _MeetingLost(
                f"the first node of round {meeting.round} does not answer at {meeting.host}:{meeting.port}. "
                "If it runs, its torchrun needs --local-addr with an address that the other nodes reach"
            ) from error


def create(params: RendezvousParameters) -> Handler:
    """Return the handler that torchrun's flags describe.

    ``--rdzv-endpoint`` names the scheduler, else KVPS_SCHEDULER does; KVPS_KEYS has the keys, of
    which the one of the role ``worker`` is used. Workers find the scheduler in KVPS_SCHEDULER,
    which this sets for them.

    ``--rdzv-conf`` takes what torch's backends take (``join_timeout``, ``last_call_timeout``,
    ``close_timeout``, ``heartbeat_timeout``, ``keep_alive_interval``, ``keep_alive_max_attempt``,
    in seconds) and ``read_timeout``, the seconds that a joining agent waits for the scheduler.

    Raises:
        RendezvousConnectionError: if there is no scheduler, it refuses the keys, or a flag is wrong.
    """
    try:
        return _create(params)
    except KvpsError as error:
        raise RendezvousConnectionError(str(error)) from error


def _create(params: RendezvousParameters) -> Handler:
    scheduler = scheduler_of(params.endpoint)
    if not (0 < len(params.run_id) <= KEY_MAX and params.run_id.isprintable()):
        raise ConfigError(f"--rdzv-id {params.run_id!r:.80}: use 1 to {KEY_MAX} printable characters")
    patience_s = params.get_as_int("read_timeout", PATIENCE_S) or PATIENCE_S
    keys = load_if_any(config.keys_path(), "worker")
    ask = partial(_ask, scheduler, keys)
    ask(Rendezvous(params.run_id, None), float(patience_s))
    address = params.local_addr or own_host(scheduler, float(patience_s))
    config.announce(scheduler)
    settings = _settings(params)
    return Handler(settings, address, Holder(ask, settings, float(patience_s)))


def _settings(params: RendezvousParameters) -> RendezvousSettings:
    limits = [
        None if (given := params.get_as_int(f"{name}_timeout")) is None else timedelta(seconds=given)
        for name in ("join", "last_call", "close", "heartbeat")
    ]
    return RendezvousSettings(
        params.run_id,
        params.min_nodes,
        params.max_nodes,
        RendezvousTimeout(*limits),
        timedelta(seconds=params.get_as_int("keep_alive_interval") or KEEP_ALIVE_S),
        params.get_as_int("keep_alive_max_attempt") or ATTEMPTS,
    )


def _ask(scheduler: str, keys: Keys | None, request: Rendezvous, limit_s: float) -> RendezvousIs:
    answer = inquire(scheduler, request, RendezvousIs, keys, limit_s).message
    assert isinstance(answer, RendezvousIs)
    return answer


def scheduler_of(endpoint: str) -> str:
    """Return the scheduler's address.

    Args:
        endpoint: ``HOST``, ``HOST:PORT`` or ``tcp://HOST:PORT``; empty for KVPS_SCHEDULER.

    Raises:
        ConfigError: if it is none of these.

    Example:
        >>> scheduler_of("node1"), scheduler_of("node1:9000")
        ('tcp://node1:9091', 'tcp://node1:9000')
    """
    if not endpoint:
        found = config.cluster()
        if found is None:
            raise ConfigError(
                "--rdzv-backend=kvps needs the scheduler: give --rdzv-endpoint=HOST:PORT, or set "
                "KVPS_SCHEDULER"
            )
        return found.scheduler
    address = endpoint if "://" in endpoint else f"tcp://{endpoint}"
    host = address.removeprefix("tcp://")
    if ":" not in host.rpartition("]")[2]:
        address += f":{config.port_of('', config.DEFAULT_SCHEDULER)}"
    return config.as_address("--rdzv-endpoint", address)
