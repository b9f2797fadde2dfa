"""Whether a connection carries anything: octets that move, in simulated time."""

import pytest

from kvps.net.tcp_watch import MANY, STILL_S, Moved, Pulse

SILENCE_S = 20.0
pytestmark = pytest.mark.spec("R222")


def dies_at(moves: list[Moved], silence_s: float = SILENCE_S) -> int | None:
    """Look once a second; return at which look it was taken for dead."""
    pulse = Pulse(silence_s, 0.0)
    return next((index for index, item in enumerate(moves, 1) if pulse.is_dead(float(index), item)), None)


def test_a_connection_that_carries_nothing_is_dead_after_its_silence() -> None:
    assert dies_at([Moved(64, 0, 0)] * 60) == 1 + SILENCE_S


def test_slow_frame_may_take_for_ever() -> None:
    """16 MiB at 1 Mbit/s take 134 s, and nothing is whole before; every octet is life."""
    assert dies_at([Moved(125_000 * second, 64, 2) for second in range(200)]) is None


def test_megabytes_that_go_are_life_though_nothing_comes() -> None:
    """Their receipt, and the answer to each heartbeat, comes when all of them are there."""
    whole, each = 16 << 20, 125_000
    goes = [Moved(64, each * second, whole - each * second) for second in range(130)]
    assert dies_at(goes) is None
    last = goes[-1]
    assert dies_at([*goes, *[last] * 60]) == len(goes) + SILENCE_S


def test_a_few_octets_that_something_between_has_taken_are_no_life() -> None:
    """Heartbeats go, and are taken by a machine on the way that gives them to nobody."""
    assert dies_at([Moved(64, 20 * second, MANY - 1) for second in range(60)]) == 1 + SILENCE_S


def test_octets_that_are_kept_waiting_are_no_life() -> None:
    assert dies_at([Moved(64, 1000, 4 << 20)] * 60) == 1 + SILENCE_S


def test_an_answer_now_and_then_is_enough() -> None:
    assert dies_at([Moved(64 + second // 19, 0, 0) for second in range(100)]) is None


def test_pulse_begins_anew_after_a_standstill() -> None:
    """A process that was stopped has sent no heartbeat that anybody could have answered."""
    pulse = Pulse(SILENCE_S, 0.0)
    assert not pulse.is_dead(1.0, Moved(64, 0, 0))
    assert not pulse.is_dead(100.0, Moved(64, 0, 0))
    assert not any(pulse.is_dead(100.0 + second, Moved(64, 0, 0)) for second in range(1, 20))
    assert pulse.is_dead(120.0, Moved(64, 0, 0))
    assert STILL_S < SILENCE_S
