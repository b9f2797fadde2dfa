"""Standbys: the spares that get a seat, the promotions, and what members and a restart are told of it."""

import pytest

from kvps.core.effects import Effect, Exit, Finish, Save, Trust
from kvps.core.scheduler.handover import SUSPECT, Suspect
from kvps.core.scheduler.seat import Settings, State
from kvps.core.scheduler.standbys import AGAIN_S, GATHER_MAX_S
from kvps.errors import ConfigError, Fenced, ProtocolError
from kvps.protocol.envelope import Node, Role
from kvps.protocol.membership import (
    STANDBY_FEATURE,
    Beat,
    Challenge,
    Copy,
    Enrol,
    Error,
    Measured,
    Member,
    Seen,
    Standing,
    Stop,
    View,
    Welcome,
)
from tests.support.scheduler_harness import Peer, Stage, notes, sent, told
from tests.vectors.packets import KEY

PIDS = {"s0": 100, "s1": 101, "s2": 102}


def spare(stage: Stage, process: str, name: str = "", **more: object) -> list[Effect]:
    """A process that hosts a server, or one that hosts none, offers itself as a standby along a route of its own."""
    route = name or f"{process}b"
    fields = {"features": STANDBY_FEATURE, "host": f"host-{process}", "endpoint": f"tcp://{route}:1"}
    return stage.hello(route, "server", **(fields | more))


def copied(servers: int = 2, workers: int = 1, **limits: object) -> Stage:
    """Return a job in which each server has a level standby; that of server 0 is ``s1b``."""
    stage = Stage(workers, servers, replicas=1, **limits)
    stage.form()
    for rank in range(servers):
        spare(stage, f"s{rank}")
    stage.wait(GATHER_MAX_S, [f"s{rank}" for rank in range(servers)])
    for rank in range(servers):
        stage.say(f"s{rank}b", Standing(level=True, copied=100))
    return stage


def row(stage: Stage, role: Role, rank: int) -> Member:
    (member,) = [item for item in stage.scheduler.job.view(stage.now).members if item[:2] == (role, rank)]
    return member


def standby_of(stage: Stage, rank: int) -> tuple[str, str]:
    """The state and the host of the standby of a server."""
    member = row(stage, Role.STANDBY, rank)
    return member.state, member.host


# --- what can be asked for ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("servers", "replicas", "text"),
    [
        (2, -1, "--replicas -1: a server has 0 or 1 copies"),
        (3, 2, "--replicas 2: a server has 0 or 1 copies"),
        (1, 1, "--replicas 1 with --servers 1: a copy has to lie in another server's process"),
        (0, 1, "--replicas 1 with --servers 0"),
        (750, 1, "at most 1500 in all"),
    ],
)
def test_impossible_copies_are_refused(servers: int, replicas: int, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Settings(1, servers, replicas=replicas)


@pytest.mark.spec("R521")
def test_a_job_without_copies_has_no_rows_of_standbys() -> None:
    stage = Stage(1, 2)
    stage.form()
    assert {member.role for member in stage.scheduler.job.view(0.0).members} == {Role.SERVER, Role.WORKER}
    (error,) = sent(spare(stage, "s0"), Error, "s0b")
    assert error.code == ConfigError.code
    assert "--replicas 1" in error.text


@pytest.mark.spec("R522")
def test_a_spare_of_another_version_is_refused() -> None:
    stage = Stage(1, 2, replicas=1)
    stage.form()
    (error,) = sent(spare(stage, "s9", software="kvps 9"), Error)
    assert error.code == ConfigError.code
    assert "the servers of the job are kvps kvps 0.1, and host-s9:7 is kvps kvps 9" in error.text


# --- who becomes a standby ------------------------------------------------------------------------


@pytest.mark.spec("R521", "R522", "R523")
def test_each_server_gets_a_standby_of_another_process() -> None:
    stage = Stage(1, 3, replicas=1)
    stage.form()
    view = stage.scheduler.job.view(0.0)
    assert [(member.role, member.rank) for member in view.members[-3:]] == [(3, 0), (3, 1), (3, 2)]
    effects = [*spare(stage, "s0"), *spare(stage, "s1"), *spare(stage, "s2")]
    (waits,) = sent(spare(stage, "s0", "more"), Beat, "more")
    assert waits.reason == "a spare: it waits until a server has no standby"
    welcomes = {to: item for to in ("s0b", "s1b", "s2b") for item in sent(effects, Welcome, to)}
    assert {to: (member.rank, member.follows, member.replicas) for to, member in welcomes.items()} == {
        "s0b": (2, True, 1),
        "s1b": (0, True, 1),
        "s2b": (1, True, 1),
    }
    assert standby_of(stage, 0) == ("held", "host-s1")
    assert [field.name for field in (Role(row(stage, Role.STANDBY, 2).role),)] == ["STANDBY"]


@pytest.mark.spec("R523")
def test_a_seat_waits_a_moment_for_a_spare_of_another_host() -> None:
    stage = Stage(1, 3, replicas=1)
    for rank, host in enumerate("aab"):
        stage.hello(f"s{rank}", rank=rank, host=host, pid=PIDS[f"s{rank}"])
    stage.hello("w0", rank=0)
    spare(stage, "s1", host="a", pid=PIDS["s1"])
    assert standby_of(stage, 0) == ("empty", "")  # server 2's process on b would be better
    stage.wait(GATHER_MAX_S / 2, ["s0", "s1", "s2"])
    spare(stage, "s2", host="b", pid=PIDS["s2"])
    assert standby_of(stage, 0) == ("held", "b")
    assert standby_of(stage, 2) == ("empty", "")  # the process of server 0 is the next by rank
    spare(stage, "s0", host="a", pid=PIDS["s0"])
    assert standby_of(stage, 2) == ("held", "a")
    assert row(stage, Role.STANDBY, 2).incarnation == stage.peers["s0b"].incarnation
    spare(stage, "s0", "s0c", host="a", pid=PIDS["s0"])
    assert standby_of(stage, 1) == ("empty", "")
    stage.wait(GATHER_MAX_S, ["s0", "s1", "s2"])
    assert standby_of(stage, 1) == ("held", "a")


@pytest.mark.spec("R522")
def test_a_spare_waits_while_the_job_forms_and_leaves_when_its_connection_breaks() -> None:
    stage = Stage(1, 2, replicas=1)
    stage.hello("s0", rank=0)
    spare(stage, "s9")
    stage.hello("s1", rank=1)
    assert standby_of(stage, 0) == ("empty", "")
    stage.drop("s9b")
    stage.hello("w0")
    stage.wait(GATHER_MAX_S, ["s0", "s1", "w0"])
    assert standby_of(stage, 0) == ("empty", "")
    spare(stage, "s9")
    assert standby_of(stage, 0) == ("held", "host-s9")


def test_no_more_spares_wait_than_there_can_be_seats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvps.core.scheduler.standbys.SPARES_MAX", 1)
    stage = copied()
    spare(stage, "s0", "a")
    spare(stage, "s1", "b")
    spare(stage, "s1", "b")
    assert list(stage.scheduler.job.standbys.spares) == ["b"]


@pytest.mark.spec("R522")
def test_a_server_that_finds_its_seat_taken_waits_as_a_spare() -> None:
    stage = copied()
    stage.drop("s0")
    assert sent(stage.hello("again", "server", rank=0), Beat)  # its holder may come back
    stage.wait(1.1, ["s1", "w0", "s0b", "s1b"])
    assert row(stage, Role.SERVER, 0).host == "host-s1"
    effects = stage.hello("again", "server", rank=0)
    assert standby_of(stage, 0) == ("held", "host-again")
    (welcome,) = sent(effects, Welcome, "again")
    assert (welcome.rank, welcome.follows) == (0, True)
    assert not sent(effects, Challenge)
    (beat,) = sent(stage.hello("more", "server"), Beat)
    assert "a spare" in beat.reason
    assert sent(stage.hello("much", "server", rank=7), Error)


def test_a_spare_with_keys_says_them_before() -> None:
    stage = Stage(1, 2, replicas=1, has_keys=True)
    for route, role, key in (
        ("s0", "server", KEY),
        ("s1", "server", KEY[1:] + KEY[0]),
        ("w0", "worker", KEY[::-1]),
    ):
        stage.peers[route] = Peer(Role[role.upper()])
        stage.say(route, Enrol(key))
        stage.hello(route)
    (beat,) = sent(spare(stage, "s9"), Beat)
    assert "ENROL" in beat.reason
    stage.say("s9b", Enrol(KEY[2:] + KEY[:2]))
    effects = spare(stage, "s9")
    (trust,) = [effect for effect in effects if isinstance(effect, Trust)]
    assert trust.keys[KEY[2:] + KEY[:2]] == f"server:0:{stage.peers['s9b'].incarnation}"
    view = stage.scheduler.job.view(0.0)
    assert view.keys[len(view.members) - 2] == KEY[2:] + KEY[:2]


# --- the loss of a server -------------------------------------------------------------------------


@pytest.mark.spec("R524", "R526", "R528")
@pytest.mark.parametrize("how", ["ended", "broken", "silent", "fails", "leaves", "evicted"])
def test_a_level_standby_takes_the_seat_of_a_lost_server(how: str) -> None:
    stage = copied(persist=True, has_keys=False)
    former, standby = stage.peers["s0"], stage.peers["s1b"]
    others = ["s1", "w0", "s0b", "s1b"]
    if how in ("fails", "leaves"):
        effects = stage.leave("s0", done=how == "leaves")
    elif how == "evicted":
        object.__setattr__(stage.settings, "has_keys", True)
        stage.scheduler.job.seats.evict(
            stage.scheduler.job.seats.by_node[Node(Role.SERVER, 0)], "why", stage.now
        )
        effects = stage.take(
            stage.scheduler.job.apply_changes(stage.now) or stage.scheduler.on_timer(stage.now)
        )
    elif how == "silent":
        effects = stage.wait(13.0, others)
    else:
        (question,) = [item for item in stage.drop("s0") if isinstance(item, Finish)]
        assert question == Finish(SUSPECT, Suspect(0, former.incarnation, "tcp://s0:1"))
        if how == "broken":
            effects = stage.wait(1.1, others)
        else:
            effects = stage.take(stage.scheduler.on_ended(0, former.incarnation, stage.now))
    server = row(stage, Role.SERVER, 0)
    assert (server.state, server.incarnation, server.endpoint) == ("held", standby.incarnation, "tcp://s1b:1")
    assert standby_of(stage, 0) == ("empty", "")
    view = sent(effects, View, "w0")[-1]
    assert (view.epoch, view.since, view.phase) == (0, 0, "running")
    assert {"w0", "s1", "s0b", "s1b"} <= set(told(effects, View))
    first = next(at for at, item in enumerate(effects) if isinstance(item, Save))
    assert first < next(at for at, item in enumerate(effects) if sent([item], View))
    assert any("its standby host-s1:7 goes on in its place" in note for note in notes(effects))
    stage.restart()
    assert row(stage, Role.SERVER, 0).incarnation == standby.incarnation
    stage.beat("s1b")
    assert sent(stage.beat("s0"), Error)[0].code == Fenced.code
    assert row(stage, Role.SERVER, 0).host == "host-s1"


@pytest.mark.spec("R524")
def test_a_standby_that_is_not_level_does_not_take_the_seat() -> None:
    stage = copied()
    effects = stage.say("s1b", Standing(level=False, copied=43, reason="store 'a\nb' is async"))
    assert "info: the standby of server 0 (host-s1:7) is not level any more: 1 of 2 copies" in notes(effects)
    stage.drop("s0")
    effects = stage.wait(1.1, ["s1", "w0", "s0b", "s1b"])
    assert row(stage, Role.SERVER, 0).state == "lost"
    assert standby_of(stage, 0) == ("held", "host-s1")
    why = "its standby had copied 43 % (store 'a b' is async)"
    assert f"warning: nobody takes the place of server 0: {why}" in notes(effects)
    assert row(stage, Role.SERVER, 0).reason == f"connection broke, no beat for 1 s; {why}"
    assert not any(
        "nobody takes" in note for note in notes(stage.drop("w0") + stage.wait(1.1, ["s1", "s1b"]))
    )
    stage.beat("w0")
    stage.say("s1b", Standing(level=True))
    assert row(stage, Role.SERVER, 0).state == "held"


@pytest.mark.spec("R524")
def test_two_losses_in_a_row_are_survived_if_the_copy_was_made_between() -> None:
    stage = copied(3)
    stage.drop("s0")
    stage.drop("s0b")
    stage.take(stage.scheduler.on_ended(0, stage.peers["s0"].incarnation, stage.now))
    stage.take(stage.scheduler.on_ended(2, stage.peers["s0b"].incarnation, stage.now))
    assert row(stage, Role.SERVER, 0).host == "host-s1"
    spare(stage, "s1", "s1c")
    spare(stage, "s2", "s2c")
    assert [standby_of(stage, rank)[1] for rank in range(3)] == ["host-s2", "host-s2", "host-s1"]
    stage.say("s2c", Standing(level=True))
    for route in ("s1", "s1b", "s1c"):
        incarnation = stage.peers[route].incarnation
        rank = {"s1": 1, "s1b": 0, "s1c": 2}[route]
        stage.drop(route)
        stage.take(stage.scheduler.on_ended(rank, incarnation, stage.now))
    assert [row(stage, Role.SERVER, rank).host for rank in range(3)] == ["host-s2"] * 3
    assert [promotion.rank for promotion in stage.scheduler.job.standbys.promotions] == [0, 1, 0]


@pytest.mark.spec("R526")
def test_an_ended_process_counts_only_while_its_connection_is_broken() -> None:
    stage = copied()
    incarnation = stage.peers["s0"].incarnation
    stage.drop("s0")
    stage.beat("s0")  # it came back
    for rank, number in ((0, incarnation), (0, 999), (9, incarnation)):
        assert stage.take(stage.scheduler.on_ended(rank, number, stage.now)) == []
    assert row(stage, Role.SERVER, 0).incarnation == incarnation
    stage.stop()
    assert stage.take(stage.scheduler.on_ended(0, incarnation, stage.now)) == []


@pytest.mark.spec("R577")
def test_the_host_of_a_silent_server_is_asked_and_one_that_does_not_answer_is_lost() -> None:
    stage = copied()
    incarnation, others = stage.peers["s0"].incarnation, ["s1", "w0", "s0b", "s1b"]
    asked = Finish(SUSPECT, Suspect(0, incarnation, "tcp://s0:1", is_silent=True))
    stage.beat("s0")
    assert stage.take(stage.scheduler.on_ended(0, incarnation, stage.now)) == [], "it beats"
    assert asked in stage.wait(0.8, others)
    assert asked not in stage.wait(0.5, others), "it was asked just now"
    assert asked in stage.wait(0.6, others)
    effects = stage.take(stage.scheduler.on_ended(0, incarnation, stage.now))
    assert any("silent for 1.9 s, and its host does not answer" in note for note in notes(effects))
    assert row(stage, Role.SERVER, 0).host == "host-s1"


@pytest.mark.spec("R577")
def test_hosts_are_asked_while_all_is_well() -> None:
    stage = copied()
    stage.say("s1b", Standing(level=False, copied=99))
    told = stage.say("s1b", Standing(level=True, copied=100))
    asked = [effect.value for effect in told if isinstance(effect, Finish)]
    assert [(item.endpoint, item.is_silent) for item in asked if isinstance(item, Suspect)] == [
        ("tcp://s1b:1", True),
        ("tcp://s0:1", True),
    ]


def test_of_a_worker_and_in_a_job_without_copies_nobody_is_asked_for() -> None:
    assert not [item for item in copied().drop("w0") if isinstance(item, Finish)]
    stage = Stage(1, 2)
    stage.form()
    assert not [item for item in stage.drop("s0") if isinstance(item, Finish)]


# --- the loss of a standby ------------------------------------------------------------------------


@pytest.mark.spec("R525")
def test_a_lost_standby_is_left_out_of_the_view_and_fenced() -> None:
    stage = copied()
    incarnation = stage.peers["s1b"].incarnation
    spare(stage, "s1", "s1c")
    stage.drop("s1b")
    effects = stage.take(stage.scheduler.on_ended(0, incarnation, stage.now))
    assert told(effects, View)
    assert any("the standby of server 0 is lost (its process has ended)" in note for note in notes(effects))
    assert standby_of(stage, 0) == ("held", "host-s1")
    assert row(stage, Role.STANDBY, 0).incarnation == stage.peers["s1c"].incarnation
    with pytest.raises(Fenced, match="you are incarnation"):
        stage.scheduler.admit("s1b", stage.peers["s1b"].envelope(), Beat)


@pytest.mark.spec("R527")
def test_a_server_dismisses_its_standby() -> None:
    stage = copied()
    spare(stage, "s1", "s1c")
    incarnation = stage.peers["s1b"].incarnation
    assert not sent(stage.say("s0", Standing(behind_bytes=9, dismiss=incarnation + 7)), Stop)
    effects = stage.say("s0", Standing(dismiss=incarnation, reason="it confirms nothing"))
    (stop,) = sent(effects, Stop, "s1b")
    assert stop == Stop(0, "the standby of server 0 is dismissed: it confirms nothing")
    assert standby_of(stage, 0) == ("empty", "")
    stage.wait(AGAIN_S, ["s0", "s1", "w0", "s0b"])
    assert standby_of(stage, 0) == ("held", "host-s1")


@pytest.mark.spec("R527")
def test_an_epoch_dismisses_all_standbys() -> None:
    stage = copied()
    for route in ("s0", "s1"):
        stage.shelf(route, 1)
    stage.scheduler.job.checkpoints.kept = 1
    stage.say("s1b", Standing(level=False))
    stage.drop("s0")
    stage.wait(1.1, ["s1", "w0", "s0b", "s1b"])
    effects = stage.hello("again", "server", rank=0)
    assert set(told(effects, Stop)) == {"s0b", "s1b"}
    assert stage.phase == "returning"
    assert standby_of(stage, 1) == ("empty", "")


@pytest.mark.spec("R524")
def test_a_lost_server_says_that_it_had_no_copy() -> None:
    stage = Stage(1, 2, replicas=1)
    stage.form()
    spare(stage, "s1")
    stage.say("s1b", Standing(copied=7))
    for rank in range(2):
        stage.leave(f"s{rank}", done=False, code=1)
    assert row(stage, Role.SERVER, 0).reason == "exit code 1; its standby had copied 7 %"
    assert row(stage, Role.SERVER, 1).reason == "exit code 1; it had no standby"
    for route in ("s0", "s1"):
        stage.shelf(route, 1)
    stage.scheduler.job.checkpoints.kept = 1
    effects = stage.hello("again", "server", rank=0)
    assert told(effects, Stop) == ["s1b"]


@pytest.mark.spec("R527")
def test_the_end_of_a_job_stops_standbys_and_spares() -> None:
    stage = copied()
    spare(stage, "s1", "s1c")
    effects = stage.leave("w0")
    assert set(told(effects, Stop)) == {"w0", "s0", "s1", "s0b", "s1b", "s1c"}
    assert any(isinstance(effect, Exit) for effect in effects)
    stage = copied(keep_alive=True)
    effects = stage.leave("w0")
    assert set(told(effects, Stop)) == {"w0", "s0b", "s1b"}
    assert stage.states()["standby 0"] == "empty"
    assert stage.states()["server 0"] == "held"


# --- what is known --------------------------------------------------------------------------------


@pytest.mark.spec("R528")
def test_a_restarted_scheduler_knows_who_is_level() -> None:
    stage = copied(persist=True)
    stage.restart()
    assert standby_of(stage, 0) == ("level", "host-s1")
    for route in ("s0", "s1", "w0", "s0b", "s1b"):
        stage.beat(route)
    stage.drop("s0")
    stage.take(stage.scheduler.on_ended(0, stage.peers["s0"].incarnation, stage.now))
    assert row(stage, Role.SERVER, 0).host == "host-s1"


@pytest.mark.spec("R501", "R529")
def test_why_a_store_is_not_copied_is_logged_once_and_shown() -> None:
    stage = copied()
    stage.say("s1b", Standing(level=False))
    why = "store 'kv' has embedding tables"
    logged = f"warning: no standby can take the place of server 0: {why}"
    assert any(note.startswith(logged) for note in notes(stage.say("s0", Standing(reason=why))))
    assert not notes(stage.say("s0", Standing(reason=why)))
    assert stage.scheduler.seen(1, stage.now).copies[0].reason == why
    stage.drop("s0")
    stage.wait(1.1, ["s1", "w0", "s0b", "s1b"])
    assert row(stage, Role.SERVER, 0).reason.endswith(f"its standby had copied 0 % ({why})")


def test_a_standby_that_is_short_of_memory_is_logged_once() -> None:
    stage = copied()
    why = "the copy cannot be held: no room for key 'w': weights 8 MiB, and the limit of this server is 4 MiB"
    (first, *_), again = [notes(stage.say("s0b", Standing(level=False, reason=why))) for _ in range(2)]
    assert first.startswith(f"warning: no standby can take the place of server 1: {why}")
    assert not again


@pytest.mark.spec("R529")
def test_status_shows_copies_and_promotions() -> None:
    stage = copied()
    stage.say("s0", Standing(behind_bytes=4096))
    stage.say("s0b", Standing(level=False, copied=43))
    seen = stage.scheduler.seen(1, stage.now)
    assert seen.copies == (
        Copy(0, "level", "host-s1:7", 100, 4096, ""),
        Copy(1, "held", "host-s0:7", 43, 0, ""),
    )
    assert [Role(sight.role).name for sight in seen.members] == [
        "WORKER",
        "SERVER",
        "SERVER",
        "STANDBY",
        "STANDBY",
    ]
    incarnation = stage.peers["s1b"].incarnation
    stage.leave("s0", done=False, code=1)
    stage.now += 2.0
    seen = stage.scheduler.seen(1, stage.now)
    assert seen.promotions == ((0, incarnation, "host-s1:7", 2.0),)
    assert seen.copies[0] == Copy(0, "empty", "", 0, 0, "")
    assert isinstance(seen, Seen)


def test_words_of_standbys_are_refused_of_workers_and_their_figures_are_dropped() -> None:
    stage = copied()
    (error,) = sent(stage.say("w0", Standing()), Error)
    assert error.code == ProtocolError.code
    assert not sent(stage.say("s1b", Measured(0, (), (), (), (), ())), Error)
    assert stage.scheduler.job.seats.by_node[Node(Role.STANDBY, 0)].state is State.HELD
