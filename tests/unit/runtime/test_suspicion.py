"""Whether a server whose connection broke has ended: what the port says."""

import socket
import threading

import pytest

from kvps.core.scheduler.handover import Suspect
from kvps.core.scheduler.scheduler import Scheduler
from kvps.runtime import suspicion
from kvps.runtime.suspicion import Suspicions, answers, has_ended


def listener() -> tuple[socket.socket, str]:
    made = socket.create_server(("127.0.0.1", 0))
    return made, f"tcp://127.0.0.1:{made.getsockname()[1]}"


@pytest.mark.spec("R526")
def test_a_port_that_refuses_tells_of_an_end() -> None:
    made, endpoint = listener()
    made.close()
    assert has_ended(endpoint)
    asked = threading.Event()

    class Box:
        def put(self, *request: object) -> None:
            assert request == (Scheduler.on_ended, 1, 7)
            asked.set()

    Suspicions().look_into(Suspect(1, 7, endpoint), Box())  # type: ignore[arg-type]
    assert asked.wait(10.0)


@pytest.mark.spec("R526")
def test_a_port_that_greets_lives() -> None:
    made, endpoint = listener()

    def greet() -> None:
        with made.accept()[0] as connection:
            connection.send(b"\xff")

    threading.Thread(target=greet, daemon=True).start()
    assert not has_ended(endpoint)
    made.close()


@pytest.mark.spec("R526")
def test_a_port_that_closes_its_connections_first_is_tried_again() -> None:
    made, endpoint = listener()

    def end() -> None:
        made.accept()[0].close()
        made.close()

    threading.Thread(target=end, daemon=True).start()
    assert has_ended(endpoint)


def test_silence_and_unknown_hosts_tell_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suspicion, "TRY_MAX_S", 0.1)
    made, endpoint = listener()
    assert not has_ended(endpoint)
    made.close()
    assert not has_ended("tcp://no.such.host.invalid:1")


@pytest.mark.spec("R577")
def test_a_silent_host_is_gone_only_if_it_answered_before() -> None:
    """The kernel answers for a process that was stopped."""
    made, endpoint = listener()
    suspicions = Suspicions()
    assert not suspicions.is_gone(endpoint)
    assert answers(endpoint)
    made.close()
    assert suspicions.is_gone(endpoint)
    assert not Suspicions().is_gone(endpoint)
