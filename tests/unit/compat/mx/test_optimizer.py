"""Optimizers by MXNet's names: their arguments, and their updates beside the formulas of MXNet's documentation."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import kvps
import kvps.compat.mx as mx
from kvps.errors import ConfigError

Rows = np.ndarray[Any, np.dtype[np.float64]]
Rule = Callable[[dict[str, Any], Rows, Rows, int], Rows]
"""State, weight, gradient, step -> weight."""


def sgd(state: dict[str, Any], w: Rows, g: Rows, t: int) -> Rows:
    state["m"] = 0.9 * state.get("m", 0) - 0.1 * (g + 0.01 * w)
    return w + state["m"]


def nag(state: dict[str, Any], w: Rows, g: Rows, t: int) -> Rows:
    g = g + 0.01 * w
    state["m"] = 0.9 * state.get("m", 0) + g
    return w - 0.1 * (g + 0.9 * state["m"])


def adam(state: dict[str, Any], w: Rows, g: Rows, t: int) -> Rows:
    g = g + 0.01 * w
    state["m"] = 0.9 * state.get("m", 0) + 0.1 * g
    state["v"] = 0.999 * state.get("v", 0) + 0.001 * g * g
    rate = 0.1 * math.sqrt(1 - 0.999**t) / (1 - 0.9**t)
    return w - rate * state["m"] / (np.sqrt(state["v"]) + 1e-8)


def adagrad(state: dict[str, Any], w: Rows, g: Rows, t: int) -> Rows:
    state["h"] = state.get("h", 0) + g * g
    return w - 0.1 * g / np.sqrt(state["h"] + 0.5)


def rmsprop(state: dict[str, Any], w: Rows, g: Rows, t: int) -> Rows:
    g = g + 0.01 * w
    state["n"] = 0.9 * state.get("n", 0) + 0.1 * g * g
    return w - 0.1 * g / np.sqrt(state["n"] + 1e-8)


def rmsprop_centered(state: dict[str, Any], w: Rows, g: Rows, t: int) -> Rows:
    state["n"] = 0.9 * state.get("n", 0) + 0.1 * g * g
    state["g"] = 0.9 * state.get("g", 0) + 0.1 * g
    state["d"] = 0.8 * state.get("d", 0) - 0.1 * g / np.sqrt(state["n"] - state["g"] ** 2 + 1e-8)
    return w + state["d"]


def adadelta(state: dict[str, Any], w: Rows, g: Rows, t: int) -> Rows:
    state["g"] = 0.9 * state.get("g", 0) + 0.1 * g * g
    step = np.sqrt(state.get("d", 0) + 1e-5) / np.sqrt(state["g"] + 1e-5) * g
    state["d"] = 0.9 * state.get("d", 0) + 0.1 * step * step
    return w - step


def ftrl(state: dict[str, Any], w: Rows, g: Rows, t: int) -> Rows:
    n = state.get("n", np.zeros_like(g))
    state["z"] = state.get("z", 0) + g - (np.sqrt(n + g * g) - np.sqrt(n)) * w / 0.1
    state["n"] = n = n + g * g
    z = state["z"]
    return (np.sign(z) * 0.01 - z) / ((1 + np.sqrt(n)) / 0.1 + 0.01) * (np.abs(z) > 0.01)


def adamax(state: dict[str, Any], w: Rows, g: Rows, t: int) -> Rows:
    g = g + 0.01 * w
    state["m"] = 0.9 * state.get("m", 0) + 0.1 * g
    state["u"] = np.maximum(0.999 * state.get("u", 0), np.abs(g))
    return w - 0.1 / (1 - 0.9**t) * state["m"] / state["u"]


def nadam(state: dict[str, Any], w: Rows, g: Rows, t: int) -> Rows:
    now, after = [0.9 * (1 - 0.5 * 0.96 ** (step * 0.004)) for step in (t, t + 1)]
    state["s"] = state.get("s", 1.0) * now
    state["m"] = 0.9 * state.get("m", 0) + 0.1 * g
    state["v"] = 0.999 * state.get("v", 0) + 0.001 * g * g
    mean = (1 - now) * g / (1 - state["s"]) + after * state["m"] / (1 - state["s"] * after)
    return w - 0.1 * mean / (np.sqrt(state["v"] / (1 - 0.999**t)) + 1e-8)


def signum(state: dict[str, Any], w: Rows, g: Rows, t: int) -> Rows:
    state["m"] = 0.9 * state.get("m", 0) - 0.1 * (g + 0.01 * w)
    return (1 - 0.1 * 0.02) * w + 0.1 * np.sign(state["m"])


def test_rule(state: dict[str, Any], w: Rows, g: Rows, t: int) -> Rows:
    return w + g


test_rule.__test__ = False  # type: ignore[attr-defined]  # it is a rule called "test"
RULES: dict[str, tuple[mx.optimizer.Optimizer, Rule]] = {
    "sgd": (mx.optimizer.SGD(learning_rate=0.1, momentum=0.9, wd=0.01), sgd),
    "nag": (mx.optimizer.NAG(learning_rate=0.1, momentum=0.9, wd=0.01), nag),
    "adam": (mx.optimizer.Adam(learning_rate=0.1, wd=0.01), adam),
    "adagrad": (mx.optimizer.AdaGrad(learning_rate=0.1, eps=0.5), adagrad),
    "rmsprop": (mx.optimizer.RMSProp(learning_rate=0.1, wd=0.01), rmsprop),
    "rmsprop, centered": (mx.optimizer.RMSProp(0.1, 0.9, 0.8, centered=True), rmsprop_centered),
    "adadelta": (mx.optimizer.AdaDelta(), adadelta),
    "ftrl": (mx.optimizer.Ftrl(learning_rate=0.1, wd=0.01), ftrl),
    "adamax": (mx.optimizer.Adamax(learning_rate=0.1, wd=0.01), adamax),
    "nadam": (mx.optimizer.Nadam(learning_rate=0.1), nadam),
    "signum": (mx.optimizer.Signum(learning_rate=0.1, wd=0.01, wd_lh=0.02), signum),
    "test": (mx.optimizer.Test(rescale_grad=1.0), test_rule),
}


@pytest.mark.parametrize("name", RULES)
def test_updates_are_mxnets(name: str) -> None:
    """At a constant rate, on gradients that are large beside epsilon."""
    optimizer, rule = RULES[name]
    dice = np.random.default_rng(7)
    weight = dice.uniform(-2, 2, 6)
    ours = mx.nd.array(weight, dtype="float64")
    update, state = mx.optimizer.get_updater(optimizer), {}
    for step in range(1, 9):
        gradient = dice.choice([-1, 1], 6) * dice.uniform(0.5, 2, 6)
        weight = rule(state, weight, gradient, step)
        update(0, mx.nd.array(gradient, dtype="float64"), ours)
        np.testing.assert_allclose(ours.asnumpy(), weight, rtol=2e-6, atol=1e-9)


DEFAULTS = {
    "sgd": {"lr": 0.01, "momentum": 0.0},
    "ccsgd": {"lr": 0.01},
    "nag": {"lr": 0.01, "momentum": 0.0, "nesterov": False},
    "adam": {"lr": 0.001, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8},
    "adagrad": {"lr": 0.01, "initial_accumulator_value": 1e-7, "eps": 0.0},
    "rmsprop": {"lr": 0.001, "alpha": 0.9, "eps": 1e-8, "momentum": 0.0, "centered": False},
    "adadelta": {"lr": 1.0, "rho": 0.9, "eps": 1e-5},
    "ftrl": {"lr": 0.1, "lamda1": 0.01, "beta": 1.0},
    "adamax": {"lr": 0.002},
    "nadam": {"lr": 0.001, "momentum_decay": 0.004},
    "signum": {"lr": 0.01, "momentum": 0.9, "wd_lh": 0.0},
    "lars": {"lr": 0.01, "momentum": 0.0, "eta": 0.001, "eps": 0.0},
    "lamb": {"lr": 0.001, "eps": 1e-6, "bias_correction": True, "lower_bound": None},
    "dcasgd": {"lr": 0.01, "momentum": 0.0, "lamda": 0.04},
    "test": {"rescale_grad": 1.0},
}


def test_defaults_are_those_of_mxnet_1_9_1() -> None:
    assert set(DEFAULTS) == set(mx.optimizer.BY_NAME)
    for name, wanted in DEFAULTS.items():
        values = mx.optimizer.create(name.upper()).describe().values
        assert {item: values[item] for item in wanted} == wanted, name


def test_arguments_by_position_are_in_mxnets_order() -> None:
    assert mx.optimizer.SGD(0.9).describe().number("momentum") == 0.9
    adam = mx.optimizer.Adam(0.1, 0.8, 0.99, 1e-6).describe()
    assert [adam.number(name) for name in ("lr", "beta1", "beta2", "eps")] == [0.1, 0.8, 0.99, 1e-6]
    with pytest.raises(TypeError, match="SGD takes 2 arguments by position, got 3"):
        mx.optimizer.SGD(0.9, True, 0.1)


def test_common_arguments() -> None:
    given = mx.optimizer.SGD(
        learning_rate=0.1, wd=0.2, rescale_grad=0.5, clip_gradient=3.0, multi_precision=True, aggregate_num=4
    ).describe()
    wanted = {"lr": 0.1, "weight_decay": 0.2, "rescale_grad": 0.5, "clip_gradient": 3.0}
    assert {name: given.values[name] for name in wanted} == wanted
    assert given.flag("multi_precision")
    for none in (None, 0, -1.0):
        assert mx.optimizer.SGD(clip_gradient=none).describe().optional("clip_gradient") is None


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: mx.optimizer.SGD(lr_scheduler=object()), ConfigError, "set_learning_rate"),
        (lambda: mx.optimizer.SGD(begin_num_update=7), ConfigError, "load_optimizer_states"),
        (lambda: mx.optimizer.SGD(param_dict={0: 1}), ConfigError, "set_lr_mult"),
        (lambda: mx.optimizer.RMSProp(clip_weights=1.0), ConfigError, "clip the weights"),
        (lambda: mx.optimizer.SGD(lazy_update=False), ConfigError, "push dense gradients"),
        (lambda: mx.optimizer.AdaGrad(wd=0.1), ConfigError, "decays the weights themselves"),
        (lambda: mx.optimizer.AdaDelta(wd=0.1), ConfigError, r"set_optimizer\('adadelta'"),
        (lambda: mx.optimizer.SGD(momentun=0.9), TypeError, "SGD has no argument 'momentun'"),
        (lambda: mx.optimizer.SGD(learning_rate=-1), ConfigError, "lr=-1"),
        (lambda: mx.optimizer.Optimizer(), ConfigError, "such as mx.optimizer.SGD"),
        (lambda: mx.optimizer.create("sgdd"), ValueError, "no optimizer 'sgdd' .* use one of sgd"),
        (lambda: mx.optimizer.create("lans"), ValueError, "use LAMB"),
        (lambda: mx.optimizer.FTML, AttributeError, "mx.optimizer.FTML .*use Adam"),
    ],
)
def test_missing_option_names_the_alternative(
    make: Callable[[], object], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        make()


def test_factors_of_parameters_by_number_or_name() -> None:
    names = {0: "fc_weight", 1: "fc_bias", 2: "bn_gamma"}
    optimizer = mx.optimizer.SGD(param_idx2name=names, wd=0.1)
    assert optimizer.describe().wd_mult == {"1": 0.0}, "what is no weight does not decay"
    optimizer.set_lr_mult({"fc_weight": 0.5, 2: 2.0, "other": 3.0})
    optimizer.set_wd_mult({"fc_weight": 4.0})
    assert optimizer.describe().lr_mult == {"0": 0.5, "2": 2.0, "other": 3.0}
    assert optimizer.describe().wd_mult == {"1": 0.0, "0": 4.0}


def test_later_changes_of_the_optimizer_reach_the_store() -> None:
    optimizer = mx.optimizer.SGD(learning_rate=1.0)
    kv, out = mx.kv.create("local"), mx.nd.empty((1,))
    kv.init([0, 1], [mx.nd.zeros((1,))] * 2)
    kv.set_optimizer(optimizer)
    kv.set_optimizer(optimizer)
    kv.pushpull(0, mx.nd.ones((1,)), out=out)
    optimizer.lr = 0.5
    assert (optimizer.lr, kv.store.learning_rate) == (0.5, 0.5)
    kv.pushpull(0, mx.nd.ones((1,)), out=out)
    optimizer.set_lr_mult({0: 0.5})
    kv.pushpull(0, mx.nd.ones((1,)), out=out)
    assert out.asscalar() == -1.75


def test_an_optimizer_without_a_rate_takes_any_and_ignores_it() -> None:
    optimizer = mx.optimizer.Test(learning_rate=0.1, rescale_grad=2.0)
    kv, out = mx.kv.create("local"), mx.nd.zeros((1,))
    kv.init("w", out)
    kv.set_optimizer(optimizer)
    optimizer.set_learning_rate(7.0)
    kv.pushpull("w", mx.nd.ones((1,)), out=out)
    assert out.asscalar() == 2.0


def test_an_updater_follows_its_optimizer_and_writes_to_any_layout() -> None:
    optimizer = mx.optimizer.SGD(learning_rate=1.0)
    update = mx.optimizer.get_updater(optimizer)
    weight = torch.zeros(2, 3).t()
    update("w", torch.ones(3, 2), weight)
    optimizer.set_learning_rate(0.5)
    update("w", torch.ones(3, 2), weight)
    assert torch.equal(weight, torch.full((3, 2), -1.5))


def test_kvps_knows_each_rule() -> None:
    kv = kvps.create("local")
    for kind in mx.optimizer.BY_NAME.values():
        optimizer = kind()
        kv = kvps.create("local")
        kv.set_optimizer(optimizer.rule.name, **optimizer.numbers())
