"""Steps that are clipped by their norm over all keys: two servers, and every message between them by hand."""

import math

import pytest
import torch

from kvps.core.server.rules.clipped import EARLY_MAX
from kvps.protocol.membership import Error, Probe, Probed
from kvps.protocol.stores import Declare, Declared, Entry, StepNorm
from kvps.protocol.values import Push, PushRows, Run, StepPart
from tests.support.server_harness import Said, ServerStage, acked, as_row, heard, optimizing, refusal

MAX_NORM = 5.0
HOLDERS = (0, 1)
CLIPPED = {"lr": 1.0, "clip_global_norm": MAX_NORM}


def server(rank: int, servers: int = 2, workers: int = 1, **keys: list[float]) -> ServerStage:
    """A server that clips, with these keys."""
    stage = ServerStage(workers, servers, rank)
    stage.open(average=workers > 1)
    for key, values in keys.items():
        stage.init(key, values)
    stage.optimizer("sgd", **CLIPPED)
    return stage


def push(
    stage: ServerStage, key: str, values: list[float], step: StepPart | None, number: int = 0, rank: int = 0
) -> list[Said]:
    piece = stage.pieces[key][0]
    run = (Run(piece.start, piece.size, number),)
    message = Push(piece.chunk, 1, (rank,), 1.0, False, run, step=step)
    return stage.say(rank, message, as_row(values))


def told(said: list[Said]) -> list[StepNorm]:
    """What the server told other servers."""
    assert not heard(said, Error), said
    return heard(said, StepNorm)


def step_of(size: int, number: int = 0, digest: int = 7, holders: tuple[int, ...] = HOLDERS) -> StepPart:
    return StepPart(digest, number, size, holders)


def norm(
    squares: float | None = None, factor: float | None = None, number: int = 0, digest: int = 7
) -> StepNorm:
    return StepNorm("kv", digest, number, squares, factor)


# --- one server ------------------------------------------------------------------------------------


@pytest.mark.spec("R439", "R441")
def test_all_keys_of_a_step_are_scaled_together_when_the_last_is_pushed() -> None:
    stage = server(0, 1, a=[1.0, 1.0], b=[1.0])
    step = step_of(3, holders=(0,))
    assert acked(push(stage, "a", [6.0, 0.0], step))
    assert stage.values("a") == [1.0, 1.0]
    assert stage.span("a").version == 0
    assert acked(push(stage, "b", [8.0], step))  # 6, 0, 8: the norm is 10
    assert stage.values("a") == pytest.approx([-2.0, 1.0], abs=1e-5)
    assert stage.values("b") == pytest.approx([-3.0], abs=1e-5)
    assert not stage.server.rules.steps.open


def test_a_round_waits_for_the_step_before_it() -> None:
    """A step of one key closes while an older step, which has another key besides, is open."""
    stage = server(0, 1, a=[0.0], b=[0.0])
    both, alone = step_of(2, holders=(0,)), step_of(1, 1, 8, (0,))
    push(stage, "a", [-1.0], both)
    push(stage, "a", [-10.0], alone, number=1)
    assert stage.values("a") == [0.0]
    push(stage, "b", [-1.0], both)
    assert stage.values("a") == pytest.approx([6.0], abs=1e-5)
    assert (stage.span("a").version, stage.span("b").version) == (2, 1)


@pytest.mark.parametrize(("value", "clipped"), [(math.inf, math.nan), (math.nan, math.nan)])
def test_a_step_that_is_not_finite_is_what_torch_makes_of_it(value: float, clipped: float) -> None:
    stage = server(0, 1, a=[1.0, 1.0])
    push(stage, "a", [value, 2.0], step_of(2, holders=(0,)))
    first, second = stage.values("a")
    assert math.isnan(first)
    assert second == 1.0 if math.isinf(value) else math.isnan(second)


# --- two servers -----------------------------------------------------------------------------------


@pytest.mark.spec("R441", "R442")
def test_the_first_holder_computes_the_factor_and_the_other_confirms_it() -> None:
    first, second = server(0, a=[0.0]), server(1, b=[0.0])
    assert told(push(first, "a", [-6.0], step_of(1))) == []
    (sum_,) = told(push(second, "b", [-8.0], step_of(1)))
    assert sum_ == norm(squares=pytest.approx(64.0))
    (factor,) = told(first.other(1, sum_))
    assert factor == norm(factor=pytest.approx(0.5))
    assert first.values("a") == pytest.approx([3.0], abs=1e-5)
    (confirmation,) = told(second.other(0, factor))
    assert confirmation == norm()
    assert second.values("b") == pytest.approx([4.0], abs=1e-5)
    steps = first.server.rules.steps
    assert steps.decided
    assert told(first.other(1, confirmation)) == []
    assert not steps.decided
    assert told(first.other(1, confirmation)) == []  # again


@pytest.mark.spec("R441", "R442")
def test_lost_messages_are_told_again_and_second_copies_change_nothing() -> None:
    first, second = server(0, a=[0.0]), server(1, b=[0.0])
    push(second, "b", [-8.0], step_of(1))  # what it tells is lost
    push(first, "a", [-6.0], step_of(1))

    def tick(stage: ServerStage) -> list[StepNorm]:
        stage.now += 1.0
        return told(stage.take(stage.server.on_timer(stage.now)))

    assert tick(first) == []
    (sum_,) = tick(second)
    told(first.other(1, sum_))  # the factor is lost
    (factor,) = tick(first)
    assert told(first.other(1, sum_)) == [factor]
    assert told(second.other(0, factor)) == [norm()]
    assert told(second.other(0, factor)) == [norm()]
    assert tick(second) == []
    assert second.values("b") == pytest.approx([4.0], abs=1e-5)


def test_three_holders_get_one_factor_and_are_told_until_each_confirms() -> None:
    all_three = (0, 1, 2)
    first = server(0, 3, a=[0.0])
    push(first, "a", [-6.0], step_of(1, holders=all_three))
    assert told(first.other(2, norm(squares=64.0))) == []
    factors = told(first.other(1, norm(squares=0.0)))
    assert [factor.factor for factor in factors] == [pytest.approx(0.5)] * 2
    steps = first.server.rules.steps
    told(first.other(1, norm()))
    assert [item.unconfirmed for item in steps.decided.values()] == [{2}]
    told(first.other(2, norm()))
    assert not steps.decided


def test_a_sum_may_come_before_the_first_push_of_its_step() -> None:
    first = server(0, a=[0.0])
    assert told(first.other(1, norm(squares=64.0))) == []
    (factor,) = told(push(first, "a", [-6.0], step_of(1)))
    assert factor.factor == pytest.approx(0.5)


def test_sums_of_unknown_steps_are_kept_within_a_limit() -> None:
    first = server(0, a=[0.0])
    for number in range(EARLY_MAX + 5):
        told(first.other(1, norm(squares=1.0, digest=100 + number)))
    assert len(first.server.rules.steps._early) == EARLY_MAX


@pytest.mark.parametrize("squares", [math.nan, math.inf])
def test_sums_and_factors_that_are_no_numbers_travel(squares: float) -> None:
    first, second = server(0, a=[0.0]), server(1, b=[0.0])
    push(first, "a", [-6.0], step_of(1))
    value = -math.inf if math.isinf(squares) else math.nan
    (sum_,) = told(push(second, "b", [value], step_of(1)))
    assert sum_.squares == (-1.0 if math.isnan(squares) else -2.0)
    (factor,) = told(first.other(1, sum_))
    assert factor.factor == (-1.0 if math.isnan(squares) else 0.0)
    told(second.other(0, factor))
    assert math.isnan(second.values("b")[0])


@pytest.mark.spec("R442")
def test_sums_and_factors_that_cannot_be_are_refused() -> None:
    first, second = server(0, a=[0.0], c=[0.0]), server(1, b=[0.0], d=[0.0])
    push(first, "a", [1.0], step_of(2))
    push(second, "b", [1.0], step_of(2))
    assert "neither a sum" in refusal(first.other(1, norm(squares=-3.0)))
    assert "told the factor" in refusal(second.other(0, norm(factor=0.5)))  # d is not pushed yet
    assert "told a sum" in refusal(second.other(0, norm(squares=1.0)))
    push(second, "d", [1.0], step_of(2))
    assert "told the factor" in refusal(second.other(0, norm(factor=1.5)))
    assert "was not opened" in refusal(second.other(0, StepNorm("none", 7, 0, 1.0)))


# --- what is refused -------------------------------------------------------------------------------


@pytest.mark.spec("R440")
def test_a_push_without_its_step_is_refused() -> None:
    stage = server(0, 1, a=[0.0])
    for _ in range(2):  # the second is of a form that is known
        assert "call set_optimizer() on every rank" in refusal(push(stage, "a", [1.0], None))


@pytest.mark.spec("R440")
def test_ranks_that_push_other_keys_are_told() -> None:
    stage = server(0, 1, workers=2, a=[0.0], b=[0.0])
    push(stage, "a", [1.0], step_of(2, holders=(0,)))
    assert "rank 1 pushed key 'a' with other keys than ranks [0] did" in refusal(
        push(stage, "a", [1.0], step_of(1, digest=9, holders=(0,)), rank=1)
    )


@pytest.mark.spec("R440")
@pytest.mark.parametrize(
    "step",
    [
        step_of(2, holders=(0, 2)),
        step_of(2, holders=(1,)),
        step_of(2, holders=(1, 0)),
        step_of(0),
        step_of(2, holders=()),
    ],
)
def test_a_part_that_cannot_be_is_refused(step: StepPart) -> None:
    assert "has no such part" in refusal(push(server(0, a=[0.0]), "a", [1.0], step))


def test_an_open_step_has_one_size() -> None:
    stage = server(0, 1, a=[0.0], b=[0.0])
    push(stage, "a", [1.0], step_of(2, holders=(0,)))
    assert "has no such part" in refusal(push(stage, "b", [1.0], step_of(3, holders=(0,))))


@pytest.mark.spec("R440")
def test_rows_are_refused() -> None:
    stage = ServerStage(1)
    stage.open()
    entry = Entry("t", 1, (4, 2), 0, 8)
    (answer,) = heard(stage.say(0, Declare("kv", True, 0, (entry,))), Declared)
    stage.pieces["t"] = answer.places[0].pieces
    stage.load("t", as_row([0.0] * 8))
    stage.optimizer("sgd", **CLIPPED)
    rows = PushRows("kv", "t", 1, (0,), 0, 2, 1)
    said = stage.say(0, rows, torch.tensor([1]), as_row([1.0, 1.0]))
    assert "which rows have no part in" in refusal(said)


@pytest.mark.spec("R443")
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"mode": "async"}, "dist_async, which applies the push of each worker by itself"),
        ({"quorum": 1, "bundles": False}, "closes rounds at 1 workers"),
        ({"on_nonfinite": "skip"}, "on_nonfinite='skip', which drops keys one by one"),
    ],
)
def test_stores_without_steps_are_refused(options: dict[str, object], says: str) -> None:
    stage = ServerStage(2)
    stage.open(**options)  # type: ignore[arg-type]
    assert says in refusal(stage.say(0, optimizing("sgd", 1, True, **CLIPPED)))


@pytest.mark.spec("R443")
@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_rules_with_norms_of_each_key_are_refused(name: str) -> None:
    stage = ServerStage(1)
    stage.open()
    assert "does not go with clip_global_norm" in refusal(
        stage.say(0, optimizing(name, 1, True, clip_global_norm=1.0))
    )


@pytest.mark.spec("R443")
def test_a_key_is_not_replaced_and_the_limit_is_not_lifted_while_a_step_may_wait() -> None:
    stage = server(0, 1, a=[0.0], b=[0.0])
    step = step_of(2, holders=(0,))
    push(stage, "a", [1.0], step)
    entry = Entry("a", 1, (3,), 0, 3)
    assert "cannot be replaced by another shape" in refusal(stage.say(0, Declare("kv", True, 1, (entry,))))
    assert "wait for the norm of their step" in refusal(stage.say(0, optimizing("sgd", 2, lr=1.0)))
    stage.optimizer("sgd", 3, **{**CLIPPED, "clip_global_norm": 50.0})  # another limit may be set
    push(stage, "b", [3.0], step)
    assert stage.values("b") == [-3.0]
    stage.optimizer("sgd", 4, lr=1.0)
    stage.push(0, "a", [40.0], 1)
    assert stage.values("a") == [-41.0]


def test_a_round_that_was_begun_before_the_limit_was_set_is_not_clipped() -> None:
    stage = ServerStage(2)
    stage.open(average=True)
    stage.init("a", [0.0])
    stage.optimizer("sgd", lr=1.0)
    stage.push(0, "a", [-20.0], 0)
    stage.optimizer("sgd", 2, **CLIPPED)
    stage.push(1, "a", [-20.0], 0)
    assert stage.values("a") == [20.0]


def test_a_reader_is_told_what_a_round_waits_for() -> None:
    stage = server(0, 1, a=[0.0], b=[0.0])
    push(stage, "a", [1.0], step_of(2, holders=(0,)))
    assert stage.pull(0, "a", after=1, seq=50) == []
    (answer,) = heard(stage.say(0, Probe((50,))), Probed)
    assert "round 0 waits for the norm of its step" in answer.pending[0].reason


def test_a_store_that_ends_takes_its_steps_along() -> None:
    stage = server(0, a=[0.0], b=[0.0])
    push(stage, "a", [1.0], step_of(2))
    told(stage.other(1, norm(squares=1.0, digest=8)))
    rules = stage.server.rules
    rules.drop("other")
    assert rules.steps.open
    rules.drop("kv")
    assert not rules.steps.open
    assert not rules.steps._early
