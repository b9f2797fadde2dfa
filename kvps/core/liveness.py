"""Liveness in words: describe a rank that others wait for. A hung script is not a dead process.

A worker's core beats while its script computes, waits or hangs, so that it lives says nothing about the
script. What does is when the script last called; or, if it waits in a call, which one that is.
"""

from __future__ import annotations

from dataclasses import dataclass

SILENT_AFTER_S = 3.0
"""Seconds without a beat after which a member is called silent; members beat once a second."""
SILENCE_MAX_S = 12.0
"""Seconds without a beat after which a member counts as lost, unless the operator set another limit."""
DROP_GRACE_S = 1.0
"""How long a member may be without a connection: it may have opened another."""
SUSPECTED_AFTER_S = 0.75
"""Seconds without a beat after which it is asked whether the host of a server with a copy still answers."""
SUSPECTED_AGAIN_S = 1.0
"""Seconds after which that is asked again."""
QUIET_AFTER_S = 60.0
"""A script that called nothing for so long, and waits for nothing, is worth a line of log."""
WAITS_AFTER_S = 3.0
"""Seconds without a new call after which a script is said to wait: a busy one is in some call
whenever it is asked."""
HANGS_AFTER_S = 10.0
"""Seconds without a call after which a live rank that others wait for may hang."""


def quiet_in_words(quiet_s: float, what: str) -> str:
    """Say that a process lives, and when it did something (``what``) last.

    Example:
        >>> quiet_in_words(2.0, "call"), quiet_in_words(42.0, "call")
        ('alive, last call 2 s ago', 'alive, but no progress for 42 s')
    """
    if quiet_s < HANGS_AFTER_S:
        return f"alive, last {what} {quiet_s:.0f} s ago"
    return f"alive, but no progress for {quiet_s:.0f} s"


@dataclass(slots=True)
class Progress:
    """The progress of a member's script, from its beats."""

    calls: int
    moved_at: float
    """When the number of calls last grew."""
    waits_in: str = ""
    """The call that the script waits in."""
    is_quiet: bool = False
    """Said to be so in the log."""
    standstill: int = 0
    """The number of its standstill; 0 if it may go on by itself."""
    still_since: float = 0.0
    """When that number was first heard."""
    heard_at: float | None = None
    """When its process beat last; None before it does. Its supervisor may beat on without it."""

    def is_older(self, calls: int) -> bool:
        """Whether so many calls are less than those of the script: its supervisor, which makes
        none, says so."""
        return calls < self.calls

    def beat(self, calls: int, waits_in: str, now: float, standstill: int = 0) -> str:
        """Take in a beat of the script's own process; return what is new and worth a line of log."""
        self.heard_at = now
        if calls > self.calls:
            self.calls, self.moved_at = calls, now
        if standstill != self.standstill:
            self.standstill, self.still_since = standstill, now
        self.waits_in = waits_in
        was_quiet = self.is_quiet
        self.is_quiet = calls > 0 and not waits_in and now - self.moved_at >= QUIET_AFTER_S
        if self.is_quiet == was_quiet:
            return ""
        if self.is_quiet:
            return f"alive, but has made no call for {now - self.moved_at:.0f} s"
        return "calls again"

    def waited_s(self, now: float) -> float | None:
        """Return the seconds in which its script has waited in one call; None if it does not wait."""
        quiet_s = now - self.moved_at
        return quiet_s if self.waits_in and quiet_s >= WAITS_AFTER_S else None

    def words(self, now: float) -> str:
        """Say how the script of a member that beats stands."""
        quiet_s = now - self.moved_at
        if self.heard_at is not None and now - self.heard_at >= SILENT_AFTER_S:
            return (
                "hangs: its kvps-worker is alive, its process has been silent for "
                f"{now - self.heard_at:.0f} s"
            )
        if self.waited_s(now) is not None:
            return f"alive, has waited in {self.waits_in} for {quiet_s:.0f} s"
        return quiet_in_words(quiet_s, "call") if self.calls else "alive, has made no call yet"
