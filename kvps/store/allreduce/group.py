"""The collectives of one allreduce store: sums and broadcasts over gloo and NCCL.

Before each of them the ranks compare what they are about to do, in 16 bytes. Collectives have no names, and
two ranks that call for different keys would add them up, or wait for ever. Here both get Mismatch, and
nothing was added. The groups are the store's own, so those of ``init_process_group`` are not touched.
"""

from __future__ import annotations

import hashlib
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import msgpack
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from kvps.core.traits import not_the_same
from kvps.errors import KvpsError, Mismatch, WorkerLost
from kvps.protocol.membership import Trait
from kvps.runtime.device import beside, card_of, select, settle
from kvps.store.allreduce.rendezvous import Rendezvous

FOREVER = timedelta(days=30)
"""A collective waits for late ranks; the call that waits for it has a time limit of its own."""
NOTICE = timedelta(seconds=0.2)
"""After this long a rank that waits says so on the board, where the others see which ranks are missing."""
AT_ONCE = timedelta(milliseconds=1)
CANCEL_TAG = 1 << 20
"""The tag of a message that no rank sends."""
WORDS_BYTES, CARD_BYTES = 512, 128


class CollectiveGroup:
    """This rank's end of the ring; one thread makes its collectives."""

    def __init__(self, meeting: Rendezvous) -> None:
        """Connect to the other ranks, all of which are there."""
        self.rank, self.size = meeting.rank, meeting.size
        self.number = 0
        """The number of calls that were begun."""
        self._name = meeting.name
        self._board = meeting.board
        self._is_alone = meeting.board is None
        self._under_way = 0
        """The number of collectives that have begun and not ended."""
        self._mutex = threading.Lock()
        """Held to begin one, and to close: one that begins is cancelled, or does not begin."""
        self._group: Any = None
        self._nccl: Any = None
        self._device: torch.device | None = None
        """The GPU by which this rank is known to the others; None before the first sum on one."""
        if meeting.board is not None:
            gloo: Any = dist.ProcessGroupGloo  # its options have no types
            options = gloo._Options()
            options._devices = [
                gloo.create_device(hostname=meeting.host) if meeting.host else gloo.create_default_device()
            ]
            options._timeout = FOREVER
            self._group = gloo(meeting.board, self.rank, self.size, options)

    # --- collectives ------------------------------------------------------------------------------

    def agree(self, digest: bytes, words: str) -> None:
        """Check that all ranks are about to make the same call.

        Args:
            digest: 16 bytes that are the same for the same call.
            words: the call, for people.

        Raises:
            Mismatch: naming the calls of two ranks, at every rank.
            WorkerLost: if a rank ended.
        """
        self.number += 1
        if self._is_alone:
            return
        other = self._other_than_first(digest)
        if other is None:
            return
        text = words.encode()[:WORDS_BYTES].ljust(WORDS_BYTES)
        texts = [
            row.numpy().tobytes().decode(errors="ignore").rstrip()
            for row in self._gathered(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        ]
        raise Mismatch(
            f"store {self._name!r}: call {self.number} of rank 0 is {texts[0]}, that of rank "
            f"{other} is {texts[other]}. Nothing was summed. In an allreduce store, all ranks must make "
            "the same calls in the same order, with the same keys, types, shapes and kind of device; "
            "dist_sync does not need an order"
        )

    def compare(self, what: str, traits: tuple[Trait, ...]) -> list[torch.Tensor]:
        """Check that all ranks are about to make the same front end; return nothing.

        Raises:
            Mismatch: naming what differs, at every rank.
            WorkerLost: if a rank ended.
        """
        self.number += 1
        if self._is_alone:
            return []
        packed = msgpack.packb([what, *traits])
        digest = hashlib.sha256(packed).digest()[:16]
        sizes = self._gathered(torch.tensor([len(packed)]))
        other = self._other_than_first(digest)
        if other is None:
            return []
        padded = bytearray(packed.ljust(max(int(size) for size in sizes)))
        rows = self._gathered(torch.frombuffer(padded, dtype=torch.uint8))
        found = [
            dict(msgpack.unpackb(rows[rank].numpy().tobytes()[: int(sizes[rank])])[1:]) for rank in (0, other)
        ]
        raise Mismatch(not_the_same(self._name, what, 0, found[0], other, found[1]))

    def _other_than_first(self, digest: bytes) -> int | None:
        """Return a rank whose digest is not rank 0's, this one if it can be; None if there is none."""
        digests = self._gathered(torch.frombuffer(bytearray(digest), dtype=torch.int64))
        ranks = (self.rank, *range(self.size))
        return next((rank for rank in ranks if not torch.equal(digests[rank], digests[0])), None)

    def sum(self, flats: Sequence[torch.Tensor]) -> None:
        """Put the sum over all ranks into each of these flat tensors, on one device.

        Raises:
            WorkerLost: if a rank ended.
        """
        if self._is_alone or not flats:
            return
        device = flats[0].device
        if device.type == "cpu":
            self._sum_here(flats)
        elif not self._has_nccl(device):  # ranks share this GPU, or there is no NCCL
            self._sum_away(flats, torch.device("cpu"), self._sum_here)
        elif device == self._device:
            self._sum_there(flats)
        else:
            assert self._device is not None
            self._sum_away(flats, self._device, self._sum_there)

    def spread(self, flats: Sequence[torch.Tensor]) -> None:
        """Put rank 0's values, bit by bit, into these flat tensors on the CPU.

        Raises:
            WorkerLost: if a rank ended.
        """
        if self._is_alone:
            return
        works = [self._begin("broadcast", flat.view(torch.uint8), 0) for flat in flats if len(flat)]
        for work in works:
            self._wait(work)

    def _sum_here(self, flats: Sequence[torch.Tensor]) -> None:
        works = [self._begin("allreduce", flat) for flat in flats if len(flat)]
        for work in works:
            self._wait(work)

    def _sum_away(
        self,
        flats: Sequence[torch.Tensor],
        device: torch.device,
        sum_: Callable[[Sequence[torch.Tensor]], None],
    ) -> None:
        copies = [flat.to(device) for flat in flats]
        settle(device)
        sum_(copies)
        for flat, copy in zip(flats, copies, strict=True):
            flat.copy_(copy)

    def _sum_there(self, flats: Sequence[torch.Tensor]) -> None:
        assert self._device is not None
        with beside(self._device, "sums"):
            for flat in flats:
                if len(flat):
                    self._nccl.allreduce(flat).wait()  # this stream waits, this thread does not

    def _gathered(self, row: torch.Tensor) -> list[torch.Tensor]:
        """Return every rank's ``row``."""
        every = row.new_empty(self.size * len(row))
        self._wait(self._begin("_allgather_base", every, row))
        return list(every.view(self.size, -1))

    def _begin(self, what: str, *arguments: Any) -> Any:
        with self._mutex:
            try:
                if self._group is None:
                    raise RuntimeError("this rank has closed the store")
                work = getattr(self._group, what)(*arguments)
            except RuntimeError as error:
                raise self._lost(error) from error
            self._under_way += 1
            return work

    def _wait(self, work: Any) -> None:
        try:
            work.wait(NOTICE)
        except RuntimeError as error:
            if work.is_completed():
                raise self._lost(error) from error
            self._note()
            try:
                work.wait()
            except RuntimeError as late:
                raise self._lost(late) from late
        finally:
            with self._mutex:
                self._under_way -= 1

    def _lost(self, error: RuntimeError) -> KvpsError:
        said = str(error).partition(". This is typically")[0].rpartition("] ")[2]
        return WorkerLost(
            f"store {self._name!r}: another rank has ended, or has closed its store, but call {self.number} "
            f"of rank {self.rank} needs all {self.size} ranks (gloo: {said or error}). Values "
            "of earlier calls can still be pulled. A ring cannot continue without a rank: check the output "
            "of the others, and restart all ranks; dist_sync accepts a replacement"
        )

    # --- missing ranks ----------------------------------------------------------------------------

    def missing(self) -> list[int]:
        """Return the ranks that have not begun the call in which this one waits."""
        board = self._board
        if board is None:
            return []
        with suppress(RuntimeError):  # rank 0's process has ended, and with it the board
            others = [rank for rank in range(self.size) if rank != self.rank]
            return [rank for rank in others if _noted(board, rank) < self.number]
        return []

    def _note(self) -> None:
        board = self._board
        with suppress(RuntimeError):
            if board is not None:
                board.set(f"at/{self.rank}", str(self.number))

    # --- GPUs -------------------------------------------------------------------------------------

    def _has_nccl(self, device: torch.device) -> bool:
        """Whether NCCL connects the ranks; asked at all of them at once, in the first sum on GPUs."""
        if self._device is None:
            self._device = device
            card = card_of(device)
            if card is None:  # NCCL is for CUDA; all ranks have the same kind of device
                return False
            card = f"{socket.gethostname()} {card}"
            text = bytearray(card.encode()[:CARD_BYTES].ljust(CARD_BYTES))
            cards = self._gathered(torch.frombuffer(text, dtype=torch.uint8))
            if dist.is_nccl_available() and len({told.numpy().tobytes() for told in cards}) == self.size:
                assert self._board is not None
                select(device)
                nccl: Any = dist.ProcessGroupNCCL
                board = PrefixStore("nccl", self._board)
                self._nccl = nccl(board, self.rank, self.size, nccl.Options())
        return self._nccl is not None

    # --- the end ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the connections to the other ranks; ranks that wait for this rank learn that it has ended."""
        with self._mutex:
            group, self._group = self._group, None
            nccl, self._nccl = self._nccl, None
            is_under_way = self._under_way > 0
        if nccl is not None:
            with suppress(RuntimeError):
                nccl.abort()
        if group is not None and is_under_way:
            # gloo cannot give up a collective, and the group waits for it when it is destroyed. But
            # one receive that times out closes all its connections, which ends the others, too.
            with suppress(RuntimeError):
                word = torch.empty(1, device="cpu")
                group.recv([word], (self.rank + 1) % self.size, CANCEL_TAG).wait(AT_ONCE)
        self._board = None


def _noted(board: Store, rank: int) -> int:
    """Return the call in which a rank waits, or waited last."""
    at = f"at/{rank}"
    return int(board.get(at)) if board.check([at]) else 0
