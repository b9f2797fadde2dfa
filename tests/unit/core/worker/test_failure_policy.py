"""Who is lost, and what that means for the calls of a store."""

import math

import pytest

from kvps.core.worker.failure_policy import FailurePolicy
from kvps.core.worker.store import WorkerStore
from kvps.errors import ServerLost, WorkerLost
from kvps.protocol.envelope import Node, Role
from kvps.protocol.membership import Member, View
from tests.support.worker_harness import member, opened

S0, S1, W0, W1 = (Node(role, rank) for role in (Role.SERVER, Role.WORKER) for rank in (0, 1))
SERVERS = {0: member(S0).incarnation, 1: member(S1).incarnation}


def new_store(grace_s: float = 60.0, **options: object) -> WorkerStore:
    return WorkerStore(opened(**options), 0, 2, grace_s)


def learn(losses: FailurePolicy, *members: Member, now: float = 100.0) -> FailurePolicy:
    losses.learn(View(1, "running", "", members), SERVERS, now)
    return losses


def lost(node: Node, for_s: float = 0.0, state: str = "lost", **more: object) -> Member:
    return member(node, state, lost_for_s=for_s, **more)


class TestServer:
    @pytest.mark.parametrize("state", ["lost", "gone", "left"])
    def test_lost_server_ends_all_stores(self, state: str) -> None:
        losses = learn(FailurePolicy(), member(S0), lost(S1, state=state))
        for item in (new_store(), new_store(mode="async"), None):
            error = losses.error(item, 100.0)
            assert isinstance(error, ServerLost)
        assert str(error) == (
            "server 1 (host-server-1 tcp://s1:1) is lost: exit code 9. Its part of every key is lost. The other servers keep their parts, but no key is "
            "complete. Start the job again from saved weights; with --checkpoint-dir, a job survives the loss of a server"
        )

    def test_replaced_server_is_empty(self) -> None:
        losses = learn(FailurePolicy(), member(S0, incarnation=99), member(S1))
        error = losses.error(None, 100.0)
        assert "server 0 (host-server-0 tcp://s0:1) has replaced" in str(error)


class TestWorker:
    def test_is_waited_for_until_its_grace_is_over(self) -> None:
        losses = learn(FailurePolicy(), lost(W1, 5.0))
        assert losses.deadline(new_store()) == 155.0
        assert losses.error(new_store(), 154.9) is None
        error = losses.error(new_store(), 155.0)
        assert isinstance(error, WorkerLost)
        assert str(error) == (
            "worker 1 (host-worker-1) is lost: exit code 9. Rounds of store 'kv' need it, and no "
            "replacement came in 60 s. Earlier pushes are kept. Start a replacement with --rank 1, "
            "or create the store with on_worker_lost='shrink' to continue without it"
        )

    def test_nor_when_none_can_come(self) -> None:
        error = learn(FailurePolicy(), lost(W1, state="gone")).error(new_store(), 100.0)
        assert "no replacement can come. Earlier pushes are kept. Start the job again" in str(error)

    def test_has_been_lost_since_the_first_word_of_it(self) -> None:
        losses = learn(FailurePolicy(), lost(W1, 5.0), now=100.0)
        learn(losses, lost(W1, 6.0), now=103.0)  # a view that was long on its way
        assert losses.deadline(new_store()) == 155.0
        learn(losses, lost(W1, 1.0, incarnation=77), now=104.0)  # its replacement
        assert losses.deadline(new_store()) == 163.0
        learn(losses, member(W1))
        assert losses.deadline(new_store()) == math.inf
