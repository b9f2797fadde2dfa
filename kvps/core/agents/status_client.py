"""The rules of one who looks at a job: it asks the scheduler until it is answered, or gives up.

Who looks is no member: it takes no seat, and the scheduler remembers nothing of it.
"""

from __future__ import annotations

from kvps.core.effects import Connect, Effects, Exit, Note, Route, Send
from kvps.core.membership_client import EXIT_TEMPORARY, SCHEDULER
from kvps.errors import KvpsError, from_code
from kvps.protocol.envelope import Envelope, Message, Packet, Role
from kvps.protocol.membership import Error, Look, Seen, Stop

LOOK_AGAIN_S = 0.5


class StatusClient:
    """One look at one job."""

    def __init__(self, scheduler: str, now: float, limit_s: float) -> None:
        self.seen: Seen | None = None
        """What there was to see."""
        self.job = bytes(16)
        self.error = f"no answer from the scheduler at {scheduler} for {limit_s:g} s"
        """Why there was nothing to see."""
        self.refusal: KvpsError | None = None
        """What the scheduler said against it."""
        self._scheduler = scheduler
        self._until = now + limit_s
        self._ask_at = now

    def start(self, now: float) -> Effects:
        """Connect, and ask."""
        yield Connect("scheduler", self._scheduler)
        yield from self.on_timer(now)

    def admit(self, route: Route, envelope: Envelope, kind: type[Message]) -> bool:
        """Hear the scheduler."""
        return True

    def on_packet(self, route: Route, packet: Packet, now: float) -> Effects:
        """The scheduler said something."""
        match packet.message:
            case Seen():
                self.seen, self.job = packet.message, packet.envelope.job
                yield Exit(0, "seen")
            case Error(code=code, text=text):
                self.refusal = from_code(code, text)
                self.error = str(self.refusal)
                yield Exit(1, self.error)
            case Stop(reason=reason):
                self.error = f"the job is over: {reason}"
                yield Exit(EXIT_TEMPORARY, self.error)
            case message:
                yield Note("debug", f"unexpected {type(message).__name__} from the scheduler")

    def on_failure(self, route: Route, envelope: Envelope, error: Exception, now: float) -> Effects:
        """The scheduler is asked again."""
        yield from ()

    def on_drop(self, route: Route, now: float) -> Effects:
        """The scheduler may come back in time."""
        yield from ()

    def on_timer(self, now: float) -> Effects:
        """Ask again, or give up."""
        if now >= self._until:
            yield Exit(EXIT_TEMPORARY, self.error)
        elif now >= self._ask_at:
            self._ask_at = now + LOOK_AGAIN_S
            yield Send(SCHEDULER, Packet(Envelope(self.job, 0, Role.WORKER, 0, 0, 1), Look()))

    def deadline(self) -> float:
        """When that is."""
        return min(self._ask_at, self._until)
