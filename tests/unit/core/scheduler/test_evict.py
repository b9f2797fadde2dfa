"""An operator ends a member: it is fenced, and its rank waits for another."""

import pytest

from kvps.core.effects import Trust
from kvps.core.scheduler.seat import State
from kvps.errors import ConfigError, Fenced, Unauthorized
from kvps.protocol.envelope import Node, Role
from kvps.protocol.membership import Beat, Done, Enrol, Error, Evict, View, Welcome
from tests.support.scheduler_harness import Peer, Stage, notes, sent
from tests.vectors.packets import KEY

OTHER, THIRD = KEY[::-1], KEY[1:] + KEY[0]
WORKER = Node(Role.WORKER, 0)


def stage() -> Stage:
    scheduler = Stage(1, 1, has_keys=True)
    for route, key in (("w0", KEY), ("s0", THIRD)):
        scheduler.peers[route] = Peer(Role.WORKER if route == "w0" else Role.SERVER)
        scheduler.say(route, Enrol(key))
        scheduler.hello(route)
    scheduler.peers["admin"] = Peer(Role.WORKER)
    return scheduler


@pytest.mark.spec("R249")
def test_evicted_worker_is_fenced_and_its_rank_is_lost() -> None:
    scheduler = stage()
    effects = scheduler.say("admin", Evict(Role.WORKER, 0), seq=1)
    assert sent(effects, Done, "admin") == [Done(1)]
    (error,) = sent(effects, Error, "w0")
    assert (error.code, error.text) == (Fenced.code, "worker 0 was evicted by the operator: stop")
    (trust,) = [each for each in effects if isinstance(each, Trust)]
    assert list(trust.keys) == [THIRD]
    (view,) = sent(effects, View, "s0")
    seat = scheduler.scheduler.job.seats.by_node[WORKER]
    assert seat.state is State.LOST
    assert [each.incarnation for each in view.members if each.role == Role.WORKER] == [3]
    assert "evicted by the operator" in notes(effects)[0]


@pytest.mark.spec("R249")
def test_messages_of_an_evicted_worker_are_refused() -> None:
    scheduler = stage()
    scheduler.say("admin", Evict(Role.WORKER, 0), seq=1)
    with pytest.raises(Fenced):
        scheduler.scheduler.admit("w0", scheduler.peers["w0"].envelope(), Beat)
    (error,) = sent(scheduler.beat("w0"), Error)
    assert error.code == Fenced.code
    assert scheduler.scheduler.job.seats.by_node[WORKER].state is State.LOST


@pytest.mark.spec("R249")
def test_another_takes_its_rank() -> None:
    scheduler = stage()
    scheduler.say("admin", Evict(Role.WORKER, 0), seq=1)
    scheduler.peers["w1"] = Peer(Role.WORKER)
    scheduler.say("w1", Enrol(OTHER))
    (welcome,) = sent(scheduler.hello("w1"), Welcome)
    assert (welcome.rank, welcome.incarnation) == (0, 4)
    assert scheduler.scheduler.job.seats.sessions()[OTHER] == "worker:0:4"


@pytest.mark.spec("R249")
@pytest.mark.parametrize(
    ("role", "rank", "says"),
    [
        (Role.WORKER, 7, "worker 7 is not a member of this job"),
        (Role.WORKER, 0, "worker 0 is lost"),
        (Role.SCHEDULER, 0, "scheduler is not a member"),
    ],
)
def test_absent_member_is_not_evicted(role: Role, rank: int, says: str) -> None:
    scheduler = stage()
    scheduler.say("admin", Evict(Role.WORKER, 0), seq=1)
    (error,) = sent(scheduler.say("admin", Evict(role, rank), seq=2), Error)
    assert error.code == ConfigError.code
    assert says in error.text


@pytest.mark.spec("R249")
def test_without_keys_nobody_is() -> None:
    stage = Stage(1, 0)
    stage.hello("w0")
    stage.peers["admin"] = Peer(Role.WORKER)
    (error,) = sent(stage.say("admin", Evict(Role.WORKER, 0), seq=1), Error)
    assert error.code == Unauthorized.code
    assert stage.scheduler.job.seats.by_node[WORKER].state is State.HELD
