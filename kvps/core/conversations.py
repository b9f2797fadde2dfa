"""How each of the user's calls is carried out: what is asked of the servers, in which order.

Each call is a *conversation*, a generator that yields lists of requests and is resumed with their
answers, in order. So a call that takes three steps reads as three steps, and needs no thread and
no state machine of its own. A conversation never waits for anything but answers.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from kvps.core import calls
from kvps.core.link import Request
from kvps.core.placement import Part, home, parts
from kvps.core.plan import Held, Key, Plan, Share, make
from kvps.core.rounds import WINDOW
from kvps.errors import KeyNotFound, Mismatch
from kvps.messages import (
    ENTRIES_MAX,
    Barrier,
    Declare,
    Declared,
    Entry,
    Field,
    Find,
    FoundAll,
    GetState,
    Load,
    Open,
    Optimize,
    Packet,
    Pull,
    Pulled,
    Push,
    Rate,
    SetState,
    Stand,
    StateIs,
    Status,
)
from kvps.specs import BY_ID, BY_NAME, Spec
from kvps.tensors import dtype_of, from_frame


@dataclass(frozen=True, slots=True)
class Drain:
    """Instead of requests: resume when every push of the store so far is acknowledged."""


Conversation = Generator[list[Request] | Drain, list[Packet], object]


@dataclass(slots=True)
class Catalogue:
    """What a worker knows of one store."""

    opened: Open
    rank: int
    servers: int
    worker_grace_s: float
    keys: dict[str, Key] = field(default_factory=dict)
    optimize_calls: int = 0
    rate_calls: int = 0
    barriers: dict[str, int] = field(default_factory=dict)
    _plans: dict[tuple[str, ...], Plan] = field(default_factory=dict)

    @property
    def ordered(self) -> bool:
        """Whether push numbers are round numbers."""
        return self.opened.mode == "sync"

    def plan(self, names: tuple[str, ...]) -> Plan:
        """Return the plan of ``names``, made once.

        Raises:
            KeyNotFound: if one of them is unknown here.
        """
        plan = self._plans.get(names)
        if plan is None:
            plan = make([self.key(name) for name in names])
            if len(self._plans) >= 4 * len(self.keys) + 16:
                self._plans.clear()
            self._plans[names] = plan
        return plan

    def key(self, name: str) -> Key:
        """Return one key.

        Raises:
            KeyNotFound: if it is unknown here.
        """
        key = self.keys.get(name)
        if key is None:
            raise KeyNotFound(
                f"key {name!r} of store {self.opened.store!r} was never initialised; call "
                "init(key, value) on every worker first"
            )
        return key

    def parts(self, key: str, spec: Spec) -> tuple[Part, ...]:
        """Return which elements of a key belong on which server."""
        return parts(key, spec.count, self.servers, self.opened.bigarray_bound)

    def place(self, key: Key, pieces: Iterable[Held]) -> None:
        """Remember where ``key`` lies; plans that were made before are void."""
        key.pieces = tuple(pieces)
        self.keys[key.name] = key
        self._plans.clear()


def start(book: Catalogue, call: calls.Call) -> Conversation:
    """Return the conversation that carries ``call`` out."""
    match call:
        case calls.OpenStore():
            return open_store(book)
        case calls.Init():
            return init(book, call.keys, call.rows)
        case calls.Broadcast():
            return broadcast(book, call)
        case calls.Lookup():
            return lookup(book, call.keys)
        case calls.PushValues():
            return push(book, call)
        case calls.PullValues():
            return pull(book, call)
        case calls.Versions():
            return versions(book, call.keys)
        case calls.Resume():
            return resume(book, call.keys)
        case calls.SetOptimizer():
            return set_optimizer(book, call)
        case calls.SetRate():
            return set_rate(book, call)
        case calls.Stand():
            return barrier(book, call.name)
        case calls.Flush():
            return flush()
        case calls.Ask():
            return status(book)
        case calls.SaveState():
            return save_state(book)
        case calls.LoadState():
            return load_state(book, call)
        case _:
            raise TypeError(f"no conversation for {type(call).__name__}")


def open_store(book: Catalogue) -> Conversation:
    """Tell every server of the store; they compare its options."""
    yield [Request(server, book.opened) for server in range(book.servers)]
    return None


# --- keys -----------------------------------------------------------------------------------------


def init(
    book: Catalogue, keys: Sequence[tuple[str, Spec]], rows: Sequence[torch.Tensor]
) -> Conversation:
    """Declare the keys that are new here, and load their values if this is rank 0."""
    new: list[tuple[str, Spec]] = []
    values: list[torch.Tensor] = []
    for (name, spec), row in zip(keys, rows, strict=True):
        known = book.keys.get(name)
        if known is None:
            new.append((name, spec))
            values.append(row)
        elif known.spec != spec:
            raise Mismatch(
                f"key {name!r} of store {book.opened.store!r} is {known.spec} and cannot be "
                f"initialised as {spec}; broadcast() replaces a key"
            )
    yield from _create(book, new, values, [0] * len(new))
    return None


def _create(
    book: Catalogue,
    keys: Sequence[tuple[str, Spec]],
    rows: Sequence[torch.Tensor],
    numbers: Sequence[int],
) -> Conversation:
    """Declare ``keys``, each for its call number; rank 0 loads those that are fresh."""
    create = book.rank == 0
    fresh, placed = yield from _declare(book, keys, numbers, create)
    for (name, spec), pieces in zip(keys, placed, strict=True):
        known = book.keys.get(name)
        key = known if known is not None and known.spec == spec else Key(name, spec)
        book.place(key, pieces)
    if not create:
        return None
    loads: list[Request] = []
    stubs = [Key(name, spec, tuple(fresh[i])) for i, (name, spec) in enumerate(keys)]
    for share in make(stubs).shares:
        runs = share.runs(numbers)
        message = Load(share.chunk, BY_NAME[share.dtype].id, runs)
        loads.append(_bulk(book, share, message, rows))
    yield loads
    return None


def _declare(
    book: Catalogue, keys: Sequence[tuple[str, Spec]], numbers: Sequence[int], create: bool
) -> Generator[list[Request] | Drain, list[Packet], tuple[list[list[Held]], list[list[Held]]]]:
    """Return, key by key, the pieces that must be loaded and all pieces."""
    batches: dict[tuple[int, int], list[tuple[int, Entry]]] = {}
    for index, (name, spec) in enumerate(keys):
        dtype = BY_NAME[spec.dtype].id
        for part in book.parts(name, spec):
            entry = Entry(name, dtype, spec.shape, part.start, part.size)
            batches.setdefault((part.server, numbers[index]), []).append((index, entry))
    requests: list[Request] = []
    asked: list[list[tuple[int, Entry]]] = []
    for (server, number), batch in sorted(batches.items()):
        for begin in range(0, len(batch), ENTRIES_MAX):
            slice_ = batch[begin : begin + ENTRIES_MAX]
            entries = tuple(entry for _, entry in slice_)
            requests.append(Request(server, Declare(book.opened.store, create, number, entries)))
            asked.append(slice_)
    answers = yield requests
    fresh: list[list[Held]] = [[] for _ in keys]
    placed: list[list[Held]] = [[] for _ in keys]
    for request, batch, answer in zip(requests, asked, answers, strict=True):
        assert isinstance(answer.message, Declared)
        assert request.server is not None
        for (index, entry), place in zip(batch, answer.message.places, strict=True):
            offset = entry.start
            for piece in place.pieces:
                held = Held(request.server, piece.chunk, piece.start, piece.size, offset)
                placed[index].append(held)
                if place.fresh:
                    fresh[index].append(held)
                offset += piece.size
    return fresh, placed


def broadcast(book: Catalogue, call: calls.Broadcast) -> Conversation:
    """Replace the keys by rank 0's values, hand these to all, and part together.

    The barrier at the end keeps rank 0 from replacing a value that another rank has still to read.
    """
    known = tuple(name for name, _ in call.keys if name in book.keys)
    yield from _settle(book, known)
    numbers = []
    for name, spec in call.keys:
        key = book.keys.get(name)
        count = key.broadcasts + 1 if key is not None else 1
        if key is None or key.spec != spec:
            book.keys.pop(name, None)
        numbers.append(count)
    yield from _create(book, call.keys, call.rows, numbers)
    names = tuple(name for name, _ in call.keys)
    for name, number in zip(names, numbers, strict=True):
        book.key(name).broadcasts = number
    yield from _read(book, book.plan(names), call.sinks, [0] * len(names), [0] * len(names), 0)
    yield from barrier(book, "kvps.broadcast")
    return None


def lookup(book: Catalogue, names: tuple[str, ...]) -> Conversation:
    """Learn the specs and places of ``names`` from the servers that answer for them."""
    specs: dict[str, Spec | None] = {
        name: book.keys[name].spec for name in names if name in book.keys
    }
    by_home: dict[int, list[str]] = {}
    for name in names:
        if name not in specs:
            by_home.setdefault(home(name, book.servers), []).append(name)
    batches = [
        (server, tuple(batch[begin : begin + ENTRIES_MAX]))
        for server, batch in sorted(by_home.items())
        for begin in range(0, len(batch), ENTRIES_MAX)
    ]
    answers = yield [Request(server, Find(book.opened.store, batch)) for server, batch in batches]
    found: list[tuple[str, Spec]] = []
    for (_, batch), answer in zip(batches, answers, strict=True):
        assert isinstance(answer.message, FoundAll)
        for name, one in zip(batch, answer.message.found, strict=True):
            specs[name] = Spec(BY_ID[one.dtype].name, one.shape) if one.dtype else None
            if one.dtype:
                found.append((name, Spec(BY_ID[one.dtype].name, one.shape)))
    _, placed = yield from _declare(book, found, [0] * len(found), create=False)
    for (name, spec), pieces in zip(found, placed, strict=True):
        book.place(Key(name, spec), pieces)
    return specs


# --- values ---------------------------------------------------------------------------------------


def _bulk(
    book: Catalogue,
    share: Share,
    message: Load | Push,
    rows: Sequence[torch.Tensor],
    priority: int = 0,
) -> Request:
    return Request(
        share.server,
        message,
        fill=lambda: (share.gather(rows),),
        payload_bytes=share.payload_bytes,
        lane=share.chunk,
        priority=priority,
        store=book.opened.store,
    )


def push(book: Catalogue, call: calls.PushValues) -> Conversation:
    """Push one gradient for each key; with sinks, pull what comes of it."""
    plan = book.plan(call.keys)
    full = [key for key in plan.keys if key.number - key.version >= WINDOW]
    if full:
        names = tuple(key.name for key in full)
        yield from _versions(
            book, book.plan(names), [0] * len(full), [key.number - WINDOW + 1 for key in full]
        )
    numbers = [key.number for key in plan.keys]
    for key in plan.keys:
        key.number += 1
    requests = []
    tally = _Tally(plan)
    refusal = _Refusal(plan)
    for share in plan.shares:
        message = Push(
            share.chunk,
            BY_NAME[share.dtype].id,
            (book.rank,),
            1.0,
            call.sinks is not None,
            share.runs(numbers),
        )
        request = _bulk(book, share, message, call.rows, call.priority)
        request.on_refused = refusal.of(share)
        if call.eager:
            request.freeze()
        if call.sinks is not None:
            request.on_reply = tally.reader(share, call.sinks)
        requests.append(request)
    yield requests
    if call.sinks is not None:
        after = [number + 1 for number in numbers]
        yield from _even_out(book, plan, tally, call.sinks, after, call.priority)
    return None


@dataclass(slots=True)
class _Refusal:
    """Takes the numbers of refused keys back, so that their next push is not taken for a later one.

    A refusal names the reason for a whole key (its type, a missing optimizer), so every part of
    the key is refused alike, and its number is taken back once.
    """

    plan: Plan
    keys: set[int] = field(default_factory=set)

    def of(self, share: Share) -> Callable[[], None]:
        """Return what to do if ``share`` is refused."""

        def refused() -> None:
            for index in {segment.key for segment in share.segments} - self.keys:
                self.keys.add(index)
                self.plan.keys[index].number -= 1

        return refused


def pull(book: Catalogue, call: calls.PullValues) -> Conversation:
    """Pull the values after this rank's own pushes."""
    plan = book.plan(call.keys)
    after = [key.number for key in plan.keys]
    least = [call.min_version] * len(plan.keys)
    yield from _read(book, plan, call.sinks, after, least, call.priority)
    return None


@dataclass(slots=True)
class _Tally:
    """Which versions the parts of each key of a plan were read at."""

    plan: Plan
    answers: list[tuple[Share, tuple[Stand, ...]]] = field(default_factory=list)

    def reader(self, share: Share, sinks: Sequence[torch.Tensor]) -> _Reader:
        """Return what takes one share's answer in and its values out."""
        return _Reader(self, share, sinks)

    def uniform(self) -> Stand | None:
        """Return where all elements stand, if they all stand there: the usual case, and cheap."""
        stands = {(one.version, one.owed) for _, runs in self.answers for one in runs}
        return Stand(0, 0, *stands.pop()) if len(stands) == 1 else None

    def by_key(self) -> list[set[tuple[int, int]]]:
        """Return for each key the (version, owed) pairs of its parts."""
        seen: list[set[tuple[int, int]]] = [set() for _ in self.plan.keys]
        for share, runs in self.answers:
            stands = iter(runs)
            stand = next(stands)
            for segment in share.segments:
                while not stand.start <= segment.start < stand.start + stand.size:
                    stand = next(stands)
                seen[segment.key].add((stand.version, stand.owed))
        return seen

    def settle(self) -> list[int]:
        """Note the versions in the keys; return the indices of those that were read torn."""
        torn: list[int] = []
        uniform = self.uniform()
        if uniform is not None:
            for key in self.plan.keys:
                key.version = max(key.version, uniform.version)
            return torn
        for index, (key, seen) in enumerate(zip(self.plan.keys, self.by_key(), strict=True)):
            versions = {version for version, _ in seen}
            if len(versions) > 1:
                torn.append(index)
            key.version = max(key.version, min(versions, default=0))
        return torn


@dataclass(slots=True)
class _Reader:
    tally: _Tally
    share: Share
    sinks: Sequence[torch.Tensor]

    def __call__(self, packet: Packet) -> None:
        answer = packet.message
        assert isinstance(answer, Pulled)
        self.tally.answers.append((self.share, answer.runs))
        if answer.values:
            values = from_frame(packet.payload[0], self.share.dtype)
            self.share.scatter(values, self.sinks)


def _ask(
    book: Catalogue,
    plan: Plan,
    tally: _Tally,
    sinks: Sequence[torch.Tensor] | None,
    after: Sequence[int],
    least: Sequence[int],
    priority: int,
) -> list[Request]:
    return [
        Request(
            share.server,
            Pull(share.chunk, sinks is not None, share.asks(after, least)),
            priority=priority,
            lane=share.chunk,
            on_reply=tally.reader(share, sinks or ()),
        )
        for share in plan.shares
    ]


def _read(
    book: Catalogue,
    plan: Plan,
    sinks: Sequence[torch.Tensor] | None,
    after: Sequence[int],
    least: Sequence[int],
    priority: int,
) -> Generator[list[Request] | Drain, list[Packet], _Tally]:
    tally = _Tally(plan)
    yield _ask(book, plan, tally, sinks, after, least, priority)
    return (yield from _even_out(book, plan, tally, sinks, after, priority))


def _even_out(
    book: Catalogue,
    plan: Plan,
    tally: _Tally,
    sinks: Sequence[torch.Tensor] | None,
    after: Sequence[int],
    priority: int,
) -> Generator[list[Request] | Drain, list[Packet], _Tally]:
    """Read again those keys whose parts were read at different versions, until none is left.

    A rank that has just pushed reads exactly the version after its push, everywhere. One that
    reads while others push may find one server a round ahead of another; the lagging parts are
    then asked for at the version of the leading one.
    """
    while True:
        torn = tally.settle()
        if not torn or sinks is None:
            return tally
        seen = tally.by_key()
        least = [max(version for version, _ in seen[index]) for index in torn]
        plan = book.plan(tuple(plan.keys[index].name for index in torn))
        sinks = [sinks[index] for index in torn]
        after = [after[index] for index in torn]
        tally = _Tally(plan)
        yield _ask(book, plan, tally, sinks, after, least, priority)


def _versions(
    book: Catalogue, plan: Plan, after: Sequence[int], least: Sequence[int]
) -> Generator[list[Request] | Drain, list[Packet], _Tally]:
    """Wait until the conditions hold, without asking for values."""
    tally = _Tally(plan)
    yield _ask(book, plan, tally, None, after, least, 0)
    tally.settle()
    return tally


def versions(book: Catalogue, names: tuple[str, ...]) -> Conversation:
    """Return the version of each key: that of the part that is furthest behind."""
    plan = book.plan(names)
    after = [key.number for key in plan.keys]
    tally = yield from _versions(book, plan, after, [0] * len(names))
    return [min((version for version, _ in seen), default=0) for seen in tally.by_key()]


def resume(book: Catalogue, names: tuple[str, ...]) -> Conversation:
    """Return the lowest push number that this rank owes on any part, and number from there."""
    yield from lookup(book, names)
    known = tuple(name for name in names if name in book.keys)
    plan = book.plan(known)
    zeros = [0] * len(known)
    tally = yield from _versions(book, plan, zeros, zeros)
    owed = min((owed for seen in tally.by_key() for _, owed in seen), default=0)
    for key in plan.keys:
        key.number = owed
    return owed


# --- the optimizer --------------------------------------------------------------------------------


def _settle(book: Catalogue, names: tuple[str, ...]) -> Conversation:
    """Wait until this rank's own pushes of ``names`` are applied."""
    if not book.ordered:
        yield Drain()
        return None
    pushed = tuple(name for name in names if book.keys[name].number > book.keys[name].version)
    if pushed:
        plan = book.plan(pushed)
        after = [key.number for key in plan.keys]
        yield from _versions(book, plan, after, [0] * len(pushed))
    return None


def set_optimizer(book: Catalogue, call: calls.SetOptimizer) -> Conversation:
    """Give every server the optimizer, after the pushes that are on their way."""
    yield from _settle(book, tuple(book.keys))
    book.optimize_calls += 1
    hyper = call.hyper
    message = Optimize(
        book.opened.store,
        book.optimize_calls,
        book.rank == 0,
        hyper.name,
        dict(hyper.values),
        dict(hyper.lr_mult),
        dict(hyper.wd_mult),
    )
    yield [Request(server, message) for server in range(book.servers)]
    return None


def set_rate(book: Catalogue, call: calls.SetRate) -> Conversation:
    """Give every server the learning rate: the rounds pushed so far are updated with the old."""
    yield from _settle(book, tuple(book.keys))
    book.rate_calls += 1
    message = Rate(book.opened.store, book.rate_calls, book.rank == 0, call.lr)
    yield [Request(server, message) for server in range(book.servers)]
    return None


def save_state(book: Catalogue) -> Conversation:
    """Collect the optimizer's state of every key, after the pushes that are on their way."""
    yield from _settle(book, tuple(book.keys))
    keys = [key for key in book.keys.values() if key.pieces]
    where = [(key, piece) for key in keys for piece in key.pieces]
    answers = yield [
        Request(piece.server, GetState(piece.chunk, piece.start, piece.size)) for _, piece in where
    ]
    states: dict[str, tuple[int, dict[str, torch.Tensor]]] = {}
    for (key, piece), answer in zip(where, answers, strict=True):
        message = answer.message
        assert isinstance(message, StateIs)
        _, rows = states.setdefault(key.name, (message.step, {}))
        for one, frame in zip(message.fields, answer.payload, strict=True):
            values = from_frame(frame, BY_ID[one.dtype].name)
            row = rows.setdefault(one.name, torch.empty(key.spec.count, dtype=values.dtype))
            row[piece.offset : piece.offset + piece.size] = values
    return states


def load_state(book: Catalogue, call: calls.LoadState) -> Conversation:
    """Put states back where their keys lie."""
    requests = []
    for name, (step, rows) in call.states.items():
        for piece in book.key(name).pieces:
            cut = [row[piece.offset : piece.offset + piece.size] for row in rows.values()]
            fields = tuple(
                Field(title, dtype_of(row).id, piece.size)
                for title, row in zip(rows, cut, strict=True)
            )
            message = SetState(piece.chunk, piece.start, piece.size, step, fields)
            requests.append(Request(piece.server, message, payload=tuple(cut)))
    yield requests
    return None


# --- together -------------------------------------------------------------------------------------


def flush() -> Conversation:
    """Wait until every push so far is acknowledged."""
    yield Drain()
    return None


def barrier(book: Catalogue, name: str | None) -> Conversation:
    """Flush, then wait for the others."""
    yield Drain()
    title = "" if name is None else name
    number = book.barriers.get(title, 0)
    book.barriers[title] = number + 1
    yield [Request(None, Barrier(book.opened.store, title, number))]
    return None


def status(book: Catalogue) -> Conversation:
    """Return every server's STATUS answer."""
    answers = yield [Request(server, Status(book.opened.store)) for server in range(book.servers)]
    return [answer.message for answer in answers]
