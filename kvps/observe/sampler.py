"""The sampler: a thread that has the loop copy its numbers once per second.

Nothing that a client of the endpoints does reaches the loop: it is served from the newest sample.
While the loop stands still there is no new sample, and /livez says so. Without ``--http`` there is
no sampler, and no cost.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from kvps.core.counts import Counts, Durations
from kvps.core.effects import Core
from kvps.net.transport import Refusals

if TYPE_CHECKING:
    from kvps.core.scheduler.figures.measurements import ServerFigures

C = TypeVar("C", bound=Core)
C_co = TypeVar("C_co", bound=Core, covariant=True)
EVERY_S = 1.0
"""Time between two samples."""
STILL_MAX_S = 30.0
"""How long the loop may run no sample before the process counts as hung."""
Values = Mapping[tuple[str, str], float]
"""Numbers by metric and label; several labels are separated by commas."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The numbers of one moment, and the status that the other endpoints show. A core gives its
    gauges alone as values."""

    values: Values = field(default_factory=dict)
    durations: Mapping[str, Durations] = field(default_factory=dict)
    is_ready: bool = False
    why: str = "the loop has not begun"
    """The state of the process, in words."""
    status: Mapping[str, object] = field(default_factory=dict)
    figures: tuple[ServerFigures, ...] = ()
    """The figures that servers have sent to a scheduler; empty for a server."""
    at: float = 0.0
    """When it was taken, by the clock of the loop."""


NOTHING = Sample()
"""The sample before the first."""


class Queue(Protocol[C_co]):
    """Where requests to the loop are put: an :class:`~kvps.net.driver.Inbox`."""

    def put(self, item: Callable[[C_co, float], None]) -> None:
        """Have ``item(core, now)`` run by the loop."""


class Sampler(Generic[C]):
    """The newest sample of a process.

    Args:
        inbox: of the loop.
        state: returns the gauges and the status of the core.
        counts: returns its counters.
        network: returns the counters of its transport.
        clock: seconds.
        also: a request to the loop with each sample; None for none.
        document: makes the status that is shown from a sample; it runs outside the loop.
    """

    def __init__(
        self,
        inbox: Queue[C],
        state: Callable[[C, float], Sample],
        counts: Callable[[C], Counts],
        network: Callable[[], Values],
        clock: Callable[[], float] = time.monotonic,
        also: Callable[[C, float], None] | None = None,
        document: Callable[[Sample], Mapping[str, object]] = lambda sample: sample.status,
    ) -> None:
        self.newest = NOTHING
        self.changed = threading.Condition()
        """Notified when there is a newer sample."""
        self._taken = Sample()
        self._arrived = threading.Event()
        self._also, self._document = also, document
        self._inbox = inbox
        self._state, self._counts, self._network = state, counts, network
        self._clock = clock
        self._asked_at = self._ticked_at = clock()
        self._is_asked = False
        self._lag_max_s = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvps-sampler", daemon=True)

    def start(self) -> None:
        """Begin to sample."""
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._ended.set()
        self._arrived.set()
        self._thread.join()

    def ask(self) -> None:
        """Ask the loop for a sample, unless it has not given the last one."""
        if not self._is_asked:
            self._is_asked, self._asked_at = True, self._clock()
            self._inbox.put(self._take)
            if self._also is not None:
                self._inbox.put(self._also)

    @property
    def still_s(self) -> float:
        """How long ago the loop gave a sample."""
        return self._clock() - self._ticked_at

    @property
    def is_live(self) -> bool:
        """Whether the loop turns."""
        return self.still_s <= STILL_MAX_S

    def publish(self) -> None:
        """Show the sample that was taken last."""
        taken = self._taken
        with self.changed:
            self.newest = replace(taken, status=self._document(taken))
            self.changed.notify_all()

    @property
    def is_ended(self) -> bool:
        """Whether there will be no more samples."""
        return self._ended.is_set()

    def _run(self) -> None:
        while not self._ended.is_set():
            began = self._clock()
            self.ask()
            if self._arrived.wait(EVERY_S) and not self._ended.is_set():
                self._arrived.clear()
                self.publish()
            self._ended.wait(max(0.0, began + EVERY_S - self._clock()))
        with self.changed:
            self.changed.notify_all()

    def _take(self, core: C, now: float) -> None:
        """Copy all numbers; the loop runs this."""
        self._ticked_at = self._clock()
        lag_s = self._ticked_at - self._asked_at
        self._lag_max_s = max(self._lag_max_s, lag_s)
        counts, state = self._counts(core), self._state(core, now)
        values = {
            **counts.values(),
            **self._network(),
            **state.values,
            ("kvps_loop_lag_seconds", ""): lag_s,
            ("kvps_loop_lag_max_seconds", ""): self._lag_max_s,
            ("kvps_ready", ""): float(state.is_ready),
        }
        self._taken = replace(state, values=values, durations=counts.durations(), at=now)
        self._is_asked = False
        self._arrived.set()


def network_values(refused: Refusals) -> Values:
    """Return the counters of a transport by the names of metrics.

    A packet whose sender was told why it is refused is left out: the core has counted it, by its reason.
    """
    values: dict[tuple[str, str], float] = {}
    for why, count in refused.packets.items():
        if why == "unread":
            values["kvps_unread_answers_total", ""] = count
        elif why == "ignored connections":
            values["kvps_ignored_connections_total", ""] = count
        elif why != "refused":
            values["kvps_dropped_packets_total", why] = count
    for why, count in refused.connections.items():
        values["kvps_refused_connections_total", why] = count
    for why, count in refused.closed.items():
        values["kvps_closed_connections_total", why] = count
    return values
