"""The base of MXNet's optimizers: a name and numbers for the servers, with MXNet's arguments and defaults.

An optimizer of MXNet is an object that travels as a pickle. Here it is described by a
:class:`Rule`: the optimizer of kvps, and how its parameters follow from MXNet's arguments. Where
MXNet's rule cannot be had so, the constructor raises ConfigError with the way out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

from kvps.core.optim.hyperparams import HyperParams, resolve
from kvps.errors import ConfigError
from kvps.store.kvstore import KVStore

COMMON = {
    **{"rescale_grad": 1.0, "param_idx2name": None, "wd": 0.0, "clip_gradient": None},
    **{"lr_scheduler": None, "sym": None, "begin_num_update": 0, "multi_precision": False},
    **{"param_dict": None, "aggregate_num": None, "use_fused_step": None},
}
"""Arguments of every optimizer, besides ``learning_rate``, and their defaults."""
WAYS_OUT = {
    "lr_scheduler": "call optimizer.set_learning_rate(lr) on every worker; it reaches the servers",
    "sym": "give lr_mult and wd_mult by set_lr_mult() and set_wd_mult()",
    "begin_num_update": "load_optimizer_states() restores step counts",
    "param_dict": "give lr_mult and wd_mult by set_lr_mult() and set_wd_mult()",
    "clip_weights": "clip the weights after the pull",
}
"""Argument -> what to do in its place; every other value than the default is refused."""


class Rule(NamedTuple):
    """One optimizer of MXNet: its arguments, and their names in kvps."""

    name: str
    """The name of the optimizer in kvps."""
    defaults: Mapping[str, object]
    """The arguments of MXNet's constructor, in its order, with their defaults."""
    numbers: Callable[[Mapping[str, Any]], dict[str, Any]]
    """Arguments -> the parameters of kvps, besides the parameters of all optimizers."""
    learning_rate: float = 0.01
    decay: str = ""
    """Why weight decay is refused; empty if it is MXNet's."""
    has_rate: bool = True
    """The learning rate counts; some of MXNet's ignore it."""


class Optimizer:
    """An optimizer of MXNet, as a name and numbers. Use one of its subclasses, or
    ``mx.optimizer.create(name)``.

    Args:
        args: the first arguments of MXNet's constructor, in its order.
        given: arguments by name: ``learning_rate``, ``wd``, ``rescale_grad``, ``clip_gradient``,
            ``multi_precision``, ``param_idx2name``, and the arguments of the optimizer.

    Raises:
        ConfigError: for an argument that cannot be had here, with the way out.
        TypeError: for an unknown one.

    Example:
        >>> import kvps.compat.mx as mx
        >>> sgd = mx.optimizer.SGD(learning_rate=0.1, momentum=0.9, wd=1e-4)
        >>> sgd.learning_rate, sgd.describe().name
        (0.1, 'sgd')
    """

    rule: ClassVar[Rule]

    def __init__(self, *args: object, **given: Any) -> None:
        title = type(self).__name__
        if not hasattr(self, "rule"):
            raise ConfigError("Optimizer is the base of all: create one such as mx.optimizer.SGD()")
        names = list(self.rule.defaults)
        if len(args) > len(names):
            raise TypeError(f"{title} takes {len(names)} arguments by position, got {len(args)}")
        given = {**dict(zip(names, args, strict=False)), **given}
        known = {**COMMON, "learning_rate": None, **self.rule.defaults}
        for name in given:
            if name not in known:
                raise TypeError(f"{title} has no argument {name!r}; use {', '.join(known)}")
        for name, way_out in WAYS_OUT.items():
            if name in given and given[name] != known[name]:
                raise ConfigError(f"{title}({name}=...) is not available in kvps: {way_out}")
        self._values: dict[str, Any] = {**known, **given}
        if self._values.get("lazy_update") is False:
            raise ConfigError(
                f"{title}(lazy_update=False) is not available in kvps: a push of rows updates these rows "
                "alone; push dense gradients to update all"
            )
        rate = self._values.pop("learning_rate")
        self._lr = float(self.rule.learning_rate if rate is None else rate)
        self.wd = float(self._values["wd"])
        self.rescale_grad = float(self._values["rescale_grad"])
        self.clip_gradient = self._values["clip_gradient"]
        self.multi_precision = bool(self._values["multi_precision"])
        self.idx2name: dict[int, str] = dict(self._values["param_idx2name"] or {})
        self.lr_mult: dict[str | int, float] = {}
        self.wd_mult: dict[str | int, float] = {}
        self._stores: list[KVStore] = []
        self.set_wd_mult({})
        self.describe()

    def describe(self) -> HyperParams:
        """Return the name and the numbers for the servers, as they are now.

        Raises:
            ConfigError: if one is out of range.
        """
        return resolve(self.rule.name, self.numbers())

    def numbers(self) -> dict[str, Any]:
        """Return the parameters by the names of kvps.

        Raises:
            ConfigError: for weight decay, where MXNet's is of another kind.
        """
        if self.wd and self.rule.decay:
            raise ConfigError(
                f"{type(self).__name__}(wd={self.wd:g}) is not available in kvps: {self.rule.decay}"
            )
        clip = self.clip_gradient
        numbers = {
            "lr": self._lr,
            "weight_decay": self.wd,
            "rescale_grad": self.rescale_grad,
            "clip_gradient": clip if clip and clip > 0 else None,
            "multi_precision": self.multi_precision,
            "lr_mult": self._by_key(self.lr_mult),
            "wd_mult": self._by_key(self.wd_mult),
        }
        if not self.rule.has_rate:
            numbers["lr"] = 1.0
        return {**numbers, **self.rule.numbers(self._values)}

    @property
    def learning_rate(self) -> float:
        """The learning rate."""
        return self._lr

    @property
    def lr(self) -> float:
        """The learning rate. Set it, on every worker, and it reaches the stores of this optimizer."""
        return self._lr

    @lr.setter
    def lr(self, lr: float) -> None:
        self.set_learning_rate(lr)

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate, also in the stores that have this optimizer. Every worker calls this.

        MXNet's servers keep the rate that they were sent first.
        """
        self._lr = float(lr)
        self.describe()
        for store in self._stores if self.rule.has_rate else ():
            store.set_learning_rate(self._lr)

    def set_lr_mult(self, args_lr_mult: Mapping[str | int, float]) -> None:
        """Set factors on the learning rate of keys, by the name or the number of a parameter."""
        self.lr_mult = dict(args_lr_mult)
        self._send_again()

    def set_wd_mult(self, args_wd_mult: Mapping[str | int, float]) -> None:
        """Set factors on the weight decay of keys.

        With ``param_idx2name``, parameters whose names end in neither ``_weight`` nor ``_gamma``
        do not decay, as in MXNet.
        """
        names = self.idx2name.values()
        biases = [name for name in names if not name.endswith(("_weight", "_gamma"))]
        self.wd_mult = {**dict.fromkeys(biases, 0.0), **args_wd_mult}
        self._send_again()

    def bind(self, store: KVStore) -> None:
        """Send this optimizer to a store, and its later changes, too."""
        store.set_optimizer(self.rule.name, **self.numbers())
        if store not in self._stores:
            self._stores.append(store)

    def _send_again(self) -> None:
        for store in self._stores:
            store.set_optimizer(self.rule.name, **self.numbers())

    def _by_key(self, factors: Mapping[str | int, float]) -> dict[str, float]:
        """Return factors by the keys of a store: a parameter's number where ``param_idx2name`` has
        its name."""
        keys = {name: str(index) for index, name in self.idx2name.items()}
        return {keys.get(str(name), str(name)): float(factor) for name, factor in factors.items()}
