"""Payload through shared memory where both ends are on one host: lent, read in place, and given back.

A core sends packets with payload and knows nothing of this. Where a payload lies in this process's segment
and the peer has mapped that, loans of it travel in place of its bytes; where a packet comes with loans, its
payload is read where it lies. So a caller that wants to send without a copy only has to put its values into
the segment.

The end that opens a data connection offers its segment after every WELCOME; the other end maps it, offers its
own, and reports that it has mapped. A process lends only to a peer whose memory it could map: so each can see
that the other has ended, and take back what it lent. Until then, and where that fails, payload travels in
frames.

A peer is a process, known by the nonce of its segment: it may come back along another connection,
or with another incarnation, and still holds what it held.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter

import torch

from kvps.core.effects import Connect, Hold, Route
from kvps.core.texts import shown
from kvps.dtypes import BY_NAME
from kvps.errors import KvpsError, ProtocolError
from kvps.net.memory import keep_freed_memory
from kvps.net.shm.leases import Borrowed, Lent, PostingsOfPeer
from kvps.net.shm.page_remap import PageRemapper
from kvps.net.shm.segment import Mapping, Segment, Unshared
from kvps.net.transport import Demanded, Disconnected, Encoding, Refusals, Transport, Unserved
from kvps.protocol.envelope import Envelope, Loan, Message, Packet, maker
from kvps.protocol.membership import Welcome
from kvps.protocol.transports import Offer, Release, Taken
from kvps.tensors import PRIVATE, TORCH, keep_frame

log = logging.getLogger("kvps")
_nbytes: Callable[[memoryview], int] = attrgetter("nbytes")
_packet, _loan = maker(Packet), maker(Loan)
_OF_MEMORY = frozenset({Offer, Taken, Release})

LOANS_MAX = 255
"""In how many places the payload of one packet may lie: a byte counts them."""
SHARE_MIN_BYTES = 4096
"""Payload below this travels in frames: that is cheaper than a loan."""
RELEASE_EVERY = 16
"""Leases that are given back before a busy loop says so; an idle one says so at once."""
POST_EVERY = 4
"""Leases of one peer that are given back before a loop posts so that is not through with its packets."""
SWEEP_EVERY_S = 5.0
"""How often it is asked whether those whose memory is mapped still live."""
WELCOMED_MAX = 4096
"""How many members, the last ones, are known to have been answered."""


class Peer:
    """Another process whose memory is mapped here."""

    def __init__(self, route: Route, mapping: Mapping, posted: PostingsOfPeer) -> None:
        self.route = route
        self.mapping = mapping
        self.reads_ours = False
        self.posts = False
        """It posts the leases that it returns, and reads our postings."""
        self.posted = posted
        self.given = Lent()
        self.taken = Borrowed()


class SharingTransport:
    """A transport whose payload travels through shared memory where it can."""

    def __init__(
        self,
        inner: Transport,
        segment: Segment | None,
        *,
        why_not: str = "",
        insist: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Share ``segment`` with the peers of ``inner``.

        Args:
            inner: carries the packets.
            segment: where payload lies that others may read; None shares nothing.
            why_not: where it is None, the reason, for peers that offer their memory.
            insist: sharing that fails is an error, and not a warning.
            clock: seconds.
        """
        self._inner = inner
        self.encoding = getattr(inner, "encoding", Encoding())
        """As :attr:`kvps.net.zeromq.ZmqTransport.encoding`."""
        self._segment = segment
        self._why_not = why_not
        self._insist = insist
        self._near: set[Route] = set()
        """Our own connections to those on this machine: to them, memory is offered."""
        self._clock = clock
        self._welcomed: dict[tuple[bytes, int, int], None] = {}
        """The members that have been answered here, the last ones: job, rank and incarnation."""
        self._peers: dict[int, Peer] = {}
        """By the nonce of their segment."""
        self._by_identity: dict[tuple[bytes, int, int, int], Peer] = {}
        """By job, role, rank and incarnation."""
        self._by_route: dict[Route, Peer] = {}
        self._open: dict[int, Peer] = {}
        """Those with which leases are open, or were, by the nonce of their segment."""
        self._readers: dict[Route, Peer] = {}
        """Those that read our memory."""
        self._envelope: Envelope | None = None
        """The envelope of the last packet sent, which names this process."""
        self._sweep_at = clock() + SWEEP_EVERY_S
        self._is_warned = False
        self._frames_come = False
        self.wake, self.guard, self.trust, self.listen = inner.wake, inner.guard, inner.trust, inner.listen

    # --- the transport ---------------------------------------------------------------------------

    @property
    def refused(self) -> Refusals:
        """The packets and connections that were refused."""
        return self._inner.refused

    @property
    def reconnects(self) -> int:
        """Number of connections opened here that broke, or that others have replaced."""
        return self._inner.reconnects

    def connect(self, to: Connect) -> None:
        """Open a connection.

        Raises:
            Demanded: if memory has to be shared, and the peer is not near.
        """
        self._part(to.to)
        self._near.discard(to.to)
        if to.is_near:
            self._near.add(to.to)
        elif to.is_near is not None and self._insist:
            raise _insisting(
                f"{to.to} at {to.endpoint} is on another machine, or KVPS_TRANSPORT=tcp is set there"
            )
        self._inner.connect(to)

    def send(self, route: Route, packet: Packet, hold: Hold | None) -> None:
        """Send, or drop if there is no peer; by loans where the peer can read them."""
        envelope, message = packet.envelope, packet.message
        self._envelope = envelope
        if packet.payload:
            reader = self._readers.get(route)
            loans = None if reader is None else self._lend(reader, packet.payload, hold)
            if loans is not None:
                packet, hold = _packet((envelope, message, (), loans)), None
            elif len(packet.payload) > 1 and len(message.payload_sizes()) == 1:
                packet = packet._replace(payload=(memoryview(b"".join(packet.payload)),))
        elif type(message) is Welcome:
            self._welcomed[envelope.job, message.rank, message.incarnation] = None
            if len(self._welcomed) > WELCOMED_MAX:
                del self._welcomed[next(iter(self._welcomed))]
        self._inner.send(route, packet, hold)

    def poll(self, timeout_s: float | None) -> Iterator[tuple[Route, Packet | Disconnected]]:
        """Wait up to ``timeout_s`` and yield the packets that came.

        Raises:
            ProtocolError: in place of a packet that cannot be read.
            Unserved: in place of one at which something else failed.
            Demanded: if memory cannot be shared with one we went to, and it has to be.
        """
        if (now := self._clock()) >= self._sweep_at:
            self._sweep(now)
        opened = self._open
        owes = self._owes(RELEASE_EVERY) if opened else False
        # Where only a packet can say what was given back: not while there is other work, and before a wait.
        arrivals = self._inner.poll(0.0 if owes else timeout_s)
        is_first = True
        for route, packet in arrivals:
            if opened and (is_first or route in self._by_route):  # what it returned before it sent this
                for peer in tuple(opened.values()) if is_first else (self._by_route[route],):
                    if peer.posts and peer.given.open:
                        peer.given.release_below(peer.posted.before())
                    if peer.posts and self._segment is not None and len(peer.taken.dropped) >= POST_EVERY:
                        peer.taken.post(self._segment.postings, peer.mapping.offer.nonce)
            is_first = False
            try:
                passed = self._take_in(route, packet)
            except KvpsError:
                raise
            except Exception as error:  # told apart by the driver, which answers the peer
                assert isinstance(packet, Packet)
                raise Unserved(route, packet.envelope) from error
            del packet  # it may be what keeps a loan from being given back
            if passed is not None:
                yield route, passed
                del passed
        if is_first:
            for peer in tuple(opened.values()):
                if peer.posts and peer.given.open:
                    peer.given.release_below(peer.posted.before())
            if owes:
                self._owes(1)
        if opened:  # what a call lets go, its requests should find free
            self._owes(RELEASE_EVERY)

    @property
    def mappings(self) -> list[Mapping]:
        """The mapped memory of peers."""
        return [peer.mapping for peer in self._peers.values()]

    def close(self, linger_s: float) -> None:
        """Close all connections, and let no further process read our memory."""
        self._inner.close(linger_s)
        if self._segment is not None:
            self._segment.close()

    # --- lending and borrowing -------------------------------------------------------------------

    def _lend(
        self, peer: Peer, payload: tuple[memoryview, ...], hold: Hold | None
    ) -> tuple[Loan, ...] | None:
        """Lend ``payload``; None if it is small, or does not lie in our segment."""
        segment = self._segment
        assert segment is not None, "nobody reads what there is not"
        if sum(map(_nbytes, payload)) < SHARE_MIN_BYTES or len(payload) > LOANS_MAX:
            return None
        lent, lease = [], peer.given.count + 1
        for frame in payload:
            offset = segment.offset_of(frame)
            if offset is None:
                return None
            lent.append(_loan((segment.nonce, lease, offset, frame.nbytes)))
        peer.given.give(payload, hold)
        self._open[peer.mapping.offer.nonce] = peer
        return tuple(lent)

    def _borrow(self, peer: Peer | None, packet: Packet) -> Packet:
        """Return ``packet`` with its payload where it lies in its sender's memory.

        Raises:
            ProtocolError: if that is not mapped here, or it comes too late.
        """
        sender, message, _, loans = packet
        nonce, number, _, _ = loans[0]
        if peer is None or peer.mapping.offer.nonce != nonce:
            raise ProtocolError(f"{sender.node} lends memory that is not mapped here")
        for loan in loans:
            if loan.nonce != nonce or loan.lease != number:
                raise ProtocolError(f"{sender.node} lends one packet's payload by several leases")
        lease = peer.taken.take(number)
        if lease is None:
            raise ProtocolError(f"lease {number} of {sender.node} was already returned")
        self._open[nonce] = peer
        payload = []
        for _, _, offset, size_bytes in loans:
            payload.append(
                peer.mapping.read(offset, size_bytes, lease).data
            )  # a comprehension is a call more
        return _packet((sender, message, tuple(payload), loans))

    # --- receiving -------------------------------------------------------------------------------

    def _take_in(self, route: Route, packet: Packet | Disconnected) -> Packet | Disconnected | None:
        """Return what the core hears; None if the packet was of memory alone."""
        if isinstance(packet, Disconnected):
            self._part(route)
            return packet
        envelope, message = packet.envelope, packet.message
        job, _, role, rank, incarnation, _ = envelope
        peer = self._by_identity.get((job, role, rank, incarnation))
        if self._by_route.get(route) is not peer:
            self._meet(route, peer)
        if packet.loans:
            return self._borrow(peer, packet)
        kind = type(message)
        if kind in _OF_MEMORY:
            if isinstance(message, Offer):
                self._on_offer(route, envelope, message)
            elif isinstance(message, Taken):
                self._on_taken(route, envelope, message)
            elif isinstance(message, Release) and peer is not None:
                peer.given.release(message)
            return None
        if kind is Welcome and self._segment is not None and route in self._near:
            self._say(route, self._segment.offer)
        if packet.payload and not self._frames_come:
            self._frames_come = True
            keep_freed_memory()
        return packet

    def _meet(self, route: Route, peer: Peer | None) -> None:
        """``peer`` speaks along ``route``, and is answered there from now on."""
        self._part(route)
        if peer is not None:
            for old in self._routes_of(peer):
                if type(old) is type(route):  # of two neighbours, each has opened one
                    self._part(old)
            self._by_route[route], peer.route = peer, route
            if peer.reads_ours:
                self._let_read(route, peer)

    def _let_read(self, route: Route, peer: Peer) -> None:
        """Lend to ``peer`` along ``route`` from now on."""
        assert self._segment is not None
        self._readers[route] = peer
        self._segment.readers.add(route)

    def _part(self, route: Route) -> None:
        """The peer that shared memory along ``route`` is gone."""
        peer = self._by_route.pop(route, None)
        if peer is not None and self._segment is not None:
            self._readers.pop(route, None)
            self._segment.readers.discard(route)
            peer.route = next(iter(self._routes_of(peer)), peer.route)

    def _routes_of(self, peer: Peer) -> list[Route]:
        return [route for route, other in self._by_route.items() if other is peer]

    # --- agreeing on it --------------------------------------------------------------------------

    def _on_offer(self, route: Route, envelope: Envelope, message: Offer) -> None:
        """Map the offered segment, offer our own, and tell the peer so.

        Raises:
            ProtocolError: if its sender is not a member.
            Demanded: if it cannot be mapped and has to be.
        """
        is_ours, life = route in self._near, (envelope.job, envelope.rank, envelope.incarnation)
        if not is_ours and life not in self._welcomed:
            raise ProtocolError(f"{envelope.node} offers memory before it was welcomed")
        if self._segment is None:
            self._say(route, Taken(message.nonce, False, self._why_not))
            return
        peer = self._peers.get(message.nonce)
        if peer is None:
            try:
                mapping = Mapping(message)
            except Unshared as error:
                self._say(route, Taken(message.nonce, False, str(error)))
                self._complain(f"{envelope.node}: {error}", is_ours)
                return
            posted = PostingsOfPeer(mapping.first_page, self._segment.nonce)
            peer = self._peers[message.nonce] = Peer(route, mapping, posted)
        elif peer.mapping.offer != message:
            raise ProtocolError(f"{envelope.node} offers the same memory again, differently")
        self._by_identity[envelope.job, envelope.role, envelope.rank, envelope.incarnation] = peer
        if self._by_route.get(route) is not peer:
            self._meet(route, peer)
        if not is_ours:
            self._say(route, self._segment.offer)
            self._segment.is_read = True  # what is made from now on, it will be able to read
        self._say(route, Taken(message.nonce, True, postings=True))

    def _on_taken(self, route: Route, envelope: Envelope, message: Taken) -> None:
        """Lend from now on, if the other's memory is mapped here.

        Raises:
            Demanded: if ours is not mapped there and has to be.
        """
        if self._segment is None or message.nonce != self._segment.nonce:
            return  # of a life before this one
        peer = self._by_route.get(route)
        if not message.mapped:
            why = shown(message.reason)
            self._complain(f"{envelope.node} cannot read our memory: {why}", route in self._near)
        elif peer is not None:
            peer.reads_ours = self._segment.is_read = True
            peer.posts = message.postings
            self._let_read(route, peer)

    def _say(self, route: Route, message: Message) -> None:
        assert self._envelope is not None, "we have said HELLO, or WELCOME"
        self._inner.send(route, Packet(self._envelope._replace(seq=0), message), None)

    def _complain(self, reason: str, is_ours: bool) -> None:
        """Memory cannot be shared; ``is_ours`` says that this process opened the connection.

        A peer that opened the connection finds that out as well, and ends if it must share memory:
        any peer may connect.

        Raises:
            Demanded: if it is ours, and memory has to be shared.
        """
        if self._insist and is_ours:
            raise _insisting(reason)
        if not self._is_warned:
            self._is_warned = True
            keep_freed_memory()
            log.warning("values travel in frames, not in shared memory: %s", reason)

    # --- giving back -----------------------------------------------------------------------------

    def _owes(self, least: int) -> bool:
        """Give leases back: post it where that says everything; else by a RELEASE, where they are
        ``least`` or more.

        Returns:
            Whether a peer was not told of all of them.
        """
        owes = False
        for nonce, peer in self._open.items():
            taken = peer.taken
            if not (taken.dropped or taken.unsaid):
                continue
            if peer.posts and self._segment is not None and taken.post(self._segment.postings, nonce):
                continue
            if taken.returned >= least and self._by_route.get(peer.route) is peer:
                message = taken.release()
                if message is not None:
                    self._say(peer.route, message)
            owes = owes or taken.returned > 0
        return owes

    def _sweep(self, now: float) -> None:
        """Forget peers that have ended: they read nothing, and their memory is of no use."""
        self._sweep_at = now + SWEEP_EVERY_S
        for nonce, peer in list(self._peers.items()):
            if peer.mapping.is_there:
                continue
            peer.given.release_below(math.inf)
            del self._peers[nonce]
            self._open.pop(nonce, None)
            if self._segment is not None:
                self._segment.postings.forget(nonce)
            for route in self._routes_of(peer):
                self._part(route)
            for identity in [key for key, other in self._by_identity.items() if other is peer]:
                del self._by_identity[identity]


class SharedMemory:
    """Memory in this process's segment, as long as a peer reads that and there is room in it."""

    def __init__(self, segment: Segment, stitches: PageRemapper) -> None:
        self._segment = segment
        self._stitches = stitches

    @property
    def extent(self) -> tuple[int, int]:
        """Where it begins, and its size in bytes."""
        return self._segment.address, self._segment.size_bytes

    def empty(self, count: int, dtype: str) -> torch.Tensor:
        """Return a flat tensor whose contents are undefined."""
        size_bytes = count * BY_NAME[dtype].itemsize
        if self._segment.is_read and size_bytes >= SHARE_MIN_BYTES:
            block = self._segment.take(size_bytes)
            if block is not None:
                tensor = torch.frombuffer(block, dtype=TORCH[dtype])
                keep_frame(tensor, block.data)
                return tensor
        return PRIVATE.empty(count, dtype)

    def lends(self, route: str | bytes, pieces: Sequence[torch.Tensor]) -> bool:
        """Whether the peer along ``route`` would read ``pieces`` where they lie."""
        first, size_bytes = self._segment.address, self._segment.size_bytes
        if route not in self._segment.readers:
            return False
        for piece in pieces:  # noqa: SIM110  # a generator is two calls more
            if not 0 <= piece.data_ptr() - first < size_bytes:
                return False
        return True

    def side_by_side(self, parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Return values that were lent here as one tensor without a copy; None if that fails.

        It is read-only, and keeps the loans as long as it lives.
        """
        ranges = tuple([(part.data_ptr(), part.nbytes) for part in parts])
        block = self._stitches.beside(ranges, keep=tuple(parts))
        return None if block is None else torch.from_numpy(block).view(parts[0].dtype)


def _insisting(reason: str) -> Demanded:
    return Demanded(
        f"KVPS_TRANSPORT=shm, but memory cannot be shared: {reason}. Run all processes on one host "
        "as one user, or set KVPS_TRANSPORT=auto"
    )
