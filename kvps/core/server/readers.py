"""Processes that read what is published on a server: their requests, their leases, and the bytes they get.

What is on its way to readers is limited: a request beyond the limit is dropped, and its reader makes it
again. So no reader can keep memory, or hold up anybody.

Readers that listen pass on what they read. Those that ask for a range stand in a list, in the order in which
they came: the first gets the bytes, and each next one is sent to one before it, on its own host if there is
one. All ask in the same order, so each is first for some ranges, and all links are in use at
once. The server tells the digest of the range, so a relay can give nothing else. Nobody is sent to a relay
that has failed, as long as this version is read, nor to a reader that has left or reads another version.
"""

from __future__ import annotations

import hashlib
import re
import zlib

import numpy as np

from kvps import protocol as p
from kvps.core.deltas import difference
from kvps.core.effects import Note, Route, Send
from kvps.core.membership_client import MembershipClient, check_protocol
from kvps.core.relay import KEPT_S, Away
from kvps.core.server.chunks.slab import Buffer
from kvps.core.server.publications import LEASE_S, SETTLE_AFTER_S, Block, Publications, Range, Reader, Version
from kvps.dtypes import BY_NAME
from kvps.errors import KeyNotFound, Mismatch, Overload, ProtocolError
from kvps.protocol.envelope import Answer, Envelope, Message, Packet
from kvps.protocol.publications import CHANGES_BYTES_MAX, READ_BYTES_MAX
from kvps.tensors import PRIVATE, Memory, to_frame

IDLE_S = 3.0
"""Seconds of silence after which a reader makes place for another: each that waits speaks every second."""
READERS_MAX = 1024
WATCHES_MAX = 16
"""Publications that one reader watches."""
AWAY_BYTES_MAX, COPIES_BYTES_MAX = 64 << 20, 512 << 20
"""Bytes on their way to one reader, and those to all readers that were copied for it."""
MESSAGES_MAX = 4096
"""Requests of one reader in a second."""
AWAY_MAX = 64
"""Messages on their way to one reader: each may keep a whole buffer."""
NAMES_MAX = 16
CHAIN = 16
"""Readers through which a range goes one by one, so that no link carries it twice; the next form a tree."""
RANGES_MAX, RELAYS_MAX = 1 << 16, 1 << 10
"""Ranges of a version that relays have, and readers that are in the list of one range."""
ENDPOINT = re.compile(r"tcp://\d{1,3}(\.\d{1,3}){3}:\d{1,5}", re.ASCII)
"""Where a reader may listen. For a name others would ask a resolver, which may hold up all that they do."""
WIDTHS = (1, 2, 4, 8)
"""Bytes of an element."""


class Readers:
    """The readers of a server's publications: their requests are judged and answered here.

    Args:
        publications: what there is to read, and who reads.
        member: this server's place in the job.
    """

    def __init__(self, publications: Publications, member: MembershipClient) -> None:
        self._published, self._member = publications, member
        self._copied_bytes = 0
        """Bytes on their way to readers that were copied for them."""
        self._is_crowded = False
        """The log says that there are too many readers."""

    def admit(self, envelope: Envelope, kind: type[Message]) -> bool:
        """Judge a packet of a reader by its envelope.

        Raises:
            Mismatch: if it is of another job, or has not said HELLO.
        """
        if self._member.welcome is None:
            return False
        me = self._published.context.me
        if envelope.job != self._member.job:
            raise Mismatch(f"{me} serves another job than this reader reads from; ask the scheduler")
        if kind is not p.Hello and (envelope.rank, envelope.incarnation) not in self._published.readers:
            raise Mismatch(f"{me} expects HELLO first from a reader")
        return True

    def on_reader(self, route: Route, packet: Packet, now: float) -> None:
        """A reader said something.

        Raises:
            KvpsError: if it is refused.
        """
        envelope, message = packet.envelope, packet.message
        who = (envelope.rank, envelope.incarnation)
        reader = self._published.readers.get(who)
        if reader is None:
            if len(self._published.readers) >= READERS_MAX:
                self._make_place(now)
            reader = self._published.readers[who] = Reader(route, now)
        reader.route = route
        if now >= reader.counted_from + 1.0:
            reader.counted_from, reader.count = now, 0
        reader.count += 1
        if reader.count > MESSAGES_MAX:
            self._published.context.meter.add("kvps_dropped_packets_total", "reads")
            return
        reader.heard_at = now
        match message:
            case p.Hello():
                check_protocol(message, self._published.context.me)
                reader.rank, reader.machine = envelope.rank, message.machine
                reader.endpoint = message.endpoint if ENDPOINT.fullmatch(message.endpoint) else ""
                welcome = self._member.welcome
                assert welcome is not None, "admit() looks"
                sizes = welcome.workers, welcome.servers
                self._published.say(reader, p.Welcome(envelope.rank, envelope.incarnation, *sizes))
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
        who, reader = min(self._published.readers.items(), key=lambda item: item[1].heard_at)
        if now < reader.heard_at + IDLE_S:
            raise Overload(f"{self._published.context.me} has {READERS_MAX} readers already", limit="readers")
        del self._published.readers[who]
        if not self._is_crowded:
            self._is_crowded = True
            text = (
                f"{self._published.context.me} has {READERS_MAX} readers: those that are silent longest lose "
                "their leases. A holder of a reader's key may make many readers"
            )
            self._published.context.outbox.append(Note("warning", text))

    def _watch(self, reader: Reader, seq: int, message: p.Watch, now: float) -> None:
        name = message.publication
        publication = self._published.by_name.get(name)
        newest, age_s = (0, 0.0) if publication is None else (publication.newest, publication.age_s(now))
        if newest <= message.newer:
            if name not in reader.watches and len(reader.watches) >= WATCHES_MAX:
                raise Overload(f"a reader watches {WATCHES_MAX} publications at most", limit="watches")
            reader.watches[name] = (seq, message.newer)
        there = () if newest else self._published.by_name.items()
        names = sorted([known for known, other in there if other.newest])[:NAMES_MAX]
        self._published.say(reader, p.VersionIs(seq, newest, age_s, tuple(names)))

    def _retain(self, reader: Reader, seq: int, message: p.Retain) -> None:
        name = message.publication
        version = self._found(name, message.number) if message.number else None
        reader.watches.pop(name, None)
        reader.uses.pop(name, None)
        if message.number:
            reader.uses[name] = message.number, message.base
        if name in self._published.by_name:
            self._published.prune(self._published.by_name[name])
        manifest = version.manifest if version is not None and message.wants_manifest else None
        if manifest is None:
            self._published.say(reader, p.Retained(seq))
        else:
            self._send(reader, p.Retained(seq, len(manifest)), manifest, None)

    def _read(self, reader: Reader, seq: int, message: p.Read | p.ReadChanges) -> None:
        name, size = message.publication, message.size
        version = self._found(name, message.number)
        if self._published.now < self._published.keeps_until:
            reader.uses.setdefault(name, (message.number, 0))
        block = version.blocks.get(message.block)
        start, stop, width = message.start, message.start + size, 1
        most, unit = READ_BYTES_MAX, 1 if block is None else BY_NAME[block.as_dtype].itemsize
        if isinstance(message, p.ReadChanges):
            most, width = CHANGES_BYTES_MAX, message.width if message.width in WIDTHS else 0
        is_whole = not start % max(unit, width) and not size % max(unit, width)
        if block is None or not width or not is_whole or not 0 < size <= most or stop > block.size:
            raise ProtocolError(
                f"octets {start} to {stop} of block {message.block} of {name!r} cannot be read"
            )
        if reader.away.get(seq) == reader.route:
            return  # the answer is under way
        if reader.away_bytes + size > AWAY_BYTES_MAX or len(reader.away) >= AWAY_MAX:
            self._published.context.meter.add("kvps_dropped_packets_total", "reads")
            return  # it is asked for again
        is_copy = isinstance(message, p.ReadChanges) or block.as_dtype != block.dtype
        if is_copy and reader.away_bytes and self._copied_bytes + size > COPIES_BYTES_MAX:
            return  # readers may hang
        if block.fill(stop):
            self._published.settle_at = self._published.now + SETTLE_AFTER_S
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
                self._published.say(
                    reader, p.Elsewhere(seq, relay.endpoint, relay.rank, version.digests[place])
                )
                return
        octets = self._octets(block, start, stop, self._published.context.chunks.memory)
        self._send(
            reader, p.Octets(seq, size), octets, block.buffer if block.as_dtype == block.dtype else None
        )

    def _relay_for(self, reader: Reader, place: Range, message: p.Read | p.ReadChanges) -> Reader | None:
        """Return the reader that has these bytes for another one, or is about to; None for the first.

        One that reads another version by now has them no more, nor has one that has been silent for as long
        as relays keep them.
        """
        name, number = message.publication, message.number
        version = self._published.by_name[name].versions[number]
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
            and self._published.now < relay.heard_at + KEPT_S
        ]
        near = [relay for relay in before if 0 != relay.machine == reader.machine] or before
        return near[-1 if len(near) < CHAIN else (len(near) - 1) // 2] if near else None

    def _give_changes(self, reader: Reader, seq: int, message: p.ReadChanges, block: Block) -> bool:
        """Answer with what has changed; return whether that can be said, and in fewer bytes."""
        base = self._published.by_name[message.publication].versions.get(message.base)
        older = None if base is None or base.completed_at is None else base.blocks.get(message.block)
        if older is None or older.layout != block.layout:
            return False
        if older.buffer is block.buffer and not message.proves:
            self._published.say(reader, p.Changes(seq))
            return True
        ends = message.start, message.start + message.size
        older.fill(ends[1])
        old, new = (np.frombuffer(self._octets(part, *ends, PRIVATE), np.uint8) for part in (older, block))
        delta = difference(old, new, message.width)
        if delta is None:
            return False
        answer = p.Changes(seq, delta.sent, delta.runs, 1 << 32 | zlib.crc32(new.data), len(delta.octets))
        if delta.octets:
            self._send(reader, answer, memoryview(delta.octets), None)
        else:
            self._published.say(reader, answer)
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
        publication = self._published.by_name.get(name)
        version = None if publication is None else publication.versions.get(number)
        if publication is None or version is None or version.completed_at is None:
            there = f"version {publication.newest}" if publication and publication.newest else "none"
            raise KeyNotFound(
                f"version {number} of {name!r} is gone ({there} is the newest): old versions go if their "
                f"readers say nothing for {LEASE_S:.0f} s, or where memory is short. "
                "Call wait() for a newer one"
            )
        return version

    def _send(self, reader: Reader, message: Answer, frame: memoryview, buffer: Buffer | None) -> None:
        size, copied = frame.nbytes, 0 if buffer is not None else frame.nbytes

        def release() -> None:
            reader.away_bytes -= size
            self._copied_bytes -= copied
            reader.away.pop(message.seq, None)
            if buffer is not None:
                buffer.release()

        reader.away_bytes += size
        self._copied_bytes += copied
        if not isinstance(message, p.Changes):  # they are small, and keep no buffer
            reader.away[message.seq] = reader.route
        if buffer is not None:
            buffer.hold()
        packet = Packet(self._member.envelope(), message, (frame,))
        self._published.context.meter.on_send(packet.payload)
        self._published.context.outbox.append(Send(reader.route, packet, Away(release)))

    def expire(self, now: float) -> None:
        """Forget the readers that have said nothing for a while, and what only they used."""
        for who in [
            who for who, reader in self._published.readers.items() if now >= reader.heard_at + LEASE_S
        ]:
            del self._published.readers[who]
        for publication in self._published.by_name.values():
            self._published.prune(publication)
