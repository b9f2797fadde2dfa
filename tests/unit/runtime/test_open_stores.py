"""How open stores end."""

import pytest

from kvps.errors import KvpsError, Timeout
from kvps.runtime import open_stores as module
from kvps.runtime.open_stores import AtExit, OpenStores


class Store:
    def __init__(self, name, endings, error=None):
        self.name = name
        self.did = []
        self._endings, self._error = endings, error
        endings.watch(self)

    def close(self):
        self.did.append("close")
        if self._error is not None:
            raise self._error

    def abandon(self):
        self.did.append("abandon")
        self._endings.forget(self)


def test_stores_are_closed_if_all_went_well():
    endings = OpenStores()
    store, two = Store("one", endings), Store("two", endings)
    assert endings.names == {"one", "two"}
    endings.end(is_done=True)
    assert store.did == two.did == ["close", "abandon"]
    assert endings.names == set()
    endings.forget(store)
    endings.end(is_done=True)
    assert store.did == ["close", "abandon"]


def test_else_nothing_is_waited_for():
    endings = OpenStores()
    store = Store("one", endings)
    endings.end(is_done=False)
    assert store.did == ["abandon"]


def test_store_that_cannot_be_flushed_does_not_keep_the_others():
    endings = OpenStores()
    store, two = Store("one", endings, Timeout("late")), Store("two", endings)
    with pytest.raises(Timeout, match="late"):
        endings.end(is_done=True)
    assert store.did == two.did == ["close", "abandon"]


@pytest.fixture
def at_exit(monkeypatch):
    """Return what a process does at its end, and the codes that it ended with."""
    hooks, codes = [], []
    monkeypatch.setattr(module.atexit, "register", hooks.append)
    monkeypatch.setattr(module.ending, "watch", lambda: None)
    monkeypatch.setattr(module, "end_process", codes.append)
    return hooks, codes


@pytest.mark.parametrize(("code", "did"), [(0, ["close", "abandon"]), (3, ["abandon"])])
def test_a_process_closes_its_stores_if_it_ends_well(at_exit, monkeypatch, code, did):
    hooks, codes = at_exit
    monkeypatch.setattr(module.ending, "exit_code", code)
    endings = AtExit()
    store, two = Store("one", endings), Store("two", endings)
    (hook,) = hooks
    hook()
    assert store.did == two.did == did
    assert codes == []


def test_a_process_fails_if_a_push_is_lost_at_its_end(at_exit, monkeypatch, caplog):
    hooks, codes = at_exit
    monkeypatch.setattr(module.ending, "exit_code", 0)
    Store("one", AtExit(), KvpsError("lost a push"))
    hooks[0]()
    assert codes == [1]
    assert "at exit: lost a push" in caplog.text


def test_a_fork_ends_nothing(at_exit, monkeypatch):
    hooks, _ = at_exit
    store = Store("one", AtExit())
    monkeypatch.setattr(module.os, "getpid", lambda: -1)
    hooks[0]()
    assert store.did == []
