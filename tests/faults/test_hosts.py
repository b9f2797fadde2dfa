"""Hosts vanish from the network, or hear and are not heard, and come back.

Each host is a network namespace; iptables drops what should not arrive, and nobody is told.
"""

import logging
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

import pytest

from benchmarks.compare.networks.namespaces import Namespaces
from tests.faults.jobs import Job
from tests.integration.processes import BIN, Process, Processes, until

log = logging.getLogger(__name__)
PORT = 9091
NOTICED_MAX_S = 15.0
SILENT_MAX_S = 6.0
"""The bound of a loaded machine: an idle one takes 1.3 s."""
WORKERS = 2


@pytest.fixture
def hosts(has_namespaces: None) -> Iterator[Namespaces]:
    """Host 0 is for the scheduler and a server, host 1 and 2 for a worker each."""
    if shutil.which("iptables") is None:
        pytest.skip("iptables is not installed")
    with Namespaces(1 + WORKERS, "1gbit") as made:
        rule = made.inside(0, ["iptables", "-L", "INPUT"])
        if subprocess.run(rule, capture_output=True).returncode:
            pytest.skip("iptables does not work in a namespace here")
        yield made


class Spread:
    """A job over hosts."""

    def __init__(self, processes: Processes, hosts: Namespaces) -> None:
        self.job = Job(processes)
        self._hosts = hosts
        self.scheduler_at = f"tcp://{hosts.address(0)}:{PORT}"
        self.members: list[Process] = []

    def start(
        self, command: Sequence[object], servers: Sequence[int] = (0,), workers: Sequence[int] = (1, 2)
    ) -> None:
        """Start all of it on these hosts, with copies of several servers; the workers run ``command``."""
        there = ("--scheduler", self.scheduler_at)
        flags = (
            *("--workers", WORKERS, "--servers", len(servers), "--replicas", len(servers) - 1),
            *("--bind", self.scheduler_at, "--insecure", "--log-level", "info"),
        )
        self.scheduler = self._start(0, "scheduler", *flags)
        for host in servers:
            self._start(
                host, "server", *there, "--bind", f"tcp://{self._hosts.address(host)}:0", "--insecure"
            )
        for rank, host in enumerate(workers):
            self._start(host, "worker", *there, "--rank", rank, "--", *command)

    def _start(self, host: int, role: str, *flags: object) -> Process:
        program = (self.job.processes.interpreter, BIN / f"kvps-{role}")
        argv = [str(item) for item in (*program, *flags)]
        env = {"KVPS_TRANSPORT": "tcp", **self.job.env}
        item = self.job.processes.start(role, *self._hosts.inside(host, argv), **env)
        self.members.append(item)
        return item

    def drop(self, host: int, *chains: str) -> None:
        """Let nothing come to a host (INPUT) or leave it (OUTPUT) from now on."""
        self._rule("-A", host, chains)

    def heal(self, host: int, *chains: str) -> None:
        """Undo :meth:`drop`."""
        self._rule("-D", host, chains)

    def _rule(self, verb: str, host: int, chains: Sequence[str]) -> None:
        for chain in chains:
            argv = ["iptables", verb, chain, "!", "-i" if chain == "INPUT" else "-o", "lo"]
            subprocess.run(self._hosts.inside(host, [*argv, "-j", "DROP"]), check=True)

    def goes_on(self, limit_s: float = 60.0) -> float:
        """Wait until rank 0 has done three more steps; return how long that took."""
        begun, at = len(self.job.rounds(0)), time.monotonic()
        until(lambda: len(self.job.rounds(0)) >= begun + 3, f"rounds {self.members}", limit_s)
        return time.monotonic() - at

    def check(self, limit_s: float = 90.0) -> None:
        """All ended well, and each push was counted once."""
        assert [member.wait(limit_s) for member in self.members] == [0] * len(self.members), self.members
        assert sum("each push counted once" in member.out for member in self.members) == WORKERS


@pytest.mark.spec("R41", "R51")
@pytest.mark.parametrize("chain", ["INPUT", pytest.param("OUTPUT", marks=pytest.mark.slow)])
def test_a_worker_that_only_hears_or_is_only_heard(
    processes: Processes, hosts: Namespaces, chain: str
) -> None:
    """For as long as it takes to lose and ask again, and not as long as to be given up."""
    spread = Spread(processes, hosts)
    spread.start(spread.job.command("sync", 60))
    until(lambda: len(spread.job.rounds(0)) >= 3, f"rounds {spread.members}", 60.0)
    spread.drop(2, chain)
    try:
        begun = len(spread.job.rounds(0))
        told = time.monotonic() + 3.0
        until(lambda: time.monotonic() > told, "end of the cut")
        assert len(spread.job.rounds(0)) <= begun + 2, "rounds wait for it"
    finally:
        spread.heal(2, chain)
    log.info("cut %s: three rounds %.1f s after healing", chain, spread.goes_on())
    spread.check()
    assert "lost" not in spread.scheduler.err


FAILS = """
import sys, time, kvps, torch
kv = kvps.create("dist_sync", on_worker_lost="fail", timeout=60)
kv.init("w", torch.zeros(1000))
print("begins", flush=True)
try:
    while True:
        kv.pushpull("w", torch.ones(1000))
        last = time.monotonic()
except kvps.WorkerLost as error:
    print(f"after {time.monotonic() - last:.2f} s: {error}", flush=True)
"""


@pytest.mark.slow
@pytest.mark.spec("R71")
def test_a_host_that_is_lost_for_good(processes: Processes, hosts: Namespaces) -> None:
    spread = Spread(processes, hosts)
    spread.start([sys.executable, processes.script(FAILS)])
    first, second = spread.members[-2:]
    first.expect("begins")
    second.expect("begins")
    spread.drop(2, "INPUT", "OUTPUT")
    found = first.expect(r"after ([\d.]+) s: .*worker 1", 30.0)
    log.info("a lost host is noticed after %s s", found[1])
    assert float(found[1]) <= NOTICED_MAX_S
    for member in spread.members:
        member.signal(signal.SIGTERM)
    for member in spread.members:
        member.wait(60.0)


@pytest.mark.spec("R524", "R577")
def test_the_host_of_a_server_that_has_a_copy_is_missed_soon(processes: Processes, hosts: Namespaces) -> None:
    """Both the server there and the standby of the other one are silent; nobody's connection breaks."""
    spread = Spread(processes, hosts)
    spread.start(spread.job.command("sync", 60), servers=(0, 1), workers=(0, 0))
    for server in (0, 1):
        spread.scheduler.expect(rf"the standby of server {server} .* 2 of 2 copies", 60.0)
    until(lambda: len(spread.job.rounds(0)) >= 3, f"rounds {spread.members}", 60.0)
    spread.drop(1, "INPUT", "OUTPUT")
    took_s = spread.goes_on()
    log.info("a silent host with a server: three rounds after %.2f s", took_s)
    spread.scheduler.expect("and its host does not answer")
    assert took_s <= SILENT_MAX_S
    gone = spread.members.pop(2)
    spread.check()
    spread.heal(1, "INPUT", "OUTPUT")
    gone.signal(signal.SIGTERM)
    gone.wait(60.0)
