"""How a signal ends a command: once, with an exception that is not lost."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from kvps.runtime.member_process import stopped_by_signals

LIMIT_S = 10.0


@pytest.fixture(autouse=True)
def _not_ignored() -> Iterator[None]:
    """Let the tests of signals pass under nohup, too."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, signal.SIG_DFL) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def code_of(command: Callable[[], None]) -> object:
    """Run a command that signals stop; return its exit code."""

    def run() -> None:
        with stopped_by_signals():
            command()

    with pytest.raises(SystemExit) as raised:
        run()
    return raised.value.code


def wait() -> None:
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:  # a handler runs between two of these
        pass
    raise AssertionError("nothing stopped it")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_raises_where_the_command_is(number: signal.Signals) -> None:
    def command() -> None:
        os.kill(os.getpid(), number)
        wait()

    before = signal.getsignal(number)
    assert code_of(command) == 128 + number
    assert signal.getsignal(number) == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_was_ignored_before_stays_so(number: signal.Signals) -> None:
    def command() -> None:
        os.kill(os.getpid(), number)
        assert signal.getsignal(number) is signal.SIG_IGN

    before = signal.signal(number, signal.SIG_IGN)
    try:
        with stopped_by_signals():
            command()
        command()
    finally:
        signal.signal(number, before)


def test_a_second_one_does_not_disturb_the_cleaning_up() -> None:
    def command() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            wait()
        finally:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGTERM)

    assert code_of(command) == 128 + signal.SIGTERM


def test_signal_dropped_by_a_destructor_is_raised_again() -> None:
    class Deaf:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            wait()

    def command() -> None:
        deaf = Deaf()
        del deaf
        wait()

    hook = sys.unraisablehook
    assert code_of(command) == 128 + signal.SIGINT
    assert sys.unraisablehook is hook


def test_other_errors_are_told_as_before(capsys: pytest.CaptureFixture[str]) -> None:
    class Bad:
        def __del__(self) -> None:
            raise ZeroDivisionError("a destructor's")

    told: list[object] = []
    before, sys.unraisablehook = sys.unraisablehook, lambda dropped: told.append(dropped.exc_value)
    try:
        with stopped_by_signals():
            bad = Bad()
            del bad
    finally:
        sys.unraisablehook = before
    assert [type(effect) for effect in told] == [ZeroDivisionError]
    assert capsys.readouterr().err == ""
