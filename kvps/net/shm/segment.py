"""Memory that processes of one host share: its place, the owner of each part, and the processes
that may read it.

Every process has at most one *segment*: a file without a name (``memfd_create``), as large as the
machine's memory and empty, of which parts are backed before they are used (``posix_fallocate``:
where there is no memory left that is an error, and no SIGBUS later). Nothing appears in a
directory, so nothing is left behind by a kill.

Another process opens it through ``/proc/PID/fd/FD`` and maps it for reading. It trusts no description: the
file must be one of ours and of our user, of the size that was said, sealed against shrinking (a file that
shrank under its reader would kill the reader), and begin with the *nonce* that was said, a random number.
Once its owner has mapped it, it is sealed against other writers, too, where Linux can (5.1). A process that
cannot do all this, on another host, in another container or as another user, gets frames instead.

A part that is taken is a *block* of whole pages. It is given back when nothing refers to it any
more; blocks that are read by others are kept alive by :mod:`kvps.net.shm.leases`. What was given back
is taken again before more memory is backed.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import secrets
import threading
import weakref
from collections import deque
from contextlib import suppress

import numpy as np

from kvps.errors import KvpsError, ProtocolError
from kvps.net.memory import machine_bytes
from kvps.net.shm.leases import Postings
from kvps.protocol.transports import Offer

NAME = "kvps"
PAGE_BYTES = mmap.PAGESIZE
BACK_BYTES = 16 << 20
"""How much is backed at once, at most; at least as much as is there already, or is needed."""
NONCE_BYTES = 8

_SEALS = 0x0001 | 0x0002 | 0x0004  # F_SEAL_SEAL, _SHRINK, _GROW: of no use to other modules
_SEAL_FUTURE_WRITE = 0x0010
"""New mappings of the file are read-only; the existing mapping does not change."""
_ADD_SEALS, _GET_SEALS = 1033, 1034


class Unshared(KvpsError):
    """Memory cannot be shared, and why."""


class Block(np.ndarray[tuple[int], np.dtype[np.uint8]]):
    """Bytes of a segment, or of a loan; a view of them refers to the whole."""

    __slots__ = ("keep",)
    keep: object
    """An object that must live as long as these bytes are referred to."""


class _Slot(weakref.ref[Block]):
    """A range of a segment; given back when the last reference to its block dies."""

    __slots__ = ("size_bytes", "start")
    start: int
    size_bytes: int


class Segment:
    """This process's memory that others may read.

    Raises:
        Unshared: if this machine has no such memory.
    """

    def __init__(self, size_bytes: int | None = None) -> None:
        self.nonce = secrets.randbits(63)
        self.size_bytes = _pages(size_bytes or machine_bytes())
        self._pid = os.getpid()
        self._fd = -1
        self._lock = threading.Lock()
        if not hasattr(os, "memfd_create"):
            raise Unshared("this system has no memfd_create")
        try:
            self._fd = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self._fd, self.size_bytes)
            os.posix_fallocate(self._fd, 0, PAGE_BYTES)
            self._map = mmap.mmap(self._fd, self.size_bytes)
            with suppress(OSError):
                fcntl.fcntl(self._fd, _ADD_SEALS, _SEAL_FUTURE_WRITE)
            fcntl.fcntl(self._fd, _ADD_SEALS, _SEALS)
        except (OSError, ValueError) as error:
            self.close()
            raise Unshared(f"cannot create a segment of {self.size_bytes} bytes: {error}") from error
        self._map[:NONCE_BYTES] = self.nonce.to_bytes(NONCE_BYTES, "big")
        self.address = int(np.frombuffer(self._map, np.uint8).ctypes.data)
        self.postings = Postings(memoryview(self._map)[:PAGE_BYTES])
        """The leases that this process has returned, for their lenders to read."""
        self.is_read = False
        """Somebody has mapped it, or is about to."""
        self.readers: set[str | bytes] = set()
        """The routes of processes that have mapped it."""
        self._used = self._backed = PAGE_BYTES
        self._slots: dict[int, _Slot] = {}
        """Those that are taken, by where they begin."""
        self._freed: deque[_Slot] = deque()
        """Given back, by whatever thread dropped the last reference."""
        self._free: dict[int, list[int]] = {}
        """Where free ranges begin, by their size; the last one given back is taken first."""

    @property
    def offer(self) -> Offer:
        """How others find it."""
        return Offer(self._pid, self._fd, self.size_bytes, self.nonce)

    def take(self, size_bytes: int) -> Block | None:
        """Return a free block, its contents undefined; None if none is left.

        Any thread may call this. In a forked process, which has the same memory, none is left.
        """
        if os.getpid() != self._pid:
            return None
        rounded = -(-max(size_bytes, 1) // PAGE_BYTES) * PAGE_BYTES
        with self._lock:
            slot = self._freed.pop() if self._freed else None
            if slot is not None and slot.size_bytes == rounded:
                start: int | None = slot.start
            else:
                if slot is not None:
                    self._freed.append(slot)
                start = self._find(rounded)
            if start is None:
                return None
            block = Block((size_bytes,), np.uint8, self._map, start)
            slot = self._slots[start] = _Slot(block, self._freed.append)
            slot.start, slot.size_bytes = start, rounded
        return block

    def offset_of(self, frame: memoryview) -> int | None:
        """Return where ``frame`` lies in this segment; None if it lies elsewhere, or is empty."""
        if not frame.nbytes:
            return None
        if frame.readonly:
            address = int(np.frombuffer(frame, np.uint8).ctypes.data)
        else:
            address = ctypes.addressof(ctypes.c_ubyte.from_buffer(frame))  # in a tenth of the time
        offset = address - self.address
        return offset if 0 <= offset <= self.size_bytes - frame.nbytes else None

    def close(self) -> None:
        """Make it impossible to find; processes that have mapped it keep their mapping."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def _find(self, size_bytes: int) -> int | None:
        while self._freed:
            slot = self._freed.popleft()
            del self._slots[slot.start]
            self._free.setdefault(slot.size_bytes, []).append(slot.start)
        alike = self._free.get(size_bytes)
        if alike:
            return alike.pop()
        if self._used + size_bytes > self._backed:
            found = self._split(size_bytes)
            if found is not None:
                return found
            if not self._back(size_bytes):
                return None
        self._used += size_bytes
        return self._used - size_bytes

    def _back(self, size_bytes: int) -> bool:
        """Allocate pages for ``size_bytes`` behind the used part; return whether they could be had."""
        least = self._used + size_bytes - self._backed
        if least <= 0:
            return True
        more = max(least, min(self._backed, BACK_BYTES))
        more = min(more, self.size_bytes - self._backed)
        if more < least:
            return False
        try:
            os.posix_fallocate(self._fd, self._backed, more)
        except OSError:
            return False
        self._backed += more
        return True

    def _split(self, size_bytes: int) -> int | None:
        """Take from the smallest free range that will do, after joining those side by side.

        One at the end of all that is used is used no more.
        """
        ranges: list[tuple[int, int]] = []
        for start, size in sorted((s, size) for size, many in self._free.items() for s in many):
            if ranges and sum(ranges[-1]) == start:
                ranges[-1] = (ranges[-1][0], ranges[-1][1] + size)
            else:
                ranges.append((start, size))
        if ranges and sum(ranges[-1]) == self._used:
            self._used = ranges.pop()[0]
        fit = min((free for free in ranges if free[1] >= size_bytes), key=_size, default=None)
        if fit is not None:
            ranges.remove(fit)
            ranges.append((fit[0] + size_bytes, fit[1] - size_bytes))
        self._free = {}
        for start, size in ranges:
            if size:
                self._free.setdefault(size, []).append(start)
        return None if fit is None else fit[0]


class Mapping:
    """Another process's segment, for reading.

    Raises:
        Unshared: if there is no such segment, or its contents differ from the offer.
    """

    def __init__(self, offer: Offer) -> None:
        self.offer = offer
        self._path = f"/proc/{offer.pid}/fd/{offer.fd}"
        try:
            if not os.readlink(self._path).startswith(f"/memfd:{NAME} "):
                raise Unshared(f"{self._path} is not memory of kvps: another host or container?")
            fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise Unshared(
                f"its memory cannot be opened ({error}): another host, container or user?"
            ) from error
        try:
            self._open(fd)
        except (OSError, ValueError, OverflowError) as error:
            raise Unshared(f"its memory cannot be mapped: {error}") from error
        finally:
            os.close(fd)

    def _open(self, fd: int) -> None:
        status = os.fstat(fd)
        seals = fcntl.fcntl(fd, _GET_SEALS)
        if status.st_uid != os.geteuid():
            raise Unshared(f"its memory is user {status.st_uid}'s, not user {os.geteuid()}'s")
        if status.st_size != self.offer.size or seals & _SEALS != _SEALS:
            raise Unshared("its memory does not have the announced size, or could shrink")
        self._inode = status.st_dev, status.st_ino
        self._map = mmap.mmap(fd, status.st_size, prot=mmap.PROT_READ)
        if int.from_bytes(self._map[:NONCE_BYTES], "big") != self.offer.nonce:
            raise Unshared("its memory is another process's: another container?")
        # Python lets nobody share what it holds for read-only without a copy; the pages are.
        self.address = int(np.frombuffer(self._map, np.uint8).ctypes.data)
        self._whole = (ctypes.c_ubyte * status.st_size).from_address(self.address)
        self.first_page = memoryview(self._map)[:PAGE_BYTES]

    def read(self, offset: int, size_bytes: int, keep: object) -> Block:
        """Return bytes of it. They must not be written to: that would end this process.

        Args:
            offset: where they begin.
            size_bytes: how many.
            keep: what must live as long as they are referred to.

        Raises:
            ProtocolError: if they are not in it.
        """
        if not PAGE_BYTES <= offset <= self.offer.size - size_bytes:
            raise ProtocolError(
                f"bytes {offset} to {offset + size_bytes} are outside a segment of {self.offer.size}"
            )
        block = Block((size_bytes,), np.uint8, self._whole, offset)  # type: ignore[arg-type]  # a ctypes array is a buffer
        block.keep = (self, keep)
        return block

    def open(self) -> int | None:
        """Return a descriptor of it, for the caller to close; None if its owner is gone."""
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            return None
        status = os.fstat(fd)
        if (status.st_dev, status.st_ino) != self._inode:
            os.close(fd)
            return None
        return fd

    @property
    def is_there(self) -> bool:
        """Whether its owner still has it, as far as can be seen."""
        try:
            status = os.stat(self._path)
        except (FileNotFoundError, ProcessLookupError):
            return False
        except OSError:
            return True  # it lives, and may not be looked at any more
        return (status.st_dev, status.st_ino) == self._inode


def _pages(size_bytes: int) -> int:
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


def _size(extent: tuple[int, int]) -> int:
    return extent[1]
