"""Waiting for the other ranks of a group, by a store of torch and the states of their seats."""

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore

from kvps.errors import WorkerLost
from kvps.torch.distributed import rendezvous


def session_of(**ranks: list[int]) -> SimpleNamespace:
    """Return a session of three workers, of which these have seats that are held, lost, left or gone."""
    info = SimpleNamespace(workers=3, workers_in=lambda state: ranks.get(state, []))
    return SimpleNamespace(info=info)


def store_of(*ranks: int) -> HashStore:
    """Return a store in which these ranks have begun."""
    store = HashStore()
    for rank in ranks:
        store.set(f"kvps.{rank}", "7.0")
    return store


def wait(store: HashStore, session: SimpleNamespace) -> None:
    rendezvous._await_all(store, session, time.monotonic() + 60.0)


@pytest.mark.parametrize("state", ["left", "gone"])
def test_a_rank_that_has_ended_is_not_waited_for(state: str) -> None:
    with pytest.raises(WorkerLost, match=r"rank 2 ended first"):
        wait(store_of(0, 1), session_of(held=[0, 1], **{state: [2]}))


def test_a_rank_that_is_lost_may_be_started_again() -> None:
    """As by torchrun, which starts all ranks again: the first of them may find the seats of their predecessors lost."""
    store, looked = store_of(1), threading.Event()

    def workers_in(state: str) -> list[int]:
        if state == "lost":
            looked.set()
        return {"held": [1], "lost": [0, 2]}.get(state, [])

    session = SimpleNamespace(info=SimpleNamespace(workers=3, workers_in=workers_in))
    ended: list[BaseException | None] = []
    thread = threading.Thread(target=lambda: ended.append(outcome(lambda: wait(store, session))))
    thread.start()
    assert looked.wait(30.0), "a look at the seats of the missing ranks"
    store.set("kvps.0", "8.0")
    store.set("kvps.2", "9.0")
    thread.join(30.0)
    assert ended == [None]


def outcome(call: Callable[[], None]) -> BaseException | None:
    try:
        call()
    except BaseException as error:
        return error
    return None


def test_rendezvous_waits_as_long_as_a_replacement_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "RETURN_MAX_S", 0.5)
    began = time.monotonic()
    with pytest.raises(WorkerLost, match=r"ranks 0, 2 ended first"):
        wait(store_of(1), session_of(held=[1], lost=[0, 2]))
    assert time.monotonic() >= began + 0.5
