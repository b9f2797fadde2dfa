"""A foothold for ``kvps-launch``: the port and the private directory that let it restart the scheduler.

The scheduler keeps in the folder what a restart must know, and removes it when the job is over. So
what lies there tells a scheduler that was killed from one that has nothing more to do.
"""

from __future__ import annotations

import socket
import tempfile
from pathlib import Path

from kvps.errors import ConfigError
from kvps.launchers.reaper import Reaper
from kvps.runtime.scheduler_process import STATE_FILE

PREFIX = "kvps-launch-"


class Foothold:
    """A port of this machine and a private folder; the reaper removes the folder when we end."""

    def __init__(self, reaper: Reaper, host: str = "127.0.0.1") -> None:
        """Take both.

        Args:
            reaper: removes the folder.
            host: the address of this machine at which the scheduler listens.

        Raises:
            ConfigError: if the folder cannot be made.
        """
        try:
            self._folder = tempfile.mkdtemp(prefix=PREFIX)  # nobody else can read it
        except OSError as error:
            raise ConfigError(
                f"cannot create the directory for the scheduler's state ({error}), which "
                "--max-restarts needs: free space, or set TMPDIR to a writable directory"
            ) from error
        reaper.hold_folder(self._folder)
        # Bound and not listened on, so that nobody else gets the port while there is no scheduler.
        self._kept = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._kept.bind((host, 0))

    @property
    def bind(self) -> str:
        """Where the scheduler listens, each time."""
        host, port = self._kept.getsockname()
        return f"tcp://{host}:{port}"

    @property
    def flags(self) -> list[str]:
        """Return the flags of the scheduler."""
        return ["--bind", self.bind, "--state", self._folder]

    def has_job(self, code: int) -> bool:
        """Whether the job goes on, of which a scheduler ended with ``code``; by 128 + N, signal N."""
        state = Path(self._folder, STATE_FILE)
        if not state.exists():
            return code > 128  # it was killed before there was anything to keep
        return state.stat().st_size > 0  # an empty one says that the job is over

    def close(self) -> None:
        """Give the port back."""
        self._kept.close()
