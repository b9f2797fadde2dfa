"""User arguments of any form: values to flat tensors, outputs to sinks.

A call takes one key or a list, and for each key one value or a list with one value per device.
All mistakes in that are found here, before anything is sent, and named by key. Plain tensors, one for
each key, do not come here: :mod:`kvps.store.key_list` recognises them as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch

from kvps.core.texts import TAG_RULE, is_tag
from kvps.core.worker import calls
from kvps.core.worker.plan import Priority, alike
from kvps.dtypes import Spec
from kvps.errors import ConfigError, Mismatch
from kvps.runtime.device import bring_back, is_away, pinned_rows, reached
from kvps.store.key_list import PLAIN
from kvps.tensors import TORCH, Array, accumulator, as_tensor, row_of, spec_of


def are_dense(values: object) -> bool:
    """Whether ``values`` is a list of plain tensors, none of them sparse: quick for a thousand of them."""
    return (
        isinstance(values, list | tuple)
        and PLAIN.issuperset(map(type, values))
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
    names: tuple[str, ...],
    values: list[list[Array]],
    specs: Mapping[str, Spec],
    what: str,
    is_sum: bool = False,
) -> None:
    """Check each value against the spec of its key, and for one type of device if they are summed there.

    Raises:
        Mismatch: for another type or shape, or several types of device, naming the key and both.
    """
    for name, devices in zip(names, values, strict=True):
        for value in devices:
            other = spec_of(value)
            if other != specs[name]:
                raise Mismatch(f"key {name!r} is {specs[name]}; cannot {what} {other}")
        if is_sum and len(types := {value.device.type for value in map(as_tensor, devices)}) > 1:
            raise Mismatch(
                f"key {name!r} has values on {' and '.join(sorted(types))}, but this store sums on a "
                "device: move all of them to one type of device"
            )


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


Outcome = tuple[calls.Sinks, Callable[[Any], Any]]
"""The end of a pull: the rows that its call writes; and a function that copies to those tensors of the user's
that could not be written directly, and makes the result of the call from the value of its ticket."""


def outcome_for(names: tuple[str, ...], is_many: bool, out: object, specs: Mapping[str, Spec]) -> Outcome:
    """Return the outcome that writes to ``out``, or to new tensors where it is None.

    Raises:
        Mismatch: if an output does not fit its key.
    """
    if out is None:
        new = [_blank(specs[name].shape, TORCH[specs[name].dtype]) for name in names]
        result: object = new if is_many else new[0]
        return tuple(new), lambda _: result
    of_keys = targets_for(names, is_many, out, specs)
    # A row is copied on to its device when the call is over: the script could write to a row of its own.
    far = [next(filter(is_away, targets), None) for targets in of_keys]
    locked = iter(pinned_rows([target for target in far if target is not None]))
    rows: list[torch.Tensor] = []
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []
    for targets, on_device in zip(of_keys, far, strict=True):
        direct = None if on_device is not None else next(filter(is_row, targets), None)
        if on_device is not None:
            row = next(locked)
        else:
            row = direct if direct is not None else _blank(targets[0].shape, targets[0].dtype)
        rows.append(row)
        copies.extend((target, row) for target in targets if target is not direct)
    return tuple(rows), _delivery(copies, out)


def outcome_on_devices(targets: Sequence[torch.Tensor], out: object) -> Outcome:
    """Return the outcome that writes to ``targets``, a tensor of a device for each key, of its shape."""
    rows = pinned_rows(targets)
    return tuple(rows), _delivery([*zip(targets, rows, strict=True)], out)


def _delivery(copies: Sequence[tuple[torch.Tensor, torch.Tensor]], out: object) -> Callable[[Any], Any]:
    # A call that is under way owns its outputs: they wait for no kernel that is queued behind it.
    before = reached([target for target, _ in copies])

    def deliver(_: object) -> object:
        bring_back(copies, before)
        return out

    return deliver


def targets_for(
    names: tuple[str, ...], is_many: bool, out: object, specs: Mapping[str, Spec]
) -> list[list[torch.Tensor]]:
    """Return for each key the tensors, wherever they live, that ``out`` wants its value written to.

    Raises:
        Mismatch: if an output does not fit its key.
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
    # A tensor that is_neg() shows its memory negated.
    return target.is_cpu and target.is_contiguous() and not (target.is_inference() or target.is_neg())


def _blank(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    with torch.inference_mode(False):  # else only a thread in that mode may write to it
        return torch.empty(shape, dtype=dtype, device="cpu")


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


def weighted(rows: tuple[torch.Tensor, ...], weight: float) -> tuple[torch.Tensor, ...]:
    """Return values multiplied by their weight, in memory of their own.

    Raises:
        ConfigError: for integers, which would become floating point.
    """
    for row in rows:
        if not row.is_floating_point():
            raise ConfigError(
                f"weight={weight} with values of {row.dtype}: integers have no mean. Nothing was pushed; "
                "push floating point, or integers to a store without average"
            )
    return tuple([row * weight for row in rows])


def priority_of(names: tuple[str, ...], priority: object) -> Priority:
    """Return the priority of each key, or one number where they are alike.

    Raises:
        ConfigError: unless it is a whole number, or one for each key.
    """
    if type(priority) is int:
        return priority
    if isinstance(priority, list | tuple) and all(type(number) is int for number in priority):
        if len(priority) == len(names):
            return shared(priority)
        raise ConfigError(f"{len(names)} keys need as many priorities, got {len(priority)}")
    raise ConfigError(f"priority={priority!r:.40}: use a whole number, or a list with one for each key")


def shared(priorities: Sequence[int]) -> Priority:
    """Return the priority that all keys have, or one for each."""
    some = alike(priorities)
    return some[0] if len(some) == 1 else priorities


def version_of(min_version: int) -> int:
    """Return the version that a pull waits for.

    Raises:
        ConfigError: unless it is a whole number from 0 on.
    """
    if type(min_version) is not int or not 0 <= min_version < 1 << 63:
        raise ConfigError(f"min_version={min_version!r}: use a whole number, 0 to 2**63 - 1")
    return min_version
