"""Behind which push a worker leaves that was asked to."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest
import torch

import kvps
from kvps.errors import ConfigError
from kvps.runtime import preemption
from kvps.runtime.preemption import PreemptionFlag, RoundTracker, leave_at_sigterm, leave_if_wished


@pytest.fixture
def wish(monkeypatch: pytest.MonkeyPatch) -> Iterator[PreemptionFlag]:
    """What this process was asked; SIGTERM is afterwards as it was."""
    before, fresh = signal.getsignal(signal.SIGTERM), PreemptionFlag()
    monkeypatch.setattr(preemption, "asked", fresh)
    yield fresh
    signal.signal(signal.SIGTERM, before)


def test_the_round_that_it_is_in_is_finished(wish: PreemptionFlag) -> None:
    wish.listen()
    step = RoundTracker("kv", wish)
    step.push(["a"])
    os.kill(os.getpid(), signal.SIGTERM)
    assert wish.is_asked
    step.push(["b"])
    step.push(["c", "d"])
    with pytest.raises(SystemExit) as end:
        step.push(["a"])
    assert end.value.code == 0


def test_rounds_are_told_by_the_first_key_that_comes_again(wish: PreemptionFlag) -> None:
    wish.listen()
    step = RoundTracker("kv", wish)
    for key in ("a", "b", "b"):  # b alone begins the second round
        step.push([key])
    wish.is_asked = True
    step.push(["a"])
    with pytest.raises(SystemExit):
        step.push(["a"])


def test_preempted_worker_without_pushes_begins_no_round(wish: PreemptionFlag) -> None:
    wish.listen()
    wish.is_asked = True
    with pytest.raises(SystemExit):
        RoundTracker("kv", wish).push(["a"])


def test_each_store_has_its_own_rounds(wish: PreemptionFlag) -> None:
    wish.listen()
    one, other = RoundTracker("one", wish), RoundTracker("other", wish)
    one.push(["w"])
    wish.is_asked = True
    with pytest.raises(SystemExit):
        other.push(["w"])


def test_nobody_leaves_who_did_not_want_to(wish: PreemptionFlag) -> None:
    with kvps.create("local") as kv:
        kv.init("a", torch.zeros(1))
        for _ in range(3):
            kv.push("a", torch.ones(1))
        wish.is_asked = True  # by whom? nothing listens
        kv.push("a", torch.ones(1))
        wish.is_heeded = True
        with pytest.raises(SystemExit):
            kv.push("a", torch.ones(1))


def test_another_thread_goes_on(wish: PreemptionFlag) -> None:
    wish.listen()
    wish.is_asked = True
    errors: list[BaseException] = []

    def work() -> None:
        try:
            RoundTracker("kv", wish).push(["a"])
            leave_if_wished(True)
            leave_at_sigterm()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    (error,) = errors
    assert isinstance(error, ConfigError)
    assert "call it in the main thread" in str(error)


def test_the_second_signal_ends_at_once(wish: PreemptionFlag) -> None:
    leave_at_sigterm()
    os.kill(os.getpid(), signal.SIGTERM)
    assert preemption.asked.is_asked
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_script_with_its_own_way_keeps_it(wish: PreemptionFlag) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    leave_if_wished(True)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    leave_if_wished(False)
    assert not preemption.asked.is_heeded
    leave_if_wished(True)
    assert preemption.asked.is_heeded
