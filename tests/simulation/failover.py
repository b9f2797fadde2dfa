"""A model of stateless failover, small enough that every state of it can be visited.

One server seat, two or three workers, a few rounds of one span. The network is a set to which packets are only added:
what lies there may arrive never, late, twice, and in any order. So every loss, double and delay is among the
runs that :func:`explore` visits.

A server that is deposed is not stopped: it answers on, as a process does that was cut off from the scheduler. A worker
that is replaced leaves its packets behind. Sums are tuples in the order of arrival, which is to say that sums of
other orders have other bits.

Each rule of the protocol can be left out (:class:`Rules`), to see what it is for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

Bits = tuple[int, ...]
"""A sum: the ranks whose pushes were added, in that order, behind the number of its round. () for none."""


@dataclass(frozen=True)
class Rules:
    """The rules of the protocol, and the size of the job."""

    workers: int = 2
    rounds: int = 2
    losses: int = 1
    """How often the server is lost."""
    replacements: int = 0
    """How often a worker is."""
    keeps_sums: bool = True
    """A worker keeps the sum of its last round until the next is answered."""
    waits_for_all: bool = True
    """A new server answers when every worker has told what it holds."""
    ignores_old_answers: bool = True
    """A worker that has told a new server what it holds takes no answer of a former one."""
    gives_sum_to_new: bool = True
    """A replacement that hears what it owes is given the sum of the round before, and keeps it."""
    new_ones_tell: bool = True
    """A replacement tells, too, that it holds nothing."""


class Worker(NamedTuple):
    """A worker process."""

    life: int
    """Its incarnation; one counter serves all members."""
    server: int
    """The life of the server that it speaks to."""
    number: int
    """The push that waits for an answer; -1 while it does not know which it owes."""
    version: int
    """The rounds in the sum that it keeps; 0 for none."""
    kept: Bits


class Server(NamedTuple):
    """A server process."""

    life: int
    known: tuple[int, ...]
    """The incarnations of the workers, by its view."""
    told: tuple[tuple[int, int, Bits] | None, ...]
    """What each rank has told: (incarnation, version, sum)."""
    is_open: bool
    version: int
    value: Bits
    pushed: tuple[int, ...]
    """The ranks in the open round, as they came."""


class Packet(NamedTuple):
    """A packet on its way."""

    kind: str
    rank: int
    life: int
    """Of the worker."""
    server: int
    """The life of the server."""
    number: int = 0
    value: Bits = ()


class State(NamedTuple):
    """Everything."""

    workers: tuple[Worker, ...]
    servers: tuple[Server, ...]
    """All that ever were; the last has the seat."""
    lives: int
    """The newest incarnation."""
    replaced: int
    packets: frozenset[Packet]


class Broken(AssertionError):
    """An invariant does not hold; the text has the run that led there."""


def begin(rules: Rules) -> State:
    """Return the state in which every worker has pushed for the first round."""
    ranks = range(rules.workers)
    lives = tuple(rank + 2 for rank in ranks)
    workers = tuple(Worker(life, 1, 0, 0, ()) for life in lives)
    server = Server(1, lives, (None,) * rules.workers, True, 0, (), ())
    packets = frozenset(Packet("push", rank, lives[rank], 1, 0) for rank in ranks)
    return State(workers, (server,), rules.workers + 1, 0, packets)


def steps(state: State, rules: Rules) -> Iterator[tuple[str, State]]:
    """Yield what may happen next; the losses are those that begin with ``-``."""
    for packet in state.packets:
        after = (
            _to_worker(state, rules, packet) if packet.kind in _ANSWERS else _to_server(state, rules, packet)
        )
        if after != state:
            yield f"{packet}", after
    for rank, worker in enumerate(state.workers):
        if worker.server < state.servers[-1].life:
            yield f"worker {rank} hears of server {state.servers[-1].life}", _follow(state, rules, rank)
    for at, server in enumerate(state.servers):
        known = tuple(worker.life for worker in state.workers)
        if known != server.known:
            news = server._replace(known=known)
            yield f"server {server.life} hears of {known}", _open(_with_server(state, at, news), rules, at)
    if len(state.servers) <= rules.losses:
        yield "-server", _open(_lose_server(state), rules, len(state.servers))
    if state.replaced < rules.replacements:
        for rank in range(rules.workers):
            yield f"-worker {rank}", _replace(state, rules, rank)


_ANSWERS = ("pulled", "owed")


def _with_server(state: State, at: int, server: Server, *packets: Packet) -> State:
    servers = (*state.servers[:at], server, *state.servers[at + 1 :])
    return state._replace(servers=servers, packets=state.packets.union(packets))


def _with_worker(state: State, rank: int, worker: Worker, *packets: Packet) -> State:
    workers = (*state.workers[:rank], worker, *state.workers[rank + 1 :])
    return state._replace(workers=workers, packets=state.packets.union(packets))


def _lose_server(state: State) -> State:
    """Give the seat to a new process, which holds nothing."""
    life, known = state.lives + 1, tuple(worker.life for worker in state.workers)
    server = Server(life, known, (None,) * len(known), False, 0, (), ())
    return state._replace(servers=(*state.servers, server), lives=life)


def _replace(state: State, rules: Rules, rank: int) -> State:
    """Give the seat of a worker to a new process, which holds nothing and asks which push it owes."""
    life, server = state.lives + 1, state.servers[-1].life
    new = Worker(life, server, -1, 0, ())
    state = _with_worker(state, rank, new, Packet("ask", rank, life, server))
    if rules.new_ones_tell:
        state = _with_worker(state, rank, new, Packet("tell", rank, life, server))
    return state._replace(lives=life, replaced=state.replaced + 1)


def _follow(state: State, rules: Rules, rank: int) -> State:
    """A worker speaks to the new server: it tells what it holds, and sends again what waits."""
    server = state.servers[-1].life
    worker = state.workers[rank]._replace(server=server)
    version, kept = (worker.version, worker.kept) if rules.keeps_sums else (0, ())
    tell = Packet("tell", rank, worker.life, server, version, kept)
    return _with_worker(state, rank, worker, tell, _request(rank, worker, rules))


def _request(rank: int, worker: Worker, rules: Rules) -> Packet:
    """Return the request of a worker that has no answer yet."""
    if worker.number < 0:
        return Packet("ask", rank, worker.life, worker.server)
    return Packet("push", rank, worker.life, worker.server, min(worker.number, rules.rounds - 1))


def _to_worker(state: State, rules: Rules, packet: Packet) -> State:
    """An answer arrives."""
    worker = state.workers[packet.rank]
    is_for_it = worker.life == packet.life
    if not is_for_it or (rules.ignores_old_answers and packet.server != worker.server):
        return state
    if packet.kind == "owed":
        if worker.number >= 0:
            return state
        worker = worker._replace(number=packet.number)
        if rules.gives_sum_to_new:
            worker = worker._replace(version=packet.number, kept=packet.value)
    elif packet.number != worker.number + 1:
        return state
    else:
        worker = worker._replace(number=packet.number, version=packet.number, kept=packet.value)
    if worker.number >= rules.rounds:
        return _with_worker(state, packet.rank, worker)
    return _with_worker(state, packet.rank, worker, _request(packet.rank, worker, rules))


def _to_server(state: State, rules: Rules, packet: Packet) -> State:
    """A request arrives; a push may also arrive at a later server of the seat, if that has the same address."""
    for at, server in enumerate(state.servers):
        is_late = packet.kind == "push" and packet.server < server.life
        if (packet.server == server.life or is_late) and packet.life == server.known[packet.rank]:
            after = _ask(state, rules, at, packet)
            if after != state:
                return after
    return state


def _ask(state: State, rules: Rules, at: int, packet: Packet) -> State:
    server, rank = state.servers[at], packet.rank
    if packet.kind == "tell":
        if server.is_open or (server.told[rank] is not None and server.told[rank][0] >= packet.life):
            return state
        entry = (packet.life, packet.number, packet.value)
        told = (*server.told[:rank], entry, *server.told[rank + 1 :])
        return _open(_with_server(state, at, server._replace(told=told)), rules, at)
    if not server.is_open:
        return state
    if packet.kind == "ask":
        owed = Packet("owed", rank, packet.life, server.life, server.version, server.value)
        return _with_server(state, at, server, owed)
    if packet.number > server.version:
        raise Broken(
            f"push {packet.number} of rank {rank} is early: server {server.life} is at {server.version}"
        )
    if packet.number < server.version:
        again = Packet("pulled", rank, packet.life, server.life, server.version, server.value)
        return _with_server(state, at, server, again)
    if rank in server.pushed:
        return state
    pushed = (*server.pushed, rank)
    if len(pushed) < rules.workers:
        return _with_server(state, at, server._replace(pushed=pushed))
    value = (server.version, *pushed)
    server = server._replace(version=server.version + 1, value=value, pushed=())
    answers = [
        Packet("pulled", other, life, server.life, server.version, value)
        for other, life in enumerate(server.known)
    ]
    return _with_server(state, at, server, *answers)


def _open(state: State, rules: Rules, at: int) -> State:
    """Let a new server serve, if it has heard all that it needs."""
    server = state.servers[at]
    if server.is_open:
        return state
    both = zip(server.told, server.known, strict=True)
    is_missing = any(told is None or told[0] < life for told, life in both)
    heard = [told for told in server.told if told is not None]
    if is_missing and (rules.waits_for_all or not heard):
        return state
    version, value = max([(version, value) for _, version, value in heard], default=(0, ()))
    return _with_server(state, at, server._replace(is_open=True, version=version, value=value))


# --- what must hold ---------------------------------------------------------------------------------


def check(state: State, rules: Rules) -> None:
    """Assert the invariants of one state.

    Raises:
        Broken: if one does not hold.
    """
    sums: dict[int, Bits] = {}
    for rank, worker in enumerate(state.workers):
        if not worker.version or not worker.kept:
            continue
        number, *ranks = worker.kept
        if number != worker.version - 1 or sorted(ranks) != list(range(rules.workers)):
            raise Broken(f"rank {rank} has {worker.kept} for round {worker.version - 1}")
        if sums.setdefault(worker.version, worker.kept) != worker.kept:
            raise Broken(f"two ranks have {worker.kept} and {sums[worker.version]} for round {number}")


def is_done(state: State, rules: Rules) -> bool:
    """Whether every worker has the sum of the last round."""
    return all(worker.number >= rules.rounds for worker in state.workers)


@dataclass
class Found:
    """What an exploration has found."""

    states: int = 0
    stuck: list[State] = field(default_factory=list)
    """States from which no run without further losses ends."""


def explore(rules: Rules) -> Found:
    """Visit every state; check each, and that from each the job can end well without another loss.

    Raises:
        Broken: with the shortest run to a state in which an invariant does not hold.
    """
    first = begin(rules)
    came_from: dict[State, tuple[str, State] | None] = {first: None}
    before: dict[State, list[State]] = {}
    ends: list[State] = []
    queue = deque([first])
    while queue:
        state = queue.popleft()
        try:
            check(state, rules)
            if is_done(state, rules):
                ends.append(state)
                continue
            for what, after in steps(state, rules):
                if not what.startswith("-"):
                    before.setdefault(after, []).append(state)
                if after not in came_from:
                    came_from[after] = what, state
                    queue.append(after)
        except Broken as broken:
            raise Broken(f"{broken}\n{_run(came_from, state)}") from None
    good = set(ends)
    queue = deque(ends)
    while queue:
        for state in before.get(queue.popleft(), ()):
            if state not in good:
                good.add(state)
                queue.append(state)
    return Found(len(came_from), [state for state in came_from if state not in good])


def _run(came_from: dict[State, tuple[str, State] | None], state: State) -> str:
    run: list[str] = []
    step = came_from[state]
    while step is not None:
        run.append(step[0])
        step = came_from[step[1]]
    return "\n".join(reversed(run))
