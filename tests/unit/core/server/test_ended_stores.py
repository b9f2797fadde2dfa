"""A store that every worker has closed ends; the next that is created under its name begins anew."""

from dataclasses import replace

import pytest

from kvps.core.limits import Limits
from kvps.core.server import participation
from kvps.core.server.participation import KEPT_S, EndedStores
from kvps.errors import BY_CODE
from kvps.protocol.membership import Done, Error, Probe, Probed
from kvps.protocol.stores import Close, Closed, Find, FoundAll, Opened, StoreLife
from tests.support.server_harness import Said, ServerStage, heard, opening


def to(said: list[Said], rank: int) -> list[object]:
    return [one.message for one in said if one.to == b"w%d" % rank]


def stage(**more: object) -> ServerStage:
    """Two workers have pushed one round of a store."""
    one = ServerStage(2, **more)  # type: ignore[arg-type]
    one.open()
    one.init("a", [1.0, 2.0])
    for rank in (0, 1):
        one.push(rank, "a", [1.0, 1.0], 0)
    return one


def close(one: ServerStage, *ranks: int, life: int = 0, store: str = "kv") -> list[Said]:
    message = Close((StoreLife(store, life),))
    return [each for rank in ranks for each in one.say(rank, message, seq=0)]


def create(one: ServerStage, rank: int, life: int = 0, seq: int = 70, store: str = "kv") -> list[object]:
    return list(to(one.say(rank, replace(opening(store=store), life=life), seq=seq), rank))


def errors(said: list[Said]) -> list[str]:
    return [f"{BY_CODE[one.code].__name__}: {one.text}" for one in heard(said, Error)]


@pytest.mark.spec("R416", "R418")
def test_the_next_life_begins_when_the_last_rank_has_closed_the_former() -> None:
    one = stage()
    assert heard(close(one, 0), Closed) == [Closed((StoreLife("kv", 0),))]
    assert create(one, 0, life=1) == [], "rank 1 has it open"
    (pending,) = heard(one.say(0, Probe((70,)), seq=0), Probed)
    assert "begins anew once every worker has closed it, and rank 1" in pending.pending[0].reason
    said = close(one, 1)
    assert to(said, 0) == [Done(70)]
    assert one.server.context.chunks.by_number == {}
    assert one.server.control.budget.reserved() == ended_free()
    found = heard(one.say(1, Find("kv", ("a",)), seq=71), FoundAll)
    assert found[0].found[0].dtype == 0, "keys are not known any more"
    assert create(one, 1, life=1) == [Done(70)]


def ended_free() -> object:
    return ServerStage(2).server.control.budget.reserved()


@pytest.mark.spec("R416")
def test_open_says_what_a_lost_close_would_have_said() -> None:
    one = stage()
    close(one, 1)
    assert create(one, 0, life=1) == [Done(70)]


@pytest.mark.spec("R418")
def test_close_of_a_former_life_changes_nothing() -> None:
    one = stage()
    close(one, 0, 1)
    create(one, 0, life=1)
    close(one, 0, 1)
    assert create(one, 0, life=2) == []
    assert create(one, 0, life=0, seq=72) == [Opened(72, 1)], "a packet that comes late"


@pytest.mark.spec("R416", "R418")
def test_a_replacement_finds_the_life_that_others_have_open() -> None:
    one = stage()
    close(one, 0, 1)
    create(one, 0, life=1)
    create(one, 1, life=1)
    one.replace(1)
    assert create(one, 1) == [Opened(70, 1)]
    close(one, 0, life=1)
    close(one, 1, life=1)
    one.replace(1)
    assert create(one, 1) == [Opened(70, 1)], "its values are still there"
    assert create(one, 0, life=2) == [], "which are in use again"


@pytest.mark.spec("R416", "R419")
def test_a_replacement_is_refused_where_all_have_gone_on() -> None:
    one = stage()
    close(one, 0, 1)
    create(one, 0, store="next")
    one.replace(1)
    (error,) = create(one, 1)
    assert isinstance(error, Error)
    assert (
        "every worker has closed store 'kv', and its values are gone: worker 1 takes the place" in error.text
    )


@pytest.mark.spec("R419")
def test_values_are_kept_for_a_while_and_then_dropped() -> None:
    one = stage()
    one.push(0, "a", [1.0, 1.0], 1)
    one.pull(0, "a", after=2, seq=90)
    close(one, 0, 1)
    end, said = one.now + KEPT_S + 10.0, []
    while one.now < end:
        assert ("kv" in one.server.context.stores) or one.now > end - 10.0
        one.now += 1.0
        one.scheduler(Probe(()))  # so that it is not taken for lost
        one.server.member.heard_at = one.now
        said += one.take(one.server.on_timer(one.now))
    assert not one.server.context.stores
    assert not one.server.context.chunks.by_number
    assert errors(said) == ["KeyNotFound: store 'kv' has ended: every worker has closed it"]
    assert not one.server.context.sessions[0].pending


def test_stores_that_have_ended_leave_room_for_others() -> None:
    one = stage(limits=Limits(stores=1))
    (refused,) = create(one, 0, store="more")
    assert isinstance(refused, Error)
    close(one, 0, 1)
    assert create(one, 0, store="more") == [Done(70)]


def test_the_lives_of_many_stores_are_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(participation, "KNOWN_MAX", 2)
    known = EndedStores()
    for name in ("held", "a", "b", "c"):
        known.close(name, 0, 0, 1)
    known.forget(frozenset({"held"}))
    assert [name for name in ("held", "a", "b", "c") if known.of(name)] == ["held", "b", "c"]
