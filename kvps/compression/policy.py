"""The user's compression settings: which keys, by which codec, in which direction.

:func:`rules_of` turns the dict of ``set_gradient_compression`` into checked :class:`CompressionPolicy`, which
say for each key by which :class:`KeyCompression` it travels, if by any. It knows no values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from kvps.compression.spec import CODECS, TABLE, CodecSpec, fits
from kvps.dtypes import Spec
from kvps.errors import ConfigError

MIN_BYTES = 65536
"""Smaller keys are not compressed unless they are to be: they cost more time than they save."""
THRESHOLD = 0.5
RATIO = 0.01
NONE = "none"

_ALWAYS = ("type", "pull", "min_bytes", "decay")


@dataclass(frozen=True, slots=True)
class KeyCompression:
    """How a key travels."""

    code: CodecSpec
    back: CodecSpec | None
    """How its values come back; None for as they are."""
    min_bytes: int
    decay: float = 1.0
    """The factor of the residual before a gradient is added to it."""


@dataclass(frozen=True, slots=True)
class CompressionPolicy:
    """The settings of a store's keys.

    Example:
        >>> rules = rules_of({"type": "2bit", "rules": [{"pattern": "*.bias", "type": "none"}]})
        >>> rules.setting_of("fc.weight", Spec("float32", (1000, 1000))).code.number
        0.5
        >>> rules.setting_of("fc.bias", Spec("float32", (100_000,)))
    """

    default: KeyCompression | None
    patterns: tuple[tuple[str, KeyCompression | None], ...] = ()
    """The first that matches a key decides."""
    are_off: bool = field(init=False, repr=False, compare=False)
    """Nothing is compressed, whatever its key."""
    _memo: dict[tuple[str, Spec], KeyCompression | None] = field(
        default_factory=dict, repr=False, compare=False
    )
    """Answers that were found so far: no part of the state, as :mod:`kvps.tools.replay.digest` knows."""

    def __post_init__(self) -> None:
        settings = [self.default, *[setting for _, setting in self.patterns]]
        object.__setattr__(self, "are_off", not any(settings))

    def setting_of(self, key: str, spec: Spec) -> KeyCompression | None:
        """Return how a key travels; None for as it is."""
        if self.are_off:
            return None
        known = (key, spec)
        if known not in self._memo:
            self._memo[known] = self._setting_of(key, spec)
        return self._memo[known]

    def _setting_of(self, key: str, spec: Spec) -> KeyCompression | None:
        found = next(
            (setting for pattern, setting in self.patterns if fnmatchcase(key, pattern)), self.default
        )
        if found is None or spec.dtype != "float32" or not spec.count:
            return None
        return found if spec.nbytes >= found.min_bytes else None


OFF = CompressionPolicy(None)


def rules_of(params: str | Mapping[str, object]) -> CompressionPolicy:
    """Return what ``params`` ask for.

    Args:
        params: as for :meth:`kvps.KVStore.set_gradient_compression`.

    Raises:
        ConfigError: for an unknown name or a number out of its range; the text names both, and the choices.
    """
    if not isinstance(params, str | Mapping):
        raise ConfigError(
            f"compression {params!r:.40}: give a dict, such as {{'type': '2bit'}}, or the type alone"
        )
    given: dict[str, object] = {"type": params} if isinstance(params, str) else dict(params)
    rules = given.pop("rules", ())
    if not isinstance(rules, list | tuple):
        raise ConfigError(f"compression rules={rules!r:.60}: give a list of dicts")
    given.setdefault("type", NONE if rules else None)
    common = {name: value for name, value in given.items() if name in _ALWAYS[1:]}
    return CompressionPolicy(_setting(given), tuple([_rule(rule, common) for rule in rules]))


def _rule(rule: object, common: Mapping[str, object]) -> tuple[str, KeyCompression | None]:
    if not isinstance(rule, Mapping) or not isinstance(rule.get("pattern"), str):
        raise ConfigError(
            f"compression rule {rule!r:.80}: give a dict with a pattern, such as "
            '{"pattern": "embed*", "type": "fp16"}'
        )
    own = {str(name): value for name, value in rule.items() if name != "pattern"}
    return str(rule["pattern"]), _setting({**common, **own})


def _setting(params: Mapping[str, object]) -> KeyCompression | None:
    """Return one setting; None for no compression."""
    pull, min_bytes = params.get("pull", False), params.get("min_bytes", MIN_BYTES)
    if isinstance(min_bytes, bool) or not isinstance(min_bytes, int) or min_bytes < 0:
        raise ConfigError(f"compression min_bytes={min_bytes!r:.40}: use 0 or more")
    decay = _float("decay", params.get("decay", 1.0))
    if not 0 <= decay <= 1:
        raise ConfigError(f"compression decay={decay}: use a number from 0 to 1")
    code = _code({name: value for name, value in params.items() if name not in _ALWAYS[1:]})
    if isinstance(pull, Mapping):
        back = _code(dict(pull))
        return None if code is None else KeyCompression(code, back, min_bytes, decay)
    if not isinstance(pull, bool):
        raise ConfigError(f"compression pull={pull!r:.40}: use True, False, or a dict with its own type")
    return None if code is None else KeyCompression(code, code if pull else None, min_bytes, decay)


def _code(params: Mapping[str, object]) -> CodecSpec | None:
    kind = params.get("type")
    if kind == NONE:
        codec = 0
    elif not isinstance(kind, str) or kind not in CODECS:
        raise ConfigError(f"compression type={kind!r:.40}: use one of {', '.join(CODECS)}, or {NONE}")
    else:
        codec = CODECS[kind]
    takes = TABLE[codec].takes if codec else ()
    unknown = next((name for name in params if name not in ("type", *takes)), None)
    if unknown is not None:
        allowed = ", ".join(("type", *takes, *_ALWAYS[1:], "rules"))
        raise ConfigError(f"compression {kind} has no parameter {unknown!r:.40}; it has {allowed}")
    if not codec:
        return None
    number = 0.0
    if "threshold" in takes:
        number = _float("threshold", params.get("threshold", THRESHOLD))
        if not fits(CodecSpec(codec, number)):
            over = "" if fits(CodecSpec(codec, 0.0)) else " above 0"
            raise ConfigError(
                f"compression threshold={number}: {kind} needs a number{over} that float32 can hold"
            )
    if "ratio" in takes:
        number = _float("ratio", params.get("ratio", RATIO))
        if not 0 < number <= 1:
            raise ConfigError(f"compression ratio={number}: use a number above 0 and up to 1")
    seed = params.get("seed", 0)
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**62:
        raise ConfigError(f"compression seed={seed!r:.40}: use an integer from 0 to 2^62-1")
    return CodecSpec(codec, number, 1.0, seed)


def _float(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"compression {name}={value!r:.40}: use a finite number")
    return float(value)
