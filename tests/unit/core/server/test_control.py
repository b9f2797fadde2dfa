"""What each request of a worker does, and when it is answered."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvps.core.server.control import COUNTS_MAX, STATUS_MAX
from kvps.dtypes import BY_NAME
from kvps.errors import Mismatch
from kvps.protocol.envelope import Message
from kvps.protocol.membership import Beat, Done, Error, Probe, Probed
from kvps.protocol.stores import (
    Declare,
    Declared,
    Entry,
    Field,
    Find,
    Found,
    FoundAll,
    GetState,
    Norms,
    Piece,
    Place,
    Rate,
    SetState,
    StateIs,
    Status,
    StatusIs,
)
from kvps.protocol.values import Ack, Ask, Load, Pull, Pulled, Push, Receipt, Run
from kvps.tensors import from_frame
from tests.support.server_harness import Said, ServerStage, acked, heard, opening, optimizing, pulled, refusal


@pytest.fixture
def stage() -> ServerStage:
    """Two workers, one server, a sync store."""
    server = ServerStage(2)
    server.open()
    return server


def declaring(*keys: str, create: bool = False, call: int = 0, count: int = 2) -> Declare:
    return Declare("kv", create, call, tuple(Entry(key, 1, (count,), 0, count) for key in keys))


def to(said: list[Said], rank: int) -> list[Message]:
    return [effect.message for effect in said if effect.to == b"w%d" % rank]


# --- keys -------------------------------------------------------------------------------------------


@pytest.mark.spec("R43", "R44", "R46", "R48")
def test_worker_that_does_not_create_waits_for_the_value(stage: ServerStage) -> None:
    assert stage.say(1, declaring("a", "b"), seq=50) == []
    row = torch.zeros(2)
    (declared,) = heard(stage.declare("a", row), Declared)
    assert declared.places == (Place(True, (Piece(1, 0, 2),)),)
    stage.declare("b", row)
    assert to(stage.load("a", row), 1) == []
    places = (Place(False, (Piece(1, 0, 2),)), Place(False, (Piece(1, 2, 2),)))
    assert to(stage.load("b", row), 1) == [Declared(50, places, 2)]
    assert to(stage.say(1, declaring("b"), seq=51), 1) == [Declared(51, places[1:], 2)]


@pytest.mark.spec("R43", "R44", "R48")
def test_another_rank_creates_where_the_call_names_it(stage: ServerStage) -> None:
    entries = (Entry("a", 1, (2,), 0, 2),)
    assert stage.say(0, Declare("kv", False, 0, entries, 1), seq=50) == []
    (pending,) = heard(stage.say(0, Probe((50,))), Probed)[0].pending
    assert "rank 1" in pending.reason
    assert "has not loaded a value" in pending.reason
    assert "rank 0 may not create keys of rank 1" in refusal(stage.say(0, Declare("kv", True, 0, entries, 1)))
    stage.say(1, Declare("kv", True, 0, entries, 1))
    load = Load(1, 1, (Run(0, 2, 0),))
    assert "rank 0 may not load values of key 'a'; only rank 1 may" in refusal(
        stage.say(0, load, torch.ones(2))
    )
    said = stage.say(1, load, torch.ones(2))
    assert to(said, 0) == [Declared(50, (Place(False, (Piece(1, 0, 2),)),), 1)]


@pytest.mark.spec("R444")
def test_a_key_that_its_creator_has_not_made_when_it_leaves_is_refused(stage: ServerStage) -> None:
    stage.init("a", [1.0, 2.0])
    assert stage.say(1, declaring("a", "b"), seq=50) == []
    said = stage.show(w0="left")
    assert "KeyNotFound: rank 0 has left without giving key 'b' of store 'kv' a value" in refusal(said)
    assert len(heard(stage.say(1, declaring("a"), seq=51), Declared)) == 1


@pytest.mark.spec("R45")
def test_a_wrong_shape_is_told_to_who_asked_for_it_and_to_nobody_else(stage: ServerStage) -> None:
    stage.say(1, declaring("a", count=3), seq=50)
    stage.declare("a", torch.zeros(2))
    said = stage.load("a", torch.zeros(2))
    assert [type(item) for item in to(said, 0)] == [Ack]
    (error,) = to(said, 1)
    assert isinstance(error, Error)
    assert error.seq == 50
    assert "key 'a' of store 'kv' is float32[2] and cannot be initialised as float32[3]" in error.text
    assert heard(stage.say(1, Probe((50,))), Probed) == [Probed((50,), ())]


@pytest.mark.spec("R15")
def test_a_full_server_changes_nothing() -> None:
    stage = ServerStage(1, memory_limit=30)
    stage.open()
    stage.init("a", [1.0, 2.0])
    before = stage.snapshot()
    assert "Overload: no room for key 'b' and 1 more" in refusal(
        stage.say(0, declaring("b", "c", create=True))
    )
    assert stage.snapshot() == before


@pytest.mark.spec("R47")
def test_find_makes_nothing_and_waits_for_nothing(stage: ServerStage) -> None:
    stage.init("a", [1.0, 2.0])
    stage.declare("b", torch.zeros(1, dtype=torch.int8))
    said = stage.say(1, Find("kv", ("a", "b", "c")), seq=50)
    nothing = Found(0, ())
    assert to(said, 1) == [FoundAll(50, (Found(1, (2,)), nothing, nothing))]


@pytest.mark.spec("R55")
def test_another_element_type_than_the_chunks(stage: ServerStage) -> None:
    stage.init("a", [1.0, 2.0])
    double, before = BY_NAME["float64"].id, stage.snapshot()
    for message in (Push(1, double, (0,), 1.0, False, (Run(0, 2, 0),)), Load(1, double, (Run(0, 2, 0),))):
        said = stage.say(0, message, torch.zeros(2, dtype=torch.float64))
        assert "Mismatch: chunk 1 holds float32" in refusal(said)
        assert "float64" in refusal(said)
    assert stage.snapshot() == before


# --- broadcasts -------------------------------------------------------------------------------------


@pytest.mark.spec("R44", "R49")
def test_a_broadcast_is_waited_for_by_its_number(stage: ServerStage) -> None:
    stage.init("a", [1.0, 1.0])
    assert stage.say(1, declaring("a", call=1), seq=50) == []
    said = stage.declare("a", torch.zeros(2), call=1) + stage.load("a", torch.ones(2) * 5, call=1)
    assert [type(item) for item in to(said, 1)] == [Declared]
    assert acked(stage.load("a", torch.ones(2) * 9, call=1))
    assert stage.values("a") == [5, 5]


def early_pull(stage: ServerStage, start: int, size: int, seq: int, call: int = 1) -> list[Said]:
    return stage.say(1, Pull(1, True, (Ask(start, size, 0, 0),), call=call), seq=seq)


def part(stage: ServerStage, start: int, *values: float, call: int = 1) -> list[Said]:
    load = Load(1, 1, (Run(start, len(values), call),))
    return stage.say(0, load, torch.tensor(values))


@pytest.mark.spec("R223", "R224", "R225")
def test_a_broadcast_is_read_part_by_part_while_it_is_loaded(stage: ServerStage) -> None:
    stage.init("a", [1.0] * 6)
    early = replace(declaring("a", call=1, count=6), early=True)
    assert stage.say(1, early, seq=50) == []
    said = stage.declare("a", torch.zeros(6), call=1)
    assert to(said, 1) == [Declared(50, (Place(False, tuple(stage.pieces["a"])),), 2)]
    for seq, start in ((51, 0), (52, 2), (53, 4)):
        assert early_pull(stage, start, 2, seq) == []
    (probed,) = heard(stage.say(1, Probe((51, 53))), Probed)
    assert [request.seq for request in probed.pending] == [51, 53]
    assert "key 'a': rank 0" in probed.pending[0].reason
    assert "has not loaded all of its value" in probed.pending[0].reason
    assert part(stage, 2, 7.0) == [], "it belongs behind what is not there, and is asked for again"
    assert [packet.message for packet in part(stage, 0, 7.0)] == [Ack((Receipt(stage.seqs[0], 0),))]
    assert pulled(part(stage, 1, 8.0, 9.0)) == {51: [7, 8]}
    assert pulled(part(stage, 3, 10.0, 11.0, 12.0)) == {52: [9, 10], 53: [11, 12]}
    assert stage.values("a") == [7, 8, 9, 10, 11, 12]
    (said,) = early_pull(stage, 1, 3, 54)
    assert said.values() == [8, 9, 10], "of a value that is there"
    (said,) = stage.say(1, replace(early, early=False), seq=55)
    assert said.message == Declared(55, (Place(False, tuple(stage.pieces["a"])),), 2)


@pytest.mark.spec("R225")
def test_parts_of_two_lives_of_rank_0_are_never_one_answer(stage: ServerStage) -> None:
    stage.init("a", [1.0] * 4)
    stage.declare("a", torch.zeros(4), call=1)
    part(stage, 0, 2.0, 2.0)
    assert early_pull(stage, 0, 4, 50) == []
    stage.replace(0)
    stage.declare("a", torch.zeros(4), call=1)
    assert not heard(part(stage, 2, 3.0, 3.0), Pulled)
    assert not heard(part(stage, 0, 3.0, 3.0), Pulled)
    said = part(stage, 2, 3.0, 3.0)
    assert pulled(said) == {50: [3.0] * 4}


@pytest.mark.spec("R45", "R54")
def test_a_replaced_key_is_gone(stage: ServerStage) -> None:
    stage.init("a", [1.0, 1.0])
    stage.init("b", [1.0])
    stage.push(0, ["a", "b"], [1, 1, 1], 0)
    stage.pull(0, "a", after=1, seq=50)
    stage.pull(1, ["a", "b"], least=1, seq=51)
    stage.pull(0, ["a", "b"], after=1, seq=52)
    old = stage.pieces["a"]
    row = torch.zeros(3)
    said = stage.declare("a", row, call=1)
    assert [request.seq for request in heard(said, Error)] == [50, 51, 52]
    assert all(
        "key 'a' was replaced by another shape; read it again" in item.text for item in heard(said, Error)
    )
    stage.load("a", row, call=1)
    run = Run(old[0].start, old[0].size, 1)
    before = stage.snapshot()
    said = stage.say(0, Push(1, 1, (0,), 1.0, False, (run,)), torch.ones(2))
    assert "ProtocolError: chunk 1: 0 to 2 holds a key that was replaced" in refusal(said)
    assert stage.snapshot() == before
    assert stage.push(0, "a", [1, 1, 1], 0)
    assert stage.push(1, "a", [1, 1, 1], 0)
    assert stage.values("a") == [2, 2, 2]


def test_waiter_behind_a_replaced_key_gets_an_error_in_the_end(stage: ServerStage) -> None:
    stage.init("a", [0.0])
    stage.init("b", [0.0])
    stage.pull(1, ["a", "b"], least=1, seq=50)
    stage.push(0, "a", [1], 0)
    stage.push(1, "a", [1], 0)  # it waits at b now
    said = stage.declare("a", torch.zeros(3), call=1)
    assert said == [effect for effect in said if effect.to == b"w0"]
    stage.push(0, "b", [1], 0)
    said = stage.push(1, "b", [1], 0)
    assert [(request.seq, request.code) for request in heard(said, Error)] == [(50, 13)]


def test_repeated_pull_is_told_once_that_a_key_was_replaced(stage: ServerStage) -> None:
    stage.init("a", [0.0])
    for _ in range(2):
        stage.pull(1, "a", least=1, seq=50)
    (answer,) = to(stage.declare("a", torch.zeros(3), call=1), 1)
    assert isinstance(answer, Error)
    assert answer.seq == 50


# --- pushes and pulls -------------------------------------------------------------------------------


@pytest.mark.spec("R57")
def test_a_pushpull_is_acknowledged_and_answered_later(stage: ServerStage) -> None:
    stage.init("a", [0.0, 0.0])
    said = stage.push(0, "a", [1, 1], 0, pull=True, seq=50)
    assert [type(item) for item in to(said, 0)] == [Ack]
    said = stage.push(1, "a", [2, 2], 0, pull=True, seq=50)
    assert [type(item) for item in to(said, 0) + to(said, 1)] == [Pulled, Pulled]
    assert all(effect.values() == [3, 3] for effect in said)


@pytest.mark.spec("R52", "R57")
def test_a_pushpull_that_comes_again_is_answered_once(stage: ServerStage) -> None:
    stage.init("a", [0.0, 0.0])
    for _ in range(3):
        assert acked(stage.push(0, "a", [1, 1], 0, pull=True, seq=50)) == [50]
    assert [type(item) for item in to(stage.push(1, "a", [2, 2], 0), 0)] == [Pulled]
    said = stage.push(0, "a", [1, 1], 0, pull=True, seq=50)  # the answer was lost
    assert pulled(said) == {50: [3, 3]}


# --- the optimizer ----------------------------------------------------------------------------------


@pytest.mark.spec("R64")
def test_disagreeing_rank_gets_the_error_and_rank_0_does_not(stage: ServerStage) -> None:
    stage.say(1, optimizing("sgd", create=False, lr=0.25), seq=50)
    said = stage.say(0, optimizing("sgd", lr=0.5), seq=60)
    assert to(said, 0) == [Done(60)]
    assert [request.seq for request in heard(said, Error, b"w1")] == [50]


def test_a_repeated_set_is_done_once(stage: ServerStage) -> None:
    stage.optimizer("sgd", lr=0.5)
    stage.say(0, Rate("kv", 1, True, 0.25))
    for again in (optimizing("sgd", lr=0.5), Rate("kv", 1, True, 0.25)):
        assert heard(stage.say(0, again), Done)
    assert stage.server.context.stores["kv"].hyper.number("lr") == 0.25


@pytest.mark.spec("R15", "R63")
def test_an_optimizer_that_cannot_be_is_refused_and_may_be_set_rightly_then(stage: ServerStage) -> None:
    stage.init("n", torch.zeros(1, dtype=torch.int32))
    stage.push(0, "n", torch.ones(1, dtype=torch.int32), 0)
    before = stage.snapshot()
    assert "ConfigError" in refusal(stage.say(0, optimizing("sgd")))  # a round of integers is open
    good = optimizing("sgd")
    for name, numbers in (("os.system", {}), ("sgd", {"lr": -1.0}), ("sgd", {"__class__": 1.0})):
        bad = type(good)("kv", 1, True, name, numbers)
        assert "ConfigError" in refusal(stage.say(0, bad))
    assert stage.snapshot() == before
    stage.optimizer("test")


@pytest.mark.spec("R64")
def test_the_learning_rate(stage: ServerStage) -> None:
    stage.optimizer("sgd", lr=1.0)
    assert stage.say(1, Rate("kv", 1, False, 0.5), seq=50) == []
    said = stage.say(0, Rate("kv", 1, True, 0.5), seq=60)
    assert (to(said, 0), to(said, 1)) == ([Done(60)], [Done(50)])
    assert "Mismatch: rank 1 set learning rate 0.25, rank 0 set 0.5" in refusal(
        stage.say(1, Rate("kv", 1, False, 0.25))
    )
    stage.optimizer("sgd", call=2, lr=9.0)  # what rank 0 said in its call 1 stays what it said
    assert to(stage.say(1, Rate("kv", 1, False, 0.5, refused=1), seq=51), 1) == [Done(51)]
    assert "rank 1 may not set the learning rate" in refusal(stage.say(1, Rate("kv", 2, True, 1.0)))
    assert "ConfigError" in refusal(stage.say(0, Rate("kv", 2, True, -1.0)))
    assert heard(stage.say(0, Rate("kv", 2, True, 0.125)), Done)
    assert to(stage.say(1, Rate("kv", 1, False, 7.0, refused=1), seq=52), 1) == [Done(52)]


@pytest.mark.spec("R406")
@pytest.mark.parametrize("is_early", [True, False])
def test_a_rate_for_which_rank_0_is_too_late_is_refused(stage: ServerStage, is_early: bool) -> None:
    stage.init("a", [0.0])
    stage.optimizer("sgd", lr=1.0)
    asked = Rate("kv", 1, False, 0.5, after=0)
    said = [] if is_early else stage.say(1, asked, seq=50)
    assert said == []
    stage.push(0, "a", [1], 0)
    said = stage.say(1, asked, seq=50) if is_early else stage.say(1, Probe((50,)))
    (error,) = heard(said, Error, b"w1")
    assert (error.seq, error.code) == (50, Mismatch.code)
    assert error.text.startswith(
        "rank 1 set learning rate 0.5 after 0 rounds of store 'kv', and rank 0 has pushed for round 0 without setting it"
    )
    stage.push(1, "a", [1], 0)  # it may go on
    assert stage.values("a") == [-2.0]


@pytest.mark.spec("R406")
@pytest.mark.parametrize(
    "options",
    [{"mode": "async"}, {"quorum": 1, "grace_s": 60.0, "on_worker_lost": "shrink", "bundles": False}],
)
def test_without_rounds_of_all_a_rate_waits_on(options: dict[str, Any]) -> None:
    stage = ServerStage(workers=2)
    stage.open(**options)
    stage.init("a", [0.0])
    stage.optimizer("sgd", lr=1.0)
    stage.push(0, "a", [1], 0)
    assert stage.say(1, Rate("kv", 1, False, 0.5, after=0), seq=50) == []


@pytest.mark.spec("R65")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_learning_rate_without_an_optimizer(stage: ServerStage, rank: int) -> None:
    said = stage.say(rank, Rate("kv", 1, rank == 0, 0.5))
    assert "ConfigError: store 'kv' has no optimizer" in refusal(said)


# --- probes and status ------------------------------------------------------------------------------


@pytest.mark.spec("R40", "R438")
def test_a_probe_tells_what_is_missing_and_why_the_rest_waits(stage: ServerStage) -> None:
    stage.init("a", [0.0])
    stage.say(1, declaring("x"), seq=50)
    stage.say(1, declaring("y", "x", "z"), seq=51)
    stage.say(1, optimizing("sgd", create=False), seq=52)
    stage.push(1, "a", [1], 0)
    stage.pull(1, "a", after=1, seq=53)
    stage.optimizer("sgd", call=0 + 1)
    stage.say(1, Rate("kv", 1, False, 0.5), seq=54)
    (answer,) = heard(stage.say(1, Probe(tuple(range(49, 56))), seq=0), Probed)
    assert answer.missing == (49, 52, 55)
    assert dict(answer.pending) == {
        50: "key 'x': rank 0 (alive, last request 0 s ago) has not loaded a value",
        51: "key 'y' and 2 more: rank 0 (alive, last request 0 s ago) has not loaded a value",
        53: "key 'a': round 0 waits for a push of rank 0 (alive, last request 0 s ago)",
        54: "rank 0 (alive, last request 0 s ago) has not set the learning rate",
    }
    assert answer.for_workers == (50, 51, 53, 54)


def test_reasons_of_stores_without_rounds() -> None:
    stage = ServerStage(2)
    stage.open("ssp", staleness=1)
    stage.init("a", [0.0])
    stage.optimizer("test")
    stage.push(1, "a", [1], 0)
    for number in range(3):
        stage.push(0, "a", [1], number)
    stage.pull(0, "a", after=3, seq=50)
    stage.pull(0, "a", after=5, seq=51)
    stage.pull(0, "a", least=9, seq=52)
    reasons = dict(heard(stage.say(0, Probe((50, 51, 52))), Probed)[0].pending)
    assert reasons == {
        50: "key 'a': rank 0 is 2 pushes ahead of rank 1 (alive, last request 0 s ago), and staleness allows 1",
        51: "key 'a': 3 of 5 pushes of rank 0 are applied",
        52: "key 'a': it is at version 4, and version 9 was requested",
    }


@pytest.mark.spec("R68")
def test_status_names_the_oldest_round_of_each_key(stage: ServerStage) -> None:
    stage.init("a", [0.0])
    stage.init("b", [0.0])
    stage.declare("nothing", torch.zeros(0), shape=(0,))
    stage.push(0, "a", [1], 0)
    stage.now += 7
    stage.push(0, "a", [1], 1)
    (answer,) = heard(stage.say(1, Status("kv")), StatusIs)
    assert answer.rounds == (("a", 0, (1,), 7.0),)
    assert answer.clocks == (("a", {"0": 2}), ("b", {}))


def test_a_status_fits_into_a_message() -> None:
    workers = 64
    stage = ServerStage(workers)
    stage.open()
    keys = STATUS_MAX + 10
    entries = tuple(Entry(f"k{index}", 1, (1,), 0, 1) for index in range(keys))
    stage.say(0, Declare("kv", True, 0, entries[:1000]))
    stage.say(0, Declare("kv", True, 0, entries[1000:]))
    stage.load("", torch.zeros(keys), pieces=[Piece(1, 0, keys)])
    (answer,) = heard(stage.say(0, Status("kv")), StatusIs)
    assert (len(answer.clocks), len(answer.rounds)) == (STATUS_MAX, 0)
    run = (Run(0, keys, 0),)
    for rank in range(workers - 1):
        stage.say(rank, Push(1, 1, (rank,), 1.0, False, run), torch.zeros(keys))
    (answer,) = heard(stage.say(0, Status("kv")), StatusIs)
    assert (len(answer.clocks), len(answer.rounds)) == (COUNTS_MAX // 63, STATUS_MAX)


# --- the optimizer's state --------------------------------------------------------------------------


@pytest.mark.spec("R67")
@pytest.mark.parametrize(
    ("rule", "numbers", "dtype"),
    [
        ("adam", {}, torch.float32),
        ("sgd", {"momentum": 0.9, "multi_precision": True}, torch.float16),
        ("dcasgd", {"momentum": 0.5}, torch.float32),
        ("dcasgd", {"multi_precision": True}, torch.bfloat16),
        ("sgd", {}, torch.float32),
    ],
)
def test_a_state_goes_to_another_server_and_training_goes_on(rule, numbers, dtype) -> None:
    def make() -> ServerStage:
        stage = ServerStage(2)
        stage.open("async")
        stage.init("other", torch.ones(3, dtype=dtype))
        stage.init("w", torch.ones(2, dtype=dtype))
        stage.optimizer(rule, lr=0.1, **numbers)
        return stage

    def train(stage: ServerStage, numbers: range) -> None:
        for number in numbers:
            stage.push(0, "w", torch.tensor([1.0, 2.0], dtype=dtype), number)
            stage.pull(1, "w")

    first, second = make(), make()
    train(first, range(5))
    (said,) = first.say(0, GetState(1, 3, 2))
    state = said.message
    assert isinstance(state, StateIs)
    rows = [
        from_frame(frame, next(n for n, d in BY_NAME.items() if d.id == array.dtype))
        for array, frame in zip(state.fields, said.payload, strict=True)
    ]
    # The weights travel by themselves.
    second.init("w", torch.tensor(first.values("w"), dtype=dtype), call=1)
    set_state = SetState(1, 3, 2, state.step, state.fields)
    assert heard(second.say(0, set_state, *rows), Done)
    train(first, range(5, 8))
    train(second, range(3))
    assert first.values("w") == second.values("w")
    assert second.values("other") == [1, 1, 1]


@pytest.mark.spec("R15", "R67")
def test_a_foreign_state_is_refused_as_a_whole(stage: ServerStage) -> None:
    stage.init("a", [0.0, 0.0])
    row = torch.ones(2)
    good = Field("exp_avg", 1, 2)
    wrong = {
        "another name": [good, Field("velocity", 1, 2)],
        "another type": [good, Field("exp_avg_sq", 2, 2)],
        "another size": [good, Field("exp_avg_sq", 1, 1)],
    }
    no_optimizer = refusal(stage.say(0, SetState(1, 0, 2, 3, (good,)), row))
    assert "ConfigError: store 'kv' has no optimizer" in no_optimizer
    stage.optimizer("adam")
    before = stage.snapshot()
    for what, fields in wrong.items():
        rows = [row, {1: torch.ones(fields[1].size), 2: row.double()}[fields[1].dtype]]
        said = stage.say(0, SetState(1, 0, 2, 3, tuple(fields)), *rows)
        assert "Mismatch: optimizer 'adam' has no state" in refusal(said), what
    for start, size in ((0, 1), (0, 0), (1, 5)):
        assert "ProtocolError" in refusal(stage.say(0, SetState(1, start, size, 3, ())))
        assert "ProtocolError" in refusal(stage.say(0, GetState(1, start, size)))
    assert stage.snapshot() == before


def test_a_key_that_was_never_pushed_has_no_state(stage: ServerStage) -> None:
    stage.init("a", [0.0, 0.0])
    assert to(stage.say(0, GetState(1, 0, 2), seq=50), 0) == [StateIs(50, 0, ())]


# --- bad requests -----------------------------------------------------------------------------------

BAD: dict[str, tuple[Message, int]] = {
    "push: no chunk": (Push(9, 1, (0,), 1.0, False, (Run(0, 2, 0),)), 2),
    "push: no elements": (Push(1, 1, (0,), 1.0, True, ()), 0),
    "push: no rank": (Push(1, 1, (), 1.0, False, (Run(0, 2, 0),)), 2),
    "push: rank 2 of 2": (Push(1, 1, (0, 2), 1.0, False, (Run(0, 2, 0),)), 2),
    "push: a key cut": (Push(1, 1, (0,), 1.0, False, (Run(0, 1, 0),)), 1),
    "push: no key there": (Push(1, 1, (0,), 1.0, False, (Run(0, 2, 0), Run(500, 2, 0))), 4),
    "push: a key twice": (Push(1, 1, (0,), 1.0, False, (Run(0, 2, 0), Run(0, 2, 0))), 4),
    "push: overlapping": (Push(1, 1, (0,), 1.0, False, (Run(0, 3, 0), Run(2, 1, 0))), 4),
    "pull: no chunk": (Pull(0, True, (Ask(0, 2, 0, 0),)), -1),
    "pull: no elements": (Pull(1, True, ()), -1),
    "pull: nothing": (Pull(1, True, (Ask(0, 0, 0, 0),)), -1),
    "pull: 4 GiB": (Pull(1, True, (Ask(0, 3, 0, 0),) * 4096), -1),
    "load: no chunk": (Load(9, 1, (Run(0, 2, 0),)), 2),
    "load: no elements": (Load(1, 1, ()), 0),
    "load: undeclared": (Load(1, 1, (Run(0, 2, 1),)), 2),
    "declare: no store": (Declare("other", True, 0, (Entry("k", 1, (2,), 0, 2),)), -1),
    "declare: another shape": (Declare("kv", True, 0, (Entry("a", 1, (3,), 0, 3),)), -1),
    "declare: a part": (Declare("kv", True, 0, (Entry("a", 1, (2,), 1, 1),)), -1),
    "declare: twice": (Declare("kv", True, 0, (Entry("k", 1, (2,), 0, 2),) * 2), -1),
    "open: another mode": (opening("async"), -1),
    "open: no mode": (opening("sometimes", store="new"), -1),
    "find: no store": (Find("other", ("a",)), -1),
    "status: no store": (Status("other"), -1),
    "optimize: no store": (optimizing("sgd", store="other"), -1),
    "rate: no store": (Rate("other", 1, True, 0.1), -1),
    "state: no chunk": (GetState(9, 0, 2), -1),
    "set state: no chunk": (SetState(9, 0, 2, 1, ()), -1),
    "a message for others": (Beat(1), -1),
    "norms of a worker": (Norms("kv", "a", None, 0, (1.0,), True), -1),
}


@pytest.mark.spec("R15", "R16", "R54")
@pytest.mark.parametrize("what", BAD)
def test_impossible_request_is_refused_and_changes_nothing(what: str, stage: ServerStage) -> None:
    stage.init("a", [1.0, 2.0])
    stage.init("b", [3.0])
    stage.push(0, "a", [1, 1], 0)
    stage.pull(0, "a", after=1, seq=900)
    message, elements = BAD[what]
    before = stage.snapshot()
    said = stage.say(0, message, *([torch.ones(elements)] if elements >= 0 else []), seq=901)
    assert isinstance(said[0].message, Error)
    assert said[0].message.seq == 901
    assert refusal(said)
    assert stage.snapshot() == before
    assert pulled(stage.push(1, "a", [1, 1], 0)) == {900: [2, 2]}
