"""How the end of a process is noticed."""

import sys
from types import SimpleNamespace

import pytest

from kvps.runtime import worker_session as module
from kvps.runtime.worker_session import ExitStatus


@pytest.fixture
def hooks(monkeypatch):
    """The hooks of a process, and the calls of those that the script has set."""
    calls = []

    def leave(status=None):
        raise SystemExit(status)

    fake = SimpleNamespace(excepthook=lambda *_: calls.append("first"), exit=leave, calls=calls)
    monkeypatch.setattr(module, "sys", fake)
    return fake


def test_hooks_that_a_script_has_set_by_then_are_called(hooks):
    status = ExitStatus()
    hooks.excepthook = lambda *_: hooks.calls.append("script's")
    status.watch()
    hooks.excepthook(ValueError, ValueError(), None)
    assert hooks.calls == ["script's"]
    assert status.exit_code == 1


def test_a_hook_behind_ours_is_called_once_though_we_watch_again(hooks):
    status = ExitStatus()
    status.watch()
    status.watch()
    ours = hooks.excepthook

    def behind(*exception):
        hooks.calls.append("behind")
        ours(*exception)

    hooks.excepthook = behind
    status.watch()
    hooks.excepthook(ValueError, ValueError(), None)
    assert hooks.calls == ["behind", "first"]
    assert status.exit_code == 1


@pytest.mark.parametrize(("given", "code"), [(None, 0), (0, 0), (3, 3), ("a text", 1)])
def test_the_code_of_an_exit(hooks, given, code):
    status = ExitStatus()
    status.watch()
    status.watch()
    with pytest.raises(SystemExit) as left:
        hooks.exit(given)
    assert left.value.code == given
    assert status.exit_code == code
    assert sys.exit is not hooks.exit
