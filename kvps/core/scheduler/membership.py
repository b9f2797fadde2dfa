"""Membership: the holder of each seat, as the scheduler knows it.

Theory of operation
-------------------
A job has a fixed number of seats, one per role and rank. A process takes a seat by HELLO and gets an
*incarnation*, a number from one counter that only grows: the larger of two is the later, and a process with
an older one than its seat is fenced::

            take                  leave (done)
    empty ────────► held ────────────────────────► left
                    │  ▲                            ▲
          silence,  │  │ take (a replacement),      │ leave (done)
     a broken link, │  │ or the same incarnation    │
   leave (not done) ▼  │ speaks again               │
                    lost ───────────────────────────┘
                    │ leave (not replaceable); straight from held, too
                    ▼
                    gone

A seat is spoken for through *links*: the connection of the process that holds it and, where a
kvps-worker (the supervisor) holds it for a command, a second one of the process that the command
started. A route is only an address. Identity is what the envelope says, so a packet from an
unknown route that names a seat and its present incarnation binds that route to the seat: this
is how members come back after a network break or a restart of the scheduler.

Invariants, which :meth:`Membership.check` states as code:

* A route belongs to at most one seat, and a seat has at most :data:`LINKS_MAX` of them.
* No two seats have one incarnation, and none is newer than the counter.
* A seat is under suspicion (``dropped_at``) only while it is held and no link is whole.
"""

from __future__ import annotations

from kvps.core.effects import Route
from kvps.core.scheduler.phase import told
from kvps.core.scheduler.seat import SEATS_MAX, Claims, Seat, SeatLink, Settings, State, shortened
from kvps.errors import ConfigError, Fenced, Mismatch, ProtocolError
from kvps.protocol.envelope import Envelope, Node, Role
from kvps.protocol.membership import Hello, Leave, Member
from kvps.protocol.permissions import name_of

LINKS_MAX = 2
"""Connections that speak for one seat: its supervisor's and that of the guarded process."""
MUTE_S = 3.0
"""Seconds of silence after which a connection carries nothing, if its process sends HELLO every second."""


class Membership:
    """The seats of a job and the links that speak for them; it decides, and sends nothing.

    A request that cannot be granted raises the error its sender is to get, and changes nothing.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.issued = 0
        """The newest incarnation; the next is one more."""
        self.by_node: dict[Node, Seat] = {
            node: self._empty(node)
            for role, count in (
                (Role.SERVER, settings.servers),
                (Role.WORKER, settings.seats_of_workers),
                (Role.STANDBY, settings.servers * settings.replicas),
            )
            for node in (Node(role, rank) for rank in range(count))
        }
        self.routes: dict[Route, Seat] = {}
        self.claims = Claims()
        self._enrolled: dict[Route, tuple[str, str]] = {}
        """By the newcomer's route, the keys by which it will speak."""
        self.has_new_suspect = False
        """The result of :meth:`due` may be sooner than it was."""

    def _empty(self, node: Node) -> Seat:
        """Return a seat as it is when a job begins."""
        is_worker = node.role is Role.WORKER
        state = State.VACANT if is_worker and node.rank >= self.settings.workers else State.EMPTY
        return Seat(node, state, is_open=is_worker and self.settings.most_workers > 0)

    # --- taking a seat and coming back to it ----------------------------------------------

    def enrol(self, route: Route, keys: tuple[str, str]) -> None:
        """A newcomer says by which keys it will speak once it has a seat."""
        self._enrolled.pop(route, None)
        self._enrolled[route] = keys
        if len(self._enrolled) > SEATS_MAX:
            del self._enrolled[next(iter(self._enrolled))]  # it says so again, with its next HELLO

    def has_enrolled(self, route: Route) -> bool:
        """Whether a newcomer has said so."""
        return route in self._enrolled

    def sessions(self) -> dict[str, str]:
        """Return by public key the name of the connections of each member."""
        return {
            key: name_of(seat.speaker, seat.incarnation)
            for seat in self.by_node.values()
            for key in seat.keys
            if key
        }

    def take(self, route: Route, hello: Hello, now: float) -> tuple[Seat, bool]:
        """Give a newcomer a seat, with a new incarnation; return also whether it replaces another process."""
        return self._take(route, self._choose(hello), hello, now)

    def seat_standby(self, route: Route, hello: Hello, node: Node, now: float) -> Seat:
        """Give a spare the empty seat of a standby, with a new incarnation."""
        return self._take(route, self.by_node[node], hello, now)[0]

    def give(self, standby: Seat, node: Node) -> None:
        """Give the seat of a lost server to the holder of its standby's, with all its connections."""
        former = self.by_node[node]
        line = former.line or former.incarnation
        self.vacate(node)
        self.by_node[standby.node] = Seat(standby.node)
        standby.node, standby.is_level, standby.line = node, False, line
        self.by_node[node] = standby

    def want_standby(self, rank: int) -> None:
        """Let a server have a standby in a job without copies."""
        node = Node(Role.STANDBY, rank)
        self.by_node[node] = self._empty(node)

    def vacate(self, node: Node) -> None:
        """Empty a seat; its holder is fenced from then on."""
        for link in self.by_node[node].links:
            del self.routes[link]
        self.by_node[node] = self._empty(node)

    def _take(self, route: Route, seat: Seat, hello: Hello, now: float) -> tuple[Seat, bool]:
        is_again = seat.is_asked_again(hello)
        was_replacement = is_again and seat.is_replacement
        is_new = seat.state in (State.EMPTY, State.VACANT) or (seat.is_open and seat.state is State.LEFT)
        replaces = not (is_new or is_again)
        for link in seat.links:
            del self.routes[link]
        self.issued += not is_again
        incarnation = seat.incarnation if is_again else self.issued
        seat.begin(incarnation, hello, now, self._enrolled.pop(route, ("", "")))
        seat.is_replacement = was_replacement
        self._bind(route, seat, SeatLink(hello.host, hello.pid, seat.is_guarded, now), now)
        self.claims.close(route)
        return seat, replaces

    def part_mute(self, route: Route, hello: Hello, now: float) -> None:
        """Forget the connection by which the sender of ``hello`` asked before, and heard nothing.

        It carried HELLO to us and no WELCOME back, and stayed open: no event says that it broke.
        """
        for seat in self.by_node.values():
            if seat.state is State.HELD and not seat.has_begun:
                for at, link in list(seat.links.items()):
                    is_same = (link.host, link.pid) == (hello.host, hello.pid)
                    if is_same and at != route and now >= link.heard_at + MUTE_S:
                        self.drop(at, now)

    def doubt(self, route: Route, envelope: Envelope, hello: Hello, now: float) -> str:
        """Return why a newcomer has to wait for the holder of the seat that it wants; "" if it need not.

        A holder that is silent is asked whether it is alive; see :mod:`kvps.core.scheduler.seat`.
        """
        if envelope.incarnation:
            return self._doubt_attaching(route, envelope, hello, now)
        wanted = self.wanted(hello)
        held = [seat for seat in wanted if seat.state is State.HELD]
        if not held or any(seat.is_free_for(hello) for seat in wanted):
            return ""
        since = self.claims.open(route)
        unsure = [seat for seat in held if not seat.has_proved(since)]
        for seat in unsure:
            self.claims.challenge(seat.links, since, now)
        return unsure[0].doubt() if unsure else ""

    def wanted(self, hello: Hello) -> list[Seat]:
        """Return the seats that a newcomer may get: that of its rank, or any where it names none.

        Where a seat has moved, its holder was started with another rank. So if another process holds the seat
        of a newcomer's rank, the newcomer may get any seat if that one has moved, else each that has.
        """
        mine = [seat for seat in self.by_node.values() if seat.node.role == hello.role]
        own = [seat for seat in mine if hello.rank in (None, seat.node.rank)]
        is_held = hello.rank is not None and bool(own) and not own[0].is_free_for(hello)
        return [seat for seat in mine if seat in own or (is_held and (own[0].line or seat.line))]

    def _doubt_attaching(self, route: Route, envelope: Envelope, hello: Hello, now: float) -> str:
        seat = self._named_by(envelope, hello)
        rivals = self._rivals(seat, hello, now) if seat.is_alive else {}
        if not rivals:
            return ""
        since = self.claims.open(route)
        if any(rival.proved > since for rival in rivals.values()):
            return ""
        self.claims.challenge(rivals, since, now)
        return f"{_who(rivals)} claims the seat of {seat.node}; asking whether it is alive"

    def _choose(self, hello: Hello) -> Seat:
        role = Role(hello.role)
        count = self.count(role)
        if free := [seat for seat in self.wanted(hello) if seat.is_free_for(hello)]:
            return min(free, key=lambda seat: seat.preference(hello))
        if hello.rank is None:
            raise ConfigError(
                f"the job already has {count} {role}s ({self.settings.size(role)}): start the "
                f"scheduler with more {role}s, or start fewer {role}s"
            )
        seat = self.by_node.get(Node(role, hello.rank))
        if seat is None:
            raise ConfigError(
                f"there is no {role} {hello.rank}: the job has {count} {role}s "
                f"({self.settings.size(role)}), and ranks begin at 0"
            )
        if seat.state is State.HELD:
            raise ConfigError(
                f"rank {hello.rank} is alive: {seat.node} runs as {seat.host}:{seat.pid} "
                f"(incarnation {seat.incarnation}); was it started twice?"
            )
        raise ConfigError(f"{told([seat])}, and its rank is not assigned again; start a new job")

    def attach(self, route: Route, envelope: Envelope, hello: Hello, now: float) -> Seat:
        """Let a process that knows its incarnation speak for that seat along ``route``."""
        seat = self._named_by(envelope, hello)
        if not seat.is_alive:
            raise ConfigError(f"{told([seat])}; no process can attach to it")
        if rivals := self._rivals(seat, hello, now):
            raise ConfigError(
                f"rank {seat.node.rank} is alive: {_who(rivals)} already speaks for {seat.node}; was "
                "the command's process started twice?"
            )
        seat.software = shortened(hello.software)
        is_supervisor = seat.is_guarded and hello.guardian
        if seat.is_guarded and not is_supervisor:
            if (hello.host, hello.pid) not in [(known.host, known.pid) for known in seat.links.values()]:
                seat.begin_script(now)
            for at in [at for at, earlier in seat.links.items() if earlier.is_supervisor is False]:
                self.drop(at, now)
        self._bind(route, seat, SeatLink(hello.host, hello.pid, is_supervisor, now), now)
        self.claims.close(route)
        return seat

    def _named_by(self, envelope: Envelope, hello: Hello) -> Seat:
        """Return the seat that a HELLO speaks for, which names an incarnation."""
        rank = envelope.rank if hello.rank is None else hello.rank
        return self.holder(Node(Role(hello.role), rank), envelope.incarnation)

    def _rivals(self, seat: Seat, hello: Hello, now: float) -> dict[Route, SeatLink]:
        """Return the other process by which the command under a seat's supervisor speaks already."""
        if not seat.is_guarded or hello.guardian:
            return {}
        return {
            at: link
            for at, link in seat.links.items()
            if link.is_supervisor is False
            and (link.host, link.pid) != (hello.host, hello.pid)
            and now < link.heard_at + self.settings.silence_max_s
        }

    def recognise(self, route: Route, envelope: Envelope, now: float) -> Seat:
        """Return the seat that a packet speaks for; its route is bound to that seat by now."""
        seat = self.routes.get(route)
        if seat is None or (envelope.incarnation and (seat.speaker, seat.incarnation) != _named(envelope)):
            seat = self.holder(*_named(envelope))
            self._bind(route, seat, SeatLink(seat.host, seat.pid, None, now), now)
        seat.links[route].heard_at = seat.heard_at = now
        return seat

    def holder(self, node: Node, incarnation: int) -> Seat:
        """Return the seat ``node`` if ``incarnation`` is its present one."""
        seat = self.by_node.get(node)
        if seat is None or incarnation == 0:
            raise ProtocolError(f"{node} is not known on this connection: send HELLO first")
        standby = self.by_node.get(Node(Role.STANDBY, node.rank)) if node.role is Role.SERVER else None
        for held in (seat, standby):
            if held is not None and held.incarnation == incarnation:
                return held
        if incarnation > self.issued:
            raise Mismatch(
                f"incarnation {incarnation} of {node} was not issued by this scheduler; it started "
                "without the state of the earlier scheduler: start the job again"
            )
        if seat.state is State.EMPTY:
            raise Fenced(f"incarnation {incarnation} of {node} belongs to a job that is over; stop")
        raise Fenced(
            f"{node} is now incarnation {seat.incarnation} at {seat.host}:{seat.pid}; you are "
            f"incarnation {incarnation}, which was declared lost: stop"
        )

    def _bind(self, route: Route, seat: Seat, link: SeatLink, now: float) -> None:
        if self.routes.get(route, seat) is not seat:
            self.drop(route, now)
        self.routes[route] = seat
        seat.links[route] = link
        while len(seat.links) > (LINKS_MAX if seat.is_guarded else 1):
            stale = min((at for at in seat.links if at != route), key=seat.last_word)
            del seat.links[stale], self.routes[stale]
        seat.heard_at, seat.dropped_at = now, None

    # --- losing it --------------------------------------------------------------------------

    def drop(self, route: Route, now: float) -> None:
        """Forget a broken connection; its seat is under suspicion if it was the last one."""
        self.claims.close(route)
        self._enrolled.pop(route, None)
        seat = self.routes.pop(route, None)
        if seat is None:
            return
        del seat.links[route]
        if seat.state is State.HELD and not seat.links:
            seat.dropped_at = now
            self.has_new_suspect = True

    def evict(self, seat: Seat, why: str, now: float) -> None:
        """End the life of a seat's holder: its later packets are of an incarnation that is over."""
        for route in list(seat.links):
            self.drop(route, now)
        self.issued += 1
        seat.leave(Leave(done=False, exit_code=1, replaceable=True, reason=why), now)
        seat.incarnation, seat.keys = self.issued, ("", "")

    def expire(self, now: float) -> list[Seat]:
        """Declare members lost that were silent, or whose connection was broken, for too long."""
        limits = self.settings
        lost = []
        for seat in self.by_node.values():
            if seat.state is not State.HELD or now < seat.due(limits):
                continue
            if seat.dropped_at is not None and now >= seat.dropped_at + limits.drop_grace_s:
                seat.lose(f"connection broke, no beat for {limits.drop_grace_s:g} s", now)
            else:
                seat.lose(f"silent for {limits.silence_max_s:g} s", now)
            lost.append(seat)
        return lost

    def silent(self, now: float) -> list[Seat]:
        """Return the servers and standbys whose hosts are to be asked, since nothing was heard of them."""
        silent = [seat for seat in self.by_node.values() if now >= seat.suspected_from()]
        for seat in silent:
            seat.suspected_at = now
        return silent

    def excuse(self, now: float) -> None:
        """Nobody could be heard until ``now``: count everybody's silence from here on."""
        for seat in self.by_node.values():
            if seat.state is State.HELD:
                seat.heard_at = now
                if seat.dropped_at is not None:
                    seat.dropped_at = now

    def due(self, formed: bool) -> float | None:
        """When :meth:`expire`, :meth:`silent` or :func:`assess` may say something new, if nobody beats."""
        limits = self.settings
        times = [seat.due(limits) for seat in self.by_node.values() if seat.state is State.HELD]
        if limits.replicas:
            times += [seat.suspected_from() for seat in self.by_node.values()]
        if formed and (until := self.deserted_until()) is not None:
            times.append(until)
        return min(times, default=None)

    def deserted_until(self) -> float | None:
        """When a job without workers ends; None if a worker is present, or if none can return."""
        lost_at = [seat.lost_at for seat in self.workers(State.LOST) if not seat.is_vacant]
        if self.has_held_worker or not lost_at:
            return None
        return max(lost_at) + self.settings.replace_max_s

    def next_job(self) -> None:
        """Empty the seats of workers and standbys, and of servers that are not here."""
        for node, seat in self.by_node.items():
            if node.role is not Role.SERVER or seat.state is not State.HELD:
                self.vacate(node)

    # --- looking ----------------------------------------------------------------------------

    def count(self, role: Role) -> int:
        """How many seats ``role`` has."""
        return self.settings.servers if role is Role.SERVER else self.settings.seats_of_workers

    def workers(self, *states: State) -> list[Seat]:
        """Return the worker seats in any of these states, by rank."""
        return [
            seat for seat in self.by_node.values() if seat.node.role is Role.WORKER and seat.state in states
        ]

    @property
    def has_held_worker(self) -> bool:
        """Whether at least one worker is alive."""
        return bool(self.workers(State.HELD))

    def data_keys(self) -> tuple[str, ...]:
        """Return the public key of every seat as a view shows it; nothing in a job without keys."""
        keys = tuple([seat.data_key for seat in self.by_node.values()])
        return keys if any(keys) else ()

    def lines(self) -> dict[str, int]:
        """Return the first incarnation of each server's line, by rank, unless that is the present one."""
        return {
            str(seat.node.rank): seat.line
            for seat in self.by_node.values()
            if seat.line and seat.node.role is Role.SERVER
        }

    def members(self, now: float) -> tuple[Member, ...]:
        """Return every seat as a view shows it."""
        return tuple([seat.member(now) for seat in self.by_node.values()])

    def check(self) -> None:
        """Assert the invariants."""
        incarnations = [seat.incarnation for seat in self.by_node.values() if seat.incarnation]
        assert len(set(incarnations)) == len(incarnations), "two seats share an incarnation"
        assert all(incarnation <= self.issued for incarnation in incarnations), (
            "an incarnation was not issued"
        )
        links = {route: seat for seat in self.by_node.values() for route in seat.links}
        assert links == self.routes, "routes and links differ"
        assert len(links) == sum(len(seat.links) for seat in self.by_node.values()), "shared route"
        for node, seat in self.by_node.items():
            seat.check(node, LINKS_MAX)


def _who(links: dict[Route, SeatLink]) -> str:
    """Name the process at the other end of the first of ``links``."""
    link = next(iter(links.values()))
    return f"{link.host}:{link.pid}"


def _named(envelope: Envelope) -> tuple[Node, int]:
    return envelope.node, envelope.incarnation
