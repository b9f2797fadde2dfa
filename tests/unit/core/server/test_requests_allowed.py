"""What a worker may say depends on its rank, its machine and what it has said before."""

import pytest
import torch

from kvps.core.limits import Limits
from kvps.protocol.envelope import Message
from kvps.protocol.membership import Error, Join, Return
from kvps.protocol.stores import Declare, Entry, SetState
from tests.support.server_harness import ServerStage, heard, opening, refusal


def stage(**options: object) -> ServerStage:
    server = ServerStage(3)
    server.open(**options)
    server.init("a", [0.0, 0.0])
    return server


@pytest.mark.spec("R243")
@pytest.mark.parametrize(("bundles", "ranks"), [(False, (0, 1)), (False, (1,)), (True, (1, 9))])
def test_a_push_for_others_is_refused(bundles: bool, ranks: tuple[int, ...]) -> None:
    server = stage(bundles=bundles)
    before = server.snapshot()
    said = server.push(0, "a", [1, 1], 0, ranks=ranks)
    assert refusal(said).startswith("Unauthorized: worker 0 pushes for ranks")
    assert server.snapshot() == before


@pytest.mark.spec("R243")
def test_rank_0_alone_puts_states_back() -> None:
    server = stage()
    said = server.say(1, SetState(server.places("a")[0].chunk, 0, 2, 1, ()))
    assert refusal(said) == "Unauthorized: worker 1 may not load optimizer states; only rank 0 may"


@pytest.mark.spec("R243")
def test_nobody_returns_from_a_join_that_he_has_not_made() -> None:
    server = stage()
    before = server.snapshot()
    said = server.say(1, Return("kv", 2**63 - 1))
    assert refusal(said).startswith("Unauthorized: worker 1 returns from join 9223372036854775807")
    assert server.snapshot() == before
    server.say(1, Join("kv", 1, False))
    assert not heard(server.say(1, Return("kv", 1)), Error)


@pytest.mark.spec("R244")
def test_waiting_requests_of_a_worker_are_bounded() -> None:
    server = ServerStage(3, limits=Limits(pending=3))
    server.open()
    server.init("a", [0.0, 0.0])
    for _ in range(3):
        assert server.pull(0, "a", after=1) == []
    assert refusal(server.pull(0, "a", after=1)).startswith("Overload: 3 requests of worker 0 already wait")
    assert server.pull(1, "a", after=1) == []
    server.push(0, "a", torch.ones(2), 0)


@pytest.mark.spec("R244")
def test_keys_that_one_worker_waits_for_are_bounded() -> None:
    server = ServerStage(3, limits=Limits(keys=5))
    server.open()

    def wait_for(*keys: str, rank: int = 1) -> list[Message]:
        entries = tuple([Entry(key, 1, (2,), 0, 2) for key in keys])
        return server.say(rank, Declare("kv", False, 0, entries))

    assert wait_for("a", "b", "c") == []
    assert wait_for("d", "e") == []
    assert refusal(wait_for("f")).startswith(
        "Overload: requests of worker 1 wait for 6 keys, and a server holds 5; raise the limit"
    )
    assert wait_for("f", rank=2) == []
    server.init("d", [0.0, 0.0])
    assert wait_for("f") != [], "one of two keys does not answer the request"
    server.init("e", [0.0, 0.0])
    assert server.server.context.sessions[1].waiting_keys == 3
    assert wait_for("f", "g") == []


@pytest.mark.spec("R244")
def test_stores_are_bounded() -> None:
    server = ServerStage(3, limits=Limits(stores=4))
    server.open()
    for number in range(3):
        server.server.control.make_store(opening(store=f"kv-{number}"))
    said = refusal(server.say(0, opening(store="more")))
    assert said.startswith("Overload: store 'more' is refused: there are 4 stores already")
    assert said.endswith("raise the limit with kvps-server --limit stores=NUMBER (KVPS_LIMITS)")
    assert not heard(server.say(0, opening()), Error)
