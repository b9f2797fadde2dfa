"""Lists of keys, each bound once: the names that a call gives, and what the values of these keys must be.

Most calls repeat the last one: the same keys, and a plain tensor of the right type and shape for each. So
a store remembers each list of keys with all that it needs of it (:class:`KeyLists`), and the next call with
the same keys costs one look-up. Values are recognised as a whole (:meth:`KeyList.rows`), by a guard of torch,
since a thousand small keys should not cost a thousand times what one does. Values of any other form are
checked key by key, in :mod:`kvps.store.arguments`. A *row* is a contiguous tensor on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import repeat
from typing import Any

import numpy as np
import torch
from torch.autograd.graph import increment_version

from kvps.core.placement import EMBEDDING
from kvps.core.worker.plan import FINE_BYTES, MANY, Placed, addresses
from kvps.dtypes import Spec
from kvps.errors import ConfigError, KeyNotFound
from kvps.phrases import never_initialised
from kvps.protocol.envelope import KEY_MAX
from kvps.runtime.device import is_away
from kvps.tensors import TORCH

PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
"""The types of values that are taken as they are: a subclass may mean anything."""
_KEYS = frozenset({str, int})
LISTS_MAX = 256
"""The number of lists of keys that a store remembers."""
BLOCK = 1024
"""Values that are checked together: each check reads every tensor, and so many stay in the
processor's cache."""
_is_excluded, _AUTOGRAD = torch._C._dispatch_tls_is_dispatch_key_excluded, torch._C.DispatchKey.AutogradOther


class KeyList:
    """One key, or a list of keys, as a user gave them.

    Args:
        names: the names of the keys.
        is_many: they were given as a list, so values and outputs are lists, too.
        specs: of all keys that are known.
    """

    __slots__ = ("_forms", "_is_fine", "is_many", "names", "unknown")

    def __init__(self, names: tuple[str, ...], is_many: bool, specs: Mapping[str, Spec]) -> None:
        self.names = names
        self.is_many = is_many
        self.unknown = tuple([name for name in names if name not in specs])
        """The keys that are not known: nothing else can be said of their values."""
        found = [] if self.unknown else [specs[name] for name in names]
        self._is_fine = len(found) >= MANY and sum([spec.nbytes for spec in found]) <= FINE_BYTES * len(found)
        self._forms = [_Form(begin, found[begin : begin + BLOCK]) for begin in range(0, len(found), BLOCK)]

    def rows(
        self,
        value: object,
        *,
        as_sinks: bool = False,
        on_devices: bool = False,
        is_waited: bool = False,
    ) -> tuple[torch.Tensor, ...] | None:
        """Return ``value`` as one row for each key, if it is one tensor for each that is a row as it is.

        Args:
            value: a user's value of one key, or list of values.
            as_sinks: they may be written to, too, as they are.
            on_devices: they lie on accelerators, and are rows but for that.
            is_waited: they stay where they are until the call is over. Many small rows are then
                :class:`~kvps.core.worker.plan.Placed`: the check has brought each tensor into the cache,
                so its address is read here. Sinks count as changed from here on.
        """
        if not self.is_many:
            values: tuple[torch.Tensor, ...] = (value,)  # type: ignore[assignment]  # looked at below
        elif isinstance(value, list | tuple) and len(value) == len(self.names):
            values = tuple(value)
        else:
            return None
        is_placed = is_waited and self._is_fine and not _is_excluded(_AUTOGRAD)
        starts = np.empty(len(values), np.int64) if is_placed else None
        kind = as_sinks + 2 * on_devices
        for form in self._forms:
            part = values[form.begin : form.begin + BLOCK]
            guard = form.guards[kind]
            is_known = guard is not None and guard.check(*part)
            if not is_known and not form.is_passed(part, as_sinks, on_devices):
                return None
            if form.guards[kind] is None:
                starts = None  # some value is odd
            if starts is not None:
                starts[form.begin : form.begin + len(part)] = addresses(part)
                if as_sinks:
                    increment_version(part)
        if starts is None:
            return values
        placed = Placed(values)
        placed.starts = starts
        return placed


class _Form:
    """The requirements of some neighbouring values of a list, those from ``begin`` on, of these ``specs``."""

    __slots__ = ("begin", "guards", "specs")

    def __init__(self, begin: int, specs: list[Spec]) -> None:
        self.begin, self.specs = begin, specs
        self.guards: list[Any] = [None] * 4
        """Those of the values and of the sinks that :meth:`is_passed` has passed last, then of these on
        devices; None for none."""

    def is_passed(self, part: tuple[torch.Tensor, ...], as_sinks: bool, on_devices: bool) -> bool:
        """Look at each value by itself; if all are rows as they are, have a guard know those like them."""
        try:
            is_passed = all(map(_fits, part, self.specs, repeat(as_sinks), repeat(on_devices)))
        except RuntimeError:  # a nested tensor knows nothing of that
            return False
        # Below autograd, as in an operator or inference mode, tensors look alike that are not.
        if is_passed and not _is_excluded(_AUTOGRAD):
            is_odd = any(map(torch.Tensor.is_neg, part))  # read by its address, it would have other values
            self.guards[as_sinks + 2 * on_devices] = None if is_odd else _guard_of(part)
        return is_passed


def _fits(tensor: torch.Tensor, spec: Spec, as_sink: bool, on_device: bool) -> bool:
    return (
        type(tensor) in PLAIN
        and (tensor.dtype, tensor.layout, tensor.shape) == (TORCH[spec.dtype], torch.strided, spec.shape)
        and (is_away(tensor) if on_device else tensor.is_cpu)
        and tensor.is_contiguous()
        and not (as_sink and (tensor.is_inference() or tensor.is_neg()))
    )


def _guard_of(part: tuple[torch.Tensor, ...]) -> Any:
    """Return torch's guard of tensors like ``part``, in one pass over them; None if this torch has none.

    Its ``check(*tensors)`` compares Python types, element types, devices, layouts, sizes and strides, and
    whether a tensor is of inference mode or shows its memory negated. It keeps no tensor.
    """
    sizes, strides = [list(tensor.shape) for tensor in part], [list(tensor.stride()) for tensor in part]
    try:
        make = torch._C._dynamo.guards.TensorGuards
        return make(*part, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)  # type: ignore[arg-type]
    except (AttributeError, TypeError):
        return None


class KeyLists:
    """The keys that one store knows, and the lists of keys that its calls repeat."""

    def __init__(self) -> None:
        self.specs: dict[str, Spec] = {}
        self._bound: tuple[dict[tuple[object, ...], KeyList], ...] = {}, {}
        """Keys, as a user gave them -> what they stand for; single keys, then lists. All are known."""

    def declare(self, specs: Iterable[tuple[str, Spec]]) -> None:
        """Know these keys, which may have been others before."""
        self.specs.update(specs)
        self.forget(())

    def forget(self, names: Iterable[str]) -> None:
        """Know nothing of these keys any more."""
        for name in names:
            self.specs.pop(name, None)
        self._bound = {}, {}

    def of(self, key: object) -> KeyList:
        """Return what one key or a list of keys stands for.

        Raises:
            ConfigError: as :func:`names_of`.
        """
        given = tuple(key) if isinstance(key, list | tuple) else (key,)
        known = self._bound[isinstance(key, list | tuple)]
        is_usual = _KEYS.issuperset(map(type, given))  # True and 1.0 are equal to 1
        found = known.get(given) if is_usual else None
        if found is None:
            names, is_many = names_of(key)
            found = KeyList(names, is_many, self.specs)
            if is_usual and not found.unknown:
                if is_many and len(known) >= LISTS_MAX:
                    known.clear()
                known[given] = found
        return found

    def demand(self, names: Iterable[str]) -> None:
        """Check that all are known.

        Raises:
            KeyNotFound: for the first that is not.
        """
        for name in names:
            if name not in self.specs:
                raise KeyNotFound(never_initialised(name))


def names_of(keys: object) -> tuple[tuple[str, ...], bool]:
    """Return the names of one key or a list of keys, and whether it was a list.

    Raises:
        ConfigError: for a key that is no str or int, is empty, too long, or given twice.
    """
    is_many = isinstance(keys, list | tuple)
    names = tuple(_name(key) for key in (keys if isinstance(keys, list | tuple) else (keys,)))
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"key {twice!r} is given twice in one call; give each key once")
    return names, is_many


def _name(key: object) -> str:
    if isinstance(key, bool) or not isinstance(key, str | int):
        raise ConfigError(f"a key is a str or an int, got {type(key).__name__}")
    name = str(key)
    if not 1 <= len(name) <= KEY_MAX or not name.isprintable():
        raise ConfigError(f"a key is 1 to {KEY_MAX} printable characters, got {name[:40]!r}")
    if name.startswith(EMBEDDING):
        raise ConfigError(
            f"key {name[:40]!r}: {EMBEDDING!r} is the prefix of embedding tables; choose another "
            "name, or call embedding(...) for a table"
        )
    return name


def table_name_of(name: object) -> str:
    """Return the name of an embedding table.

    Raises:
        ConfigError: unless it is a str of few enough printable characters.
    """
    names, _ = names_of(name)
    if names != (name,) or len(names[0]) > KEY_MAX - len(EMBEDDING):
        raise ConfigError(
            f"a table's name is a str of 1 to {KEY_MAX - len(EMBEDDING)} characters, got {name!r:.60}"
        )
    return names[0]
