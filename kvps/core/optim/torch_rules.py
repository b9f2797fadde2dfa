"""torch.optim's update rules on flat slices, and the updater of each optimizer name.

Theory of operation
-------------------
Where torch has an optimizer, its own functional kernel does the arithmetic, so that training on
servers equals training in one process. A table says how each kernel is called
(:data:`TORCH_RULES`); :class:`TorchUpdater` calls it. ``sgd``, ``adam``, ``adamw`` and ``adagrad`` use
the fused CPU kernels (one pass over memory) for float32 and float64 weights; all else uses the
single-tensor form, which is what torch.optim itself chooses on a CPU. (Why not torch.optim's
classes: docs/decisions/0021.)

torch keeps a ``step`` tensor per parameter. Here the caller counts, per key, and a one-element
tensor is made for each call: two keys of one chunk may have had different numbers of updates.

The registry maps names to classes. The wire only ever carries a name, looked up here; new names
come from :func:`register`, called by a module that the server's operator loaded.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim.adadelta import adadelta
from torch.optim.adagrad import adagrad
from torch.optim.adam import adam
from torch.optim.adamax import adamax
from torch.optim.nadam import nadam
from torch.optim.radam import radam
from torch.optim.rmsprop import rmsprop
from torch.optim.sgd import sgd

from kvps.core.optim.base import State, Terms, Updater
from kvps.core.optim.extra_rules import RULES
from kvps.core.optim.hyperparams import HyperParams, Schema, register_schema
from kvps.errors import ConfigError

PRODUCTS_MAX = 1 << 18
"""For how many steps NAdam's product of decays is followed one by one."""


class TorchRule(NamedTuple):
    """How one kernel of torch.optim is called.

    After parameters and gradients it takes a list for each state, then one of step counters; by name
    it takes the hyper-parameters that its optimizer declares.
    """

    kernel: Callable[..., None]
    states: Mapping[str, str]
    """State entry -> the hyper-parameter that has to be on for it, or "" for none, in the kernel's order."""
    fuses: bool = False
    """It has a fused form on a CPU."""
    initial: str = ""
    """The hyper-parameter at which states begin; "" for 0. The kernel does not take it."""
    fixed: Mapping[str, object] = MappingProxyType({})
    """Further arguments of the kernel."""


_MOMENTS = {"exp_avg": "", "exp_avg_sq": ""}
_ADAM = {**_MOMENTS, "max_exp_avg_sq": "amsgrad"}

TORCH_RULES: Mapping[str, TorchRule] = {
    "sgd": TorchRule(sgd, {"momentum_buffer": "momentum"}, fuses=True),
    "adam": TorchRule(adam, _ADAM, fuses=True, fixed={"decoupled_weight_decay": False}),
    "adamw": TorchRule(adam, _ADAM, fuses=True, fixed={"decoupled_weight_decay": True}),
    "adagrad": TorchRule(adagrad, {"sum": ""}, fuses=True, initial="initial_accumulator_value"),
    "adadelta": TorchRule(adadelta, {"square_avg": "", "acc_delta": ""}),
    "rmsprop": TorchRule(rmsprop, {"square_avg": "", "grad_avg": "centered", "momentum_buffer": "momentum"}),
    "nadam": TorchRule(nadam, _MOMENTS),
    "radam": TorchRule(radam, _MOMENTS),
    "adamax": TorchRule(adamax, {"exp_avg": "", "exp_inf": ""}),
}
"""Optimizer name -> rule, of torch.optim's that servers run."""

_COMMON = {"lr", "weight_decay", "rescale_grad", "clip_gradient", "clip_global_norm", "multi_precision"}
"""Hyper-parameters that no kernel takes as they are set: they are of each key, or applied before."""


def _may_fuse(weight: Tensor) -> bool:
    """Return whether the fused kernels may update ``weight``.

    Not if it is half: in torch 2.13 and before, fused SGD on a CPU leaves whole vectors of half
    weights as they were and writes trash to their momenta, without a word (pytorch issue 191763).
    The fused Adam is right, but rounds in other places than torch.optim does by default.
    Not on a GPU either, where fused kernels want the step count on the GPU too.
    """
    return weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.float64)


class TorchUpdater(Updater):
    """A rule of torch.optim, called as its row of :data:`TORCH_RULES` says."""

    def __init__(self, hyper: HyperParams) -> None:
        super().__init__(hyper)
        rule = self._rule = TORCH_RULES[hyper.name]
        self._initial = hyper.number(rule.initial) if rule.initial else 0.0
        self._states = [
            name if not option or hyper.values[option] else None for name, option in rule.states.items()
        ]
        own = {
            name: value
            for name, value in hyper.values.items()
            if name not in _COMMON and name != rule.initial
        }
        self._kernel = partial(rule.kernel, foreach=False, **rule.fixed, **own)

    def _new_state(self, weight: Tensor) -> State:
        return {name: torch.full_like(weight, self._initial) for name in self._states if name}

    def _update(self, weight: Tensor, gradient: Tensor, state: State, terms: Terms) -> None:
        states = [[state[name]] if name else [] for name in self._states]
        fused = {"fused": _may_fuse(weight)} if self._rule.fuses else {}
        self._kernel(
            [weight],
            [gradient],
            *states,
            *self._counters(terms.step),
            lr=terms.lr,
            weight_decay=terms.weight_decay,
            **fused,
        )

    def _counters(self, step: int) -> tuple[list[Tensor], ...]:
        """Return torch's counters as they stand before update ``step``; torch adds the 1."""
        return ([torch.tensor(float(step - 1), dtype=torch.float32)],)


class Sgd(TorchUpdater):
    """:class:`torch.optim.SGD`, which counts no steps."""

    def __init__(self, hyper: HyperParams) -> None:
        super().__init__(hyper)
        self._first = partial(self._kernel, dampening=0.0)

    def _update(self, weight: Tensor, gradient: Tensor, state: State, terms: Terms) -> None:
        # torch's first buffer is the undamped gradient; ours is 0, so not damping once is it.
        kernel = self._first if terms.step == 1 else self._kernel
        kernel(
            [weight],
            [gradient],
            [state.get("momentum_buffer")],
            lr=terms.lr,
            weight_decay=terms.weight_decay,
            fused=_may_fuse(weight),
        )


class PlainSgd(Updater):
    """SGD without momentum and decay: the one line of :class:`torch.optim.SGD` that does something then."""

    def __init__(self, hyper: HyperParams) -> None:
        super().__init__(hyper)
        self.spends_gradients = self._prepares

    def _update(self, weight: Tensor, gradient: Tensor, state: State, terms: Terms) -> None:
        weight.add_(gradient, alpha=-terms.lr)


class NAdam(TorchUpdater):
    """:class:`torch.optim.NAdam`, with its ``mu_product``.

    torch keeps that as one number per parameter. It depends on the step and on ``beta1`` and
    ``momentum_decay`` alone, so it is computed, not stored. (Changing these two on the way therefore
    acts as if they had always been so; torch would keep the old factors.)
    """

    def __init__(self, hyper: HyperParams) -> None:
        super().__init__(hyper)
        self._beta1 = hyper.number("beta1")
        self._momentum_decay = hyper.number("momentum_decay")
        # mu_product by number of steps; filled as steps come. float32, as torch's: so are the
        # roundings, and the results bit for bit.
        self._products = array("f", [1.0])

    def product(self, steps: int) -> float:
        """Return torch's ``mu_product`` after ``steps`` updates.

        Beyond :data:`PRODUCTS_MAX` only a beta1 of almost 1 has one that is not 0: it is no more
        followed step by step then, and may differ from torch's in its last bits.
        """
        products = self._products
        last = min(steps, PRODUCTS_MAX)
        while len(products) <= last and products[-1]:  # once 0, it stays 0: no need to grow
            mu = self._beta1 * (1.0 - 0.5 * 0.96 ** (len(products) * self._momentum_decay))
            products.append(products[-1] * array("f", [mu])[0])
        known = products[min(steps, len(products) - 1)]
        return known if steps <= PRODUCTS_MAX else known * self._beta1 ** (steps - PRODUCTS_MAX)

    def _counters(self, step: int) -> tuple[list[Tensor], ...]:
        product = torch.tensor(self.product(step - 1), dtype=torch.float32)
        return [product], *super()._counters(step)


_SGD_OPTIONS = "momentum", "weight_decay", "maximize"
"""Hyper-parameters that :class:`PlainSgd` does without."""
UPDATERS: dict[str, type[Updater]] = {
    **dict.fromkeys(TORCH_RULES, TorchUpdater),
    "sgd": Sgd,
    "nadam": NAdam,
    **RULES,
}
"""Optimizer name -> class; :func:`register` adds to it."""


def create(hyper: HyperParams) -> Updater:
    """Return the updater that ``hyper`` names.

    Raises:
        ConfigError: the name has hyper-parameters but no class in this process.

    Example::

        create(resolve("adam", {"lr": 1e-3}))
    """
    cls = UPDATERS.get(hyper.name)
    if cls is None:
        raise ConfigError(
            f"no updater is registered for optimizer '{hyper.name}'; use one of: "
            f"{', '.join(sorted(UPDATERS))}, or load its plug-in module"
        )
    is_plain = cls is Sgd and not any(map(hyper.values.get, _SGD_OPTIONS))
    return PlainSgd(hyper) if is_plain else cls(hyper)


def register(name: str, cls: type[Updater], schema: Schema) -> None:
    """Add an optimizer; for modules that a server's operator names with ``--plugin``.

    Args:
        name: lower-case; free so far.
        cls: made with one :class:`~kvps.core.optim.hyperparams.HyperParams`.
        schema: its hyper-parameters, of the same name.

    Raises:
        ConfigError: the name is taken or malformed, or ``schema`` has another.

    Example::

        class Half(Updater):
            def _update(self, weight, gradient, state, terms):
                weight.sub_(gradient, alpha=terms.lr / 2)

        register("half", Half, Schema.of("half", lr=0.1))
    """
    if schema.name != name:
        raise ConfigError(f"optimizer '{name}' has the schema of '{schema.name}'; use the same name for both")
    register_schema(schema)
    UPDATERS[name] = cls


__all__ = ["UPDATERS", "State", "Terms", "TorchUpdater", "Updater", "create", "register"]
