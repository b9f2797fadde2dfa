"""A job as ``kvps top`` shows it: the answers of its scheduler over some seconds, as lines with rates per second.

Members tell their counters once per second, and an answer to LOOK has the newest. A rate is the difference between
the newest answer and the oldest that is kept. A member whose process was replaced begins anew.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from kvps.observe.judgement import Problem, problems_of
from kvps.phrases import ranks_in_words
from kvps.protocol.envelope import Node, Role
from kvps.protocol.membership import Figures, OldRound, Seen, Sight

WINDOW_S = 5.0
"""Seconds that a rate is about."""
UNKNOWN = Figures("", 0, 0, 0, 0, 0, 0.0)
"""The figures of members that an old scheduler knows nothing of."""


class MemberLine(NamedTuple):
    """One seat."""

    node: Node
    sight: Sight
    figures: Figures
    rounds_s: float
    """Rounds per second, of a worker."""
    in_s: float
    out_s: float
    """Bytes of values per second that it receives and sends."""

    @property
    def is_held(self) -> bool:
        """Whether a process holds the seat."""
        return self.sight.state == "held"

    @property
    def urgency(self) -> tuple[bool, float, int]:
        """Sort key: seats that no process holds first, then the latest, then by rank."""
        is_well = self.is_held or self.sight.state == "left"
        return is_well, -self.figures.late_s, self.node.rank


@dataclass(frozen=True, slots=True)
class Picture:
    """A job at one moment."""

    job: str
    phase: str
    reason: str
    software: str
    epoch: int
    checkpoint: int
    workers: tuple[MemberLine, ...]
    servers: tuple[MemberLine, ...]
    rounds: tuple[OldRound, ...]
    problems: tuple[Problem, ...] = ()
    """Why the job does not go on."""

    @property
    def rounds_s(self) -> float:
        """Rounds per second of the fastest worker."""
        return max([worker.rounds_s for worker in self.workers], default=0.0)

    @property
    def in_s(self) -> float:
        """Bytes of values per second that all servers receive."""
        return sum([server.in_s for server in self.servers])

    @property
    def out_s(self) -> float:
        """Bytes of values per second that all servers send."""
        return sum([server.out_s for server in self.servers])

    def waits_for(self, stalled: OldRound) -> str:
        """Say which ranks an open round waits for, and how they stand."""
        if not stalled.missing:
            return "other servers"
        presence = {line.node.rank: line.sight.presence for line in self.workers}
        return ranks_in_words(stalled.missing, lambda rank: presence.get(rank, ""))


class ClusterView:
    """The answers of the last seconds.

    Example:
        >>> view = ClusterView()
        >>> seen = Seen(1, "running", "all are here", (), ())
        >>> view.take(b"job!", seen, 0.0).phase
        'running'
    """

    def __init__(self) -> None:
        self._kept: deque[tuple[float, bytes, Seen]] = deque()

    def take(self, job: bytes, seen: Seen, now: float) -> Picture:
        """Take in an answer of now; return the job as it stands.

        Args:
            job: its name, or the part of it that is shown.
            seen: the answer.
            now: seconds on any clock.
        """
        if self._kept and self._kept[-1][1] != job:
            self._kept.clear()
        self._kept.append((now, job, seen))
        while len(self._kept) > 2 and now - self._kept[0][0] > WINDOW_S:
            self._kept.popleft()
        then, _, before = self._kept[0]
        known = {_life(sight): figures for sight, figures in _pairs(before)}
        lines = [
            _line(sight, figures, known.get(_life(sight)), now - then)
            for sight, figures in _pairs(seen)
        ]
        return Picture(
            job.hex()[:8],
            seen.phase,
            seen.reason,
            seen.software,
            seen.epoch,
            seen.checkpoint,
            tuple([line for line in lines if line.node.role is Role.WORKER]),
            tuple([line for line in lines if line.node.role is Role.SERVER]),
            seen.rounds,
            tuple(problems_of(seen)),
        )


def _pairs(seen: Seen) -> list[tuple[Sight, Figures]]:
    """Return the seats with their figures."""
    figures = seen.figures or (UNKNOWN,) * len(seen.members)
    return list(zip(seen.members, figures, strict=False))


def _life(sight: Sight) -> tuple[int, int, int]:
    return sight.role, sight.rank, sight.incarnation


def _line(sight: Sight, figures: Figures, before: Figures | None, seconds: float) -> MemberLine:
    def rate(of: Callable[[Figures], int]) -> float:
        if before is None or seconds <= 0:
            return 0.0
        return max(0.0, (of(figures) - of(before)) / seconds)

    return MemberLine(
        Node(Role(sight.role), sight.rank),
        sight,
        figures,
        rate(lambda figures_then: figures_then.rounds),
        rate(lambda figures_then: figures_then.in_bytes),
        rate(lambda figures_then: figures_then.out_bytes),
    )
