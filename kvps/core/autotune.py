"""The search for the settings under which a round takes least: which to try next, and which wins, from times.

Theory of operation
-------------------
A *knob* is one field of :class:`Settings` and the values to try, one after another. Each value is compared with the
best settings so far in *pairs* of turns, one turn each, whose order alternates: what disturbs the machine for longer
than a turn disturbs both. What counts is the ratio of the two times, so a machine that becomes slower or faster
meanwhile changes nothing.

A value is given up as soon as the pairs so far leave little hope. It replaces the best settings only if it is faster by
:data:`GAIN` in the median pair, and if chance would seldom do the same: by Wilcoxon's signed-rank test, or by the number
of pairs in which it is faster, which disturbed turns do not upset. So the defaults stay unless something else is clearly
better, however noisy the times are.

Every rank makes the same search from the same times, which the ranks have exchanged, and comes to the same end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, field, replace
from statistics import median
from typing import Any, NamedTuple

GAIN = 0.05
"""The part of the time that other settings must save in the median pair."""
HOPELESS = 0.97
"""A value whose median ratio is above this after the first :data:`PAIRS_LEAST` pairs is given up."""
PAIRS_LEAST, PAIRS_QUICK, PAIRS_MOST = 5, 10, 28
"""Pairs after which a value may be given up; after which it is better if each single pair says so; and after which it is
given up in any case."""
CLEAR = 3.3
"""Standard deviations of the signed-rank test from which on a value is better: chance reaches them in 0.05 % of all cases."""
CHECKS = {8: (0.5, 9), 12: (1.0, 13), 16: (1.5, 15), 20: (1.5, 18), PAIRS_MOST: (CLEAR, 23)}
"""Pairs -> the standard deviations below which a value is given up, and the number of faster pairs from which on it is
better whatever the others were: 0.03 to 0.05 % by chance, and none where there are too few pairs."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings that a job may change and time rounds under.

    Example:
        >>> Settings(384 << 10, 3 << 20, 0, True).chunk_bytes
        393216
    """

    chunk_bytes: int
    uplink_bytes: int
    """Bytes under way from all workers of one machine; see :mod:`kvps.core.worker.connection`."""
    threads: int
    """Threads with which a worker copies values in and out; 0 for as many as the script has."""
    priorities: bool
    """Chunks of the first layers travel first."""

    def to_numbers(self) -> list[float]:
        """Return the settings as numbers, which a key of a store can hold."""
        return [float(number) for number in astuple(self)]

    @classmethod
    def from_numbers(cls, numbers: Sequence[float]) -> Settings:
        """Return the settings that :meth:`to_numbers` made these numbers of."""
        chunk_bytes, uplink_bytes, threads, priorities = numbers
        return cls(int(chunk_bytes), int(uplink_bytes), int(threads), bool(priorities))


class Knob(NamedTuple):
    """One field of the settings, and the values to try in place of the present one."""

    field: str
    values: tuple[int | bool, ...]


@dataclass(slots=True)
class Trial:
    """One value of one knob beside the best settings so far."""

    knob: str
    value: int | bool
    ratios: list[float] = field(default_factory=list)
    """For each pair, the time under the value over the time under the best settings so far."""
    is_better: bool = False

    @property
    def ratio(self) -> float:
        """The median of the ratios; 1 before the first pair."""
        return median(self.ratios) if self.ratios else 1.0

    @property
    def evidence(self) -> float:
        """How far the pairs are from chance, in standard deviations; above 0 if the value was mostly faster."""
        logs = sorted([math.log(ratio) for ratio in self.ratios], key=abs)
        count = len(logs)
        if not count:
            return 0.0
        won = sum([rank for rank, one in enumerate(logs, 1) if one < 0.0])
        return (won - count * (count + 1) / 4) / math.sqrt(
            count * (count + 1) * (2 * count + 1) / 24
        )

    def verdict(self) -> bool | None:
        """Return whether the value is better; None if that needs more pairs."""
        pairs = len(self.ratios)
        if pairs < PAIRS_LEAST:
            return None
        if self.ratio > HOPELESS:
            return False
        if pairs == PAIRS_QUICK and max(self.ratios) <= 1.0 - GAIN:
            return True
        if pairs not in CHECKS:
            return None
        hopeless, clear = CHECKS[pairs]
        evidence, wins = self.evidence, sum(ratio < 1.0 for ratio in self.ratios)
        if self.ratio <= 1.0 - GAIN and (evidence >= CLEAR or wins >= clear):
            return True
        return None if evidence >= hopeless and pairs < PAIRS_MOST else False


class Search:
    """A search for better settings, knob by knob.

    Args:
        defaults: the settings to begin with.
        knobs: what to try, in this order; each begins with what those before it have left.
        limit_s: seconds after which nothing more is tried.

    Example:
        >>> search = Search(Settings(8, 1, 0, True), [Knob("chunk_bytes", (16,))], limit_s=60.0)
        >>> while search.turn is not None:
        ...     search.add(seconds=1.0 if search.turn.chunk_bytes == 8 else 0.8, now=0.0)
        >>> search.best.chunk_bytes
        16
    """

    def __init__(self, defaults: Settings, knobs: Sequence[Knob], limit_s: float) -> None:
        self.best = defaults
        self.trials: list[Trial] = []
        """The trials in order; those without a pair were begun and not measured."""
        self.turns = 0
        self.is_cut_short = False
        """The time was over before all was tried."""
        self._limit_s = limit_s
        self._steps = self._run(knobs)
        self._heard: tuple[float, float] = (0.0, 0.0)
        """The seconds of the last turn, and the time at its end."""
        self.turn: Settings | None = next(self._steps, None)
        """The settings of the next turn; None if the search is over."""

    def add(self, seconds: float, now: float) -> None:
        """Take in the time of a round in the turn that is over.

        Args:
            seconds: of the slowest rank.
            now: seconds since the beginning.
        """
        assert self.turn is not None, "the search is over"
        self.turns += 1
        self._heard = (seconds, now)
        self.turn = next(self._steps, None)

    def _run(self, knobs: Sequence[Knob]) -> Iterator[Settings]:
        for knob in knobs:
            for value in knob.values:
                trial = Trial(knob.field, value)
                self.trials.append(trial)
                change: dict[str, Any] = {knob.field: value}
                other = replace(self.best, **change)
                yield from self._compare(trial, other)
                if trial.is_better:
                    self.best = other
                if self.is_cut_short:
                    return

    def _compare(self, trial: Trial, other: Settings) -> Iterator[Settings]:
        """Yield the turns of a trial until it has a verdict, or the time is over."""
        while (verdict := trial.verdict()) is None:
            is_second = bool(len(trial.ratios) % 2)  # which of the two begins
            times: dict[bool, float] = {}
            for is_other in (is_second, not is_second):
                yield other if is_other else self.best
                times[is_other], now = self._heard
                if now >= self._limit_s:
                    self.is_cut_short = True
                    return
            trial.ratios.append(times[True] / max(times[False], 1e-9))
        trial.is_better = verdict


def sample(sizes: Sequence[int], most: int) -> list[int]:
    """Return how many elements of each array make up a sample of at most so many in all, with arrays of all sizes.

    Example:
        >>> sample([4, 4, 4, 4], 8), sample([100, 2], 10), sample([3, 3], 100)
        ([4, 0, 4, 0], [10, 0], [3, 3])
    """
    stride = max(1, -(-sum(sizes) // max(1, most)))
    left = most
    taken = [0] * len(sizes)
    for index in range(0, len(sizes), stride):
        taken[index] = min(sizes[index], left)
        left -= taken[index]
    return taken
