"""The rules of kvps-worker: it holds a worker's seat for a command that it runs.

Theory of operation
-------------------
::

              WELCOME                 the command ended
    joining ───────────► running ─────────────────────► leaving ──► Exit(the command's code)
       │                    │                              LEFT, or nobody
       │                    │ a signal, STOP, fenced:      there to say it
       ▼                    ▼
    refused, STOP,        the command is asked to end, and killed
    60 s, a signal:       when its time is over
    Exit

The supervisor beats while the command runs, and says at last how it ended. That is surer than what
the command says itself: it holds for a command that is killed, too, and the others learn of it
at once. The command's own process attaches to the seat along a connection of its own.

What is to be done with the command is told to the shell as the end of a call: :data:`START`,
:data:`ASK` and :data:`KILL` are the tickets. Nothing is said of a command that has ended.

A command that has said by itself that it is done (``kvps.shutdown()``) may go on for as long as
it likes; the job may even end before it.
"""

from __future__ import annotations

import enum
import signal

from kvps.core.effects import Core, CoreOutbox, Effect, Exit, Finish, Note, Route
from kvps.core.membership_client import EXIT_CONFIG, EXIT_TEMPORARY, Identity, MembershipClient
from kvps.protocol.envelope import Packet, Role

START, ASK, KILL = 1, 2, 3
"""Start the command, in the seat of the WELCOME that is the value; send it the signal that is the
value; kill it."""
END_MAX_S = 5.0
"""How long a command may take to end when it is asked to."""
OVER_MAX_S = 30.0
"""How long it may take to notice that its job is over."""
LEAVE_MAX_S = 5.0
"""How long the scheduler may take to hear how the command ended."""


class Stage(enum.Enum):
    """How far a supervisor has come."""

    JOINING = "joining"
    RUNNING = "running"
    LEAVING = "leaving"


class Supervisor(Core):
    """One kvps-worker's part in one job."""

    def __init__(
        self, identity: Identity, now: float, is_replaceable: bool = True, grace_s: float = END_MAX_S
    ) -> None:
        """Hold a seat for a command; it may take ``grace_s`` to end when SIGTERM is passed on."""
        self.outbox = CoreOutbox()
        of_member = CoreOutbox()
        of_member.connect(self._pass_on)
        self.member = MembershipClient(identity, now, of_member)
        self.stage = Stage.JOINING
        self.exit_code = 0
        """The command's, once it has ended."""
        self._is_replaceable = is_replaceable
        self._grace_s = grace_s
        self._reason = ""
        self._ask_at: float | None = None
        self._kill_at: float | None = None
        self._leave_until: float | None = None

    # --- the doors ----------------------------------------------------------------------------

    def start(self, now: float) -> None:
        """Join the cluster."""
        self.member.start(now)

    def on_packet(self, route: Route, packet: Packet, now: float) -> None:
        """The scheduler said something."""
        self.member.on_packet(packet, now)
        if self.stage is Stage.JOINING:
            self._begin()
        elif self.stage is Stage.RUNNING:
            self._on_stop(now)
        else:
            self._end()

    def on_signal(self, number: int, now: float) -> None:
        """The operator wants an end: the command is asked, and at the second time killed."""
        if self.stage is not Stage.RUNNING:
            self.outbox.append(
                Exit(self.exit_code or 128 + number, f"asked to stop by {signal.Signals(number).name}")
            )
        elif self._kill_at is None:
            self._ask(number, now)
            if number == signal.SIGTERM:
                self._kill_at = now + self._grace_s
        else:
            self.outbox.append(Finish(KILL))

    def on_end(self, exit_code: int, reason: str, now: float) -> None:
        """The command ended."""
        self.stage, self.exit_code, self._reason = Stage.LEAVING, exit_code, reason
        self._ask_at = self._kill_at = None
        self._leave_until = now + LEAVE_MAX_S
        self._end()
        if not self.member.stopped:
            # After a wrong configuration, another command would end like this one.
            is_replaceable = self._is_replaceable and exit_code != EXIT_CONFIG
            self.member.leave(exit_code == 0, exit_code, is_replaceable, reason)

    def on_timer(self, now: float) -> None:
        """Beat, ask or kill the command, say again how it ended, or give up saying it."""
        self.member.on_timer(now)
        if self._ask_at is not None and now >= self._ask_at:
            self.outbox.append(Note("error", f"{self._reason}, and the command goes on; ending it"))
            self._ask(signal.SIGTERM, now)
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at = now + END_MAX_S
            self.outbox.append(Finish(KILL))
        if self._leave_until is not None and now >= self._leave_until:
            self.outbox.append(Note("warning", f"the scheduler did not answer LEAVE in {LEAVE_MAX_S:.0f} s"))
            self.outbox.append(Exit(self.exit_code, self._reason))

    def deadline(self) -> float | None:
        """When the next of that is due."""
        times = (self.member.deadline(), self._ask_at, self._kill_at, self._leave_until)
        return min((time for time in times if time is not None), default=None)

    # --- what follows -------------------------------------------------------------------------

    def _pass_on(self, effect: Effect) -> None:
        """Perform an effect of the membership; it ends with the command, which is asked to end first."""
        if isinstance(effect, Exit) and self.stage is Stage.RUNNING:
            self.outbox.append(Note("error", f"{effect.reason}; ending the command"))
            self._ask(signal.SIGTERM, self.member.heard_at)
        else:
            self.outbox.append(effect)

    def _begin(self) -> None:
        """Start the command, if the seat is ours."""
        if self.member.stopped is not None:
            self.outbox.append(Exit(self.member.stopped.exit_code or EXIT_TEMPORARY, str(self.member.end)))
        elif self.member.welcome is not None and self.member.error is None:
            self.stage = Stage.RUNNING
            self.outbox.append(Finish(START, self.member.welcome))

    def _on_stop(self, now: float) -> None:
        """Give the command its time, if the job is over for it."""
        stop = self.member.stopped
        if stop is None or stop.exit_code == 0 or self._has_left() or self._kill_at is not None:
            return
        self._reason = str(self.member.end)
        self._ask_at = self._ask_at or now + OVER_MAX_S

    def _has_left(self) -> bool:
        """Whether the command has said by itself that it is done."""
        view = self.member.view
        return view is not None and any(
            member.role == Role.WORKER
            and (member.rank, member.incarnation) == (self.member.rank, self.member.incarnation)
            and member.state == "left"
            for member in view.members
        )

    def _ask(self, number: int, now: float) -> None:
        self._ask_at, self._kill_at = None, now + END_MAX_S
        self.outbox.append(Finish(ASK, number))

    def _end(self) -> None:
        """End with the command's exit code, once the scheduler knows it or is gone."""
        if self.member.left or self.member.stopped or self.member.error:
            self.outbox.append(Exit(self.exit_code, self._reason))
