"""Schemas of hyper-parameters: the names, kinds, defaults and ranges that one optimizer declares.

torch is not imported here: a launcher may check a job's settings without paying for it.
"""

from __future__ import annotations

import math
import numbers
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from kvps.errors import ConfigError

Value = float | int | bool | None
"""One hyper-parameter's value, after checking."""

ALIASES: Mapping[str, str] = {"learning_rate": "lr", "wd": "weight_decay", "epsilon": "eps"}
"""MXNet's spelling -> ours; each counts only in a schema that has the parameter."""

FLOAT_MAX = 3.4028234663852886e38
"""The largest float32. A number beyond it cannot be applied to weights: torch refuses to convert it."""

MULTIPLIERS = ("lr_mult", "wd_mult")
"""Names of the two per-key maps, common to all optimizers."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One declared hyper-parameter: its name, default, kind and range.

    Args:
        name: as users spell it.
        default: value when not given. ``None`` makes the parameter optional: ``None`` may then
            also be given, and means "off".
        kind: ``float`` (the default), ``int`` or ``bool``.
        low, high: the range; ``None`` is unbounded. The bounds belong to the range unless
            ``low_open`` / ``high_open`` say otherwise.
        doc: one line for people.

    Example::

        >>> Parameter("beta1", 0.9, low=0.0, high=1.0, high_open=True).check("adam", 0.5)
        0.5
    """

    name: str
    default: Value
    kind: type[float] | type[int] | type[bool] = float
    low: float | None = None
    high: float | None = None
    low_open: bool = False
    high_open: bool = False
    doc: str = ""

    @property
    def range(self) -> str:
        """The allowed values in words, e.g. ``"a number in [0, 1)"``."""
        if self.kind is bool:
            return "True or False"
        noun = "a whole number" if self.kind is int else "a number"
        bounds = ""
        if self.low is not None or self.high is not None:
            left = "(-inf" if self.low is None else f"{'(' if self.low_open else '['}{self.low:g}"
            right = "inf)" if self.high is None else f"{self.high:g}{')' if self.high_open else ']'}"
            bounds = f" in {left}, {right}"
        return noun + bounds + (" or None" if self.default is None else "")

    def check(self, optimizer: str, value: object) -> Value:
        """Return ``value`` as this parameter's kind.

        Args:
            optimizer: whose parameter it is; for the error text.
            value: anything; Python and numpy scalars of the right kind are accepted. A bool is
                not a number, and a number is not a bool.

        Raises:
            ConfigError: wrong kind, NaN, infinite, beyond float32, or out of range.
        """
        if value is None and self.default is None:
            return None
        if self.kind is bool:
            if not isinstance(value, bool | np.bool_):
                raise self._refusal(optimizer, value)
            return bool(value)
        number = _as_int(value) if self.kind is int else as_float(value)
        if number is None or not self._contains(number):
            raise self._refusal(optimizer, value)
        return number

    def _contains(self, number: float) -> bool:
        if abs(number) > FLOAT_MAX:
            return False
        if self.low is not None and not (number > self.low if self.low_open else number >= self.low):
            return False
        return self.high is None or (number < self.high if self.high_open else number <= self.high)

    def _refusal(self, optimizer: str, value: object) -> ConfigError:
        # reprlib: the value may have come from the network and be as long as the sender liked.
        number = as_float(value)
        is_beyond = number is not None and abs(number) > FLOAT_MAX
        limit = f" up to {FLOAT_MAX:.3g}, the largest float32" if is_beyond else ""
        return ConfigError(
            f"optimizer '{optimizer}': {self.name}={reprlib.repr(value)} is not allowed; "
            f"give {self.range}{limit}"
        )


def _as_int(value: object) -> int | None:
    """Return ``value`` as an int, or None where it is not a whole number by type."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        return None
    return int(value)


def as_float(value: object) -> float | None:
    """Return ``value`` as a finite float, or None where there is none."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    try:
        number = float(value)
    except OverflowError:  # a Python int beyond the range of a float
        return None
    return number if math.isfinite(number) else None


Check = Callable[[Mapping[str, Value]], str | None]
"""A rule over several parameters: what is wrong and what to do, or None."""


@dataclass(frozen=True, slots=True)
class Schema:
    """All hyper-parameters of one optimizer; :meth:`of` adds the common ones.

    Args:
        name: the optimizer's name, lower-case.
        parameters: every parameter, the common ones included, in the order they are listed.
        aliases: other spelling -> parameter name, for this optimizer only.
        pairs: name of a pair -> the two parameters it sets, e.g. ``betas``.
        check: a rule over several parameters, or None.
    """

    name: str
    parameters: tuple[Parameter, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)
    pairs: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    check: Check | None = None

    @classmethod
    def of(
        cls,
        name: str,
        *own: Parameter,
        lr: float,
        weight_decay: float = 0.0,
        aliases: Mapping[str, str] | None = None,
        check: Check | None = None,
    ) -> Schema:
        """Return the schema of ``name``: the common parameters, then ``own``.

        Args:
            own: parameters of this optimizer; one named like a common parameter replaces it.
            lr, weight_decay: defaults of these two.
            aliases, check: as in :class:`Schema`.

        Example::

            Schema.of("mine", Parameter("momentum", 0.9, low=0.0), lr=0.1)
        """
        parameters = {parameter.name: parameter for parameter in _common(lr, weight_decay)}
        parameters.update((parameter.name, parameter) for parameter in own)
        known = {alias: real for alias, real in ALIASES.items() if real in parameters}
        has_betas = {"beta1", "beta2"} <= parameters.keys()
        return cls(
            name=name,
            parameters=tuple(parameters.values()),
            aliases=known | dict(aliases or {}),
            pairs={"betas": ("beta1", "beta2")} if has_betas else {},
            check=check,
        )

    def by_name(self) -> dict[str, Parameter]:
        """Return name -> parameter, in order."""
        return {parameter.name: parameter for parameter in self.parameters}

    def valid_names(self) -> str:
        """Return every accepted spelling, for an error text."""
        names = [parameter.name for parameter in self.parameters]
        return ", ".join([*names, *self.pairs, *MULTIPLIERS, *self.aliases])


def _common(lr: float, weight_decay: float) -> tuple[Parameter, ...]:
    return (
        Parameter("lr", lr, low=0.0, doc="learning rate"),
        Parameter("weight_decay", weight_decay, low=0.0, doc="pull of the weights towards 0"),
        Parameter("rescale_grad", 1.0, doc="factor on every summed gradient, before clipping"),
        Parameter(
            "clip_gradient",
            None,
            low=0.0,
            low_open=True,
            doc="c: each element is clipped to [-c, c]; None: not clipped",
        ),
        Parameter(
            "clip_global_norm",
            None,
            low=0.0,
            low_open=True,
            doc="the gradients of one push call are scaled down to this norm over all its keys; "
            "None: not scaled",
        ),
        Parameter("multi_precision", False, kind=bool, doc="keep a float32 master of half weights"),
    )
