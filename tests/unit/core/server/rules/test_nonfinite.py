"""What a server does with NaN and infinity: it updates what is finite, and leaves the rest as it is."""

import pytest
import torch

from kvps.core.server import options
from kvps.core.server.rules import book, whole_tensor
from kvps.protocol.membership import Error
from kvps.protocol.stores import Open, Piece, Status, StatusIs
from kvps.protocol.values import Ask, Dropped, Pull, Pulled, Push, Run
from tests.support.server_harness import ServerStage, acked, heard, opening, optimizing, pulled, refusal

NAN, INF = float("nan"), float("inf")
ABC = ["a", "b", "c"]


def stage(
    workers: int = 2,
    mode: str = "sync",
    optimizer: str = "test",
    action: str = "error",
    dtype: torch.dtype = torch.float32,
    **options: object,
) -> ServerStage:
    """A store with keys a (2 elements), b (1) and c (3), all ones, side by side."""
    server = ServerStage(workers)
    server.open(mode, on_nonfinite=action, **options)
    for key, count in (("a", 2), ("b", 1), ("c", 3)):
        server.init(key, torch.ones(count, dtype=dtype))
    if optimizer:
        server.optimizer(optimizer)
    return server


def notes(server: ServerStage) -> list[str]:
    return [note.text for note in server.notes if hasattr(note, "text") and "dropped" in note.text]


def dropped(server: ServerStage, rank: int, keys: str | list[str], **conditions: int) -> list[Dropped]:
    (answer,) = heard(server.pull(rank, keys, **conditions), Pulled)
    return list(answer.dropped)


def bad(value: float = NAN) -> torch.Tensor:
    """A gradient of ones for all keys; that of b is not finite."""
    return torch.tensor([1, 1, value, 1, 1, 1])


@pytest.mark.spec("R101")
def test_an_action_that_is_none_is_refused() -> None:
    server = ServerStage(2)
    said = refusal(server.say(0, opening(on_nonfinite="ignore")))
    assert "ConfigError: store 'kv': on_nonfinite 'ignore' must be one of apply, skip, err" in said


@pytest.mark.spec("R42")
def test_workers_must_agree_on_it() -> None:
    server = stage()
    said = refusal(server.say(1, opening(on_nonfinite="skip")))
    assert "Mismatch: store 'kv' was opened with on_nonfinite='error', and is now" in said


def test_nonfinite_values_are_applied_by_default() -> None:
    assert Open("kv", "sync", 0, False, "wait", 1).on_nonfinite == "apply"
    server = stage(1, action="apply")
    server.push(0, ABC, bad(), 0)
    assert server.values("a") == [2, 2]
    assert server.values("b") != server.values("b")  # it is NaN
    assert notes(server) == []


# --- rounds -----------------------------------------------------------------------------------------


@pytest.mark.spec("R102", "R103")
@pytest.mark.parametrize("optimizer", ["test", "adam", "lars", ""])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("action", ["skip", "error"])
def test_finite_keys_are_applied_and_the_rest_left(action: str, value: float, optimizer: str) -> None:
    """All weights and states are those of a store that never got the round of b."""
    first, other = (stage(2, optimizer=optimizer, action=action) for _ in range(2))
    for number in range(3):
        first.push(0, ABC, torch.ones(6), number)
        first.push(1, ABC, bad(value) if number == 1 else torch.ones(6), number)
        for rank in (0, 1):
            other.push(rank, ["a", "c"], torch.ones(5), number)
            if number != 1:
                other.push(rank, "b", [1], number - (number > 1))
    for key in ABC:
        assert first.values(key) == other.values(key)
        assert (first.span(key).version, other.span(key).version) == (3, 3 - (key == "b"))
        assert first.span(key).step == other.span(key).step
    state, expected = first.chunk().state or {}, other.chunk().state or {}
    assert {n: t[:6].tolist() for n, t in state.items()} == {n: t[:6].tolist() for n, t in expected.items()}
    assert notes(first) == ["store 'kv': round 1 dropped: 1 value of key 'b' is not finite (from rank 1)"]


def test_the_last_block_is_looked_at_before_the_first_is_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(book, "BLOCK_COUNT", 10)
    server = ServerStage(2)
    server.open("sync", on_nonfinite="skip")
    server.init("w", torch.zeros(95))
    server.optimizer("test")
    for number, at in enumerate((94, 0, None)):
        row = torch.ones(95)
        if at is not None:
            row[at] = NAN
        server.push(0, "w", row, number)
        server.push(1, "w", torch.ones(95), number)
        assert server.values("w") == [0.0 if at is not None else 2.0] * 95


@pytest.mark.spec("R102", "R103")
def test_several_rounds_that_close_at_once() -> None:
    """The first is cut on the way, and each of its parts closes the others."""
    server = stage(2, on_worker_lost="shrink")
    for number in range(3):
        server.push(0, ABC, bad() if number == 0 else torch.ones(6), number)
    server.show(w1="lost")
    assert [server.span(key).version for key in ABC] == [3, 3, 3]
    assert [server.values(key) for key in ABC] == [[4, 4], [3], [4, 4, 4]]


@pytest.mark.spec("R102")
def test_the_parts_of_a_span_that_shrinks_close_their_later_rounds() -> None:
    """A loss closes several rounds of one span at once, the first of which cuts it."""
    server = stage(2, on_worker_lost="shrink")
    whole = (Run(0, 6, 0), Run(0, 6, 1), Run(0, 6, 2))
    for run in whole:
        row = bad() if run.number == 0 else torch.ones(6)
        server.say(0, Push(server.chunk().number, 1, (0,), 1.0, False, (run,)), row)
    assert [(span.start, span.stop) for span in server.chunk().spans] == [(0, 6)]
    server.show(w1="lost")
    assert [server.span(key).version for key in ABC] == [3, 3, 3]
    assert [server.values(key) for key in ABC] == [[4, 4], [3], [4, 4, 4]]
    assert sorted(server.span(key).step for key in ABC) == [2, 3, 3]


@pytest.mark.spec("R102")
@pytest.mark.parametrize("lent", [False, True])
def test_rates_of_single_keys_hold_for_what_is_looked_at(lent: bool) -> None:
    server = stage(2)
    server.say(0, optimizing("sgd", call=2, lr=1.0, lr_mult={"b": 10.0}))
    for number in (0, 1):
        for rank in (0, 1):
            run = (Run(0, 6, number),)
            row = bad() if number == rank == 1 else torch.arange(6.0)
            server.say(rank, Push(server.chunk().number, 1, (rank,), 1.0, False, run), row, lent=lent)
    assert [server.values(key) for key in ABC] == [[0, -3], [-39], [-9, -12, -15]]


def test_64_rounds_may_be_open_and_who_waits_is_answered() -> None:
    server = stage(2)
    for number in range(3):
        server.push(0, "b", [INF if number == 1 else 1], number)
        server.pull(0, "b", after=number + 1, seq=50 + number)
    answers = [pulled(server.push(1, "b", [1], number)) for number in range(3)]
    assert answers == [{50: [3.0]}, {51: [3.0]}, {52: [5.0]}]


# --- element types ----------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["sgd", ""])
def test_a_sum_of_halves_is_looked_at_as_it_is_used(optimizer: str) -> None:
    """60000 + 60000 is a number for an optimizer, in float32, and none for a float16."""
    server = stage(2, optimizer="", dtype=torch.float16)
    if optimizer:
        server.optimizer(optimizer, lr=1, rescale_grad=2**-10)
    for rank in (0, 1):
        server.push(rank, "b", torch.tensor([60000.0], dtype=torch.float16), 0)
    if optimizer:
        assert notes(server) == []
        assert server.values("b") == [pytest.approx(1 - 120000 / 2**10, rel=1e-3)]
    else:
        assert "(every push is finite, but their sum is not)" in notes(server)[0]
        assert server.values("b") == [1]
    assert server.span("b").version == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_every_float_type_is_looked_at(dtype: torch.dtype) -> None:
    server = stage(1, dtype=dtype)
    server.push(0, ABC, bad().to(dtype), 0)
    assert [server.values(key) for key in ABC] == [[2, 2], [1], [2, 2, 2]]


@pytest.mark.spec("R104")
def test_integers_are_finite_and_never_make_a_detour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_tensor, "count_nonfinite", None)
    server = ServerStage(1, servers=2)
    server.open("sync", on_nonfinite="error", bigarray_bound=1)
    row = torch.full((6,), 2**31 - 1, dtype=torch.int32)
    server.declare("n", row, shape=(12,))
    server.load("n", row)
    server.push(0, "n", row, 0)
    assert server.span("n").version == 1


# --- keys of several pieces on one server -------------------------------------------------------------


def cut(workers: int = 1, mode: str = "sync", optimizer: str = "test") -> ServerStage:
    """A key of three pieces, each in a chunk of its own, and a small one."""
    server = ServerStage(workers)
    server.open(mode, on_nonfinite="error", chunk_bytes=options.CHUNK_BYTES_MIN)
    server.init("big", torch.zeros(3 << 14))
    server.init("small", torch.zeros(3))
    server.optimizer(optimizer)
    assert len(server.pieces["big"]) == 3
    return server


def push_piece(server: ServerStage, index: int, number: int, value: float, rank: int = 0):  # type: ignore[no-untyped-def]
    piece = server.pieces["big"][index]
    row = torch.ones(piece.size)
    row[index] = value
    run = (Run(piece.start, piece.size, number),)
    return server.say(rank, Push(piece.chunk, 1, (rank,), 1.0, False, run), row)


def versions(server: ServerStage) -> list[int]:
    return [server.chunk(piece.chunk).spans[0].version for piece in server.pieces["big"]]


@pytest.mark.spec("R104")
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_no_piece_is_updated_before_all_are_known(mode: str) -> None:
    server = cut(mode=mode)
    for index in (2, 0):
        assert acked(push_piece(server, index, 0, 1))
        assert versions(server) == [0, 0, 0]
    push_piece(server, 1, 0, 1)
    assert versions(server) == [1, 1, 1]
    for index in (0, 1, 2):
        push_piece(server, index, 1, INF if index == 1 else 1)
    assert versions(server) == ([2, 2, 2] if mode == "sync" else [1, 1, 1])
    assert set(server.values("big")) == {1.0}
    whose = "round 1" if mode == "sync" else "push 1 of rank 0"
    assert notes(server) == [f"store 'kv': {whose} dropped: 1 value of key 'big' is not finite (from rank 0)"]
    for piece in server.pieces["big"]:
        (answer,) = heard(server.say(0, ask(piece)), Pulled)
        assert answer.dropped == (Dropped(0, 1, 1, (0,)),)


def ask(piece: Piece) -> Pull:

    return Pull(piece.chunk, True, (Ask(piece.start, piece.size, 2, 0),))


@pytest.mark.spec("R105")
def test_64_pushes_may_wait_and_no_more() -> None:
    server = cut(mode="async")
    for number in range(64):
        assert acked(push_piece(server, 0, number, 1))
    assert push_piece(server, 0, 64, 1) == []
    for index in (1, 2):
        push_piece(server, index, 0, 1)
    assert acked(push_piece(server, 0, 64, 1))


# --- to tell ------------------------------------------------------------------------------------------


@pytest.mark.spec("R106")
def test_every_answer_with_values_tells_the_last_drop_of_each_key() -> None:
    server = stage(2)
    answers: list[Pulled] = []
    for number in range(3):
        for rank in (0, 1):
            row = bad() if (number, rank) in ((0, 0), (1, 1)) else torch.ones(6)
            answers += heard(server.push(rank, ABC, row, number, pull=True), Pulled)
    assert [[drop.number for drop in answer.dropped] for answer in answers] == [[0]] * 2 + [[1]] * 4
    for _ in range(2):  # one that was lost is given again
        assert dropped(server, 0, ABC, after=3) == [Dropped(2, 1, 1, (1,))]
    assert dropped(server, 0, ["a", "c"], after=3) == []
    assert dropped(server, 0, "b", after=3, values=False) == []


@pytest.mark.spec("R68")
def test_status_counts_them() -> None:
    server = stage(1)
    for number in range(3):
        server.push(0, ABC, bad() if number else torch.full((6,), NAN), number)
    (answer,) = heard(server.say(0, Status("kv")), StatusIs)
    assert answer.dropped == {"a": 1, "b": 3, "c": 1}
    server.open(store="other")
    (answer,) = heard(server.say(0, Status("other")), StatusIs)
    assert answer.dropped == {}


# --- changes on the way -------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "then"), [("sgd", "lars"), ("lars", "sgd"), ("lars", "lamb")])
def test_round_that_waits_to_be_known_finite_waits_under_another_rule_too(first: str, then: str) -> None:
    server = cut(optimizer=first)
    push_piece(server, 0, 0, 1)
    said = server.say(0, optimizing(then, call=2))
    assert not heard(said, Error)
    assert versions(server) == [0, 0, 0]
    for index in (1, 2):
        push_piece(server, index, 0, 1)
    assert versions(server) == [1, 1, 1]
    assert all(torch.tensor(server.values("big")).isfinite())
    push_piece(server, 0, 1, NAN)
    server.say(0, optimizing(first, call=3))
    for index in (1, 2):
        push_piece(server, index, 1, 1)
    assert versions(server) == [2, 2, 2]
    assert all(torch.tensor(server.values("big")).isfinite())
