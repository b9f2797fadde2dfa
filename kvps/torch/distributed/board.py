"""The two stores through which the ranks of a process group talk.

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
from kvps.tensors import NAMES

OWNER = "torch.group"
READ = "/read"
"""Behind the name of a post: the key that its readers push when they have read it."""


class Board:
    """The stores that this process's groups write to and read from.

    Args:
        timeout_s: how long it may take to open the stores.
        generation: the same on all ranks, and no other for processes that have taken the place of
            one: push numbers begin at 0, and a server would take theirs for those of their predecessors.
    """

    def __init__(self, timeout_s: float, generation: str) -> None:
        owner = f"{OWNER}.{generation}"
        options = StoreOptions(timeout_s, "fail")
        self._sums = create_dist("dist_sync", owner, options)
        self._posts = create_dist("dist_async", owner, options)
        self._posts.set_optimizer("assign")
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
        """Wait until what was pushed is taken in, and end both stores."""
        self._sums.close()
        self._posts.close()

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


def _spec(row: torch.Tensor) -> Spec:
    return Spec(NAMES[row.dtype], tuple(row.shape))
