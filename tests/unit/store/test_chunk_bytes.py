"""The size of a chunk, by where the members of a job are."""

from types import SimpleNamespace
from typing import Any

import pytest

from kvps.core.worker.cluster_info import ClusterInfo
from kvps.protocol.envelope import Role
from kvps.protocol.membership import Member
from kvps.store import create

NEAR, FAR = "tcp://127.0.0.1:9000", "tcp://10.0.0.2:9000"


def session_of(*seats: tuple[Role, str, int]) -> Any:
    """Return the session of a job whose members have these roles, endpoints and machines."""
    members = [
        Member(role, rank, 1, "held", endpoint, "host", 0.0, "", machine)
        for rank, (role, endpoint, machine) in enumerate(seats)
    ]
    return SimpleNamespace(info=ClusterInfo(0, 1, 1, tuple(members)))


@pytest.mark.parametrize(
    ("seats", "size"),
    [
        ([(Role.SERVER, FAR, 7), (Role.WORKER, "", 7)], 32 << 20),  # through shared memory
        ([(Role.SERVER, NEAR, 0), (Role.WORKER, "", 0)], 8 << 20),  # through loopback sockets
        ([(Role.SERVER, FAR, 7), (Role.WORKER, "", 8)], 384 << 10),
        ([(Role.SERVER, NEAR, 7), (Role.SERVER, FAR, 8), (Role.WORKER, "", 7)], 384 << 10),
        ([(Role.SERVER, FAR, 0), (Role.WORKER, "", 0)], 384 << 10),  # told to use TCP
    ],
)
def test_chunks_are_large_on_one_host_and_small_between_hosts(
    seats: list[tuple[Role, str, int]], size: int
) -> None:
    assert create.default_chunk_bytes(session_of(*seats)) == size


def test_the_operator_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPS_CHUNK_BYTES", "1M")
    assert create.default_chunk_bytes(session_of((Role.SERVER, FAR, 7))) == 1 << 20
