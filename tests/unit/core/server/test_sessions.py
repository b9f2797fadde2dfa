"""For how long values are under way on a link, to the server and back, as PING and PONG tell."""

import pytest
import torch

from kvps.core.counts import LINK_BUSY, LINK_WATCHED
from kvps.core.server.sessions import AGAIN_S, PAUSE_S, WATCH_S, Link, LinkUse
from kvps.protocol.membership import Measure, Ping, Pong
from tests.support.server_harness import Said, ServerStage


def pings(said: list[Said]) -> list[str | bytes]:
    """Return to whom PING was said."""
    return [effect.to for effect in said if isinstance(effect.message, Ping)]


def counted(stage: ServerStage, name: str) -> dict[str, float]:
    """Return a counter by its labels."""
    return {label: n for (of, label), n in stage.server.counts.values().items() if of == name}


def watched(now: float = 10.0) -> Link:
    """Return a link that is watched, and whose first PING is answered."""
    link = Link()
    assert link.watch(now)
    assert link.answered(1, 0.0, now) == LinkUse(0.0, 0.0, 0.0)
    link._pause_until = now
    return link


@pytest.mark.spec("R390")
def test_a_link_is_watched_only_for_a_while_after_figures_were_asked_for() -> None:
    assert not Link().sent_values(0.0)
    link = watched(10.0)
    assert not link.sent_values(10.5 + WATCH_S)
    assert link.sent_values(10.0 + WATCH_S)


def test_values_that_are_sent_behind_a_ping_need_another() -> None:
    link = watched(10.0)
    assert link.sent_values(11.0)
    assert not link.sent_values(11.5)
    assert link.answered(2, 0.0, 12.0) == LinkUse(2.0, 0.0, 1.0)
    assert link.follows(12.0)
    assert link.answered(3, 0.0, 12.75) == LinkUse(0.75, 0.0, 0.75)
    assert not link.follows(12.75)


def test_a_fast_link_is_measured_now_and_then() -> None:
    link = watched(10.0)
    assert link.sent_values(11.0)
    link.answered(2, 0.0, 11.001)
    assert not link.sent_values(11.002)
    assert link.sent_values(11.0011 + PAUSE_S)


@pytest.mark.spec("R391")
@pytest.mark.parametrize(("told", "taken"), [(1e300, 2.0), (-5.0, 0.0), (0.5, 0.5)])
def test_a_pong_tells_of_no_more_time_than_has_passed(told: float, taken: float) -> None:
    link = watched(10.0)
    assert link.watch(11.0)
    assert link.answered(1, 9.0, 11.5) is None
    assert link.answered(2, told, 12.0) == LinkUse(2.0, taken, 0.0)


@pytest.mark.spec("R390", "R391")
def test_a_server_pings_behind_values_and_counts() -> None:
    stage = ServerStage(2)
    stage.open()
    stage.init("a", [0.0] * 4)
    assert pings(stage.pull(0, "a")) == [], "nobody asks for figures"
    assert pings(stage.scheduler(Measure(1))) == [b"w0", b"w1"]
    for rank in range(2):
        assert stage.say(rank, Pong(1, 0.0, 0, 0.0), seq=0) == []
    stage.now += 1.0
    said = stage.pull(0, "a")
    assert pings(said) == [b"w0"]
    assert isinstance(said[-1].message, Ping), "behind the values"
    stage.now += 0.5
    assert stage.say(0, Pong(2, 0.0, 0, 0.25), seq=0) == []
    assert counted(stage, LINK_WATCHED) == {"0": 1.5, "1": 0.0}
    assert counted(stage, LINK_BUSY) == {"0,in": 0.25, "0,out": 0.5, "1,in": 0.0, "1,out": 0.0}
    assert "Pong" not in counted(stage, "kvps_requests_total")
    stage.say(0, Pong(1, 0.0, 0, 9.0), seq=0)
    assert counted(stage, LINK_WATCHED)["0"] == 1.5, "an old answer"


def test_values_behind_a_ping_are_followed_by_another() -> None:
    stage = ServerStage(1)
    stage.open()
    stage.init("a", torch.zeros(4))
    stage.scheduler(Measure(1))
    assert pings(stage.pull(0, "a")) == []
    stage.now += 0.5
    assert pings(stage.say(0, Pong(1, 0.0, 0, 0.0), seq=0)) == [b"w0"]


@pytest.mark.spec("R390")
def test_a_worker_that_has_not_answered_is_not_asked_again_at_once() -> None:
    stage = ServerStage(1)
    assert pings(stage.scheduler(Measure(1))) == [b"w0"]
    stage.now += 1.0
    assert pings(stage.scheduler(Measure(2))) == []
    stage.now += AGAIN_S
    assert pings(stage.scheduler(Measure(3))) == [b"w0"]
