"""The fault log: each loss of a member, and the steps of its repair.

A fault begins when a member is lost, evicted or replaced. It is over when its seat is held again
and no rollback is under way. What happens later is added to it as steps. The newest faults, and
the newest lines of the scheduler's log, are kept for the dashboard; nothing depends on them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from kvps.protocol.envelope import Node, Role

FAULTS_MAX, STEPS_MAX, EVENTS_MAX = 50, 12, 100
"""Faults, steps of each, and events that are kept."""


class FaultEvent(NamedTuple):
    """A line of the log."""

    at: float
    level: str
    text: str


@dataclass(slots=True)
class Fault:
    """One loss of a member."""

    node: Node
    at: float
    reason: str
    steps: list[tuple[float, str]] = field(default_factory=list)
    """Times and texts of the steps that followed."""
    over_at: float | None = None
    """When all was well again; None while it is not."""


class FaultLog:
    """The newest faults and events of a scheduler."""

    def __init__(self) -> None:
        self.faults: deque[Fault] = deque(maxlen=FAULTS_MAX)
        self.events: deque[FaultEvent] = deque(maxlen=EVENTS_MAX)
        self._short: dict[int, float] = {}
        """Server -> rounds without a lost worker that it had closed, by its last figures."""

    def note(self, level: str, text: str, now: float) -> None:
        """Keep a line of the log."""
        self.events.append(FaultEvent(now, level, text))

    def lost(self, node: Node, reason: str, now: float) -> None:
        """A member is lost: a fault begins."""
        if self._open(node) is None:
            self.faults.append(Fault(node, now, reason))

    def replaced(self, node: Node, who: str, now: float) -> None:
        """Another process has the seat of a member."""
        self.lost(node, "its process did not hold the seat any more", now)
        self._step(node, f"replaced by {who}", now)
        self._close(node, now)

    def promoted(self, node: Node, who: str, now: float) -> None:
        """The standby of a lost server has its seat."""
        self.lost(node, "its process did not hold the seat any more", now)
        self._step(node, f"its standby {who} goes on in its place; nothing is lost", now)
        self._close(node, now)

    def returned(self, node: Node, now: float) -> None:
        """The process of a lost member is heard again."""
        self._step(node, "the same process is heard again, and goes on", now)
        self._close(node, now)

    def rollback_began(self, node: Node, epoch: int, cut: int, now: float) -> None:
        """The job returns to a checkpoint because this server was replaced."""
        text = f"all servers roll back to checkpoint {cut} or an older one; epoch {epoch} begins"
        self._step(node, text, now, is_over=None)

    def rolled_back(self, cut: int, failure: str, now: float) -> None:
        """The rollback is over."""
        if failure:
            text = f"the rollback failed: {failure}"
        else:
            text = f"all servers hold checkpoint {cut}; workers repeat the rounds since"
        for fault in self.faults:
            if fault.node.role is Role.SERVER and fault.over_at is None:
                self._add(fault, text, now)
                if not failure:
                    fault.over_at = now

    def unsaved(self, node: Node, now: float) -> None:
        """A server was replaced, and there is no checkpoint to return to."""
        self._step(node, "there was no checkpoint: its part of the values is lost", now)

    def short_rounds(self, server: int, count: float, now: float) -> None:
        """A server has closed so many rounds without a lost worker."""
        if count > self._short.get(server, 0.0):
            for fault in self.faults:
                text = "the other workers go on: rounds close without it (on_worker_lost='shrink')"
                is_worker = fault.node.role is Role.WORKER and fault.over_at is None
                if is_worker and all(text != said for _, said in fault.steps):
                    self._add(fault, text, now)
        self._short[server] = count

    def _open(self, node: Node) -> Fault | None:
        """Return the fault of a member that is not over."""
        faults = [fault for fault in self.faults if fault.node == node and fault.over_at is None]
        return faults[-1] if faults else None

    def _step(self, node: Node, text: str, now: float, is_over: float | None = None) -> None:
        """Add a step to the newest fault of a member; ``is_over`` None opens it again."""
        fault = next((candidate for candidate in reversed(self.faults) if candidate.node == node), None)
        if fault is not None:
            self._add(fault, text, now)
            fault.over_at = is_over

    def _close(self, node: Node, now: float) -> None:
        fault = self._open(node)
        if fault is not None:
            fault.over_at = now

    def _add(self, fault: Fault, text: str, now: float) -> None:
        if len(fault.steps) < STEPS_MAX:
            fault.steps.append((now, text))
