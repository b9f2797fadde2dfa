"""Keys by real connections: whom a job with keys answers, and what each key is good for."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import zmq

import kvps
from kvps import protocol as m
from kvps.core.effects import Connect, Effect, Exit, Send
from kvps.core.key_roles import near_endpoint
from kvps.core.membership_client import Identity, MembershipClient
from kvps.errors import Unauthorized
from kvps.net.links import links
from kvps.net.links.framing import record_of
from kvps.net.zap import KeyPair, Keys, new_pair
from kvps.net.zeromq import ZmqTransport
from kvps.protocol import wire
from kvps.protocol.envelope import Envelope, Message, Packet, Role
from kvps.runtime import key_files as files
from tests.integration.processes import BIN, Cluster, Process, Processes, made, until
from tests.support.scraping import HTTP, one_moves, url_of

SCRIPT = """
import pathlib, time, torch, kvps
kv = kvps.create("dist_sync")
kv.init("w", torch.zeros(1000))
member = kv.session._core.member
view = member.view
server = [(one, key) for one, key in zip(view.members, view.keys) if one.role == 1][0]
print("at", server[0].endpoint, server[1], member.job.hex(), member.incarnation, flush=True)
while not pathlib.Path("go").exists():
    time.sleep(0.02)
kv.push("w", torch.full((1000,), 2.0))
assert torch.equal(kv.pull("w"), torch.full((1000,), 2.0))
print("right", flush=True)
"""
LIMIT_S = 8.0
"""In so long a peer without the right key is told so, on a busy machine, too; to give up joining takes a minute."""


class Job:
    """A job of one worker, with keys in a folder."""

    def __init__(self, processes: Processes) -> None:
        self.folder = processes.folder / "keys"
        files.write(self.folder, files.generate())
        keys = ("--keys", self.folder)
        self.cluster: Cluster = processes.scheduler(1, 1, *keys, *HTTP)
        self.server: Process = self.cluster.server(*HTTP, *keys)
        self.at_scheduler, self.at_server = url_of(self.cluster.process), url_of(self.server)
        script = processes.script(SCRIPT)
        self.worker: Process = self.cluster.plain(script, KVPS_KEYS=str(self.folder))
        found = self.worker.expect(r"at (\S+) (\S+) (\w{32}) (\d+)", 120.0)
        self.endpoint, self.server_key = found.group(1), found.group(2)
        self.name, self.incarnation = bytes.fromhex(found.group(3)), int(found.group(4))
        self.place = processes.folder

    def section(self, role: str) -> KeyPair:
        """Return a role's key."""
        (item,) = files._read(self.folder / f"{role}.key")
        return item.pair

    def envelope(self, rank: int = 0, role: Role = Role.WORKER, life: int | None = None) -> Envelope:
        """Return the envelope of a member, by default of the true worker."""
        incarnation = self.incarnation if life is None else life
        return Envelope(self.name, 9, role, rank, incarnation, 1)

    def finish(self) -> None:
        """Let the worker go on, and assert that nothing has changed."""
        (self.place / "go").touch()
        self.worker.expect("right", 120.0)
        for item in (self.worker, self.server, self.cluster.process):
            assert item.wait() == 0


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """Yield a job that others talk to; it has to end well."""
    for processes in made(tmp_path_factory.mktemp("job")):
        item = Job(processes)
        yield item
        item.finish()


class Peer:
    """Who connects by a key of his choice, and says what he likes."""

    def __init__(self, endpoint: str, server: str, own: KeyPair) -> None:
        self._context = zmq.Context()
        self._dealer = self._context.socket(zmq.DEALER)
        self._dealer.setsockopt(zmq.CURVE_SERVERKEY, server.encode())
        self._dealer.setsockopt(zmq.CURVE_PUBLICKEY, own.public.encode())
        self._dealer.setsockopt(zmq.CURVE_SECRETKEY, own.secret.encode())
        self._dealer.connect(endpoint)

    def say(self, envelope: Envelope, message: Message, limit_ms: int = 5000) -> Message | None:
        """Say it, and return the first answer; None if there is none for a while."""
        self._dealer.send_multipart(wire.encode(Packet(envelope, message)))
        if not self._dealer.poll(limit_ms):
            return None
        return wire.decode(self._dealer.recv_multipart()).message

    def close(self) -> None:
        """Hang up."""
        self._context.destroy(0)


def joined(endpoint: str, keys: Keys | None, role: Role = Role.WORKER) -> tuple[MembershipClient, float]:
    """Try to join; return what has become of it, and how long that took."""
    public = keys.session.public if keys else ""
    identity = Identity(role, endpoint, "here", 7, kvps.__version__, public_key=public)
    began = time.monotonic()
    outbox: list[Effect] = []
    client = MembershipClient(identity, began, outbox)
    transport = ZmqTransport(keys=keys)
    try:
        client.start(began)
        while client.error is None and time.monotonic() < began + 10.0:
            for effect in outbox:
                if isinstance(effect, Connect):
                    transport.connect(effect)
                elif isinstance(effect, Send):
                    transport.send(effect.to, effect.packet, None)
            outbox.clear()
            for _, packet in transport.poll(0.05):
                assert isinstance(packet, Packet)
                client.on_packet(packet, time.monotonic())
            client.on_timer(time.monotonic())
    finally:
        transport.close(0.0)
    assert any(isinstance(item, Exit) for item in outbox)
    return client, time.monotonic() - began


@pytest.mark.spec("R245", "R246")
@pytest.mark.parametrize("kind", ["no key", "unknown key", "wrong scheduler key", "a server's key"])
def test_process_without_the_right_key_learns_it_at_once(job: Job, kind: str) -> None:
    pinned, worker = (job.section("scheduler").public,), job.section("worker")
    keys = {
        "no key": None,
        "unknown key": Keys(pinned, new_pair()),
        "wrong scheduler key": Keys((new_pair().public,), worker),
        "a server's key": Keys(pinned, job.section("server")),
    }[kind]
    moves = {
        "no key": ("kvps_refused_connections_total", "no_key"),
        "unknown key": ("kvps_refused_connections_total", "unknown_key"),
        "wrong scheduler key": ("kvps_refused_connections_total", "wrong_server_key"),
        "a server's key": ("kvps_refusals_total", "wrong_role"),
    }[kind]
    with one_moves(job.at_scheduler, *moves):
        client, took_s = joined(job.cluster.endpoint, keys)
    assert isinstance(client.error, Unauthorized), client.error
    assert took_s < LIMIT_S
    assert "--keys" in str(client.error) or "asked for the seat of a worker" in str(client.error)


@pytest.mark.spec("R246", "R247")
@pytest.mark.parametrize(
    ("role", "envelope", "message", "says"),
    [
        ("worker", (0, Role.WORKER), m.Beat(1), "the role worker may not send Beat"),
        ("worker", (0, Role.WORKER), m.Leave(True, 0, True, ""), "may not send Leave"),
        ("worker", (0, Role.SERVER), m.Hello(1, 0, "k", 0, 1, 0, "h", 7, "tcp://h:1"), "a server"),
        ("worker", (0, Role.WORKER), m.Hello(1, 0, "k", 0, 2, 0, "h", 7), "a member that has a seat"),
        ("server", (0, Role.SERVER), m.Shelf(0, True, 0.0, (), 0), "may not send Shelf"),
        ("look", (0, Role.WORKER), m.Checkpoint("kv", "", 0), "may not send Checkpoint"),
        ("look", (0, Role.WORKER), m.Hello(1, 0, "k", 0, 2, 0, "h", 7), "may not send Hello"),
    ],
)
def test_role_key_grants_nothing_else(
    job: Job, role: str, envelope: tuple[int, Role], message: Message, says: str
) -> None:
    """Also where the peer knows all that there is to know of the member whom it names."""
    reasons = {"a server": "wrong_role", "a member that has a seat": "other_member"}
    with (
        closing(Peer(job.cluster.endpoint, job.section("scheduler").public, job.section(role))) as peer,
        one_moves(job.at_scheduler, "kvps_refusals_total", reasons.get(says, "key_may_not")),
    ):
        answer = peer.say(job.envelope(*envelope), message)
        assert isinstance(answer, m.Error)
        assert (answer.code, says in answer.text) == (Unauthorized.code, True), answer.text


@pytest.mark.spec("R246")
def test_a_look_key_looks(job: Job) -> None:
    with closing(Peer(job.cluster.endpoint, job.section("scheduler").public, job.section("look"))) as peer:
        assert isinstance(peer.say(Envelope(bytes(16), 0, Role.WORKER, 0, 0, 1), m.Look()), m.Seen)


@pytest.mark.spec("R246")
@pytest.mark.parametrize("role", ["worker", "server", "admin", "unknown"])
def test_a_server_knows_session_keys_alone(job: Job, role: str) -> None:
    own = new_pair() if role == "unknown" else job.section(role)
    with (
        one_moves(job.at_server, "kvps_refused_connections_total", "unknown_key"),
        closing(Peer(job.endpoint, job.server_key, own)) as peer,
    ):
        assert peer.say(job.envelope(), m.Pull(1, True, (m.Ask(0, 1, 0, 0),)), 1500) is None


def test_clear_text_is_not_served(job: Job) -> None:
    for endpoint, url in ((job.cluster.endpoint, job.at_scheduler), (job.endpoint, job.at_server)):
        with (
            one_moves(url, "kvps_refused_connections_total", "no_key"),
            zmq.Context() as context,
            context.socket(zmq.DEALER) as stranger,
        ):
            stranger.linger = 0
            stranger.connect(endpoint)
            stranger.send_multipart(wire.encode(Packet(job.envelope(), m.Beat(1))))
            assert not stranger.poll(500)


def test_status_with_and_without_keys(job: Job, processes: Processes) -> None:
    place = ("--scheduler", job.cluster.endpoint)
    asked = processes.start("status", BIN / "kvps", "status", *place, "--keys", job.folder)
    assert asked.wait() == 0, asked
    assert "running" in asked.out
    refused = processes.start("status", BIN / "kvps", "status", *place)
    assert refused.wait() == 78, refused
    assert "give this process --keys DIR" in refused.err


@pytest.mark.spec("R246", "R247")
def test_a_session_speaks_for_itself(processes: Processes) -> None:
    """Rank 1 of a job of two says what rank 0 may say, to the scheduler and to the server."""
    folder = processes.folder / "keys"
    files.write(folder, files.generate())
    cluster = processes.scheduler(2, 1, "--keys", folder, *HTTP)
    server = cluster.server("--keys", folder, *HTTP)
    worker = cluster.plain(processes.script(SCRIPT), KVPS_KEYS=str(folder))
    ours = files.load(str(folder), "worker")
    identity = Identity(
        Role.WORKER, cluster.endpoint, "here", 7, kvps.__version__, 1, public_key=ours.session.public
    )
    outbox: list[Effect] = []
    client = MembershipClient(identity, time.monotonic(), outbox)
    transport = ZmqTransport(keys=ours)
    client.start(time.monotonic())

    def beat(until: str, limit_s: float = 60.0) -> None:
        """Be rank 1 until the worker has printed this."""
        end = time.monotonic() + limit_s
        while until not in worker.out:
            assert time.monotonic() < end, worker
            for effect in outbox:
                if isinstance(effect, Connect):
                    transport.connect(effect)
                elif isinstance(effect, Send):
                    transport.send(effect.to, effect.packet, None)
            outbox.clear()
            for _, packet in transport.poll(0.05):
                assert isinstance(packet, Packet)
                client.on_packet(packet, time.monotonic())
            client.on_timer(time.monotonic())

    try:
        beat("at tcp")
        found = worker.expect(r"at (\S+) (\S+) (\w{32}) (\d+)")
        true = Envelope(client.job, 9, Role.WORKER, 0, int(found.group(4)), 1)
        scheduler = ours.scheduler[0]
        refused = "kvps_refusals_total"
        with (
            closing(Peer(cluster.endpoint, scheduler, ours.session)) as peer,
            one_moves(url_of(cluster.process), refused, "other_member"),
        ):
            for message in (m.Leave(True, 0, True, ""), m.Beat(1)):
                answer = peer.say(true, message)
                assert isinstance(answer, m.Error)
                assert answer.code == Unauthorized.code
                assert "worker:1:" in answer.text
        with closing(Peer(found.group(1), found.group(2), ours.session)) as peer:
            hello = m.Hello(1, 0, "k", 0, 2, 0, "h", 7)
            with one_moves(url_of(server), refused, "other_member"):
                for message in (hello, m.Probe((1,)), m.Revive("store-0", "", 0)):
                    answer = peer.say(true, message)
                    assert isinstance(answer, m.Error)
                    assert answer.code == Unauthorized.code
            mine = Envelope(client.job, 9, Role.WORKER, 1, client.incarnation, 1)
            assert isinstance(peer.say(mine, hello), m.Welcome)
            foreign = m.PushRows("store-0", "w", 1, (0,), 1, 1, 0)
            with one_moves(url_of(server), refused, "other_ranks"):
                answer = peer.say(mine, foreign)
            assert isinstance(answer, m.Error)
            assert answer.code == Unauthorized.code
            assert "pushes for ranks (0,)" in answer.text
        client.leave(True, 0, True, "")
        (processes.folder / "go").touch()
        beat("right")
        assert server.wait() == 0
    finally:
        transport.close(0.0)


WAITING = """
import pathlib, time, torch, kvps
kv = kvps.create("dist_sync")
kv.init("w", torch.zeros(10))
print("rank", kv.rank, flush=True)
while not pathlib.Path("go").exists():
    time.sleep(0.02)
kv.push("w", torch.ones(10))
print("right", kv.pull("w").sum().item(), flush=True)
"""


@pytest.mark.spec("R249")
def test_a_live_member_is_evicted_and_replaced(processes: Processes) -> None:
    folder = processes.folder / "keys"
    files.write(folder, files.generate())
    keys = ("--keys", folder)
    cluster = processes.scheduler(1, 1, *keys)
    server = cluster.server(*keys)
    script = processes.script(WAITING)
    worker = cluster.worker(sys.executable, script, flags=keys)
    worker.expect("rank 0", 120.0)
    place = ("--scheduler", cluster.endpoint, *keys)
    for role, code in (("look", 78), ("admin", 0)):
        if role == "look":
            (folder / "admin.key").rename(folder / "aside")
        asked = processes.start("evict", BIN / "kvps", "evict", "worker", 0, *place)
        assert asked.wait() == code, asked
        if role == "look":
            assert "admin.key" in asked.err
            (folder / "aside").rename(folder / "admin.key")
    assert worker.wait() != 0
    assert "was evicted by the operator" in worker.err
    other = cluster.worker(sys.executable, script, flags=keys)
    other.expect("rank 0", 120.0)
    (processes.folder / "go").touch()
    assert other.wait(60.0) == 0
    assert "right 10.0" in other.out
    assert server.wait() == 0


@pytest.mark.spec("R245")
def test_a_role_is_given_another_key_without_a_restart(processes: Processes) -> None:
    folder, old = processes.folder / "keys", processes.folder / "old"
    files.write(folder, files.generate())
    cluster = processes.scheduler(1, 1, "--keys", folder)
    server = cluster.server("--keys", folder)
    shutil.copytree(folder, old)

    def keygen(*flags: str) -> None:
        assert processes.start("keygen", BIN / "kvps", "keygen", folder, *flags).wait() == 0
        before = cluster.process.err.count("the scheduler now accepts")
        cluster.process.signal(signal.SIGHUP)
        until(lambda: cluster.process.err.count("the scheduler now accepts") > before, "other keys")

    keygen("--rotate", "worker")
    worker = cluster.plain(processes.script(WAITING), KVPS_KEYS=str(folder))
    worker.expect("rank 0", 120.0)
    keygen("--retire")
    client, took_s = joined(cluster.endpoint, files.load(str(old), "worker"))
    assert isinstance(client.error, Unauthorized)
    assert took_s < LIMIT_S
    (processes.folder / "go").touch()
    assert worker.wait(60.0) == 0, "who is in stays in"
    assert server.wait() == 0


def test_launch_makes_keys_by_itself(processes: Processes) -> None:
    """Nobody types anything, and nobody else joins; what it has made is gone with it."""
    launched = processes.kvps(
        "launch", "-n", 1, "--log-level", "info", "--", sys.executable, processes.script(WAITING)
    )
    path = launched.expect(r"--keys (/proc/\d+/fd/\d+)").group(1)
    endpoint = launched.expect(r"the scheduler listens on (\S+)").group(1)
    launched.expect("rank 0", 120.0)
    client, took_s = joined(endpoint, None)
    assert isinstance(client.error, Unauthorized)
    assert took_s < LIMIT_S
    for keys, code in (((), 78), (("--keys", path), 0)):
        asked = processes.start("status", BIN / "kvps", "status", "--scheduler", endpoint, *keys)
        assert asked.wait() == code, asked
    (processes.folder / "go").touch()
    assert launched.wait(60.0) == 0


def connections(key: str) -> int:
    """Return how many there are to the near link of a server with this key."""
    name = near_endpoint(key).removeprefix("ipc://")
    listed = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    return sum([words[-1] == name and words[5] == "03" for words in listed])


@pytest.mark.spec("R248")
def test_a_member_of_this_host_comes_through_the_near_endpoint(job: Job) -> None:
    assert connections(job.server_key) == 1


@pytest.mark.spec("R248")
def test_connection_falls_back_to_tcp_where_the_local_socket_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server, worker = new_pair(), new_pair()
    listening = ZmqTransport(
        "tcp://127.0.0.1:0", role=Role.SERVER, keys=Keys(role=new_pair(), session=server)
    )
    listening.trust({worker.public: "worker:1:1"})
    coming = ZmqTransport(keys=Keys(("s" * 40,), session=worker))
    monkeypatch.setattr(links, "is_ours", lambda connection: False)
    with closing(contextlib.ExitStack()) as ends:
        for item in (listening, coming):
            ends.callback(item.close, 0.0)
        coming.connect(Connect("server 0", listening.endpoint, True, server.public, True))
        said = Packet(Envelope(bytes(16), 0, Role.WORKER, 1, 1, 1), m.Probe((1,)))
        coming.send("server 0", said, None)
        heard: list[object] = []
        deadline = time.monotonic() + 20.0
        while not heard and time.monotonic() < deadline:
            list(coming.poll(0.01))
            heard += [packet for _, packet in listening.poll(0.01)]
        assert heard == [said]
        assert connections(server.public) == 0


@pytest.mark.spec("R248")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may be another user")
@pytest.mark.parametrize("user", [0, 65534])
@pytest.mark.parametrize("where", ["neighbour", "near link"])
def test_another_user_of_this_host_is_not_heard(user: int, where: str) -> None:
    keys = Keys(role=new_pair()) if where == "near link" else None
    transport = ZmqTransport(role=Role.SERVER if keys else Role.WORKER, keys=keys)
    if keys is None:
        endpoint = f"ipc://@kvps-test-{os.getpid()}-{user}"
        transport.listen(endpoint)
    else:
        endpoint = near_endpoint(keys.session.public)
        transport.listen("tcp://127.0.0.1:0")
    says = (
        "import os, socket, sys\n"
        "connection = socket.socket(socket.AF_UNIX)\n"
        f"os.setuid({user})\n"
        f"connection.connect({endpoint.replace('ipc://@', chr(0))!r})\n"
        "connection.sendall(sys.stdin.buffer.read())\n"
        "connection.recv(1)\n"
    )
    record = b"".join(
        record_of(wire.encode(Packet(Envelope(bytes(16), 0, Role.WORKER, 1, 1, 1), m.Probe((1,)))))
    )
    with subprocess.Popen([sys.executable, "-c", says], stdin=subprocess.PIPE) as child:
        assert child.stdin is not None
        child.stdin.write(record)
        child.stdin.close()
        heard: list[object] = []
        while child.poll() is None and not heard:
            heard += [packet for _, packet in transport.poll(0.05)]
        child.kill()
    assert bool(heard) == (user == 0)
    assert (transport.refused.connections["other_user"] > 0) == (user != 0)
    transport.close(0.0)
