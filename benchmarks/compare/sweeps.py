"""Sweeps: one quantity grows, the rest stays as it is.

Workers and servers grow under one workload; the bytes of a single array and the number of small
keys are workloads of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvps.tools.bench.figures import Case
from kvps.tools.bench.workloads import KEY_FLOATS


@dataclass(frozen=True, slots=True)
class Sweep:
    """A quantity, its values, and the case that each value is."""

    name: str
    axis: str
    """The label of the axis of a plot: the quantity and its unit."""
    values: tuple[int, ...]
    case: Callable[[Case, int], Case]
    """Makes the case from the one that the flags describe, and a value."""
    value: Callable[[Case], int]
    """Finds the value in a case."""

    def cases(self, usual: Case, values: Sequence[int] | None = None) -> list[Case]:
        """Return the case of each value."""
        return [self.case(usual, value) for value in values or self.values]


def _amount(case: Case) -> int:
    """Return the number in the name of a workload."""
    return int(case.workload.partition(":")[2])


_ALL = (
    Sweep(
        "workers",
        "workers",
        tuple(range(1, 9)),
        lambda usual, value: Case(usual.workload, value, usual.servers),
        lambda case: case.workers,
    ),
    Sweep(
        "servers",
        "servers",
        tuple(range(1, 5)),
        lambda usual, value: Case(usual.workload, usual.workers, value),
        lambda case: case.servers,
    ),
    Sweep(
        "bytes",
        "size of one array, bytes",
        tuple(1024 * 4**power for power in range(11)),
        lambda usual, value: Case(f"bytes:{value}", usual.workers, usual.servers),
        _amount,
    ),
    Sweep(
        "keys",
        f"keys of {KEY_FLOATS} numbers each",
        tuple(10**power for power in range(6)),
        lambda usual, value: Case(f"keys:{value}", usual.workers, usual.servers),
        _amount,
    ),
)
SWEEPS = {sweep.name: sweep for sweep in _ALL}
SIZED = ("bytes", "keys")
"""Sweeps that bring their own workload."""
SYSTEMS = ("kvps", "gloo")
"""Systems that a sweep measures unless told otherwise."""
