"""TCP connections break, stall, crawl and lie between real workers, servers and their scheduler."""

import logging
import random
from collections.abc import Callable, Sequence

import pytest

from tests.faults.counting import behind, train
from tests.faults.streams import Stream, TcpProxy

log = logging.getLogger(__name__)
STEPS = 6
MODES = ["sync", "async"]
CONNECTIONS = 6
"""Each worker opens one to each server, and each server one to the other."""
Plan = Callable[[int], Stream]


class Streams:
    """All connections of a test, in the order in which they were opened."""

    def __init__(self, plan: Plan) -> None:
        self.all: list[Stream] = []
        self._plan = plan

    def next(self, place: int) -> Stream:
        """Return what becomes of another connection, whichever of some proxies it comes to."""
        self.all.append(self._plan(len(self.all)))
        return self.all[-1]

    def proxy(self, endpoint: str) -> TcpProxy:
        """Return a proxy before ``endpoint``."""
        return TcpProxy(endpoint, self.next)


def play(monkeypatch: pytest.MonkeyPatch, mode: str, plan: Plan, steps: int = STEPS) -> Streams:
    """Train with connections to servers as ``plan`` has them: each push counts once."""
    streams = Streams(plan)
    with behind(monkeypatch, streams.proxy) as cluster:
        cluster.run(lambda rank: train(mode, steps, rank))
    log.info("connections of %s octets", [item.carried for item in streams.all])
    return streams


def first(streams: Sequence[Stream]) -> Plan:
    """Let the first connections be ``streams``, and those behind them whole."""
    return lambda place: streams[place] if place < len(streams) else Stream()


@pytest.fixture
def attentive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have dead connections noticed sooner than a user would want it."""
    monkeypatch.setattr("kvps.net.outgoing.DATA_HEARTBEAT_S", (0.1, 0.5))
    monkeypatch.setattr("kvps.net.outgoing.CONTROL_HEARTBEAT_S", (0.1, 0.5))


# --- cut ------------------------------------------------------------------------------------------


@pytest.mark.spec("R3", "R41", "R51")
@pytest.mark.parametrize("mode", MODES)
def test_connections_that_are_cut(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """In the handshake, in a head and in a payload; by FIN and by RST."""
    counts = [30, 90, 400, 1_000, 20_000, 70_000, 140_000, 250_000]
    cut = [Stream(cut_after=count, by_reset=count > 1_000) for count in counts]
    play(monkeypatch, mode, first(cut), steps=2 * STEPS)
    assert sum(item.is_cut for item in cut) >= len(cut) // 2


# --- half open ------------------------------------------------------------------------------------


@pytest.mark.spec("R113")
@pytest.mark.parametrize("mode", ["sync", pytest.param("async", marks=pytest.mark.slow)])
@pytest.mark.usefixtures("attentive")
def test_connections_that_carry_nothing_any_more(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """They stay open, and nobody is told."""
    mute = [Stream(mute_after=count) for count in (0, 40, 400, 1_000, 100_000, 300_000)]
    play(monkeypatch, mode, first(mute))
    assert sum(item.is_mute for item in mute) >= len(mute) // 2


@pytest.mark.spec("R71", "R113")
@pytest.mark.usefixtures("attentive")
def test_connections_to_the_scheduler_that_carry_nothing_any_more(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvps.core.scheduler.membership.MUTE_S", 0.3)
    monkeypatch.setenv("KVPS_DROP_GRACE", "5")  # on a busy machine it takes a second to connect again
    mute = [Stream(mute_after=count) for count in (0, 300, 500, 700, 1_000)]
    control, data = Streams(first(mute)), Streams(first([]))
    with behind(monkeypatch, data.proxy, control.proxy) as cluster:
        cluster.run(lambda rank: train("sync", STEPS, rank))
    assert sum(item.is_mute for item in mute) >= 3
    assert not [message for message in caplog.messages if "lost" in message], "they came back in time"


# --- damaged --------------------------------------------------------------------------------------


@pytest.mark.spec("R111", "R113")
@pytest.mark.parametrize("mode", ["sync", pytest.param("async", marks=pytest.mark.slow)])
@pytest.mark.usefixtures("attentive")
def test_streams_whose_bits_change(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """In payload; and in what says how long a frame is, behind which nothing can be read."""
    # A connection between servers carries little, and may be any of the first.
    at = dict(enumerate((3, 70, 260, 480)))
    damaged = [
        Stream(flip_at=at.get(place), flip_every=200_000, dice=random.Random(place)) for place in range(50)
    ]
    streams = play(monkeypatch, mode, first(damaged), steps=2 * STEPS)
    assert sum(item.flipped for item in streams.all) >= 5


# --- slow -----------------------------------------------------------------------------------------


@pytest.mark.in_turn
def test_streams_in_single_octets(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = play(monkeypatch, "sync", lambda place: Stream(piece_bytes=1), steps=1)
    assert sum(item.carried for item in streams.all) > 500_000


@pytest.mark.spec("R113")
def test_slow_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes long is not taken for dead, though its heartbeats wait behind all that is sent."""
    monkeypatch.setattr("kvps.net.outgoing.DATA_HEARTBEAT_S", (0.1, 1.5))
    streams = play(monkeypatch, "sync", lambda place: Stream(piece_bytes=4096, bytes_per_s=300_000), steps=2)
    assert len(streams.all) == CONNECTIONS, "each was opened once, and kept"
