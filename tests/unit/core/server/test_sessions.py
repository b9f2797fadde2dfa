"""Who waits for an answer."""

from __future__ import annotations

from kvps.core.server.sessions import PendingRead, Session


def test_a_reading_is_pending_while_its_session_has_it() -> None:
    session = Session(0, b"w0", 1)
    reading, again = (PendingRead(session, 5, "kv", 1, True, ()) for _ in range(2))
    assert not reading.is_pending
    session.pending[5] = reading
    assert reading.is_pending
    assert not again.is_pending
    session.pending.clear()
    assert not reading.is_pending
