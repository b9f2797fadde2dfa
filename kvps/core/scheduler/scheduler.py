"""The scheduler's door: members' messages and its answers.

Theory of operation
-------------------
Three things come in: a packet, a broken connection, the time. What they change is in
:mod:`kvps.core.scheduler.membership` (the holder of each seat) and :mod:`kvps.core.scheduler.barriers` (the
ranks at each barrier); what follows from a change is in :mod:`kvps.core.scheduler.job`; this file is the
conversation.

A door changes the state when it is called, and returns the effects in the order in which they
are to be performed: what a restart must know is saved before any member is notified. A request that
cannot be granted raises, deep down, the error that its sender gets, and changes nothing.

Identity is what an envelope says, checked in one place, :meth:`Scheduler._recognise`: that is the fence. A
process without an identity (it sent HELLO and was not welcomed) is known by its route.

A beat costs O(1); a change of a seat, and each :meth:`Scheduler.on_timer`, O(members).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from kvps import protocol as p
from kvps.core.effects import CoreOutbox, Route
from kvps.core.membership_client import BeatFigures
from kvps.core.scheduler.barriers import Waiter
from kvps.core.scheduler.figures.measurements import printable
from kvps.core.scheduler.figures.status import copies, figures, moves, promotions, sights, waits
from kvps.core.scheduler.job import EXIT_DONE, EXIT_TEMPORARY, Job, next_job
from kvps.core.scheduler.phase import Phase
from kvps.core.scheduler.rate_limits import RateLimit
from kvps.core.scheduler.seat import NAME_MAX, REASON_MAX, Seat, Settings, State, shortened
from kvps.core.scheduler.standstill import Standstills
from kvps.core.texts import demand_address, demand_printable, shown
from kvps.errors import (
    ConfigError,
    Fenced,
    KvpsError,
    Mismatch,
    ProtocolError,
    Unauthorized,
    WorkerLost,
    unforeseen,
)
from kvps.phrases import ranks_in_words
from kvps.protocol.envelope import PROTOCOL, Envelope, Message, Node, Packet, Role

NOBODY = bytes(16)
"""The job in the envelope of a process that does not know it yet."""
FROM_ANYBODY = (
    *(p.Enrol, p.Hello, p.Look, p.Ping, p.Evict, p.Rendezvous, p.Leave, p.Error, p.Trace, p.Fetch),
    *(p.Where, p.Drain, p.Scale),
)
"""Messages that need not come from the holder of a seat; a LEAVE may belong to an earlier job."""
LOOKS_WITHIN_S = 1.0
"""The time of the limit ``looks``: inquiries beyond it, all together, are dropped, and made again."""
WHERES_PER_LOOK = 10
"""How many readers may ask for each that may look."""
SHORT_ROUNDS = "kvps_short_rounds_total"
REFUSALS_TOLD_MAX, REFUSALS_WITHIN_S = 5, 10.0
"""The number of refused newcomers that the log reports in such a time."""


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """The process of a scheduler, as those that look are shown it."""

    software: str = ""
    """The version of kvps."""
    clock: Callable[[], float] = lambda: 0.0
    """Returns seconds since 1970, for PONG; nothing is decided by it."""


UNKNOWN_PROCESS = ProcessInfo()

__all__ = ["Scheduler", "Settings", "ProcessInfo"]


class Scheduler:
    """The core of the scheduler; see :class:`~kvps.core.effects.Core` for its doors."""

    def __init__(
        self, settings: Settings, job: bytes, now: float, process: ProcessInfo = UNKNOWN_PROCESS
    ) -> None:
        self.job = Job(settings, job, now)
        self._begin(process, now)

    def _begin(self, process: ProcessInfo, now: float) -> None:
        self.outbox = CoreOutbox()
        self._process = process
        self._standstills = Standstills(now)
        self._replaying: dict[Node, Seat] = {}
        """The workers that pass over steps of their predecessors."""
        self._looks = RateLimit(self.job.settings.limits.looks, LOOKS_WITHIN_S)
        self._pings = RateLimit(self.job.settings.limits.looks, LOOKS_WITHIN_S)
        self._wheres = RateLimit(WHERES_PER_LOOK * self.job.settings.limits.looks, LOOKS_WITHIN_S)
        self._refusals = RateLimit(REFUSALS_TOLD_MAX, REFUSALS_WITHIN_S)

    # --- doors ------------------------------------------------------------------------------

    def admit(self, route: Route, envelope: Envelope, kind: type[Message]) -> bool:
        """Judge a packet by its envelope: any process may send HELLO and LOOK, and only members
        may send the rest."""
        if self.job.stop is None and kind not in FROM_ANYBODY:
            self._demand_seat(route, envelope)
        return True

    def on_packet(self, route: Route, packet: Packet, now: float) -> None:
        """A peer said something."""
        self.job.counts.now = now
        envelope, message = packet.envelope, packet.message
        try:
            match message:
                case p.Look():
                    if self._looks.is_within(now):
                        self.job.send(route, self.seen(envelope.seq, now))
                    else:
                        self.job.counts.add("kvps_dropped_packets_total", "looks")
                case p.Ping():
                    self._on_ping(route, envelope.seq, packet, now)
                case p.Leave():
                    self._on_leave(route, envelope, message, now)
                case p.Error():
                    pass
                case p.Evict():
                    self._on_evict(route, envelope.seq, message, now)
                case _ if self.job.stop is not None:
                    self.job.send(route, self.job.stop)
                    self.job.part((envelope.node, envelope.incarnation), now)
                case p.Where():
                    if self._wheres.is_within(now):
                        self.job.send(route, self._servers(envelope.seq, now))
                case p.Drain():
                    self._on_drain(route, envelope, message, now)
                case p.Scale():
                    self.job.handover.scale(
                        message.servers, Waiter(route, envelope.seq), _within(message), now
                    )
                case p.Rendezvous():
                    self._on_rendezvous(route, envelope.seq, message)
                case p.Enrol():
                    self.job.seats.enrol(route, (message.public, message.command))
                case p.Hello():
                    self._on_hello(route, envelope, message, now)
                case p.Beat():
                    self._on_beat(route, envelope, message, now)
                case p.Alive():
                    seat = self._heard(route, packet, now, *Role)
                    link = seat.links[route]
                    if message.number == link.challenge:
                        link.proved = message.number
                        link.is_supervisor = message.guardian and seat.is_guarded
                case p.Barrier():
                    seat = self._heard(route, packet, now, Role.WORKER)
                    self._on_barrier(seat, route, envelope, message, now)
                case p.Close():
                    seat = self._heard(route, packet, now, Role.WORKER)
                    self.job.barriers.close(seat.node.rank, [store.store for store in message.stores])
                    self.job.send(route, p.Closed(message.stores))
                case p.Checkpoint():
                    seat = self._heard(route, packet, now, Role.WORKER)
                    if envelope.view >= self.job.since:
                        waiter = Waiter(route, envelope.seq)
                        self.job.ask_for_checkpoint(seat.node.rank, waiter, message, now)
                case p.Halted() | p.Proceeding():
                    seat = self._heard(route, packet, now, Role.WORKER)
                    self.job.hear_of_cut(seat.node, message, now)
                case p.ImageTaken() | p.ImageKept() | p.Committed() | p.Shelf() | p.Restored():
                    seat = self._heard(route, packet, now, Role.SERVER)
                    self.job.hear_of_cut(seat.node, message, now)
                case p.Resume():
                    seat = self._heard(route, packet, now, Role.WORKER)
                    self._on_resume(seat, route, envelope, message, now)
                case p.Standing():
                    seat = self._heard(route, packet, now, Role.SERVER, Role.STANDBY)
                    said = replace(message, reason=shortened(message.reason, REASON_MAX))
                    self.job.handover.hear_of_copy(seat, said, now)
                case p.Measured():
                    seat = self._heard(route, packet, now, Role.SERVER, Role.STANDBY)
                    if seat.node.role is Role.SERVER:
                        self._on_measured(seat, message, now)
                case _:
                    raise ProtocolError(f"a scheduler does not accept {type(message).__name__}")
        except KvpsError as error:
            if isinstance(message, p.Hello):
                self.job.seats.claims.close(route)
                if (
                    self.job.settings.replicas or not message.features & p.STANDBY_FEATURE
                ):  # else it came late
                    self._note_refusal(f"{shown(message.host):.60}:{message.pid}", error, now)
            self.job.counts.refused(error)
            self.job.send(route, p.Error(envelope.seq, error.code, str(error)))
        self.job.flush(self.outbox)

    def on_failure(self, route: Route, envelope: Envelope, error: Exception, now: float) -> None:
        """A packet caused an unexpected error: its sender is told, and the job goes on."""
        self.job.counts.now = now
        self.job.counts.refused(error)
        said = unforeseen("the scheduler", error)
        self.job.send(route, p.Error(envelope.seq, said.code, str(said)))
        self.job.flush(self.outbox)

    def on_drop(self, route: Route, now: float) -> None:
        """The connection along ``route`` broke: its seat has a moment to speak again."""
        self.job.counts.now = now
        self.job.handover.drop(route, now)
        self.job.flush(self.outbox)

    def on_ended(self, rank: int, incarnation: int, now: float) -> None:
        """Nobody listens any more where this server, or this standby of it, did."""
        self.job.counts.now = now
        if self.job.stop is None:
            self.job.handover.end_of(rank, incarnation, now)
        self.job.flush(self.outbox)

    def on_timer(self, now: float) -> None:
        """Find the members that were silent for too long, and the waits that have lasted too long."""
        self.job.counts.now = now
        if self.job.stop is None:
            self.job.on_time(now)
        else:
            self.job.part(None, now)
        self.job.flush(self.outbox)

    def on_stop(self, now: float) -> None:
        """The operator ends the scheduler, and with it the job."""
        self.job.counts.now = now
        if self.job.stop is None:
            self.job.note("info", "asked to stop")
            self.job.halt(p.Stop(EXIT_TEMPORARY, "the scheduler was asked to stop"), EXIT_DONE, now)
        self.job.flush(self.outbox)

    def on_conclude(self, now: float) -> None:
        """The operator is about to stop the job: one more checkpoint is taken, and none after it."""
        self.job.counts.now = now
        if self.job.stop is None:
            self.job.conclude(now)
        self.job.flush(self.outbox)

    def on_measure(self, now: float) -> None:
        """Ask servers for their figures; called every second while the dashboard is served."""
        if self.job.stop is None:
            seats = self.job.seats.by_node.values()
            for seat, question in self.job.measurements.ask(seats, now):
                for route in seat.links:
                    self.job.send(route, question)
        self.job.flush(self.outbox)

    def deadline(self) -> float | None:
        """When :meth:`on_timer` must be called next."""
        return self.job.due

    # --- what members say -------------------------------------------------------------------

    def _on_hello(self, route: Route, envelope: Envelope, hello: p.Hello, now: float) -> None:
        self._examine(envelope, hello)
        self.job.seats.part_mute(route, hello, now)
        known = self.job.seats.routes.get(route)
        if not envelope.incarnation and known is not None and known.is_alive:
            seat = self.job.seats.recognise(route, envelope, now)
        elif not envelope.incarnation and self.job.phase is Phase.ENDING:
            raise WorkerLost(f"the job accepts no new members: {self.job.reason}")
        elif self._is_nameless(route, envelope):
            self.job.send(route, p.Beat(0, "the scheduler waits for ENROL before HELLO"))
            return
        elif self._is_spare(route, envelope, hello, now) or self._is_doubtful(route, envelope, hello, now):
            return
        elif envelope.incarnation:
            seat = self.job.seats.attach(route, envelope, hello, now)
        else:
            seat, replaces = self.job.seats.take(route, hello, now)
            seat.is_replacement |= replaces and self.job.formed
            if seat.is_open and self.job.formed:
                self.job.add(seat)
            verb = "is replaced by" if replaces else "joined:"
            text = f"{seat.node} {verb} {hello.host}:{hello.pid}"
            self.job.note("info", text, member=str(seat.node), host=hello.host)
            if replaces and seat.is_replacement:
                self.job.fault_log.replaced(seat.node, f"{hello.host}:{hello.pid}", now)
            if replaces and seat.node.role is Role.SERVER:
                self.job.return_to_cut(seat, now)
            self.job.withdraw(seat)
            self.job.apply_changes(now)
            if not seat.is_welcomed:
                self.job.send(route, p.Beat(0, self.job.reason))
            return
        was_welcomed = seat.is_welcomed
        self.job.revive(seat, now)
        if was_welcomed == seat.is_welcomed:  # else it was welcomed along with its return
            self._greet(route, seat, now)

    def _servers(self, seq: int, now: float) -> p.ServersAre:
        """Return where the servers are, for a reader."""
        members, keys = self.job.seats.members(now), self.job.seats.data_keys()
        own = [index for index, member in enumerate(members) if member.role == Role.SERVER]
        return p.ServersAre(
            seq, tuple([members[index] for index in own]), tuple([keys[index] for index in own if keys])
        )

    def _is_nameless(self, route: Route, envelope: Envelope) -> bool:
        """Whether a newcomer has not said by which key it will speak, and has to: its ENROL was lost."""
        is_new = self.job.settings.has_keys and not envelope.incarnation
        return is_new and not self.job.seats.has_enrolled(route)

    def _is_spare(self, route: Route, envelope: Envelope, hello: p.Hello, now: float) -> bool:
        """Whether a newcomer waits for the seat of a standby: as it wants to, or as no server's is free."""
        if envelope.incarnation or not (
            hello.features & p.STANDBY_FEATURE or self.job.handover.may_be_spare(hello)
        ):
            return False
        self.job.handover.offer(route, hello, now)
        return True

    def _is_doubtful(self, route: Route, envelope: Envelope, hello: p.Hello, now: float) -> bool:
        """Whether a newcomer must wait until it is known which holder is alive; then all of them are told."""
        claims = self.job.seats.claims
        is_new = route not in claims
        doubt = self.job.seats.doubt(route, envelope, hello, now)
        for holder, challenge in claims.outgoing:
            self.job.send(holder, challenge)
        claims.outgoing = []
        if doubt:
            self.job.send(route, p.Beat(0, doubt))
            if is_new:
                self.job.note("info", f"{hello.host}:{hello.pid} waits: {doubt}")
        return bool(doubt)

    def _on_ping(self, route: Route, seq: int, packet: Packet, now: float) -> None:
        size = sum([frame.nbytes for frame in packet.payload])
        if size > p.PING_BYTES_MAX:
            raise ProtocolError(f"a PING of {size} octets; at most {p.PING_BYTES_MAX} are echoed")
        if not self._pings.is_within(now):
            self.job.counts.add("kvps_dropped_packets_total", "looks")
            return
        pong = p.Pong(seq, self._process.clock(), size)
        self.job.send(route, pong, tuple([memoryview(bytes(frame)) for frame in packet.payload]))

    def _note_refusal(self, who: str, error: KvpsError, now: float) -> None:
        """Say in the log that a newcomer was refused, unless that was said of many just now."""
        unsaid = self._refusals.exceeded
        if self._refusals.is_within(now):
            more = f" ({unsaid} more were refused before, without a line in the log)" if unsaid else ""
            self.job.note("warning", f"refused {who}: {error}{more}")

    def _greet(self, route: Route, seat: Seat, now: float) -> None:
        if seat.is_welcomed:
            self.job.send(route, self.job.welcome(seat))
            if self.job.phase is not Phase.FORMING:
                self.job.send(route, self.job.view(now))
        elif self.job.phase is Phase.ENDING:
            raise WorkerLost(f"the job cannot begin: {self.job.reason}")
        else:
            self.job.send(route, p.Beat(0, self.job.reason))

    def _on_beat(self, route: Route, envelope: Envelope, beat: p.Beat, now: float) -> None:
        number, told = self.job.number, self.job.told
        seat = self._recognise(route, envelope, now)
        self.job.revive(seat, now)
        # A supervisor knows nothing of its command's calls. Along a link by which it said no
        # HELLO, as when it changes to its session key, only their number tells.
        if not (seat.links[route].is_supervisor or seat.progress.is_older(beat.progress)):
            went_on = seat.figures.goes_on, seat.figures.rebuilds
            seat.figures = BeatFigures._make([getattr(beat, name) for name in BeatFigures._fields])
            if beat.replayed:
                self._replaying[seat.node] = seat
            else:
                self._replaying.pop(seat.node, None)
            if went_on != (beat.goes_on, beat.rebuilds):
                self.job.tell_if_it_goes_on()
            if beat.rounds and seat.node.role is Role.WORKER:
                self.job.hear_of_pushes(now)
            self._standstills.hear(seat, now)
            news = seat.progress.beat(beat.progress, shortened(beat.reason), now, beat.standstill)
            if news:
                self.job.note("info", f"{seat.node} {news}")
        self.job.send(route, self._answer(seat, beat, now))
        if self.job.phase is not Phase.FORMING:
            is_behind = envelope.view < number
        else:  # only those who were members of the former job have something to learn
            is_behind = envelope.job not in (NOBODY, self.job.name)
        known = envelope.view if envelope.job == self.job.name else 0
        is_told = self.job.number != number or self.job.is_untold  # just now, or soon
        if is_behind and not (is_told and known >= told):
            self.job.tell_since(route, known, now)

    def _answer(self, seat: Seat, beat: p.Beat, now: float) -> p.Beat:
        """Return the answer to a beat: what the job waits for, or that the sender's standstill cannot end."""
        standstills = self._standstills
        told = standstills.told(seat) if beat.progress == seat.progress.calls else 0
        may_look = not told and beat.standstill and self.job.phase is Phase.RUNNING
        if may_look and standstills.look(self.job.seats.by_node.values(), now):
            self.job.note("warning", standstills.text)
            # At once: one that is told may leave, and then the call of another ends well.
            for other in self.job.seats.workers(State.HELD):
                number = standstills.told(other)
                said = p.Beat(other.progress.calls, standstills.text, standstill=number)
                for to in other.links if other is not seat else ():
                    self.job.send(to, said)
            told = standstills.told(seat)
        if told:
            return p.Beat(beat.progress, standstills.text, standstill=told)
        replayed = [
            other.figures.replayed
            for other in self._replaying.values()
            if other is not seat and other.state is State.HELD
        ]
        return p.Beat(beat.progress, self.job.reason, replayed=sum(replayed))

    def _on_leave(self, route: Route, envelope: Envelope, leave: p.Leave, now: float) -> None:
        try:
            seat = self._recognise(route, envelope, now)
        except KvpsError:
            if envelope.job in (NOBODY, self.job.name):
                raise
            self.job.send(route, p.Left())  # of a job that is over: there is nothing to give up
            return
        is_needed = not self.job.formed or self.job.settings.replicas
        if seat.node.role is Role.SERVER and leave.done and is_needed:
            leave = p.Leave(False, leave.exit_code, True, leave.reason)  # the job still needs one
        is_new = self.job.stop is None and seat.leave(leave, now)
        self.job.send(route, p.Left())
        if is_new:
            text = f"{seat.node} {seat.state.value}: {seat.reason}"
            self.job.note("info", text, member=str(seat.node), state=seat.state.value)
            if seat.state is not State.LEFT:
                self.job.fault_log.lost(seat.node, seat.reason, now)
            if seat.state is not State.LOST:
                self.job.withdraw(seat)
            self.job.apply_changes(now)

    def _on_evict(self, route: Route, seq: int, message: p.Evict, now: float) -> None:
        """The operator ends a member: it is fenced, and its rank waits for a replacement."""
        if not self.job.settings.has_keys:
            raise Unauthorized(
                "a job without keys cannot identify its operator; stop the process instead", reason="no_key"
            )
        seat = self.job.seats.by_node.get(Node(Role(message.role), message.rank))
        if seat is None or not seat.is_alive:
            how = "is not a member of this job" if seat is None else f"is {seat.state.value}"
            raise ConfigError(f"{Node(Role(message.role), message.rank)} {how}: there is no member to evict")
        why = "evicted by the operator"
        fenced = Fenced(f"{seat.node} was {why}: stop")
        for at in list(seat.links):
            self.job.send(at, p.Error(0, fenced.code, str(fenced)))
        self.job.seats.evict(seat, why, now)
        self.job.fault_log.lost(seat.node, why, now)
        self.job.note("warning", f"{seat.node} ({seat.host}:{seat.pid}) {why}")
        self.job.apply_changes(now)
        self.job.send(route, p.Done(seq))

    def _on_drain(self, route: Route, envelope: Envelope, drain: p.Drain, now: float) -> None:
        """A process of servers is to hand its seats to others: the operator wants that, or it does itself."""
        if envelope.incarnation:
            seat = self._recognise(route, envelope, now)
            if seat.node.role is Role.WORKER:
                raise ProtocolError(f"{seat.node} sent Drain; only servers and operators may")
            self.job.send(route, p.Beat(0, "its seats are handed over"))
        else:
            found = self.job.seats.by_node.get(Node(Role.SERVER, drain.rank))
            if found is None or found.state is not State.HELD:
                count = self.job.settings.servers
                how = (
                    f"is {found.state.value}"
                    if found
                    else f"is none of the {count} of this job, 0 to {count - 1}"
                )
                raise ConfigError(f"server {drain.rank} {how}: there is no seat to hand over")
            seat = found
        waiter = Waiter(route, envelope.seq)
        self.job.handover.drain(seat, waiter, _within(drain), now, by_itself=bool(envelope.incarnation))

    def _on_rendezvous(self, route: Route, seq: int, request: p.Rendezvous) -> None:
        before = self.job.rendezvous.issued
        self.job.send(route, self.job.rendezvous.answer(seq, request))
        self.job.has_changed |= self.job.rendezvous.issued != before

    def _heard(self, route: Route, packet: Packet, now: float, *roles: Role) -> Seat:
        """Return the seat of a sender, which is held from now on.

        Raises:
            ProtocolError: if only members of other roles may say that.
        """
        seat = self._recognise(route, packet.envelope, now)
        if seat.node.role not in roles:
            may = " or ".join([str(role) for role in roles])
            raise ProtocolError(f"{seat.node} sent {type(packet.message).__name__}; only a {may} may")
        self.job.revive(seat, now)
        return seat

    def _on_barrier(
        self, seat: Seat, route: Route, envelope: Envelope, barrier: p.Barrier, now: float
    ) -> None:
        if not seat.is_alive:
            raise ProtocolError(f"{seat.node} has {seat.state.value}; it cannot wait at a barrier")
        if envelope.view < self.job.since:
            return  # its sender is still in the former epoch, and will not wait for an answer
        barriers, rank, name = self.job.barriers, seat.node.rank, (barrier.store, barrier.name)
        before, stood = barriers.released.get(name), barriers.missing(rank, barrier)
        waiter = Waiter(route, envelope.seq, barrier.resumed)
        is_late = seat.is_replacement and bool(barrier.traits)
        stand = barriers.compare if is_late else barriers.stand
        self.job.answer(stand(rank, waiter, barrier))
        self.job.has_changed |= barriers.released.get(name) != before
        if stood and (missing := barriers.missing(rank, barrier)):  # it asks again
            seats = self.job.seats.by_node
            who = ranks_in_words(missing, lambda rank: seats[Node(Role.WORKER, rank)].presence(now))
            why = f"waits for {who}"
            self.job.send(route, p.Probed((), (p.Pending(envelope.seq, why),), (envelope.seq,)))

    def _on_resume(self, seat: Seat, route: Route, envelope: Envelope, resume: p.Resume, now: float) -> None:
        if not seat.is_alive:
            raise ProtocolError(f"{seat.node} has {seat.state.value}; it cannot resume")
        barriers, rank = self.job.barriers, seat.node.rank
        if not seat.is_replacement:
            self.job.send(route, p.Resumed(envelope.seq, False, {}))
            return
        if resume.pushed is not None or seat.is_added:
            seat.has_entered = True
            pushed = -1 if resume.pushed is None else resume.pushed
            self.job.answer(barriers.resume(rank, resume.store, pushed))
            self.job.has_changed = True
        numbers = barriers.next_numbers(rank, resume.store) if resume.pushed is None else {}
        self.job.send(route, p.Resumed(envelope.seq, True, numbers))

    def _on_measured(self, seat: Seat, measured: p.Measured, now: float) -> None:
        rank, measured = seat.node.rank, printable(measured)
        if measured.number == 0:  # unasked
            self.job.status_report.tell(rank, measured, now)
            return
        self.job.measurements.hear(rank, seat.incarnation, measured, now)
        short = [figure.value for figure in measured.counts if figure.name == SHORT_ROUNDS]
        self.job.fault_log.short_rounds(rank, sum(short), now)

    def seen(self, seq: int, now: float) -> p.Seen:
        """Return the answer to a status query."""
        job, seats, report = self.job, self.job.seats.by_node, self.job.status_report
        rounds = report.rounds(seats, now)
        return p.Seen(
            seq,
            job.phase.value,
            job.reason,
            sights(seats.values(), now),
            rounds,
            self._process.software,
            job.checkpoints.epoch,
            job.checkpoints.kept,
            figures(seats, report, now),
            waits(seats, job.barriers, rounds, now),
            copies(job.standbys),
            promotions(job.standbys, now),
            moves(job.standbys, now),
            report.publications(seats, now),
            report.hot_rows(seats, now),
        )

    def _examine(self, envelope: Envelope, hello: p.Hello) -> None:
        major, minor = PROTOCOL
        if hello.major != major:
            older = "the scheduler" if hello.major > major else f"{hello.host}:{hello.pid}"
            raise ProtocolError(
                f"the scheduler speaks protocol {major}.{minor}, {hello.host:.60}:{hello.pid} "
                f"({hello.software:.60}) speaks {hello.major}.{hello.minor}: upgrade kvps at "
                f"{older:.80}"
            )
        if hello.role != envelope.role:
            raise ProtocolError(f"a {envelope.role} asked for the seat of a {Role(hello.role)}")
        if hello.role not in (Role.SERVER, Role.WORKER):
            raise ProtocolError(f"role {hello.role} cannot take a seat; only servers and workers can")
        for name in ("host", "endpoint", "master"):
            text = getattr(hello, name)
            if len(text.encode()) > NAME_MAX:
                raise ProtocolError(f"{text!r:.60}… is over {NAME_MAX} bytes")
            demand_printable(name, text)
        if hello.endpoint:
            demand_address("endpoint", hello.endpoint)
        if envelope.incarnation:
            self._demand_job(envelope)
        elif envelope.job not in (NOBODY, self.job.name):
            raise self._mismatch(envelope)

    def _demand_seat(self, route: Route, envelope: Envelope) -> None:
        """Refuse a sender that neither has a seat by its connection nor names one with its incarnation.

        Raises:
            KvpsError: the refusal that its sender is to be told.
        """
        seat = self.job.seats.routes.get(route)
        if envelope.incarnation:
            self._demand_job(envelope)
            if seat is None or (seat.speaker, seat.incarnation) != (envelope.node, envelope.incarnation):
                self.job.seats.holder(envelope.node, envelope.incarnation)
        elif seat is None:
            self.job.seats.holder(envelope.node, 0)

    def _recognise(self, route: Route, envelope: Envelope, now: float) -> Seat:
        if envelope.incarnation:
            self._demand_job(envelope)
        seat = self.job.seats.recognise(route, envelope, now)
        if envelope.incarnation and seat.node.role is not Role.WORKER and not seat.has_begun:
            seat.has_begun = self.job.has_changed = True
        return seat

    def _demand_job(self, envelope: Envelope) -> None:
        # A server that has not yet heard of the next job still speaks of the former one.
        if self.job.name not in (envelope.job, next_job(envelope.job)):
            raise self._mismatch(envelope)

    def _mismatch(self, envelope: Envelope) -> Mismatch:
        return Mismatch(
            f"this scheduler runs job {self.job.name.hex()[:8]}, and {envelope.node} belongs to job "
            f"{envelope.job.hex()[:8]}: is this the right scheduler? If so, it started without the state "
            "of the earlier scheduler; start the job again"
        )

    # --- a restart, and tests ---------------------------------------------------------------

    def snapshot(self) -> bytes:
        """Return what :meth:`restore` needs; each change yields it as a Save."""
        return self.job.snapshot()

    @classmethod
    def restore(
        cls, settings: Settings, snapshot: bytes, now: float, process: ProcessInfo = UNKNOWN_PROCESS
    ) -> Scheduler:
        """Return a scheduler that goes on from ``snapshot``.

        An empty Save is none: it says that there is nothing to go on from.
        """
        scheduler = cls.__new__(cls)
        scheduler.job = Job.restore(settings, snapshot, now)
        scheduler._begin(process, now)
        return scheduler

    def check(self) -> None:
        """Assert the invariants."""
        self.job.check()


def _within(order: p.Drain | p.Scale) -> float:
    """Return the time that an order may take.

    Raises:
        ConfigError: if that is none.
    """
    if not (math.isfinite(order.within_s) and order.within_s > 0):
        raise ConfigError(f"a time limit of {order.within_s} s is not possible: it must be above 0")
    return order.within_s
