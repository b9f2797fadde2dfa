"""Messages are lost, come again, and are damaged between real workers and real servers."""

import logging

import pytest

from tests.faults.counting import behind, train
from tests.faults.frames import Flip, FrameProxy, Lose, Mischief, Replay

log = logging.getLogger(__name__)
STEPS = 6
MODES = ["sync", "async"]


def play(monkeypatch: pytest.MonkeyPatch, mode: str, mischief: Mischief, steps: int) -> None:
    """Train with ``mischief`` before both servers: each push counts once."""
    with behind(monkeypatch, lambda server: FrameProxy(server, mischief)) as cluster:
        cluster.run(lambda rank: train(mode, steps, rank))
    log.info("%s: %s", type(mischief).__name__, dict(mischief.done))


@pytest.mark.spec("R39", "R41", "R51", "R52")
@pytest.mark.parametrize("mode", MODES)
def test_answers_that_are_lost(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    mischief = Lose("Ack", "Pulled", every=5)
    play(monkeypatch, mode, mischief, STEPS)
    assert mischief.done["Ack"] >= 3, "acknowledgements were lost"
    assert mischief.done["Pulled"] >= 3


@pytest.mark.spec("R40", "R41", "R51")
@pytest.mark.parametrize("mode", MODES)
def test_requests_that_are_lost(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """Of every kind of message, the first contact included."""
    names = "Hello", "Open", "Optimize", "Declare", "Load", "Push", "Pull", "Probe"
    mischief = Lose(*names, every=4)
    play(monkeypatch, mode, mischief, STEPS)
    assert mischief.done["Push"] >= 3


@pytest.mark.spec("R51", "R52")
@pytest.mark.parametrize("mode", MODES)
def test_pushes_that_come_again(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """Long after their rounds were closed, between others, and each of them many times."""
    mischief = Replay("Push", "Pull", "Load", seed=1)
    play(monkeypatch, mode, mischief, STEPS)
    assert mischief.done["Push"] >= 20


@pytest.mark.spec("R14", "R110", "R111")
@pytest.mark.parametrize("mode", MODES)
def test_bits_that_change(
    monkeypatch: pytest.MonkeyPatch, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    mischief = Flip(0.15, seed=2)
    play(monkeypatch, mode, mischief, STEPS)
    assert mischief.done["Push"] >= 3, "gradients were damaged"
    assert mischief.done["Pulled"] >= 3, "weights were damaged"
    told = [message for message in caplog.messages if "was damaged in transit" in message]
    assert any("(from server " in effect for effect in told), "the worker says where they came from"
    assert any("(from 127.0.0.1)" in effect for effect in told), "and so does the server"
    assert len(told) < mischief.done.total(), "not each of them is worth a line"
