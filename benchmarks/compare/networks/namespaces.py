"""Hosts that are network namespaces of this machine, each behind a link of a set rate.

Theory of operation
-------------------
Every host is a namespace with an ``eth0``. Its other end is a port of a bridge, which has a
namespace to itself, so nothing appears among this machine's own interfaces::

    host 0 eth0 ═══╗                    ═══ a pair of veth; what leaves either end waits in a
    host 1 eth0 ═══╬═══ bridge              token bucket filter of the link's rate
    host 2 eth0 ═══╝

A shell stands by from the start, reading a pipe of ours. When the pipe ends, because we closed it
or because we are gone, even by SIGKILL, it deletes the namespaces: there is one way to the end.
The names have our process id, so several runs do not meet.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from types import TracebackType

from kvps.errors import ConfigError

NETWORK = "10.87.0"
"""A network of our own; no route leads out of it."""
COMMAND_MAX_S = 30.0
_CLONE_NEWNET = 0x40000000
BURST, LATENCY = "256k", "100ms"
_DELETE = """\
trap '' INT TERM HUP
cat > /dev/null
for name; do ip netns delete "$name"; done
"""


class Namespaces:
    """Hosts for as long as a ``with`` block runs."""

    def __init__(self, count: int, rate: str) -> None:
        self._names = [f"kvps-{os.getpid()}-{host}" for host in range(count)]
        self._switch = f"kvps-{os.getpid()}-switch"
        self._rate = rate
        self._janitor: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Namespaces:
        """Make the hosts.

        Raises:
            ConfigError: if this process or this machine cannot.
        """
        demand_root()
        self._janitor = subprocess.Popen(
            ["sh", "-c", _DELETE, "sh", *self._names, self._switch],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for us
        )
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Delete the hosts."""
        if self._janitor is not None:
            assert self._janitor.stdin is not None
            self._janitor.stdin.close()
            self._janitor.wait()

    @staticmethod
    def address(host: int) -> str:
        """Return the address of a host."""
        return f"{NETWORK}.{host + 1}"

    def inside(self, host: int, argv: Sequence[str]) -> list[str]:
        """Return the command that runs ``argv`` on a host."""
        return ["ip", "netns", "exec", self._names[host], *argv]

    @contextmanager
    def entered(self, host: int) -> Iterator[None]:
        """Have the calling thread, and processes that it starts, run on a host while the block runs."""
        setns = ctypes.CDLL(None, use_errno=True).setns

        def enter(network: int) -> None:
            if setns(network, _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")

        with ExitStack() as opened:
            places = ("/proc/thread-self/ns/net", f"/run/netns/{self._names[host]}")
            own, there = [opened.enter_context(open(place, "rb")).fileno() for place in places]
            enter(there)
            try:
                yield
            finally:
                enter(own)

    def limit(self, host: int, rate: str, *, burst: str = BURST, latency: str = LATENCY) -> None:
        """Give the link of a host another rate, in both directions."""
        words = ("tbf", "rate", rate, "burst", burst, "latency", latency)
        for place, link in ((self._names[host], "eth0"), (self._switch, f"port{host}")):
            _run("tc", "-n", place, "qdisc", "change", "dev", link, "root", *words)

    def counters(self) -> list[tuple[int, int]]:
        """Return for each host the bytes that have come in and gone out by its link."""
        folder = "/sys/class/net/eth0/statistics"
        files = [f"{folder}/rx_bytes", f"{folder}/tx_bytes"]
        counted = []
        for host in range(len(self._names)):
            come_in, gone_out = _run(*self.inside(host, ["cat", *files])).split()
            counted.append((int(come_in), int(gone_out)))
        return counted

    def _make(self) -> None:
        _run("ip", "netns", "add", self._switch)
        _run("ip", "-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", self._switch, "link", "set", "bridge", "up")
        for host, name in enumerate(self._names):
            _run("ip", "netns", "add", name)
            self._join(host, name, f"port{host}")

    def _join(self, host: int, name: str, port: str) -> None:
        """Lay a link between a host and the bridge, and limit both directions."""
        peer = ("peer", "name", port, "netns", self._switch)
        _run("ip", "link", "add", "eth0", "netns", name, "type", "veth", *peer)
        _run("ip", "-n", name, "address", "add", f"{self.address(host)}/24", "dev", "eth0")
        for place, link in ((name, "lo"), (name, "eth0"), (self._switch, port)):
            _run("ip", "-n", place, "link", "set", link, "up")
        _run("ip", "-n", self._switch, "link", "set", port, "master", "bridge")
        limit = ("tbf", "rate", self._rate, "burst", BURST, "latency", LATENCY)
        for place, link in ((name, "eth0"), (self._switch, port)):
            _run("tc", "-n", place, "qdisc", "add", "dev", link, "root", *limit)


def demand_root() -> None:
    """Refuse where no network namespace can be made.

    Raises:
        ConfigError: saying why.
    """
    if os.geteuid() != 0:
        raise ConfigError("--network creates network namespaces, which needs root: run it as root")
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            raise ConfigError(f"--network needs the program {program!r}; install iproute2")


def _run(*argv: str) -> str:
    """Run a command; return what it printed.

    Raises:
        ConfigError: if it fails, with its words.
    """
    with suppress(subprocess.TimeoutExpired):
        done = subprocess.run(argv, capture_output=True, text=True, timeout=COMMAND_MAX_S)
        if done.returncode == 0:
            return done.stdout
        raise ConfigError(
            f"--network: {' '.join(argv)!r} failed: {done.stderr.strip()}; it needs root's "
            "rights over the network, which only a privileged container has"
        )
    raise ConfigError(f"--network: {' '.join(argv)!r} did not end in {COMMAND_MAX_S:g} s")
