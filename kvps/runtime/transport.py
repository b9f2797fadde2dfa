"""The transport of this process's packets and values, chosen by KVPS_TRANSPORT.

``auto`` shares memory with peers that can open it and sends frames to the others, ``shm`` insists on it,
``tcp`` sends frames to all.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from kvps import config
from kvps.core.limits import Limits
from kvps.dtypes import BY_NAME
from kvps.errors import ConfigError
from kvps.net.driver import Transport
from kvps.net.memory import keep_freed_memory
from kvps.net.shm.page_remap import PageRemapper
from kvps.net.shm.segment import Segment, Unshared
from kvps.net.shm.transport import SHARE_MIN_BYTES, SharingTransport
from kvps.net.zap import Keys
from kvps.net.zeromq import ZmqTransport
from kvps.protocol.envelope import Role
from kvps.tensors import TORCH, Memory, Private

log = logging.getLogger("kvps")


class Shared:
    """Memory in this process's segment, as long as a peer reads that and there is room in it."""

    def __init__(self, segment: Segment, stitches: PageRemapper) -> None:
        self._segment = segment
        self._stitches = stitches

    @property
    def extent(self) -> tuple[int, int]:
        """Where it begins, and its size in bytes."""
        return self._segment.address, self._segment.size_bytes

    def empty(self, count: int, dtype: str) -> torch.Tensor:
        """Return a flat tensor whose contents are undefined."""
        size_bytes = count * BY_NAME[dtype].itemsize
        if self._segment.is_read and size_bytes >= SHARE_MIN_BYTES:
            block = self._segment.take(size_bytes)
            if block is not None:
                return torch.from_numpy(block).view(TORCH[dtype])
        return torch.empty(count, dtype=TORCH[dtype])

    def lends(self, route: str | bytes, pieces: Sequence[torch.Tensor]) -> bool:
        """Whether the peer along ``route`` would read ``pieces`` where they lie."""
        first, size_bytes = self._segment.address, self._segment.size_bytes
        return route in self._segment.readers and all(
            0 <= one.data_ptr() - first < size_bytes for one in pieces
        )

    def side_by_side(self, parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Return values that were lent here as one tensor without a copy; None if that fails.

        It is read-only, and keeps the loans as long as it lives.
        """
        ranges = [(one.data_ptr(), one.nbytes) for one in parts]
        block = self._stitches.beside(ranges, keep=tuple(parts))
        return None if block is None else torch.from_numpy(block).view(parts[0].dtype)


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
    wish = config.transport()
    limits = limits or config.limits()
    role = Role.WORKER if bind is None else Role.SERVER
    zmq = ZmqTransport(bind, checksums=config.checksums(), role=role, keys=keys, limits=limits)
    if wish == "tcp":
        keep_freed_memory()
        alone = SharingTransport(zmq, None, why_not="KVPS_TRANSPORT=tcp is set there")
        return alone, Private(), zmq.endpoint
    try:
        segment = Segment()
    except Unshared as error:
        if wish == "shm":
            zmq.close(0.0)
            raise ConfigError(
                f"KVPS_TRANSPORT=shm, but memory cannot be shared here: {error}. Set "
                "KVPS_TRANSPORT=auto"
            ) from error
        log.warning("values travel in frames, not in shared memory: %s", error)
        keep_freed_memory()
        return SharingTransport(zmq, None, why_not=str(error)), Private(), zmq.endpoint
    transport = SharingTransport(zmq, segment, insist=wish == "shm")
    memory = Shared(segment, PageRemapper(lambda: transport.mappings))
    return transport, memory, zmq.endpoint
