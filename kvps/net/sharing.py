"""Payload through shared memory where both ends are on one host; a transport around another.

A core sends packets with payload and knows nothing of this. Where a payload lies in this process's
segment and the peer has mapped that, loans of it travel in place of its bytes; where a packet comes
with loans, its payload is read where it lies. So whoever wants to send without a copy only has to
let its values lie in the segment.

Who opens a data connection offers its segment after every WELCOME; the other end maps it, says so,
and offers its own. Until then, and where that fails, payload travels in frames.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from kvps.core.effects import Hold, Route
from kvps.errors import ConfigError, ProtocolError
from kvps.messages import Envelope, Loan, Message, Packet, Release, Welcome
from kvps.messages import Offer as OfferMessage
from kvps.messages import Taken as TakenMessage
from kvps.net.driver import Dropped, Transport
from kvps.net.leases import Given, Taken
from kvps.net.segment import Mapping, Offer, Segment, Unshared

log = logging.getLogger("kvps")

SHARE_MIN_BYTES = 4096
"""Payload below this travels in frames: that is cheaper than a loan."""
RELEASE_EVERY = 16
"""Leases that are given back before a busy loop says so; an idle one says so at once."""
SWEEP_EVERY_S = 5.0
"""How often it is asked whether those whose memory is mapped still live."""


class Peer:
    """Another process that shares memory with this one, by identity and not by route."""

    def __init__(self, route: Route, mapping: Mapping | None) -> None:
        self.route = route
        self.mapping = mapping
        """Its segment, mapped here."""
        self.reads_ours = False
        self.given = Given()
        self.taken = Taken()


class SharingTransport:
    """A transport whose payload travels through shared memory where it can."""

    def __init__(
        self,
        inner: Transport,
        segment: Segment,
        *,
        insist: bool = False,
        offers: Callable[[Route], bool] = lambda route: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Share ``segment`` with the peers of ``inner``.

        Args:
            inner: carries the packets.
            segment: where payload lies that others may read.
            insist: sharing that fails is an error, and not a warning.
            offers: along which of our own connections memory is offered.
            clock: seconds.
        """
        self._inner = inner
        self._segment = segment
        self._insist = insist
        self._offers = offers
        self._clock = clock
        self._peers: dict[tuple[int, int, int], Peer] = {}
        """By role, rank and incarnation."""
        self._by_route: dict[Route, Peer] = {}
        self._by_nonce: dict[int, Peer] = {}
        self._envelope: Envelope | None = None
        """That of what was last sent: who we are."""
        self._swept_at = clock()
        self._is_warned = False
        self._is_woken = False

    # --- the transport ---------------------------------------------------------------------------

    def connect(self, name: str, endpoint: str) -> None:
        """Open a connection that is called ``name`` from now on."""
        self._by_route.pop(name, None)
        self._segment.readers.discard(name)
        self._inner.connect(name, endpoint)

    def send(self, route: Route, packet: Packet, hold: Hold | None) -> None:
        """Send, or drop if there is nobody; by loans where the peer can read them."""
        self._envelope = packet.envelope
        if packet.payload:
            peer = self._by_route.get(route)
            if peer is not None and peer.reads_ours:
                offsets = self._offsets(packet.payload)
                if offsets is not None:
                    self._lend(peer, route, packet, hold, offsets)
                    return
        self._inner.send(route, packet, hold)

    def poll(self, timeout_s: float | None) -> Iterator[tuple[Route, Packet | Dropped]]:
        """Wait up to ``timeout_s`` and yield what came.

        Raises:
            ProtocolError: in place of a packet that cannot be read.
            ConfigError: if memory cannot be shared with a peer and it has to be.
        """
        self._return(RELEASE_EVERY)
        if self._clock() >= self._swept_at + SWEEP_EVERY_S:
            self._sweep()
        is_idle = True
        for route, packet in self._inner.poll(0.0):
            is_idle = False
            yield from self._receive(route, packet)
        if self._is_woken:  # the wake may have ended the poll above
            self._is_woken = False
        elif is_idle and timeout_s != 0.0:
            self._return(1)
            for route, packet in self._inner.poll(timeout_s):
                yield from self._receive(route, packet)

    def wake(self) -> None:
        """Make a waiting :meth:`poll` return; any thread may call this."""
        self._is_woken = True
        self._inner.wake()

    def close(self, linger_s: float) -> None:
        """Close all connections, and let nobody new read our memory."""
        self._inner.close(linger_s)
        self._segment.close()

    # --- sending by loans ------------------------------------------------------------------------

    def _offsets(self, payload: tuple[memoryview, ...]) -> list[int] | None:
        """Where ``payload`` lies in our segment; None if some of it does not, or it is small."""
        offsets = []
        for frame in payload:
            offset = self._segment.offset_of(frame) if frame.nbytes >= SHARE_MIN_BYTES else None
            if offset is None:
                return None
            offsets.append(offset)
        return offsets

    def _lend(
        self, peer: Peer, route: Route, packet: Packet, hold: Hold | None, offsets: list[int]
    ) -> None:
        lease = peer.given.give(packet.payload, hold)
        nonce = self._segment.nonce
        loans = tuple(
            [
                Loan(nonce, lease, offset, frame.nbytes)
                for offset, frame in zip(offsets, packet.payload, strict=True)
            ]
        )
        self._inner.send(route, Packet(packet.envelope, packet.message, (), loans), None)

    # --- receiving -------------------------------------------------------------------------------

    def _receive(
        self, route: Route, packet: Packet | Dropped
    ) -> Iterator[tuple[Route, Packet | Dropped]]:
        if isinstance(packet, Dropped):
            self._by_route.pop(route, None)
            self._segment.readers.discard(route)
            yield route, packet
            return
        message = packet.message
        if isinstance(message, OfferMessage | TakenMessage | Release):
            self._settle(route, packet.envelope, message)
            return
        if isinstance(message, Welcome) and self._offers(route):
            self._offer(route)
        if route not in self._by_route:
            peer = self._peers.get(_identity(packet.envelope))
            if peer is not None:  # it has come back along another connection
                self._by_route[route], peer.route = peer, route
        if packet.loans:
            packet = self._borrow(packet)
        yield route, packet

    def _borrow(self, packet: Packet) -> Packet:
        """Return ``packet`` with its payload where it lies in its sender's memory.

        Raises:
            ProtocolError: if that is not mapped here, or it comes too late.
        """
        nonce, number = packet.loans[0].nonce, packet.loans[0].lease
        peer = self._by_nonce.get(nonce)
        who = f"{packet.envelope.node}"
        if peer is None or peer.mapping is None:
            raise ProtocolError(f"{who} lends memory that is not mapped here")
        if any(loan.nonce != nonce or loan.lease != number for loan in packet.loans):
            raise ProtocolError(f"{who} lends one packet's payload by several leases")
        lease = peer.taken.take(number)
        if lease is None:
            raise ProtocolError(f"lease {number} of {who} was given back already")
        mapping = peer.mapping
        payload = [mapping.read(one.offset, one.size, lease).data for one in packet.loans]
        return replace(packet, payload=tuple(payload))

    # --- agreeing on it --------------------------------------------------------------------------

    def _offer(self, route: Route) -> None:
        self._say(route, OfferMessage(*self._segment.offer))

    def _settle(
        self, route: Route, envelope: Envelope, message: OfferMessage | TakenMessage | Release
    ) -> None:
        """A peer said something about memory."""
        peer = self._peers.get(_identity(envelope))
        match message:
            case OfferMessage():
                self._on_offer(route, envelope, message, peer)
            case TakenMessage():
                if message.nonce != self._segment.nonce:
                    return  # of a life before this one
                if not message.mapped:
                    self._complain(f"{envelope.node} cannot read ours: {message.reason}")
                    return
                if peer is None:
                    peer = self._add(route, envelope, None)
                peer.reads_ours = self._segment.is_read = True
                self._segment.readers.add(route)
            case Release():
                if peer is not None:
                    peer.given.release(message)

    def _on_offer(
        self, route: Route, envelope: Envelope, message: OfferMessage, peer: Peer | None
    ) -> None:
        offer = Offer(message.pid, message.fd, message.size, message.nonce)
        if peer is None or peer.mapping is None or peer.mapping.offer != offer:
            try:
                mapping = Mapping(offer)
            except Unshared as error:
                self._say(route, TakenMessage(offer.nonce, False, str(error)))
                self._complain(f"{envelope.node}: {error}")
                return
            if peer is None:
                peer = self._add(route, envelope, mapping)
            peer.mapping = mapping
            self._by_nonce[offer.nonce] = peer
        self._say(route, TakenMessage(offer.nonce, True))
        if not self._offers(route):
            self._offer(route)
            self._segment.is_read = True  # what is made from now on, it will be able to read

    def _add(self, route: Route, envelope: Envelope, mapping: Mapping | None) -> Peer:
        peer = Peer(route, mapping)
        self._peers[_identity(envelope)] = self._by_route[route] = peer
        return peer

    def _say(self, route: Route, message: Message) -> None:
        assert self._envelope is not None, "we have said HELLO, or WELCOME"
        self._inner.send(route, Packet(replace(self._envelope, seq=0), message), None)

    def _complain(self, reason: str) -> None:
        """Memory cannot be shared.

        Raises:
            ConfigError: if it has to be.
        """
        if self._insist:
            raise ConfigError(
                f"KVPS_TRANSPORT=shm, and memory cannot be shared: {reason}. Run all processes on "
                "one host as one user, or set KVPS_TRANSPORT=auto"
            )
        if not self._is_warned:
            self._is_warned = True
            log.warning("values travel in frames, not in shared memory: %s", reason)

    # --- giving back -----------------------------------------------------------------------------

    def _return(self, least: int) -> None:
        """Tell those of whom at least so many leases were given back."""
        for peer in self._peers.values():
            if peer.taken.returned >= least:
                message = peer.taken.release()
                if message is not None:
                    self._say(peer.route, message)

    def _sweep(self) -> None:
        """Forget those who are gone: they read nothing, and their memory is of no use."""
        self._swept_at = self._clock()
        for identity, peer in list(self._peers.items()):
            if peer.mapping is not None and not peer.mapping.is_there:
                peer.given.end()
                del self._peers[identity]
                del self._by_nonce[peer.mapping.offer.nonce]
                if self._by_route.get(peer.route) is peer:
                    del self._by_route[peer.route]
                    self._segment.readers.discard(peer.route)


def _identity(envelope: Envelope) -> tuple[int, int, int]:
    return envelope.role, envelope.rank, envelope.incarnation
