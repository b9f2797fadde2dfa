"""The pace of this worker among the others: it tells them how fast it is, and learns how many local steps to make.

The table of speeds has a row for each rank, in a store without rounds whose rule is ``assign``: a worker writes its row
and reads all of them, while its pseudo-gradients are on their way. So nobody waits, and nobody counts as fast for
ever that has stopped writing (:mod:`kvps.torch.local_steps.dynamic`).
"""

from __future__ import annotations

import time

import torch

from kvps.errors import EpochChanged
from kvps.runtime.ticket import Handle
from kvps.store.create import create_dist
from kvps.store.options import StoreOptions
from kvps.torch.local_steps.dynamic import DynamicSteps, Report
from kvps.torch.local_steps.step_timer import StepTimer

SPEEDS = "speeds"
"""The key of the table: float64, (workers, fields of a report)."""


class Pace:
    """The speeds of all workers, and the steps that follow for this one.

    Args:
        owner: the front end.
        options: those of the front end's stores.
        sync_every: steps of the fastest worker.
        least: the fewest steps of a turn.
        device: where the parameters are.
    """

    def __init__(
        self, owner: str, options: StoreOptions, sync_every: int, least: int, device: torch.device
    ) -> None:
        self._kv = create_dist("dist_async", f"{owner}.pace", options)
        self._rank: int = self._kv.rank
        self._timer = StepTimer(device)
        self._steps = DynamicSteps(sync_every, least, self._rank)
        self._table = torch.zeros(
            self._kv.num_workers, len(Report._fields), dtype=torch.float64, device="cpu"
        )
        self._pushed_at = 0.0
        self._away: Handle | None = None
        self._open(None)

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
        """Send how fast the last ``steps`` steps were, and ask for the others' speeds; do not wait for them."""
        now = time.monotonic()
        step_s, turn_s = self._timer.median_s(steps), now - self._pushed_at
        self._pushed_at = now
        while True:
            own = Report(float(self._table[self._rank, 0]) + 1, step_s, turn_s)
            row = (torch.tensor([self._rank]), torch.tensor([own], dtype=torch.float64))
            try:
                self._away = self._kv.pushpull(SPEEDS, row, out=self._table, async_op=True)
                return
            except EpochChanged as error:
                self._open(error)

    def next_steps(self) -> int:
        """Wait for the speeds asked for last; return the steps of the turn that has begun."""
        if self._away is not None:
            try:
                self._away.wait()
            except EpochChanged as error:
                self._open(error)
            self._away = None
        return self._steps.of([Report(*row) for row in self._table.tolist()], time.monotonic())

    def close(self) -> None:
        """Close the store."""
        self._kv.close()

    def _open(self, error: EpochChanged | None) -> None:
        """Create the table where there is none, and read it; ``error`` is set if servers returned to a checkpoint."""
        while True:
            try:
                if error is None or SPEEDS not in error.after:
                    self._kv.init(SPEEDS, torch.zeros_like(self._table))
                if error is None or not error.has_optimizer:
                    self._kv.set_optimizer("assign")
                self._kv.resume([SPEEDS])
                self._kv.pull(SPEEDS, out=self._table)
                return
            except EpochChanged as another:
                error = another
