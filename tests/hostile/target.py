"""A job with keys that trains, and those who mean it harm.

The *canary* is rank 0: it pushes and pulls all the time, checks every value, and writes down how long each
round took. The *insider* is rank 1: it has joined, told its session key, and does nothing more, so that a test
may speak in its name. *Outsiders* have no key, or that of a role.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import zmq

from kvps import protocol as m
from kvps.net.zap import KeyPair
from kvps.protocol import wire
from kvps.protocol.envelope import Envelope, Message, Packet, Role
from kvps.runtime import key_files as files
from tests.integration.processes import Processes, until
from tests.support import tiers
from tests.support.scraping import HTTP, Samples, change, url_of

CANARY = """
import pathlib, time, torch, kvps
kv = kvps.create("dist_async", name="canary")
kv.set_optimizer("sgd", learning_rate=1.0)
kv.init("w", torch.zeros(1000))
out, step = torch.empty(1000), 0
with open("rounds", "w", buffering=1) as rounds:
    while not pathlib.Path("go").exists():
        began = time.perf_counter()
        kv.push("w", torch.ones(1000))
        kv.pull("w", out=out)
        step += 1
        assert torch.equal(out, torch.full((1000,), -float(step))), (step, out)
        print(time.perf_counter() - began, file=rounds)
        time.sleep(0.02)
print("right", flush=True)
"""
INSIDER = """
import pathlib, time, torch, kvps
from kvps.net import zap
pairs, new_pair = [], zap.new_pair
zap.new_pair = lambda: pairs.append(new_pair()) or pairs[-1]
kv = kvps.create("dist_async", name="canary")
kv.set_optimizer("sgd", learning_rate=1.0)
kv.init("w", torch.zeros(1000))
member = kv.session._core.member
server = [one for one in member.view.members if one.role == 1][0]
print("keys", *[pair.secret for pair in pairs if pair.public == member.identity.public_key], flush=True)
print("at", server.endpoint, member.key_of(kvps.protocol.envelope.Node(kvps.protocol.envelope.Role.SERVER, 0)),
    member.job.hex(), member.incarnation, member.identity.public_key, flush=True)
while not pathlib.Path("go").exists():
    time.sleep(0.02)
"""
ROUNDS = 10 if tiers.plays_all() else 2
"""How many rounds of the canary follow each harm: each takes 20 ms or more, and there are some 250 harms."""
ROUND_MAX_S = float(os.environ.get("KVPS_ROUND_MAX", "8.0"))
"""The longest that one of them may take, on a machine that does other things, too."""
LOOKS = 1000
"""Status queries in a second that the scheduler answers: tests ask after each harm whether it still does."""
GROWTH_MAX_MIB = 64
LINES_MAX = 5
"""Lines of log for each harm, of both processes together."""


class Voice:
    """A connection by CURVE, and frames of any kind along it."""

    def __init__(
        self, endpoint: str, server: str, own: KeyPair, kind: int = zmq.DEALER, routing_id: bytes = b""
    ) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(kind)
        if routing_id:
            self._socket.routing_id = routing_id
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.CURVE_SERVERKEY, server.encode())
        self._socket.setsockopt(zmq.CURVE_PUBLICKEY, own.public.encode())
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, own.secret.encode())
        self._socket.connect(endpoint)

    def frames(self, *frames: bytes) -> None:
        """Send a message of these frames."""
        self._socket.send_multipart(frames)

    def say(self, envelope: Envelope, message: Message, *payload: bytes) -> None:
        """Send a packet as it should be."""
        self.frames(*spell(envelope, message, *payload))

    def heard(self, limit_ms: int = 2000) -> Message | None:
        """Return the next answer; None if there is none for a while. PING is none: by it a server times a link."""
        end = time.monotonic() + limit_ms / 1000
        while self._socket.poll(max(0, round(1000 * (end - time.monotonic())))):
            message = wire.decode(self._socket.recv_multipart()).message
            if not isinstance(message, m.Ping):
                return message
        return None

    def close(self) -> None:
        """Hang up."""
        self._context.destroy(0)


def spell(envelope: Envelope, message: Message, *payload: bytes) -> list[bytes]:
    """Return the frames of a packet."""
    views = tuple([memoryview(frame) for frame in payload])
    return [bytes(item) for item in wire.encode(Packet(envelope, message, views))]


def head(envelope: Envelope, tag: int, body: bytes, version: int = 1, magic: bytes = b"KV") -> bytes:
    """Return the head of a packet with any body."""
    place = (envelope.job, envelope.view, envelope.role, 0, 0)
    return (
        wire.HEAD.pack(magic, version, tag, *place, envelope.rank, envelope.incarnation, envelope.seq) + body
    )


class Target:
    """A job with keys: a scheduler, a server, the canary and the insider."""

    def __init__(self, processes: Processes) -> None:
        self.folder = processes.folder
        self.keys = self.folder / "keys"
        files.write(self.keys, files.generate())
        keys = ("--keys", self.keys)
        self.cluster = processes.scheduler(2, 1, *keys, *HTTP, "--limit", f"looks={LOOKS}")
        flags = (
            *("--scheduler", self.cluster.endpoint, *keys, *HTTP),
            *("--checkpoint-dir", self.folder / "checkpoints", "--memory-limit", 64 << 20),
        )
        self.server = processes.kvps("server", *flags)
        env = {"KVPS_KEYS": str(self.keys)}
        self.canary = self.cluster.plain(processes.script(CANARY, "canary.py"), KVPS_RANK="0", **env)
        self.insider = self.cluster.plain(processes.script(INSIDER, "insider.py"), KVPS_RANK="1", **env)
        found = self.insider.expect(r"at (\S+) (\S+) (\w{32}) (\d+) (\S+)", 120.0)
        self.scheduler_at, self.server_at = self.cluster.endpoint, found.group(1)
        self.server_key = found.group(2)
        self.name, self.incarnation = bytes.fromhex(found.group(3)), int(found.group(4))
        secret = self.insider.expect(r"keys (\S+)").group(1)
        self.session = KeyPair(found.group(5), secret)
        self.scheduler_key = self.role("scheduler").public
        self.endpoints = [url_of(item) for item in (self.cluster.process, self.server)]
        self._numbers = iter(range(1000, 10**9))
        self._rounds: list[float] = []
        self._read = 0
        """Bytes of the canary's file that are in ``_rounds``."""
        until(lambda: len(self.rounds()) >= ROUNDS, "the first rounds of the canary")

    def role(self, role: str) -> KeyPair:
        """Return the key of a role."""
        (item,) = files._read(self.keys / f"{role}.key")
        return item.pair

    def seq(self) -> int:
        """Return the number of a request that nobody has made."""
        return next(self._numbers)

    def me(self, **other: object) -> Envelope:
        """Return an envelope of the insider, or one in which some fields are ``other``."""
        fields = {
            "job": self.name,
            "view": 9,
            "role": Role.WORKER,
            "rank": 1,
            "incarnation": self.incarnation,
            "seq": self.seq(),
        }
        return Envelope(**(fields | other))  # type: ignore[arg-type]  # of the right types, as above

    @contextmanager
    def voice(self, where: str, own: KeyPair | None = None, greet: bool = True) -> Iterator[Voice]:
        """Yield a connection to the scheduler or the server, by default by the insider's session key."""
        is_server = where == "server"
        endpoint = self.server_at if is_server else self.scheduler_at
        item = Voice(endpoint, self.server_key if is_server else self.scheduler_key, own or self.session)
        try:
            if is_server and greet:
                item.say(self.me(seq=1), hello(1))
                answer = item.heard(10_000)
                assert isinstance(answer, m.Welcome), answer
            yield item
        finally:
            item.close()

    def refused(self) -> Samples:
        """Return the counters of what the scheduler and the server have refused."""
        both: Samples = {}
        for url in self.endpoints:
            for (name, label), value in change(url, {}).items():
                both[url + name, label] = value
        return both

    def rounds(self) -> list[float]:
        """Return how long the rounds of the canary took, in seconds."""
        path = self.folder / "rounds"
        if path.exists():
            with path.open("rb") as file:
                file.seek(self._read)
                whole = file.read().rpartition(b"\n")[0]
            if whole:
                self._rounds += [float(line) for line in whole.splitlines()]
                self._read += len(whole) + 1
        return self._rounds

    def resident_mib(self) -> list[int]:
        """Return how much memory the scheduler and the server have."""
        pages = [
            int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])
            for process in (self.cluster.process, self.server)
        ]
        return [count * os.sysconf("SC_PAGE_SIZE") >> 20 for count in pages]

    def lines(self) -> list[str]:
        """Return what the scheduler and the server have logged."""
        return [*self.cluster.process.err.splitlines(), *self.server.err.splitlines()]

    def files(self) -> set[str]:
        """Return all files of the job but for what it prints, and its checkpoints."""
        found = [path for path in self.folder.rglob("*") if path.is_file()]
        found = [item for item in found if item.suffix not in (".out", ".err")]
        return {str(item) for item in found if self.folder / "checkpoints" not in item.parents}

    @contextmanager
    def unharmed(self, name: str = "", is_counted: bool = False) -> Iterator[None]:
        """Check that what is done meanwhile does no harm.

        Args:
            name: of the harm, in the text of an error.
            is_counted: some metric of what is refused must move.
        """
        refused = self.refused() if is_counted else None
        lines, there, before = len(self.lines()), self.files(), self.resident_mib()
        began, count = time.monotonic(), len(self.rounds())
        yield
        until(lambda: len(self.rounds()) >= count + ROUNDS, f"rounds of the canary {name}: {self.canary}")
        took = self.rounds()[count : count + ROUNDS]
        assert max(took) < ROUND_MAX_S, (name, sorted(took)[-5:])
        for item in (self.cluster.process, self.server, self.canary, self.insider):
            assert item.popen.poll() is None, (name, item)
        said = self.lines()[lines:]
        allowed = LINES_MAX * (1 + int((time.monotonic() - began) / 10.0))
        assert len(said) <= allowed, (name, said)
        assert not [line for line in said if "Traceback" in line], (name, said)
        assert self.files() == there, name
        if is_counted:
            until(lambda: self.refused() != refused, f"metric that moves {name}")
        until(
            lambda: all(
                now < was + GROWTH_MAX_MIB for now, was in zip(self.resident_mib(), before, strict=True)
            ),
            f"memory that is given back {name}",
        )

    @contextmanager
    def counted(self, number: int) -> Iterator[None]:
        """Check that so many packets are counted as refused meanwhile, which metrics show within a second."""

        def refused() -> float:
            # Connections of tests before may be hung up on at any time.
            return sum(item for (name, _), item in self.refused().items() if "connections" not in name)

        before = refused()
        yield
        until(lambda: refused() >= before + number, f"{number} refusals in the metrics")
        assert refused() == before + number

    def finish(self) -> None:
        """End the job; it ends well."""
        (self.folder / "go").touch()
        self.canary.expect("right", 60.0)
        for item in (self.canary, self.insider, self.server, self.cluster.process):
            assert item.wait() == 0, item


def hello(rank: int | None) -> m.Hello:
    """Return a worker's HELLO."""
    return m.Hello(1, 0, "k", 0, 2, rank, "h", 7)
