"""A call of all ranks that cannot be done for one of them has one answer for all."""

import pytest
import torch

from kvps.core import refusals
from kvps.core.optim.hyperparams import resolve
from kvps.core.refusals import Attempt, RefusedCalls
from kvps.core.scheduler.barriers import Barriers, RoutedMessage, Waiter
from kvps.core.worker import calls
from kvps.dtypes import BY_NAME, Spec
from kvps.errors import ConfigError, KvpsError, Mismatch, Overload, ProtocolError, StorageError
from kvps.protocol.envelope import Message
from kvps.protocol.membership import Barrier, Done, Error, Released
from kvps.protocol.stores import Declare, Declared, Entry, Optimize, Rate
from tests.support.server_harness import Said, ServerStage, heard, optimizing
from tests.support.worker_harness import Bench

FLOAT = BY_NAME["float32"].id


class TestKept:
    def test_only_so_many_are_kept(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(refusals, "KEPT_MAX", 2)
        kept = RefusedCalls()
        for key in ("a", "b", "a", "c"):
            kept.keep(key, Attempt(0, 0), Overload(key))
        kept.check("b", Attempt(0, 0))
        for key in ("a", "c"):
            with pytest.raises(Overload):
                kept.check(key, Attempt(0, 0))


# --- the scheduler ----------------------------------------------------------------------------------


class Desk:
    """The barriers of three ranks."""

    def __init__(self) -> None:
        self.barriers = Barriers(range(3))
        self.seq = 0

    def stand(
        self,
        rank: int,
        what: str = "",
        number: int = 0,
        refused: int = 0,
        failure: KvpsError | None = None,
        resumed: bool = False,
        waits: bool = True,
    ) -> list[tuple[str, str]]:
        """Return who is told what."""
        self.seq += 1
        code, text = (0, "") if failure is None else (failure.code, str(failure))
        at = Barrier("kv", "b", number, waits, number, resumed, what, code, text, refused)
        said = self.barriers.stand(rank, Waiter(f"w{rank}", self.seq), at)
        self.barriers.check({0, 1, 2})
        return [(str(effect.route), _text(effect)) for effect in said]


def _text(answer: RoutedMessage) -> str:
    return answer.message.text if isinstance(answer.message, Error) else "released"


ALL = [("w0", "released"), ("w1", "released"), ("w2", "released")]


class TestBarrier:
    @pytest.mark.spec("R228")
    @pytest.mark.spec("R230")
    def test_different_calls_are_told_to_all_and_to_who_comes_later(self) -> None:
        desk = Desk()
        assert desk.stand(0, "restore('a')") == []
        first, second = desk.stand(1, "restore('b')")
        assert (first[0], second[0]) == ("w0", "w1") or (first[0], second[0]) == ("w1", "w0")
        assert first[1] == second[1]
        assert "worker 1 called restore('b'), and worker 0 called restore('a')" in first[1]
        assert desk.stand(2, "restore('a')") == [("w2", first[1])]
        assert desk.stand(2, "restore('a')") == [("w2", first[1])]  # its answer was lost
        for rank in (2, 0):
            assert desk.stand(rank, "restore('a')", refused=1) == []
        assert sorted(desk.stand(1, "restore('a')", refused=1)) == ALL
        assert not desk.barriers.refused

    @pytest.mark.spec("R228")
    def test_barrier_without_a_call_stands_with_all(self) -> None:
        desk = Desk()
        desk.stand(0, "restore('a')")
        desk.stand(1)
        assert sorted(desk.stand(2, "restore('a')")) == ALL

    @pytest.mark.spec("R230")
    def test_failed_rank_may_arrive_behind_a_passed_barrier(self) -> None:
        desk = Desk()
        for rank in (0, 1, 2):
            desk.stand(rank, waits=False)
        no = StorageError("no")
        assert desk.stand(1, number=1, failure=no, waits=False) == [("w1", "no")]
        assert desk.stand(0, number=1, waits=False) == [("w0", "no")]
        assert desk.stand(0, waits=False) == [("w0", "released")]

    @pytest.mark.spec("R229")
    def test_resumed_rank_without_the_number_is_answered_alone(self) -> None:
        desk = Desk()
        assert desk.stand(1, failure=StorageError("no"), resumed=True) == [("w1", "no")]
        assert not desk.barriers.refused

    @pytest.mark.spec("R229")
    @pytest.mark.parametrize("code", [7, 99])
    def test_no_worker_ends_the_others(self, code: int) -> None:
        """ERROR Fenced would."""
        barriers = Barriers(range(2))
        barriers.stand(0, Waiter("w0", 1), Barrier("kv", "b", 0))
        with pytest.raises(ProtocolError, match=f"code {code}"):
            barriers.stand(1, Waiter("w1", 1), Barrier("kv", "b", 0, code=code))
        assert barriers.stand(1, Waiter("w1", 2), Barrier("kv", "b", 0)) == [
            RoutedMessage("w0", Released(1)),
            RoutedMessage("w1", Released(2)),
        ]


# --- a server -----------------------------------------------------------------------------------------


def stage(**options: object) -> ServerStage:
    server = ServerStage(workers=3, **options)  # type: ignore[arg-type]
    server.open()
    return server


def errors(said: list[Said]) -> list[tuple[object, str]]:
    return [(effect.to, effect.message.text) for effect in said if isinstance(effect.message, Error)]


def declare(count: int, create: bool = False, refused: int = 0, key: str = "w") -> Declare:
    return Declare("kv", create, 0, (Entry(key, FLOAT, (count,), 0, count),), 0, refused)


class TestServer:
    @pytest.mark.spec("R231")
    def test_keys_for_which_there_is_no_room(self) -> None:
        server = stage(memory_limit=400)
        server.init("there", [1.0])
        assert server.say(1, declare(1000)) == []
        told = errors(server.say(0, declare(1000, create=True)))
        assert {to for to, _ in told} == {b"w0", b"w1"}
        assert len({text for _, text in told}) == 1
        assert "no room for key 'w'" in told[0][1]
        assert [to for to, _ in errors(server.say(2, declare(1000)))] == [b"w2"]
        assert server.say(1, declare(10, refused=1)) == []
        assert heard(server.say(2, declare(1, key="there")), Declared)
        server.init("w", torch.zeros(10))
        assert heard(server.say(2, declare(10)), Declared)  # the key is there: it may be looked up

    def setting(self, create: bool, refused: int = 0, **numbers: object) -> Message:
        made = optimizing("sgd", 1, create, **numbers)
        return Optimize(made.store, made.call, create, made.name, made.numbers, {}, {}, refused=refused)

    @pytest.mark.spec("R231")
    def test_an_optimizer_that_cannot_be(self) -> None:
        server = stage()
        assert server.say(1, self.setting(create=False, lr=0.1)) == []
        told = errors(server.say(0, Optimize("kv", 1, True, "nobody", {"lr": 0.1})))
        assert {to for to, _ in told} == {b"w0", b"w1"}
        assert [to for to, _ in errors(server.say(2, self.setting(create=False, lr=0.1)))] == [b"w2"]
        assert server.say(1, self.setting(create=False, refused=1, lr=0.1)) == []
        said = server.say(0, self.setting(create=True, refused=1, lr=0.1))
        assert len(heard(said, Done)) == 2

    @pytest.mark.spec("R231")
    def test_ranks_that_differ_in_the_optimizer_or_its_rate(self) -> None:
        server = stage()
        server.say(0, self.setting(create=True, lr=0.1))
        ((_, text),) = errors(server.say(1, self.setting(create=False, lr=0.2)))
        assert errors(server.say(2, self.setting(create=False, lr=0.1))) == [(b"w2", text)]
        assert heard(server.say(2, self.setting(create=False, refused=1, lr=0.1)), Done)
        server.say(0, Rate("kv", 1, True, 0.5))
        ((_, text),) = errors(server.say(1, Rate("kv", 1, False, 0.25)))
        assert errors(server.say(2, Rate("kv", 1, False, 0.5))) == [(b"w2", text)]
        assert heard(server.say(2, Rate("kv", 1, False, 0.5, refused=1)), Done)


# --- a worker -----------------------------------------------------------------------------------------


class TestWorker:
    def refuse(self, worker: Bench, kind: type[Message], error: KvpsError) -> None:
        """Every server refuses the last request of this kind."""
        for server in (0, 1):
            if seqs := worker.seqs(kind, server):
                worker.server(server, Error(seqs[-1], error.code, str(error)))

    def test_each_call_says_how_often_it_was_refused(self) -> None:
        worker = Bench(rank=1)
        worker.open()
        for turn in range(3):
            keys = (("w", Spec("float32", (3,))),)
            ticket = worker.call(calls.Init("kv", keys, (torch.zeros(3),), 0))
            assert worker.sent(Declare)[-1].refused == turn
            self.refuse(worker, Declare, Overload("no room"))
            assert isinstance(worker.error(ticket), Overload)
        for turn in range(3):
            ticket = worker.call(calls.SetOptimizer("kv", resolve("sgd", {"lr": 0.1})))
            assert (worker.sent(Optimize)[-1].call, worker.sent(Optimize)[-1].refused) == (1, turn)
            self.refuse(worker, Optimize, Mismatch("differs"))
            assert isinstance(worker.error(ticket), Mismatch)
        for turn in range(3):
            ticket = worker.call(calls.SetRate("kv", 0.1))
            assert (worker.sent(Rate)[-1].call, worker.sent(Rate)[-1].refused) == (1, turn)
            self.refuse(worker, Rate, ConfigError("no optimizer"))
            assert isinstance(worker.error(ticket), ConfigError)
        for turn in range(3):
            ticket = worker.call(calls.StandAtBarrier("kv", "b", StorageError("no file") if turn else None))
            sent = worker.sent(Barrier)[-1]
            assert (sent.number, sent.refused) == (0, turn)
            assert (sent.code, sent.text) == ((15, "no file") if turn else (0, ""))
            worker.scheduler(Error(worker.seqs(Barrier)[-1], StorageError.code, "no file"))
            assert isinstance(worker.error(ticket), StorageError)
