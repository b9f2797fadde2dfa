"""The rules that torch lacks, against plain references."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

import kvps
from kvps.core.optim.base import State, Terms, Updater
from kvps.core.optim.extra_rules import RULES
from kvps.core.optim.hyperparams import resolve
from kvps.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SIZE = 61
CUTS = (0, 7, 40, SIZE)
ROUNDS = 12


def updater(name: str, **given: object) -> Updater:
    return RULES[name](resolve(name, given))


def numbers(seed: int, dtype: torch.dtype = torch.float64, size: int = SIZE) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-14)


def part(state: State, start: int, stop: int) -> State:
    return {name: tensor[start:stop] for name, tensor in state.items()}


def run(rule: Updater, weight: Tensor, cuts: Sequence[int] = (0, SIZE)) -> State:
    """Apply ``ROUNDS`` random gradients to ``weight``, in the pieces that ``cuts`` makes."""
    state = rule.new_state(weight)
    lr, decay = rule.hyper.for_key("w")
    grad_dtype = torch.float32 if weight.dtype.itemsize == 2 else weight.dtype
    pieces = list(itertools.pairwise(cuts))
    for step in range(1, ROUNDS + 1):
        grad = numbers(step, grad_dtype)
        norms = None
        if rule.needs_norms:
            shares = [
                rule.partial_norms(
                    weight[a:b], grad[a:b], part(state, a, b), Terms(step=step, lr=lr, weight_decay=decay)
                )
                for a, b in pieces
            ]
            assert all(share.dtype == torch.float64 for share in shares)
            norms = torch.stack(shares).sum(0)
        for a, b in pieces:
            rule.apply(
                weight[a:b],
                grad[a:b],
                part(state, a, b),
                Terms(step=step, lr=lr, weight_decay=decay, norms=norms),
            )
    return state


# ------------------------------------------------------------------ references, one per paper


def reference_lars(
    weight: Tensor,
    lr: float = 0.1,
    weight_decay: float = 0.0,
    momentum: float = 0.0,
    eta: float = 1e-3,
    eps: float = 1e-8,
) -> Tensor:
    velocity = torch.zeros_like(weight)
    for step in range(1, ROUNDS + 1):
        grad = numbers(step)
        trust = eta * weight.norm() / (grad.norm() + weight_decay * weight.norm() + eps)
        velocity = momentum * velocity + lr * trust * (grad + weight_decay * weight)
        weight = weight - velocity
    return weight


def reference_lamb(
    weight: Tensor,
    lr: float = 1e-3,
    weight_decay: float = 0.0,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-6,
    lower_bound: float = 0.0,
    upper_bound: float = math.inf,
    bias_correction: bool = True,
) -> Tensor:
    m = v = torch.zeros_like(weight)
    for step in range(1, ROUNDS + 1):
        grad = numbers(step)
        m = beta1 * m + (1 - beta1) * grad
        v = beta2 * v + (1 - beta2) * grad**2
        m_hat = m / (1 - beta1**step) if bias_correction else m
        v_hat = v / (1 - beta2**step) if bias_correction else v
        r = m_hat / (v_hat.sqrt() + eps) + weight_decay * weight
        phi = min(max(float(weight.norm()), lower_bound), upper_bound)
        weight = weight - lr * phi / r.norm() * r
    return weight


def reference_ftrl(
    weight: Tensor, lr: float = 0.1, weight_decay: float = 0.0, lamda1: float = 0.01, beta: float = 1.0
) -> Tensor:
    z = n = torch.zeros_like(weight)
    for step in range(1, ROUNDS + 1):
        grad = numbers(step)
        sigma = ((n + grad**2).sqrt() - n.sqrt()) / lr
        z = z + grad - sigma * weight
        n = n + grad**2
        moved = -(z - z.sign() * lamda1) / ((beta + n.sqrt()) / lr + weight_decay)
        weight = torch.where(z.abs() <= lamda1, 0.0, moved)
    return weight


def reference_signum(
    weight: Tensor, lr: float = 0.01, weight_decay: float = 0.0, momentum: float = 0.9, wd_lh: float = 0.0
) -> Tensor:
    m = torch.zeros_like(weight)
    for step in range(1, ROUNDS + 1):
        grad = numbers(step)
        if momentum:
            m = momentum * m + (1 - momentum) * (grad + weight_decay * weight)
            weight = (1 - lr * wd_lh) * weight - lr * m.sign()
        else:
            weight = (1 - lr * (wd_lh + weight_decay)) * weight - lr * grad.sign()
    return weight


def reference_sgd(
    weight: Tensor, lr: float = 0.1, weight_decay: float = 0.0, momentum: float = 0.0
) -> Tensor:
    """What dcasgd is in sync, where nothing is delayed."""
    velocity = torch.zeros_like(weight)
    for step in range(1, ROUNDS + 1):
        velocity = momentum * velocity + lr * (numbers(step) + weight_decay * weight)
        weight = weight - velocity
    return weight


CASES: list[tuple[str, Callable[..., Tensor], dict[str, float]]] = [
    ("lars", reference_lars, {}),
    ("lars", reference_lars, {"lr": 5.0, "momentum": 0.9, "weight_decay": 0.1, "eta": 0.01}),
    ("lars", reference_lars, {"eps": 1.0, "weight_decay": 0.5}),
    ("lamb", reference_lamb, {}),
    ("lamb", reference_lamb, {"lr": 0.1, "weight_decay": 0.1, "beta1": 0.5, "beta2": 0.9}),
    ("lamb", reference_lamb, {"upper_bound": 0.5, "bias_correction": False, "eps": 0.1}),
    ("lamb", reference_lamb, {"lower_bound": 100.0}),
    ("ftrl", reference_ftrl, {}),
    ("ftrl", reference_ftrl, {"lr": 1.0, "lamda1": 2.0, "beta": 0.5, "weight_decay": 0.3}),
    ("signum", reference_signum, {}),
    ("signum", reference_signum, {"lr": 0.1, "weight_decay": 0.5, "wd_lh": 0.2}),
    ("signum", reference_signum, {"momentum": 0.0}),
    ("signum", reference_signum, {"momentum": 0.0, "weight_decay": 0.5, "wd_lh": 0.2}),
    ("dcasgd", reference_sgd, {}),
    ("dcasgd", reference_sgd, {"momentum": 0.9, "weight_decay": 0.1}),
]


@pytest.mark.parametrize(("name", "reference", "given"), CASES)
def test_a_rule_equals_its_paper_whole_and_in_three_pieces(
    name: str, reference: Callable[..., Tensor], given: dict[str, float]
) -> None:
    expected = reference(numbers(0), **given)
    for cuts in ((0, SIZE), CUTS):
        weight = numbers(0)
        run(updater(name, **given), weight, cuts)
        assert_close(weight, expected)


@pytest.mark.parametrize(("name", "reference", "given"), CASES)
def test_float32_differs_by_rounding_only(
    name: str, reference: Callable[..., Tensor], given: dict[str, float]
) -> None:
    weight = numbers(0, torch.float32)
    run(updater(name, **given), weight, CUTS)
    # 12 steps of some ten operations, each off by 2^-24 of values up to about 10.
    torch.testing.assert_close(weight.double(), reference(numbers(0), **given), rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", sorted(RULES.keys() - {"test", "assign", "rowwise_adagrad"}))
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_weights_keep_their_dtype_and_a_master_follows_float32(name: str, dtype: torch.dtype) -> None:
    start = numbers(0, dtype)

    plain = start.clone()
    state = run(updater(name, momentum=0.5) if name == "lars" else updater(name), plain)
    assert {tensor.dtype for tensor in state.values()} <= {dtype}
    assert bool(plain.isfinite().all())

    exact, weight = start.float(), start.clone()
    run(updater(name), exact, CUTS)
    state = run(updater(name, multi_precision=True), weight, CUTS)
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    assert torch.equal(state["master"], exact)
    assert torch.equal(weight, exact.to(dtype))


# ------------------------------------------------------------------------------ norms


@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_partial_norms_change_nothing_and_add_up(name: str) -> None:
    rule = updater(name, momentum=0.9) if name == "lars" else updater(name)
    rule = RULES[name](resolve(name, {**rule.hyper.to_wire(), "rescale_grad": 0.5, "clip_gradient": 0.3}))
    weight, grad = numbers(0), numbers(1)
    state = rule.new_state(weight)
    for index, tensor in enumerate(state.values()):
        tensor.copy_(numbers(10 + index).abs())
    before = [weight.clone(), grad.clone(), *(tensor.clone() for tensor in state.values())]

    whole = rule.partial_norms(weight, grad, state, Terms(step=3, lr=0.1, weight_decay=0.1))
    shares = [
        rule.partial_norms(weight[a:b], grad[a:b], part(state, a, b), Terms(step=3, lr=0.1, weight_decay=0.1))
        for a, b in itertools.pairwise(CUTS)
    ]

    assert all(map(torch.equal, before, [weight, grad, *state.values()]))
    assert_close(torch.stack(shares).sum(0), whole)
    assert whole[0].item() == pytest.approx(float(weight.norm() ** 2))
    if name == "lars":
        clipped = (grad * 0.5).clamp(-0.3, 0.3)
        assert whole[1].item() == pytest.approx(float(clipped.norm() ** 2))


@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_norms_must_be_given(name: str) -> None:
    weight = numbers(0)
    rule = updater(name)
    with pytest.raises(ValueError, match=f"{name} needs norms of the whole tensor; add up partial"):
        rule.apply(weight, numbers(1), rule.new_state(weight), Terms(step=1, lr=0.1, weight_decay=0.0))
    assert torch.equal(weight, numbers(0))


def test_rules_without_norms_have_none_to_share() -> None:
    rule = updater("signum")
    weight = numbers(0)
    shares = rule.partial_norms(
        weight, numbers(1), rule.new_state(weight), Terms(step=1, lr=0.1, weight_decay=0.0)
    )
    assert shares.shape == (0,)
    assert shares.dtype == torch.float64


@pytest.mark.parametrize("name", ["lars", "lamb"])
@pytest.mark.parametrize(("weight", "grad"), [(0.0, 1.0), (1.0, 0.0), (0.0, 0.0)])
def test_a_zero_norm_means_trust_one(name: str, weight: float, grad: float) -> None:
    rule = updater(name)
    tensor, gradient = torch.full((4,), weight), torch.full((4,), grad)
    state = rule.new_state(tensor)
    norms = rule.partial_norms(tensor, gradient, state, Terms(step=1, lr=0.5, weight_decay=0.0))
    rule.apply(tensor, gradient, state, Terms(step=1, lr=0.5, weight_decay=0.0, norms=norms))
    torch.testing.assert_close(tensor, torch.full((4,), weight - 0.5 * grad))


# ------------------------------------------------------------------------------ ftrl


def test_ftrl_makes_small_elements_exactly_zero() -> None:
    rule = updater("ftrl", lamda1=1.0)
    weight = torch.zeros(3)
    grad = torch.tensor([0.5, -0.5, 5.0])
    rule.apply(weight, grad, rule.new_state(weight), Terms(step=1, lr=0.1, weight_decay=0.0))
    assert weight[:2].tolist() == [0.0, 0.0]
    assert weight[2] < 0


def test_ftrl_with_rate_zero_is_frozen() -> None:
    rule = updater("ftrl", lr_mult={"w": 0})
    weight = numbers(0)
    state = run(rule, weight)
    assert torch.equal(weight, numbers(0))
    assert not any(bool(tensor.any()) for tensor in state.values())


# ------------------------------------------------------------------------------ dcasgd


def test_dcasgd_compensates_for_what_happened_since_the_rank_read() -> None:
    """Two ranks pull and push in turn, a third never pulls; pieces of one chunk."""
    lamda, lr, decay, momentum = 0.5, 0.1, 0.01, 0.9
    rule = updater("dcasgd", lamda=lamda, momentum=momentum)
    assert rule.tracks_pulls
    weight = numbers(0)
    state = rule.new_state(weight)
    expected, velocity = numbers(0), torch.zeros(SIZE, dtype=torch.float64)
    read: dict[int, Tensor] = {}
    schedule = [("pull", 0), ("pull", 1), ("push", 0), ("push", 1), ("push", 2), ("pull", 0)]
    for step, (verb, rank) in enumerate(schedule * 3, start=1):
        if verb == "pull":
            read[rank] = expected.clone()
            for a, b in itertools.pairwise(CUTS):
                rule.pulled(weight, state, a, b, rank)
            continue
        grad = numbers(step)
        moved = expected - read[rank] if rank in read else torch.zeros_like(expected)
        total = grad + lamda * grad * grad * moved + decay * expected
        velocity = momentum * velocity + lr * total
        expected = expected - velocity
        for a, b in itertools.pairwise(CUTS):
            rule.apply(
                weight[a:b],
                grad[a:b],
                part(state, a, b),
                Terms(step=step, lr=lr, weight_decay=decay, rank=rank),
            )
    assert_close(weight, expected)
    assert state.keys() == {"velocity", "read.0", "read.1"}


def test_dcasgd_remembers_only_the_range_that_was_read() -> None:
    rule = updater("dcasgd")
    weight = torch.zeros(4)
    state = rule.new_state(weight)
    rule.pulled(weight, state, 0, 2, 5)
    weight.add_(1)
    rule.pulled(weight, state, 2, 4, 5)
    assert state["read.5"].tolist() == [0, 0, 1, 1]


def test_dcasgd_reads_the_master_behind_a_half_weight() -> None:
    rule = updater("dcasgd", multi_precision=True)
    weight = torch.ones(4, dtype=torch.float16)
    state = rule.new_state(weight)
    state["master"].add_(1e-5)  # below what float16 can tell from 1
    rule.pulled(weight, state, 0, 4, 0)
    assert torch.equal(state["read.0"], state["master"])


def test_other_rules_ignore_pulls() -> None:
    rule = updater("signum")
    assert not rule.tracks_pulls
    state: State = {}
    rule.pulled(torch.zeros(4), state, 0, 4, 0)
    assert state == {}


# ------------------------------------------------------------------------------ rowwise_adagrad


def rowwise_reference(weight: Tensor, given: dict[str, float]) -> tuple[Tensor, Tensor]:
    """Return weights and accumulators after ``ROUNDS`` gradients, as torchrec.optim.RowWiseAdagrad has it."""
    weight = weight.double()
    total = torch.full((len(weight), 1), given.get("initial_accumulator_value", 0.0), dtype=torch.float64)
    for step in range(1, ROUNDS + 1):
        grad = numbers(step, torch.float64, weight.numel()).view_as(weight)
        grad = grad.add(weight, alpha=given.get("weight_decay", 0.0))
        rate = given["lr"] / (1 + (step - 1) * given.get("lr_decay", 0.0))
        total += grad.pow(2).mean(dim=1).view(-1, 1)
        weight = weight.addcdiv(grad, total.sqrt().add(given.get("eps", 1e-10)), value=-rate)
    return weight, total


@pytest.mark.parametrize(
    "given",
    [
        {"lr": 0.1},
        {"lr": 0.1, "weight_decay": 0.2, "eps": 0.5},
        {"lr": 0.5, "lr_decay": 0.1, "initial_accumulator_value": 3.0},
    ],
)
@pytest.mark.parametrize(
    ("dtype", "rtol"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.1)]
)
def test_rowwise_adagrad_equals_torchrecs(given: dict[str, float], dtype: torch.dtype, rtol: float) -> None:
    weight = numbers(0, dtype, 5 * 8).view(5, 8)
    rule = updater("rowwise_adagrad", **given)
    expected, accumulated = rowwise_reference(weight, given)
    state = rule.new_state(weight)
    assert (state["sum"].shape, state["sum"].dtype.itemsize) == ((5, 1), max(4, dtype.itemsize))
    lr, decay = rule.hyper.for_key("")
    for step in range(1, ROUNDS + 1):
        grad = numbers(step, torch.float64, 5 * 8).to(state["sum"].dtype).view(5, 8)
        rule.apply(weight, grad, state, Terms(step=step, lr=lr, weight_decay=decay))
    torch.testing.assert_close(weight.double(), expected, rtol=rtol, atol=rtol)
    torch.testing.assert_close(state["sum"].double(), accumulated, rtol=rtol, atol=rtol)


@pytest.mark.spec("R476")
def test_rowwise_adagrad_is_for_tables() -> None:
    rule = updater("rowwise_adagrad")
    with pytest.raises(ConfigError, match=r"row of an embedding table; use it in embedding\("):
        rule.new_state(numbers(0))
    assert rule.state_bytes(torch.float32) == 0
    with pytest.raises(ConfigError, match="and 'adagrad' for keys"), kvps.create("local") as kv:
        kv.set_optimizer("rowwise_adagrad")


# ------------------------------------------------------------------------------ test


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint8,
    ],
)
def test_test_counts_in_every_dtype(dtype: torch.dtype) -> None:
    rule = updater("test", rescale_grad=2)
    weight = torch.tensor([1, 2, 3], dtype=dtype)
    grad = torch.ones(3, dtype=torch.float32 if dtype.itemsize == 2 else dtype)
    rule.apply(weight, grad.to(weight.dtype), rule.new_state(weight), Terms(step=1, lr=0.5, weight_decay=0.5))
    assert weight.tolist() == [3, 4, 5]
    assert weight.dtype == dtype


def test_integer_clipping_stays_within_the_dtype() -> None:
    for clip, expected in ((5, [5, -5, 3]), (1000, [127, -128, 3])):
        rule = updater("test", clip_gradient=clip)
        weight = torch.zeros(3, dtype=torch.int8)
        grad = torch.tensor([127, -128, 3], dtype=torch.int8)
        rule.apply(weight, grad, rule.new_state(weight), Terms(step=1, lr=1.0, weight_decay=0.0))
        assert weight.tolist() == expected


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"rescale_grad": 0.5}, "'test': rescale_grad=0.5 cannot apply to a weight of torch.int32"),
        ({"rescale_grad": 2.0**60}, "give a whole number below 2[*][*]53, or use a float"),
        ({"clip_gradient": 1.5}, "clip_gradient=1.5 cannot apply to a weight of torch.int32"),
    ],
)
def test_integers_want_whole_numbers(given: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        updater("test", **given).new_state(torch.zeros(3, dtype=torch.int32))


@pytest.mark.parametrize("name", [name for name in RULES if name not in ("test", "assign")])
def test_other_rules_refuse_integer_weights(name: str) -> None:
    with pytest.raises(ConfigError, match=f"'{name}' cannot update a weight of torch.int64; use a float"):
        updater(name).new_state(torch.zeros(3, dtype=torch.int64))


# ------------------------------------------------------------------------------ assign


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.bfloat16, torch.float64])
def test_assign_keeps_the_last_push_bit_for_bit(dtype: torch.dtype) -> None:
    rule = updater("assign")
    weight = torch.tensor([1, 2, 3], dtype=dtype)
    for step, given in enumerate(([0, 5, 7], [9, 0, 4]), 1):
        grad = torch.tensor(given, dtype=torch.float32 if dtype == torch.bfloat16 else dtype)
        rule.apply(weight, grad, rule.new_state(weight), Terms(step=step, lr=0.5, weight_decay=0.5))
        assert weight.tolist() == given
    assert weight.dtype == dtype


def test_assign_keeps_what_is_no_number() -> None:
    rule = updater("assign")
    weight = torch.zeros(2)
    rule.apply(weight, torch.tensor([math.nan, -0.0]), {}, Terms(step=1, lr=1.0, weight_decay=0.0))
    assert math.isnan(weight[0])
    assert math.copysign(1.0, weight[1].item()) == -1.0


# ------------------------------------------------------------------------------ delayed_nesterov


def test_delayed_nesterov_of_period_1_is_sgd_with_nesterov_momentum() -> None:
    weight = numbers(0)
    run(updater("delayed_nesterov", lr=0.1, momentum=0.9), weight, CUTS)
    expected = torch.nn.Parameter(numbers(0))
    optimizer = torch.optim.SGD([expected], lr=0.1, momentum=0.9, nesterov=True)
    for step in range(1, ROUNDS + 1):
        expected.grad = numbers(step)
        optimizer.step()
    assert_close(weight, expected.detach())


def test_delayed_nesterov_moves_the_momentum_once_in_a_period() -> None:
    weight, expected = numbers(0), numbers(0)
    run(updater("delayed_nesterov", lr=0.5, momentum=0.8, period=3, weight_decay=0.1), weight, CUTS)
    momentum = pending = torch.zeros_like(expected)
    for step in range(1, ROUNDS + 1):
        gradient = numbers(step) + 0.1 * expected
        expected = expected - 0.5 * gradient
        pending = pending + gradient
        if step % 3 == 0:
            momentum = 0.8 * momentum + pending
            expected = expected - 0.5 * 0.8 * momentum
            pending = torch.zeros_like(expected)
    assert_close(weight, expected)
