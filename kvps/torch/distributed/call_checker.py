"""The comparison of all ranks' collectives, beside them: mismatched calls are refused on every rank.

Each rank writes the log of its calls to torch's key-value store, when calls were made since, ten
times a second at most. All but the first rank of a group compare theirs with the log of the first,
and the first with a few of theirs, since they may have ended. A rank that finds a difference writes it
down. Every rank that waits reads it, says so, and fails its collectives a moment later: a rank
whose script ends first would close rounds that others wait for. So a round costs an entry in a
list, and nothing travels with it; a mismatch is told in a few tenths of a second.

Calls that differ do not meet, because the names of their keys differ
(:mod:`kvps.torch.distributed.collectives`): a rank waits until it is told, and gets no wrong values.

A message between two ranks has a log of its own at either end, and the receiver compares.

torch prints a C++ stack trace when a process asks a store that is gone. So each rank writes a
*goodbye* after its last question, and rank 0, which serves the store, waits for the goodbyes
before its process ends.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from torch.distributed import PrefixStore, Store

from kvps.errors import Mismatch, WorkerLost
from kvps.torch.distributed.call_log import (
    CallLog,
    LoggedCall,
    exchange_difference,
    first_difference,
    from_page,
    in_words,
    to_page,
)
from kvps.torch.distributed.ordered_executor import OrderedExecutor

log = logging.getLogger("kvps")
EVERY_S, LATER_S, LATER_AFTER_S = 0.1, 0.5, 5.0
"""Seconds between two looks: at first, and when this process has waited for so long."""
HASTE_S = 0.02
"""The same when a mismatch is being told."""
RANKS_AT_ONCE = 64
"""Larger groups look less often, in proportion: torch's store is one process."""
OTHERS_AT_ONCE = 8
"""The number of logs that the first rank of a group reads in one look."""
HEARD_MAX_S = 0.3
"""Seconds that a rank which heard of a mismatch waits for the others to hear of it."""
END_MAX_S = 1.0
"""Seconds that the thread may take to end."""
GOODBYES_MAX_S = 5.0
"""Seconds that the process of rank 0 serves the store on, when it could end, for ranks that may still ask."""


@dataclass(eq=False)
class CheckedCalls:
    """The calls of one group on this rank, or the messages of one sender to one receiver with one tag.

    Args:
        name: the same on its ranks.
        title: the ranks and their disagreement, in words.
        group: the name of the group that a difference ends.
        ranks: its members, by their rank in the job.
        rank: this process's, in the job.
        wake: called when a call is added.
        write: called when a call was refused, which other ranks must hear even if this process ends.
    """

    name: str
    title: str
    group: str
    ranks: Sequence[int]
    rank: int
    wake: Callable[[CheckedCalls], None]
    write: Callable[[CheckedCalls], None]
    log: CallLog = field(default_factory=CallLog)
    written: int = 0
    """The number of calls that the other ranks can read."""
    compared: int = 0
    """The number of calls that the first rank has made, too."""
    turn: int = 0
    """The place in ``ranks`` of the rank that the first one looks at next."""

    def add(self, text: str) -> None:
        """Add a call that begins."""
        self.log.add(text)
        self.wake(self)

    def add_refused(self, error: BaseException) -> None:
        """Add a call that this rank was refused before anything was sent."""
        self.log.add_refused(error)
        self.write(self)
        self.wake(self)

    def add_exchange(self, text: str, sends: Sequence[int], receives: Sequence[int]) -> None:
        """Add an all_to_all that begins; see :meth:`CallLog.add_exchange`."""
        self.log.add_exchange(text, sends, receives)
        self.wake(self)

    @property
    def is_first(self) -> bool:
        """Whether the other ranks compare their calls with this one's."""
        return self.rank == self.ranks[0]

    def next_peers(self) -> list[int]:
        """Return the ranks whose calls are to be compared with this one's."""
        last = self.log.calls()[-1:]
        if last and last[0].sends:
            return [rank for rank in self.ranks if rank != self.rank]
        if not self.is_first:
            return [self.ranks[0]]
        others = self.ranks[1:]
        count = min(OTHERS_AT_ONCE, len(others))
        begin, self.turn = self.turn, self.turn + count
        return [others[index % len(others)] for index in range(begin, begin + count)]

    def page_of(self, rank: int) -> str:
        """Return the key of a rank's page."""
        return f"{self.name}/{rank}"


class CallChecker:
    """Compares the calls of this process's groups with the other ranks' calls, in a thread of its own.

    Args:
        store: torch's, the same for all ranks; None where there is only one rank.
        executor: of this process's collectives.
        is_served: says whether the process that serves the store is there.
        rank: this process's, in the job.
        lost: returns the ranks that are lost of those that the groups cannot do without.
    """

    def __init__(
        self,
        store: Store | None,
        executor: OrderedExecutor,
        is_served: Callable[[], bool] = lambda: True,
        rank: int = 0,
        lost: Callable[[], list[int]] = list,
    ) -> None:
        self._store = store
        self._rank = rank
        self._is_served = is_served
        self._lost = lost
        self._executor = executor
        self._checked: dict[str, CheckedCalls] = {}
        self._lock = threading.Lock()
        self._fresh: set[CheckedCalls] = set()
        """Those with calls that are not written or compared yet."""
        self._news = threading.Event()
        self._heard: dict[str, tuple[float, str]] = {}
        """Group -> when this rank has heard that it has ended, and why it has."""
        self._over: set[str] = set()
        """Groups that have ended for this rank."""
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        if store is not None:
            self._thread = threading.Thread(target=self._run, name="kvps checks", daemon=True)
            self._thread.start()
            # Else the interpreter would end the thread in the middle of torch's C++, which aborts
            # the process.
            atexit.register(self.close)

    def calls(self, group: str, ranks: Sequence[int], rank: int) -> CheckedCalls:
        """Return the calls of a group, which last as long as the process group's stores."""
        title = f"The ranks of group {group!r} made different calls"
        return self._calls(group, title, group, ranks, rank)

    def letters(self, name: str, group: str, ends: Sequence[int], rank: int) -> CheckedCalls:
        """Return the messages of the first to the second of these ranks, of one name."""
        title = f"Rank {ends[0]} sends to rank {ends[1]} what is not received there ({name})"
        return self._calls(name, title, group, ends, rank)

    def _calls(self, name: str, title: str, group: str, ranks: Sequence[int], rank: int) -> CheckedCalls:
        with self._lock:
            found = self._checked.get(name)
            if found is None:
                whose = name, title, group, tuple(ranks), rank
                found = CheckedCalls(*whose, self._wake, self._write_now)
                self._checked[name] = found
            return found

    def missing(self, calls: CheckedCalls) -> list[int]:
        """Return the ranks that are not known to have made as many calls as this one."""
        others = [rank for rank in calls.ranks if rank != calls.rank]
        try:
            return [rank for rank in others if _last(self._page(calls, rank)) < calls.log.count]
        except RuntimeError:  # rank 0 has ended, and with it torch's store
            return []

    def close(self) -> None:
        """Write the calls that are not written yet, end the thread, and ask the store no more."""
        self._closing.set()
        self._news.set()
        atexit.unregister(self.close)
        if self._thread is None or threading.current_thread() is self._thread:
            return
        self._thread.join(2 * END_MAX_S)
        store, self._store = self._store, None
        if store is not None and not self._thread.is_alive() and self._is_served():
            with suppress(RuntimeError):  # rank 0 was killed
                store.set(_goodbye(self._rank), "")

    def _write_now(self, calls: CheckedCalls) -> None:
        with suppress(RuntimeError):  # rank 0 has ended, and with it torch's store
            self._served().set(calls.page_of(calls.rank), to_page(calls.log.calls()))

    def _wake(self, calls: CheckedCalls) -> None:
        with self._lock:
            self._fresh.add(calls)
        if not self._news.is_set():
            self._news.set()

    # --- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                self._news.wait()
                self._look_while_there_is_reason()
            until = time.monotonic() + END_MAX_S
            self._look()
            while not self._is_settled() and time.monotonic() < until:
                time.sleep(HASTE_S)
                self._look()
        except RuntimeError as error:  # rank 0 has ended, and with it torch's store
            log.debug("calls are not compared any more: %s", error)
            for group, (_, text) in self._heard.items():
                self._fail(group, text)

    def _look_while_there_is_reason(self) -> None:
        since, seen = time.monotonic(), 0
        while not self._closing.wait(self._pause_s(time.monotonic() - since)):
            self._news.clear()
            if not self._look():
                return
            made = sum(calls.log.count for calls in list(self._checked.values()))
            if made != seen:
                since, seen = time.monotonic(), made

    def _pause_s(self, waited_s: float) -> float:
        """Return the seconds until the next look."""
        ranks = max([len(calls.ranks) for calls in list(self._checked.values())], default=1)
        if self._heard.keys() - self._over:
            return HASTE_S
        pause = EVERY_S if waited_s < LATER_AFTER_S else LATER_S
        return pause * max(1.0, ranks / RANKS_AT_ONCE)

    def _look(self) -> bool:
        """Write and compare new calls, and fail the calls that wait in a group that has ended; return
        whether to go on."""
        waiting = self._executor.waiting()
        with self._lock:
            fresh = set(self._fresh)
            busy = fresh | {self._checked[name] for name in waiting if name in self._checked}
        if lost := self._lost():
            for calls in busy:
                self._executor.fail(
                    calls.group, WorkerLost(f"worker {lost[0]} is lost, and the group needs it")
                )
        for calls in busy:
            self._write(calls)
            for peer in calls.next_peers():
                self._compare(calls, peer)
        for group in {calls.group for calls in busy}:
            self._hear(group)
        with self._lock:
            for calls in fresh:
                if (calls.written if calls.is_first else calls.compared) >= calls.log.count:
                    self._fresh.discard(calls)
            return bool(self._fresh) or bool(waiting)

    def _is_settled(self) -> bool:
        """Whether no other rank needs this one to learn of a mismatch."""
        for calls in list(self._checked.values()):
            if calls.group in self._over:
                return self._heard_by(calls.group) >= len(self._checked[calls.group].ranks)
            refused = calls.log.last_refused
            others = [rank for rank in calls.ranks if rank != calls.rank]
            if refused and any(_last(self._page(calls, rank)) < refused for rank in others):
                return False
        return True

    def _write(self, calls: CheckedCalls) -> None:
        made = calls.log.calls()
        if made and made[-1].number > calls.written:
            self._served().set(calls.page_of(calls.rank), to_page(made))
            calls.written = made[-1].number

    def _compare(self, calls: CheckedCalls, peer: int) -> None:
        theirs, mine = self._page(calls, peer), calls.log.calls()
        number = first_difference(mine, theirs)
        if number is None:
            places = calls.ranks.index(calls.rank), calls.ranks.index(peer)
            number = exchange_difference(mine, theirs, *places)
        calls.compared = max(calls.compared, min(_last(mine), _last(theirs)))
        if number is None:
            return
        pages = {rank: self._page(calls, rank) for rank in calls.ranks if rank != calls.rank}
        self._tell(calls.group, in_words(calls.title, number, {**pages, calls.rank: mine}))

    def _tell(self, group: str, text: str) -> None:
        """Write down why a group has ended; the first reason stays."""
        self._served().compare_set(_ended(group), "", text)

    def _hear(self, group: str) -> None:
        """Fail a group that has ended, when all ranks have heard of it or have had the time to."""
        if group in self._over:
            return
        now = time.monotonic()
        if group not in self._heard:
            text = self._get(_ended(group))
            if text is None:
                return
            self._heard[group] = now, text
            self._served().add(_heard(group), 1)
        since, text = self._heard[group]
        calls = self._checked[group]
        is_known = self._heard_by(group) >= len(calls.ranks)
        if is_known and calls.is_first:  # torch's store may end with this process, and others still read it
            self._closing.wait(3 * HASTE_S)
        if is_known or now - since >= HEARD_MAX_S:
            self._fail(group, text)

    def _fail(self, group: str, text: str) -> None:
        self._over.add(group)
        self._executor.fail(group, Mismatch(text))

    def _heard_by(self, group: str) -> int:
        """Return the number of ranks that have heard that a group has ended."""
        return int(self._served().add(_heard(group), 0))

    # --- torch's store ----------------------------------------------------------------------------

    def _page(self, calls: CheckedCalls, rank: int) -> list[LoggedCall]:
        page = self._get(calls.page_of(rank))
        return [] if page is None else from_page(page)

    def _get(self, key: str) -> str | None:
        store = self._served()
        return str(store.get(key).decode()) if store.check([key]) else None

    def _served(self) -> Store:
        """Return torch's store.

        Raises:
            RuntimeError: if rank 0 has ended; torch would print a long warning.
        """
        store = self._store
        if store is None or not self._is_served():
            raise RuntimeError("rank 0, which serves torch's store, has ended")
        return store


def own_connection(store: Store, name: str) -> Store | None:
    """Return a store with this prefix over a connection of its own, which calls of others do not hold up."""
    try:
        return PrefixStore(name, store.clone())  # type: ignore[attr-defined]  # torch's stub lacks it
    except (RuntimeError, NotImplementedError) as error:
        log.info(
            "mismatched collectives are told by a Timeout only: torch's store cannot be shared: %s", error
        )
        return None


def await_goodbyes(
    store: Store, others: Callable[[], Iterable[int]], limit_s: float = GOODBYES_MAX_S
) -> None:
    """Wait until no other rank asks the store any more, or until ``limit_s`` are over.

    Args:
        store: torch's store, as the checkers have it.
        others: returns the ranks that are still in the job, without this one.
        limit_s: how long.
    """
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        keys = [_goodbye(rank) for rank in others()]
        if not keys or store.check(keys):
            return
        time.sleep(HASTE_S)


def _goodbye(rank: int) -> str:
    return f"goodbye/{rank}"


def _ended(group: str) -> str:
    return f"{group}/ended"


def _heard(group: str) -> str:
    return f"{group}/heard"


def _last(calls: Sequence[LoggedCall]) -> int:
    """Return the number of the last call; 0 if there is none."""
    return calls[-1].number if calls else 0
