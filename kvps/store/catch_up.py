"""The way of a replacement to the step of the others, when its script does not ask where that is.

A front end whose optimizer runs on the servers has no state of its own. So the script of a
replacement can run again from its beginning, as its predecessor did: its loops, samplers and
schedulers arrive where those of the others are. Until then the front end passes over each
``step()``: nothing is pushed, and no weight changes. The calls that all ranks make together pass
at once (:mod:`kvps.core.worker.calls.resume`). This takes the time of the forward and backward
passes. A script that calls ``resume()`` of the front end begins at the step of the others at once.

Steps are counted by pushes, so they must be the same: a script whose steps cannot be counted so is refused.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import NoReturn

from kvps.core.membership_client import EXIT_CONFIG
from kvps.core.worker.calls import Place
from kvps.errors import ConfigError

log = logging.getLogger("kvps")


@dataclass(slots=True)
class CatchUp:
    """The steps that a replacement still passes over."""

    place: Place
    epoch: int
    """How often the servers had returned to a checkpoint when this process began."""
    unit: str = "steps"
    """The name of the steps, each of which pushes all keys once; "" for a store of which nothing
    is logged."""
    done: int = 0
    """Steps that were passed over."""

    @property
    def is_over(self) -> bool:
        """Whether the next step is the first of this process."""
        return self.done >= self.place.owed

    def step(self) -> None:
        """Pass over a step.

        Raises:
            ConfigError: if the steps of the predecessor cannot be counted.
        """
        if self.done == 0:
            self._begin()
        self.done += 1

    def check_rate(self, rate: float) -> None:
        """Compare the learning rate of the last step that was passed over with that of the servers.

        Raises:
            ConfigError: if they differ: what the script decides depends on more than its steps.
        """
        if self.place.rate is not None and self.place.rate != rate:
            refuse(
                f"its script has come to the learning rate {rate:g}, and the job is at {self.place.rate:g} "
                "(a schedule that follows the loss cannot be repeated)"
            )

    def _begin(self) -> None:
        place = self.place
        if place.joins:
            refuse("join() was called before, and the steps of its predecessor are not known")
        if place.restored:
            refuse("the job continues from a checkpoint, and the steps of its predecessor are not known")
        if self.epoch:
            refuse(
                "the servers have returned to a checkpoint, and the steps of its predecessor are not known"
            )
        if place.most_owed > place.owed + 1:
            refuse(
                f"some parameters were pushed {place.owed} times and others {place.most_owed} times "
                "(parameters that are frozen for some steps, or unused), so the steps of its predecessor "
                "are not known"
            )
        if not self.unit:
            return
        log.warning(
            "this worker replaces a lost worker: its script runs again, and its first %d %s are passed "
            "over. To begin where the others are at once, call resume() of the front end, which returns "
            "the step",
            place.owed,
            self.unit,
        )


def refuse(
    why: str, remedy: str = "have the script call resume() of its front end, and begin at that step"
) -> NoReturn:
    """Refuse to replace a lost worker; a launcher does not start this process again.

    Args:
        why: what is missing.
        remedy: what the script can do, other than to be started again as a whole.

    Raises:
        ConfigError: always, with the exit code of the process.
    """
    error = ConfigError(
        f"this worker replaces a lost worker, and cannot go on where it was: {why}. Restart the "
        f"job, or {remedy}"
    )
    error.exit_code = EXIT_CONFIG
    raise error
