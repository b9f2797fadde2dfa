"""Bad input, to a scheduler and a server that have keys, while the canary trains beside.

Octets, handshakes, frames, bodies, and messages that make no sense or are not the sender's to say. Whatever
comes: no process ends, no value changes, no round takes long, no memory is kept, no file appears, and the log
stays short. Outsiders are not answered; the insider, who has a session key, is refused by an error.
"""

import os
import pickle
import random
import resource
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress

import msgpack
import pytest
import zmq

from kvps import protocol as m
from kvps.compression.spec import CODECS, CodecSpec
from kvps.core.key_roles import near_endpoint
from kvps.core.limits import TABLE
from kvps.errors import Overload
from kvps.net.zap import new_pair
from kvps.protocol import wire
from kvps.protocol.envelope import Envelope, Message, Role
from kvps.protocol.values import Run
from tests.faults.streams import Stream, TcpProxy
from tests.hostile.target import ROUNDS, Target, Voice, head, hello, spell
from tests.integration.processes import made, until
from tests.integration.strangers import command, connection, throw
from tests.support.scraping import change

CURVE = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
PORTS = ["scheduler", "server"]
IDLE_MAX = TABLE["idle"].default
FIRST_ID = 0x6B8B4567
"""The first number that glibc's rand() draws."""
PORT = pytest.mark.parametrize("port", PORTS)
RUN = Run(0, 1000, 10**6)
VALUES = bytes(4000)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """Yield a job; it has to end well."""
    for processes in made(tmp_path_factory.mktemp("target")):
        item = Target(processes)
        yield item
        item.finish()


COUNTED = (
    "test_keys_that_open_nothing",
    "test_messages_of_other_roles_from_an_insider_are_refused",
    "test_before_hello",
    "test_nonsense",
    "test_pushes",
    "test_another_thread_of_outsiders",
)
"""Tests of what is refused, as a metric shows. libzmq drops some other bytes by itself and says nothing of it."""


@pytest.fixture(autouse=True)
def unharmed(target: Target, request: pytest.FixtureRequest) -> Iterator[None]:
    """Check after each test that nothing has happened."""
    with target.unharmed(is_counted=request.node.originalname in COUNTED):
        yield


def place(target: Target, port: str) -> str:
    return target.scheduler_at if port == "scheduler" else target.server_at


# --- octets, by outsiders ------------------------------------------------------------------------

OCTETS = {
    "HTTP": b"GET / HTTP/1.1\r\nHost: kvps\r\n\r\n",
    "TLS": bytes.fromhex("1603010200010001fc0303") + bytes(range(256)) * 2,
    "SSH": b"SSH-2.0-OpenSSH_9.2p1 Debian-2\r\n",
    "noise": random.Random(6).randbytes(65536),
    "greeting, then the end": CURVE,
    "ZMTP 1.0": b"\x01\x00" + bytes([50, 0]) + bytes(49),
    "ZMTP 2.0": b"\xff" + bytes(8) + b"\x7f\x01\x05\x00\x00" + b"\x00\x01x",
    "clear text": CURVE.replace(b"CURVE", b"NULL\0") + command(b"READY"),
    "a password": CURVE.replace(b"CURVE", b"PLAIN") + command(b"HELLO", b"\x01a\x01b"),
    "an unknown mechanism": CURVE.replace(b"CURVE", b"SPAM\0"),
    "a command of 2^63 octets": CURVE + b"\x06" + struct.pack("!Q", 1 << 63) + bytes(1000),
    "a command of 1 TiB": CURVE + b"\x06" + struct.pack("!Q", 1 << 40) + bytes(1000),
    "a frame of 2 GiB": CURVE + b"\x02" + struct.pack("!Q", 1 << 31) + bytes(1000),
    "a HELLO of 1 MiB": CURVE + command(b"HELLO", bytes(1 << 20)),
    "a HELLO of the right length": CURVE + command(b"HELLO", bytes([1, 0]) + bytes(192)),
    "an INITIATE first": CURVE + command(b"INITIATE", bytes(248)),
    "a PING": CURVE + command(b"PING", b"\0\1"),
    "many PINGs": CURVE + command(b"PING", b"\0\1") * 10_000,
    "a PING of 64 KiB": CURVE + command(b"PING", bytes(65536)),
    "an unknown command": CURVE + command(b"SPAM", bytes(10)),
    "an empty command": CURVE + b"\x04\x00",
    "frames without a handshake": CURVE + b"\x01\x05spam!" * 1000,
}


@PORT
def test_octets(target: Target, port: str) -> None:
    for name, octets in OCTETS.items():
        with target.unharmed(name):
            answer = throw(place(target, port), octets)
            assert b"KV" not in answer, name
            assert b"READY" not in answer, name


@PORT
def test_hangs_up_at_once(target: Target, port: str) -> None:
    for _ in range(1000):
        with connection(place(target, port)) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def test_slow_greetings_are_disconnected(target: Target) -> None:
    """A hundred who say nothing, some who stop in their greeting, and one octet each quarter of a second."""
    with ExitStack() as stack:
        silent = [stack.enter_context(connection(place(target, port))) for port in PORTS * 50]
        half = [stack.enter_context(connection(place(target, port))) for port in PORTS]
        for item in half:
            item.sendall(CURVE[:30])
        slow = [stack.enter_context(connection(place(target, port))) for port in PORTS]
        began, sent = time.monotonic(), 0

        def all_are_closed() -> bool:
            nonlocal sent
            if time.monotonic() > began + 0.25 * sent:
                for item in slow:
                    with suppress(OSError):
                        item.sendall(CURVE[sent : sent + 1])
                sent += 1
            return all(_is_closed(item) for item in (*silent, *half, *slow))

        until(all_are_closed, "the end of idle connections", 30.0)


def _is_closed(sock: socket.socket) -> bool:
    sock.settimeout(0.001)
    with suppress(TimeoutError):
        try:
            while sock.recv(4096):
                pass
            return True
        except ConnectionError:
            return True
    return False


@pytest.mark.thorough
def test_two_thousand_idle_connections(target: Target) -> None:
    """They wait to be taken, or are closed as idle; members keep theirs."""
    for port in PORTS:
        with ExitStack() as stack:
            for _ in range(2000):
                with suppress(OSError):
                    stack.enter_context(connection(place(target, port)))
            count = len(target.rounds())
            until(lambda count=count: len(target.rounds()) > count + ROUNDS, "rounds beside them")


@PORT
@pytest.mark.thorough
def test_more_connections_than_there_are_descriptors(target: Target, port: str) -> None:
    """Those that carry nothing are closed, also where not even a descriptor is left to look at them."""
    process = target.cluster.process if port == "scheduler" else target.server
    limits = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)

    def count() -> int:
        return len(os.listdir(f"/proc/{process.pid}/fd"))

    most = count() + IDLE_MAX + 50
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (most, limits[1]))
    try:
        with ExitStack() as stack:
            for _ in range(most + 200):
                with suppress(OSError):
                    stack.enter_context(connection(place(target, port)))
            until(lambda: count() >= most, "use of all descriptors")
            rounds = len(target.rounds())
            until(lambda: len(target.rounds()) > rounds + ROUNDS, "rounds beside them")
            until(lambda: count() < most, "descriptors that are free again")
    finally:
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, limits)
    at = target.endpoints[PORTS.index(port)]
    until(lambda: change(at, {}).get(("kvps_refused_connections_total", "no_descriptor")), "metric")


# --- handshakes ----------------------------------------------------------------------------------


@PORT
@pytest.mark.parametrize("kind", ["unknown key", "role key of the wrong place", "wrong server key"])
def test_keys_that_open_nothing(target: Target, port: str, kind: str) -> None:
    pinned = target.server_key if port == "server" else target.scheduler_key
    own = target.role("worker") if port == "server" else target.role("scheduler")
    with closing(
        Voice(
            place(target, port),
            new_pair().public if kind == "wrong server key" else pinned,
            {"unknown key": new_pair(), "wrong server key": target.session}.get(kind, own),
        )
    ) as item:
        item.say(target.me(), m.Beat(1) if port == "scheduler" else m.Probe((1,)))
        assert item.heard(1000) is None


@PORT
@pytest.mark.parametrize("kind", [zmq.REQ, zmq.PUB, zmq.PULL, zmq.PAIR], ids=["REQ", "PUB", "PULL", "PAIR"])
def test_sockets_of_the_wrong_type(target: Target, port: str, kind: int) -> None:
    pinned = target.server_key if port == "server" else target.scheduler_key
    with closing(Voice(place(target, port), pinned, target.session, kind)) as item:
        if kind == zmq.PUB:
            item.say(target.me(), m.Beat(1))
        elif kind == zmq.REQ:
            item.say(target.me(), m.Beat(1))
            assert item.heard(200) is None


@PORT
@pytest.mark.parametrize("length", [1, 255])
def test_routing_ids(target: Target, port: str, length: int) -> None:
    """Of any length, and by two at once: an address is no identity."""
    pinned = target.server_key if port == "server" else target.scheduler_key
    with ExitStack() as stack:
        for _ in range(2):
            voice = Voice(place(target, port), pinned, target.session, routing_id=b"\xff" * length)
            stack.enter_context(closing(voice))
            voice.say(target.me(), m.Probe((1,)) if port == "server" else m.Beat(1))
            voice.heard(200)


@PORT
def test_routing_ids_that_libzmq_gives_next(target: Target, port: str) -> None:
    """The ids of the first connections of a process that does not seed C's rand(): libzmq aborts at one in use."""
    pinned = target.server_key if port == "server" else target.scheduler_key
    message = m.Probe((1,)) if port == "server" else m.Beat(1)
    with ExitStack() as stack:
        for number in range(FIRST_ID, FIRST_ID + 40):
            taken = b"\0" + number.to_bytes(4, "big")
            voice = Voice(place(target, port), pinned, target.session, routing_id=taken)
            stack.enter_context(closing(voice)).say(target.me(), message)
        voice.heard(200)
        for _ in range(2):
            voice = stack.enter_context(closing(Voice(place(target, port), pinned, target.session)))
            voice.say(target.me(), message)
            voice.heard(200)


@pytest.mark.parametrize("harm", ["a bit is changed", "octets come twice"])
def test_ciphertext_that_is_changed(target: Target, harm: str) -> None:
    """From behind the handshake on."""

    class Twice(Stream):
        def take(self, data: bytes) -> bytes:
            taken = super().take(data)
            return taken * 2 if self.carried > 2000 else taken

    stream = Twice() if harm == "octets come twice" else Stream(flip_at=2500)
    with ExitStack() as stack:
        proxy = TcpProxy(target.server_at, lambda n: stream if n == 0 else Stream())
        stack.callback(proxy.close)
        item = stack.enter_context(closing(Voice(proxy.endpoint, target.server_key, target.session)))
        item.say(target.me(seq=1), hello(1))
        assert isinstance(item.heard(10_000), m.Welcome)
        for _ in range(20):
            item.say(target.me(), m.Open("harm", "async", 0, False, "wait", 10**6))
        while (answer := item.heard(200)) is not None:
            assert isinstance(answer, m.Done), answer
        assert stream.carried > (2000 if harm == "octets come twice" else 2500)


# --- frames and bodies, by the insider -----------------------------------------------------------


def pull(target: Target) -> list[bytes]:
    return spell(target.me(), m.Pull(0, True, (m.Ask(0, 1000, 0, 0),)))


def push(target: Target) -> list[bytes]:
    return spell(target.me(), m.Push(0, 1, (1,), 1.0, False, (RUN,)), VALUES)


def changed(item: bytes, at: int, to: bytes) -> bytes:
    return item[:at] + to + item[at + len(to) :]


FRAMES: dict[str, Callable[[Target], list[bytes]]] = {
    "an empty message": lambda t: [b""],
    "a frame that is missing": lambda t: push(t)[:1],
    "a frame too many": lambda t: [*push(t), b"more"],
    "an empty payload": lambda t: [push(t)[0], b""],
    "the payload first": lambda t: push(t)[::-1],
    "a thousand frames": lambda t: [*push(t), *[b"x"] * 1000],
    "a payload of one octet less": lambda t: [push(t)[0], VALUES[1:]],
    "a payload of one octet more": lambda t: [push(t)[0], VALUES + b"x"],
    "a head of over 64 KiB": lambda t: [pull(t)[0] + bytes(65536)],
    "a head of 2 MiB": lambda t: [pull(t)[0] + bytes(2 << 20)],
    "half an envelope": lambda t: [pull(t)[0][:20]],
    "an envelope alone": lambda t: [pull(t)[0][: wire.HEAD.size]],
    "another magic": lambda t: [changed(pull(t)[0], 0, b"kv")],
    "version 0": lambda t: [changed(pull(t)[0], 2, b"\0")],
    "version 255": lambda t: [changed(pull(t)[0], 2, b"\xff")],
    "an unknown tag": lambda t: [changed(pull(t)[0], 3, b"\xff")],
    "an answer": lambda t: spell(t.me(), m.Done(7)),
    "a role that there is not": lambda t: [changed(pull(t)[0], 24, b"\x09")],
    "a checksum that is wrong": lambda t: [changed(pull(t)[0], 26, b"\x01") + bytes(4)],
    "loans without memory": lambda t: [changed(pull(t)[0], 25, b"\x01")],
}
PULL = 20
BODIES: dict[str, bytes] = {
    "nothing": b"",
    **{f"cut at {at}": msgpack.packb([0, True, [[0, 1, 0, 0]], 0, [], None, 0])[:at] for at in range(1, 12)},
    "more behind": msgpack.packb([0, True, [[0, 1, 0, 0]], 0, [], None, 0]) + b"\0",
    "array of 2^32-1": b"\xdd\xff\xff\xff\xff",
    "map of 2^32-1": b"\xdf\xff\xff\xff\xff",
    "text of 2^32-1": b"\x97\xdb\xff\xff\xff\xff",
    "bytes of 2^32-1": b"\x97\xc6\xff\xff\xff\xff",
    "ext of 2^32-1": b"\x97\xc9\xff\xff\xff\xff\x01",
    "1,000 arrays deep": b"\x91" * 1000,
    "50,000 arrays deep": b"\x91" * 50_000,
    "the same key twice": b"\x97" + b"\x82\xa1a\x01\xa1a\x02" * 7,
    "keys that are no text": b"\x97" + b"\x83\x01\x01\x91\x01\x01\xc0\x01" * 7,
    "text that is no UTF-8": b"\x97" + b"\xa2\xc3\x28" * 7,
    "a lone surrogate": b"\x97" + b"\xa3\xed\xa0\x80" * 7,
    "NUL": b"\x97" + b"\xa1\0" * 7,
    "an unknown ext": b"\x97" + b"\xd4\x63\x00" * 7,
    "a timestamp": b"\x97" + b"\xd6\xff\x00\x00\x00\x01" * 7,
    "a bad timestamp": b"\x97" + b"\xc7\x0c\xff" + b"\xff" * 12,
    "0xc1": b"\x97" + b"\xc1" * 7,
    "NaN for whole numbers": b"\x97" + b"\xcb\x7f\xf8\0\0\0\0\0\0" * 7,
    "2^64-1": b"\x97" + b"\xcf" + b"\xff" * 8 + b"\xc3\x90\x00\x90\xc0\x00",
    "-2^63": b"\x97" + b"\xd3\x80" + bytes(7) + b"\xc3\x90\x00\x90\xc0\x00",
    "true for a number": b"\x97\xc3\xc3\x90\x00\x90\xc0\x00",
    "1.0 for a number": b"\x97\xcb\x3f\xf0" + bytes(6) + b"\xc3\x90\x00\x90\xc0\x00",
    "a pickle": b"\x97" + msgpack.packb(pickle.dumps(print)) * 7,
    "10,000 fields": b"\xdc\x27\x10" + b"\x00" * 10_000,
}


def test_frames(target: Target) -> None:
    with target.voice("server") as voice, target.counted(len(FRAMES)):
        for name, frames in FRAMES.items():
            with target.unharmed(name):
                voice.frames(*frames(target))
                assert_it_is_heard(target, voice)


def test_a_frame_of_more_than_64_mib(target: Target) -> None:
    """The connection is closed; the next one is served."""
    with target.voice("server") as voice:
        voice.frames(push(target)[0], bytes((64 << 20) + 1))
        assert voice.heard(1000) is None


@PORT
def test_bodies(target: Target, port: str) -> None:
    with target.voice(port) as voice, target.counted(len(BODIES)):
        for name, body in BODIES.items():
            with target.unharmed(name):
                kind: type[Message] = m.Pull if port == "server" else m.Barrier
                voice.frames(head(target.me(), kind.TAG, body))
                assert_it_is_heard(target, voice, port)


def answers_before(target: Target, voice: Voice, port: str = "server") -> list[Message]:
    """Say what makes sense along the same connection; return the answers that come before its own."""
    sound: Message = m.Open("harm", "async", 0, False, "wait", 10**6)
    if port == "scheduler":
        sound = m.Look()
    asked, found = target.me(), []
    voice.say(asked, sound)
    while not isinstance(answer := voice.heard(10_000), m.Seen) and answer != m.Done(asked.seq):
        assert answer is not None, found
        found.append(answer)
    return found


def assert_it_is_heard(target: Target, voice: Voice, port: str = "server") -> None:
    """Assert that what makes sense is answered, and all that came before by errors."""
    before = answers_before(target, voice, port)
    assert all(isinstance(answer, m.Error | m.View) for answer in before), before


# --- messages that are not the sender's to say ---------------------------------------------------

NOT_MINE: dict[str, tuple[str, dict[str, object], Message]] = {
    "rank 0 to the server": ("server", {"rank": 0}, m.Probe((1,))),
    "rank 2 of 2": ("server", {"rank": 2}, m.Probe((1,))),
    "rank 2^31": ("server", {"rank": 2**31}, m.Probe((1,))),
    "rank -1": ("server", {"rank": 2**32 - 1}, m.Probe((1,))),
    "rank 2 of 2 to the scheduler": ("scheduler", {"rank": 2}, m.Beat(1)),
    "an old incarnation": ("server", {"incarnation": 0}, m.Probe((1,))),
    "an incarnation to come": ("server", {"incarnation": 2**63 - 1}, m.Probe((1,))),
    "another job": ("server", {"job": b"x" * 16}, m.Probe((1,))),
    "as a server": ("server", {"role": Role.SERVER, "rank": 0}, m.Norms("canary", "w", 0, 1, (), False)),
    "rank 0 leaves": ("scheduler", {"rank": 0}, m.Leave(True, 0, True, "")),
    "the server leaves": ("scheduler", {"role": Role.SERVER, "rank": 0}, m.Leave(True, 0, True, "")),
    "a barrier of rank 0": ("scheduler", {"rank": 0}, m.Barrier("canary", "b", 1)),
    "a push for rank 0": ("server", {}, m.Push(0, 1, (0,), 1.0, False, (RUN,))),
    "a push for nobody": ("server", {}, m.Push(0, 1, (), 1.0, False, (RUN,))),
    "a push for everybody": ("server", {}, m.Push(0, 1, (0, 1), 1.0, False, (RUN,))),
    "a key of rank 0": (
        "server",
        {},
        m.Declare("canary", True, 0, (m.Entry("mine", 1, (4,), 0, 4),), creator=0),
    ),
    "another shape of the canary's key": (
        "server",
        {},
        m.Declare("canary", False, 0, (m.Entry("w", 1, (4,), 0, 4),)),
    ),
    "another optimizer of the canary": ("server", {}, m.Optimize("canary", 1, True, "adam", {})),
    "another learning rate of the canary": ("server", {}, m.Rate("canary", 1, True, 9.0)),
    "the canary back to a checkpoint": ("server", {}, m.Revive("canary", "", 1)),
    "another store of the canary's name": ("server", {}, m.Open("canary", "sync", 0, False, "wait", 10**6)),
    "the state of the optimizer": ("server", {}, m.SetState(0, 0, 1000, 1, ())),
    "a return from no join": ("server", {}, m.Return("canary", 2**63 - 1)),
    "a release of rank 0's loans": ("server", {"rank": 0}, m.Release(2**63 - 1, ())),
    "memory of rank 0": ("server", {"rank": 0}, m.Offer(1, 3, 1 << 20, 7)),
    "that rank 0 has taken memory": ("server", {"rank": 0}, m.Taken(7, True)),
    "an eviction": ("scheduler", {}, m.Evict(2, 0)),
}


def test_messages_of_other_roles_from_an_insider_are_refused(target: Target) -> None:
    with target.counted(len(NOT_MINE)):
        for name, (port, other, message) in NOT_MINE.items():
            with target.unharmed(name), target.voice(port) as voice:
                voice.say(target.me(**other), message, *[VALUES] * isinstance(message, m.Push))
                answers = answers_before(target, voice, port)
                errors = [answer for answer in answers if isinstance(answer, m.Error)]
                assert len(errors) == 1, (name, answers)


def test_before_hello(target: Target) -> None:
    with target.voice("server", greet=False) as voice:
        voice.say(target.me(), m.Pull(0, True, (m.Ask(0, 1000, 0, 0),)))
        answer = voice.heard()
        assert answer is None or isinstance(answer, m.Error | m.Pulled), answer


def test_hello_again_and_again(target: Target) -> None:
    with target.voice("server") as voice:
        for _ in range(100):
            voice.say(target.me(seq=1), hello(1))
            assert isinstance(voice.heard(10_000), m.Welcome)


@pytest.mark.parametrize("pid", [0, 1, 2**31 - 1, 2**62])
def test_memory_that_there_is_not(target: Target, pid: int) -> None:
    """And loans that were never made."""
    with target.voice("server") as voice:
        voice.say(target.me(), m.Offer(pid, 3, 1 << 40, 7))
        answers = [*iter(lambda: voice.heard(200), None)]
        assert all(isinstance(answer, m.Taken | m.Error) for answer in answers), answers
        assert not any(answer.mapped for answer in answers if isinstance(answer, m.Taken)), answers
        voice.say(target.me(), m.Release(2**63 - 1, (1, 2**62)))
        assert_it_is_heard(target, voice)


def test_a_barrier_twice(target: Target) -> None:
    """The insider stands there once, however often it says so, and rank 0 need not come."""
    with target.voice("scheduler") as voice:
        for _ in range(100):
            voice.say(target.me(), m.Barrier("canary", "twice", 0))
        answers = [*iter(lambda: voice.heard(200), None)]
        assert not [answer for answer in answers if isinstance(answer, m.Released)], answers


@pytest.mark.parametrize("other", [{"view": 2**32 - 1}, {"seq": 0}, {"seq": 10**18}, {"seq": 2**63 - 1}])
def test_numbers_of_envelopes(target: Target, other: dict[str, object]) -> None:
    with target.voice("server") as first:
        for _ in range(3):
            first.say(target.me(**other), m.Open("harm", "async", 0, False, "wait", 10**6))
            first.heard(200)


# --- messages that make no sense -----------------------------------------------------------------


def entry(key: str = "w", dtype: int = 1, shape: tuple[int, ...] = (4,), size: int = 4) -> m.Declare:
    return m.Declare("harm", True, 1, (m.Entry(key, dtype, shape, 0, size),), creator=1)


NONSENSE: dict[str, Message] = {
    "a dtype that there is not": entry(dtype=255),
    "65 dimensions": entry(shape=(1,) * 65, size=1),
    "a dimension of 0": entry(shape=(0, 4), size=4),
    "a dimension of -1": entry(shape=(-1,), size=1),
    "a dimension of 2^62": entry(shape=(1 << 62,), size=1 << 62),
    "2^80 elements": entry(shape=(1 << 40, 1 << 40), size=1 << 62),
    "more elements than there are": entry(size=5),
    "a key of no letters": entry(key=""),
    "a key of 10,000 letters": entry(key="k" * 10_000),
    "more than there is room for": entry("big", shape=(100 << 20,), size=100 << 20),
    "a pull of a chunk that there is not": m.Pull(10**6, True, (m.Ask(0, 1, 0, 0),)),
    "a pull beyond the end": m.Pull(0, True, (m.Ask(999, 1000, 0, 0),)),
    "rows of a key that there is not": m.PullRows("canary", "never", 0, 0, 1),
    "a store that there is not": m.Find("never", ("w",)),
    "a mode that there is not": m.Open("odd", "magic", 0, False, "wait", 10**6),
    "a cut that there is not": m.Revive("canary", "never", 10**15),
    **{
        f"optimizer {name[:12]!r}": m.Optimize("harm", 1, True, name, {})
        for name in ("__import__", "../x", "os.system", "x" * 10_000)
    },
    **{
        f"learning rate {rate}": m.Optimize("harm", 1, True, "sgd", {"lr": rate})
        for rate in (float("nan"), -1.0, float("inf"), 1e300, "0.1", True)
    },
}


def test_nonsense(target: Target) -> None:
    for name, message in NONSENSE.items():
        payload = [struct.pack("<q", 0)] if isinstance(message, m.PullRows) else []
        is_big = isinstance(message, m.Declare) and message.entries[0].key == "big"
        may_wait = isinstance(message, m.Find | m.PullRows | m.Declare | m.Optimize) and not is_big
        with target.unharmed(name), target.voice("server") as voice:
            assert answers_before(target, voice) == []
            voice.say(target.me(), message, *payload)
            answers = answers_before(target, voice)
            assert len(answers) == 1 or (not answers and may_wait), (name, answers)
            for answer in answers:
                is_done = isinstance(answer, m.Declared | m.Done) and is_mine(message)
                assert isinstance(answer, m.Error) or is_done, (name, answer)
                assert not is_big or getattr(answer, "code", 0) == Overload.code


def is_mine(message: Message) -> bool:
    """Whether a message is odd, and concerns nobody but its sender."""
    return isinstance(message, m.Declare) and message.store == "harm"


PUSHES: dict[str, tuple[Message, bytes]] = {
    "of another dtype": (m.Push(0, 2, (1,), 1.0, False, (RUN,)), bytes(2000)),
    "of numbers that are no numbers": (
        m.Push(10**6, 1, (1,), 1.0, False, (RUN,)),
        struct.pack("<f", float("nan")) * 1000,
    ),
    "of weight NaN": (m.Push(0, 1, (1,), float("nan"), False, (RUN,)), VALUES),
    "of weight 1e300": (m.Push(0, 1, (1,), 1e300, False, (RUN,)), VALUES),
    "beyond the end": (m.Push(0, 1, (1,), 1.0, False, (Run(999, 1000, 1),)), VALUES),
    "of ranges that overlap": (m.Push(0, 1, (1,), 1.0, False, (Run(0, 600, 1), Run(400, 400, 1))), VALUES),
    **{
        f"of row {row}": (m.PushRows("canary", "w", 1, (1,), 1, 1, 1), struct.pack("<q", row) + VALUES[:4])
        for row in (-1, 1000, 2**62)
    },
    "of more rows than there are": (
        m.PushRows("canary", "w", 1, (1,), 1, 2**31, 1),
        struct.pack("<q", 0) + VALUES[:4],
    ),
    "of rows that are wider than the key": (
        m.PushRows("canary", "w", 1, (1,), 2, 1, 1),
        struct.pack("<q", 0) + VALUES[:8],
    ),
    "of 2bit with a payload of another size": (
        m.Push(0, 1, (1,), 1.0, False, (RUN,), CodecSpec(CODECS["2bit"], 0.5)),
        bytes(3),
    ),
    **{
        f"of 2bit with the threshold {threshold}": (
            m.Push(0, 1, (1,), 1.0, False, (RUN,), CodecSpec(CODECS["2bit"], threshold)),
            bytes(250),
        )
        for threshold in (0.0, -1.0, float("nan"), float("inf"))
    },
    "of a codec that there is not": (m.Push(0, 1, (1,), 1.0, False, (RUN,), CodecSpec(99, 0.5)), VALUES),
    "of a key that there is not": (
        m.PushRows("canary", "never", 1, (1,), 1, 1, 1),
        struct.pack("<q", 0) + bytes(4),
    ),
}


def test_pushes(target: Target) -> None:
    for name, (message, payload) in PUSHES.items():
        split = [payload[:8], payload[8:]] if isinstance(message, m.PushRows) else [payload]
        with target.unharmed(name), target.voice("server") as voice:
            voice.say(target.me(), message, *split)
            assert_it_is_heard(target, voice)


TAGS = {"CON": True, "best-1.0_a": True} | dict.fromkeys(
    ["../../etc/x", "/abs", "a/../b", ".", "a\0b", "a\nb", "\x1b[2J", "\u202e", "x" * 300], False
)
"""Of each tag whether a worker may use it: it is a word in a manifest, and never a path."""


def test_tags(target: Target) -> None:
    checkpoints = target.folder / "checkpoints"
    with target.voice("scheduler") as voice:
        for tag, may_be in TAGS.items():
            before = set(checkpoints.glob("cut-*"))
            voice.say(target.me(), m.Checkpoint("canary", tag, target.seq()))
            if may_be:
                until(lambda: set(checkpoints.glob("cut-*/manifest.json")), "checkpoint")
            else:
                answers = answers_before(target, voice, "scheduler")
                assert any(isinstance(answer, m.Error) for answer in answers), (tag, answers)
                assert set(checkpoints.glob("cut-*")) == before, tag
    assert all(path.name.startswith("cut-") for path in checkpoints.glob("*"))


def test_many_tiny_keys(target: Target) -> None:
    """Each of them is kept; none of them slows the canary."""
    with target.voice("server") as voice:
        voice.say(target.me(), m.Open("tiny", "async", 0, False, "wait", 10**6))
        assert isinstance(voice.heard(10_000), m.Done)
        for call in range(20):
            entries = tuple([m.Entry(f"{call}-{n}", 1, (1,), 0, 1) for n in range(1000)])
            voice.say(target.me(), m.Declare("tiny", True, call, entries, creator=1))
        answers = [voice.heard(10_000) for _ in range(20)]
        assert all(isinstance(answer, m.Declared | m.Error) for answer in answers), answers


def test_answers_that_nobody_reads(target: Target) -> None:
    with target.voice("scheduler", target.role("look")) as voice:
        for _ in range(2000):
            voice.say(Envelope(bytes(16), 0, Role.WORKER, 0, 0, 1), m.Look())
    with target.voice("server") as voice:
        for _ in range(2000):
            voice.say(target.me(), m.Status("canary"))


READER = Envelope(bytes(16), 0, Role.READER, 77, 2**40, 1)
NOT_READERS = {
    "push": m.Push(0, 1, (1,), 1.0, False, (RUN,)),
    "open a store": m.Open("theirs", "sync", 0, False, "wait", 10**6),
    "publish": m.Announce("canary", "policy", 1, 2, 0),
    "probe": m.Probe((1,)),
}


@pytest.mark.spec("R550")
@pytest.mark.parametrize("what", NOT_READERS)
def test_key_of_a_reader_only_reads(target: Target, what: str) -> None:
    message = NOT_READERS[what]
    payload = [VALUES] if isinstance(message, m.Push) else []
    with target.voice("server", target.role("reader"), greet=False) as voice:
        reader = READER._replace(job=target.name)
        voice.say(reader, hello(1))
        assert isinstance(voice.heard(10_000), m.Welcome)
        voice.say(reader, message, *payload)
        refused = voice.heard(10_000)
        assert isinstance(refused, m.Error)
        assert "a reader may not send" in refused.text
        voice.say(target.me(), message, *payload)  # in the name of a worker
        refused = voice.heard(10_000)
        assert isinstance(refused, m.Error)
        assert "the key of the role reader may not send" in refused.text
        voice.say(reader._replace(seq=9), m.Watch("policy", 0))
        assert voice.heard(10_000) == m.VersionIs(9, 0)


@pytest.mark.spec("R246", "R551")
def test_keys_of_writers_and_readers_open_other_doors(target: Target) -> None:
    for role, message, text in (
        ("worker", m.Where(), "the key of the role worker may not send Where"),
        ("reader", m.Look(), "the key of the role reader may not send Look"),
        ("reader", hello(1), "the key of the role reader may not send Hello"),
    ):
        with target.voice("scheduler", target.role(role)) as voice:
            voice.say(READER, message)
            refused = voice.heard(10_000)
            assert isinstance(refused, m.Error), role
            assert text in refused.text


@pytest.mark.spec("R547", "R548")
def test_nonsense_of_a_reader(target: Target) -> None:
    """Reads of what there is not, of too much, and more than any reader needs."""
    most = 2**63 - 1
    with target.voice("server", target.role("reader"), greet=False) as voice:
        reader = READER._replace(job=target.name, rank=78)
        voice.say(reader, m.Watch("policy", 0))
        refused = voice.heard(10_000)
        assert isinstance(refused, m.Error)
        assert "expects HELLO first" in refused.text
        voice.say(reader, hello(1))
        assert isinstance(voice.heard(10_000), m.Welcome)
        for message in (
            m.Read("policy", most, most, most, most),
            m.Read("policy", 0, 0, 0, 0),
            m.Retain("policy", most, True),
        ):
            voice.say(reader, message)
            assert isinstance(voice.heard(10_000), m.Error)
        for number in range(40):
            voice.say(reader, m.Watch(f"policy-{number}", most))
        answers = [voice.heard(10_000) for _ in range(40)]
        assert sum(isinstance(answer, m.VersionIs) for answer in answers) == 16
        voice.frames(*spell(reader, m.Watch("policy", 0)), b"more")
        for _ in range(10_000):
            voice.say(reader, m.Retain("policy", 0))


def test_another_thread_of_outsiders(target: Target) -> None:
    """Many at once, of all kinds."""

    def harm(seed: int) -> None:
        dice = random.Random(seed)
        for _ in range(30):
            with suppress(OSError):
                throw(place(target, dice.choice(PORTS)), dice.choice(list(OCTETS.values())))

    threads = [threading.Thread(target=harm, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_a_near_link_is_none_for_the_scheduler(target: Target) -> None:
    """And nobody listens where a scheduler's would be."""
    name = near_endpoint(target.scheduler_key).removeprefix("ipc://@")
    with socket.socket(socket.AF_UNIX) as connection, pytest.raises(ConnectionRefusedError):
        connection.connect("\0" + name)
