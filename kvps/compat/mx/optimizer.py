"""Optimizers by MXNet's names, with MXNet's arguments and defaults; the servers run kvps's.

Each class says where its updates differ from MXNet's. All of them clip the gradient before weight
decay is added to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from kvps.compat.mx.elsewhere import missing
from kvps.compat.mx.ndarray import plain
from kvps.compat.mx.rule import Optimizer, Rule
from kvps.store.local_optimizer import ServerRules

_ABSENT = {
    "AdaBelief": "run a torch optimizer on the workers: kvps.torch.DistributedOptimizer",
    "FTML": "use Adam, or run a torch optimizer on the workers: kvps.torch.DistributedOptimizer",
    "GroupAdaGrad": "use AdaGrad",
    "LANS": "use LAMB",
    "LBSGD": "use LARS, and set_learning_rate() for the warm-up",
    "SGLD": "add noise to the gradients before the push, and use SGD",
    "Updater": "use get_updater(optimizer)",
    "register": "kvps-server --plugin MODULE registers optimizers on the servers",
}
_DECOUPLED = (
    "MXNet's decays the weights themselves, and that of kvps is torch's, which decays the gradient. For "
    "torch's, use kv.store.set_optimizer({name!r}, weight_decay=...)"
)
_BETAS = {"beta1": 0.9, "beta2": 0.999}


def _same(*names: str, **renamed: str) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Return a function that passes arguments on, some by another name: ``new="old"``."""

    def numbers(given: Mapping[str, Any]) -> dict[str, Any]:
        return {**{name: given[name] for name in names}, **{new: given[old] for new, old in renamed.items()}}

    return numbers


class SGD(Optimizer):
    """Stochastic gradient descent with momentum.

    The momentum sums gradients, as torch's, and MXNet's sums steps: they differ where the learning
    rate changes.
    """

    rule = Rule("sgd", {"momentum": 0.0, "lazy_update": True}, _same("momentum"))


class ccSGD(SGD):  # noqa: N801  (MXNet has this name)
    """An old name of :class:`SGD`."""


class NAG(Optimizer):
    """SGD with Nesterov's momentum."""

    rule = Rule(
        "sgd",
        {"momentum": 0.0},
        lambda given: {"momentum": given["momentum"], "nesterov": given["momentum"] > 0},
    )


class Adam(Optimizer):
    """Adam. ``epsilon`` is added after the second moment is corrected, as torch does; MXNet adds
    it before."""

    rule = Rule(
        "adam",
        {"learning_rate": None, **_BETAS, "epsilon": 1e-8, "lazy_update": True},
        _same("beta1", "beta2", eps="epsilon"),
        0.001,
    )


class AdaGrad(Optimizer):
    """AdaGrad; without weight decay, as MXNet's is decoupled."""

    rule = Rule(
        "adagrad",
        {"eps": 1e-7},
        # Under the root, where MXNet has it.
        lambda given: {"initial_accumulator_value": given["eps"], "eps": 0.0},
        decay=_DECOUPLED.format(name="adagrad"),
    )


class RMSProp(Optimizer):
    """RMSProp, of Tieleman and Hinton, or of Graves with ``centered``.

    ``epsilon`` is added to the root, as torch does, and not under it: small gradients make larger
    steps than in MXNet.
    """

    rule = Rule(
        "rmsprop",
        {
            **{"learning_rate": None, "gamma1": 0.9, "gamma2": 0.9, "epsilon": 1e-8},
            **{"centered": False, "clip_weights": None},
        },
        lambda given: {
            "alpha": given["gamma1"],
            "eps": given["epsilon"],
            "centered": given["centered"],
            "momentum": given["gamma2"] if given["centered"] else 0.0,
        },
        0.001,
    )


class AdaDelta(Optimizer):
    """AdaDelta; without weight decay, as MXNet's is decoupled. It has no learning rate."""

    rule = Rule(
        "adadelta",
        {"rho": 0.9, "epsilon": 1e-5},
        _same("rho", eps="epsilon"),
        decay=_DECOUPLED.format(name="adadelta"),
        has_rate=False,
    )


class Ftrl(Optimizer):
    """Follow the regularised leader."""

    rule = Rule("ftrl", {"lamda1": 0.01, "learning_rate": None, "beta": 1}, _same("lamda1", "beta"), 0.1)


class Adamax(Optimizer):
    """Adamax, with torch's epsilon of 1e-8: MXNet divides by 0 where all gradients were 0."""

    rule = Rule("adamax", {"learning_rate": None, **_BETAS}, _same("beta1", "beta2"), 0.002)


class Nadam(Optimizer):
    """Adam with Nesterov's momentum. Its schedule is of each key; MXNet's advances with every key."""

    rule = Rule(
        "nadam",
        {"learning_rate": None, **_BETAS, "epsilon": 1e-8, "schedule_decay": 0.004},
        _same("beta1", "beta2", eps="epsilon", momentum_decay="schedule_decay"),
        0.001,
    )


class Signum(Optimizer):
    """The sign of the averaged gradient."""

    rule = Rule("signum", {"learning_rate": None, "momentum": 0.9, "wd_lh": 0.0}, _same("momentum", "wd_lh"))


class LARS(Optimizer):
    """SGD with a rate for each layer, by the norms of whole keys.

    ``momentum_correction`` has nothing to correct: see :class:`SGD`.
    """

    rule = Rule(
        "lars",
        {**{"momentum": 0.0, "lazy_update": True, "eta": 0.001, "eps": 0}, "momentum_correction": True},
        _same("momentum", "eta", "eps"),
    )


class LAMB(Optimizer):
    """Adam with a rate for each layer, by the norms of whole keys."""

    rule = Rule(
        "lamb",
        {
            **{"learning_rate": None, **_BETAS, "epsilon": 1e-6},
            **{"lower_bound": None, "upper_bound": None, "bias_correction": True},
        },
        _same("beta1", "beta2", "lower_bound", "upper_bound", "bias_correction", eps="epsilon"),
        0.001,
    )


class DCASGD(Optimizer):
    """Asynchronous SGD with compensation of the delay."""

    rule = Rule("dcasgd", {"momentum": 0.0, "lamda": 0.04}, _same("momentum", "lamda"))


class Test(Optimizer):
    """``weight += rescale_grad * gradient``."""

    __test__ = False  # pytest takes it for a class of tests
    rule = Rule("test", {}, _same(), has_rate=False)


BY_NAME: dict[str, type[Optimizer]] = {
    kind.__name__.lower(): kind
    for kind in (
        *(SGD, ccSGD, NAG, Adam, AdaGrad, RMSProp, AdaDelta, Ftrl, Adamax, Nadam, Signum),
        *(LARS, LAMB, DCASGD, Test),
    )
}
"""All optimizers, by lower-cased name."""


def create(name: str, **kwargs: Any) -> Optimizer:
    """Return the optimizer that ``name`` names, in any case.

    Raises:
        ValueError: if there is none.

    Example:
        >>> import kvps.compat.mx as mx
        >>> mx.optimizer.create("adam", learning_rate=0.1).learning_rate
        0.1
    """
    kind = BY_NAME.get(name.lower())
    if kind is None:
        ways_out = {absent.lower(): way_out for absent, way_out in _ABSENT.items()}
        way_out = ways_out.get(name.lower(), f"use one of {', '.join(BY_NAME)}")
        raise ValueError(f"there is no optimizer {name!r} in kvps.compat.mx: {way_out}")
    return kind(**kwargs)


def get_updater(optimizer: Optimizer) -> Callable[[int | str, torch.Tensor, torch.Tensor], None]:
    """Return a function ``updater(index, grad, weight)`` that updates a weight in this process.

    The first call for each weight fixes the numbers of the optimizer.

    Example:
        >>> import kvps.compat.mx as mx
        >>> updater = mx.optimizer.get_updater(mx.optimizer.SGD(learning_rate=0.5))
        >>> weight = mx.nd.ones((2,))
        >>> updater(0, mx.nd.ones((2,)), weight)
        >>> weight.asnumpy().tolist()
        [0.5, 0.5]
    """
    rules = ServerRules(optimizer.describe())

    def update(index: int | str, grad: torch.Tensor, weight: torch.Tensor) -> None:
        now = optimizer.describe()
        if now != rules.hyper:
            rules.set_rate(now)
        flat = plain(weight).reshape(-1)
        rules.update(str(index), flat, plain(grad).reshape(-1))
        if flat.data_ptr() != weight.data_ptr():  # of another layout: that was a copy
            plain(weight).copy_(flat.view(weight.shape))

    return update


def __getattr__(name: str) -> object:
    raise missing("mx.optimizer", name, _ABSENT)
