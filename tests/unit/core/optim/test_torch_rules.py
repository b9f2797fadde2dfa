"""Rules of torch.optim on slices of a chunk equal torch.optim on the parameters themselves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from kvps.core.optim import hyperparams as hyper_module
from kvps.core.optim import torch_rules
from kvps.core.optim.hyperparams import SCHEMAS, HyperParams, Schema, resolve
from kvps.core.optim.torch_rules import UPDATERS, NAdam, State, Terms, Updater, create, register
from kvps.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

SIZES = (5, 33, 64)
TOTAL = sum(SIZES)
ROUNDS = 30
FUSED = {"sgd", "adam", "adamw", "adagrad"}
CLASSES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adagrad": torch.optim.Adagrad,
    "adadelta": torch.optim.Adadelta,
    "rmsprop": torch.optim.RMSprop,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "adamax": torch.optim.Adamax,
}


@dataclass(frozen=True)
class Case:
    """One optimizer with one set of options, spelled as torch spells them."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return "-".join([self.name, *self.options])

    def safe_for(self, dtype: torch.dtype) -> Case:
        """Without an eps that rounds to 0 in float16, where torch itself divides 0 by 0."""
        if dtype == torch.float16 and "eps" in SCHEMAS[self.name].by_name():
            return Case(self.name, {**self.options, "eps": 1e-2})
        return self


CASES = [
    Case("sgd", {"lr": 0.1}),
    Case("sgd", {"lr": 0.1, "weight_decay": 0.1, "maximize": True}),
    Case("sgd", {"lr": 0.1, "momentum": 0.9}),
    Case("sgd", {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}),
    Case("sgd", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    Case("adam", {}),
    Case("adam", {"lr": 0.1, "betas": (0.5, 0.9), "eps": 1e-3, "weight_decay": 0.1}),
    Case("adam", {"lr": 0.1, "amsgrad": True, "maximize": True}),
    Case("adamw", {}),
    Case("adamw", {"lr": 0.1, "weight_decay": 0.5, "amsgrad": True}),
    Case("adagrad", {}),
    Case("adagrad", {"lr": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.5, "weight_decay": 0.1}),
    Case("adadelta", {}),
    Case("adadelta", {"lr": 2.0, "rho": 0.5, "eps": 1e-3, "weight_decay": 0.1, "maximize": True}),
    Case("rmsprop", {}),
    Case("rmsprop", {"alpha": 0.5, "momentum": 0.9, "weight_decay": 0.1}),
    # eps: a centred variance may round below 0, and its root to NaN, in torch as here.
    Case("rmsprop", {"centered": True, "momentum": 0.5, "alpha": 0.9, "maximize": True}),
    Case("rmsprop", {"centered": True}),
    Case("nadam", {}),
    Case("nadam", {"lr": 0.1, "betas": (0.5, 0.9), "momentum_decay": 0.1, "weight_decay": 0.1}),
    Case("nadam", {"weight_decay": 0.1, "decoupled_weight_decay": True, "maximize": True}),
    Case("radam", {}),
    Case("radam", {"lr": 0.1, "betas": (0.5, 0.9), "weight_decay": 0.1}),
    Case("radam", {"weight_decay": 0.1, "decoupled_weight_decay": True, "maximize": True}),
    Case("adamax", {}),
    Case("adamax", {"lr": 0.1, "betas": (0.5, 0.9), "weight_decay": 0.1, "maximize": True}),
]
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def numbers(seed: int, dtype: torch.dtype, size: int = TOTAL) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ranges() -> list[slice]:
    stops = torch.tensor(SIZES).cumsum(0).tolist()
    return [slice(stop - size, stop) for stop, size in zip(stops, SIZES, strict=True)]


def takes_part(key: int, turn: int) -> bool:
    """Key 0 is updated 30 times, key 1 15 times, key 2 10 times."""
    return turn % (key + 1) == 0


def by_torch(case: Case, start: Tensor, always: bool, **kernel: bool) -> Tensor:
    """Train three parameters by torch.optim; return them side by side."""
    params = [torch.nn.Parameter(start[span].clone()) for span in ranges()]
    optimizer = CLASSES[case.name](params, **case.options, **kernel)
    for turn in range(ROUNDS):
        grad = numbers(turn + 1, start.dtype)
        for key, (param, span) in enumerate(zip(params, ranges(), strict=True)):
            param.grad = grad[span].clone() if always or takes_part(key, turn) else None
        optimizer.step()
    return torch.cat([param.detach() for param in params])


def by_slices(case: Case, start: Tensor) -> Tensor:
    """Train the same as one chunk, a slice per key, each with its own step count."""
    updater = create(resolve(case.name, case.options))
    lr, decay = updater.hyper.for_key("any")
    weight, steps = start.clone(), [0] * len(SIZES)
    state = updater.new_state(weight)
    for turn in range(ROUNDS):
        grad = numbers(turn + 1, start.dtype).to(summed_in(start.dtype))
        for key, span in enumerate(ranges()):
            if takes_part(key, turn):
                steps[key] += 1
                piece = {name: tensor[span] for name, tensor in state.items()}
                updater.apply(
                    weight[span], grad[span], piece, Terms(step=steps[key], lr=lr, weight_decay=decay)
                )
    return weight


def by_chunk(hyper: HyperParams, weight: Tensor) -> State:
    """Train all of a chunk at once, in place; return the state."""
    updater = create(hyper)
    lr, decay = hyper.for_key("any")
    state = updater.new_state(weight)
    for turn in range(ROUNDS):
        grad = numbers(turn + 1, weight.dtype).to(summed_in(weight.dtype))
        updater.apply(weight, grad, state, Terms(step=turn + 1, lr=lr, weight_decay=decay))
    return state


def kernel_of(name: str, dtype: torch.dtype) -> dict[str, bool]:
    fuses = name in FUSED and dtype in (torch.float32, torch.float64)
    return {"fused": True} if fuses else {"foreach": False}


def summed_in(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.itemsize == 2 else dtype


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_slices_equal_torch_optim_bit_for_bit(case: Case, dtype: torch.dtype) -> None:
    case = case.safe_for(dtype)
    start = numbers(0, dtype)
    expected = by_torch(case, start, always=False, **kernel_of(case.name, dtype))
    assert bool(expected.isfinite().all())
    assert not torch.equal(expected, start)
    assert torch.equal(by_slices(case, start), expected)


@pytest.mark.parametrize("name", sorted(CLASSES))
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_half_weight_with_a_master_trains_as_float32(name: str, dtype: torch.dtype) -> None:
    """Gradients are the same half numbers in both, so all bits of the master agree."""
    weight = numbers(0, dtype)
    exact = weight.float()
    updater = create(resolve(name, {}))
    lr, decay = updater.hyper.for_key("any")
    plain = updater.new_state(exact)
    for turn in range(ROUNDS):
        grad = numbers(turn + 1, dtype).float()
        updater.apply(exact, grad, plain, Terms(step=turn + 1, lr=lr, weight_decay=decay))

    state = by_chunk(resolve(name, {"multi_precision": True}), weight)

    assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    assert torch.equal(state["master"], exact)
    assert torch.equal(weight, exact.to(dtype))


def test_state_has_torchs_names_and_only_what_is_used() -> None:
    def names(name: str, **given: object) -> list[str]:
        return sorted(create(resolve(name, given)).new_state(torch.zeros(3)))

    assert names("sgd") == []
    assert names("sgd", momentum=0.9) == ["momentum_buffer"]
    assert names("adam") == ["exp_avg", "exp_avg_sq"]
    assert names("adamw", amsgrad=True) == ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"]
    assert names("adagrad") == ["sum"]
    assert names("adadelta") == ["acc_delta", "square_avg"]
    assert names("rmsprop") == ["square_avg"]
    assert names("rmsprop", centered=True, momentum=0.1) == ["grad_avg", "momentum_buffer", "square_avg"]
    assert names("nadam") == names("radam") == ["exp_avg", "exp_avg_sq"]
    assert names("adamax") == ["exp_avg", "exp_inf"]


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_rescaling_and_clipping_come_first(name: str) -> None:
    weight = numbers(0, torch.float64)
    expected = weight.clone()
    updater = create(resolve(name, {"rescale_grad": 0.25, "clip_gradient": 0.3}))
    plain = create(resolve(name, {}))
    lr, decay = plain.hyper.for_key("any")
    state, plain_state = updater.new_state(weight), plain.new_state(weight)
    for step in range(1, 11):
        grad = numbers(step, torch.float64)
        ready = (grad * 0.25).clamp(-0.3, 0.3)
        updater.apply(weight, grad, state, Terms(step=step, lr=lr, weight_decay=decay))
        plain.apply(expected, ready, plain_state, Terms(step=step, lr=lr, weight_decay=decay))
    assert torch.equal(weight, expected)


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_multipliers_are_torchs_parameter_groups(name: str) -> None:
    given = {"lr": 0.01, "wd": 0.1, "lr_mult": {"b": 2, "c": 0}, "wd_mult": {"b": 0.5}}
    updater = create(resolve(name, given))
    start = numbers(0, torch.float64)
    params = [torch.nn.Parameter(start[span].clone()) for span in ranges()]
    groups = [
        {"params": [param], "lr": lr, "weight_decay": decay}
        for param, lr, decay in zip(params, (0.01, 0.02, 0.0), (0.1, 0.05, 0.1), strict=True)
    ]
    optimizer = CLASSES[name](groups, **kernel_of(name, torch.float64))
    weight = start.clone()
    state = updater.new_state(weight)
    for step in range(1, 11):
        grad = numbers(step, torch.float64)
        for key, param, span in zip("abc", params, ranges(), strict=True):
            param.grad = grad[span].clone()
            lr, decay = updater.hyper.for_key(key)
            piece = {entry: tensor[span] for entry, tensor in state.items()}
            updater.apply(weight[span], grad[span], piece, Terms(step=step, lr=lr, weight_decay=decay))
        optimizer.step()
    assert torch.equal(weight, torch.cat([param.detach() for param in params]))
    assert torch.equal(weight[ranges()[2]], start[ranges()[2]])


def test_an_updater_may_be_made_anew_at_any_step() -> None:
    """The rate of later steps is another; state stays; nothing hides in the object."""
    for name in CLASSES:
        weight = numbers(0, torch.float64)
        param = torch.nn.Parameter(weight.clone())
        optimizer = CLASSES[name]([param], lr=0.1, **kernel_of(name, torch.float64))
        hyper = resolve(name, {"lr": 0.1})
        state = create(hyper).new_state(weight)
        for step in range(1, 11):
            if step == 6:
                hyper = hyper.with_lr(0.01)
                optimizer.param_groups[0]["lr"] = 0.01
                state = create(hyper).adopt(weight, state)
            grad = numbers(step, torch.float64)
            param.grad = grad.clone()
            optimizer.step()
            lr, decay = hyper.for_key("any")
            create(hyper).apply(weight, grad, state, Terms(step=step, lr=lr, weight_decay=decay))
        assert torch.equal(weight, param.detach()), name


def test_nadams_product_is_torchs_after_a_thousand_steps_and_then_stays_zero() -> None:
    updater = create(resolve("nadam", {}))
    assert isinstance(updater, NAdam)
    param = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.NAdam([param])
    for step in range(1, 1201):
        param.grad = torch.ones(1)
        optimizer.step()
        assert updater.product(step) == optimizer.state[param]["mu_product"].item()
    assert updater.product(10**12) == 0.0
    assert len(updater._products) < 1201


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_integer_weights_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"'{name}' cannot update a weight of torch.int32; use"):
        create(resolve(name, {})).new_state(torch.zeros(3, dtype=torch.int32))


# ------------------------------------------------------------------------------ the registry


def test_every_declared_optimizer_can_be_made() -> None:
    assert UPDATERS.keys() == SCHEMAS.keys()
    for name in SCHEMAS:
        updater = create(resolve(name, {}))
        assert updater.hyper.name == name
        assert updater.needs_norms == (name in {"lars", "lamb"})
        assert updater.tracks_pulls == (name == "dcasgd")
        assert updater.takes_integers == (name in {"test", "assign"})


class Halved(Updater):
    """A plug-in's rule."""

    def _update(self, weight: Tensor, gradient: Tensor, state: State, terms: Terms) -> None:
        weight.sub_(gradient, alpha=terms.lr / 2)


def test_a_plug_in_adds_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_rules, "UPDATERS", dict(UPDATERS))
    monkeypatch.setattr(hyper_module, "SCHEMAS", dict(SCHEMAS))
    register("halved", Halved, Schema.of("halved", lr=0.5))
    updater = create(resolve("Halved", {}))
    weight = torch.zeros(2)
    assert updater.new_state(weight) == {}
    updater.apply(weight, torch.ones(2), {}, Terms(step=1, lr=0.5, weight_decay=0.0))
    assert weight.tolist() == [-0.25, -0.25]


@pytest.mark.parametrize(
    ("name", "schema", "text"),
    [
        ("sgd", "sgd", "optimizer 'sgd' is already registered; choose another name"),
        ("one", "two", "optimizer 'one' has the schema of 'two'; use the same name for both"),
    ],
)
def test_a_plug_in_cannot_take_a_name_or_wear_two(name: str, schema: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        register(name, Halved, Schema.of(schema, lr=0.5))
    assert UPDATERS.keys() == SCHEMAS.keys()


def test_a_name_without_a_class_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="no updater is registered for optimizer 'ghost'; use one of: adadelta, "
    ):
        create(HyperParams("ghost", {}))
