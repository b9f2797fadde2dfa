"""Cycles: in each, every rank gives every other one message.

A message lies in a post of its rank (:class:`~kvps.torch.distributed.mailbox.Board`). Each rank has
two posts, in turns. A rank writes in cycle k + 2 only after cycle k + 1, in which it heard from
every rank that cycle k was over there. So no message is replaced before every rank has read it,
and no acknowledgement is needed.

A long message continues in a second post, whose size its first post tells.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import torch

from kvps.errors import KvpsError, Timeout, WorkerLost
from kvps.runtime.ticket import Ticket
from kvps.torch.distributed.mailbox import Board, class_of

POST_BYTES = 16 << 10
"""The size of a post: about 200 requests."""
HEAD = 4
"""Bytes of the length of a message, which begin its post."""
READ_S = 3600.0
"""Seconds that a read waits for a message before it is made again: ranks may be silent for long."""
LEFT_S = 2.0
"""Seconds until a rank that has left the job counts as silent: its last message may be on its way."""
LOOK_EVERY_S = 0.2


class Cycles:
    """The messages that the ranks exchange.

    Args:
        board: of this process.
        name: distinguishes these posts from others.
        timeout_s: how long the other ranks may take to begin, and each transfer of a message may take.
        wake: called from another thread when a message has come.
    """

    def __init__(self, board: Board, name: str, timeout_s: float, wake: Callable[[], object]) -> None:
        self._board, self._name, self._timeout_s, self._wake = board, name, timeout_s, wake
        self._others = [rank for rank in range(board.workers) if rank != board.rank]
        self._count = 0
        self._sinks: dict[int, torch.Tensor] = {}
        self._reads: dict[int, Ticket] = {}
        self._left_since: dict[int, float] = {}
        self._make()

    def _make(self) -> None:
        """Make the posts of this rank, and wait for the posts of the others."""
        blank = torch.zeros(POST_BYTES, dtype=torch.uint8, device="cpu")
        mine = [self._post(self._board.rank, turn) for turn in range(2)]
        tickets = [self._board.make_posts(mine, [blank, blank], self._timeout_s)]
        for rank in self._others:
            posts = [self._post(rank, turn) for turn in range(2)]
            sizes = [POST_BYTES, POST_BYTES]
            tickets.append(self._board.expect(posts, sizes, rank, self._timeout_s))
        for ticket in tickets:
            ticket.wait()

    def _post(self, rank: int, turn: int) -> str:
        return f"{self._name}/turn/{rank}/{turn}"

    def begin(self) -> None:
        """Begin a cycle: read the messages of the other ranks, as soon as they are there."""
        self._sinks = {
            rank: torch.zeros(POST_BYTES, dtype=torch.uint8, device="cpu") for rank in self._others
        }
        self._reads = {rank: self._read(rank) for rank in self._others}

    def _read(self, rank: int) -> Ticket:
        turn, version = self._count % 2, self._count // 2 + 1
        ticket = self._board.read([self._post(rank, turn)], [self._sinks[rank]], version, READ_S)
        ticket.when_over(self._wake)
        return ticket

    def has_begun_elsewhere(self) -> bool:
        """Whether another rank has written its message of this cycle.

        Raises:
            KvpsError: if it never will: a rank is lost, or a server.
        """
        found = False
        for rank, ticket in self._reads.items():
            if ticket.is_over and isinstance(ticket.error, Timeout):
                self._reads[rank] = self._read(rank)
            elif ticket.is_over:
                _demand(ticket)
                found = True
            else:
                self._demand_present(rank)
        return found

    def exchange(self, message: bytes) -> list[bytes]:
        """Write this rank's message, and return the messages of all ranks once they are there.

        Raises:
            KvpsError: if a rank has left or is lost, or a server is.
        """
        size = HEAD + len(message)
        row = torch.zeros(max(size, POST_BYTES), dtype=torch.uint8, device="cpu")
        whole = len(message).to_bytes(HEAD, "little") + message
        row[:size] = torch.frombuffer(bytearray(whole), dtype=torch.uint8)
        post = self._post(self._board.rank, self._count % 2)
        written = [self._board.write([post], [row[:POST_BYTES]], self._timeout_s)]
        if size > POST_BYTES:
            written.append(self._write_rest(row[POST_BYTES:]))
        while any(not ticket.is_over for ticket in self._reads.values()):
            self.has_begun_elsewhere()
            _await([pending for pending in self._reads.values() if not pending.is_over])
        self.has_begun_elsewhere()
        for ticket in written:
            ticket.wait()
        rests = self._read_rests()
        self._count += 1
        found = {rank: _message(self._sinks[rank], rests.get(rank)) for rank in self._others}
        found[self._board.rank] = message
        return [found[rank] for rank in range(self._board.workers)]

    def _rest(self, rank: int, size: int) -> tuple[str, int]:
        """Return the second post for so many bytes, and how often it was used."""
        return self._board.next_use(f"{self._name}/rest/{rank}/{size}")

    def _write_rest(self, rest: torch.Tensor) -> Ticket:
        size = class_of(len(rest))
        post, use = self._rest(self._board.rank, size)
        row = torch.zeros(size, dtype=torch.uint8, device="cpu")
        row[: len(rest)] = rest
        write = self._board.write if use else self._board.make_posts
        return write([post], [row], self._timeout_s)

    def _read_rests(self) -> dict[int, torch.Tensor]:
        """Return what the long messages of other ranks have beyond their first post."""
        rests: dict[int, torch.Tensor] = {}
        uses: dict[int, tuple[str, int]] = {}
        made, read = [], []
        for rank in self._others:
            more = HEAD + _length(self._sinks[rank]) - POST_BYTES
            if more > 0:
                rests[rank] = torch.zeros(class_of(more), dtype=torch.uint8, device="cpu")
                uses[rank] = post, use = self._rest(rank, class_of(more))
                if not use:
                    size = [class_of(more)]
                    made.append(self._board.expect([post], size, rank, self._timeout_s))
        for ticket in made:
            ticket.wait()
        for rank, (post, use) in uses.items():
            read.append(self._board.read([post], [rests[rank]], use, self._timeout_s))
        for ticket in read:
            ticket.wait()
        return rests

    def _demand_present(self, rank: int) -> None:
        if rank not in self._board.left():
            return
        now = time.monotonic()
        if now - self._left_since.setdefault(rank, now) > LEFT_S:
            raise WorkerLost(f"rank {rank} has left the job without hvd.shutdown()")


def _demand(ticket: Ticket) -> None:
    error: KvpsError | None = ticket.error
    if error is not None:
        raise error


def _await(tickets: Sequence[Ticket]) -> None:
    """Wait until one of the tickets is over, or for a moment."""
    over = threading.Event()
    for ticket in tickets:
        ticket.when_over(over.set)
    over.wait(LOOK_EVERY_S)


def _length(sink: torch.Tensor) -> int:
    return int.from_bytes(sink[:HEAD].numpy().tobytes(), "little")


def _message(sink: torch.Tensor, rest: torch.Tensor | None) -> bytes:
    whole = sink if rest is None else torch.cat([sink, rest])
    return bytes(whole[HEAD : HEAD + _length(sink)].numpy().tobytes())
