"""Hyper-parameters: the numbers of each optimizer, and their allowed ranges.

Theory of operation
-------------------
An optimizer crosses the network as a *name* and *numbers*, never as code. This file is the one
judge of both: the worker asks it before it sends, and the server asks it again about what came
in, with the same function, :func:`resolve`::

    set_optimizer("sgd", learning_rate=0.1) -> resolve -> Hyper -> to_wire
                                                                      |  (network)
                                    Updater <- Hyper <- resolve <- from_wire

A :class:`HyperParams` is therefore always complete (defaults are filled in), in range and finite.
Defaults are torch.optim's where torch has the optimizer and MXNet's otherwise. torch is not
imported here: a launcher may check a job's settings without paying for it.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from kvps.core.optim.schema import FLOAT_MAX, MULTIPLIERS, Parameter, Schema, Value, as_float
from kvps.errors import ConfigError

WireValue = float | int | bool | None | dict[str, float]
"""A hyper-parameter on the wire: a number, a flag, nil, or a map of multipliers."""


@dataclass(frozen=True, slots=True)
class HyperParams:
    """One optimizer's name and complete, checked hyper-parameters.

    Made by :func:`resolve`; two of them are equal when they mean the same. The maps are not to
    be written to.

    Args:
        name: lower-case name; a key of :data:`SCHEMAS`.
        values: parameter name -> value, defaults filled in.
        lr_mult, wd_mult: key -> factor on ``lr`` / ``weight_decay`` of that key; 1 if absent.

    Example::

        >>> hyper = resolve("sgd", {"lr": 0.1, "lr_mult": {"bias": 2.0}})
        >>> hyper.for_key("bias")
        (0.2, 0.0)
    """

    name: str
    values: Mapping[str, Value]
    lr_mult: Mapping[str, float] = field(default_factory=dict)
    wd_mult: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def from_wire(cls, name: object, mapping: object) -> HyperParams:
        """Return what a peer sent, checked anew.

        Raises:
            ConfigError: as :func:`resolve`, or it is not a map at all.
        """
        if not isinstance(mapping, Mapping):
            raise ConfigError(
                f"optimizer {reprlib.repr(name)}: {reprlib.repr(mapping)} is not a map of hyper-parameters; "
                "send the result of Hyper.to_wire()"
            )
        return resolve(name, mapping)

    def to_wire(self) -> dict[str, WireValue]:
        """Return one map of msgpack types; ``from_wire(name, to_wire())`` equals this."""
        maps: dict[str, WireValue] = {"lr_mult": dict(self.lr_mult), "wd_mult": dict(self.wd_mult)}
        return {**self.values, **maps}

    def beside(self, other: object) -> str:
        """Return the name, and the hyper-parameters that are not those of ``other``.

        Example::

            >>> resolve("sgd", {"lr": 0.1}).beside(resolve("sgd", {"lr": 0.2}))
            'sgd with lr=0.1'
        """
        if not isinstance(other, HyperParams) or other.name != self.name:
            return self.name
        theirs = other.to_wire()
        unlike = [
            f"{name}={reprlib.repr(value)}" for name, value in self.to_wire().items() if value != theirs[name]
        ]
        return f"{self.name} with {', '.join(unlike)}" if unlike else self.name

    def with_lr(self, lr: object) -> HyperParams:
        """Return the same with another learning rate.

        Raises:
            ConfigError: not a number, or out of the optimizer's range.
        """
        parameter = schema_of(self.name).by_name()["lr"]
        return replace(self, values={**self.values, "lr": parameter.check(self.name, lr)})

    def demand_steps(self, store: str, mode: str, quorum: int, on_nonfinite: str) -> None:
        """Check that a store with these options can clip gradients by their global norm, if this
        optimizer does.

        Raises:
            ConfigError: if it has no rounds in which all ranks push the same step, or drops keys one by one.
        """
        limit = self.optional("clip_global_norm")
        if limit is None:
            return
        wrong = ""
        if mode != "sync":
            wrong = f"is dist_{mode}, which applies the push of each worker by itself; use dist_sync"
        elif quorum:
            wrong = (
                f"closes rounds at {quorum} workers, so that keys of one step have other workers; "
                "use quorum=None"
            )
        elif on_nonfinite != "apply":
            wrong = (
                f"has on_nonfinite={on_nonfinite!r}, which drops keys one by one; leave on_nonfinite at "
                "'apply', with which a step with NaN makes all weights NaN, as clip_grad_norm_ does"
            )
        if wrong:
            raise ConfigError(
                f"clip_global_norm={limit:g} needs all gradients of a step, but store {store!r} {wrong}. Or "
                "clip with the optimizer on the workers: update_on_kvstore=False, and "
                "torch.nn.utils.clip_grad_norm_"
            )

    def for_key(self, key: str) -> tuple[float, float]:
        """Return (learning rate, weight decay) of ``key``, multipliers applied."""
        return (
            self.number("lr") * self.lr_mult.get(key, 1.0),
            self.number("weight_decay") * self.wd_mult.get(key, 1.0),
        )

    def largest(self) -> tuple[float, float]:
        """Return the largest (learning rate, weight decay) that any key has."""
        return (
            self.number("lr") * max(self.lr_mult.values(), default=1.0),
            self.number("weight_decay") * max(self.wd_mult.values(), default=1.0),
        )

    def number(self, name: str) -> float:
        """Return a parameter of kind float or int that is not optional."""
        return cast("float", self.values[name])

    def flag(self, name: str) -> bool:
        """Return a parameter of kind bool."""
        return cast("bool", self.values[name])

    def optional(self, name: str) -> float | None:
        """Return a parameter that may be None (off)."""
        return cast("float | None", self.values[name])


def resolve(name: object, params: Mapping[str, object]) -> HyperParams:
    """Return the complete, checked hyper-parameters of an optimizer.

    Args:
        name: an optimizer's name, in any case.
        params: parameter -> value, as a user wrote or a peer sent them. Aliases
            (``learning_rate``, ``wd``, ``epsilon``) and ``betas=(b1, b2)`` are understood.

    Raises:
        ConfigError: unknown optimizer or parameter (the text lists the valid ones), one
            parameter given twice under two spellings, or a value of wrong kind or range.

    Example::

        >>> resolve("Adam", {"betas": (0.8, 0.99)}).number("beta1")
        0.8
    """
    schema = schema_of(name)
    plain = _unaliased(schema, params)
    maps = {which: _multipliers(schema.name, which, plain.pop(which, {})) for which in MULTIPLIERS}
    parameters = schema.by_name()
    unknown = [spelling for spelling in plain if spelling not in parameters]
    if unknown:
        raise ConfigError(
            f"optimizer '{schema.name}' has no hyper-parameter {reprlib.repr(unknown[0])}; "
            f"remove it or use one of: {schema.valid_names()}"
        )
    values = {
        parameter.name: parameter.check(schema.name, plain.get(parameter.name, parameter.default))
        for parameter in schema.parameters
    }
    if schema.check is not None and (wrong := schema.check(values)):
        raise ConfigError(f"optimizer '{schema.name}': {wrong}")
    return HyperParams(schema.name, values, **maps)


def schema_of(name: object) -> Schema:
    """Return the schema of the optimizer ``name`` (any case).

    Raises:
        ConfigError: there is none; the text lists the valid names.
    """
    schema = SCHEMAS.get(name.lower()) if isinstance(name, str) else None
    if schema is None:
        raise ConfigError(
            f"unknown optimizer {reprlib.repr(name)}; use one of: {', '.join(sorted(SCHEMAS))} "
            "(optimizers of a plug-in are known after its module is loaded)"
        )
    return schema


def _unaliased(schema: Schema, params: Mapping[str, object]) -> dict[str, object]:
    """Return ``params`` under real names; one parameter under two spellings is an error."""
    plain: dict[str, object] = {}
    spelled: dict[str, str] = {}
    for spelling, value in params.items():
        for real, part in _expand(schema, spelling, value):
            if real in plain:
                raise ConfigError(
                    f"optimizer '{schema.name}': '{spelling}' and '{spelled[real]}' both set "
                    f"'{real}'; give only one"
                )
            plain[real], spelled[real] = part, spelling
    return plain


def _expand(schema: Schema, spelling: str, value: object) -> list[tuple[str, object]]:
    """Return the real parameter(s) that one given spelling sets."""
    if spelling not in schema.pairs:
        return [(schema.aliases.get(spelling, spelling), value)]
    if not isinstance(value, Sequence) or isinstance(value, str | bytes) or len(value) != 2:
        raise ConfigError(
            f"optimizer '{schema.name}': {spelling}={reprlib.repr(value)} is not a pair; "
            f"give {spelling}=({', '.join(schema.pairs[spelling])})"
        )
    return list(zip(schema.pairs[spelling], value, strict=True))


def _multipliers(optimizer: str, which: str, factors: object) -> dict[str, float]:
    """Return key -> factor, checked; an int key is its decimal name, as everywhere in kvps."""
    if not isinstance(factors, Mapping):
        raise ConfigError(
            f"optimizer '{optimizer}': {which}={reprlib.repr(factors)} is not a map; give {{key: factor}}"
        )
    checked: dict[str, float] = {}
    for key, factor in factors.items():
        if isinstance(key, bool) or not isinstance(key, str | int):
            raise ConfigError(
                f"optimizer '{optimizer}': {which} has the key {reprlib.repr(key)}; keys are str or int"
            )
        number = as_float(factor)
        if number is None or not 0 <= number <= FLOAT_MAX:
            raise ConfigError(
                f"optimizer '{optimizer}': {which}[{reprlib.repr(key)}]={reprlib.repr(factor)} is "
                f"not allowed; give a number in [0, {FLOAT_MAX:.3g}]"
            )
        if str(key) in checked:
            raise ConfigError(
                f"optimizer '{optimizer}': {which} names the key '{key}' twice (as int and as "
                "str); give it once"
            )
        checked[str(key)] = number
    return checked


def register_schema(schema: Schema) -> None:
    """Make an optimizer's name and hyper-parameters known (for plug-ins).

    Raises:
        ConfigError: the name is taken, or is not a lower-case identifier.
    """
    if schema.name in SCHEMAS:
        raise ConfigError(f"optimizer '{schema.name}' is already registered; choose another name")
    if not schema.name.isidentifier() or schema.name != schema.name.lower():
        raise ConfigError(f"{schema.name!r} cannot name an optimizer; use lower-case letters, digits and _")
    SCHEMAS[schema.name] = schema


def _rate(name: str, default: float, doc: str) -> Parameter:
    """A decay rate: [0, 1)."""
    return Parameter(name, default, low=0.0, high=1.0, high_open=True, doc=doc)


def _eps(default: float) -> Parameter:
    return Parameter("eps", default, low=0.0, doc="keeps a division from being by 0")


def _flag(name: str, doc: str) -> Parameter:
    return Parameter(name, False, kind=bool, doc=doc)


_BETAS = (
    _rate("beta1", 0.9, "decay of the first moment"),
    _rate("beta2", 0.999, "decay of the second moment"),
)
_MOMENTUM = Parameter("momentum", 0.0, low=0.0, doc="share of the last step in this one")
_MAXIMIZE = _flag("maximize", "climb instead of descend")
_DECOUPLED = _flag("decoupled_weight_decay", "decay the weights, not the gradient (AdamW)")
_AMSGRAD = _flag("amsgrad", "never let the second moment shrink")
_ADAM = (*_BETAS, _eps(1e-8), _AMSGRAD, _MAXIMIZE)
_ADAGRAD = (
    Parameter("lr_decay", 0.0, low=0.0, doc="lr is divided by 1 + (step - 1) * lr_decay"),
    Parameter("initial_accumulator_value", 0.0, low=0.0, doc="sum of squares at step 0"),
    _eps(1e-10),
)


def _nesterov_needs_momentum(values: Mapping[str, Value]) -> str | None:
    if values["nesterov"] and (not values["momentum"] or values["dampening"]):
        return "nesterov=True needs momentum above 0 and dampening=0; set them"
    return None


def _bounds_in_order(values: Mapping[str, Value]) -> str | None:
    low, high = values["lower_bound"], values["upper_bound"]
    if low is not None and high is not None and low > high:
        return f"lower_bound={low:g} is above upper_bound={high:g}; swap them"
    return None


SCHEMAS: dict[str, Schema] = {
    schema.name: schema
    for schema in (
        Schema.of(
            "sgd",
            _MOMENTUM,
            Parameter("dampening", 0.0, doc="share of the gradient kept out of the momentum"),
            _flag("nesterov", "look ahead along the momentum"),
            _MAXIMIZE,
            lr=1e-3,
            check=_nesterov_needs_momentum,
        ),
        Schema.of("adam", *_ADAM, lr=1e-3),
        Schema.of("adamw", *_ADAM, lr=1e-3, weight_decay=1e-2),
        Schema.of("adagrad", *_ADAGRAD, _MAXIMIZE, lr=1e-2),
        Schema.of("rowwise_adagrad", *_ADAGRAD, lr=1e-2),
        Schema.of(
            "adadelta",
            Parameter("rho", 0.9, low=0.0, high=1.0, doc="decay of the squared averages"),
            _eps(1e-6),
            _MAXIMIZE,
            lr=1.0,
        ),
        Schema.of(
            "rmsprop",
            Parameter("alpha", 0.99, low=0.0, doc="decay of the squared average"),
            _eps(1e-8),
            _MOMENTUM,
            _flag("centered", "divide by the standard deviation, not by the root mean square"),
            _MAXIMIZE,
            lr=1e-2,
        ),
        Schema.of(
            "nadam",
            *_BETAS,
            _eps(1e-8),
            Parameter("momentum_decay", 4e-3, low=0.0, doc="how soon the momentum reaches beta1"),
            _DECOUPLED,
            _MAXIMIZE,
            lr=2e-3,
        ),
        Schema.of("radam", *_BETAS, _eps(1e-8), _DECOUPLED, _MAXIMIZE, lr=1e-3),
        Schema.of("adamax", *_BETAS, _eps(1e-8), _MAXIMIZE, lr=2e-3),
        Schema.of(
            "lars",
            _MOMENTUM,
            Parameter("eta", 1e-3, low=0.0, doc="trust coefficient"),
            _eps(1e-8),
            lr=0.1,
            aliases={"trust_coefficient": "eta"},
        ),
        Schema.of(
            "lamb",
            *_BETAS,
            _eps(1e-6),
            Parameter("lower_bound", None, low=0.0, doc="least norm of the weight"),
            Parameter("upper_bound", None, low=0.0, doc="greatest norm of the weight"),
            Parameter("bias_correction", True, kind=bool, doc="correct young moments"),
            lr=1e-3,
            check=_bounds_in_order,
        ),
        Schema.of(
            "ftrl",
            Parameter("lr", 0.1, low=0.0, low_open=True, doc="learning rate"),
            Parameter("lamda1", 0.01, low=0.0, doc="L1 strength"),
            Parameter("beta", 1.0, low=0.0, low_open=True, doc="smooths the first steps"),
            lr=0.1,
        ),
        Schema.of(
            "signum",
            _rate("momentum", 0.9, "decay of the averaged gradient"),
            Parameter("wd_lh", 0.0, low=0.0, doc="decoupled weight decay"),
            lr=0.01,
        ),
        Schema.of(
            "dcasgd",
            _MOMENTUM,
            Parameter("lamda", 0.04, low=0.0, doc="strength of the delay compensation"),
            lr=0.1,
        ),
        Schema.of(
            "delayed_nesterov",
            _rate("momentum", 0.9, "share of the last momentum in this one"),
            Parameter("period", 1, kind=int, low=1, doc="pushes from one step of the momentum to the next"),
            lr=0.7,
        ),
        Schema.of("test", lr=1.0),
        Schema.of("assign", lr=1.0),
    )
}
"""Optimizer name -> schema; :func:`register_schema` adds to it."""

__all__ = ["FLOAT_MAX", "SCHEMAS", "HyperParams", "Parameter", "Schema", "Value", "WireValue"]
__all__ += ["register_schema", "resolve", "schema_of"]
