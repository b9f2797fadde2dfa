"""What the requests of one job share: sessions, incarnations, and what is said."""

from types import SimpleNamespace

import pytest

from kvps.core.membership_client import Quorum
from kvps.core.server.chunks.slab import Chunks
from kvps.core.server.context import RequestContext, StoreQuorum
from kvps.core.server.sessions import PendingRead, Session


def test_a_read_is_pending_while_its_session_has_it() -> None:
    member = SimpleNamespace(rank=0, view=None, envelope=lambda: None)
    context = RequestContext(member, Chunks(), [])  # type: ignore[arg-type]
    session = Session(0, b"w0", 1)
    reading, again = (PendingRead(session, 5, "kv", 1, True, ()) for _ in range(2))
    assert not context.is_pending(reading)
    session.pending[5] = reading
    assert context.is_pending(reading)
    assert not context.is_pending(again)
    session.pending.clear()
    assert not context.is_pending(reading)


# --- the quorum of a store ----------------------------------------------------------------------------

QUORUM = Quorum(held=frozenset({0, 2}), lost=frozenset({1}))


@pytest.mark.parametrize("policy", ["wait", "fail"])
def test_a_lost_rank_is_waited_for(policy: str) -> None:
    assert StoreQuorum.of(QUORUM, policy, None, frozenset()).required == {0, 1, 2}


def test_shrink_goes_on_without_it() -> None:
    assert StoreQuorum.of(QUORUM, "shrink", None, frozenset()).required == {0, 2}


@pytest.mark.spec("R120")
def test_nobody_waits_for_those_who_are_away() -> None:
    found = StoreQuorum.of(QUORUM, "wait", None, frozenset({1, 2}))
    assert found.required == {0}
    assert QUORUM.members("wait") == {0, 1, 2}
    assert found.live == {0}
