"""Rows on a server: what is refused, how they are summed and updated, beside dense pushes."""

import copy

import pytest
import torch

from kvps.compression.spec import BIT2, CodecSpec
from kvps.core.optim.base import Terms
from kvps.core.optim.hyperparams import resolve
from kvps.core.optim.torch_rules import create
from kvps.core.placement import parts
from kvps.dtypes import BY_NAME
from kvps.protocol.stores import Norms
from kvps.protocol.values import Changed, PullChanged, PulledRows, PullRows, Push, PushRows, Run
from kvps.tensors import from_frame
from tests.support.server_harness import Said, ServerStage, acked, heard, refusal

WIDTH = 3
CHUNK_BYTES = 64 << 10
MANY = 12_000
"""Rows of a table that lies in several chunks of CHUNK_BYTES."""


def stage(count: int = 4, mode: str = "sync", dtype: str = "float32", **options: object) -> ServerStage:
    """A server that holds table ``t``, of zeros, and in front of it ``v``."""
    server = ServerStage(workers=2)
    server.open(mode, chunk_bytes=CHUNK_BYTES, **options)
    server.init("v", [0.0, 0.0])
    kind = getattr(torch, dtype)
    server.init("t", torch.zeros(count * WIDTH, dtype=kind), shape=(count, WIDTH))
    return server


def push(
    server: ServerStage,
    rank: int,
    ids: list[int],
    value: float = 1.0,
    number: int = 0,
    *,
    dtype: str = "float32",
    width: int = WIDTH,
    key: str = "t",
    ranks: tuple[int, ...] | None = None,
    lent: bool = False,
) -> list[Said]:
    """Push rows that are all ``value``."""
    message = PushRows("kv", key, BY_NAME[dtype].id, ranks or (rank,), number, width, len(ids))
    rows = torch.full((len(ids) * width,), value, dtype=getattr(torch, dtype))
    payload = (torch.tensor(ids), rows) if ids else ()
    return server.say(rank, message, *payload, lent=lent)


@pytest.mark.spec("R171", "R175", "R178", "R481")
def test_rows_of_several_runs_are_those_of_one_key() -> None:
    """Of 400 rows on 5 servers, this one has two runs."""
    server = ServerStage(servers=5, rank=3)
    server.open(bigarray_bound=1)
    own = [part for part in parts("t", 400 * WIDTH, 5, 1, WIDTH) if part.server == 3]
    (first, count), (second, other) = [(part.start // WIDTH, part.size // WIDTH) for part in own]
    server.declare("t", torch.zeros((count + other) * WIDTH), start=first * WIDTH, shape=(400, WIDTH))
    assert [piece.size for piece in server.pieces["t"]] == [count * WIDTH, other * WIDTH]
    server.load("t", torch.arange(1.0 * (count + other) * WIDTH))
    for rank in (0, 1):
        push(server, rank, [first + 1, first + 3, second], 1.0 + rank)
    assert {row for row, value in enumerate(rows(server)) if value == 3.0} == {1, 3, count}
    asked = torch.tensor([first + 3, second, second + 1])
    (said,) = server.say(0, PullRows("kv", "t", 1, 0, 3), asked)
    assert from_frame(said.payload[0], "float32").tolist() == [3.0] * 2 * WIDTH + [0.0] * WIDTH
    push(server, 0, [first + 2, second + 3], number=1)
    push(server, 1, [second + 3], number=1)
    expected = {first + 1: 0.0, first + 2: 1.0, first + 3: 0.0, second: 0.0, second + 3: 2.0}
    assert changed(server, 1, 2) == expected
    for ids in ([first + 1, first + count], [second - 1], [second + other]):
        assert f"not all of the rows {first} to {first + count - 1} and {second} to" in refusal(
            push(server, 0, ids, number=1)
        )


def push_whole(server: ServerStage, rank: int, value: float, number: int) -> None:
    """Push ``value`` for all elements of ``t``, piece by piece."""
    for piece in server.pieces["t"]:
        run = Run(piece.start, piece.size, number)
        message = Push(piece.chunk, BY_NAME["float32"].id, (rank,), 1.0, False, (run,))
        server.say(rank, message, torch.full((piece.size,), value))


def rows(server: ServerStage, key: str = "t") -> list[float]:
    """The first element of each row; all elements of a row are the same here."""
    table = torch.tensor(server.values(key)).view(-1, WIDTH)
    assert (table == table[:, :1]).all()
    return table[:, 0].tolist()


# --- what is refused -------------------------------------------------------------------------------


@pytest.mark.spec("R171")
@pytest.mark.parametrize("message", ["push", "pull"])
@pytest.mark.parametrize(
    ("ids", "says"),
    [
        ([4], "ProtocolError: key 't': rows 4 to 4 are not all of the rows 0 to 3"),
        ([0, 9], "ProtocolError: key 't': rows 0 to 9 are not all of the rows 0 to 3"),
        ([-1, 2], "ProtocolError: key 't': rows -1 to 2 are not all"),
        ([2, 1], "ProtocolError: key 't': rows 2 to 1 are not all"),
        ([0, 2, 1, 3], "ProtocolError: key 't': row numbers must ascend, without duplicates"),
        ([1, 1], "ProtocolError: key 't': row numbers must ascend, without duplicates"),
        ([0, 2**62, 3], "ProtocolError: key 't': row numbers must ascend, without duplicates"),
    ],
)
def test_numbers_ascend_and_are_all_here(message: str, ids: list[int], says: str) -> None:
    server = stage()
    push(server, 1, [1, 2])
    before = server.snapshot()
    if message == "push":
        said = push(server, 0, ids)
    else:
        said = server.say(0, PullRows("kv", "t", 0, 0, len(ids)), torch.tensor(ids))
    assert refusal(said).startswith(says)
    assert server.snapshot() == before
    assert acked(push(server, 0, [0])) != []
    assert rows(server) == [1.0, 1.0, 1.0, 0.0]


@pytest.mark.spec("R171", "R172")
@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"width": 2}, "Mismatch: key 't' is float32[4,3], of 3 elements in a row, and the push has"),
        ({"dtype": "float64"}, "Mismatch: key 't' is float32[4,3], and the push has rows of float64"),
        ({"key": "v"}, "ProtocolError: key 'v' of store 'kv' is float32[2] and is not stored by"),
        ({"key": "no"}, "KeyNotFound: key 'no' of store 'kv' has no value yet"),
        ({"ranks": (5,)}, "Unauthorized: worker 0 pushes for ranks (5,)"),
        ({"ranks": (0, 1)}, "ProtocolError: a push for ranks [0, 1]: some were counted, some"),
    ],
)
def test_wrong_gradient_of_the_table_changes_nothing(more: dict[str, object], says: str) -> None:
    server = stage()
    push(server, 1, [1])
    before = server.snapshot()
    assert refusal(push(server, 0, [1], **more)).startswith(says)  # type: ignore[arg-type]
    assert server.snapshot() == before


def test_a_table_whose_rows_are_larger_than_a_chunk_is_no_table() -> None:
    server = stage()
    server.init("wide", torch.zeros(2 * CHUNK_BYTES), shape=(2, CHUNK_BYTES))
    said = server.say(0, PullRows("kv", "wide", 0, 0, 1), torch.tensor([1]))
    assert "is not stored by rows here; push and pull it as a whole" in refusal(said)


def test_means_of_integers_are_refused() -> None:
    server = stage(dtype="int32", average=True)
    assert refusal(push(server, 0, [1], dtype="int32")).startswith("ConfigError: store 'kv' computes means")


# --- rounds ----------------------------------------------------------------------------------------


@pytest.mark.spec("R174")
def test_rows_that_were_filled_in_another_way_are_cleared_too() -> None:
    server = stage()
    for number, ids in enumerate([[0], [1]]):
        push(server, 0, ids, number=number)
        push(server, 1, ids, number=number)
    for rank in (0, 1):
        server.push(rank, "t", torch.ones(4 * WIDTH), 2)
    assert rows(server) == [2.0] * 4
    for rank in (0, 1):
        push(server, rank, [3], number=3)
    assert rows(server) == [0.0, 0.0, 0.0, 2.0]


@pytest.mark.spec("R172")
def test_a_push_of_rows_counts_once_and_in_its_turn() -> None:
    server = stage()
    assert push(server, 0, [1], number=1) == [], "early: not taken in, and not acknowledged"
    for _ in range(2):
        assert len(acked(push(server, 0, [1]))) == 1
    assert len(acked(push(server, 1, [1], 2.0))) == 1
    assert len(acked(push(server, 1, [1], 9.0))) == 1
    assert rows(server) == [0.0, 3.0, 0.0, 0.0]


@pytest.mark.parametrize("count", [2, 10, 21])
@pytest.mark.parametrize("deterministic", [False, True])
def test_many_ranks_of_both_kinds_are_added_up(count: int, deterministic: bool) -> None:
    server = ServerStage(workers=count)
    server.open(deterministic=deterministic)
    server.init("t", torch.zeros(4 * WIDTH), shape=(4, WIDTH))
    for rank in range(count):
        push(server, rank, [0, rank % 4], lent=rank % 2 == 0) if rank % 4 else push(server, rank, [0])
    expected = [float(sum(1 for rank in range(count) if rank % 4 == row)) for row in range(4)]
    assert rows(server) == [float(count), *expected[1:]]
    for rank in range(count):
        if rank % 3 == 1:
            server.push(rank, "t", torch.ones(4 * WIDTH), 1)
        else:
            push(server, rank, [3], number=1, lent=rank % 2 == 0)
    dense = float(len(range(1, count, 3)))
    assert rows(server) == [dense, dense, dense, float(count)]


@pytest.mark.spec("R173")
@pytest.mark.parametrize("rule", ["sgd", "adagrad", "adam", "ftrl"])
def test_only_the_rows_that_were_named_are_updated(rule: str) -> None:
    numbers = {"lr": 0.5, "weight_decay": 0.25} | ({"momentum": 0.5} if rule == "sgd" else {})
    server = stage(MANY)
    server.optimizer(rule, **numbers)
    assert len(server.pieces["t"]) > 2
    for rank in (0, 1):
        push_whole(server, rank, 1.0, 0)
    before = rows(server)
    ids = [0, 5, MANY // 2, MANY - 1]
    for number in (1, 2):
        for rank in (0, 1):
            push(server, rank, ids, 0.5 * number, number=number, dtype="float32")
    after = rows(server)
    assert [row for row in range(MANY) if before[row] != after[row]] == ids
    updater = create(resolve(rule, numbers))
    weight = torch.zeros(1)
    state = updater.new_state(weight)
    for step, gradient in enumerate([2.0, 1.0, 2.0], start=1):
        updater.apply(weight, torch.tensor([gradient]), state, Terms(step=step, lr=0.5, weight_decay=0.25))
    assert [after[row] for row in ids] == pytest.approx([weight.item()] * len(ids))


@pytest.mark.spec("R173")
@pytest.mark.parametrize("rule", ["lars", "lamb"])
def test_a_rule_that_needs_norms_takes_rows_as_a_dense_gradient(rule: str) -> None:
    both, dense = stage(), stage()
    for item in (both, dense):
        item.optimizer(rule, lr=0.5)
        for rank in (0, 1):
            item.push(rank, "t", torch.ones(4 * WIDTH), 0)
    for rank in (0, 1):
        push(both, rank, [1], number=1)
        dense.push(rank, "t", torch.tensor([0.0, 1.0, 0.0, 0.0]).repeat_interleave(WIDTH), 1)
    assert rows(both) == pytest.approx(rows(dense))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_rows_are_summed_in_float32(dtype: str) -> None:
    server = stage(dtype=dtype)
    push(server, 0, [1], 256.0, dtype=dtype)
    push(server, 1, [1], 2.0, dtype="float32")
    assert rows(server) == [0.0, 258.0, 0.0, 0.0]


# --- what is not finite ----------------------------------------------------------------------------


@pytest.mark.parametrize("count", [4, MANY])
@pytest.mark.parametrize("optimizer", [None, "sgd"])
def test_an_update_by_rows_that_are_not_finite_is_not_made(count: int, optimizer: str | None) -> None:
    server = stage(count, on_nonfinite="error")
    if optimizer:
        server.optimizer(optimizer, lr=1.0, weight_decay=0.5)
    for rank in (0, 1):
        push(server, rank, [1, count - 1])
    before = rows(server)
    assert before[1] == before[-1] == (-2.0 if optimizer else 2.0)
    push(server, 0, [2, count - 1], number=1)
    push(server, 1, [1], float("nan"), number=1)
    assert rows(server) == before
    for rank in (0, 1):
        push(server, rank, [1], number=2)
    after = rows(server)
    # The last row was not named in this round: with an optimizer it stays as it was.
    assert (after[1], after[-1]) == ((-3.0, -2.0) if optimizer else (2.0, 0.0))
    (answer,) = heard(server.say(0, PullRows("kv", "t", 3, 0, 1), torch.tensor([0])), PulledRows)
    assert [(drop.number, drop.values, drop.ranks) for drop in answer.dropped] == [(1, WIDTH, (1,))]


def test_a_half_sum_that_overflows_where_it_is_kept_is_dropped() -> None:
    server = stage(dtype="float16", on_nonfinite="skip")
    for rank in (0, 1):
        push(server, rank, [1], 40_000.0, dtype="float16")
    assert rows(server) == [0.0] * 4
    assert server.span("t").version == 1


@pytest.mark.parametrize("rule", ["lars", "sgd"])
def test_rows_that_wait_for_word_are_applied_by_a_rule_that_comes_meanwhile(rule: str) -> None:
    """Of two servers, this one has heard all of its part and the other has not."""
    server = ServerStage(workers=1, servers=2)
    server.open(on_nonfinite="skip", bigarray_bound=16)
    server.optimizer("sgd", lr=1.0)
    server.init("t", torch.ones(4 * WIDTH), shape=(8, WIDTH))
    push(server, 0, [1])
    assert rows(server) == [1.0] * 4
    server.optimizer(rule, call=2, lr=0.5)

    server.other(1, Norms("kv", "t", None, 0, (0.0, 0.0, 0.0), reply=False))
    after = rows(server)
    assert after[1] < 1.0
    assert after[0] == after[2] == after[3] == 1.0


# --- images ----------------------------------------------------------------------------------------


def test_rows_that_are_read_elsewhere_do_not_change_there() -> None:
    server = stage()
    held = server.chunk(server.pieces["t"][0].chunk).keep()
    buffer = server.chunk(server.pieces["t"][0].chunk).buffer
    for rank in (0, 1):
        push(server, rank, [1])
    assert rows(server) == [0.0, 2.0, 0.0, 0.0]
    assert not buffer.tensor[: 2 + 4 * WIDTH].any()
    held()


# --- what changed ----------------------------------------------------------------------------------


def optimized(count: int = 40, mode: str = "sync", **options: object) -> ServerStage:
    """A table that plain SGD moves by what is pushed."""
    server = stage(count, mode, **options)
    server.optimizer("sgd", lr=1.0)
    return server


def changed(server: ServerStage, since: int, after: int = 0, rank: int = 0) -> dict[int, float] | None:
    """What changed since a version: by row its first element; None if that is not known."""
    (said,) = server.say(rank, PullChanged("kv", "t", after, 0, since))
    return news(said)


def news(said: Said) -> dict[int, float] | None:
    answer = said.message
    assert isinstance(answer, Changed)
    if not answer.known:
        assert not said.payload
        return None
    ids, *frames = said.payload or (memoryview(b""),)
    values = torch.cat([torch.empty(0), *[from_frame(frame, "float32") for frame in frames]])
    numbers = from_frame(ids, "int64").tolist() if len(ids) else []
    return dict(zip(numbers, values.view(-1, WIDTH)[:, 0].tolist(), strict=True))


def round_of(server: ServerStage, number: int, *ids: list[int]) -> None:
    for rank, some in enumerate(ids):
        push(server, rank, some, number=number)


@pytest.mark.spec("R178")
def test_without_an_optimizer_rows_that_became_zero_changed_too() -> None:
    server = stage(40)
    round_of(server, 0, [1], [3])
    assert changed(server, 0) is None, "nobody knows that all others were zero before"
    round_of(server, 1, [2], [3])
    assert changed(server, 1) == {1: 0.0, 2: 1.0, 3: 1.0}
    round_of(server, 2, [], [])
    assert changed(server, 2) == {2: 0.0, 3: 0.0}
    assert changed(server, 1) == {1: 0.0, 2: 0.0, 3: 0.0}


@pytest.mark.spec("R178")
@pytest.mark.parametrize("optimizer", [True, False])
def test_dense_push_hides_the_changed_rows(optimizer: bool) -> None:
    item = optimized() if optimizer else stage(40)
    round_of(item, 0, [1], [3])
    for rank in (0, 1):
        push_whole(item, rank, 1.0, 1)
    assert changed(item, 2) == {}
    assert changed(item, 1) is None
    round_of(item, 2, [5], [5])
    assert changed(item, 1) is None
    assert changed(item, 2) == ({5: -4.0} if optimizer else None)


@pytest.mark.spec("R178")
def test_with_half_of_the_rows_to_tell_all_may_as_well_be_read() -> None:
    server = optimized()
    round_of(server, 0, list(range(15)), list(range(15)))
    round_of(server, 1, list(range(20, 30)), [])
    assert changed(server, 1) == dict.fromkeys(range(20, 30), -1.0)
    assert changed(server, 0) is None


@pytest.mark.spec("R156", "R178")
def test_values_that_were_owed_something_change_as_a_whole() -> None:
    """The way back was compressed: an update by rows first makes up for what that left out."""
    server = optimized()
    (piece,) = server.pieces["t"]
    run = Run(piece.start, piece.size, 0)
    back = CodecSpec(BIT2, 100.0)
    for rank in (0, 1):
        message = Push(piece.chunk, BY_NAME["float32"].id, (rank,), 1.0, False, (run,), back=back)
        server.say(rank, message, torch.ones(piece.size))
    round_of(server, 1, [1], [3])
    assert changed(server, 1) is None
    assert rows(server)[:4] == [-2.0, -3.0, -2.0, -3.0]
    round_of(server, 2, [1], [])
    assert changed(server, 2) == {1: -4.0}


def two_tables() -> ServerStage:
    """Tables ``t`` and ``u`` side by side in one chunk."""
    server = ServerStage(workers=2)
    server.open()
    for key, count in (("t", 8), ("u", 20)):
        server.init(key, torch.zeros(count * WIDTH), shape=(count, WIDTH))
    server.optimizer("sgd", lr=1.0)
    first, second = server.pieces["t"][0], server.pieces["u"][0]
    assert (first.chunk, first.start + first.size) == (second.chunk, second.start)
    return server


def push_both(server: ServerStage, rank: int, number: int) -> list[Said]:
    """Push all of both tables by one run, which joins what is counted of them."""
    first, second = server.pieces["t"][0], server.pieces["u"][0]
    run = Run(first.start, first.size + second.size, number)
    message = Push(first.chunk, BY_NAME["float32"].id, (rank,), 1.0, False, (run,))
    return server.say(rank, message, torch.ones(run.size))


@pytest.mark.spec("R178")
@pytest.mark.parametrize("is_again", [False, True])
def test_changed_rows_of_a_table_are_not_those_of_its_neighbour(is_again: bool) -> None:
    """Though they are counted as one from the moment at which somebody pushes both."""
    server = two_tables()
    if is_again:  # a push whose acknowledgement was lost: it changes nothing
        for rank in (0, 1):
            push_both(server, rank, 0)
    number = int(is_again)
    for rank in (0, 1):
        push(server, rank, [1], number=number)
        push(server, rank, [6], number=number, key="u")
    push_both(server, 0, 0 if is_again else 1)
    (answer,) = server.say(1, PullChanged("kv", "u", number + 1, 0, number))
    assert news(answer) == {6: -2.0 - 2.0 * number}
    (answer,) = server.say(1, PullChanged("kv", "t", number + 1, 0, number))
    assert news(answer) == {1: -2.0 - 2.0 * number}


@pytest.mark.spec("R178")
def test_a_store_that_was_restored_does_not_know_what_changed_before() -> None:
    """It counts on from the checkpoint: other updates lead to the versions that there were."""
    server = optimized()
    round_of(server, 0, [1], [3])
    taken, release = server.server.control.snapshot()
    image = copy.deepcopy(taken)
    release()
    round_of(server, 1, [2], [2])
    assert changed(server, 1) == {2: -2.0}
    server.revive(image)
    for rank in (0, 1):
        push_whole(server, rank, 1.0, 1)
    assert server.span("t").version == 2
    assert changed(server, 1) is None
    round_of(server, 2, [5], [5])
    assert changed(server, 1) is None
    assert changed(server, 2) == {5: -4.0}
