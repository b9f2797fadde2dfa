"""Session keys at the scheduler: said before HELLO, kept with the seat, told to all."""

import pytest

from kvps.core.effects import Save, Trust
from kvps.core.scheduler import membership
from kvps.errors import ProtocolError
from kvps.protocol.envelope import Node, Role
from kvps.protocol.membership import Beat, Enrol, Error, Hello, View, Welcome
from tests.support.scheduler_harness import Stage, sent
from tests.vectors.packets import KEY

OTHER, THIRD = KEY[::-1], KEY[1:] + KEY[0]


def stage(workers: int = 1, servers: int = 1, **more: object) -> Stage:
    return Stage(workers, servers, has_keys=True, **more)


def join(stage: Stage, route: str, key: str, command: str = "", **more: object) -> list[object]:
    stage.hello(route, pid=99) if route not in stage.peers else None
    effects: list[object] = list(stage.say(route, Enrol(key, command)))
    return effects + stage.hello(route, **more)


def trusted(effects: list[object]) -> dict[str, str]:
    (found,) = [effect.keys for effect in effects if isinstance(effect, Trust)]
    return found


@pytest.mark.spec("R247")
def test_keys_are_trusted_before_the_welcome_and_named_in_the_view() -> None:
    scheduler = stage(persist=True)
    effects = join(scheduler, "w0", KEY, OTHER, guardian=True)
    assert trusted(effects) == {KEY: "worker:0:1", OTHER: "worker:0:1"}
    assert [type(each) for each in effects[:2]] == [Save, Trust]
    effects = join(scheduler, "s0", THIRD)
    assert trusted(effects)[THIRD] == "server:0:2"
    view = sent(effects, View)[0]
    assert [Node(Role(each.role), each.rank) for each in view.members] == [
        Node(Role.SERVER, 0),
        Node(Role.WORKER, 0),
    ]
    assert view.keys == (THIRD, OTHER), "of a guarded seat that of the command"


@pytest.mark.spec("R247")
def test_a_replacement_has_its_own_key_and_the_old_one_opens_nothing() -> None:
    scheduler = stage()
    join(scheduler, "w0", KEY)
    join(scheduler, "s0", THIRD)
    scheduler.drop("w0")
    scheduler.wait(3.0, ["s0"])
    effects = join(scheduler, "w1", OTHER)
    assert trusted(effects) == {OTHER: "worker:0:3", THIRD: "server:0:2"}
    assert sent(effects, Welcome)[0].incarnation == 3


def test_enrolment_along_a_connection_ends_with_it() -> None:
    scheduler = stage()
    scheduler.hello("w0")
    scheduler.say("w0", Enrol(KEY))
    scheduler.drop("w0")
    assert sent(scheduler.hello("w0"), Beat)


def test_enrolments_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "SEATS_MAX", 2)
    seats = stage().scheduler.job.seats
    for route in ("a", "b", "a", "c"):
        seats.enrol(route, (KEY, ""))
    assert [seats.has_enrolled(route) for route in "abc"] == [True, False, True]


def test_a_hello_for_another_role_than_its_sender_has() -> None:
    stage = Stage()
    stage.hello("w0")
    stage.peers["w9"] = stage.peers["w0"]
    said = stage.peers["w0"].envelope()._replace(incarnation=0)
    effects = stage.say("w9", Hello(1, 0, "k", 0, 1, 0, "h", 7), envelope=said)
    (error,) = sent(effects, Error)
    assert (error.code, error.text) == (ProtocolError.code, "a worker asked for the seat of a server")
