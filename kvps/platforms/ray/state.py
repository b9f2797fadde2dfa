"""The scheduler's state on Ray: memory that the owner of the job holds, and that a scheduler which
is started again reads.

The memory ends with its owner, however that ends, so no file is left. There are two slots, written
in turns. A scheduler that is killed while it writes has spoiled one of them, and the other has the
state before.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Sequence
from contextlib import suppress

from kvps.errors import ConfigError

_HEAD = struct.Struct("!QQI")
"""The number of the state, its bytes, and its CRC-32."""
SLOTS = 2


class StateMemory:
    """The memory, as its owner holds it."""

    def __init__(self) -> None:
        self._fds = [os.memfd_create("kvps-scheduler-state", os.MFD_CLOEXEC) for _ in range(SLOTS)]

    @property
    def paths(self) -> tuple[str, ...]:
        """Where other processes of this user and node find the slots, while this process lives."""
        return tuple([f"/proc/{os.getpid()}/fd/{fd}" for fd in self._fds])

    def close(self) -> None:
        """Give the memory back."""
        for fd in self._fds:
            os.close(fd)
        self._fds = []


class KeptState:
    """The state as the scheduler reads and writes it: a
    :class:`~kvps.runtime.scheduler_process.StateStorage`.

    Args:
        paths: of a :class:`StateMemory`.

    Raises:
        ConfigError: if this process cannot reach that memory.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self._fds: list[int] = []
        try:
            for path in paths:
                self._fds.append(os.open(path, os.O_RDWR | os.O_CLOEXEC))
        except OSError as error:
            self.close()
            raise ConfigError(
                f"the scheduler cannot reach the memory for its state ({path}: {error.strerror}): it must "
                "run on the node of the process that starts the cluster, in the same container and as the "
                "same user"
            ) from error
        self._number = max([number for number, _ in self._states()], default=0)

    def read(self) -> bytes | None:
        """Return the newest state that is whole; None if there is none."""
        return max(self._states(), default=(0, None))[1]

    def save(self, state: bytes) -> None:
        """Put ``state`` in the place of the state before the last."""
        number = self._number + 1
        fd = self._fds[number % len(self._fds)]
        head = _HEAD.pack(number, len(state), zlib.crc32(state))
        _write(fd, head + state)
        self._number = number

    def remove(self) -> None:
        """Forget all: the job is over."""
        for fd in self._fds:
            os.ftruncate(fd, 0)
        self._number = 0

    def close(self) -> None:
        """Let go of the memory."""
        for fd in self._fds:
            os.close(fd)
        self._fds = []

    def _states(self) -> list[tuple[int, bytes]]:
        """Return the number and the bytes of each slot that is whole."""
        found = []
        for fd in self._fds:
            held = os.pread(fd, os.fstat(fd).st_size, 0)
            with suppress(struct.error):
                number, size, checksum = _HEAD.unpack_from(held)
                state = held[_HEAD.size : _HEAD.size + size]
                if len(state) == size and zlib.crc32(state) == checksum:
                    found.append((number, state))
        return found


def _write(fd: int, data: bytes) -> None:
    os.ftruncate(fd, 0)  # from here on the slot is not whole, until all is written
    at = 0
    while at < len(data):
        at += os.pwrite(fd, data[at:], at)
