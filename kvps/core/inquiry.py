"""The rules of an inquiry from outside a job: one request to the scheduler, repeated until it is
answered or given up.

The process that inquires is no member: it takes no seat, and the scheduler remembers nothing of it. So its
request must be one that may be made twice, such as LOOK or EVICT.
"""

from __future__ import annotations

from kvps.core.effects import Connect, Core, CoreOutbox, Exit, Note, Route, Send
from kvps.core.membership_client import ASK_DOCTOR, EXIT_TEMPORARY, SCHEDULER
from kvps.errors import KvpsError, SchedulerLost, from_code
from kvps.protocol.envelope import Answer, Envelope, Message, Packet, Role
from kvps.protocol.membership import Error, Stop

ASK_AGAIN_S = 0.5


class Inquiry(Core):
    """One request and its answer.

    Args:
        scheduler: the scheduler's address.
        request: what to ask.
        answer: the class of the message that answers it.
        now: the time.
        limit_s: seconds until it is given up.
        payload: the payload of the request.
        seq: the number of the request among those along one connection. A request that was repeated may be
            answered twice, and the second answer is none to the next request.
    """

    def __init__(
        self,
        scheduler: str,
        request: Message,
        answer: type[Answer],
        now: float,
        limit_s: float,
        payload: tuple[memoryview, ...] = (),
        seq: int = 1,
    ) -> None:
        self.outbox = CoreOutbox()
        self.answer: Packet | None = None
        """The scheduler's answer."""
        self.error: KvpsError = SchedulerLost(
            f"no answer from the scheduler at {scheduler} for {limit_s:g} s. Check that kvps-scheduler runs, "
            f"and that --scheduler or KVPS_SCHEDULER names its --bind address{ASK_DOCTOR}"
        )
        """Why there is no answer."""
        self._scheduler = scheduler
        self._request, self._payload = request, payload
        self._kind, self._seq = answer, seq
        self._until = now + limit_s
        self._ask_at = now

    def start(self, now: float) -> None:
        """Connect, and ask."""
        self.outbox.append(Connect("scheduler", self._scheduler))
        self.on_timer(now)

    def on_packet(self, route: Route, packet: Packet, now: float) -> None:
        """The scheduler said something."""
        match packet.message:
            case Error(code=code, text=text):
                self.error = from_code(code, text)
                self.outbox.append(Exit(1, text))
            case Stop(reason=reason):
                self.error = SchedulerLost(f"the job is over: {reason}")
                self.outbox.append(Exit(EXIT_TEMPORARY, str(self.error)))
            case message if isinstance(message, self._kind) and message.seq == self._seq:
                self.answer = packet
                self.outbox.append(Exit(0, "answered"))
            case message:
                self.outbox.append(Note("debug", f"unexpected {type(message).__name__} from the scheduler"))

    def on_timer(self, now: float) -> None:
        """Ask again, or give up."""
        if now >= self._until:
            self.outbox.append(Exit(EXIT_TEMPORARY, str(self.error)))
        elif now >= self._ask_at:
            self._ask_at = now + ASK_AGAIN_S
            envelope = Envelope(bytes(16), 0, Role.WORKER, 0, 0, self._seq)
            self.outbox.append(Send(SCHEDULER, Packet(envelope, self._request, self._payload)))

    def deadline(self) -> float:
        """Return when to ask again, or to give up."""
        return min(self._ask_at, self._until)
