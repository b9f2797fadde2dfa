"""What pushes do to values, and what pulls see of it: one server, told by a stage."""

import weakref

import numpy as np
import pytest
import torch

from kvps.core.optim.torch_rules import UPDATERS
from kvps.core.server.chunks.slab import Chunk
from kvps.core.server.rules import book
from kvps.dtypes import BY_NAME
from kvps.protocol.envelope import WINDOW, Envelope, Role
from kvps.protocol.stores import GetState, StateIs
from kvps.protocol.values import Pulled, Push, PushRows, Run
from kvps.tensors import TORCH
from tests.support.server_harness import ServerStage, acked, heard, over, pulled, refusal


def stage(workers: int = 2, mode: str = "sync", optimizer: str = "", **options: object):
    """A store with keys a (2 elements), b (1) and c (3), all zeros, side by side."""
    server = ServerStage(workers)
    server.open(mode, **options)
    for key, count in (("a", 2), ("b", 1), ("c", 3)):
        server.init(key, torch.zeros(count))
    if optimizer:
        server.optimizer(optimizer)
    return server


def spans(server: ServerStage) -> list[tuple[int, int]]:
    return [(span.start, span.stop) for span in server.chunk().spans]


# --- rounds -----------------------------------------------------------------------------------------


@pytest.mark.spec("R50")
def test_a_round_closes_when_every_rank_has_pushed_and_the_sum_is_assigned() -> None:
    server = stage(3)
    for rank in range(3):
        assert server.values("a") == [0, 0]
        server.push(rank, "a", [1, 10], 0)
    assert server.values("a") == [3, 30]
    assert server.span("a").version == 1


def test_a_push_is_applied_before_anybody_takes_its_effects() -> None:
    server = stage(1)
    envelope = Envelope(server.job, server.view, Role.WORKER, 0, server.seats[0].incarnation, 99)
    packet = over(envelope, Push(1, 1, (0,), 1.0, False, (Run(0, 2, 0),)), torch.ones(2))
    server.server.on_packet(b"w0", packet, server.now)
    assert server.values("a") == [1, 1]
    assert acked(server.take()) == [99]


@pytest.mark.spec("R50", "R51", "R52")
def test_a_rank_counts_once_however_often_it_comes() -> None:
    server = stage(2)
    for resend in range(3):
        assert len(acked(server.push(0, "a", [1, 1], 0, seq=5 + resend))) == 1
    assert server.span("a").version == 0
    server.replace(0)
    assert len(acked(server.push(0, "a", [5, 5], 0))) == 1  # by a later incarnation
    server.push(1, "a", [2, 2], 0)
    assert server.values("a") == [3, 3]
    for rank in (0, 1):
        assert len(acked(server.push(rank, "a", [9, 9], 0))) == 1  # after it closed
    assert server.values("a") == [3, 3]


@pytest.mark.spec("R53")
def test_64_rounds_may_be_open() -> None:
    server = stage(2)
    for number in range(WINDOW):
        assert server.push(0, "a", [1, 1], number)
    assert server.push(0, "a", [1, 1], WINDOW) == []
    server.push(1, "a", [1, 1], 0)
    assert server.push(0, "a", [1, 1], WINDOW)
    for number in range(1, WINDOW):
        server.push(1, "a", [number, 0], number)
        assert server.values("a") == [number + 1, 1]


@pytest.mark.spec("R53", "R250")
def test_rounds_are_opened_ahead_while_there_is_room_for_their_sums() -> None:
    server = ServerStage(2, memory_limit=3 * 24 + 2 * 24)  # weights, second buffer, sum; and two sums more
    server.open()
    server.init("a", torch.zeros(6))
    for number in range(3):
        assert server.push(0, "a", torch.ones(6), number)
    before = server.snapshot()
    assert server.push(0, "a", torch.ones(6), 3) == []
    assert server.snapshot() == before
    server.push(1, "a", torch.ones(6), 0)
    assert server.push(0, "a", torch.ones(6), 3)


@pytest.mark.spec("R56")
def test_a_push_for_several_ranks() -> None:
    server = stage(3)
    server.push(0, "a", [3, 3], 0, ranks=(0, 2))
    assert server.span("a").missing(frozenset(range(3))) == (1,)
    before = server.snapshot()
    said = server.push(1, "a", [1, 1], 0, ranks=(0, 1))
    assert "ProtocolError: a push for ranks [0, 1]: some were counted" in refusal(said)
    assert server.snapshot() == before
    server.push(1, "a", [1, 1], 0)
    assert server.values("a") == [4, 4]


def test_deterministic_sums_have_the_same_bits_in_any_order() -> None:
    values = {0: 1.0, 1: 1e8, 2: -1e8, 3: 0.5}
    results = set()
    for order in ((0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2)):
        server = stage(4, deterministic=True)
        for rank in order:
            server.push(rank, "b", [values[rank]], 0)
        results.add(server.values("b")[0])
    assert results == {0.5}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_half_gradients_are_summed_in_float32(dtype: str, deterministic: bool) -> None:
    server = ServerStage(3)
    server.open(deterministic=deterministic)
    server.init("h", torch.zeros(1, dtype=TORCH[dtype]))
    big = 2048.0 if dtype == "float16" else 256.0  # big + 1 is big in this type
    for rank, value in enumerate((big, 1.0, 1.0)):
        server.push(rank, "h", torch.tensor([value], dtype=TORCH[dtype]), 0)
    assert server.values("h") == [big + 2]


@pytest.mark.spec("R97")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_half_types_also_take_sums_of_float32(dtype: str, order: tuple[int, int]) -> None:
    """A machine's sum is not rounded before that of all is taken."""
    server = ServerStage(4)
    server.open()
    server.init("h", torch.zeros(1, dtype=TORCH[dtype]))
    big = 2048.0 if dtype == "float16" else 256.0
    halves = [(0, torch.tensor([big + 1]), (0, 1, 2)), (3, torch.tensor([1.0], dtype=TORCH[dtype]), (3,))]
    for index in order:
        rank, values, ranks = halves[index]
        server.push(rank, "h", values, 0, ranks=ranks)
    assert server.values("h") == [big + 2]


@pytest.mark.parametrize(
    ("dtype", "pushed"),
    [("float32", "float16"), ("float32", "float64"), ("int8", "float32"), ("float16", "bfloat16")],
)
def test_values_of_another_type_are_refused(dtype: str, pushed: str) -> None:
    server = ServerStage(1)
    server.open()
    server.init("h", torch.zeros(1, dtype=TORCH[dtype]))
    said = server.push(0, "h", torch.ones(1, dtype=TORCH[pushed]), 0)
    assert f"Mismatch: chunk 1 holds {dtype}, and the push has type {pushed}" in refusal(said)


def test_half_gradients_of_an_async_store_are_scaled_in_float32() -> None:
    server = ServerStage(1)
    server.open("async")
    server.init("h", torch.zeros(1, dtype=torch.float16))
    server.optimizer("test", rescale_grad=1e-3, multi_precision=True)
    server.push(0, "h", torch.tensor([3.0], dtype=torch.float16), 0)
    state = server.chunk().state
    assert state is not None
    assert state["master"][0].item() == pytest.approx(0.003, rel=1e-6)  # in float16: 0.0030003


# --- what is lent -----------------------------------------------------------------------------------


def lend(server: ServerStage, rank: int, number: int, *pieces: torch.Tensor, pull: bool = False):
    """Push to all keys of chunk 1 what lies in these pieces."""
    runs = (Run(0, sum(map(len, pieces)), number),)
    return server.say(rank, Push(1, 1, (rank,), 1.0, pull, runs), *pieces, lent=True)


@pytest.mark.spec("R80")
def test_lent_gradients_are_summed_when_the_round_closes() -> None:
    """Until then it is its sender's: what he writes counts."""
    server = stage(2)
    first, second = torch.ones(2), torch.ones(4)
    lend(server, 0, 0, first, second)
    first.fill_(5)
    server.push(1, ["a", "b", "c"], torch.ones(6), 0)
    assert server.values("a") + server.values("b") + server.values("c") == [6, 6, 2, 2, 2, 2]
    assert first.tolist() + second.tolist() == [5, 5, 1, 1, 1, 1]


def test_a_push_of_a_part_cuts_a_round_whose_pieces_lie_elsewhere() -> None:
    server = stage(2)
    lend(server, 0, 0, torch.tensor([1.0]), torch.tensor([2.0, 3.0, 4.0]), torch.tensor([5.0, 6.0]))
    assert spans(server) == [(0, 6)]
    server.push(1, "b", [10], 0)
    assert spans(server) == [(0, 2), (2, 3), (3, 6)]
    assert (server.values("a"), server.values("b"), server.values("c")) == ([0, 0], [13], [0, 0, 0])
    server.push(1, ["a", "c"], [10, 20, 30, 40, 50], 0)
    assert (server.values("a"), server.values("c")) == ([11, 22], [34, 45, 56])


@pytest.mark.spec("R51", "R53")
def test_repeated_or_early_lent_gradients_are_not_kept() -> None:
    server = stage(2)
    lend(server, 0, 0, torch.ones(6))
    before = server.snapshot()
    early, again = torch.full((6,), 7.0), torch.full((6,), 8.0)
    assert lend(server, 0, 2, early) == []
    assert len(acked(lend(server, 0, 0, again))) == 1
    assert server.snapshot() == before
    views = [weakref.ref(piece) for piece in (early, again)]
    del early, again
    assert [view() for view in views] == [None, None]
    server.push(1, ["a", "b", "c"], torch.ones(6), 0)
    assert server.values("c") == [2, 2, 2]


def test_lent_gradients_are_released_when_their_round_closes() -> None:
    """All of it: the keys of one push may close at different times."""
    server = stage(2)
    memory = np.ones(6, np.float32)
    view = weakref.ref(memory)
    lend(server, 0, 0, torch.from_numpy(memory))
    del memory
    server.push(1, "a", [1, 1], 0)
    assert view() is not None
    server.push(1, ["b", "c"], [1, 1, 1, 1], 0)
    assert view() is None


@pytest.mark.spec("R91")
def test_lent_push_is_acknowledged_by_its_answer_alone() -> None:
    """No window waits for that; a push that wants no values is acknowledged at once."""
    server = stage(2)
    assert lend(server, 0, 0, torch.ones(6), pull=True) == []
    said = server.push(1, ["a", "b", "c"], torch.ones(6), 0, pull=True)
    assert [(answer.to, type(answer.message)) for answer in said] == [(b"w0", Pulled), (b"w1", Pulled)]
    assert len(acked(lend(server, 0, 1, torch.ones(6)))) == 1


@pytest.mark.parametrize("lent", [False, True])
@pytest.mark.parametrize("rule", ["", "sgd", "adam"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_update_by_blocks_equals_the_update_of_the_whole(
    monkeypatch: pytest.MonkeyPatch, lent: bool, rule: str, dtype: str
) -> None:
    """Edges of blocks, of spans and of pieces lie where they like."""
    options = {"": {}, "sgd": {"lr": 0.1, "momentum": 0.9}, "adam": {"lr": 0.1}}[rule]
    rows = [torch.randn(20, generator=torch.Generator().manual_seed(n)) for n in range(6)]
    results = []
    for block in (3, 7, 100):
        monkeypatch.setattr(book, "BLOCK_COUNT", block)
        server = ServerStage(2)
        server.open()
        for key, count in (("x", 4), ("y", 16)):
            server.init(key, torch.ones(count, dtype=TORCH[dtype]))
        if rule:
            server.optimizer(rule, **options)
        for number in range(3):
            for rank in range(2):
                row = rows[2 * number + rank].to(TORCH[dtype])
                message = Push(1, BY_NAME[dtype].id, (rank,), 1.0, False, (Run(0, 20, number),))
                pieces = row.split([3, 1, 9, 7]) if lent else [row]
                server.say(rank, message, *pieces, lent=lent)
        results.append(server.values("x") + server.values("y"))
    assert results[0] == results[1] == results[2]
    if not rule:
        total = sum(row.to(TORCH[dtype]).float() for row in rows[4:]).to(TORCH[dtype])
        assert results[0] == total.tolist()
    elif dtype == "float32":
        weight = torch.ones(20, requires_grad=True)
        make = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[rule]
        optimizer = make([weight], **options)
        for number in range(3):
            weight.grad = rows[2 * number] + rows[2 * number + 1]
            optimizer.step()
        assert results[0] == pytest.approx(weight.tolist(), abs=1e-6)


# --- the optimizer ----------------------------------------------------------------------------------


@pytest.mark.spec("R58")
def test_or_once_per_push() -> None:
    server = stage(2, "async", "test")
    server.push(0, "a", [1, 1], 0)
    assert server.values("a") == [1, 1]
    server.push(0, "a", [1, 1], 1)
    server.push(1, "a", [5, 5], 0)
    assert server.values("a") == [7, 7]
    assert server.span("a").version == 3
    server.push(1, "a", [5, 5], 0)
    assert server.values("a") == [7, 7]


def test_steps_are_counted_per_key() -> None:
    """Adam's first update moves by lr, whatever the others' counts are."""
    server = stage(1)
    server.optimizer("adam", lr=0.5, eps=0.0)
    for number in range(5):
        server.push(0, "a", [1, 1], number)
    server.push(0, ["b", "c"], torch.ones(4), 0)
    assert server.values("b") + server.values("c") == pytest.approx([-0.5] * 4)
    assert server.span("a").step == 5


@pytest.mark.spec("R58")
def test_an_async_push_needs_an_optimizer() -> None:
    server = stage(1, "async")
    before = server.snapshot()
    said = server.push(0, "a", [1, 1], 0)
    assert "ConfigError: store 'kv' of type dist_async has no optimizer" in refusal(said)
    assert server.snapshot() == before


@pytest.mark.parametrize("numbers", [("sgd", {}), ("test", {"rescale_grad": 0.5})])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_integers_that_the_optimizer_cannot_update(mode: str, numbers) -> None:
    server = ServerStage(1)
    server.open(mode)
    server.init("n", torch.zeros(2, dtype=torch.int32))
    server.optimizer(numbers[0], **numbers[1])
    before = server.snapshot()
    said = server.push(0, "n", torch.ones(2, dtype=torch.int32), 0)
    assert "cannot" in refusal(said)
    assert "torch.int32" in refusal(said)
    assert server.snapshot() == before
    assert pulled(server.pull(0, "n")).popitem()[1] == [0, 0]


# --- pulls ------------------------------------------------------------------------------------------


@pytest.mark.spec("R59")
def test_a_pull_waits_for_exactly_the_version_after_its_own_pushes() -> None:
    server = stage(2, optimizer="test")
    for number in range(3):
        server.push(0, "a", [1, 1], number)
    first, third = server.pull(0, "a", 1, seq=50), server.pull(0, "a", 3, seq=51)
    assert first == third == []
    assert pulled(server.push(1, "a", [1, 1], 0)) == {50: [2, 2]}
    assert pulled(server.push(1, "a", [1, 1], 1)) == {}
    assert pulled(server.push(1, "a", [1, 1], 2)) == {51: [6, 6]}


@pytest.mark.spec("R59")
def test_and_gets_no_later_one_when_several_rounds_close_at_once() -> None:
    server = stage(2, optimizer="test", on_worker_lost="shrink")
    for number in range(3):
        server.push(0, "a", [1, 1], number)
        server.pull(0, "a", number + 1, seq=50 + number)
    assert pulled(server.show(w1="lost")) == {50: [1, 1], 51: [2, 2], 52: [3, 3]}


@pytest.mark.spec("R61")
def test_an_answer_says_where_its_elements_stand() -> None:
    server = stage(2, optimizer="test")
    for rank in range(2):
        server.push(rank, ["a", "b"], [1, 1, 1], 0)
    server.push(0, "c", [1, 1, 1], 0)
    (answer,) = heard(server.pull(0, ["a", "c"]), Pulled)
    assert answer.runs == ((0, 2, 1, 1), (3, 3, 0, 1))
    (answer,) = heard(server.pull(1, ["a", "b", "c"], values=False), Pulled)
    assert answer.runs == ((0, 2, 1, 1), (2, 1, 1, 1), (3, 3, 0, 0))
    assert not answer.values


@pytest.mark.spec("R61", "R62")
def test_the_values_are_those_of_the_runs_side_by_side() -> None:
    server = stage(1)
    server.push(0, ["a", "b", "c"], [1, 2, 3, 4, 5, 6], 0)
    (whole,) = server.pull(0, "c")
    (parts,) = server.pull(0, ["a", "c"])
    assert (whole.values(), parts.values()) == ([4, 5, 6], [1, 2, 4, 5, 6])
    assert whole.hold is server.chunk().buffer
    assert parts.hold is None  # a copy


@pytest.mark.parametrize("rows", [False, True])
def test_an_updater_is_told_the_age_of_a_push(rows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The versions since the rank that pushes read the values; None for a rank that never has."""
    told: list[tuple[int | None, int | None]] = []
    monkeypatch.setattr(
        UPDATERS["test"],
        "_update",
        lambda _self, _weight, _gradient, _state, terms: told.append((terms.rank, terms.age)),
    )
    server = ServerStage(3)
    server.open("async")
    server.optimizer("test")
    server.init("w", torch.ones(40), shape=(10, 4))
    counts = [0, 0, 0]

    def push(rank: int) -> None:
        if rows:
            message = PushRows("kv", "w", BY_NAME["float32"].id, (rank,), counts[rank], 4, 1)
            server.say(rank, message, torch.tensor([3]), torch.ones(4))
        else:
            server.push(rank, "w", torch.ones(40), counts[rank])
        counts[rank] += 1

    server.pull(0, "w")
    push(0)
    push(1)
    server.pull(1, "w")
    push(0)
    push(0)
    push(1)
    assert told[-5:] == [(0, 0), (1, None), (0, 2), (0, 3), (1, 2)]


# --- staleness --------------------------------------------------------------------------------------


def ssp(staleness: int = 2, workers: int = 3) -> ServerStage:
    return stage(workers, "ssp", "test", staleness=staleness)


@pytest.mark.spec("R60")
def test_question_about_owed_pushes_waits_for_no_rank() -> None:
    server = ssp(staleness=0)
    server.push(1, "a", [1, 1], 0)
    for number in range(2):
        server.push(0, "a", [1, 1], number)
    server.replace(0)
    (answer,) = heard(server.pull(0, "a", values=False), Pulled)
    assert answer.runs[0].owed == 2
    assert server.pull(0, "a", seq=50) == []
    assert pulled(server.push(1, "a", [1, 1], 1)).keys() == {50}


@pytest.mark.spec("R60")
@pytest.mark.parametrize("state", ["lost", "left", "gone"])
def test_nobody_waits_for_one_who_is_not_there(state: str) -> None:
    server = ssp(staleness=0)
    server.push(1, "a", [1, 1], 0)
    server.push(0, "a", [1, 1], 0)
    server.push(0, "a", [1, 1], 1)
    server.pull(0, "a", after=2, seq=50)
    assert pulled(server.show(w1=state)) == {50: [3, 3]}


# --- cost -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["forwards", "backwards", "one wide pull"])
def test_many_keys_pushed_one_by_one_each_with_a_pull(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each element that a pull waits for is looked at a few times, however many keys there are."""
    keys = 256
    server = ServerStage(2)
    server.open()
    rows = torch.zeros(keys)
    chunk_runs = []
    for key in range(keys):
        server.declare(f"k{key}", rows[:1])
        chunk_runs.append(server.pieces[f"k{key}"][0])
    server.load("k0", rows, pieces=[chunk_runs[0]._replace(size=keys)])
    names = [f"k{key}" for key in range(keys)]
    looked = 0
    visit = Chunk.spans_in

    def counted(chunk: Chunk, start: int, stop: int):
        nonlocal looked
        for span in visit(chunk, start, stop):
            looked += 1
            yield span

    if order == "one wide pull":
        server.pull(1, names, after=1, seq=9000)
    else:
        for key in names:
            server.pull(1, key, after=1)
    server.server.check = lambda: None  # type: ignore[method-assign]  # it is quadratic itself
    monkeypatch.setattr(Chunk, "spans_in", counted)
    answers = 0
    for key in names if order != "backwards" else reversed(names):
        for rank in (0, 1):
            answers += len(heard(server.push(rank, key, [1.0], 0), Pulled))
    assert answers == (1 if order == "one wide pull" else keys)
    assert looked <= 10 * keys


# --- whole tensors ----------------------------------------------------------------------------------


def test_the_state_of_a_key() -> None:
    server = stage(1)
    server.optimizer("sgd", momentum=0.9, lr=1.0)
    server.push(0, ["a", "b", "c"], [1, 2, 3, 4, 5, 6], 0)
    (answer,) = server.say(0, GetState(1, 3, 3))
    assert isinstance(answer.message, StateIs)
    assert (answer.message.step, [f.name for f in answer.message.fields]) == (1, ["momentum_buffer"])
