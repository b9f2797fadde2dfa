"""The one loop: packets, calls and the time in, effects out."""

import logging
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from kvps.core.effects import (
    Connect,
    Copied,
    CoreOutbox,
    Effect,
    Exit,
    Finish,
    Hold,
    Listen,
    Note,
    Route,
    Save,
    Send,
    Trust,
)
from kvps.errors import ConfigError, ProtocolError
from kvps.net.driver import KINDS_MAX, LOOK_EVERY_S, Inbox, Listener, Net, drive
from kvps.net.transport import DROPPED, Demanded, Disconnected, Guard, Unserved
from kvps.protocol.envelope import Envelope, Message, Packet, Role
from kvps.protocol.membership import Beat

END = Exit(3, "enough")
PACKET = Packet(Envelope(bytes(16), 0, Role.WORKER, 0, 1, 0), Beat(1))
Event = tuple[Route, Packet | Disconnected] | Exception | float
"""What one poll brings; a number is time that passes."""


@dataclass
class Script:
    """A transport that follows a script, a clock that follows it too, and a core's diary."""

    events: list[list[Event]] = field(default_factory=list)
    due: float | None = None
    answers: dict[str, list[Effect]] = field(default_factory=dict)
    now: float = 0.0
    diary: list[object] = field(default_factory=list)
    waited: list[float | None] = field(default_factory=list)
    outbox: CoreOutbox = field(default_factory=CoreOutbox)

    # --- as a transport

    def connect(self, to: Connect) -> None:
        keys = [to.key] if to.is_member else []
        self.diary.append(("connect", to.to, to.endpoint, to.is_near, *keys))

    def trust(self, keys: dict[str, str]) -> None:
        self.diary.append(("trust", keys))

    def guard(self, admit: Guard) -> None:
        self.admitted = admit

    def listen(self, endpoint: str) -> None:
        self.diary.append(("listen", endpoint))

    def send(self, route: Route, packet: Packet, hold: Hold | None) -> None:
        self.diary.append(("send", route, packet, hold))

    def poll(self, timeout_s: float | None) -> Iterator[tuple[Route, Packet | Disconnected]]:
        self.waited.append(timeout_s)
        left = deque(self.events.pop(0))
        while left:
            event = left.popleft()
            if isinstance(event, float):
                self.now += event
            elif isinstance(event, Exception):
                self.events.insert(0, list(left))
                raise event
            else:
                yield event

    def wake(self) -> None:
        self.diary.append("wake")

    def close(self, linger_s: float) -> None:
        raise AssertionError("the loop does not own it")

    # --- as a core

    def _step(self, what: str) -> None:
        self.diary.append(what)
        for effect in self.answers.get(what, []):
            self.outbox.append(effect)

    def admit(self, route: Route, envelope: Envelope, kind: type[Message]) -> bool:
        return True

    def on_packet(self, route: Route, packet: Packet, now: float) -> None:
        self._step(f"packet of {route!r} at {now:g}")

    def on_failure(self, route: Route, envelope: Envelope, error: Exception, now: float) -> None:
        self._step(f"failure of {route!r} at {now:g}: {error}")

    def on_drop(self, route: Route, now: float) -> None:
        self._step(f"drop of {route!r} at {now:g}")

    def on_timer(self, now: float) -> None:
        self.due = None
        self._step(f"timer at {now:g}")

    def deadline(self) -> float | None:
        return self.due

    # --- as a listener

    def finish(self, effect: Finish) -> None:
        self.diary.append(effect)

    def copied(self, effect: Copied) -> None:
        self.diary.append(effect)

    def save(self, state: bytes) -> None:
        self.diary.append(state)


def run(script: Script, inbox: Inbox[Script] | None = None, listens: bool = True) -> Exit:
    return drive(script, script, inbox or Inbox(script), script if listens else None, lambda: script.now)


def test_every_effect_is_performed_in_order() -> None:
    hold = object()
    effects: list[Effect] = [
        Save(b"state"),
        Connect("server 0", "tcp://s", is_near=True),
        Connect("server 1", "tcp://t", None, "its key", is_member=True),
        Trust({"a key": "worker:0:1"}),
        Listen("ipc://x"),
        Send("server 0", PACKET, hold),  # type: ignore[arg-type]
        Copied(4),
        END,
        Finish(5, value=6),
    ]
    script = Script([[("a", PACKET)]], answers={"packet of 'a' at 0": effects})
    assert run(script) == END
    assert script.diary == [
        "packet of 'a' at 0",
        b"state",
        ("connect", "server 0", "tcp://s", True),
        ("connect", "server 1", "tcp://t", None, "its key"),
        ("trust", {"a key": "worker:0:1"}),
        ("listen", "ipc://x"),
        ("send", "server 0", PACKET, hold),
        Copied(4),
        Finish(5, value=6),
    ]


def test_ended_call_is_told_before_the_next_packet_and_wait(caplog: pytest.LogCaptureFixture) -> None:
    script = Script([[("a", PACKET), ("b", PACKET)], [("c", PACKET)]])
    both: list[Effect] = [Finish(1), Copied(7)]
    script.answers = {"packet of 'a' at 0": both, "packet of 'b' at 0": both, "packet of 'c' at 0": [END]}
    script.finish = lambda effect: script.diary.append(effect) or 1 / 0  # type: ignore[method-assign]
    assert run(script) == END
    assert script.diary[:-1] == ["packet of 'a' at 0", *both[::-1], "packet of 'b' at 0", *both[::-1]]
    assert "the end of a call failed" in caplog.text, "and the loop goes on"


def test_a_core_without_calls_needs_no_listener() -> None:
    effects: list[Effect] = [Save(b"state"), Copied(4), Finish(5), END]
    script = Script([[(b"a", DROPPED)]], answers={"drop of b'a' at 0": effects})
    assert run(script, listens=False) == END
    assert script.diary == ["drop of b'a' at 0"]
    assert Listener()


@pytest.mark.parametrize(
    ("events", "due", "end", "waited"),
    [
        ([[0.25], [0.5], []], 0.75, "timer at 0.75", [0.75, 0.5]),
        ([[]], -1.0, "timer at 0", [0.0]),
        # What a handler puts into the inbox without ending the wait is found when that is over.
        ([[1.0], [1.0], [1.0], []], 3.0, "timer at 3", [LOOK_EVERY_S] * 3),
        ([[], [("a", PACKET)]], None, "packet of 'a' at 0", [LOOK_EVERY_S] * 2),
    ],
)
def test_wait_ends_in_time(
    events: list[list[Event]], due: float | None, end: str, waited: list[float]
) -> None:
    script = Script(events, due=due, answers={end: [END]})
    assert run(script) == END
    assert script.waited == waited


def test_requests_of_other_threads_arrive_in_order_and_wake_the_loop() -> None:
    script = Script([[], [("a", PACKET)]])
    inbox = Inbox(script)
    inbox.put(lambda core, now: core._step("first"))
    inbox.put(lambda core, now: core.outbox.append(END))
    inbox.put(lambda core, now: core._step("after the end"))
    assert run(script, inbox) == END
    assert script.diary == ["wake", "wake", "wake", "first"]


def test_malformed_packet_is_dropped_and_logged_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    trash = ProtocolError("no magic")
    script = Script(
        [[trash, trash, ("a", PACKET), 11.0, trash, ("b", PACKET)]], answers={"packet of 'b' at 11": [END]}
    )
    assert run(script) == END
    assert script.diary == ["packet of 'a' at 0", "packet of 'b' at 11"]
    assert caplog.messages == [
        "dropped a message that is not a packet: no magic",
        "dropped a message that is not a packet, and 1 more since the last line of this kind: no magic",
    ]


def test_an_error_of_the_core_is_not_taken_for_bad_bytes() -> None:
    class Broken(Script):
        def on_packet(self, route: Route, packet: Packet, now: float) -> None:
            raise ProtocolError("the core's own")

    script = Broken([[("a", PACKET)]], answers={"failure of 'a' at 0: the core's own": [END]})
    assert run(script) == END


class TestNet:
    """What a peer's packet leads to ends no process."""

    @pytest.mark.spec("R200")
    def test_an_error_is_logged_whole_once_then_counted_and_each_is_answered(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        class Broken(Script):
            def on_packet(self, route: Route, packet: Packet, now: float) -> None:
                raise ValueError("nobody foresaw this")

        said = "failure of 'a' at {}: nobody foresaw this"
        answers: dict[str, list[Effect]] = {said.format(0): [Send("a", PACKET)]}
        script = Broken(
            [[("a", PACKET), ("a", PACKET), 11.0, ("a", PACKET)]], answers=answers | {said.format(11): [END]}
        )
        assert run(script) == END
        assert script.diary.count(("send", "a", PACKET, None)) == 2
        first, second = caplog.records
        assert first.exc_info is not None
        assert "a packet of worker 0 failed" in first.getMessage()
        assert second.exc_info is None
        assert "3 times in all, and 2 times like this since" in second.getMessage()

    @pytest.mark.spec("R200")
    def test_an_error_on_the_way_through_the_effects(self) -> None:
        class Broken(Script):
            def _step(self, what: str) -> None:
                super()._step(what)
                if what.startswith("packet"):
                    raise KeyError("half-way")

        told = "failure of 'a' at 0: 'half-way'"
        script = Broken([[("a", PACKET)]], answers={"packet of 'a' at 0": [Send("b", PACKET)], told: [END]})
        assert run(script) == END
        assert ("send", "b", PACKET, None) in script.diary

    @pytest.mark.spec("R200")
    def test_an_effect_that_fails_does_not_hold_up_the_others(self, caplog: pytest.LogCaptureFixture) -> None:
        class Deaf(Script):
            def connect(self, *way: object) -> None:
                raise ConfigError("'x' is not an address")

        effects: list[Effect] = [Connect("server 1", "x"), Send("b", PACKET), END]
        script = Deaf([[("a", PACKET)]], answers={"packet of 'a' at 0": effects})
        assert run(script) == END
        assert ("send", "b", PACKET, None) in script.diary
        assert caplog.messages == ["Connect because of a packet of worker 0: 'x' is not an address"]

    @pytest.mark.spec("R200")
    @pytest.mark.parametrize("effect", [Listen("ipc://x"), Save(b"")])
    def test_error_of_its_own_effect_ends_the_process(self, effect: Effect) -> None:
        class Busy(Script):
            def listen(self, endpoint: str) -> None:
                raise ConfigError("another listens there")

            def save(self, state: bytes) -> None:
                raise ConfigError("another listens there")

        with pytest.raises(ConfigError, match="another listens"):
            run(Busy([[("a", PACKET)]], answers={"packet of 'a' at 0": [effect]}))

    @pytest.mark.spec("R200")
    def test_so_does_what_its_operator_demands_and_what_the_time_brings(self) -> None:
        class Far(Script):
            def connect(self, *way: object) -> None:
                raise Demanded("shared memory")

            def on_timer(self, now: float) -> None:
                raise AssertionError("an invariant")

        effects: list[Effect] = [Connect("server 1", "tcp://h:1")]
        with pytest.raises(ConfigError, match="shared memory") as caught:
            run(Far([[("a", PACKET)]], answers={"packet of 'a' at 0": effects}))
        assert type(caught.value) is ConfigError
        with pytest.raises(ConfigError, match="also by what it hears"):
            run(Script([[Demanded("also by what it hears")]]))
        with pytest.raises(AssertionError, match="an invariant"):
            run(Far([[]], due=0.0))

    @pytest.mark.spec("R200")
    def test_a_core_may_refuse_to_go_on(self) -> None:
        class Broken(Script):
            def on_packet(self, route: Route, packet: Packet, now: float) -> None:
                raise ValueError("an answer to a call")

            def on_failure(self, route: Route, envelope: Envelope, error: Exception, now: float) -> None:
                raise error

        with pytest.raises(ValueError, match="an answer to a call"):
            run(Broken([[("a", PACKET)]]))

    @pytest.mark.spec("R200")
    def test_an_error_of_the_transport(self) -> None:
        error = Unserved("a", PACKET.envelope)
        error.__cause__ = OSError("of its memory")
        script = Script([[error]], answers={"failure of 'a' at 0: of its memory": [END]})
        assert run(script) == END

    def test_very_many_kinds_are_not_told_apart(self, caplog: pytest.LogCaptureFixture) -> None:
        net = Net(lambda: 0.0)
        for number in range(KINDS_MAX + 5):
            net.caught(type(f"Error{number}", (Exception,), {})(), "a packet")
        assert len(caplog.records) == KINDS_MAX + 1
        assert net.count == KINDS_MAX + 5


@pytest.mark.parametrize("level", ["debug", "info", "warning", "error"])
def test_notes_are_logged(level: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "kvps")
    script = Script([[("a", PACKET)]], answers={"packet of 'a' at 0": [Note(level, "100 %"), END]})
    run(script)
    (record,) = caplog.records
    assert (record.levelname.lower(), record.getMessage()) == (level, "100 %")
