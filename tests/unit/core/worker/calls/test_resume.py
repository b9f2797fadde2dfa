"""A script that took another's place and runs again from its beginning: its calls pass until it is where the others are."""

import pytest
import torch

from kvps.core.optim.hyperparams import resolve
from kvps.core.worker import calls
from kvps.errors import KeyNotFound
from kvps.protocol.checkpoint import Checkpoint, Checkpointed, Revive
from kvps.protocol.membership import (
    Barrier,
    Beat,
    Done,
    Error,
    HistoryIs,
    Join,
    Joined,
    Released,
    Resume,
    Return,
)
from kvps.protocol.stores import Find, Found, FoundAll, Optimize, Rate
from kvps.protocol.values import Pull, Pulled, Push, Stand
from tests.support.worker_harness import Bench, push, server_of
from tests.support.worker_with_key import FLOAT, HOT, ready, resumed, stood

SILENT = HistoryIs(0, 0, 0, 0, 0, 0.0, 0, False)
"""A server that has heard of no call."""


def replay(
    worker: Bench, *known: HistoryIs, owed: tuple[int, int] = (4, 4), replaced: bool = True, **more: int
) -> calls.Place:
    """Take a place that owes these pushes on the two servers."""
    ticket = worker.call(calls.TakePlace("kv", ("w",)))
    for server in (0, 1):
        stood(worker, worker.seqs(Pull, server)[0], server, 4, owed=owed[server])
    resumed(worker, *known, replaced=replaced, **more)
    finish = worker.finish(ticket)
    assert finish is not None
    assert isinstance(finish.value, calls.Place)
    return finish.value


@pytest.mark.spec("R394")
def test_calls_pass_until_the_end_of_a_replay() -> None:
    worker = ready(1)
    place = replay(worker, *[HistoryIs(0, 1, 0, 2, 3, 0.5, 0, False)] * 2, owed=(4, 6))
    assert place == calls.Place(4, 6, is_replacement=True, rate=0.5)
    for call in (
        calls.StandAtBarrier("kv", None),
        calls.SetRate("kv", 0.25),
        calls.SetOptimizer("kv", resolve("test", {})),
    ):
        assert worker.is_done(worker.call(call))
    assert not worker.sent(Barrier) + worker.sent(Rate) + worker.sent(Optimize)
    assert worker.is_done(worker.call(calls.EndReplay("kv")))
    worker.call(calls.StandAtBarrier("kv", None))
    assert worker.sent(Barrier) == [Barrier("kv", "", 0, True, 4, resumed=True)]
    worker.call(calls.SetRate("kv", 0.25))
    assert worker.sent(Rate)[-1].resumed


@pytest.mark.spec("R450")
def test_beats_say_how_many_steps_were_passed_over() -> None:
    worker = ready(1)
    replay(worker, SILENT, SILENT)
    said = []
    for call in (calls.PassOver("kv"), calls.PassOver("kv"), calls.EndReplay("kv")):
        assert worker.is_done(worker.call(call))
        worker.wait(1.0)
        said.append(worker.sent(Beat)[-1].replayed)
    assert said == [1, 2, 0]


@pytest.mark.spec("R394")
def test_without_rounds_its_barriers_are_counted() -> None:
    worker = ready(1, mode="async")
    replay(worker, SILENT, SILENT, **{"": 5})
    for _ in range(3):
        assert worker.is_done(worker.call(calls.StandAtBarrier("kv", None)))
    worker.call(calls.EndReplay("kv"))
    worker.call(calls.StandAtBarrier("kv", None))
    assert worker.sent(Barrier) == [Barrier("kv", "", 3, False, 0)]


@pytest.mark.spec("R393")
def test_replacement_that_owes_its_first_push_makes_all_calls_itself() -> None:
    worker = ready()
    worker.core.stores["kv"].barriers = {"": 1}
    optimizer = calls.SetOptimizer("kv", resolve("test", {}))
    worker.call(optimizer)
    for server in (0, 1):
        worker.server(server, Done(worker.seqs(Optimize, server)[-1]))
    place = replay(worker, *[HistoryIs(0, 2, 0, 1, 0, 0.5, 0, False)] * 2, owed=(0, 1))
    assert worker.sent(Resume) == [Resume("kv", None)]
    assert place == calls.Place(0, 1, is_replacement=True)
    worker.call(optimizer)
    assert worker.sent(Optimize)[-1].call == 2, "the second of this process is that of all others"
    worker.call(calls.StandAtBarrier("kv", None))
    assert worker.sent(Barrier) == [Barrier("kv", "", 1, True, 0)]


@pytest.mark.spec("R395")
def test_a_checkpoint_that_a_predecessor_asked_for_is_not_asked_for_again() -> None:
    worker = ready(1)
    replay(worker, SILENT, SILENT)
    worker.call(calls.EndReplay("kv"))
    ticket = worker.call(calls.TakeCheckpoint("kv", "best"))
    worker.scheduler(Released(worker.seqs(Barrier)[-1]))
    assert worker.sent(Checkpoint) == [Checkpoint("kv", "best", 0)]
    worker.scheduler(Checkpointed(worker.seqs(Checkpoint)[-1], 12))
    assert worker.finish(ticket).value == 12  # type: ignore[union-attr]


@pytest.mark.spec("R395")
def test_the_values_of_a_job_that_goes_on_are_not_those_of_a_checkpoint_again() -> None:
    worker = ready()
    place = replay(worker, *[HistoryIs(0, 0, 0, 0, 0, 0.0, 0, False, 7)] * 2)
    assert place.restored == 7
    assert worker.is_done(worker.call(calls.RestoreCheckpoint("kv", "")))
    assert not worker.sent(Revive)


class TestResume:
    def test_all_is_owed_of_a_key_that_is_not_there(self) -> None:
        worker = ready()
        ticket = worker.call(calls.TakePlace("kv", ("w", "new"), replays=False))
        (find,) = worker.sends(Find)
        worker.server(server_of(find), FoundAll(find.packet.envelope.seq, (Found(0, ()),)))
        for server in (0, 1):
            stood(worker, worker.seqs(Pull, server)[0], server, 3, owed=5)
        resumed(worker, replaced=False)
        assert worker.finish(ticket).value.owed == 0  # type: ignore[union-attr]

    def begin(
        self, worker: Bench, *known: HistoryIs, tells: bool = False, replaced: bool = True, **barriers: int
    ) -> int:
        """Take another's place, which owes push 4."""
        ticket = worker.call(calls.TakePlace("kv", ("w",), replays=False, tells=tells))
        for server in (0, 1):
            stood(worker, worker.seqs(Pull, server)[0], server, 4, owed=4)
        resumed(worker, *known, replaced=replaced, **barriers)
        return ticket

    @pytest.mark.spec("R646")
    @pytest.mark.parametrize(("tells", "replaced"), [(True, True), (True, False), (False, True)])
    def test_all_stores_know_the_step_that_a_replacement_is_told(self, tells: bool, replaced: bool) -> None:
        worker = ready(1)
        self.begin(worker, *[SILENT] * 2 * replaced, tells=tells, replaced=replaced)
        worker.open("other")
        assert {store.beginning.step for store in worker.core.stores.values()} == {4 * (tells and replaced)}

    @pytest.mark.spec("R647")
    def test_pushes_that_servers_do_not_apply_again_are_told_once(self) -> None:
        worker = ready(1)
        worker.init({"taken": torch.zeros(1), "new": torch.zeros(1)})
        self.begin(worker, SILENT, SILENT, tells=True)
        worker.call(push({"w": HOT, "taken": HOT[:1], "new": HOT[:1]}))
        for name, owed in (("taken", 6), ("new", 0)):
            (piece,) = worker.core.stores["kv"].key(name).pieces
            asked = zip(worker.sent(Pull, piece.server), worker.seqs(Pull, piece.server), strict=True)
            seq = {pull.chunk: seq for pull, seq in asked}[piece.chunk]
            worker.server(piece.server, Pulled(seq, piece.chunk, FLOAT, False, (Stand(0, 1, 6, owed),)))
        worker.call(push({"taken": HOT[:1]}))
        _, note = worker.notes()
        assert "Servers drop up to 6 of its next pushes of 'taken' of store 'kv'" in note
        assert {run.number for message in worker.sent(Push) for run in message.runs} == {0, 1, 4}

    @pytest.mark.spec("R647")
    @pytest.mark.parametrize("mode", ["sync", "async"])
    def test_script_that_never_resumes_is_told_at_its_first_dropped_push(self, mode: str) -> None:
        worker = self.replacement(mode)
        tickets = [worker.call(push({"w": HOT})) for _ in range(2)]
        assert {run.number for message in worker.sent(Push) for run in message.runs} == {1}
        for server in (0, 1):
            stood(worker, worker.seqs(Pull, server)[0], server, 9, owed=7 + server)
        assert {run.number for message in worker.sent(Push) for run in message.runs} == {0, 1}
        for server in (0, 1):
            worker.ack(server, *worker.seqs(Push, server))
        assert all(worker.is_done(ticket) for ticket in tickets)
        worker.call(push({"other": HOT}))
        (note,) = [note for note in worker.notes() if "drop" in note]
        assert "drop up to 7 of its next pushes of 'w' of store 'kv'" in note
        assert "call resume() of that store" in note
        assert len(worker.sent(Pull)) == 2, "no push asks once the log has told"

    @pytest.mark.spec("R647")
    def test_script_whose_pushes_all_count_is_told_nothing(self) -> None:
        worker = self.replacement("sync")
        worker.call(push({"w": HOT}))
        for server in (0, 1):
            stood(worker, worker.seqs(Pull, server)[0], server, 0, owed=0)
        worker.call(push({"w": HOT}))
        assert {run.number for message in worker.sent(Push) for run in message.runs} == {0, 1}
        assert not [note for note in worker.notes() if "drop" in note]

    @pytest.mark.spec("R647")
    def test_push_that_cannot_ask_is_numbered_again(self) -> None:
        worker = self.replacement("sync")
        ticket = worker.call(push({"w": HOT}))
        worker.server(0, Error(worker.seqs(Pull, 0)[0], KeyNotFound.code, "no such chunk"))
        assert isinstance(worker.error(ticket), KeyNotFound)
        assert worker.core.stores["kv"].key("w").is_refused

    @pytest.mark.spec("R647")
    def test_script_that_runs_again_asks_nothing_at_its_pushes(self) -> None:
        worker = self.replacement("sync")
        replay(worker, SILENT, SILENT)
        worker.call(push({"other": HOT}))
        assert len(worker.sent(Pull)) == 2
        assert worker.sent(Push)

    def replacement(self, mode: str) -> Bench:
        """Return a worker whose WELCOME says that it takes another's place."""
        worker = Bench(rank=1, replaces=True)
        worker.open(mode=mode)
        worker.init({"w": HOT, "other": HOT})
        if mode == "async":
            worker.core.stores["kv"].was_pushed_to = True
        return worker

    @pytest.mark.spec("R124")
    def test_a_barrier_behind_it_is_found_by_what_was_pushed_before(self) -> None:
        worker = ready(1)
        worker.core.stores["kv"].barriers = {"": 3, "epoch": 9}
        assert worker.is_done(self.begin(worker, *[HistoryIs(0, 0, 0, 0, 0, 0.0, 0, False)] * 2))
        worker.call(calls.StandAtBarrier("kv", None))
        assert worker.sent(Barrier)[-1] == Barrier("kv", "", 0, True, 4, resumed=True)
        worker.scheduler(Released(worker.seqs(Barrier)[-1]))  # its predecessor has that one behind it
        worker.call(calls.StandAtBarrier("kv", None))
        worker.scheduler(Released(worker.seqs(Barrier)[-1], 6))
        worker.call(calls.StandAtBarrier("kv", None))
        assert worker.sent(Barrier)[-1] == Barrier("kv", "", 7, True, 4, resumed=False)

    @pytest.mark.spec("R124")
    def test_without_rounds_barriers_go_on_behind_the_last(self) -> None:
        worker = ready(1, mode="async")
        nothing = HistoryIs(0, 0, 0, 0, 0, 0.0, 0, False)
        self.begin(worker, nothing, nothing, **{"": 5, "step 8": 1})
        assert worker.sent(Resume) == [Resume("kv", None)]
        worker.call(calls.StandAtBarrier("kv", None))
        assert worker.sent(Barrier)[-1] == Barrier("kv", "", 5, False, 0)
        worker.call(
            calls.StandAtBarrier("kv", "step 8")
        )  # its predecessor may have ended before or behind it
        assert worker.sent(Barrier)[-1] == Barrier("kv", "step 8", 0, False, 0)
        worker.call(calls.StandAtBarrier("kv", "new"))
        assert worker.sent(Barrier)[-1] == Barrier("kv", "new", 0, False, 0)

    @pytest.mark.spec("R125")
    def test_rank_0_makes_a_call_with_all_that_some_servers_heard(self) -> None:
        worker = ready()
        old, new = (HistoryIs(0, 1, 0, calls_, calls_, 0.25, 0, False) for calls_ in (3, 4))
        ticket = self.begin(worker, new, old)
        assert worker.sent(Rate) == [Rate("kv", 4, True, 0.25, 4)]
        assert [server_of(send) for send in worker.sends(Rate)] == [1]
        worker.server(1, Done(worker.seqs(Rate)[0]))
        assert worker.is_done(ticket)

    @pytest.mark.spec("R125")
    @pytest.mark.parametrize(("after", "number"), [(4, 2), (3, 3)])
    def test_rank_0_makes_the_same_call_again_or_the_next(self, after: int, number: int) -> None:
        worker = ready()
        self.begin(worker, *[HistoryIs(0, 1, after, 2, after, 0.5, 0, False)] * 2)
        rate = worker.call(calls.SetRate("kv", 0.25))
        assert worker.sent(Rate)[-1] == Rate("kv", number, True, 0.25, 4, resumed=False)
        for server in (0, 1):
            worker.server(server, Done(worker.seqs(Rate, server)[-1]))
        assert worker.is_done(rate)
        worker.call(calls.SetRate("kv", 0.125))
        assert worker.sent(Rate)[-1] == Rate("kv", number + 1, True, 0.125, 4, resumed=False)
        worker.call(calls.SetOptimizer("kv", resolve("test", {})))
        assert worker.sent(Optimize)[-1].call == 1 + (after < 4)

    @pytest.mark.spec("R125")
    def test_without_rounds_it_is_another_call_that_need_not_agree(self) -> None:
        worker = ready(mode="async")
        self.begin(worker, *[HistoryIs(0, 1, 0, 2, 0, 0.5, 0, False)] * 2)
        worker.call(calls.SetRate("kv", 0.25))
        assert worker.sent(Rate)[-1] == Rate("kv", 3, True, 0.25, 1, resumed=False)

    @pytest.mark.spec("R122", "R123")
    def test_resumed_worker_is_away_if_its_predecessor_was(self) -> None:
        worker = ready(1)
        ticket = self.begin(
            worker, HistoryIs(0, 0, 0, 0, 0, 0.0, 2, True), HistoryIs(0, 0, 0, 0, 0, 0.0, 1, True)
        )
        assert worker.sent(Join) == [Join("kv", 2, False)], "it may not have been heard of there"
        assert [server_of(send) for send in worker.sends(Join)] == [1]
        worker.server(1, Joined(worker.seqs(Join)[0], 0))
        assert worker.sent(Return) == [Return("kv", 2)]
        assert [server_of(send) for send in worker.sends(Return)] == [1]
        worker.server(1, Done(worker.seqs(Return)[0]))
        assert worker.is_done(ticket)
        assert "has joined" in str(worker.error(worker.call(push({"w": HOT}))))
        worker.call(calls.JoinStore("kv"))
        assert worker.sent(Join)[1:] == [Join("kv", 3, True), Join("kv", 3, False)]
