"""Host identity: which processes share a network stack, and perhaps a user and memory.

Two such processes reach each other by loopback, and nothing that they say leaves the machine. If
both run as one user, they need no keys to tell each other apart from strangers: the kernel says
whose process listens at a name of its own. Most can read each other's memory, too; whether two can
is found out when one offers its own.
"""

from __future__ import annotations

import os
from hashlib import blake2b
from pathlib import Path

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")


def machine() -> int:
    """Return a number that two processes share if they are near each other; 0 if it is unknown.

    It is made of the id that Linux draws when it boots, and of the network namespace: containers of
    one host are not near each other unless they share that.

    Example:
        >>> machine() == machine()
        True
    """
    try:
        boot, network = _BOOT.read_bytes().strip(), os.stat(_NETWORK)
    except OSError:
        return 0
    named = b"%b %d %d" % (boot, network.st_dev, network.st_ino)
    return int.from_bytes(blake2b(named, digest_size=7).digest(), "big") or 1
