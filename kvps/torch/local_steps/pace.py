"""Stores beside the merges: the table of the workers' speeds, and the mean of their weights.

The table of speeds has a row for each rank, in a store without rounds whose rule is ``assign``: a
worker writes its row and reads all of them, while its pseudo-gradients are on their way. So nobody
waits, and nobody counts as fast for ever that has stopped writing.

A worker that makes v steps per second, where the fastest makes v_max, has ``floor(sync_every * v /
v_max)`` steps in a turn, at least one (DyLU in Liu et al., arXiv 2401.09135). No worker waits to
learn the speeds of others: each writes its own into a table when it pushes, and reads the table as
it is. The table has no clock, so each reader remembers when it first saw what a row holds.

The mean of the workers' weights between two merges, in a store of its own, which has no outer
optimizer.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any, NamedTuple

import torch

from kvps.errors import EpochChanged
from kvps.runtime.device import is_accelerator, stamp
from kvps.runtime.ticket import Handle
from kvps.store import residual_state
from kvps.store.create import create_dist
from kvps.store.options import StoreOptions
from kvps.torch.sync.parameter_sync import until_made

SILENT_TURNS = 4
"""Turns without a report after which a worker does not count: it is lost, has left, or is stopped."""
TOLERANCE = 0.05
"""The share by which equal workers may seem to differ. Without it, the slower of two equal workers
would always have a step less, which is half of them where ``sync_every`` is 2."""


class Report(NamedTuple):
    """The report of a worker on its last turn; all zeros before its first."""

    turns: float
    """Turns that the worker has reported."""
    step_s: float
    """Seconds of a step, without waits for merges."""
    turn_s: float
    """Seconds from push to push."""


class DynamicSteps:
    """The length of one worker's turns.

    Args:
        sync_every: steps of the fastest worker.
        least: the fewest steps of a turn.
        rank: this worker's.

    Example:
        >>> steps = DynamicSteps(sync_every=30, least=1, rank=1)
        >>> steps.of([Report(1, 0.1, 3.0), Report(1, 0.3, 9.0)], now=9.0)
        10
    """

    def __init__(self, sync_every: int, least: int, rank: int) -> None:
        self._sync_every = sync_every
        self._least = least
        self._rank = rank
        self._seen: dict[int, tuple[Report, float]] = {}
        """Rank -> its newest report, and when this worker first saw it."""

    def of(self, reports: Sequence[Report], now: float) -> int:
        """Return the steps of this worker's next turn.

        Args:
            reports: the newest of each rank.
            now: seconds on a monotonic clock.
        """
        own = reports[self._rank]
        if not _is_known(own):
            return self._sync_every
        fastest_s = own.step_s
        for rank, report in enumerate(reports):
            seen = self._seen.get(rank)
            if seen is None or seen[0] != report:
                seen = self._seen[rank] = (report, now)
            if _is_known(report) and now - seen[1] <= SILENT_TURNS * self._longest_turn_s(report):
                fastest_s = min(fastest_s, report.step_s)
        steps = math.floor(self._sync_every * (1 + TOLERANCE) * fastest_s / own.step_s)
        return min(max(steps, self._least), self._sync_every)

    def _longest_turn_s(self, report: Report) -> float:
        """Return how long the turn after a report may take: as long as the last one, or as one of
        all steps."""
        return max(report.turn_s, self._sync_every * report.step_s)


def _is_known(report: Report) -> bool:
    return 0 < report.step_s < math.inf


class Reports:
    """A row of numbers of each rank, in a store without rounds: nobody waits for another.

    Args:
        name: the store's.
        options: of the front end's stores.
        columns: the numbers of a row; all are 0 before the first report.

    Attributes:
        rank: of this worker.
        table: the newest rows that this worker has read, float64, (workers, columns).
        rollbacks: how often the servers have returned to a checkpoint.
    """

    def __init__(self, name: str, options: StoreOptions, columns: int) -> None:
        self._kv = create_dist("dist_async", name, options)
        self.rank: int = self._kv.rank
        self.table = torch.zeros(self._kv.num_workers, columns, dtype=torch.float64, device="cpu")
        self.rollbacks = 0
        self._away: Handle | None = None
        self._open(None)

    def lost(self) -> int:
        """Return the number of members that are lost."""
        return self._kv.num_dead_nodes

    def send(self, row: Sequence[float]) -> None:
        """Send this worker's row, and ask for the others'; do not wait for them."""
        value = (torch.tensor([self.rank]), torch.tensor([row], dtype=torch.float64))
        while True:
            try:
                self._away = self._kv.pushpull(REPORTS, value, out=self.table, async_op=True)
                return
            except EpochChanged as error:
                self._open(error)

    def wait(self) -> None:
        """Wait for the rows asked for last."""
        if self._away is not None:
            try:
                self._away.wait()
            except EpochChanged as error:
                self._open(error)
            self._away = None

    def close(self) -> None:
        """Close the store."""
        self._kv.close()

    def _open(self, error: EpochChanged | None) -> None:
        """Create the table where there is none, and read it; ``error`` is set if servers returned
        to a checkpoint."""
        self.rollbacks += error is not None
        until_made(self._read, error)

    def _read(self, error: EpochChanged | None) -> None:
        if error is None or REPORTS not in error.after:
            self._kv.init(REPORTS, torch.zeros_like(self.table))
        if error is None or not error.has_optimizer:
            self._kv.set_optimizer("assign")
        self._kv.take_owed([REPORTS])
        self._kv.pull(REPORTS, out=self.table)


REPORTS = "reports"
"""The key of the table."""


class Pace:
    """The speeds of all workers, and the steps that follow for this one.

    Args:
        owner: the front end.
        options: of the front end's stores.
        sync_every: steps of the fastest worker.
        least: the fewest steps of a turn.
        device: where the parameters are.
    """

    def __init__(
        self, owner: str, options: StoreOptions, sync_every: int, least: int, device: torch.device
    ) -> None:
        self._reports = Reports(f"{owner}.pace", options, len(Report._fields))
        self._timer = StepTimer(device)
        self._steps = DynamicSteps(sync_every, least, self._reports.rank)
        self._pushed_at = 0.0
        self.close = self._reports.close

    def begin_turn(self) -> None:
        """Note that the first turn begins now."""
        self._pushed_at = time.monotonic()
        self._timer.begin()

    def begin_step(self) -> None:
        """Note that a step begins now, after a merge."""
        self._timer.begin()

    def end_step(self) -> None:
        """Note that a step ends now."""
        self._timer.end()

    def report(self, steps: int) -> None:
        """Send how fast the last ``steps`` steps were, and ask for the others' speeds; do not wait
        for them."""
        now = time.monotonic()
        step_s, turn_s = self._timer.median_s(steps), now - self._pushed_at
        self._pushed_at = now
        turns = float(self._reports.table[self._reports.rank, 0]) + 1
        self._reports.send(Report(turns, step_s, turn_s))

    def next_steps(self) -> int:
        """Wait for the speeds asked for last; return the steps of the turn that has begun."""
        self._reports.wait()
        return self._steps.of([Report(*row) for row in self._reports.table.tolist()], time.monotonic())


STEPS_MAX = 512
"""Steps whose times are kept: the newest."""
STEPS_LEAST = 8
"""The fewest steps of a median, if there were as many: a turn of a slow worker may be a single step."""


class StepTimer:
    """Measures local steps; what happens between :meth:`end` and :meth:`begin`, such as a merge,
    is not counted.

    The host only enqueues what an accelerator computes, so events on its stream are compared there.
    On other devices the host's clock counts.

    Args:
        device: where the parameters are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._steps: deque[tuple[Any, Any]] = deque(maxlen=STEPS_MAX)
        """The begin and the end of each step."""
        self._begun: Any = None

    def begin(self) -> None:
        """Note that a step begins now."""
        self._begun = self._stamp()

    def end(self) -> None:
        """Note that the step ends now, and the next one begins."""
        ended = self._stamp()
        if self._begun is not None:
            self._steps.append((self._begun, ended))
        self._begun = ended

    def median_s(self, steps: int) -> float:
        """Return the median of the newest ``steps``, or of a few more if these are very few, in
        seconds; 0 for none.

        It waits until the device has computed them.
        """
        newest = list(self._steps)[-max(steps, STEPS_LEAST) :]
        if not newest:
            return 0.0
        if is_accelerator(self._device):
            newest[-1][1].synchronize()
            return float(statistics.median([begun.elapsed_time(end) for begun, end in newest])) / 1e3
        return float(statistics.median([end - begun for begun, end in newest]))

    def _stamp(self) -> Any:
        return stamp(self._device) if is_accelerator(self._device) else perf_counter()


log = logging.getLogger("kvps")


class MeanStore:
    """The store through which workers compute means of tensors.

    Args:
        owner: the front end.
        options: of the front end's stores.
        compression: as :meth:`kvps.KVStore.set_gradient_compression`; None for none.
    """

    def __init__(self, owner: str, options: StoreOptions, compression: Any) -> None:
        self._kv = create_dist("dist_sync", f"{owner}.mean", options, average=True)
        self._lost: int | None = None
        """Means of the lost worker that this one replaces, which its script has still to pass;
        None if unknown."""
        residual_state.compress(self._kv, compression, "compression")

    def resume(self) -> None:
        """Begin with the next mean of the others: the script of this replacement does not run again."""
        self._lost = 0

    def close(self) -> None:
        """Close the store."""
        self._kv.close()

    def of(self, tensors: Mapping[str, torch.Tensor], weight: float) -> dict[str, torch.Tensor]:
        """Return the means over all workers, each of which calls; ``tensors`` are used up.

        If the servers return to a checkpoint meanwhile, the call is made again.

        Args:
            tensors: name -> tensor; the same names and shapes on every worker.
            weight: of this worker.

        Raises:
            KvpsError: as :meth:`kvps.KVStore.pushpull`.
        """
        names, values = list(tensors), list(tensors.values())
        while True:
            try:
                self._kv.init(names, [torch.zeros_like(value) for value in values])
                if self._lost is None:
                    place = self._kv.take_place(names)
                    self._lost = place.owed if place.is_replacement else 0
                self._kv.take_owed(names)
                if self._lost > 0:
                    self._lost -= 1
                    return dict(tensors)
                means = [torch.empty_like(value) for value in values]
                self._kv.pushpull(names, values, out=means, weight=weight)
            except EpochChanged as error:
                log.warning("%s", error)
            else:
                return dict(zip(names, means, strict=True))
