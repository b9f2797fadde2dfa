"""torch.optim's update rules on flat slices, and the updater of each optimizer name.

Theory of operation
-------------------
Where torch has an optimizer, its own functional kernel does the arithmetic, so that training on
servers equals training in one process. ``sgd``, ``adam``, ``adamw`` and ``adagrad`` use the fused
CPU kernels (one pass over memory) for float32 and float64 weights; all else uses the
single-tensor form, which is what torch.optim itself chooses on a CPU.

torch keeps a ``step`` tensor per parameter. Here the caller counts, per key, and a one-element
tensor is made for each call: two keys of one chunk may have had different numbers of updates.

The registry maps names to classes. The wire only ever carries a name, looked up here; new names
come from :func:`register`, called by a module that the server's operator loaded.
"""

from __future__ import annotations

import abc
from array import array
from typing import TYPE_CHECKING

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

from kvps.core.optim.base import RULES, State, Terms, Updater
from kvps.core.optim.hyperparams import HyperParams, Schema, register_schema
from kvps.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator


PRODUCTS_MAX = 1 << 18
"""For how many steps NAdam's product of decays is followed one by one."""


def _steps(terms: Terms) -> list[Tensor]:
    """Return torch's step counter as it stands before this update; torch adds the 1."""
    return [torch.tensor(float(terms.step - 1), dtype=torch.float32)]


def _may_fuse(weight: Tensor) -> bool:
    """Return whether the fused kernels may update ``weight``.

    Not if it is half: in torch 2.13 and before, fused SGD on a CPU leaves whole vectors of half
    weights as they were and writes trash to their momenta, without a word (pytorch issue 191763).
    The fused Adam is right, but rounds in other places than torch.optim does by default.
    Not on a GPU either, where fused kernels want the step count on the GPU too.
    """
    return weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.float64)


class TorchUpdater(Updater):
    """What the rules of torch.optim share: ``maximize``, and state that starts at 0."""

    def __init__(self, hyper: HyperParams) -> None:
        super().__init__(hyper)
        self._maximize = hyper.flag("maximize")

    @abc.abstractmethod
    def _entries(self) -> Iterator[str]:
        """Yield the names of the state entries."""

    def _new_state(self, weight: Tensor) -> State:
        return {name: torch.zeros_like(weight) for name in self._entries()}


class Sgd(TorchUpdater):
    """:class:`torch.optim.SGD`. State: ``momentum_buffer`` if momentum."""

    def __init__(self, hyper: HyperParams) -> None:
        super().__init__(hyper)
        self._momentum = hyper.number("momentum")
        self._dampening = hyper.number("dampening")
        self._nesterov = hyper.flag("nesterov")

    def _entries(self) -> Iterator[str]:
        if self._momentum:
            yield "momentum_buffer"

    def _update(self, weight: Tensor, gradient: Tensor, state: State, terms: Terms) -> None:
        sgd(
            [weight],
            [gradient],
            [state["momentum_buffer"] if self._momentum else None],
            fused=_may_fuse(weight),
            foreach=False,
            weight_decay=terms.weight_decay,
            momentum=self._momentum,
            lr=terms.lr,
            # torch's first buffer is the undamped gradient; ours is 0, so not damping once is it.
            dampening=0.0 if terms.step == 1 else self._dampening,
            nesterov=self._nesterov,
            maximize=self._maximize,
        )


class _Moments(TorchUpdater):
    """What Adam's family shares: two moments, their decays and ``eps``."""

    def __init__(self, hyper: HyperParams) -> None:
        super().__init__(hyper)
        self._beta1 = hyper.number("beta1")
        self._beta2 = hyper.number("beta2")
        self._eps = hyper.number("eps")

    def _entries(self) -> Iterator[str]:
        yield from ("exp_avg", "exp_avg_sq")


class Adam(_Moments):
    """:class:`torch.optim.Adam` and, by the name ``adamw``, :class:`torch.optim.AdamW`.

    State: ``exp_avg``, ``exp_avg_sq``, and ``max_exp_avg_sq`` if amsgrad.
    """

    def __init__(self, hyper: HyperParams) -> None:
        super().__init__(hyper)
        self._amsgrad = hyper.flag("amsgrad")
        self._decoupled = hyper.name == "adamw"

    def _entries(self) -> Iterator[str]:
        yield from super()._entries()
        if self._amsgrad:
            yield "max_exp_avg_sq"

    def _update(self, weight: Tensor, gradient: Tensor, state: State, terms: Terms) -> None:
        adam(
            [weight],
            [gradient],
            [state["exp_avg"]],
            [state["exp_avg_sq"]],
            [state["max_exp_avg_sq"]] if self._amsgrad else [],
            _steps(terms),
            fused=_may_fuse(weight),
            foreach=False,
            decoupled_weight_decay=self._decoupled,
            amsgrad=self._amsgrad,
            beta1=self._beta1,
            beta2=self._beta2,
            lr=terms.lr,
            weight_decay=terms.weight_decay,
            eps=self._eps,
            maximize=self._maximize,
        )


class Adagrad(TorchUpdater):
    """:class:`torch.optim.Adagrad`. State: ``sum``."""

    def __init__(self, hyper: HyperParams) -> None:
        super().__init__(hyper)
        self._lr_decay = hyper.number("lr_decay")
        self._initial = hyper.number("initial_accumulator_value")
        self._eps = hyper.number("eps")

    def _entries(self) -> Iterator[str]:
        yield "sum"

    def _new_state(self, weight: Tensor) -> State:
        state = super()._new_state(weight)
        state["sum"].fill_(self._initial)
        return state

    def _update(self, weight: Tensor, gradient: Tensor, state: State, terms: Terms) -> None:
        adagrad(
            [weight],
            [gradient],
            [state["sum"]],
            _steps(terms),
            fused=_may_fuse(weight),
            foreach=False,
            lr=terms.lr,
            weight_decay=terms.weight_decay,
            lr_decay=self._lr_decay,
            eps=self._eps,
            maximize=self._maximize,
        )


class Adadelta(TorchUpdater):
    """:class:`torch.optim.Adadelta`. State: ``square_avg``, ``acc_delta``."""

    def __init__(self, hyper: HyperParams) -> None:
        super().__init__(hyper)
        self._rho = hyper.number("rho")
        self._eps = hyper.number("eps")

    def _entries(self) -> Iterator[str]:
        yield from ("square_avg", "acc_delta")

    def _update(self, weight: Tensor, gradient: Tensor, state: State, terms: Terms) -> None:
        adadelta(
            [weight],
            [gradient],
            [state["square_avg"]],
            [state["acc_delta"]],
            _steps(terms),
            foreach=False,
            lr=terms.lr,
            rho=self._rho,
            eps=self._eps,
            weight_decay=terms.weight_decay,
            maximize=self._maximize,
        )


class RmsProp(TorchUpdater):
    """:class:`torch.optim.RMSprop`.

    State: ``square_avg``, ``grad_avg`` if centered, ``momentum_buffer`` if momentum.
    """

    def __init__(self, hyper: HyperParams) -> None:
        super().__init__(hyper)
        self._alpha = hyper.number("alpha")
        self._eps = hyper.number("eps")
        self._momentum = hyper.number("momentum")
        self._centered = hyper.flag("centered")

    def _entries(self) -> Iterator[str]:
        yield "square_avg"
        if self._centered:
            yield "grad_avg"
        if self._momentum:
            yield "momentum_buffer"

    def _update(self, weight: Tensor, gradient: Tensor, state: State, terms: Terms) -> None:
        rmsprop(
            [weight],
            [gradient],
            [state["square_avg"]],
            [state["grad_avg"]] if self._centered else [],
            [state["momentum_buffer"]] if self._momentum else [],
            _steps(terms),
            foreach=False,
            maximize=self._maximize,
            lr=terms.lr,
            alpha=self._alpha,
            eps=self._eps,
            weight_decay=terms.weight_decay,
            momentum=self._momentum,
            centered=self._centered,
        )


class NAdam(_Moments):
    """:class:`torch.optim.NAdam`. State: ``exp_avg``, ``exp_avg_sq``.

    torch also keeps ``mu_product``, one number per parameter. It depends on the step and on
    ``beta1`` and ``momentum_decay`` alone, so it is computed, not stored. (Changing these two on
    the way therefore acts as if they had always been so; torch would keep the old factors.)
    """

    def __init__(self, hyper: HyperParams) -> None:
        super().__init__(hyper)
        self._momentum_decay = hyper.number("momentum_decay")
        self._decoupled = hyper.flag("decoupled_weight_decay")
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

    def _update(self, weight: Tensor, gradient: Tensor, state: State, terms: Terms) -> None:
        nadam(
            [weight],
            [gradient],
            [state["exp_avg"]],
            [state["exp_avg_sq"]],
            [torch.tensor(self.product(terms.step - 1), dtype=torch.float32)],
            _steps(terms),
            decoupled_weight_decay=self._decoupled,
            foreach=False,
            maximize=self._maximize,
            beta1=self._beta1,
            beta2=self._beta2,
            lr=terms.lr,
            weight_decay=terms.weight_decay,
            momentum_decay=self._momentum_decay,
            eps=self._eps,
        )


class RAdam(_Moments):
    """:class:`torch.optim.RAdam`. State: ``exp_avg``, ``exp_avg_sq``."""

    def __init__(self, hyper: HyperParams) -> None:
        super().__init__(hyper)
        self._decoupled = hyper.flag("decoupled_weight_decay")

    def _update(self, weight: Tensor, gradient: Tensor, state: State, terms: Terms) -> None:
        radam(
            [weight],
            [gradient],
            [state["exp_avg"]],
            [state["exp_avg_sq"]],
            _steps(terms),
            decoupled_weight_decay=self._decoupled,
            foreach=False,
            maximize=self._maximize,
            beta1=self._beta1,
            beta2=self._beta2,
            lr=terms.lr,
            weight_decay=terms.weight_decay,
            eps=self._eps,
        )


class Adamax(_Moments):
    """:class:`torch.optim.Adamax`. State: ``exp_avg``, ``exp_inf``."""

    def _entries(self) -> Iterator[str]:
        yield from ("exp_avg", "exp_inf")

    def _update(self, weight: Tensor, gradient: Tensor, state: State, terms: Terms) -> None:
        adamax(
            [weight],
            [gradient],
            [state["exp_avg"]],
            [state["exp_inf"]],
            _steps(terms),
            foreach=False,
            maximize=self._maximize,
            eps=self._eps,
            beta1=self._beta1,
            beta2=self._beta2,
            lr=terms.lr,
            weight_decay=terms.weight_decay,
        )


UPDATERS: dict[str, type[Updater]] = {
    "sgd": Sgd,
    "adam": Adam,
    "adamw": Adam,
    "adagrad": Adagrad,
    "adadelta": Adadelta,
    "rmsprop": RmsProp,
    "nadam": NAdam,
    "radam": RAdam,
    "adamax": Adamax,
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
    return cls(hyper)


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
        raise ConfigError(
            f"optimizer '{name}' comes with the schema of '{schema.name}'; give both one name"
        )
    register_schema(schema)
    UPDATERS[name] = cls


__all__ = [
    "UPDATERS",
    "State",
    "Terms",
    "TorchUpdater",
    "Updater",
    "create",
    "register",
]
