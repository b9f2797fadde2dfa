"""One job as the scheduler runs it: the consequences of a change of seats, and the members that are told.

Theory of operation
-------------------
::

               all seats taken                 no worker is here, and none
               for the first time              is waited for
    forming ──────────────────────► running ──────────────────────► ending ──► STOP, Exit
       │                                                               ▲          (or the
       └───────────────── a member is gone for good ───────────────────┘        next job)

:meth:`Job.apply_changes` is called after each change of a seat. It asks
:func:`~kvps.core.scheduler.phase.assess` for the phase, asks the barriers which ranks may pass,
and writes messages into an outbox. While a job runs, each change makes a new view, sent to all
members (where many follow each other, the last of them; see :mod:`kvps.core.scheduler.rate_limits`),
of which only the seats that changed are said (:mod:`kvps.core.scheduler.view_history`);
while it forms, a member learns from the answers to its beats what is missing.

:meth:`Job.flush` puts the state to be saved before anything that is said.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import NamedTuple

from kvps.core.counts import Counts
from kvps.core.effects import Effect, Exit, Finish, Note, Outbox, Route, Save, Send, Trust
from kvps.core.scheduler.barriers import Barriers, RoutedMessage, Waiter
from kvps.core.scheduler.checkpoint_coordinator import CheckpointCoordinator
from kvps.core.scheduler.cut import NodeMessage
from kvps.core.scheduler.figures.fault_log import FaultLog
from kvps.core.scheduler.figures.measurements import ServerMeasurements
from kvps.core.scheduler.figures.status import StatusReport
from kvps.core.scheduler.handover import Handover
from kvps.core.scheduler.membership import Membership
from kvps.core.scheduler.phase import Phase, assess, told
from kvps.core.scheduler.rate_limits import ViewRateLimiter
from kvps.core.scheduler.saved_state import RendezvousTable, SavedState, dump, load
from kvps.core.scheduler.seat import GOES_ON, REBUILDS, SEATS, Seat, Settings, State
from kvps.core.scheduler.standbys import Standbys
from kvps.core.scheduler.view_history import ViewHistory
from kvps.errors import Timeout
from kvps.protocol.checkpoint import Checkpoint
from kvps.protocol.envelope import Envelope, Message, Node, Packet, Role
from kvps.protocol.membership import Error, Released, Seen, Stop, View, Welcome
from kvps.protocol.publications import ServersAre

EXIT_DONE, EXIT_LOST, EXIT_TEMPORARY = 0, 1, 75
CONCLUDED = 1
"""The ticket of :meth:`Job.conclude`; its value is the number of the last checkpoint, or 0."""
LOOK_EVERY_S = 2.0
"""How often the scheduler looks at the time while anything can be due."""
STILL_S = 5.0
"""A scheduler whose last look is so long ago was stopped itself, and received nothing in that time."""
NOTICE_MAX_S = 240.0
"""How long the workers of a job that cannot go on may take to notice and end."""
FAREWELL_MAX_S = 3.0
"""How long a job that is over waits for members whose connection is broken, to tell them: a socket
comes back within 2 s, and a restarted scheduler may not have heard of any member yet."""
UNUSED = (
    "no worker's command used the servers: if they train a model, each trained one of its own. Does the "
    "script create a store of the job, such as KVStore.create('dist_sync'), or use a front end of "
    "kvps.torch?"
)
STRANGERS_JOB = bytes(16)
"""Stands for the job's name, by which its members know each other, in messages to others."""
SHOWN_OCTETS = 4
"""Bytes of the name that a status query shows: enough to distinguish jobs."""


def next_job(name: bytes) -> bytes:
    """Return the name of the job that follows job ``name`` under ``--keep-alive``."""
    return hashlib.blake2b(name, digest_size=16).digest()


class Place(NamedTuple):
    """Where a worker stands among the workers of its host."""

    local_rank: int
    local_size: int


class Job:
    """The seats, barriers and phase of a job, and the outbox of its scheduler."""

    def __init__(self, settings: Settings, name: bytes, now: float) -> None:
        self.settings = settings
        self.counts = Counts()
        self.name = name
        """16 bytes, in every envelope."""
        self.number = 0
        """The number of the newest view; 0 until all seats have been taken."""
        self.is_untold = False
        """The newest view was not sent to everybody yet."""
        self.told = 0
        """The view that was sent to everybody last: news that go to everybody build on it."""
        self._newcomers: set[Route] = set()
        """The routes that were welcomed since, and have no view."""
        self._views = ViewHistory()
        self._pace = ViewRateLimiter()
        self.formed = False
        """All seats of this job have been taken once."""
        self.seats = Membership(settings)
        self.standbys = Standbys(self.seats)
        self.handover = Handover(self)
        self.barriers = Barriers(range(settings.workers), settings.limits.barrier_names)
        self.checkpoints = self._coordinator()
        self.since = 0
        """The view in which the present epoch began: barriers are counted anew from there."""
        self.status_report = StatusReport()
        self.measurements = ServerMeasurements()
        self.fault_log = FaultLog()
        self.rendezvous = RendezvousTable()
        self.phase, self.reason = self.assess(now)
        self.stop: Stop | None = None
        """The STOP for members when the job is over."""
        self._last_word: Exit | None = None
        """The exit of the scheduler when all members have been told."""
        self._untold: set[tuple[Node, int] | None] = set()
        """Members that have no connection along which to tell them, and their incarnations."""
        self._looked_at = now
        """When it last looked at the time, or had no reason to."""
        self.due: float | None = None
        """No later than the next thing that time alone brings about."""
        self.has_changed = False
        """Something that a restart must know is not saved yet."""
        self._is_deserted = False
        """No worker is present any more; the log names the ranks that the job waits for."""
        self._patience_until = None if settings.forming_max_s is None else now + settings.forming_max_s
        """When a job that forms, or that cannot go on, is ended with workers in it."""
        self._trusted: dict[str, str] = {}
        """The session keys that connections are made by."""
        self._outbox: list[Effect] = []
        self._is_concluded = False
        """The end of :meth:`conclude` was reported."""
        self._told_of = {GOES_ON: False, REBUILDS: False}
        self._seats_told, self._is_seated = 0, False
        """The number of taken seats that was told last, and whether it was all of them."""
        self.schedule()

    def _coordinator(self) -> CheckpointCoordinator:
        settings = self.settings
        return CheckpointCoordinator(
            settings.seats_of_workers, settings.servers, settings.limits.checkpoints, self.counts
        )

    # --- what follows from a change ---------------------------------------------------------

    def assess(self, now: float) -> tuple[Phase, str]:
        """Decide how the job stands."""
        phase, reason = assess(self.seats.by_node, self.settings, self.formed, now)
        if phase is Phase.RUNNING and self.checkpoints.recovery is not None:
            return Phase.RETURNING, f"the servers are rolling back to a cut; {reason}"
        if phase is Phase.RUNNING and self.checkpoints.failure:
            return phase, self.checkpoints.failure
        return phase, reason

    def apply_changes(self, now: float) -> None:
        """Draw the consequences of a change of seats, or of time."""
        self.has_changed = True
        if self.due is None:
            self._looked_at = now
        before = self.phase
        if self.standbys.is_on:
            self.handover.promote(now)
        if not self.formed:
            for seat in self.seats.workers(State.LOST, State.GONE):
                if seat.node.rank >= self.settings.workers:
                    self.add(seat)  # a job begins with the first workers: nobody waits for others
        self.phase, self.reason = self.assess(now)
        if self.phase is Phase.RUNNING and not self.formed:
            self.formed = True
            self.note("info", f"running: {self.reason}")
        if self.phase is not before:
            is_stuck = self.phase is Phase.ENDING
            self._patience_until = now + NOTICE_MAX_S if is_stuck else None
        self._tell_seats()
        self.tell_if_it_goes_on()
        answers = self._assemble()
        self.meet(now)
        if self.standbys.is_on:
            self.handover.move(now)
            self.handover.assign(now)
        if self.phase is Phase.ENDING and not self.seats.has_held_worker:
            is_well = all(seat.is_done for seat in self.seats.workers(*State))
            self._end(EXIT_DONE if is_well else EXIT_LOST, self.reason, now)
            return
        self._tell_if_deserted(now)
        self._welcome_all()
        if self.phase is not Phase.FORMING:
            self._announce(now)
        self.answer(answers)
        self.schedule()

    def _tell_seats(self) -> None:
        """Tell how many seats are taken, as long as not all of them were."""
        seats = self.seats.by_node.values()
        taken = sum([seat.is_taken for seat in seats if seat.node.role is not Role.STANDBY])
        if self.settings.tells_seats and taken != self._seats_told and not self._is_seated:
            self._seats_told, self._is_seated = taken, self.formed
            self.report(SEATS, taken)

    def tell_if_it_goes_on(self) -> None:
        """Tell whether all workers that are here go on without a lost one, or a lost server, each time
        that changes."""
        here = [seat.figures for seat in self.seats.workers(State.HELD)]
        now = {
            GOES_ON: bool(here) and all(figures.goes_on for figures in here),
            REBUILDS: bool(here) and all(figures.rebuilds for figures in here),
        }
        for ticket, is_so in now.items():
            if self.settings.tells_seats and is_so != self._told_of[ticket]:
                self._told_of[ticket] = is_so
                self.report(ticket, int(is_so))

    def on_time(self, now: float) -> None:
        """Run the timers that are due."""
        still_s, self._looked_at = now - self._looked_at, now
        if still_s > STILL_S:
            self.note(
                "warning",
                f"the scheduler was stopped for {still_s:.0f} s: no member counts as lost for that time",
            )
            self.seats.excuse(now)
        for seat in self.seats.silent(now) if self.settings.replicas else ():
            self.handover.look_into(seat, is_silent=True)
        for order, why in (late := self.standbys.moves.overdue(now)):
            self.handover.tell_of(order, Timeout(f"{order.what}: {why}. The job goes on as before"))
        lost = self.seats.expire(now)
        for seat in lost:
            self.tell_lost(seat, now)
        is_time = self.standbys.due is not None and now >= self.standbys.due
        if lost or late or is_time or self.assess(now)[0] is not self.phase:
            self.apply_changes(now)
        if self._patience_until is not None and now >= self._patience_until:
            code = EXIT_TEMPORARY if self.phase is Phase.FORMING else EXIT_LOST
            self._end(code, f"given up: {self.reason}", now)
        if self.stop is None:
            self._tell_if_deserted(now)
            self.meet(now)  # after a restart nobody has told them who is there
            self.checkpoints.on_time(now)
            self._perform_checkpoints()
        self._tell(now)
        self.schedule()

    def tell_lost(self, seat: Seat, now: float) -> None:
        self.counts.add("kvps_members_lost_total", str(seat.node.role))
        text = f"{seat.node} ({seat.host}:{seat.pid}) lost: {seat.reason}"
        self.note("warning", text, member=str(seat.node), state="lost")
        if seat.node.role is not Role.STANDBY:
            self.fault_log.lost(seat.node, seat.reason, now)

    def _tell_if_deserted(self, now: float) -> None:
        """Say once why a job without workers still stands, and for how long."""
        was, until = self._is_deserted, self.seats.deserted_until() if self.formed else None
        self._is_deserted = until is not None
        if until is not None and not was:
            self.note(
                "warning",
                f"no worker is present; waiting {until - now:.0f} s for a replacement, then the job "
                f"ends: {told(self.seats.workers(State.LOST))}",
            )

    def hear_of_cut(self, node: Node, message: Message, now: float) -> None:
        """A member says something of cuts."""
        was_returning = self.checkpoints.recovery is not None
        self.checkpoints.hear(node, message, now)
        self._perform_checkpoints()
        if was_returning and self.checkpoints.recovery is None:
            self.fault_log.rolled_back(self.checkpoints.kept, self.checkpoints.failure, now)
            self.apply_changes(now)
        self.schedule()

    def ask_for_checkpoint(self, rank: int, waiter: Waiter, request: Checkpoint, now: float) -> None:
        """A worker wants a cut."""
        self.checkpoints.ask(rank, waiter, request, now)
        self._perform_checkpoints()
        self.schedule()

    def hear_of_pushes(self, now: float) -> None:
        """A worker says that it has pushed."""
        if not self.checkpoints.has_pushed:
            self.checkpoints.pushed(now)
            self._perform_checkpoints()
            self.schedule()

    def conclude(self, now: float) -> None:
        """Take one more checkpoint, and none after it: the job is to be stopped."""
        self.note("info", "asked for a last checkpoint")
        self.checkpoints.conclude(now)
        self._perform_checkpoints()
        self.schedule()

    def return_to_cut(self, seat: Seat, now: float) -> None:
        """A server was replaced: a new epoch begins, if there is a cut to return to."""
        if not self.formed:
            return
        if not self.checkpoints.replaced(seat.node.rank, now):
            self.fault_log.unsaved(seat.node, now)
        else:
            ours = self.checkpoints
            self.fault_log.rollback_began(seat.node, ours.epoch, ours.kept, now)
            self.barriers.clear(range(self.settings.workers))
            self.since = self.number + 1
            self.handover.dismiss([each.node for each in self.standbys.all()], f"epoch {ours.epoch} begins")
            if left := self.seats.workers(State.LEFT):
                ranks = ", ".join(str(seat.node.rank) for seat in left)
                self.note(
                    "warning",
                    f"the rounds since the cut are repeated without those that have left: worker {ranks}",
                )

    def meet(self, now: float) -> None:
        """Tell the checkpoints which members are present."""
        servers = [
            seat.node.rank
            for seat in self.seats.by_node.values()
            if seat.node.role is Role.SERVER and seat.state is State.HELD
        ]
        workers = [seat.node.rank for seat in self.seats.workers(State.HELD)]
        self.checkpoints.meet(workers, servers, self.phase is Phase.RUNNING, now)
        self._perform_checkpoints()

    def _perform_checkpoints(self) -> None:
        """Perform the effects of the checkpoint coordinator."""
        ours = self.checkpoints
        for effect in ours.take_effects():
            match effect:
                case NodeMessage(node, message):
                    for route in self.seats.by_node[node].links:
                        self.send(route, message)
                case RoutedMessage():
                    self.answer([effect])
                case _:
                    self.note(effect.level, effect.text)
        if ours.concluded is not None and not self._is_concluded:
            self._is_concluded = True
            self.report(CONCLUDED, ours.concluded)
        self.has_changed |= ours.has_changed
        ours.has_changed = False

    def revive(self, seat: Seat, now: float) -> None:
        """Give a seat back to a member that was lost, is heard again, and was not replaced."""
        if seat.state is State.LOST and seat.is_alive:
            seat.revive()
            self.fault_log.returned(seat.node, now)
            self.note("info", f"{seat.node} is back")
            self.apply_changes(now)

    def withdraw(self, seat: Seat) -> None:
        """Nobody waits at a barrier for this seat any more: its process ended."""
        if seat.node.role is Role.WORKER:
            self.barriers.withdraw(seat.node.rank)

    def _assemble(self) -> list[RoutedMessage]:
        here = [seat for seat in self.seats.workers(*State) if not seat.is_vacant]
        required = [seat for seat in here if seat.state in (State.EMPTY, State.HELD, State.LOST)]
        return self.barriers.require(
            [seat.node.rank for seat in required],
            {seat.node.rank: seat.reason for seat in here if seat.state is State.GONE},
            [seat.node.rank for seat in required if seat.state is State.LOST],
            [seat.node.rank for seat in here if seat.is_added],
        )

    def add(self, seat: Seat) -> None:
        """A worker has come to a job that runs: barriers of a store wait for it once it has entered that."""
        seat.is_added = seat.is_replacement = True
        self.barriers.begin(seat.node.rank)

    def schedule(self) -> None:
        self.seats.has_new_suspect = False
        view_at = self._pace.free_at if self.is_untold else None
        times = (
            *(self.seats.due(self.formed), self._patience_until, view_at),
            *(self.checkpoints.due, self.standbys.due, self.standbys.moves.due),
        )
        if self.stop is None:
            due = min((time for time in times if time is not None), default=None)
            self.due = None if due is None else min(due, self._looked_at + LOOK_EVERY_S)

    # --- the end ----------------------------------------------------------------------------

    def _end(self, code: int, reason: str, now: float) -> None:
        idle = all(seat.was_idle or seat.is_vacant for seat in self.seats.workers(*State))
        if code == EXIT_DONE and self.settings.servers and idle:
            self.note("warning", UNUSED)
        goes_on = self.settings.keep_alive  # else the process that ends says why
        self.note("warning" if code != EXIT_DONE and goes_on else "info", f"job over: {reason}")
        if not goes_on:
            self.halt(Stop(code, reason), code, now)
            return
        for seat in self.seats.workers(*State):
            for route in seat.links:
                self.send(route, Stop(code, reason))
        self.handover.dismiss([each.node for each in self.standbys.all()], reason)
        self.has_changed = True
        self.name, self.formed, self._patience_until = next_job(self.name), False, None
        self.seats.next_job()
        self.barriers.clear(range(self.settings.workers))
        self.checkpoints, self.since = self._coordinator(), 0
        self._views = ViewHistory()
        self._is_concluded = False
        self.status_report, self.measurements = StatusReport(), ServerMeasurements()
        self.phase, self.reason = self.assess(now)
        self._announce(now)
        self.schedule()

    def halt(self, stop: Stop, code: int, now: float) -> None:
        """Stop every member, and this process with ``code`` once all of them can have heard it."""
        self.stop = stop
        for route in (*self.seats.routes, *self.standbys.spares):
            self.send(route, stop)
        if self.settings.persist:
            self._outbox.append(Save(b""))
        self.has_changed = False
        self._last_word = Exit(code, stop.reason)
        self._untold = {
            (seat.speaker, seat.incarnation)
            for seat in self.seats.by_node.values()
            if seat.state is State.HELD and not seat.links
        }
        self.due = now + FAREWELL_MAX_S
        self.part(None, now)

    def part(self, told: tuple[Node, int] | None, now: float) -> None:
        """Exit if ``told``, the member that was just told to stop, is the last; or if it is late."""
        self._untold.discard(told)
        is_late = self.due is not None and now >= self.due
        if self._last_word is not None and (is_late or not self._untold):
            self._outbox.append(self._last_word)
            self._last_word, self.due = None, None

    # --- what is said -----------------------------------------------------------------------

    def send(self, route: Route, message: Message, payload: tuple[memoryview, ...] = ()) -> None:
        """Send a message along one route; only members and readers learn the name of the job."""
        is_told = route in self.seats.routes or isinstance(message, ServersAre)
        name = self.name if is_told else STRANGERS_JOB
        if isinstance(message, Seen):
            name = self.name[:SHOWN_OCTETS].ljust(len(self.name), b"\0")
        envelope = Envelope(name, self.number, Role.SCHEDULER, 0, 0, 0)
        self._outbox.append(Send(route, Packet(envelope, message, payload)))

    def answer(self, answers: list[RoutedMessage]) -> None:
        """Say what the barriers answer."""
        for route, message in answers:
            if isinstance(message, Released):
                self.counts.add("kvps_barriers_passed_total")
            elif isinstance(message, Error):
                self.counts.add("kvps_waits_failed_total")
            self.send(route, message)

    def report(self, ticket: int, value: object) -> None:
        """Tell the process of the scheduler what it waits for, by its ticket."""
        self._outbox.append(Finish(ticket, value))

    def note(self, level: str, text: str, **fields: object) -> None:
        """Report a fact; ``fields`` are the parts of it that a program may look for."""
        self.fault_log.note(level, text, self.counts.now)
        self._outbox.append(Note(level, text, fields))

    def view(self, now: float) -> View:
        """Return the holder of each seat."""
        return View(
            self.number,
            self.phase.value,
            self.reason,
            self.seats.members(now),
            self.checkpoints.epoch,
            self.since,
            self.checkpoints.kept,
            self.seats.data_keys(),
            self.seats.lines(),
        )

    def welcome(self, seat: Seat, places: dict[int, Place] | None = None) -> Welcome:
        """Return what tells its holder about a seat."""
        rank, place = seat.node.rank, Place(0, 1)
        if seat.node.role is Role.WORKER:
            place = (self.places() if places is None else places)[rank]
        master = self.seats.by_node[Node(Role.WORKER, 0)].master
        settings, most = self.settings, self.settings.most_workers
        joined = self.seats.workers(State.EMPTY, State.HELD, State.LOST)
        sizes = len(joined) if most else settings.workers, settings.servers
        follows, replicas = seat.node.role is Role.STANDBY, settings.replicas
        replaces = seat.is_replacement and not (follows or seat.is_added)
        return Welcome(rank, seat.incarnation, *sizes, *place, master, replaces, follows, replicas, most)

    def places(self) -> dict[int, Place]:
        """Return for each worker's rank where it stands among the workers of its host."""
        states = (State.HELD, State.LOST) + (State.LEFT, State.GONE) * (not self.settings.most_workers)
        seats = self.seats.workers(*states)
        sizes = Counter(seat.host for seat in seats)
        seen: Counter[str] = Counter()
        places = {}
        for seat in seats:
            places[seat.node.rank] = Place(seen[seat.host], sizes[seat.host])
            seen[seat.host] += 1
        return places

    def _welcome_all(self) -> None:
        """Send the welcomes that are due; a supervisor's waits until all workers are known."""
        workers = self.seats.workers(*State)
        waits = not (self.formed or all(seat.is_taken or seat.is_vacant for seat in workers))
        due = [
            seat
            for seat in self.seats.by_node.values()
            if seat.state is State.HELD and not seat.is_welcomed and not (waits and seat.is_guarded)
        ]
        places = self.places() if due else {}
        for seat in due:
            seat.is_welcomed = True
            for route in seat.links:
                self.send(route, self.welcome(seat, places))
                self._newcomers.add(route)

    def _announce(self, now: float) -> None:
        self.number += 1
        self.is_untold = True
        self._tell(now)

    def _tell(self, now: float) -> None:
        """Send the newest view to all members that do not have it, if it is time."""
        if not self.is_untold or self.stop is not None or now < self._pace.free_at:
            return
        self.is_untold = False
        view = self.view(now)
        self._views.note(view)
        news, self.told = self._views.since(self.told, view), self.number
        for route in self.seats.routes:
            self.send(route, view if route in self._newcomers else news)
        self._newcomers.clear()
        self._pace.spend(len(self.seats.routes), len(news.members), now)

    def tell_since(self, route: Route, number: int, now: float) -> None:
        """Send the newest view to a member that has missed it, and has view ``number``."""
        view = self.view(now)
        self._views.note(view)
        self.send(route, self._views.since(number, view))

    def flush(self, outbox: Outbox) -> None:
        """Append the effects that are due now, in this order."""
        if self.seats.has_new_suspect:
            self.schedule()
        effects, self._outbox = self._outbox, []
        if self.settings.has_keys and (sessions := self.seats.sessions()) != self._trusted:
            self._trusted = sessions
            effects.insert(0, Trust(sessions))
        if self.has_changed and self.settings.persist:
            effects.insert(0, Save(self.snapshot()))
        self.has_changed = False
        for effect in effects:
            outbox.append(effect)

    # --- a restart --------------------------------------------------------------------------

    def snapshot(self) -> bytes:
        """Return what :meth:`restore` needs."""
        ours, barriers = self.checkpoints, self.barriers
        cuts = (ours.begun, ours.kept, ours.epoch, ours.recovery is not None, self.since)
        passed = barriers.passed, barriers.resumed
        head = self.name, self.number, self.formed, self.seats
        return dump(SavedState(*head, *passed, cuts, self.rendezvous))

    @classmethod
    def restore(cls, settings: Settings, snapshot: bytes, now: float) -> Job:
        """Return the job of a former scheduler; its members have to speak again."""
        former = load(snapshot, settings, now)
        job = cls(settings, former.job, now)
        job.counts.now = now
        job.number, job.formed, job.seats = former.number, former.formed, former.seats
        job.standbys = Standbys(job.seats)
        if not settings.replicas and job.standbys.is_on:
            job.standbys.due = now  # nobody has asked this life for a move
        job.rendezvous = former.rendezvous
        job.barriers.restore(former.passed, former.resumed)
        begun, kept, epoch, is_returning, job.since = former.cuts
        job.checkpoints.resume(begun, kept, epoch, is_returning)
        job._assemble()
        job.phase = Phase.RUNNING if former.formed else Phase.FORMING
        job.reason = job.assess(now)[1]
        job.due = now  # the first thing to do is to assess
        return job

    def check(self) -> None:
        """Assert the invariants."""
        self.seats.check()
        alive = self.seats.workers(State.HELD, State.LOST)
        if self.stop is None:
            self.barriers.check({seat.node.rank for seat in alive})
        assert not self._outbox, "effects were left behind"
        assert self.number > 0 or not self.formed, "a job runs that nobody has seen a view of"
        soonest = self.seats.due(self.formed)
        assert self.stop or soonest is None or (self.due is not None and self.due <= soonest), (
            f"something is due at {soonest}, and the deadline is {self.due}"
        )
        assert self.stop or not self.is_untold or self.due is not None, "a view is never sent"
