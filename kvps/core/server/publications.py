"""Publications on a server: versions of named sets of tensors, kept for processes that are no members.

Theory of operation
-------------------
A *version* consists of *blocks*. A block is a buffer of a chunk, frozen as it was (the next update of the
chunk goes to another buffer), or bytes that rank 0 has put there. Nothing writes to a block, so all readers
get the same bits. Rank 0 gives all servers the blocks of a version, then announces it: to the others first,
and at last to server 0, which tells those that watch. So a version that a reader hears of is whole.

The newest complete versions stay, and those in use: a reader *retains* the version that it reads, until it
retains another one or says nothing for :data:`LEASE_S`. Where memory is short, a version that only readers
use goes before the trainer is refused.

Bytes that rank 0 puts there stay at first where they came, which may be rank 0's own memory: it goes on when
it has copied them once. The server copies a block when it has nothing else to do, or when one reads it.
:mod:`kvps.core.server.readers` serves those that read.

A return to a cut leaves publications alone: what was published stays what it was.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch

from kvps import protocol as p
from kvps.core.effects import Route, Send
from kvps.core.membership_client import MembershipClient
from kvps.core.server.chunks.slab import Buffer
from kvps.core.server.context import RequestContext
from kvps.core.server.memory_budget import MemoryBudget
from kvps.core.server.sessions import Describe, PendingRequest, Session
from kvps.dtypes import BY_ID, BY_NAME
from kvps.errors import ConfigError, Mismatch, Overload, ProtocolError
from kvps.phrases import ranks_in_words
from kvps.protocol.envelope import Message
from kvps.protocol.publications import KEEP_MAX
from kvps.tensors import from_frame

LEASE_S = 60.0
"""Seconds without a word after which a reader uses no version any more."""
PUBLICATIONS_MAX = 1024
READ_ONLY_MAX = 8
"""Versions of a publication that are there for readers alone."""
ANNOUNCED_KEPT = 64
SETTLE_BYTES, SETTLE_AFTER_S = 4 << 20, 0.02
"""Bytes that are copied at a time while nothing else is to do, and seconds for which readers have
said nothing by then: they wait for the processor, too."""
SHOWN_MAX = 64
"""Publications whose figures are shown, and versions of each whose readers are."""

ReaderId = tuple[int, int]
"""Rank and incarnation of a reader: numbers that it has drawn."""
Range = tuple[int, int, int]
"""A block, where bytes begin in it, and their number."""


@dataclass(slots=True, eq=False)
class Block:
    """A part of a version."""

    buffer: Buffer
    dtype: str
    """The type of its elements."""
    as_dtype: str
    """The type in which they are read."""
    lent: torch.Tensor | None = None
    """The bytes where they came, until all of them are in the buffer."""
    filled: int = 0
    """How many are, from the first one on."""

    @property
    def size(self) -> int:
        """Bytes as they are read."""
        return len(self.buffer.tensor) * BY_NAME[self.as_dtype].itemsize

    @property
    def layout(self) -> tuple[str, str, int]:
        """Its types and its size."""
        return self.dtype, self.as_dtype, self.size

    def fill(self, stop: int) -> bool:
        """Have the bytes before ``stop`` in the buffer; return whether any were to be copied."""
        if self.lent is None or stop <= self.filled:
            return False
        part = slice(self.filled, min(stop, self.size))
        self.buffer.tensor[part].copy_(self.lent[part])
        self.filled = part.stop
        if part.stop == self.size:
            self.lent = None
        return True


@dataclass(slots=True)
class Version:
    """One version of a publication, on this server."""

    blocks: dict[int, Block] = field(default_factory=dict)
    manifest: memoryview | None = None
    completed_at: float | None = None
    """When it was announced; None before."""
    relays: dict[Range, list[Reader]] = field(default_factory=dict)
    """The readers that have asked for a range and listen, in the order in which they came."""
    digests: dict[Range, str] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)
    """The ranks of relays that did not give what they were to give."""


@dataclass(slots=True)
class Publication:
    """The versions of one name."""

    store: str
    """The store that publishes it."""
    keep: int = 1
    versions: dict[int, Version] = field(default_factory=dict)
    last: int = 0
    """The highest number that was heard of."""
    announced: deque[int] = field(default_factory=lambda: deque(maxlen=ANNOUNCED_KEPT))
    """The last complete versions, some of which may be gone."""

    @property
    def newest(self) -> int:
        """The newest complete version; 0 before the first."""
        return self.announced[-1] if self.announced else 0

    def age_s(self, now: float) -> float:
        """Return the seconds for which the newest version is there; 0 if it is gone."""
        version = self.versions.get(self.newest)
        return 0.0 if version is None else max(0.0, now - (version.completed_at or now))


@dataclass(slots=True, eq=False)
class Reader:
    """One process that reads."""

    route: Route
    heard_at: float
    uses: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Publication -> the version that it retains, and the older one of which it has all bytes."""
    watches: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Publication -> the seq of its WATCH, and the version that it has."""
    away_bytes: int = 0
    away: dict[int, Route] = field(default_factory=dict)
    """The requests whose answers are on their way, and where."""
    counted_from: float = 0.0
    count: int = 0
    rank: int = 0
    endpoint: str = ""
    """Where it listens for other readers."""
    machine: int = 0
    """As in HELLO."""


class Publications:
    """The publications of a server, and the processes that read them.

    Args:
        member: this server's place in the job.
    """

    def __init__(self, member: MembershipClient) -> None:
        self._member = member
        self.context: RequestContext
        self._budget: MemoryBudget
        self.by_name: dict[str, Publication] = {}
        self.readers: dict[ReaderId, Reader] = {}
        self._users: Counter[int] = Counter()
        """By the identity of a buffer: the versions that it is a block of."""
        self._lent: deque[Block] = deque()
        """The blocks of complete versions that lie where they came."""
        self.settle_at = math.inf
        """When more of them is to be copied."""
        self.keeps_until = -math.inf
        """Until then versions stay whose readers this server, which was a standby, may not know yet."""

    def begin(self, context: RequestContext, budget: MemoryBudget) -> None:
        """Serve the workers of this context, whose values are counted in this budget, from now on."""
        self.context, self._budget, before = context, budget, getattr(self, "_budget", budget)
        budget.publications = before.publications
        context.more_gauges = self.gauges

    def clear(self) -> None:
        """Forget everything: another job begins."""
        for publication in self.by_name.values():
            for number in list(publication.versions):
                self._drop(publication, number)
        self.by_name.clear()
        self.readers.clear()

    @property
    def now(self) -> float:
        """The time."""
        return self.context.meter.now

    # --- the copy of another server -----------------------------------------------------------------

    def take_copy(
        self, message: p.CopyBlock | p.CopyVersion | p.CopyPublication, payload: Sequence[memoryview]
    ) -> None:
        """Take in what the server of this standby has.

        Raises:
            Overload: if there is no room for it.
        """
        publication = self.by_name.setdefault(message.publication, Publication(""))
        if isinstance(message, p.CopyPublication):
            publication.store, publication.keep, publication.last = message.store, message.keep, message.last
            publication.announced = deque(message.announced, ANNOUNCED_KEPT)
            for number in publication.versions.keys() - {*message.versions}:
                self._drop(publication, number)
            return
        publication.last = max(publication.last, message.number)
        version = publication.versions.setdefault(message.number, Version())
        if isinstance(message, p.CopyVersion):
            version.manifest = memoryview(bytes(payload[0])) if payload else None
            version.completed_at = self.now - message.age_s
            return
        dtype, as_dtype = BY_ID[message.dtype].name, BY_ID[message.as_dtype].name
        chunks = self.context.chunks
        buffer = chunks.at(message.block).buffer if message.is_chunk else None
        more = message.size if buffer is None else buffer.tensor.nbytes * (id(buffer) not in self._users)
        what = f"the copy of version {message.number} of publication {message.publication!r}"
        self._budget.demand_publication(what, more)
        if buffer is None:  # the payload may be memory of the primary, which will write to it
            values = from_frame(payload[0] if payload else memoryview(b""), dtype)
            buffer = Buffer(chunks.memory.empty(len(values), dtype).copy_(values))
        self._add(version, message.block, Block(buffer.hold(), dtype, as_dtype))

    # --- the worker that publishes ------------------------------------------------------------------

    def on_worker(self, session: Session, seq: int, message: Message, payload: Sequence[memoryview]) -> None:
        """Do what a worker asks.

        Raises:
            KvpsError: if it cannot be done; nothing was changed.
        """
        if isinstance(message, p.LastVersion):
            self._last(session, seq, message)
            return
        assert isinstance(message, p.Freeze | p.Put | p.Announce)
        self.context.demand_rank_0(session, "publish")
        if not 1 <= message.keep <= KEEP_MAX:
            raise ConfigError(f"keep must be 1 to {KEEP_MAX}, got {message.keep}")
        publication = self._of(message)
        if isinstance(message, p.Announce):
            self._announce(publication, message, payload)
        elif message.number >= publication.last:  # else again, of a version that is over
            version = self._version(publication, message)
            if isinstance(message, p.Freeze):
                self._freeze(publication, version, message)
            elif message.block not in version.blocks:
                self._put(publication, version, message, payload)
        self.context.send(session, p.Done(seq))
        if isinstance(message, p.Announce):
            self.context.retry()

    def _of(self, message: p.Freeze | p.Put | p.Announce) -> Publication:
        name, stores = message.publication, self.context.stores
        self.context.store(message.store)
        publication = self.by_name.get(name)
        if publication is None:
            if len(self.by_name) >= PUBLICATIONS_MAX:
                raise Overload(
                    f"publication {name!r} is one too many: a server has at most {PUBLICATIONS_MAX}",
                    limit="publications",
                )
            publication = self.by_name[name] = Publication(message.store)
        elif publication.store != message.store:
            if publication.store in stores:
                raise Mismatch(
                    f"store {publication.store!r} publishes {name!r} already, so store {message.store!r} "
                    "cannot: a publication has one publisher. Use another name, or close the other store"
                )
            publication.store = message.store
        return publication

    def _version(self, publication: Publication, message: p.Freeze | p.Put | p.Announce) -> Version:
        version = publication.versions.get(message.number)
        if version is None:
            version = publication.versions[message.number] = Version()
            publication.last = max(publication.last, message.number)
            publication.keep = message.keep
            self.prune(publication)
        return version

    def _freeze(self, publication: Publication, version: Version, message: p.Freeze) -> None:
        if version.completed_at is not None:
            return  # again
        if message.as_dtype and message.as_dtype not in BY_ID:
            raise ProtocolError(f"no element type has number {message.as_dtype}")
        chunks = [self.context.chunks.at(number) for number in message.chunks]
        for chunk in chunks:
            if chunk.store != message.store or chunk.embedding is not None:
                raise ProtocolError(f"chunk {chunk.number} has no keys of store {message.store!r}")
        buffers = {id(chunk.buffer): chunk.buffer.tensor.nbytes for chunk in chunks}
        more = sum([size for key, size in buffers.items() if key not in self._users])
        self._make_room(publication, message, more)
        for chunk in chunks:
            if chunk.number not in version.blocks:
                is_float = BY_NAME[chunk.dtype].kind != "int"
                as_dtype = BY_ID[message.as_dtype].name if message.as_dtype and is_float else chunk.dtype
                self._add(version, chunk.number, Block(chunk.buffer.hold(), chunk.dtype, as_dtype))

    def _put(
        self, publication: Publication, version: Version, message: p.Put, payload: Sequence[memoryview]
    ) -> None:
        self._make_room(publication, message, message.size)
        octets = from_frame(payload[0] if message.size else memoryview(b""), "uint8")
        buffer = Buffer(self.context.chunks.memory.empty(message.size, "uint8"))
        self._add(version, message.block, Block(buffer.hold(), "uint8", "uint8", octets))

    def _announce(self, publication: Publication, message: p.Announce, payload: Sequence[memoryview]) -> None:
        if message.number <= publication.newest:
            return  # again
        version = self._version(publication, message)
        if message.size:
            version.manifest = memoryview(bytes(payload[0]))
        version.completed_at = self.context.meter.now
        publication.announced.append(message.number)
        self.prune(publication)
        self._lent.extend([block for block in version.blocks.values() if block.lent is not None])
        self.settle_at = version.completed_at if self._lent else math.inf
        for reader in self.readers.values():
            seq, newer = reader.watches.get(message.publication, (0, 0))
            if seq and message.number > newer:
                del reader.watches[message.publication]
                self.say(reader, p.VersionIs(seq, message.number, 0.0))

    def say(self, reader: Reader, message: Message) -> None:
        """Tell a reader something that has no payload."""
        self.context.outbox.append(Send(reader.route, self._member.packet(message)))

    def _last(self, session: Session, seq: int, message: p.LastVersion) -> None:
        def retry() -> Message | None:
            publication = self.by_name.get(message.publication)
            if not message.least:
                return p.VersionIs(seq, publication.last if publication else 0)
            found = [n for n in (publication.announced if publication else ()) if n >= message.least]
            return p.VersionIs(seq, found[0]) if found else None

        def why(describe: Describe) -> str:
            return (
                f"{ranks_in_words([0], describe)} has not published version {message.least} of "
                f"{message.publication!r}"
            )

        self.context.attempt(session, seq, PendingRequest(retry, why, store=message.store))

    def settle(self) -> None:
        """Copy a part of a block that lies where it came, if there is one."""
        while self._lent and self._lent[0].lent is None:  # it is copied, or gone
            self._lent.popleft()
        if self._lent:
            self._lent[0].fill(self._lent[0].filled + SETTLE_BYTES)
        else:
            self.settle_at = math.inf

    # --- versions that come and go --------------------------------------------------------------------

    def _add(self, version: Version, number: int, block: Block) -> None:
        version.blocks[number] = block
        key = id(block.buffer)
        self._users[key] += 1
        if self._users[key] == 1:
            self._budget.publications += block.buffer.tensor.nbytes

    def _drop(self, publication: Publication, number: int) -> None:
        blocks = publication.versions.pop(number).blocks
        for block in blocks.values():
            self._discard(block)
        blocks.clear()

    def _discard(self, block: Block) -> None:
        block.lent = None
        block.buffer.release()
        key = id(block.buffer)
        self._users[key] -= 1
        if not self._users[key]:
            del self._users[key]
            self._budget.publications -= block.buffer.tensor.nbytes

    def _spare(self, publication: Publication) -> list[int]:
        """Return the versions, oldest first, that neither the publisher keeps nor is giving."""
        complete = [n for n, version in publication.versions.items() if version.completed_at is not None]
        kept = {publication.last, *sorted(complete)[-publication.keep :]}
        return [number for number in sorted(publication.versions) if number not in kept]

    def prune(self, publication: Publication) -> None:
        """Drop the versions that nobody keeps or uses."""
        name = next(name for name, known in self.by_name.items() if known is publication)
        heard_at: dict[int, float] = {}
        for reader in self.readers.values():
            for number in reader.uses.get(name, ()):
                heard_at[number] = max(heard_at.get(number, 0.0), reader.heard_at)
        spare = self._spare(publication)
        completed = {n: at for n in spare if (at := publication.versions[n].completed_at) is not None}
        if self.now < self.keeps_until:  # the former holder of the seat may have given these to readers
            got_at = self.keeps_until - LEASE_S
            heard_at = {n: 0.0 for n, at in completed.items() if at <= got_at} | heard_at
        used = sorted([n for n in completed if n in heard_at], key=heard_at.__getitem__)
        for number in {*spare} - {*used[-READ_ONLY_MAX:]}:
            self._drop(publication, number)

    def _make_room(self, publication: Publication, message: p.Freeze | p.Put, more: int) -> None:
        """See that there is room: versions that only readers use go first."""
        for other in (publication, *self.by_name.values()):
            for number in self._spare(other) if self._budget.lacks_room(more) else ():
                self._drop(other, number)
        what = f"version {message.number} of publication {message.publication!r}"
        self._budget.demand_publication(what, more)

    def figures(self) -> list[p.PublicationFigures]:
        """Return the figures of the first publications."""
        found = []
        for name, publication in islice(self.by_name.items(), SHOWN_MAX):
            newest = publication.newest if publication.newest in publication.versions else 0
            blocks = [block for version in publication.versions.values() for block in version.blocks.values()]
            sizes = {id(block.buffer): block.buffer.tensor.nbytes for block in blocks}  # they may share one
            uses = Counter(
                [str(reader.uses[name][0]) for reader in self.readers.values() if name in reader.uses]
            )
            readers = dict(uses.most_common(SHOWN_MAX))
            age_s = publication.age_s(self.now)
            found.append(p.PublicationFigures(name, newest, age_s, sum(sizes.values()), readers))
        return found

    def gauges(self) -> dict[tuple[str, str], float]:
        """Return the gauges of publications and readers, by metric and label."""
        values: dict[tuple[str, str], float] = {
            ("kvps_publications", ""): len(self.by_name),
            ("kvps_published_versions", ""): sum([len(each.versions) for each in self.by_name.values()]),
            ("kvps_readers", ""): len(self.readers),
        }
        for name, newest, age_s, size, readers in self.figures():
            if newest:
                values["kvps_publication_version", name] = newest
                values["kvps_publication_age_seconds", name] = age_s
            values["kvps_publication_bytes", name] = size
            for version, count in readers.items():
                values["kvps_publication_readers", f"{version},{name}"] = count
        return values
