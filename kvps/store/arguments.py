"""User arguments: keys to names, values to flat tensors, outputs to sinks.

A call takes one key or a list, and for each key one value or a list with one value per device.
All mistakes in that are found here, before anything is sent, and named by key. A *row* is a
contiguous tensor on the CPU.

Most calls repeat the last one: the same keys, and a plain tensor of the right type and shape for
each. A store remembers such lists (:class:`KnownKeys`) and recognises their values as a whole
(:meth:`Form.fits`), since a thousand small keys should not cost a thousand times what one does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch

from kvps.core.placement import EMBEDDING
from kvps.core.texts import TAG_RULE, is_tag
from kvps.core.worker import calls
from kvps.core.worker.plan import Numbers, alike
from kvps.dtypes import Spec
from kvps.errors import ConfigError, KeyNotFound, Mismatch
from kvps.phrases import never_initialised
from kvps.protocol.envelope import KEY_MAX
from kvps.runtime.cuda_staging import bring_back
from kvps.tensors import TORCH, Array, accumulator, as_tensor, row_of, spec_of

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_STRIDED = frozenset({torch.strided})
_KEYS = frozenset({str, int})
LISTS_MAX = 256
"""The number of lists of keys that a store remembers."""
BLOCK = 1024
"""Values that are checked together: each check reads every tensor, and so many stay in the
processor's cache."""


class Form:
    """The types, shapes and sizes of the values of a list of keys, by blocks of them."""

    def __init__(self, specs: Sequence[Spec]) -> None:
        self._count = len(specs)
        self._blocks = [
            (begin, BlockForm.of(specs[begin : begin + BLOCK])) for begin in range(0, len(specs), BLOCK)
        ]

    def fits(self, values: object, *, as_sinks: bool = False) -> bool:
        """Whether ``values`` is a list of tensors that are rows as they are, one for each key.

        Args:
            values: what a user gave.
            as_sinks: they may be written to, too, as they are.
        """
        return (
            isinstance(values, list | tuple)
            and len(values) == self._count
            and all(block.fits(values[begin : begin + BLOCK], as_sinks) for begin, block in self._blocks)
        )


@dataclass(frozen=True, slots=True)
class BlockForm:
    """The types, shapes and sizes that some values must have."""

    dtypes: list[torch.dtype]
    dims: list[int]
    counts: list[int]
    shapes: list[tuple[int, tuple[int, ...]]]
    """(index, shape) of those that have more than one dimension: that of the others follows."""

    @staticmethod
    def of(specs: Sequence[Spec]) -> BlockForm:
        """Return the form of values of these specs."""
        return BlockForm(
            [TORCH[spec.dtype] for spec in specs],
            [len(spec.shape) for spec in specs],
            [spec.count for spec in specs],
            [(index, spec.shape) for index, spec in enumerate(specs) if len(spec.shape) > 1],
        )

    def fits(self, values: Sequence[Any], as_sinks: bool) -> bool:
        """Whether as many ``values`` are rows as they are, and may be written to, too, if they are sinks."""
        if not _PLAIN.issuperset(map(type, values)):
            return False
        try:  # numbers, where they will do: a hundred thousand shapes are work for the collector
            return (
                list(map(torch.Tensor.dim, values)) == self.dims
                and list(map(torch.Tensor.numel, values)) == self.counts
                and all(values[index].shape == shape for index, shape in self.shapes)
                and [value.dtype for value in values] == self.dtypes
                and all(map(attrgetter("is_cpu"), values))
                and _STRIDED.issuperset(map(attrgetter("layout"), values))
                and all(map(torch.Tensor.is_contiguous, values))
                and not (as_sinks and any(map(torch.Tensor.is_inference, values)))
                and not (as_sinks and any(map(torch.Tensor.is_neg, values)))
            )
        except RuntimeError:  # a nested tensor knows nothing of that
            return False


def as_list(keys: object) -> tuple[str | int, ...] | None:
    """Return a list of keys such that equal ones mean equal names; None for anything else."""
    if isinstance(keys, list | tuple) and _KEYS.issuperset(map(type, keys)):
        return tuple(keys)
    return None


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


class KnownKeys:
    """The keys that one store knows, and the lists of keys that its calls repeat."""

    def __init__(self) -> None:
        self.specs: dict[str, Spec] = {}
        self._names: dict[tuple[object, ...], tuple[str, ...]] = {}
        """List of keys, as a user gave it -> their names."""
        self._forms: dict[tuple[str, ...], Form] = {}
        self._last: tuple[tuple[str, ...], Form] | None = None
        """The list that was looked up last: a call looks its list up several times, and hashes it once."""

    def declare(self, specs: Iterable[tuple[str, Spec]]) -> None:
        """Know these keys, which may have been others before."""
        self.specs.update(specs)
        self._forget_forms()

    def forget(self, names: Iterable[str]) -> None:
        """Know nothing of these keys any more."""
        for name in names:
            self.specs.pop(name, None)
        self._forget_forms()

    def _forget_forms(self) -> None:
        self._forms.clear()
        self._last = None

    def names_of(self, key: object) -> tuple[tuple[str, ...], bool]:
        """Return the names of one key or a list of keys, and whether it was a list.

        Raises:
            ConfigError: as :func:`names_of`.
        """
        keys = as_list(key)
        if keys is None:
            return names_of(key)
        names = self._names.get(keys)
        if names is None:
            names, _ = names_of(key)
            if len(self._names) >= LISTS_MAX:
                self._names.clear()
            self._names[keys] = names
        return names, True

    def unknown(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Return those that are not known."""
        if self.form(names) is not None:
            return ()
        return tuple(name for name in names if name not in self.specs)

    def demand(self, names: tuple[str, ...]) -> None:
        """Check that all are known.

        Raises:
            KeyNotFound: for the first that is not.
        """
        for name in self.unknown(names)[:1]:
            raise KeyNotFound(never_initialised(name))

    def form(self, names: tuple[str, ...]) -> Form | None:
        """Return what the values of these keys must look like; None if one is not known."""
        last = self._last  # read once: another thread may call meanwhile
        if last is not None and last[0] is names:
            return last[1]
        form = self._forms.get(names)
        if form is None:
            if not all(name in self.specs for name in names):
                return None
            if len(self._forms) >= LISTS_MAX:
                self._forms.clear()
            form = self._forms[names] = Form([self.specs[name] for name in names])
        self._last = names, form
        return form


def are_dense(values: object) -> bool:
    """Whether ``values`` is a list of plain tensors, none of them sparse: quick for a thousand of them."""
    return (
        isinstance(values, list | tuple)
        and _PLAIN.issuperset(map(type, values))
        and torch.sparse_coo not in set(map(attrgetter("layout"), values))
    )


def tag_of(tag: object) -> str:
    """Return the tag of a checkpoint, empty for none.

    Raises:
        ConfigError: if it is no word of 1 to 64 letters, digits, dots, underscores and dashes.
    """
    if tag is None:
        return ""
    if not isinstance(tag, str) or not is_tag(tag):
        raise ConfigError(f"tag={tag!r:.80}: {TAG_RULE}")
    return tag


def values_of(names: tuple[str, ...], is_many: bool, value: object) -> list[list[Array]]:
    """Return for each key its values, one per device.

    Raises:
        ConfigError: if there are more or fewer values than keys.
    """
    per_key: Sequence[object]
    if not is_many:
        per_key = (value,)
    elif isinstance(value, list | tuple):
        per_key = value
    else:
        raise ConfigError(f"{len(names)} keys need a list of values, got {type(value).__name__}")
    if len(per_key) != len(names):
        raise ConfigError(f"{len(names)} keys need as many values, got {len(per_key)}")
    values: list[list[Array]] = []
    for name, of_key in zip(names, per_key, strict=True):
        devices = list(of_key) if isinstance(of_key, list | tuple) else [of_key]
        if not devices:
            raise ConfigError(f"key {name!r}: the list of values is empty")
        values.append(devices)
    return values


def check_values(
    names: tuple[str, ...], values: list[list[Array]], specs: Mapping[str, Spec], what: str
) -> None:
    """Check each value against the spec of its key.

    Raises:
        KeyNotFound: for a key without a spec.
        Mismatch: for another type or shape, naming the key and both.
    """
    for name, devices in zip(names, values, strict=True):
        spec = specs.get(name)
        if spec is None:
            raise KeyNotFound(never_initialised(name))
        for value in devices:
            other = spec_of(value)
            if other != spec:
                raise Mismatch(f"key {name!r} is {spec}; cannot {what} {other}")


def reduce(devices: list[Array], on_device: bool) -> torch.Tensor:
    """Return the sum of one key's values: on their own device, or on the CPU.

    The result may be one of the values itself: it is for reading only. Half types are summed in
    float32 and rounded once.
    """
    tensors = [as_tensor(value) for value in devices]
    if len(tensors) == 1:
        return tensors[0]
    first = tensors[0].device if on_device else torch.device("cpu")
    total = accumulator(tensors[0].to(first)).clone()
    for tensor in tensors[1:]:
        total += tensor.to(first)
    return total.to(tensors[0].dtype)


def rows_of(values: list[list[Array]], on_device: bool) -> tuple[torch.Tensor, ...]:
    """Return one row for each key: the value itself where it is one."""
    return tuple(row_of(reduce(devices, on_device)) for devices in values)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a pull: the rows that its call writes, and then the user's tensors and the result."""

    sinks: calls.Sinks
    result: Callable[[Any], Any]
    """Copies to those tensors that could not be written directly; returns the result of the call,
    which is made from the value of its ticket."""


def outcome_for(names: tuple[str, ...], is_many: bool, out: object, specs: Mapping[str, Spec]) -> Outcome:
    """Return the outcome that writes to ``out``, or to new tensors where it is None.

    Raises:
        KeyNotFound, Mismatch: if an output does not fit its key.
    """
    if out is None:
        new = []
        for name in names:
            spec = specs.get(name)
            if spec is None:
                raise KeyNotFound(never_initialised(name))
            new.append(_blank(spec.shape, TORCH[spec.dtype]))
        result: object = new if is_many else new[0]
        return Outcome(tuple(new), lambda _: result)
    rows: list[torch.Tensor] = []
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []
    for targets in targets_for(names, is_many, out, specs):
        direct = next((target for target in targets if is_row(target)), None)
        row = direct if direct is not None else _blank_for(targets[0])
        rows.append(row)
        copies.extend((target, row) for target in targets if target is not direct)

    def deliver(_: object) -> object:
        bring_back(copies)
        return out

    return Outcome(tuple(rows), deliver)


def targets_for(
    names: tuple[str, ...], is_many: bool, out: object, specs: Mapping[str, Spec]
) -> list[list[torch.Tensor]]:
    """Return for each key the tensors, wherever they live, that ``out`` wants its value written to.

    Raises:
        KeyNotFound, Mismatch: if an output does not fit its key.
    """
    outs = values_of(names, is_many, out)
    check_values(names, outs, specs, "write it to")
    return [[target_of(name, value) for value in devices] for name, devices in zip(names, outs, strict=True)]


def target_of(name: str, out: Array) -> torch.Tensor:
    """Return an output of the user's as a tensor that shares its memory.

    Raises:
        Mismatch: if it cannot be written to.
    """
    if not isinstance(out, torch.Tensor) and not out.flags.writeable:
        raise Mismatch(f"key {name!r}: the output array is read-only")
    if not isinstance(out, torch.Tensor) and any(stride < 0 for stride in out.strides):
        raise Mismatch(f"key {name!r}: an output array with negative strides is not supported")
    tensor = as_tensor(out)
    if not isinstance(out, torch.Tensor) and out.size and tensor.data_ptr() != out.ctypes.data:
        raise Mismatch(f"key {name!r}: the output array is not aligned; give one that owns its data")
    return tensor


def is_row(target: torch.Tensor) -> bool:
    """Whether it can be written to where it is, by another thread than the caller's."""
    is_plain = not (target.is_inference() or target.is_neg())  # the latter shows its memory negated
    return target.device.type == "cpu" and target.is_contiguous() and is_plain


def _blank_for(target: torch.Tensor) -> torch.Tensor:
    """A row; page-locked where its values go to a GPU."""
    return _blank(target.shape, target.dtype, is_pinned=target.device.type == "cuda")


def _blank(shape: tuple[int, ...], dtype: torch.dtype, is_pinned: bool = False) -> torch.Tensor:
    with torch.inference_mode(False):  # else only a thread in that mode may write to it
        return torch.empty(shape, dtype=dtype, pin_memory=is_pinned, device="cpu")


def seconds(name: str, value: object) -> float:
    """Return a time limit.

    Raises:
        ConfigError: unless it is a number over 0.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        raise ConfigError(f"{name}={value!r}: use a number of seconds above 0")
    return float(value)


def weight_of(weight: object, is_mean: bool, store: str) -> float:
    """Return the weight of a push.

    Args:
        weight: what the user gave.
        is_mean: a round of the store is the mean of its pushes.
        store: the name of the store.

    Raises:
        ConfigError: unless it is a finite number above 0; also for another than 1 where there are no means.
    """
    is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if not is_number or not 0 < weight < math.inf:  # type: ignore[operator]  # it is a number
        raise ConfigError(f"weight={weight!r:.40}: use a finite number above 0")
    if weight != 1 and not is_mean:
        raise ConfigError(
            f"weight={weight} needs a mean, and store {store!r} computes sums; create a dist_sync "
            "store with average=True"
        )
    return float(weight)  # type: ignore[arg-type]  # it is a number


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


def weighted(rows: tuple[torch.Tensor, ...], weight: float) -> tuple[torch.Tensor, ...]:
    """Return values multiplied by their weight, in memory of their own unless it is 1.

    Raises:
        ConfigError: for integers, which would become floating point.
    """
    if weight == 1:
        return rows
    for row in rows:
        if not row.is_floating_point():
            raise ConfigError(
                f"weight={weight} with values of {row.dtype}: integers have no mean. Nothing was pushed; "
                "push floating point, or integers to a store without average"
            )
    return tuple([row * weight for row in rows])


def priority_of(names: tuple[str, ...], priority: object) -> Numbers:
    """Return the priority of each key, or one number where they are alike.

    Raises:
        ConfigError: unless it is a whole number, or one for each key.
    """
    if type(priority) is int:
        return priority
    if isinstance(priority, list | tuple) and all(type(number) is int for number in priority):
        if len(priority) == len(names):
            return alike(priority)
        raise ConfigError(f"{len(names)} keys need as many priorities, got {len(priority)}")
    raise ConfigError(f"priority={priority!r:.40}: use a whole number, or a list with one for each key")


def version_of(min_version: int | None) -> int:
    """Return the version that a pull waits for, 0 for any.

    Raises:
        ConfigError: unless it is a whole number from 0 on.
    """
    if min_version is None:
        return 0
    if type(min_version) is not int or not 0 <= min_version < 1 << 63:
        raise ConfigError(f"min_version={min_version!r}: use a whole number, 0 to 2**63 - 1")
    return min_version
