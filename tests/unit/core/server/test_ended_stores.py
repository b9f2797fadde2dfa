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
    return [effect.message for effect in said if effect.to == b"w%d" % rank]


def stage(**more: object) -> ServerStage:
    """Two workers have pushed one round of a store."""
    server = ServerStage(2, **more)  # type: ignore[arg-type]
    server.open()
    server.init("a", [1.0, 2.0])
    for rank in (0, 1):
        server.push(rank, "a", [1.0, 1.0], 0)
    return server


def close(server: ServerStage, *ranks: int, life: int = 0, store: str = "kv") -> list[Said]:
    message = Close((StoreLife(store, life),))
    return [each for rank in ranks for each in server.say(rank, message, seq=0)]


def create(server: ServerStage, rank: int, life: int = 0, seq: int = 70, store: str = "kv") -> list[object]:
    return list(to(server.say(rank, replace(opening(store=store), life=life), seq=seq), rank))


def errors(said: list[Said]) -> list[str]:
    return [f"{BY_CODE[item.code].__name__}: {item.text}" for item in heard(said, Error)]


@pytest.mark.spec("R416", "R418")
def test_the_next_life_begins_when_the_last_rank_has_closed_the_former() -> None:
    server = stage()
    assert heard(close(server, 0), Closed) == [Closed((StoreLife("kv", 0),))]
    assert create(server, 0, life=1) == [], "rank 1 has it open"
    (pending,) = heard(server.say(0, Probe((70,)), seq=0), Probed)
    assert "begins anew once every worker has closed it, and rank 1" in pending.pending[0].reason
    said = close(server, 1)
    assert to(said, 0) == [Done(70)]
    assert server.server.context.chunks.by_number == {}
    assert server.server.control.budget.reserved() == ended_free()
    found = heard(server.say(1, Find("kv", ("a",)), seq=71), FoundAll)
    assert found[0].found[0].dtype == 0, "keys are not known any more"
    assert create(server, 1, life=1) == [Done(70)]


def ended_free() -> object:
    return ServerStage(2).server.control.budget.reserved()


@pytest.mark.spec("R416")
def test_open_says_what_a_lost_close_would_have_said() -> None:
    server = stage()
    close(server, 1)
    assert create(server, 0, life=1) == [Done(70)]


@pytest.mark.spec("R418")
def test_close_of_a_former_life_changes_nothing() -> None:
    server = stage()
    close(server, 0, 1)
    create(server, 0, life=1)
    close(server, 0, 1)
    assert create(server, 0, life=2) == []
    assert create(server, 0, life=0, seq=72) == [Opened(72, 1)], "a packet that comes late"


@pytest.mark.spec("R416", "R418")
def test_a_replacement_finds_the_life_that_others_have_open() -> None:
    server = stage()
    close(server, 0, 1)
    create(server, 0, life=1)
    create(server, 1, life=1)
    server.replace(1)
    assert create(server, 1) == [Opened(70, 1)]
    close(server, 0, life=1)
    close(server, 1, life=1)
    server.replace(1)
    assert create(server, 1) == [Opened(70, 1)], "its values are still there"
    assert create(server, 0, life=2) == [], "which are in use again"


@pytest.mark.spec("R416", "R419")
def test_a_replacement_is_refused_where_all_have_gone_on() -> None:
    server = stage()
    close(server, 0, 1)
    create(server, 0, store="next")
    server.replace(1)
    (error,) = create(server, 1)
    assert isinstance(error, Error)
    assert (
        "every worker has closed store 'kv', and its values are gone: worker 1 takes the place" in error.text
    )


@pytest.mark.spec("R419")
def test_values_are_kept_for_a_while_and_then_dropped() -> None:
    server = stage()
    server.push(0, "a", [1.0, 1.0], 1)
    server.pull(0, "a", after=2, seq=90)
    close(server, 0, 1)
    end, said = server.now + KEPT_S + 10.0, []
    while server.now < end:
        assert ("kv" in server.server.context.stores) or server.now > end - 10.0
        server.now += 1.0
        server.scheduler(Probe(()))  # so that it is not taken for lost
        server.server.member.heard_at = server.now
        said += server.take(server.server.on_timer(server.now))
    assert not server.server.context.stores
    assert not server.server.context.chunks.by_number
    assert errors(said) == ["KeyNotFound: store 'kv' has ended: every worker has closed it"]
    assert not server.server.context.sessions[0].pending


def test_stores_that_have_ended_leave_room_for_others() -> None:
    server = stage(limits=Limits(stores=1))
    (refused,) = create(server, 0, store="more")
    assert isinstance(refused, Error)
    close(server, 0, 1)
    assert create(server, 0, store="more") == [Done(70)]


def test_the_lives_of_many_stores_are_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(participation, "KNOWN_MAX", 2)
    known = EndedStores()
    for name in ("held", "a", "b", "c"):
        known.close(name, 0, 0, 1)
    known.forget(frozenset({"held"}))
    assert [name for name in ("held", "a", "b", "c") if known.of(name)] == ["held", "b", "c"]
