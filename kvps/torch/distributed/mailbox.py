"""The mailbox: keys that one rank writes and others read, without missing one.

*A swap.* Every member writes posts, and reads the others' posts. Behind each post are two keys in
turns. Swaps of one track do not overlap on a rank, and each waits for every other member. So when a
rank writes to a key in swap j + 2, it has ended j + 1; there it heard from every member, each of which
had ended j before; and no rank reads what was written in j any more. No acknowledgement is needed.

*A letter.* One member writes a post, others read it, and hear nothing from each other. Each reader then
pushes a second key; the version of that says how many have read. The writer writes again when all have.

The work of a collective ends for the writer, too, when all have read: a rank whose call no other
rank meets must not take it for done. A message between two ranks ends when it is written.

The first value of a key makes it, and is its version 0; so version k is the post of k uses later.

*Size classes.* A key has one size for ever, and scripts send tensors of many sizes (a pickled object has
another one each time). The first shapes get keys that fit exactly, so that the buckets of a model travel
without padding. Later ones share keys of a few *classes*: eight between a power of two and the next, so that
at most an eighth is padding and the number of keys is bounded. What is chosen depends on nothing but the
calls before, which are the same on all ranks.

The two stores through which the ranks of a process group talk.

*Sums* are keys of a synchronous store: what all ranks push in a round is added up on the servers. *Posts*
are keys of a store without rounds whose rule is ``assign``: one rank writes, others read, bit for bit, as
bytes. The version of a post says how often it was written anew, and a reader waits for the one it
wants.

Both end their calls at once when a worker is lost: a process group cannot go on without a rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvps.core.worker import calls
from kvps.dtypes import Spec
from kvps.runtime.ticket import Ticket
from kvps.store.base import Session
from kvps.store.create import create_dist
from kvps.store.options import StoreOptions
from kvps.store.server_store import DistStore
from kvps.tensors import NAMES
from kvps.torch.distributed.host_tensor import Staged, blank, octets, padded
from kvps.torch.distributed.ordered_executor import Steps

OWNER = "torch.group"
READ = "/read"
"""Behind the name of a post: the key that its readers push when they have read it."""


class Board:
    """The stores that this process's groups write to and read from.

    Args:
        timeout_s: how long it may take to open the stores.
        generation: the same on all ranks, and no other for processes that have taken the place of
            one: push numbers begin at 0, and a server would take theirs for those of their predecessors.
        posts: the store of posts (:func:`open_posts`), which stays open; None to open another.
        on_worker_lost: of the others; "shrink" where no group has rounds.
    """

    def __init__(
        self,
        timeout_s: float,
        generation: str,
        posts: DistStore | None = None,
        on_worker_lost: str = "fail",
    ) -> None:
        owner = f"{OWNER}.{generation}"
        options = StoreOptions(timeout_s, on_worker_lost)
        self._sums = create_dist("dist_sync", owner, options)
        self._posts = posts or open_posts(owner, options)
        self._to_close = [self._sums] if posts else [self._sums, self._posts]
        self._session: Session = self._sums.session
        self._made: set[str] = set()
        self._uses: dict[str, int] = {}
        self.unread: dict[str, Ticket] = {}
        """Key of a letter -> the call that is over when all have read its last value."""

    @property
    def rank(self) -> int:
        """This worker's rank in the job."""
        return self._session.rank

    @property
    def workers(self) -> int:
        """The number of workers of the job."""
        return int(self._sums.num_workers)

    def left(self) -> list[int]:
        """Return the ranks that have left the job in good order."""
        return self._session.info.workers_in("left")

    def close(self) -> None:
        """Wait until all pushes are acknowledged, and end the stores."""
        for store in self._to_close:
            store.close()

    # --- sums -----------------------------------------------------------------------------------

    def make_sums(self, keys: Sequence[tuple[str, Spec]], limit_s: float) -> list[Ticket]:
        """Make the keys that this process has not used yet; rank 0 creates them."""
        new = [key for key in keys if key[0] not in self._made]
        if not new:
            return []
        self._made.update(name for name, _ in new)
        is_mine = self.rank == 0
        rows = [
            torch.zeros(spec.count if is_mine else 0, dtype=getattr(torch, spec.dtype), device="cpu")
            for _, spec in new
        ]
        call = calls.Init(self._sums.name, tuple(new), tuple(rows))
        return [self._session.call(call, limit_s)]

    def add(
        self,
        keys: Sequence[str],
        rows: Sequence[torch.Tensor],
        sinks: Sequence[torch.Tensor] | None,
        limit_s: float,
    ) -> Ticket:
        """Push ``rows`` into the next round of ``keys``; the sums come into ``sinks``, if given."""
        call = calls.PushValues(
            self._sums.name, tuple(keys), tuple(rows), None if sinks is None else tuple(sinks), 0, eager=False
        )
        return self._session.call(call, limit_s)

    def closed(self, keys: Sequence[str], limit_s: float) -> Ticket:
        """Wait until the rounds that this rank has pushed for are closed; bring no values."""
        return self._session.call(calls.Versions(self._sums.name, tuple(keys)), limit_s)

    # --- posts ----------------------------------------------------------------------------------

    def next_use(self, name: str) -> tuple[str, int]:
        """Return the key of the next use of a post, and how often that key was used before.

        There are two keys behind each name, used in turns: a writer need not wait for readers of
        the value before.
        """
        count = self._uses.get(name, 0)
        self._uses[name] = count + 1
        return f"{name}/{count % 2}", count // 2

    @property
    def posts(self) -> int:
        """The number of keys of the mailbox that were used so far."""
        return len(self._uses)

    def make_posts(self, keys: Sequence[str], rows: Sequence[torch.Tensor], limit_s: float) -> Ticket:
        """Make posts of this rank; ``rows`` are their version 0."""
        specs = tuple([(key, _spec(row)) for key, row in zip(keys, rows, strict=True)])
        call = calls.Init(self._posts.name, specs, tuple(rows), self.rank)
        return self._session.call(call, limit_s)

    def expect(self, keys: Sequence[str], sizes: Sequence[int], writer: int, limit_s: float) -> Ticket:
        """Wait until ``writer`` has made these posts, of so many bytes."""
        specs = tuple([(key, Spec("uint8", (size,))) for key, size in zip(keys, sizes, strict=True)])
        nothing = tuple([torch.empty(0, dtype=torch.uint8, device="cpu")] * len(keys))
        call = calls.Init(self._posts.name, specs, nothing, writer)
        return self._session.call(call, limit_s)

    def write(self, keys: Sequence[str], rows: Sequence[torch.Tensor], limit_s: float) -> Ticket:
        """Write posts of this rank anew."""
        call = calls.PushValues(self._posts.name, tuple(keys), tuple(rows), None, 0, eager=False)
        return self._session.call(call, limit_s)

    def read(
        self, keys: Sequence[str], sinks: Sequence[torch.Tensor], version: int, limit_s: float
    ) -> Ticket:
        """Read posts into ``sinks`` as soon as they have this version."""
        call = calls.PullValues(self._posts.name, tuple(keys), tuple(sinks), 0, version)
        return self._session.call(call, limit_s)


def open_posts(owner: str, options: StoreOptions) -> DistStore:
    """Open a store of posts; worker 0 sets its rule, and the others wait for that."""
    posts = create_dist("dist_async", owner, options)
    posts.set_optimizer("assign")
    return posts


def _spec(row: torch.Tensor) -> Spec:
    return Spec(NAMES[row.dtype], tuple(row.shape))


_Posts = Sequence[tuple[str, torch.Tensor]]
"""Keys of posts, and rows."""
LEAST = 64
"""The smallest class."""
EXACT_MAX = 64
"""The number of shapes of one kind that get keys of their own."""


def swap(
    board: Board,
    limit_s: float,
    mine: Sequence[tuple[str, torch.Tensor]],
    theirs: Sequence[tuple[str, int, torch.Tensor]],
) -> Steps:
    """Write posts and read others.

    Args:
        mine: name and value of each post to write.
        theirs: name, writer and room for the value of each post to read.
    """
    new: list[tuple[str, torch.Tensor]] = []
    again: list[tuple[str, torch.Tensor]] = []
    for name, row in mine:
        key, use = board.next_use(name)
        (again if use else new).append((key, _letter(row)))
    written = _written(board, limit_s, new, again)
    reads: dict[int, list[tuple[str, torch.Tensor]]] = {}
    made = []
    copies = []
    for name, writer, row in theirs:
        key, use = board.next_use(name)
        sink = _sink(row)
        copies.append((row, sink))
        reads.setdefault(use, []).append((key, sink))
        if not use:
            made.append(board.expect([key], [len(sink)], writer, limit_s))
    if made:
        yield made
    yield written + [board.read(*_columns(some), use, limit_s) for use, some in reads.items()]
    for row, sink in copies:
        _unfold(row, sink)


def tell(
    board: Board,
    limit_s: float,
    told: Sequence[tuple[str, torch.Tensor]],
    readers: int,
    confirms: bool = False,
) -> Steps:
    """Write posts when the posts before them have been read.

    Args:
        told: name and value of each.
        readers: how many read each.
        confirms: return the tickets of calls that are over when all have read these posts.
    """
    if not readers:
        return None
    new: list[tuple[str, torch.Tensor]] = []
    again: list[tuple[str, torch.Tensor]] = []
    read, keys = [], []
    for name, row in told:
        key, use = board.next_use(name)
        keys.append((key, use))
        if use:
            again.append((key, _letter(row)))
            before = board.unread.pop(key, None) if confirms else None
            read.append(before or board.read([key + READ], [_mark()], use * readers, limit_s))
        else:
            new += [(key, _letter(row)), (key + READ, _mark())]
    if read:
        yield read
    yield _written(board, limit_s, new, again)
    if not confirms:
        return None
    for key, use in keys:
        mark = board.read([key + READ], [_mark()], (use + 1) * readers, limit_s)
        board.unread[key] = mark
    return [board.unread[key] for key, _ in keys]


def hear(board: Board, limit_s: float, heard: Sequence[tuple[str, int, Staged]]) -> Steps:
    """Read posts, given by name, writer and where they go, and say so."""
    reads: dict[int, list[tuple[str, torch.Tensor]]] = {}
    made, keys = [], []
    sinks = [_sink(staged.row) for _, _, staged in heard]
    for (name, writer, _), sink in zip(heard, sinks, strict=True):
        key, use = board.next_use(name)
        keys.append(key + READ)
        reads.setdefault(use, []).append((key, sink))
        if not use:
            made.append(board.expect([key, key + READ], [len(sink), 1], writer, limit_s))
    if made:
        yield made
    yield [board.read(*_columns(some), use, limit_s) for use, some in reads.items()]
    if keys:
        board.write(keys, [_mark() for _ in keys], limit_s)  # nobody waits for that here
    for (_, _, staged), sink in zip(heard, sinks, strict=True):
        _unfold(staged.row, sink)
        staged.deliver()


def _written(board: Board, limit_s: float, new: _Posts, again: _Posts) -> list[Ticket]:
    """Write posts that are new, and others anew."""
    ways = (board.make_posts, new), (board.write, again)
    return [write(*_columns(posts), limit_s) for write, posts in ways if posts]


def _columns(pairs: _Posts) -> tuple[list[str], list[torch.Tensor]]:
    return [key for key, _ in pairs], [row for _, row in pairs]


def _letter(row: torch.Tensor) -> torch.Tensor:
    """Return the value that is written for ``row``: bytes, as many as its class has."""
    return padded(octets(row), class_of(row.nbytes))


def _mark() -> torch.Tensor:
    """Return what a reader writes, or the room for it; only its version counts."""
    return torch.zeros(1, dtype=torch.uint8, device="cpu")


def _sink(row: torch.Tensor) -> torch.Tensor:
    """Return room for the value of a row like this; the row itself if it fits."""
    size = class_of(row.nbytes)
    return octets(row) if row.nbytes == size else blank(size, torch.uint8)


def _unfold(row: torch.Tensor, sink: torch.Tensor) -> None:
    """Copy the values read for ``row`` into it."""
    if len(sink) != row.nbytes:
        octets(row).copy_(sink[: row.nbytes])


def class_of(count: int) -> int:
    """Return the smallest class that holds ``count`` values.

    Example:
        >>> class_of(3), class_of(64), class_of(65), class_of(1000), class_of(1025)
        (64, 64, 72, 1024, 1152)
    """
    if count <= LEAST:
        return LEAST
    step = 1 << (count - 1).bit_length() - 4
    return -(-count // step) * step


class KeySizes:
    """The names and sizes of one group's keys.

    A key that fits exactly has the shape in its name. So ranks that give different shapes use different keys,
    and never take each other's values for theirs.
    """

    def __init__(self, exact_max: int = EXACT_MAX) -> None:
        self._exact_max = exact_max
        self._exact: dict[str, set[str]] = {}

    def of(self, kind: str, shape: Sequence[int], count: int) -> tuple[str, int]:
        """Return the name and the size of the key for ``count`` values of this shape.

        Args:
            kind: the operation and element type; each has its own keys.
            shape: of the tensor.
            count: the values, or bytes, that travel.

        Example:
            >>> KeySizes().of("all_reduce.SUM/float32", (4, 5), 20)
            ('all_reduce.SUM/float32/4x5', 20)
        """
        exact = self._exact.setdefault(kind, set())
        name = f"{kind}/{'x'.join(map(str, shape)) or 'scalar'}"
        if name not in exact:
            if len(exact) >= self._exact_max:
                size = class_of(count)
                return f"{kind}/~{size}", size
            exact.add(name)
        return name, count
