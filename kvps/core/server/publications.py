"""Publications on a server: versions of named sets of tensors, kept for processes that are no members.

Theory of operation
-------------------
A *version* consists of *blocks*. A block is a buffer of a chunk, frozen as it was (the next update of the
chunk goes to another buffer), or bytes that rank 0 has put there. Nothing writes to a block, so all readers
get the same bits. Rank 0 gives all servers the blocks of a version, then announces it: to the others first,
and at last to server 0, which tells those that watch. So a version that a reader hears of is whole.

The newest complete versions stay, and those in use: a reader *retains* the version that it reads, until it
retains another one or says nothing for :data:`LEASE_S`. Where memory is short, a version that only readers
use goes before the trainer is refused. What is on its way to readers is limited, too: a request beyond the
limit is dropped, and its reader makes it again. So no reader can keep memory, or hold up anybody.

Bytes that rank 0 puts there stay at first where they came, which may be rank 0's own memory: it goes on when
it has copied them once. The server copies a block when it has nothing else to do, or when one reads it.

Readers that listen pass on what they read. Those that ask for a range stand in a list, in the order in which
they came: the first gets the bytes, and each next one is sent to one before it, on its own host if there is
one. All ask in the same order, so each is first for some ranges, and all links are in use at
once. The server tells the digest of the range, so a relay can give nothing else. Nobody is sent to a relay
that has failed, as long as this version is read, nor to a reader that has left or reads another version.

A return to a cut leaves publications alone: what was published stays what it was.
"""

from __future__ import annotations

import hashlib
import math
import re
import zlib
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import numpy as np

from kvps import protocol as p
from kvps.core.deltas import difference
from kvps.core.effects import Effect, Note, Route, Send
from kvps.core.membership_client import MembershipClient, check_protocol
from kvps.core.relay import KEPT_S
from kvps.core.server.chunks.slab import Buffer
from kvps.core.server.context import RequestContext
from kvps.core.server.memory_budget import MemoryBudget
from kvps.core.server.sessions import Describe, PendingRequest, Session
from kvps.dtypes import BY_ID, BY_NAME
from kvps.errors import ConfigError, KeyNotFound, Mismatch, Overload, ProtocolError
from kvps.phrases import ranks_in_words
from kvps.protocol.envelope import Answer, Envelope, Message, Packet
from kvps.protocol.publications import CHANGES_BYTES_MAX, KEEP_MAX, READ_BYTES_MAX
from kvps.tensors import PRIVATE, Memory, from_frame, to_frame

LEASE_S = 60.0
"""Seconds without a word after which a reader uses no version any more."""
IDLE_S = 3.0
"""Seconds of silence after which a reader makes place for another: each that waits speaks every second."""
READERS_MAX = 1024
PUBLICATIONS_MAX = 1024
READ_ONLY_MAX = 8
"""Versions of a publication that are there for readers alone."""
WATCHES_MAX = 16
"""Publications that one reader watches."""
AWAY_BYTES_MAX, COPIES_BYTES_MAX = 64 << 20, 512 << 20
"""Bytes on their way to one reader, and those to all readers that were copied for it."""
MESSAGES_MAX = 4096
"""Requests of one reader in a second."""
AWAY_MAX = 64
"""Messages on their way to one reader: each may keep a whole buffer."""
ANNOUNCED_KEPT = 64
NAMES_MAX = 16
SHOWN_MAX = 64
"""Publications of which there are gauges."""
CHAIN = 16
"""Readers through which a range goes one by one, so that no link carries it twice; the next form a tree."""
RANGES_MAX, RELAYS_MAX = 1 << 16, 1 << 10
"""Ranges of a version that relays have, and readers that are in the list of one range."""
ENDPOINT = re.compile(r"tcp://\d{1,3}(\.\d{1,3}){3}:\d{1,5}", re.ASCII)
"""Where a reader may listen. For a name others would ask a resolver, which may hold up all that they do."""
WIDTHS = (1, 2, 4, 8)
"""Bytes of an element."""

ReaderId = tuple[int, int]
"""Rank and incarnation of a reader: numbers that it has drawn."""
Range = tuple[int, int, int]
"""A block, where bytes begin in it, and their number."""


class Block(NamedTuple):
    """A part of a version."""

    buffer: Buffer
    dtype: str
    """The type of its elements."""
    as_dtype: str
    """The type in which they are read."""
    is_lent: bool = False
    """It lies where it came."""

    @property
    def size(self) -> int:
        """Bytes as they are read."""
        return len(self.buffer.tensor) * BY_NAME[self.as_dtype].itemsize


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


class Away:
    """Bytes on their way to a reader."""

    __slots__ = ("_all", "_buffer", "_reader", "_seq", "_size")

    def __init__(
        self, reader: Reader, size: int, buffer: Buffer | None, all_copies: Counter[str], seq: int | None
    ) -> None:
        self._reader, self._size, self._buffer, self._all = reader, size, buffer, all_copies
        self._seq = seq
        reader.away_bytes += size
        if seq is not None:
            reader.away[seq] = reader.route
        if buffer is None:
            all_copies["bytes"] += size
        else:
            buffer.hold()

    def release(self) -> None:
        """They have been read, or nobody will read them."""
        self._reader.away_bytes -= self._size
        if self._seq is not None:
            self._reader.away.pop(self._seq, None)
        if self._buffer is None:
            self._all["bytes"] -= self._size
        else:
            self._buffer.release()


class Publications:
    """The publications of a server, and the processes that read them.

    Args:
        member: this server's place in the job.
        outbox: for what is to be said.
    """

    def __init__(self, member: MembershipClient, outbox: list[Effect]) -> None:
        self._member, self._outbox = member, outbox
        self._context: RequestContext
        self._budget: MemoryBudget
        self.by_name: dict[str, Publication] = {}
        self.readers: dict[ReaderId, Reader] = {}
        self._copies: Counter[str] = Counter()
        self._users: Counter[int] = Counter()
        """By the identity of a buffer: the versions that it is a block of."""
        self._lent: deque[tuple[Version, int]] = deque()
        """The blocks of complete versions that lie where they came."""
        self.settle_at = math.inf
        """When the next of them is to be copied."""
        self.keeps_until = -math.inf
        """Until then versions stay whose readers this server, which was a standby, may not know yet."""
        self._is_crowded = False
        """The log says that there are too many readers."""

    def begin(self, context: RequestContext, budget: MemoryBudget) -> None:
        """Serve the workers of this context, whose values are counted in this budget, from now on."""
        self._context, self._budget, before = context, budget, getattr(self, "_budget", budget)
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
        return self._context.meter.now

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
        chunks = self._context.chunks
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
        self._context.demand_rank_0(session, "publish")
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
        self._context.send(session, p.Done(seq))
        if isinstance(message, p.Announce):
            self._context.retry()

    def _of(self, message: p.Freeze | p.Put | p.Announce) -> Publication:
        name, stores = message.publication, self._context.stores
        self._context.store(message.store)
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

    def _version(self, publication: Publication, message: p.Freeze | p.Put) -> Version:
        version = publication.versions.get(message.number)
        if version is None:
            version = publication.versions[message.number] = Version()
            publication.last, publication.keep = message.number, message.keep
            self._prune(publication)
        return version

    def _freeze(self, publication: Publication, version: Version, message: p.Freeze) -> None:
        if version.completed_at is not None:
            return  # again
        if message.as_dtype and message.as_dtype not in BY_ID:
            raise ProtocolError(f"no element type has number {message.as_dtype}")
        chunks = [self._context.chunks.at(number) for number in message.chunks]
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
        self._add(version, message.block, Block(Buffer(octets).hold(), "uint8", "uint8", is_lent=True))

    def _announce(self, publication: Publication, message: p.Announce, payload: Sequence[memoryview]) -> None:
        version = publication.versions.get(message.number)
        if message.number <= publication.newest:
            return  # again
        if version is None:  # no part of it is here
            version = publication.versions[message.number] = Version()
            publication.last = max(publication.last, message.number)
        publication.keep = message.keep
        if message.size:
            version.manifest = memoryview(bytes(payload[0]))
        version.completed_at = self._context.meter.now
        publication.announced.append(message.number)
        self._prune(publication)
        self._lent.extend([(version, number) for number, block in version.blocks.items() if block.is_lent])
        self.settle_at = version.completed_at if self._lent else math.inf
        for reader in self.readers.values():
            seq, newer = reader.watches.get(message.publication, (0, 0))
            if seq and message.number > newer:
                del reader.watches[message.publication]
                self._say(reader, p.VersionIs(seq, message.number, 0.0))

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

        self._context.attempt(session, seq, PendingRequest(retry, why, store=message.store))

    def settle(self) -> None:
        """Copy one block that lies where it came, if there is one."""
        if self._lent:
            version, number = self._lent.popleft()
            if number in version.blocks:  # else it is gone
                self._own(version, number)
        if not self._lent:
            self.settle_at = math.inf

    def _own(self, version: Version, number: int) -> Block:
        """Return a block in this server's memory, which can be lent to readers."""
        block = version.blocks[number]
        if block.is_lent:
            tensor = self._context.chunks.memory.empty(block.size, "uint8")
            tensor.copy_(block.buffer.tensor)
            self._discard(block)
            block = block._replace(buffer=Buffer(tensor).hold(), is_lent=False)
            self._add(version, number, block)
        return block

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

    def _prune(self, publication: Publication) -> None:
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
        used = [n for n in completed if n in heard_at]
        used.sort(key=heard_at.__getitem__)
        for number in {*spare} - {*used[-READ_ONLY_MAX:]}:
            self._drop(publication, number)

    def _make_room(self, publication: Publication, message: p.Freeze | p.Put, more: int) -> None:
        """See that there is room: versions that only readers use go first."""
        for other in (publication, *self.by_name.values()):
            for number in self._spare(other) if self._budget.lacks_room(more) else ():
                self._drop(other, number)
        what = f"version {message.number} of publication {message.publication!r}"
        self._budget.demand_publication(what, more)

    # --- those that read --------------------------------------------------------------------------------

    def admit(self, envelope: Envelope, kind: type[Message]) -> bool:
        """Judge a packet of a reader by its envelope.

        Raises:
            Mismatch: if it is of another job, or has not said HELLO.
        """
        if self._member.welcome is None:
            return False
        if envelope.job != self._member.job:
            raise Mismatch(
                f"{self._context.me} serves another job than this reader reads from; ask the scheduler"
            )
        if kind is not p.Hello and (envelope.rank, envelope.incarnation) not in self.readers:
            raise Mismatch(f"{self._context.me} expects HELLO first from a reader")
        return True

    def on_reader(self, route: Route, packet: Packet, now: float) -> None:
        """A reader said something.

        Raises:
            KvpsError: if it is refused.
        """
        envelope, message = packet.envelope, packet.message
        who = (envelope.rank, envelope.incarnation)
        reader = self.readers.get(who)
        if reader is None:
            if len(self.readers) >= READERS_MAX:
                self._make_place(now)
            reader = self.readers[who] = Reader(route, now)
        reader.route = route
        if now >= reader.counted_from + 1.0:
            reader.counted_from, reader.count = now, 0
        reader.count += 1
        if reader.count > MESSAGES_MAX:
            self._context.meter.add("kvps_dropped_packets_total", "reads")
            return
        reader.heard_at = now
        match message:
            case p.Hello():
                check_protocol(message, self._context.me)
                reader.rank, reader.machine = envelope.rank, message.machine
                reader.endpoint = message.endpoint if ENDPOINT.fullmatch(message.endpoint) else ""
                welcome = self._member.welcome
                assert welcome is not None, "admit() looks"
                sizes = welcome.workers, welcome.servers
                self._say(reader, p.Welcome(envelope.rank, envelope.incarnation, *sizes))
            case p.Watch():
                self._watch(reader, envelope.seq, message, now)
            case p.Retain():
                self._retain(reader, envelope.seq, message)
            case p.Read() | p.ReadChanges():
                self._read(reader, envelope.seq, message)
            case _:
                raise ProtocolError(f"a reader may not send {type(message).__name__} to a server")

    def _make_place(self, now: float) -> None:
        """End the lease of the reader that is silent longest.

        Raises:
            Overload: if none is silent.
        """
        who, reader = min(self.readers.items(), key=lambda item: item[1].heard_at)
        if now < reader.heard_at + IDLE_S:
            raise Overload(f"{self._context.me} has {READERS_MAX} readers already", limit="readers")
        del self.readers[who]
        if not self._is_crowded:
            self._is_crowded = True
            text = (
                f"{self._context.me} has {READERS_MAX} readers: those that are silent longest lose their "
                "leases. A holder of a reader's key may make many readers"
            )
            self._outbox.append(Note("warning", text))

    def _watch(self, reader: Reader, seq: int, message: p.Watch, now: float) -> None:
        name = message.publication
        publication = self.by_name.get(name)
        newest = 0 if publication is None else publication.newest
        if newest <= message.newer:
            if name not in reader.watches and len(reader.watches) >= WATCHES_MAX:
                raise Overload(f"a reader watches {WATCHES_MAX} publications at most", limit="watches")
            reader.watches[name] = (seq, message.newer)
        age_s, names = 0.0, list[str]()
        if publication is not None and newest in publication.versions:
            age_s = now - (publication.versions[newest].completed_at or now)
        if not newest:
            names = sorted([known for known, other in self.by_name.items() if other.newest])[:NAMES_MAX]
        self._say(reader, p.VersionIs(seq, newest, max(0.0, age_s), tuple(names)))

    def _retain(self, reader: Reader, seq: int, message: p.Retain) -> None:
        name = message.publication
        version = self._found(name, message.number) if message.number else None
        reader.watches.pop(name, None)
        reader.uses.pop(name, None)
        if message.number:
            reader.uses[name] = message.number, message.base
        if name in self.by_name:
            self._prune(self.by_name[name])
        manifest = version.manifest if version is not None and message.wants_manifest else None
        if manifest is None:
            self._say(reader, p.Retained(seq))
        else:
            self._send(reader, p.Retained(seq, len(manifest)), manifest, None)

    def _read(self, reader: Reader, seq: int, message: p.Read | p.ReadChanges) -> None:
        name, size = message.publication, message.size
        version = self._found(name, message.number)
        if self.now < self.keeps_until:
            reader.uses.setdefault(name, (message.number, 0))
        block = version.blocks.get(message.block)
        start, stop, width = message.start, message.start + size, 1
        most, unit = READ_BYTES_MAX, 1 if block is None else BY_NAME[block.as_dtype].itemsize
        if isinstance(message, p.ReadChanges):
            most, width = CHANGES_BYTES_MAX, message.width if message.width in WIDTHS else 0
        whole = max(unit, width)
        if (
            block is None
            or not width
            or not 0 < size <= most
            or stop > block.size
            or start % whole
            or size % whole
        ):
            raise ProtocolError(
                f"octets {start} to {stop} of block {message.block} of {name!r} cannot be read"
            )
        if reader.away.get(seq) == reader.route:
            return  # the answer is under way
        if reader.away_bytes + size > AWAY_BYTES_MAX or len(reader.away) >= AWAY_MAX:
            self._context.meter.add("kvps_dropped_packets_total", "reads")
            return  # it is asked for again
        is_copy = isinstance(message, p.ReadChanges) or block.as_dtype != block.dtype
        if is_copy and reader.away_bytes and self._copies["bytes"] + size > COPIES_BYTES_MAX:
            return  # readers may hang
        block = self._own(version, message.block)
        if isinstance(message, p.ReadChanges) and self._give_changes(reader, seq, message, block):
            return
        if isinstance(message, p.Read) and message.without and len(version.failed) < RELAYS_MAX:
            version.failed.add(message.without)
        if message.relays and reader.endpoint:
            place = message.block, start, size
            relay = self._relay_for(reader, place, message)
            if relay is not None:
                if place not in version.digests:
                    octets = self._octets(block, start, stop, PRIVATE)
                    version.digests[place] = hashlib.sha256(octets).hexdigest()
                self._say(reader, p.Elsewhere(seq, relay.endpoint, relay.rank, version.digests[place]))
                return
        octets = self._octets(block, start, stop, self._context.chunks.memory)
        self._send(
            reader, p.Octets(seq, size), octets, block.buffer if block.as_dtype == block.dtype else None
        )

    def _relay_for(self, reader: Reader, place: Range, message: p.Read | p.ReadChanges) -> Reader | None:
        """Return the reader that has these bytes for another one, or is about to; None for the first.

        One that reads another version by now has them no more, nor has one that has been silent for as long
        as relays keep them.
        """
        name, number = message.publication, message.number
        version = self.by_name[name].versions[number]
        if len(version.relays) >= RANGES_MAX and place not in version.relays:
            return None
        relays = version.relays.setdefault(place, [])
        at = relays.index(reader) if reader in relays else len(relays)
        if at == len(relays) < RELAYS_MAX:
            relays.append(reader)
        before = [
            relay
            for relay in relays[:at]
            if relay.rank not in version.failed
            and relay.uses.get(name, (0, 0))[0] == number
            and self.now < relay.heard_at + KEPT_S
        ]
        near = [relay for relay in before if 0 != relay.machine == reader.machine] or before
        return near[-1 if len(near) < CHAIN else (len(near) - 1) // 2] if near else None

    def _give_changes(self, reader: Reader, seq: int, message: p.ReadChanges, block: Block) -> bool:
        """Answer with what has changed; return whether that can be said, and in fewer bytes."""
        base = self.by_name[message.publication].versions.get(message.base)
        older = None if base is None or base.completed_at is None else base.blocks.get(message.block)
        if older is None or (older.dtype, older.as_dtype, older.size) != (
            block.dtype,
            block.as_dtype,
            block.size,
        ):
            return False
        if older.buffer is block.buffer and not message.proves:
            self._say(reader, p.Changes(seq))
            return True
        ends = message.start, message.start + message.size
        old, new = (np.frombuffer(self._octets(part, *ends, PRIVATE), np.uint8) for part in (older, block))
        delta = difference(old, new, message.width)
        if delta is None:
            return False
        answer = p.Changes(seq, delta.sent, delta.runs, 1 << 32 | zlib.crc32(new.data), len(delta.octets))
        if delta.octets:
            self._send(reader, answer, memoryview(delta.octets), None)
        else:
            self._say(reader, answer)
        return True

    @staticmethod
    def _octets(block: Block, start: int, stop: int, memory: Memory) -> memoryview:
        """Return bytes of a block in the type in which they are read; where it has another, in new memory."""
        if block.as_dtype == block.dtype:
            return block.buffer.octets[start:stop]
        width = BY_NAME[block.as_dtype].itemsize
        values = memory.empty((stop - start) // width, block.as_dtype)
        return to_frame(values.copy_(block.buffer.tensor[start // width : stop // width]))

    def _found(self, name: str, number: int) -> Version:
        publication = self.by_name.get(name)
        version = None if publication is None else publication.versions.get(number)
        if publication is None or version is None or version.completed_at is None:
            newest = (
                "none" if publication is None or not publication.newest else f"version {publication.newest}"
            )
            raise KeyNotFound(
                f"version {number} of {name!r} is gone ({newest} is the newest): old versions go if their "
                f"readers say nothing for {LEASE_S:.0f} s, or where memory is short. "
                "Call wait() for a newer one"
            )
        return version

    def _say(self, reader: Reader, message: Message) -> None:
        self._context.outbox.append(Send(reader.route, self._member.packet(message)))

    def _send(self, reader: Reader, message: Answer, frame: memoryview, buffer: Buffer | None) -> None:
        seq = None if isinstance(message, p.Changes) else message.seq  # changes are small, and keep no buffer
        packet = Packet(self._member.envelope(), message, (frame,))
        self._context.meter.on_send(packet.payload)
        self._context.outbox.append(
            Send(reader.route, packet, Away(reader, frame.nbytes, buffer, self._copies, seq))
        )

    def expire(self, now: float) -> None:
        """Forget the readers that have said nothing for a while, and what only they used."""
        for who in [who for who, reader in self.readers.items() if now >= reader.heard_at + LEASE_S]:
            del self.readers[who]
        for publication in self.by_name.values():
            self._prune(publication)

    def gauges(self) -> dict[tuple[str, str], float]:
        """Return the gauges of publications and readers, by metric and label."""
        values: defaultdict[tuple[str, str], float] = defaultdict(float)
        values["kvps_publications", ""] = len(self.by_name)
        values["kvps_published_versions", ""] = sum([len(each.versions) for each in self.by_name.values()])
        values["kvps_readers", ""] = len(self.readers)
        for name, publication in islice(self.by_name.items(), SHOWN_MAX):
            newest = publication.versions.get(publication.newest)
            if newest is not None and newest.completed_at is not None:
                age_s = max(0.0, self._context.meter.now - newest.completed_at)
                values["kvps_publication_version", name] = publication.newest
                values["kvps_publication_age_seconds", name] = age_s
            blocks = [block for version in publication.versions.values() for block in version.blocks.values()]
            sizes = {
                id(block.buffer): block.buffer.tensor.nbytes for block in blocks
            }  # versions may share one
            values["kvps_publication_bytes", name] = sum(sizes.values())
            for reader in self.readers.values():
                if name in reader.uses:
                    values["kvps_publication_readers", f"{reader.uses[name][0]},{name}"] += 1
        return {**values}
