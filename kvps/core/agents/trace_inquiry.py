"""The rules of a trace's operator: asks the scheduler for a trace, waits for its end, and fetches its parts.

Every request may be made twice, so that what gets lost is asked for again.
"""

from __future__ import annotations

from kvps import protocol as p
from kvps.core.effects import Connect, Effects, Exit, Note, Route, Send
from kvps.core.membership_client import EXIT_TEMPORARY, SCHEDULER
from kvps.errors import KvpsError, SchedulerLost, from_code
from kvps.protocol.envelope import Envelope, Message, Packet, Role

ASK_AGAIN_S = 0.5


class TraceInquiry:
    """One trace of a cluster.

    Args:
        scheduler: the scheduler's address.
        number: of this trace; any that no other trace has.
        for_s: seconds to record.
        now: the time.
        limit_s: seconds without an answer until it is given up.
    """

    def __init__(
        self, scheduler: str, number: int, for_s: float, now: float, limit_s: float
    ) -> None:
        self.parts: list[tuple[p.Part, bytes]] = []
        """The parts that came, in order."""
        self.tracing: p.Tracing | None = None
        """How far the trace is."""
        self.is_complete = False
        self.error: KvpsError = SchedulerLost(
            f"no answer from the scheduler at {scheduler} for {limit_s:g} s. Check that kvps-scheduler runs, "
            "and that --scheduler or KVPS_SCHEDULER names its --bind address"
        )
        """Why there is no trace."""
        self._scheduler = scheduler
        self._number, self._for_s = number, for_s
        self._limit_s = limit_s
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
        self._until = now + self._limit_s
        match packet.message:
            case p.Error(code=code, text=text):
                self.error = from_code(code, text)
                yield Exit(1, text)
            case p.Stop(reason=reason):
                self.error = SchedulerLost(f"the job is over: {reason}")
                yield Exit(EXIT_TEMPORARY, str(self.error))
            case p.Tracing() as message:
                self.tracing = message
                if message.left_s:
                    self._ask_at = now + min(ASK_AGAIN_S, message.left_s)
                else:
                    yield from self._next(now)
            case p.Part(seq=seq) as message:
                if seq == len(self.parts) + 1:
                    self.parts.append((message, b"".join(packet.payload)))
                    yield from self._next(now)
            case message:
                yield Note("debug", f"unexpected {type(message).__name__} from the scheduler")

    def _next(self, now: float) -> Effects:
        assert self.tracing is not None
        if len(self.parts) < self.tracing.parts:
            yield from self._ask(now)
        else:
            self.is_complete = True
            yield Exit(0, "all parts are here")

    def _ask(self, now: float) -> Effects:
        """Ask for the part that is missing, or how far the trace is."""
        self._ask_at = now + ASK_AGAIN_S
        seq = len(self.parts) + 1
        message: Message = p.Trace(self._number, self._for_s)
        if self.tracing is not None and not self.tracing.left_s:
            message = p.Fetch(self._number, len(self.parts))
        envelope = Envelope(bytes(16), 0, Role.WORKER, 0, 0, seq)
        yield Send(SCHEDULER, Packet(envelope, message))

    def on_failure(self, route: Route, envelope: Envelope, error: Exception, now: float) -> Effects:
        """The scheduler is asked again."""
        yield from ()

    def on_drop(self, route: Route, now: float) -> Effects:
        """The scheduler may come back in time."""
        yield from ()

    def on_timer(self, now: float) -> Effects:
        """Ask again, or give up."""
        if now >= self._until:
            yield Exit(EXIT_TEMPORARY, str(self.error))
        elif now >= self._ask_at:
            yield from self._ask(now)

    def deadline(self) -> float:
        """Return when to ask again, or to give up."""
        return min(self._ask_at, self._until)
