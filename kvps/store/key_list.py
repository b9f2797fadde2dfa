"""Lists of keys, each bound once: the names that a call gives, and what the values of these keys must be.

Most calls repeat the last one: the same keys, and a plain tensor of the right type and shape for each. So
a store remembers each list of keys with all that it needs of it (:class:`KeyLists`), and the next call with
the same keys costs one look-up. Values are recognised as a whole (:meth:`KeyList.rows`), since a thousand
small keys should not cost a thousand times what one does. Values of any other form are checked key by key, in
:mod:`kvps.store.arguments`. A *row* is a contiguous tensor on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import attrgetter

import torch

from kvps.core.placement import EMBEDDING
from kvps.dtypes import Spec
from kvps.errors import ConfigError, KeyNotFound
from kvps.phrases import never_initialised
from kvps.protocol.envelope import KEY_MAX
from kvps.tensors import TORCH

PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
"""The types of values that are taken as they are: a subclass may mean anything."""
_STRIDED = frozenset({torch.strided})
_KEYS = frozenset({str, int})
LISTS_MAX = 256
"""The number of lists of keys that a store remembers."""
BLOCK = 1024
"""Values that are checked together: each check reads every tensor, and so many stay in the
processor's cache."""
_dtype, _is_cpu, _layout, _shape = map(attrgetter, ("dtype", "is_cpu", "layout", "shape"))


class KeyList:
    """One key, or a list of keys, as a user gave them.

    Args:
        names: the names of the keys.
        is_many: they were given as a list, so values and outputs are lists, too.
        specs: of all keys that are known.
    """

    __slots__ = ("_forms", "is_many", "names", "unknown")

    def __init__(self, names: tuple[str, ...], is_many: bool, specs: Mapping[str, Spec]) -> None:
        self.names = names
        self.is_many = is_many
        self.unknown = tuple([name for name in names if name not in specs])
        """The keys that are not known: nothing else can be said of their values."""
        found = [] if self.unknown else [specs[name] for name in names]
        self._forms = [(begin, _form(found[begin : begin + BLOCK])) for begin in range(0, len(found), BLOCK)]

    def rows(self, value: object, *, as_sinks: bool = False) -> tuple[torch.Tensor, ...] | None:
        """Return ``value`` as one row for each key, if it is one tensor for each that is a row as it is.

        Args:
            value: a user's value of one key, or list of values.
            as_sinks: they may be written to, too, as they are.
        """
        if not self.is_many:
            values: tuple[torch.Tensor, ...] = (value,)  # type: ignore[assignment]  # looked at below
        elif isinstance(value, list | tuple) and len(value) == len(self.names):
            values = tuple(value)
        else:
            return None
        for begin, (dtypes, dims, counts, deep, shapes) in self._forms:
            part = values[begin : begin + BLOCK]
            if not PLAIN.issuperset(map(type, part)):
                return None
            try:  # numbers, where they will do: a hundred thousand shapes are work for the collector
                if not (
                    list(map(torch.Tensor.dim, part)) == dims
                    and list(map(torch.Tensor.numel, part)) == counts
                    and list(map(_shape, map(part.__getitem__, deep))) == shapes
                    and list(map(_dtype, part)) == dtypes
                    and all(map(_is_cpu, part))
                    and _STRIDED.issuperset(map(_layout, part))
                    and all(map(torch.Tensor.is_contiguous, part))
                    and not (as_sinks and any(map(torch.Tensor.is_inference, part)))
                    and not (as_sinks and any(map(torch.Tensor.is_neg, part)))
                ):
                    return None
            except RuntimeError:  # a nested tensor knows nothing of that
                return None
        return values


_Form = tuple[list[torch.dtype], list[int], list[int], list[int], list[tuple[int, ...]]]


def _form(specs: list[Spec]) -> _Form:
    """Return the types, dimensions and sizes of values of these specs, and the indices and shapes of those
    that have more than one dimension: that of the others follows."""
    deep = [index for index, spec in enumerate(specs) if len(spec.shape) > 1]
    return (
        [TORCH[spec.dtype] for spec in specs],
        [len(spec.shape) for spec in specs],
        [spec.count for spec in specs],
        deep,
        [specs[index].shape for index in deep],
    )


class KeyLists:
    """The keys that one store knows, and the lists of keys that its calls repeat."""

    def __init__(self) -> None:
        self.specs: dict[str, Spec] = {}
        self._single: dict[tuple[object, ...], KeyList] = {}
        """Key, as a user gave it -> its list of one key; only keys that are known."""
        self._lists: dict[tuple[object, ...], KeyList] = {}
        """Keys of a list, as a user gave them -> the list."""

    def declare(self, specs: Iterable[tuple[str, Spec]]) -> None:
        """Know these keys, which may have been others before."""
        self.specs.update(specs)
        self._single.clear()
        self._lists.clear()

    def forget(self, names: Iterable[str]) -> None:
        """Know nothing of these keys any more."""
        for name in names:
            self.specs.pop(name, None)
        self._single.clear()
        self._lists.clear()

    def of(self, key: object) -> KeyList:
        """Return what one key or a list of keys stands for.

        Raises:
            ConfigError: as :func:`names_of`.
        """
        known = self._lists if isinstance(key, list | tuple) else self._single
        given = tuple(key) if isinstance(key, list | tuple) else (key,)
        is_usual = _KEYS.issuperset(map(type, given))  # True and 1.0 are equal to 1
        found = known.get(given) if is_usual else None
        if found is None:
            names, is_many = names_of(key)
            found = KeyList(names, is_many, self.specs)
            if is_usual and not found.unknown:
                if len(self._lists) >= LISTS_MAX:
                    self._lists.clear()
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
