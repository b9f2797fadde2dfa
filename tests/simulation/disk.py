"""What processes wrote and a restart finds: the durable image of a simulated cluster.

A process is gone with all that it knew; what :meth:`Disk.write` returned from is there for whoever is
started in its place. A file is written aside and renamed, so that it is the new one or the old one.
Two things go wrong: the process ends in the midst of a write (:meth:`Disk.tear`), or there is no space
left. Either way the old file stays, and the writer learns it by an error.
"""

from __future__ import annotations

import errno
import os


class Disk:
    """Files by the name of the process whose they are."""

    def __init__(self) -> None:
        self._files: dict[str, bytes] = {}
        self._torn: set[str] = set()
        self.is_full = False

    def tear(self, name: str) -> None:
        """Have process ``name`` end in the midst of what it writes next."""
        self._torn.add(name)

    def write(self, name: str, state: bytes) -> None:
        """Put ``state`` in the place of what process ``name`` wrote before.

        Raises:
            OSError: if it cannot be; nothing is changed then.
        """
        if self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)
        if name in self._torn:
            self._torn.remove(name)
            raise OSError(errno.EIO, "ended in the midst of a write", name)
        self._files[name] = state

    def read(self, name: str) -> bytes | None:
        """Return what process ``name`` wrote last; None if it never did."""
        return self._files.get(name)
