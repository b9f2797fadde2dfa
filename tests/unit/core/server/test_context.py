"""What the requests of one job share: sessions, incarnations, and what is said."""

from types import SimpleNamespace

from kvps.core.server.chunks.slab import Chunks
from kvps.core.server.context import RequestContext
from kvps.core.server.sessions import PendingRead, Session


def test_a_read_is_pending_while_its_session_has_it() -> None:
    member = SimpleNamespace(rank=0)
    context = RequestContext(member, Chunks(), [])  # type: ignore[arg-type]
    session = Session(0, b"w0", 1)
    reading, again = (PendingRead(session, 5, "kv", 1, True, ()) for _ in range(2))
    assert not context.is_pending(reading)
    session.pending[5] = reading
    assert context.is_pending(reading)
    assert not context.is_pending(again)
    session.pending.clear()
    assert not context.is_pending(reading)
