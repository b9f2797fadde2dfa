"""The time of a local step, on the clock of the device that computes it."""

from __future__ import annotations

import statistics
from collections import deque
from time import perf_counter
from typing import Any

import torch

STEPS_MAX = 512
"""Steps whose times are kept: the newest."""
STEPS_LEAST = 8
"""The fewest steps of a median, if there were as many: a turn of a slow worker may be a single step."""


class StepTimer:
    """Measures local steps; what happens between :meth:`end` and :meth:`begin`, such as a merge, is not counted.

    The host only enqueues what a CUDA device computes, so events on its stream are compared there. On other devices the
    host's clock counts.

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
        """Return the median of the newest ``steps``, or of a few more if these are very few, in seconds; 0 for none.

        It waits until the device has computed them.
        """
        newest = list(self._steps)[-max(steps, STEPS_LEAST) :]
        if not newest:
            return 0.0
        if self._device.type == "cuda":
            newest[-1][1].synchronize()
            return (
                float(statistics.median([begun.elapsed_time(end) for begun, end in newest])) / 1e3
            )
        return float(statistics.median([end - begun for begun, end in newest]))

    def _stamp(self) -> Any:
        if self._device.type != "cuda":
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch has no types here
        event.record(torch.cuda.current_stream(self._device))
        return event
