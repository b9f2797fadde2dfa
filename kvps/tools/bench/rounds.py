"""One measured round, the same for every system: fresh values, a timed step, every number checked.

Theory of operation
-------------------
All arrays lie, in thought, one behind the other, and a *period* of random numbers is laid along
them over and over. So each round has new numbers at the cost of a copy, and every number of the
result is known from the periods of all ranks: their sum, or the weights of an SGD step. The period
is no multiple of anything that systems cut arrays by, so a part in the wrong place shows.

    write this rank's gradients ─► wait for all ─► [ step ] ─► compare all numbers
                                                    timed

Imports numpy and the list of workloads, and no system: benchmarks/compare runs it in the interpreters
of MXNet and Ray.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from kvps.tools.bench.workloads import Shapes, shapes_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Row = NDArray[np.float32]
else:
    Row = Any

RESULT = "RESULT "
WARM_UP = 3
"""Rounds before those that count: connections, plans and buffers are made in them."""
PERIOD = 1_000_003
START = 1 << 30
"""The number of the round whose values of rank 0 are the first weights."""
LR, MOMENTUM = 0.01, 0.9
JOINED_MAX = 1024
"""The number of rows that are compared at once."""
ERROR_MAX = 1e-3
"""Sums of a few normal numbers in float32 are nearer than this in any order."""
INT8_ERROR_MAX = 0.5
"""So are the sums of int8, whose scales depend on which numbers are neighbours."""
THRESHOLD = 0.5


class SystemUnderTest(Protocol):
    """One worker of a system under measurement."""

    rank: int
    workers: int

    def gradients(self) -> Sequence[Row]:
        """Return flat rows, one per array; the next step pushes the values that are written there."""

    def ready(self) -> None:
        """Take the gradients over, if they are not in place, and wait for all workers."""

    def step(self) -> None:
        """Push all gradients and pull the result."""

    def results(self) -> Sequence[Row]:
        """Return the pulled values."""

    def close(self) -> None:
        """Leave in good order."""


Make = Callable[[Shapes, str, str], SystemUnderTest]
"""Makes a worker, from shapes, the way it pushes and pulls, and the rule: ``sum`` or ``sgd``."""


def main(make: Make, argv: Sequence[str]) -> None:
    """Measure as one worker: HOW WORKLOAD RULE ROUNDS [GATE_IN GATE_OUT]."""
    how, workload, rule, rounds, *gate = argv
    system = make(shapes_of(workload), how, rule)
    fds = (int(gate[0]), int(gate[1])) if gate and system.rank == 0 else None
    times_ms = measure(system, rule, int(rounds), fds, how)
    system.close()
    report(system.rank, times_ms)


def measure(
    system: SystemUnderTest, rule: str, rounds: int, gate: tuple[int, int] | None = None, how: str = "copy"
) -> list[float]:
    """Return how long each round after the warm-up took, in milliseconds.

    Args:
        system: this worker.
        rule: the update that the pushes make, ``sum`` or ``sgd``.
        rounds: how many are measured.
        gate: two pipes; before the first of these rounds and after the last, while every worker
            stands still, a byte is written to the second and one awaited from the first.
        how: by which codec both ways are compressed, if it is the name of one.
    """
    truth = Truth(system.workers, rule, how)
    most = INT8_ERROR_MAX if how == "int8" else ERROR_MAX
    times_ms = []
    for number in range(WARM_UP + rounds):
        if number == WARM_UP:
            _stand(system, gate)
        spread(noise(number, system.rank), system.gradients())
        system.ready()
        began = time.perf_counter()
        system.step()
        times_ms.append(1e3 * (time.perf_counter() - began))
        where = f"round {number} of rank {system.rank}"
        demand(truth.after(number), system.results(), where, most)
    _stand(system, gate)
    system.ready()
    return times_ms[WARM_UP:]


def report(rank: int, times_ms: Sequence[float]) -> None:
    """Print the times, as one line."""
    found = {"rank": rank, "rounds_ms": [round(time_ms, 4) for time_ms in times_ms]}
    sys.stdout.write(f"{RESULT}{json.dumps(found)}\n")
    sys.stdout.flush()


def noise(number: int, rank: int) -> Row:
    """Return the period of a rank in a round; none of its numbers is likely to be 0."""
    return np.random.default_rng((number, rank)).standard_normal(PERIOD, dtype=np.float32)


def first_weights() -> Row:
    """Return the period of the weights that rank 0 gives at first."""
    return noise(START, 0)


def spread(period: Row, rows: Sequence[Row]) -> None:
    """Write a period along all rows, over and over."""
    for part, values in _along(period, rows):
        part[:] = values


def demand(period: Row, rows: Sequence[Row], where: str, most: float = ERROR_MAX) -> None:
    """Compare all rows with a period that is laid along them, to within ``most``.

    Raises:
        ValueError: if a number is off; a system that is fast and wrong is not measured.
    """
    for part, values in _along(period, _joined(rows)):
        error = float(np.max(np.abs(part - values)))
        if not error <= most:  # not: NaN is wrong as well
            raise ValueError(f"{where}: a result is {error:g} off; the limit is {most:g}")


def _as_it_is(residual: Row) -> Row:
    return residual.copy()


def _one_bit(residual: Row) -> Row:
    return np.where(residual > THRESHOLD, np.float32(1), np.float32(-1))


def _two_bits(residual: Row) -> Row:
    some = np.where(residual <= -THRESHOLD, np.float32(-THRESHOLD), np.float32(0))
    return np.where(residual >= THRESHOLD, np.float32(THRESHOLD), some)


def _half(residual: Row) -> Row:
    return residual.astype(np.float16).astype(np.float32)


CODECS: dict[str, Callable[[Row], Row]] = {
    "fp16": _half,
    "int8": _as_it_is,
    "2bit": _two_bits,
    "1bit": _one_bit,
}
"""Codec -> the values that it sends: once more, in the plainest way, to compare with."""


class Truth:
    """The expected result of each round.

    The value that a codec sends depends on earlier pushes of the same element, and on no other element
    (except for int8); so its residuals are a period, too.
    """

    def __init__(self, workers: int, rule: str, how: str = "copy") -> None:
        self._workers = workers
        self._rule = rule
        self._encode = CODECS.get(how, _as_it_is)
        self._residuals = [np.zeros(PERIOD, np.float32) for _ in range(workers + 1)]
        """The residuals of each rank, and of the servers."""
        self._weights = first_weights()
        self._velocity = np.zeros_like(self._weights)

    def after(self, number: int) -> Row:
        """Return the period of the result of round ``number``; ask for every round, in order."""
        total = self._sent(0, noise(number, 0))
        for rank in range(1, self._workers):
            total += self._sent(rank, noise(number, rank))
        if self._rule == "sum":
            return self._sent(self._workers, total)
        self._velocity = MOMENTUM * self._velocity + total
        self._weights = self._weights - LR * self._velocity
        return self._weights

    def _sent(self, whose: int, gradient: Row) -> Row:
        """Return a gradient as its codec sends it."""
        residual = self._residuals[whose]
        residual += gradient
        sent = self._encode(residual)
        residual -= sent
        return sent


def _along(period: Row, rows: Iterable[Row]) -> Iterator[tuple[Row, Row]]:
    """Yield each part of the rows with the numbers that lie along it."""
    twice = np.concatenate([period, period])
    position = 0
    for row in rows:
        for low in range(0, row.size, period.size):
            part = row[low : low + period.size]
            yield part, twice[position : position + part.size]
            position = (position + part.size) % period.size


def _joined(rows: Sequence[Row]) -> Iterator[Row]:
    """Yield the same numbers in fewer rows: comparing 100,000 short rows takes seconds."""
    short: list[Row] = []
    for row in rows:
        short.append(row)
        if len(short) == JOINED_MAX or row.size >= PERIOD:
            yield np.concatenate(short) if len(short) > 1 else row
            short = []
    if short:
        yield np.concatenate(short)


def _stand(system: SystemUnderTest, gate: tuple[int, int] | None) -> None:
    """Let the caller inspect the ranks while nothing is under way: no rank goes on before rank 0
    has come through.

    The others wait in the next ready(); at this one every worker has ended the round before.
    """
    system.ready()
    if gate is not None:
        os.write(gate[1], b".")
        os.read(gate[0], 1)
