"""How much of one connection may lie here: with real sockets, and a clock that the test turns."""

import errno
import math
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvps.net import inflow
from kvps.net.inflow import EACH_S, GREETING, LOOK_EVERY_S, PETTY_BYTES, Inflow, Limits
from kvps.net.memory import memory_bytes

LIMITS = Limits(strange=100_000, known=200_000, crowd=250_000, members=400_000)


class Port:
    """A place to listen, those who came there, and what watches them."""

    def __init__(self) -> None:
        self.now = 0.0
        self.inflow = Inflow(LIMITS, lambda: self.now)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.inflow.port = self.listener.getsockname()[1]
        self.open: list[socket.socket] = [self.listener]

    def connection(self) -> tuple[socket.socket, socket.socket]:
        """Return both ends of a new connection, ours last."""
        theirs = socket.create_connection(self.listener.getsockname())
        ours, _ = self.listener.accept()
        self.open += [theirs, ours]
        self.inflow.opened(ours.fileno())
        return theirs, ours

    def look(self) -> None:
        self.now += 1.0
        self.inflow.look(self.now)


@pytest.fixture
def port() -> Iterator[Port]:
    item = Port()
    yield item
    for each in item.open:
        each.close()


def send(theirs: socket.socket, ours: socket.socket, count: int) -> None:
    """Let so many octets cross, and read them, as libzmq does before it has a whole message."""
    for start in range(0, count, 10_000):
        size = min(10_000, count - start)
        theirs.sendall(bytes(size))
        while size:
            size -= len(ours.recv(size))


def is_open(theirs: socket.socket) -> bool:
    """Whether nobody has ended the connection."""
    theirs.setblocking(False)
    try:
        return theirs.recv(1) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


@pytest.mark.spec("R203")
def test_unread_bytes_over_the_limit_end_the_connection(port: Port, caplog: pytest.LogCaptureFixture) -> None:
    theirs, ours = port.connection()
    send(theirs, ours, 100_000)
    port.look()
    assert is_open(theirs)
    send(theirs, ours, 20_000)
    port.look()
    assert not is_open(theirs)
    (line,) = caplog.messages
    assert "bytes of an incomplete message, and the limit is 100000" in line
    port.look()
    assert len(caplog.messages) == 1


@pytest.mark.spec("R203")
def test_bytes_that_were_read_do_not_count(port: Port) -> None:
    theirs, ours = port.connection()
    for _ in range(5):
        send(theirs, ours, 90_000)
        port.inflow.took(ours.fileno(), 90_000)
        port.look()
    assert is_open(theirs)


@pytest.mark.spec("R203")
def test_known_peer_may_send_more_at_once(port: Port) -> None:
    theirs, ours = port.connection()
    port.inflow.know(ours.fileno())
    send(theirs, ours, 150_000)
    port.look()
    assert is_open(theirs)
    send(theirs, ours, 80_000)
    port.look()
    assert not is_open(theirs)


@pytest.mark.spec("R203")
def test_of_all_members_together_those_with_most_are_closed(port: Port) -> None:
    ends = [port.connection() for _ in range(4)]
    for theirs, ours in ends:
        port.inflow.know(ours.fileno())
        send(theirs, ours, 95_000)
    port.look()
    assert all(is_open(theirs) for theirs, _ in ends)
    send(*ends[2], 90_000)
    port.look()
    assert [is_open(theirs) for theirs, _ in ends] == [True, True, False, True]


@pytest.mark.spec("R203")
def test_unless_it_comes_in_parts_that_take_far_more_memory(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 0
    monkeypatch.setattr(inflow, "_resident_bytes", lambda: size)
    theirs, ours = port.connection()
    port.inflow.know(ours.fileno())
    send(theirs, ours, 120_000)
    port.look()
    size = inflow.SWELL_BYTES
    port.look()
    assert is_open(theirs)
    size += 1
    port.look()
    assert not is_open(theirs)


@pytest.mark.spec("R203")
def test_many_strangers_have_a_limit_together(port: Port) -> None:
    crowd = [port.connection() for _ in range(4)]
    small = port.connection()
    for item in crowd:
        send(*item, 80_000)
    send(*small, PETTY_BYTES // 2)
    port.look()
    assert sorted(is_open(theirs) for theirs, _ in crowd) == [False, True, True, True]
    assert is_open(small[0])


def test_a_descriptor_that_is_another_s_by_now_is_left_alone(
    port: Port, caplog: pytest.LogCaptureFixture
) -> None:
    other = Port()
    theirs, ours = other.connection()
    port.inflow.opened(ours.fileno())
    send(theirs, ours, 150_000)
    port.look()
    assert is_open(theirs)
    for item in other.open:
        item.close()
    port.inflow.opened(ours.fileno() if ours.fileno() >= 0 else 10**6)
    port.look()  # closed, and no socket at all
    left, right = socket.socketpair()
    with left, right:
        port.inflow.opened(left.fileno())
        port.look()
    assert not caplog.messages


def test_looks_are_due_only_while_there_are_connections(port: Port) -> None:
    assert port.inflow.due == math.inf
    _, ours = port.connection()
    assert port.inflow.due == 0.0
    port.look()
    assert port.inflow.due == pytest.approx(port.now + LOOK_EVERY_S + EACH_S)
    port.connection()
    assert port.inflow.due == pytest.approx(port.now + LOOK_EVERY_S + EACH_S), (
        "however often connections come"
    )
    for fd in list(port.inflow.connections):
        port.inflow.closed(fd)
    port.inflow.took(ours.fileno(), GREETING)
    port.inflow.know(ours.fileno())
    port.look()
    assert port.inflow.due == math.inf


def test_memory_is_the_container_s_where_that_is_less(tmp_path: Path) -> None:
    whole = memory_bytes(tmp_path)
    assert whole > 1 << 20
    (tmp_path / "memory.max").write_text("max\n")
    assert memory_bytes(tmp_path) == whole
    (tmp_path / "memory.max").write_text("1048576\n")
    assert memory_bytes(tmp_path) == 1 << 20


@pytest.mark.spec("R244")
@pytest.mark.parametrize("has_descriptors", [True, False])
def test_of_very_many_that_say_nothing_the_oldest_are_closed(
    port: Port, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, has_descriptors: bool
) -> None:
    """Also where they have all descriptors that there are."""

    def none_left(fd: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    if not has_descriptors:
        monkeypatch.setattr(os, "dup", none_left)
    port.inflow._idle_max = 2
    known, fd = port.connection()
    port.inflow.know(fd.fileno())
    idle = [port.connection()[0] for _ in range(4)]
    port.now += inflow.IDLE_S - 2.0
    port.look()
    assert all(is_open(item) for item in idle)
    port.look()
    assert [is_open(item) for item in idle] == [False, False, True, True]
    assert is_open(known)
    (line,) = caplog.messages
    assert "it has sent nothing" in line
    port.now += inflow.TELL_EVERY_S
    more = [port.connection()[0] for _ in range(2)]
    port.now += inflow.IDLE_S
    port.look()
    assert [is_open(item) for item in more] == [True, True]
    assert "(1 more were closed since the last line of this kind)" in caplog.messages[-1]
