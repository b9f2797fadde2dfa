"""The transport of this process's packets and values, chosen by KVPS_TRANSPORT.

``auto`` shares memory with peers that can open it and sends frames to the others, ``shm`` insists on it,
``tcp`` sends frames to all.
"""

from __future__ import annotations

import logging

from kvps import config
from kvps.core.limits import Limits
from kvps.errors import ConfigError
from kvps.net.memory import keep_freed_memory
from kvps.net.shm.page_remap import PageRemapper
from kvps.net.shm.segment import Segment, Unshared
from kvps.net.shm.transport import SharedMemory, SharingTransport
from kvps.net.transport import Transport
from kvps.net.zap import Keys
from kvps.net.zeromq import ZmqTransport
from kvps.protocol.envelope import Role
from kvps.tensors import Memory, Private

log = logging.getLogger("kvps")


def open_transport(
    bind: str | None = None, keys: Keys | None = None, limits: Limits | None = None
) -> tuple[Transport, Memory, str]:
    """Return a transport, the memory to send from, and where it listens.

    Args:
        bind: where to listen; None for a worker, which learns that when it has a rank.
        keys: by which it speaks and accepts connections; None to accept any.
        limits: the named limits; None for those of KVPS_LIMITS.

    Raises:
        ConfigError: if the port is busy, or memory cannot be shared and has to be.
    """
    setting = config.transport()
    zmq = _inner(bind, keys, limits or config.limits())
    if setting == "tcp":
        keep_freed_memory()
        alone = SharingTransport(zmq, None, why_not="KVPS_TRANSPORT=tcp is set there")
        return alone, Private(), zmq.endpoint
    try:
        segment = Segment()
    except Unshared as error:
        if setting == "shm":
            zmq.close(0.0)
            raise ConfigError(
                f"KVPS_TRANSPORT=shm, but memory cannot be shared here: {error}. Set KVPS_TRANSPORT=auto"
            ) from error
        log.warning("values travel in frames, not in shared memory: %s", error)
        keep_freed_memory()
        return SharingTransport(zmq, None, why_not=str(error)), Private(), zmq.endpoint
    transport = SharingTransport(zmq, segment, insist=setting == "shm")
    memory = SharedMemory(segment, PageRemapper(lambda: transport.mappings))
    return transport, memory, zmq.endpoint


def _inner(bind: str | None, keys: Keys | None, limits: Limits) -> ZmqTransport:
    """Return what carries packets: ZeroMQ, with streams where they are wanted and can be."""
    role, checksums = Role.WORKER if bind is None else Role.SERVER, config.checksums()
    if not config.streams() or keys is None:
        return ZmqTransport(bind, checksums=checksums, role=role, keys=keys, limits=limits)
    try:
        from kvps.net.streams import transport
    except ImportError:
        raise ConfigError("KVPS_STREAMS=1 needs Linux, and pip install 'kvps[aes]'") from None
    kind = transport.WorkerStreams if bind is None else transport.ServerStreams
    return kind(bind, checksums=checksums, role=role, keys=keys, limits=limits)
