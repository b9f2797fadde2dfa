"""File descriptors: a check that there are enough, because libzmq aborts the process if there are not.

Each role counts what it needs before it opens anything. A soft limit that is too low is raised, as
far as the hard limit allows; where that is too low as well, the error says how many are missing.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import resource

from kvps.errors import ConfigError

log = logging.getLogger("kvps")
TELL_EVERY_S = 10.0
"""Seconds between two lines of log about a shortage."""
TRANSPORT = 13
"""Descriptors of one :class:`~kvps.net.zeromq.ZmqTransport`: the pair that wakes it (2), its memory's file
(1), libzmq's context (1), an event and an epoll of each of its two threads (4), the socket that
answers ZAP (1), and a connection that is being replaced (4)."""
LISTENING = 2
"""A socket that listens, and its event."""
WATCHING = 2
"""The events of a monitor's two ends."""
CONNECTION = 4
"""A socket that connects, its event, and those of its monitor's two ends."""
ACCEPTED = 1
"""A connection that a peer opened to us."""
SPARE = 8
"""For a moment: a module or a library that is loaded, a file that is written, memory that is mapped."""

LEAST = TRANSPORT + LISTENING + WATCHING + CONNECTION + SPARE
"""Descriptors of a process with one transport, before it knows the size of its job."""


def of_scheduler(workers: int, servers: int) -> int:
    """Return how many a scheduler needs; a guarded worker speaks along two connections."""
    return TRANSPORT + LISTENING + WATCHING + ACCEPTED * (2 * workers + servers)


def of_server(workers: int, servers: int) -> int:
    """Return how many a server needs: all workers and servers connect to it, and it to the others."""
    out, into = servers, workers + servers - 1  # out: the scheduler, and all servers but itself
    return TRANSPORT + LISTENING + CONNECTION * out + ACCEPTED * into


def of_worker(workers: int, servers: int) -> int:
    """Return how many a worker needs, also as the leader of its host."""
    out = servers + 2  # the scheduler, and the neighbour who pushes for it
    return TRANSPORT + LISTENING + CONNECTION * out + ACCEPTED * (workers - 1)


def demand(who: str, count: int) -> None:
    """See that ``count`` more can be opened; raise the soft limit if it is in the way.

    Raises:
        ConfigError: if the hard limit is, naming ``who`` needs them.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    there = _open(soft)
    need = there + count
    if soft == resource.RLIM_INFINITY or need <= soft:
        return
    if hard == resource.RLIM_INFINITY or need <= hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (need, hard))
        return
    raise ConfigError(
        f"{who} needs {count} file descriptors besides the {there} that are open, and this process may have "
        f"{hard} in all: raise the limit to {need} or more (ulimit -n {need}; LimitNOFILE= in systemd, "
        "--ulimit nofile= in docker), and start it again"
    )


def make_room(count: int) -> None:
    """Raise the soft limit for up to ``count`` more, as far as the hard one allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY:
        need = _open(soft) + count
        wanted = need if hard == resource.RLIM_INFINITY else min(need, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))


class Shortage:
    """The moments at which no descriptor is left, and so no peer can connect.

    libzmq tells of each attempt, in a loop without a pause: its events would be too many.
    """

    def __init__(self) -> None:
        self._quiet_until = -math.inf

    def look(self, now: float) -> bool:
        """Return whether none is left; the log has a line of it now and then."""
        try:
            os.close(os.dup(0))
            return False
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                return False
        if now >= self._quiet_until:
            self._quiet_until = now + TELL_EVERY_S
            log.warning(
                "all file descriptors of this process are in use (ulimit -n), so no peer can connect; "
                "of connections that carry nothing, the oldest are closed"
            )
        return True


def _open(limit: int) -> int:
    """Return how many are open; ``limit`` where there are so many that it cannot be seen."""
    try:
        return len(os.listdir("/proc/self/fd")) - 1  # one was for looking
    except FileNotFoundError:
        return 3  # no Linux
    except OSError:
        return limit
