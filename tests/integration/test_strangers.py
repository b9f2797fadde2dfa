"""What anybody may send to the ports of a job that runs: it goes on, and its values are right."""

import os
import random
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from kvps import protocol as m
from kvps.inquiry import inquire
from kvps.protocol import wire
from kvps.protocol.envelope import Envelope, Packet, Role
from tests.integration import strangers
from tests.integration.processes import Cluster, Process, Processes, made, until
from tests.integration.strangers import LAST, MORE, Liar, frame, nobody, pour, throw

SCRIPT = """
import pathlib, time, torch, kvps
kv = kvps.create("dist_sync")
kv.set_optimizer("sgd", learning_rate=1.0)
kv.init("w", torch.zeros(1000))
out = torch.empty(1000)
for round_ in range(2):
    print("round", round_, "of job", kv.session._core.member.job.hex(), flush=True)
    while not pathlib.Path(f"go-{round_}").exists():
        time.sleep(0.02)
    kv.push("w", torch.full((1000,), float(round_ + 1)))
    kv.pull("w", out=out)
assert torch.equal(out, torch.full((1000,), -3.0)), out
print("right", flush=True)
"""
TLS = bytes.fromhex("16030102000100 01fc0303".replace(" ", "")) + bytes(range(256)) * 2
HTTP = b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 4\r\n\r\nkvps"


class Job:
    """A scheduler, a server and a worker, in the middle of their work."""

    def __init__(self, processes: Processes) -> None:
        self.cluster: Cluster = processes.scheduler(1, 1)
        self.server: Process = self.cluster.server("--log-level", "info")
        self.worker: Process = self.cluster.plain(processes.script(SCRIPT))
        self.folder: Path = processes.folder
        (self.folder / "go-0").touch()
        self.worker.expect("round 1", 120.0)
        seen = look(self.cluster.endpoint)
        self.seats = {(member.role, member.rank): member for member in seen.members}
        self.endpoint = self.server.expect(r"at (tcp://[\d.]+:\d+)").group(1)
        self.name = bytes.fromhex(self.worker.expect(r"job (\w{32})").group(1))

    def envelope(self, role: Role, seq: int = 1) -> Envelope:
        """Return the envelope of a member."""
        return Envelope(self.name, 9, role, 0, self.seats[role, 0].incarnation, seq)

    def check(self) -> None:
        """Assert that the scheduler and the server live and answer."""
        for item in (self.cluster.process, self.server):
            assert item.popen.poll() is None, item
        look(self.cluster.endpoint)

    def finish(self) -> None:
        """Let the worker go on, and assert that its values are right."""
        (self.folder / "go-1").touch()
        self.worker.expect("right", 120.0)
        assert self.worker.wait() == 0
        assert self.server.wait() == 0
        assert self.cluster.process.wait() == 0


def look(endpoint: str) -> m.Seen:
    """Return what the scheduler shows."""
    seen = inquire(endpoint, m.Look(), m.Seen, None, 60.0).message
    assert isinstance(seen, m.Seen)
    return seen


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """Yield a job that strangers talk to; it has to end well."""
    for processes in made(tmp_path_factory.mktemp("job")):
        item = Job(processes)
        yield item
        item.finish()


def old_packet(packet: Packet) -> bytes:
    """Return a packet as a peer of ZMTP 1.0 sends it, who greets by its (empty) name alone."""
    (head,) = wire.encode(packet)
    return b"\x01\x00" + bytes([len(head) + 1, 0]) + head


@pytest.mark.spec("R200", "R201")
@pytest.mark.parametrize("port", ["scheduler", "server"])
@pytest.mark.parametrize(
    "octets",
    [
        random.Random(1).randbytes(4096),
        bytes(1000),
        TLS,
        HTTP,
        old_packet(Packet(nobody(), m.Look())),
        strangers.GREETING + b"\x04\xff",
        strangers.GREETING + b"\x02" + b"\xff" * 8,
    ],
    ids=["noise", "zeros", "TLS", "HTTP", "ZMTP 1.0", "half a handshake", "2^64 octets"],
)
def test_octets_of_no_peer(job: Job, octets: bytes, port: str) -> None:
    answer = throw(job.cluster.endpoint if port == "scheduler" else job.endpoint, octets)
    assert b"KV" not in answer  # in particular, nobody is served who has not greeted
    job.check()


IN_A_MEMBERS_NAME = {
    "a release of its loans": ("server", m.Release(2**63 - 1, ())),
    "that it has taken memory": ("server", m.Taken(7, True)),
    "an offer of memory": ("server", m.Offer(1, 3, 1 << 20, 7)),
    "a probe": ("server", m.Probe((1,))),
    "a beat": ("scheduler", m.Beat(1)),
    "that it leaves": ("scheduler", m.Leave(True, 0, True, "")),
}


@pytest.mark.spec("R240", "R242")
@pytest.mark.parametrize(("port", "message"), IN_A_MEMBERS_NAME.values(), ids=IN_A_MEMBERS_NAME)
def test_stranger_without_the_jobs_name_speaks_for_no_member(job: Job, port: str, message: m.Message) -> None:
    """The 16 random octets of the job's name are told to members alone; that of a look shows four of them."""
    endpoint = job.cluster.endpoint if port == "scheduler" else job.endpoint
    guesses = (bytes(16), job.name[:4] + bytes(12), random.Random(3).randbytes(16))
    for name in guesses:
        with closing(Liar(endpoint)) as liar:
            answer = liar.asked(job.envelope(Role.WORKER)._replace(job=name), message)
            assert answer is not None
            assert isinstance(answer.message, m.Error | m.Left), answer  # of another job
            assert answer.envelope.job == bytes(16)
    job.check()
    assert {member.state for member in look(job.cluster.endpoint).members} == {"held"}


@pytest.mark.spec("R203")
@pytest.mark.parametrize("port", ["scheduler", "server"])
@pytest.mark.parametrize("size", [0, 1000, 65536])
def test_a_message_without_an_end(job: Job, size: int, port: str) -> None:
    endpoint = job.cluster.endpoint if port == "scheduler" else job.endpoint
    process = job.cluster.process if port == "scheduler" else job.server
    before = resident_mib(process.pid)
    item = frame(bytes(size), MORE)
    limit = (64 << 20) if size == 0 else (4 << 30)  # 2 GiB of memory, if nobody stops it
    assert pour(endpoint, item * max(1, (1 << 16) // len(item)), limit) < limit
    assert highest_mib(process.pid) < before + 1000
    job.check()


COMMANDS = {
    "a PING": strangers.command(b"PING", b"\0\1"),
    "many PINGs": strangers.command(b"PING", b"\0\1") * 10_000,
    "a PING of 64 KiB": strangers.command(b"PING", b"\0\1" + bytes(65536)),
    "an unknown command": strangers.command(b"SPAM", bytes(10)),
    "an empty command": b"\x04\x00",
    "a name that is longer than its command": b"\x04\x02\xffX",
    "READY once more": strangers.command(b"READY"),
    "a subscription": strangers.command(b"SUBSCRIBE", b"x"),
}


@pytest.mark.spec("R200")
@pytest.mark.parametrize("port", ["scheduler", "server"])
@pytest.mark.parametrize("octets", COMMANDS.values(), ids=COMMANDS)
def test_commands_behind_the_handshake(job: Job, octets: bytes, port: str) -> None:
    endpoint = job.cluster.endpoint if port == "scheduler" else job.endpoint
    with closing(strangers.greeted(endpoint)) as item:
        item.settimeout(0.2)
        with suppress(OSError):
            item.sendall(octets)
            answer = item.recv(1 << 20)
            assert len(answer) <= 16 * 10_000
    job.check()


@pytest.mark.spec("R203")
def test_a_message_of_very_many_frames(job: Job) -> None:
    for endpoint in (job.cluster.endpoint, job.endpoint):
        with closing(strangers.greeted(endpoint)) as item:
            item.sendall(frame(b"", MORE) * 500_000 + frame(b"", LAST))
            (head,) = wire.encode(Packet(nobody(), m.Look()))
            item.sendall(frame(head))
        job.check()


def resident_mib(pid: int) -> int:
    """Return how much memory a process has."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") >> 20


def highest_mib(pid: int) -> int:
    """Return how much memory a process has had at most."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (line,) = [item for item in lines if item.startswith("VmHWM:")]
    return int(line.split()[1]) >> 10


def test_memory_comes_back(job: Job) -> None:
    for process in (job.cluster.process, job.server):
        until(lambda own=process: resident_mib(own.pid) < 600, "memory that is given back")
