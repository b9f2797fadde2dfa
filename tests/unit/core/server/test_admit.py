"""A server judges packets by their envelope before they are decoded."""

import pytest

from kvps.core.membership_client import SCHEDULER
from kvps.errors import Fenced, Mismatch, ProtocolError
from kvps.protocol.envelope import Envelope, Message, Role
from kvps.protocol.membership import Error, Probe, View, Welcome
from kvps.protocol.stores import Norms
from tests.support.server_harness import JOB, ServerStage

WORKER, SERVER = Role.WORKER, Role.SERVER


def stage() -> ServerStage:
    server = ServerStage(2, 2, greeted=False)
    server.hello(0)
    return server


def admitted(server: ServerStage, kind: type[Message], role: Role, rank: int, life: int) -> bool:
    envelope = Envelope(JOB, server.view, role, rank, life, 1)
    return server.server.admit(b"somebody", envelope, kind)


@pytest.mark.spec("R240", "R241")
@pytest.mark.parametrize(
    ("kind", "role", "rank", "life", "error"),
    [
        (Probe, WORKER, 1, 11, ProtocolError),
        (Probe, WORKER, 0, 9, Fenced),
        (Probe, WORKER, 0, 99, ProtocolError),
        (Probe, WORKER, 5, 10, ProtocolError),
        (Norms, SERVER, 1, 1, Fenced),
        (Norms, SERVER, 1, 3, ProtocolError),
    ],
)
def test_others_are_told_why_not(
    kind: type[Message], role: Role, rank: int, life: int, error: type[Exception]
) -> None:
    with pytest.raises(error):
        admitted(stage(), kind, role, rank, life)


@pytest.mark.spec("R240")
def test_another_job() -> None:
    with pytest.raises(Mismatch):
        stage().server.admit(b"x", Envelope(bytes(16), 1, WORKER, 0, 10, 1), Probe)


def test_answers_and_the_scheduler_are_judged_elsewhere() -> None:
    server = stage()
    for kind in (Welcome, Error):
        assert server.server.admit("server 1", Envelope(JOB, 0, SERVER, 1, 2, 0), kind)
    assert server.server.admit(SCHEDULER, Envelope(JOB, 0, Role.SCHEDULER, 0, 0, 0), View)
