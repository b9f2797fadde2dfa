"""Behind which push a worker leaves that was asked to."""

import os
import signal
import threading
from collections.abc import Iterator

import pytest
import torch

import kvps
from kvps.errors import ConfigError
from kvps.runtime import preemption
from kvps.runtime.preemption import PreemptionFlag, RoundTracker, leave_at_sigterm, leave_if_asked


@pytest.fixture
def flag(monkeypatch: pytest.MonkeyPatch) -> Iterator[PreemptionFlag]:
    """What this process was asked; SIGTERM is afterwards as it was."""
    before, fresh = signal.getsignal(signal.SIGTERM), PreemptionFlag()
    monkeypatch.setattr(preemption, "asked", fresh)
    yield fresh
    signal.signal(signal.SIGTERM, before)


def test_the_round_that_it_is_in_is_finished(flag: PreemptionFlag) -> None:
    flag.listen()
    step = RoundTracker("kv", flag)
    step.push(["a"])
    os.kill(os.getpid(), signal.SIGTERM)
    assert flag.is_asked
    step.push(["b"])
    step.push(["c", "d"])
    with pytest.raises(SystemExit) as end:
        step.push(["a"])
    assert end.value.code == 0


def test_rounds_are_told_by_the_first_key_that_comes_again(flag: PreemptionFlag) -> None:
    flag.listen()
    step = RoundTracker("kv", flag)
    for key in ("a", "b", "b"):  # b alone begins the second round
        step.push([key])
    flag.is_asked = True
    step.push(["a"])
    with pytest.raises(SystemExit):
        step.push(["a"])


def test_preempted_worker_without_pushes_begins_no_round(flag: PreemptionFlag) -> None:
    flag.listen()
    flag.is_asked = True
    with pytest.raises(SystemExit):
        RoundTracker("kv", flag).push(["a"])


def test_each_store_has_its_own_rounds(flag: PreemptionFlag) -> None:
    flag.listen()
    round_tracker, other = RoundTracker("one", flag), RoundTracker("other", flag)
    round_tracker.push(["w"])
    flag.is_asked = True
    with pytest.raises(SystemExit):
        other.push(["w"])


def test_nobody_leaves_who_did_not_want_to(flag: PreemptionFlag) -> None:
    with kvps.create("local") as kv:
        kv.init("a", torch.zeros(1))
        for _ in range(3):
            kv.push("a", torch.ones(1))
        flag.is_asked = True  # by whom? nothing listens
        kv.push("a", torch.ones(1))
        flag.is_handled = True
        with pytest.raises(SystemExit):
            kv.push("a", torch.ones(1))


def test_another_thread_goes_on(flag: PreemptionFlag) -> None:
    flag.listen()
    flag.is_asked = True
    errors: list[BaseException] = []

    def work() -> None:
        try:
            RoundTracker("kv", flag).push(["a"])
            leave_if_asked(True)
            leave_at_sigterm()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    (error,) = errors
    assert isinstance(error, ConfigError)
    assert "call it in the main thread" in str(error)


def test_the_second_signal_ends_at_once(flag: PreemptionFlag) -> None:
    leave_at_sigterm()
    os.kill(os.getpid(), signal.SIGTERM)
    assert preemption.asked.is_asked
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_script_with_its_own_way_keeps_it(flag: PreemptionFlag) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    leave_if_asked(True)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    leave_if_asked(False)
    assert not preemption.asked.is_handled
    leave_if_asked(True)
    assert preemption.asked.is_handled
