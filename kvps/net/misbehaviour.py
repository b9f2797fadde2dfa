"""Misbehaving connections: many of their packets were refused, and they are ignored for a while.

A packet that is refused costs its receiver little, and its sender less. So a connection that carries a
hundred of them in ten seconds is ignored for the next ten seconds: its packets are dropped unread, and an
honest peer sends them again.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvps.core.effects import Route
from kvps.core.limits import TABLE

WITHIN_S = 10.0
IGNORED_S = 10.0
"""The time in which a connection may have some packets refused, and for how long it is ignored for more."""
KEPT_MAX = 4096
"""How many connections are remembered along which something was refused."""


@dataclass(slots=True)
class _Record:
    since: float
    count: int = 0
    ignored_until: float = 0.0


class Misbehaviour:
    """The refused packets of each connection.

    Args:
        refused_max: how many are refused before a connection is ignored.
    """

    def __init__(self, refused_max: int = TABLE["refused"].default) -> None:
        self.refused_max = refused_max
        self.records: dict[Route, _Record] = {}
        """The connection along which something was refused last is the last."""

    def is_ignored(self, route: Route, now: float) -> bool:
        """Whether nothing is heard along ``route`` at the moment."""
        record = self.records.get(route)
        return record is not None and now < record.ignored_until

    def refused(self, route: Route, now: float) -> bool:
        """A packet was refused; return whether ``route`` is ignored because of that."""
        record = self.records.pop(route, None)
        if record is None or now >= record.since + WITHIN_S:
            record = _Record(now)
        self.records[route] = record
        if len(self.records) > KEPT_MAX:
            del self.records[next(iter(self.records))]
        record.count += 1
        if record.count < self.refused_max:
            return False
        record.count, record.since, record.ignored_until = 0, now, now + IGNORED_S
        return True
