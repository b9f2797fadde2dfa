"""How each of the user's calls is carried out: what is asked of the servers, in which order.

Each call is a *conversation*, a generator that yields lists of requests and is resumed with their
answers, in order; if one of them was refused, the refusal is raised where it waits. So a call that
takes three steps reads as three steps, and needs no thread and no state machine of its own. A
conversation never waits for anything but answers.

``rows`` are the caller's values, one contiguous tensor per key. They are read as late as possible; when
the caller stops waiting before that, the worker puts copies into the list.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch

from kvps.core import calls
from kvps.core import plan as plans
from kvps.core.catalogue import Catalogue, Made
from kvps.core.coding import Group
from kvps.core.drops import complain
from kvps.core.joins import JUDGE
from kvps.core.link import Request
from kvps.core.placement import EMBEDDING, home
from kvps.core.plan import Given, Held, Key, Numbers, Plan, Share, alike, make
from kvps.core.reading import (
    Drain,
    Pieces,
    Rows,
    Sink,
    Step,
    Steps,
    Tally,
    even_out,
    own_sink,
    read,
    sink_for,
    stand,
)
from kvps.core.rounds import WINDOW
from kvps.errors import ConfigError, KvpsError, Mismatch
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
    History,
    HistoryIs,
    Join,
    Joined,
    Load,
    Optimize,
    Packet,
    Push,
    Rate,
    Released,
    Resume,
    Resumed,
    Return,
    SetState,
    StateIs,
    Status,
)
from kvps.specs import BY_ID, BY_NAME, Spec
from kvps.tensors import dtype_of, from_frame

Conversation = Generator[Step, list[Packet], object]
Values = list[torch.Tensor]

BROADCAST = "kvps.broadcast"
"""The barrier at which broadcasts meet."""


def open_store(book: Catalogue, call: calls.OpenStore) -> Conversation:
    """Tell every server of the store; they compare its options."""
    yield [Request(server, call.opened) for server in range(book.servers)]
    book.opened, book.worker_grace_s = call.opened, call.worker_grace_s
    return None


# --- keys -----------------------------------------------------------------------------------------


def init(book: Catalogue, call: calls.Init, rows: Values) -> Conversation:
    """Declare the keys that are new here, and load their values if this rank creates them."""
    new: list[int] = []
    for index, (name, spec) in enumerate(call.keys):
        known = book.keys.get(name)
        if known is None:
            new.append(index)
        elif known.spec != spec:
            raise Mismatch(
                f"key {name!r} of store {book.opened.store!r} is {known.spec} and cannot be "
                f"initialised as {spec}; broadcast() replaces a key"
            )
    rows[:] = [rows[index] for index in new]
    keys = [call.keys[index] for index in new]
    yield from _create(book, keys, rows, [0] * len(new), call.creator)
    return None


def broadcast(book: Catalogue, call: calls.Broadcast, rows: Values) -> Conversation:
    """Replace the keys by rank 0's values and hand these to all.

    All meet before it, so that rank 0 replaces no value that another rank has still to read; and
    after it where a push of one rank may move the values before another has read them.
    """
    names = tuple(name for name, _ in call.keys)
    meetings, made = book.barriers.get(BROADCAST, 0), book.broadcasts
    try:
        known = {name: book.keys[name] for name in names if name in book.keys}
        yield from settle(book, tuple(known))
        yield from barrier(book, BROADCAST)
        numbers = [known[name].broadcasts + 1 if name in known else 1 for name in names]
        yield from _create(book, call.keys, rows, numbers)
        book.broadcasts += 1
        yield from read(book, book.plan(names), Rows(call.sinks), 0, 0, 0)
        if not book.ordered:
            yield from barrier(book, BROADCAST)
    except BaseException:  # made again, it is the same one
        book.barriers[BROADCAST], book.broadcasts = meetings, made
        raise
    for name, number in zip(names, numbers, strict=True):
        book.keys[name].broadcasts = number
    return None


def _create(
    book: Catalogue,
    keys: Sequence[tuple[str, Spec]],
    rows: Values,
    numbers: Sequence[int],
    creator: int = 0,
) -> Steps:
    """Declare ``keys``, each for its call number; their creator loads those that are fresh."""
    create = book.rank == creator
    if not create:
        rows.clear()
    fresh, placed = yield from _declare(book, keys, numbers, create, creator)
    if create:
        stubs = [Key(*key, tuple(held)) for key, held in zip(keys, fresh, strict=True)]
        yield [
            _bulk(
                book,
                share,
                Load(share.chunk, BY_NAME[share.dtype].id, share.runs(alike(numbers))),
                rows,
            )
            for share in make(stubs).shares
        ]
    book.place((name, spec, held) for (name, spec), held in zip(keys, placed, strict=True))


def _declare(
    book: Catalogue,
    keys: Sequence[tuple[str, Spec]],
    numbers: Sequence[int],
    create: bool,
    creator: int = 0,
) -> Generator[Step, list[Packet], tuple[list[list[Held]], list[list[Held]]]]:
    """Return, key by key, the pieces that must be loaded and all pieces."""
    batches: dict[tuple[int, int], list[tuple[int, Entry]]] = {}
    for index, (name, spec) in enumerate(keys):
        dtype = BY_NAME[spec.dtype].id
        for part in book.parts(name, spec):
            entry = Entry(name, dtype, spec.shape, part.start, part.size)
            batches.setdefault((part.server, numbers[index]), []).append((index, entry))
    requests: list[Request] = []
    asked: list[tuple[int, list[tuple[int, Entry]]]] = []
    for (server, number), batch in sorted(batches.items()):
        for begin in range(0, len(batch), ENTRIES_MAX):
            slice_ = batch[begin : begin + ENTRIES_MAX]
            entries = tuple(entry for _, entry in slice_)
            message = Declare(book.opened.store, create, number, entries, creator)
            requests.append(Request(server, message))
            asked.append((server, slice_))
    answers = yield requests
    fresh: list[list[Held]] = [[] for _ in keys]
    placed: list[list[Held]] = [[] for _ in keys]
    for (server, batch), answer in zip(asked, answers, strict=True):
        assert isinstance(answer.message, Declared)
        for (index, entry), place in zip(batch, answer.message.places, strict=True):
            offset = entry.start
            for piece in place.pieces:
                held = Held(server, piece.chunk, piece.start, piece.size, offset)
                placed[index].append(held)
                if place.fresh:
                    fresh[index].append(held)
                offset += piece.size
    return fresh, placed


def lookup(
    book: Catalogue, names: tuple[str, ...]
) -> Generator[Step, list[Packet], dict[str, Spec | None]]:
    """Learn the specs and places of ``names`` from the servers that answer for them."""
    by_home: dict[int, list[str]] = {}
    for name in names:
        if name not in book.keys:
            by_home.setdefault(home(name, book.servers), []).append(name)
    batches = [
        (server, tuple(batch[begin : begin + ENTRIES_MAX]))
        for server, batch in sorted(by_home.items())
        for begin in range(0, len(batch), ENTRIES_MAX)
    ]
    answers = yield [Request(server, Find(book.opened.store, batch)) for server, batch in batches]
    found: list[tuple[str, Spec]] = []
    made: dict[str, int] = {}
    for (_, batch), answer in zip(batches, answers, strict=True):
        assert isinstance(answer.message, FoundAll)
        for name, one in zip(batch, answer.message.found, strict=True):
            if one.dtype:
                found.append((name, Spec(BY_ID[one.dtype].name, one.shape)))
                made[name] = one.call
    _, placed = yield from _declare(book, found, [0] * len(found), create=False)
    book.place((name, spec, held) for (name, spec), held in zip(found, placed, strict=True))
    for name, call in made.items():
        book.keys[name].broadcasts = call
    return {name: book.keys[name].spec if name in book.keys else None for name in names}


# --- values ---------------------------------------------------------------------------------------


def _bulk(
    book: Catalogue,
    share: Share,
    message: Load | Push,
    rows: Given,
    priority: Numbers = 0,
) -> Request:
    return Request(
        share.server,
        message,
        fill=lambda route: share.gather(rows, book.memory, route),
        payload_bytes=share.payload_bytes,
        lane=share.chunk,
        priority=share.highest(priority),
    )


def push(book: Catalogue, call: calls.PushValues, rows: Values) -> Conversation:
    """Push one gradient for each key; with a sink, pull what comes of it."""
    demand_presence(book)
    plan = yield from numbered(book, call.keys)
    each = [key.number for key in plan.keys]
    full: list[Key] = []
    if max(each, default=0) - min([key.applied for key in plan.keys], default=0) >= WINDOW:
        full = [key for key in plan.keys if key.number - key.applied >= WINDOW]
    for key in plan.keys:
        key.number += 1
    sink = sink_for(call.sinks, plan)
    groups = book.groups(plan)
    tallies = [Tally(group.plan) for group in groups]
    requests: list[Request] = []
    try:
        if full:
            yield from make_room(book, full)
        demand_presence(book)
        for group, tally in zip(groups, tallies, strict=True):
            numbers = alike(group.numbers(each))
            requests += _pushed(book, call, group, group.rows(rows), numbers, tally, sink)
        yield requests
    except KvpsError:
        for key in plan.keys:
            key.is_refused = True
        raise
    if sink is not None:
        for group, tally in zip(groups, tallies, strict=True):
            after = alike([number + 1 for number in group.numbers(each)])
            urgent = group.numbers(call.priority)
            yield from even_out(book, tally, own_sink(group, sink), after, urgent)
        _complain(book, tallies)
    return _views(book, plan, sink)


def _pushed(
    book: Catalogue,
    call: calls.PushValues,
    group: Group,
    rows: Given,
    numbers: Numbers,
    tally: Tally,
    sink: Sink | None,
) -> list[Request]:
    """Return the requests that push the keys of ``group``."""
    own = None if sink is None else own_sink(group, sink)
    priority = group.numbers(call.priority)
    setting = group.setting
    requests = []
    for share in group.plan.shares:
        dtype = BY_NAME[share.dtype].id
        message = Push(share.chunk, dtype, (book.rank,), 1.0, sink is not None, share.runs(numbers))
        if setting is None:
            request = _bulk(book, share, message, rows, priority)
        else:
            request = book.coding.push(group, share, message, rows, book.memory, numbers)
            request.priority = share.highest(priority)
        if call.eager:
            request.freeze()
        if own is not None:
            is_by_steps = setting is not None and setting.back is not None
            request.on_reply = tally.reader(share, own, book.coding if is_by_steps else None)
        requests.append(request)
    return requests


def demand_presence(book: Catalogue) -> None:
    """Refuse a push of a rank that has joined: rounds close without it.

    Raises:
        ConfigError: if this rank has.
    """
    if book.is_away:
        raise ConfigError(
            f"push() of store {book.opened.store!r}: worker {book.rank} has joined, and rounds close "
            "without it until every worker has. Nothing was pushed. Call join() again to wait on"
        )


def _views(book: Catalogue, plan: Plan, sink: Sink | None) -> list[torch.Tensor] | None:
    return sink.views(plan.keys, book.memory) if isinstance(sink, Pieces) else None


def _complain(book: Catalogue, tallies: list[Tally]) -> None:
    """Raise NonFinite for updates that were dropped, if the caller is there to hear it."""
    dropped = {key: one for tally in tallies for key, one in tally.dropped.items()}
    if dropped and not any(tally.is_unwanted for tally in tallies):
        complain(book.opened.store, book.ordered, book.keys, dropped)


def numbered(book: Catalogue, names: tuple[str, ...]) -> Generator[Step, list[Packet], Plan]:
    """Return the plan of ``names``, whose push numbers can be relied on.

    The number of a push that was refused is free again, so it has to be asked which are owed.
    """
    plan = book.plan(names)
    if any(key.is_refused for key in plan.keys):
        tally = yield from stand(book, plan, 0, 0)
        for key, found in zip(plan.keys, tally.by_key(), strict=True):
            if key.is_refused:  # and no other call has asked meanwhile
                key.is_refused = False
                key.number = min((owed for _, owed in found.values()), default=0)
    return plan


def make_room(book: Catalogue, full: list[Key]) -> Steps:
    """Wait until fewer than :data:`WINDOW` pushes of each of these keys are under way."""
    if book.ordered:
        plan = book.plan(tuple(key.name for key in full))
        yield from stand(book, plan, 0, alike([key.number - WINDOW for key in full]))
        return
    numbers = [key.number - 1 for key in full]
    yield Drain()
    for key, number in zip(full, numbers, strict=True):
        key.applied = max(key.applied, number)


def pull(book: Catalogue, call: calls.PullValues) -> Conversation:
    """Pull the values after this rank's own pushes."""
    plan = yield from numbered(book, call.keys)
    after = alike([key.number for key in plan.keys])
    sink = sink_for(call.sinks, plan)
    assert sink is not None
    tallies = yield from read(book, plan, sink, after, call.min_version, call.priority)
    _complain(book, tallies)
    return _views(book, plan, sink)


def allocate(book: Catalogue, names: tuple[str, ...]) -> Conversation:
    """Return a tensor for each key, in memory that the servers can read if there is some."""
    yield []
    return plans.allocate(book.plan(names), book.memory)


def versions(book: Catalogue, names: tuple[str, ...]) -> Conversation:
    """Return the version of each key: that of the part that is furthest behind."""
    plan = yield from numbered(book, names)
    tally = yield from stand(book, plan, alike([key.number for key in plan.keys]), 0)
    return [min((one for one, _ in found.values()), default=0) for found in tally.by_key()]


def resume(book: Catalogue, names: tuple[str, ...]) -> Conversation:
    """Return the lowest push number that this rank owes on any part, and number from there."""
    yield Drain()
    specs = yield from lookup(book, names)
    plan = book.plan(tuple(name for name in names if specs[name] is not None))
    tally = yield from stand(book, plan, 0, 0)
    owed = min((owed for found in tally.by_key() for _, owed in found.values()), default=0)
    if len(plan.keys) < len(names):
        owed = 0  # of a key that is not there yet, all pushes are owed
    for key in plan.keys:
        key.number, key.is_refused = owed, False
        key.heard = max(key.heard, owed)  # what was dropped before, a predecessor was told of
    yield from _history(book)
    return owed


def _history(book: Catalogue) -> Steps:
    """Go on with the calls of all ranks where this rank's predecessor stopped, if it had one."""
    store = book.opened.store
    pushed = book.pushed if book.ordered else None
    (answer,) = yield [Request(None, Resume(store, pushed))]
    resumed = answer.message
    assert isinstance(resumed, Resumed)
    if not resumed.replaced:
        return
    yield from inherit(book)
    book.is_resumed = True
    met = {name: book.barriers[name] for name in (BROADCAST,) if name in book.barriers}
    # A name mostly stands for one moment: who is not sure whether its predecessor stood there stands there
    # again, and passes if that was so. Those without a name are counted.
    again = {name: number - bool(name) for name, number in resumed.barriers.items()}
    book.barriers = again | met


def inherit(book: Catalogue) -> Steps:
    """Count the calls of all ranks from what the servers know of them."""
    store = book.opened.store
    answers = yield [Request(server, History(store)) for server in range(book.servers)]
    known = [one.message for one in answers if isinstance(one.message, HistoryIs)]
    newest = max(known, key=lambda one: one.rate_calls)
    # Rank 0 goes on from what some server knows (R125). To the others the optimizer is set when every
    # server has it: rank 0 may be ahead of them in a new epoch, and be setting it again.
    furthest = max if book.rank == 0 else min
    optimized = furthest(known, key=lambda one: one.optimize_calls)
    joins = max(one.joins for one in known)
    missed = [server for server, one in enumerate(known) if one.joins < joins]
    yield [Request(server, Return(store, joins)) for server in missed]
    if book.rank == 0:  # a call that was heard by some is made with all
        behind = [at for at, one in enumerate(known) if one.rate_calls < newest.rate_calls]
        rate = Rate(store, newest.rate_calls, True, newest.lr, newest.rate_after)
        yield [Request(server, rate) for server in behind]
    book.joins = joins
    book.restored = max(one.restored for one in known)
    book.is_away = any(one.joined and one.joins == joins for one in known)
    book.rated = Made(newest.rate_calls, newest.rate_after, is_inherited=True)
    book.optimized = Made(optimized.optimize_calls, optimized.optimize_after, is_inherited=True)


# --- the optimizer --------------------------------------------------------------------------------


def settle(book: Catalogue, names: tuple[str, ...]) -> Steps:
    """Wait until this rank's own pushes of ``names`` are applied."""
    if not book.ordered:
        yield Drain()
        return
    pushed = tuple(name for name in names if book.keys[name].number > book.keys[name].applied)
    if pushed:
        plan = yield from numbered(book, pushed)
        yield from stand(book, plan, alike([key.number for key in plan.keys]), 0)


def set_optimizer(book: Catalogue, call: calls.SetOptimizer) -> Conversation:
    """Give every server the optimizer, after the pushes that are on their way."""
    yield from settle(book, tuple(book.keys))
    hyper, before = call.hyper, book.optimized
    book.optimized = book.next_call(before)
    number, after, _ = book.optimized
    message = Optimize(
        book.opened.store,
        number,
        book.rank == 0,
        hyper.name,
        dict(hyper.values),
        dict(hyper.lr_mult),
        dict(hyper.wd_mult),
        after,
        book.is_resumed and book.rank != 0,
    )
    try:
        yield [Request(server, message) for server in range(book.servers)]
    except KvpsError:
        book.optimized = before
        raise
    return None


def set_rate(book: Catalogue, call: calls.SetRate) -> Conversation:
    """Give every server the learning rate: the rounds pushed so far are updated with the old."""
    yield from settle(book, tuple(book.keys))
    before = book.rated
    book.rated = book.next_call(before)
    number, after, _ = book.rated
    store, is_new = book.opened.store, book.is_resumed and book.rank != 0
    message = Rate(store, number, book.rank == 0, call.lr, after, is_new)
    try:
        yield [Request(server, message) for server in range(book.servers)]
    except KvpsError:
        book.rated = before
        raise
    return None


def save_state(book: Catalogue) -> Conversation:
    """Collect the optimizer's state of every key, after the pushes that are on their way.

    A key of which some part was never updated has no state yet.
    """
    yield from settle(book, tuple(book.keys))
    keys = [key for key in book.keys.values() if not key.name.startswith(EMBEDDING)]
    where = [(key, piece) for key in keys for piece in key.pieces]
    answers = yield [
        Request(piece.server, GetState(piece.chunk, piece.start, piece.size)) for _, piece in where
    ]
    steps: dict[str, list[int]] = {}
    parts: dict[tuple[str, str], list[tuple[Held, torch.Tensor]]] = {}
    for (key, piece), answer in zip(where, answers, strict=True):
        message = answer.message
        assert isinstance(message, StateIs)
        steps.setdefault(key.name, []).append(message.step)
        for one, frame in zip(message.fields, answer.payload, strict=True):
            values = from_frame(frame, BY_ID[one.dtype].name)
            parts.setdefault((key.name, one.name), []).append((piece, values))
    states: dict[str, tuple[int, dict[str, torch.Tensor]]] = {
        name: (min(found), {}) for name, found in steps.items()
    }
    for (name, title), found in parts.items():
        if len(found) == len(book.keys[name].pieces):
            row = torch.empty(book.keys[name].spec.count, dtype=found[0][1].dtype)
            for piece, values in found:
                row[piece.offset : piece.offset + piece.size] = values
            states[name][1][title] = row
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


# --- compression ----------------------------------------------------------------------------------


def compress(book: Catalogue, call: calls.Compress) -> Conversation:
    """Compress what is pushed from now on; no server is asked, as each push says how it is written."""
    yield []
    book.coding.use(call.rules)
    return None


def save_rests(book: Catalogue) -> Conversation:
    """Return what compression left out, after the pushes that are on their way."""
    yield Drain()
    return {name: rest.to("cpu", copy=True) for name, rest in book.coding.rests.items()}


def load_rests(book: Catalogue, call: calls.LoadRests) -> Conversation:
    """Put rests back, after the pushes that are on their way."""
    yield Drain()
    book.coding.rests = {name: rest.clone() for name, rest in call.rests.items()}
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
    store, waits, after = book.opened.store, book.waits_for_lost, book.pushed
    is_lost = book.is_resumed and book.ordered and title != BROADCAST
    if is_lost and title not in book.barriers:
        (answer,) = yield [Request(None, Barrier(store, title, 0, waits, after, resumed=True))]
        released = answer.message
        assert isinstance(released, Released)
        if released.number is not None:
            book.barriers[title] = released.number + 1
        return None
    number = book.barriers.get(title, 0)
    book.barriers[title] = number + 1
    try:
        yield [Request(None, Barrier(store, title, number, waits, after))]
    except BaseException:  # a barrier that was not passed is not counted
        book.barriers[title] -= 1
        raise
    return None


def join(book: Catalogue) -> Conversation:
    """Let the others go on without this rank until all have joined; return who was the last.

    That is said by one server, and then by this rank to all of them: once they have answered, none
    closes a round without it. Which numbers it owes after the rounds of the others is asked.
    """
    was_away, book.is_away = book.is_away, True
    try:
        yield Drain()
    except BaseException:
        book.is_away = was_away  # no server was told
        raise
    store, call = book.opened.store, book.joins + 1
    servers = range(book.servers)
    answers = yield [Request(one, Join(store, call, one == JUDGE)) for one in servers]
    yield [Request(one, Return(store, call)) for one in servers]
    book.joins, book.is_away = call, False
    if book.ordered:
        for key in book.keys.values():
            key.is_refused = True
        yield from numbered(book, tuple(book.keys))
    judged = answers[JUDGE].message
    assert isinstance(judged, Joined)
    return judged.last


def status(book: Catalogue) -> Conversation:
    """Return every server's STATUS answer."""
    answers = yield [Request(server, Status(book.opened.store)) for server in range(book.servers)]
    return [answer.message for answer in answers]
