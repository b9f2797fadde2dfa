"""The effects of a core that no loop drives."""

from __future__ import annotations

from kvps.core.effects import Core, Effect


def taken(core: Core, door: None) -> list[Effect]:
    """Return the effects of the door of ``core`` that was just called."""
    return core.outbox.take()
