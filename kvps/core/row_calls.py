"""How rows of keys are pushed and pulled: one request to each server that has some of a key.

A request names a key, and not a chunk, so that there is one for each server, however many chunks the key
lies in there. Every server is told of every push, also where it has none of its rows: rounds close by
who has pushed, and a version counts the rounds of the whole key. What is pulled is asked of those
servers alone that have it.

A key whose rows are not whole on some server (:func:`~kvps.core.placement.lies_by_rows`) is pushed
and pulled as a whole, as if the caller had made it dense.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch

from kvps.core import calls, reading
from kvps.core.catalogue import Catalogue
from kvps.core.conversations import Conversation, Values, demand_presence, make_room, numbered
from kvps.core.drops import complain
from kvps.core.link import Request
from kvps.core.placement import lies_by_rows
from kvps.core.plan import Key, Plan, make, of_key
from kvps.core.reading import Lagging, Step
from kvps.core.rounds import WINDOW
from kvps.core.sparse import add_rows
from kvps.errors import ConfigError, KvpsError, ProtocolError
from kvps.messages import (
    ROWS_FRAMES_MAX,
    Dropped,
    Packet,
    PulledRows,
    PullRows,
    Push,
    PushRows,
    rows_in_frame,
)
from kvps.specs import BY_NAME
from kvps.tensors import TORCH, Memory, from_frame


class Range(NamedTuple):
    """The rows of a key on one server."""

    server: int
    first: int
    stop: int
    lane: int
    """The chunk in which the first of them lies."""


def ranges(key: Key) -> list[Range]:
    """Return which rows of ``key`` lie where, in their order; nothing if they are not whole there."""
    if not lies_by_rows(key.spec, [(one.offset, one.size) for one in key.pieces]):
        return []
    width = key.spec.width
    found: list[Range] = []
    for one in key.pieces:
        stop = (one.offset + one.size) // width
        if found and found[-1].server == one.server:
            found[-1] = found[-1]._replace(stop=stop)
        else:
            found.append(Range(one.server, one.offset // width, stop, one.chunk))
    return found


def push_rows(book: Catalogue, call: calls.PushRows, values: Values) -> Conversation:
    """Push some rows of each key; ``values`` are those of the call."""
    demand_presence(book)
    plan = yield from numbered(book, call.keys)
    full = [key for key in plan.keys if key.number - key.applied >= WINDOW]
    requests: list[Request] = []
    for index, key in enumerate(plan.keys):
        ids, places, rows = values[3 * index : 3 * index + 3]
        priority = of_key(call.priority, index)
        pushed = _pushes(book, key, ids, places, rows) or _whole_pushes(
            book, key, ids, places, rows
        )
        for request in pushed:
            request.priority = priority
            requests.append(request)
    for key in plan.keys:
        key.number += 1
    for request in requests if call.eager else ():
        request.freeze()
    try:
        if full:
            yield from make_room(book, full)
        demand_presence(book)
        yield requests
    except KvpsError:
        for key in plan.keys:
            key.is_refused = True
        raise
    return None


def _pushes(
    book: Catalogue, key: Key, ids: torch.Tensor, places: torch.Tensor, rows: torch.Tensor
) -> list[Request]:
    """Return what pushes rows to each server of ``key``; nothing if it does not lie by rows."""
    dtype, width = BY_NAME[key.spec.dtype], key.spec.width
    requests = []
    for one, some in _split(ranges(key), ids):
        count = some.stop - some.start
        _demand_room(key, count)
        message = PushRows(
            book.opened.store, key.name, dtype.id, (book.rank,), key.number, width, count
        )
        requests.append(
            Request(
                one.server,
                message,
                fill=partial(_gather, book.memory, ids[some], places[some], rows, dtype.name),
                payload_bytes=max(1, count * (8 + width * dtype.itemsize)),
                lane=one.lane,
            )
        )
    return requests


def _split(places: Sequence[Range], ids: torch.Tensor) -> Iterator[tuple[Range, slice]]:
    """Yield each server's rows, and which of the sorted ``ids`` are among them."""
    if places:
        edges = torch.tensor([places[0].first, *[one.stop for one in places]])
        cuts = torch.searchsorted(ids, edges).tolist()
        for one, low, high in zip(places, cuts, cuts[1:], strict=False):
            yield one, slice(low, high)


def _demand_room(key: Key, count: int) -> None:
    """Check that so many rows fit into one packet.

    Raises:
        ConfigError: if they do not.
    """
    each = rows_in_frame(BY_NAME[key.spec.dtype].id, key.spec.width)
    most = min(each * ROWS_FRAMES_MAX, IDS_MAX)
    if count > most:
        raise ConfigError(
            f"key {key.name!r}: {count} rows for one server, and a message holds {most}. Push or "
            "pull fewer at once, or a dense value; nothing was changed"
        )


IDS_MAX = (64 << 20) // 8
"""Numbers of rows that one payload frame holds."""


def _gather(
    memory: Memory,
    ids: torch.Tensor,
    places: torch.Tensor,
    rows: torch.Tensor,
    dtype: str,
    route: str,
) -> tuple[torch.Tensor, ...]:
    """Return the payload of a push: numbers and rows, in one block that the server can read."""
    if not len(ids):
        return ()
    head, width = 8 * len(ids), rows.shape[1]
    block = memory.empty(head + len(ids) * width * BY_NAME[dtype].itemsize, "uint8")
    numbers, flat = block[:head].view(torch.int64), block[head:].view(TORCH[dtype])
    numbers.copy_(ids)
    torch.index_select(rows, 0, places, out=flat.view(-1, width))
    each = rows_in_frame(BY_NAME[dtype].id, width) * width
    return (numbers, *torch.split(flat, each))


def _whole_pushes(
    book: Catalogue, key: Key, ids: torch.Tensor, places: torch.Tensor, rows: torch.Tensor
) -> list[Request]:
    """Return what pushes rows as a gradient of all elements of ``key``."""
    dense = torch.zeros(key.spec.shape[0], key.spec.width, dtype=TORCH[key.spec.dtype])
    add_rows(dense, ids, rows.index_select(0, places))
    return [
        Request(
            share.server,
            Push(
                share.chunk,
                BY_NAME[share.dtype].id,
                (book.rank,),
                1.0,
                False,
                share.runs(key.number),
            ),
            fill=partial(share.gather, [dense.view(key.spec.shape)], book.memory),
            payload_bytes=share.payload_bytes,
            lane=share.chunk,
        )
        for share in make([key], book.rank).shares
    ]


# --- pulling --------------------------------------------------------------------------------------


@dataclass(slots=True)
class Portion:
    """What one server has of the rows that are wanted of one key; it takes its answer in."""

    key: Key
    place: Range
    ids: torch.Tensor
    out: torch.Tensor
    """Where they go, with those of other servers."""
    places: torch.Tensor
    """Where in it each goes."""
    answer: PulledRows | None = None

    def ask(self, book: Catalogue, after: int, least: int, priority: int) -> Request:
        """Return the request for these rows."""
        _demand_room(self.key, len(self.ids))
        return Request(
            self.place.server,
            PullRows(book.opened.store, self.key.name, after, least, len(self.ids)),
            payload=(self.ids,),
            priority=priority,
            lane=self.place.lane,
            on_reply=self,
        )

    def __call__(self, packet: Packet, wanted: bool) -> None:
        """Note how the key stands, and take the rows if they are ``wanted``."""
        answer = packet.message
        assert isinstance(answer, PulledRows)
        spec = self.key.spec
        if (answer.count, answer.width) != (len(self.ids), spec.width) or (
            answer.dtype != BY_NAME[spec.dtype].id
        ):
            raise ProtocolError(
                f"server {self.place.server} answered {answer.count} rows of {answer.width} "
                f"elements of key {self.key.name!r}; asked for were {len(self.ids)} of {spec.width}"
            )
        self.answer = answer
        at = 0
        for frame in packet.payload if wanted else ():
            values = from_frame(frame, spec.dtype).view(-1, spec.width)
            self.out.index_copy_(0, self.places[at : at + len(values)], values)
            at += len(values)

    @property
    def told(self) -> PulledRows:
        """The answer, which is there."""
        assert self.answer is not None
        return self.answer


@dataclass(slots=True)
class WantedRows:
    """The rows of one key, and who has them."""

    key: Key
    rows: torch.Tensor
    after: int
    priority: int
    portions: list[Portion] = field(default_factory=list)

    def settle(self, ordered: bool) -> None:
        """Note in the key what is applied."""
        key, told = self.key, [one.told for one in self.portions]
        if len(told) == len(ranges(key)):  # of those that were not asked nothing is known
            applied = min([one.lowest if ordered else one.owed for one in told])
            key.applied = max(key.applied, applied)
        if not ordered:
            key.version = max([key.version, *(one.highest for one in told)])

    def lagging(self) -> tuple[list[Portion], int]:
        """Return those who lag behind the newest version, and that; as whole keys are read."""
        told = [one.told for one in self.portions]
        newest = max([one.highest for one in told])
        if len({one.owed for one in told}) > 1:
            return [], newest  # torn by a push that this rank owes to some parts only
        return [one for one in self.portions if one.told.lowest < newest], newest


def pull_rows(book: Catalogue, call: calls.PullRows) -> Conversation:
    """Pull some rows of each key after this rank's own pushes; finish with them, key by key."""
    plan = yield from numbered(book, call.keys)
    found = [_wanted(book, plan, call, index) for index in range(len(plan.keys))]
    for one, ids, places in zip(found, call.ids, call.places, strict=True):
        if not one.portions and len(ids):
            yield from _read_whole(book, one, ids, places)
    by_rows = [one for one in found if one.portions]
    yield [
        portion.ask(book, one.after, 0, one.priority) for one in by_rows for portion in one.portions
    ]
    for one in by_rows:
        one.settle(book.ordered)
    yield from _even_out(book, by_rows)
    dropped: dict[str, Dropped] = {}
    for one in by_rows:
        for portion in one.portions:
            for drop in portion.told.dropped:
                dropped[one.key.name] = drop
    if dropped:
        complain(book.opened.store, book.ordered, book.keys, dropped)
    return [one.rows for one in found]


def _wanted(book: Catalogue, plan: Plan, call: calls.PullRows, index: int) -> WantedRows:
    key, ids = plan.keys[index], call.ids[index]
    rows = torch.empty(len(ids), key.spec.width, dtype=TORCH[key.spec.dtype])
    one = WantedRows(key, rows, key.number, of_key(call.priority, index))
    for place, some in _split(ranges(key), ids):
        if some.start < some.stop:
            one.portions.append(Portion(key, place, ids[some], rows, call.places[index][some]))
    return one


def _even_out(book: Catalogue, found: Sequence[WantedRows]) -> Generator[Step, list[Packet], None]:
    """Read rows again that lag behind others of their key, until none does."""
    while book.ordered or not book.is_short:
        requests = Lagging()
        for one in found:
            behind, newest = one.lagging()
            requests += [portion.ask(book, one.after, newest, one.priority) for portion in behind]
        if not requests:
            return
        if not (yield requests):
            return  # nobody waits any more for what may never come


def _read_whole(
    book: Catalogue, one: WantedRows, ids: torch.Tensor, places: torch.Tensor
) -> Generator[Step, list[Packet], None]:
    """Read all of a key, and take the rows ``ids`` of it."""
    dense = torch.empty(one.key.spec.shape, dtype=one.rows.dtype)
    plan = book.plan((one.key.name,))
    tallies = yield from reading.read(book, plan, reading.Rows([dense]), one.after, 0, one.priority)
    one.rows.index_copy_(0, places, dense.view(-1, one.key.spec.width).index_select(0, ids))
    for tally in tallies:
        if tally.dropped and not tally.is_unwanted:
            complain(book.opened.store, book.ordered, book.keys, tally.dropped)
