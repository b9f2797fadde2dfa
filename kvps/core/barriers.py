"""Barriers: points that a worker passes when all the workers have reached them.

Theory of operation
-------------------
A barrier has a store, a name and a number; the numbers of one (store, name) are passed in
order::

    number  0 … released | open …
            passed at once | who stands there, and who is still required

A number is passed when every *required* rank stands there: all ranks but those that left (they
need nothing any more) and those that are gone. A lost rank is required, since its replacement
will come by; how long to wait for that is up to the workers. A rank that is gone and does not
stand there cannot come by, so those who wait for it are told so. A store whose rounds do not wait
for the lost says so, and its barriers wait for neither.

Ranks are counted, never requests: a request that is sent again takes the place of its
predecessor, and the standing of a rank survives its process. What is kept of the past is one
number per (store, name).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvps.errors import ConfigError, KvpsError, Overload, WorkerLost
from kvps.messages import Barrier, Error, Message, Released

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kvps.core.effects import Route

NAMES_MAX = 1024
"""Names of barriers in one job, over all stores."""
NAME_MAX = 256
"""Characters of one name."""
OPEN_MAX = 64
"""Numbers of one name at which somebody may wait at the same time."""

Name = tuple[str, str]
"""A store, and a name within it."""


class Waiter(NamedTuple):
    """Where the answer goes, and which request it answers."""

    route: Route
    seq: int


class Answer(NamedTuple):
    """A message that is due along a route."""

    route: Route
    message: Message


Standing = dict[int, Waiter | None]
"""The ranks at one number of one name; None for one that ended while it waited."""


class Barriers:
    """Who stands where, and what has been passed."""

    def __init__(self, required: Iterable[int]) -> None:
        self.required = set(required)
        self.lost: set[int] = set()
        """Those of the required whose replacement may come."""
        self.gone: dict[int, str] = {}
        """The ranks that will not come, and why."""
        self.released: dict[Name, int] = {}
        """The highest number that was passed."""
        self.open: dict[Name, dict[int, Standing]] = {}
        self.hasty: set[Name] = set()
        """Where nobody waits for those who are lost or gone."""

    def stand(self, rank: int, waiter: Waiter, at: Barrier) -> list[Answer]:
        """Let a rank stand at a barrier; return the answers that are due by that."""
        name = (at.store, at.name)
        if at.number <= self.released.get(name, -1):
            return [Answer(waiter.route, Released(waiter.seq))]
        standing = self._standing(name, at.number)
        if at.waits and (absent := self.gone.keys() - standing.keys()):
            raise self._hopeless(at.store, at.name, at.number, absent)
        if not standing:
            self._admit(name, len(self.open.get(name, {})))
        if not at.waits:
            self.hasty.add(name)
        standing[rank] = waiter
        self.open.setdefault(name, {})[at.number] = standing
        return self._release(name, at.number)

    def _admit(self, name: Name, numbers: int) -> None:
        if len(name[1]) > NAME_MAX:
            raise ConfigError(f"a barrier's name has at most {NAME_MAX} characters")
        if numbers >= OPEN_MAX:
            raise Overload(
                f"barrier {_shown(*name)} is waited for at {OPEN_MAX} numbers already; wait for "
                "them before the next"
            )
        is_known = name in self.open or name in self.released
        if not is_known and len(self.open.keys() | self.released.keys()) >= NAMES_MAX:
            raise Overload(
                f"the job has {NAMES_MAX} names of barriers already; use a name again instead of "
                f"{_shown(*name)} (barriers of one name are numbered)"
            )

    def require(
        self, required: Iterable[int], gone: dict[int, str], lost: Iterable[int] = ()
    ) -> list[Answer]:
        """Take in who is required and who is gone; return the answers that are due by that."""
        self.required, self.gone, self.lost = set(required), gone, set(lost)
        answers: list[Answer] = []
        for name in list(self.open):
            for number in sorted(self.open[name], reverse=True):
                answers += self._release(name, number)
                answers += self._fail(name, number)
        return answers

    def _release(self, name: Name, number: int) -> list[Answer]:
        """Let them pass if the set is complete; earlier numbers are then passed, too."""
        standing = self._standing(name, number).keys()
        # The lengths are compared first, so that N workers cost N steps and not N * N.
        if not standing or len(standing) < len(self.required) - len(self.lost):
            return []
        if not standing >= self._needed(name):
            return []
        self.released[name] = number
        passed = [one for one in sorted(self.open[name]) if one <= number]
        return [
            Answer(waiter.route, Released(waiter.seq))
            for one in passed
            for waiter in self._take(name, one)
        ]

    def _needed(self, name: Name) -> set[int]:
        """The ranks that have to stand at a barrier of this name."""
        if name in self.hasty:
            return self.required - self.lost
        return self.required | self.gone.keys()

    def _fail(self, name: Name, number: int) -> list[Answer]:
        """Tell those who wait that it is in vain, if it is."""
        standing = self._standing(name, number)
        absent = (self.gone.keys() & self._needed(name)) - standing.keys()
        if not standing or not absent:
            return []
        error = self._hopeless(*name, number, absent)
        return [
            Answer(waiter.route, Error(waiter.seq, error.code, str(error)))
            for waiter in self._take(name, number)
        ]

    def _standing(self, name: Name, number: int) -> Standing:
        return self.open.get(name, {}).get(number, {})

    def _take(self, name: Name, number: int) -> Iterator[Waiter]:
        standing = self.open[name].pop(number)
        if not self.open[name]:
            del self.open[name]
        return filter(None, standing.values())

    def _hopeless(self, store: str, name: str, number: int, absent: set[int]) -> KvpsError:
        who = ", ".join(f"worker {rank} ({self.gone[rank]})" for rank in sorted(absent)[:8])
        return WorkerLost(
            f"barrier {_shown(store, name)} number {number} cannot be passed: gone for good is "
            f"{who}; start the job again"
        )

    def withdraw(self, rank: int) -> None:
        """The process of this rank ended: it stood where it stood, and is answered no more."""
        for numbers in self.open.values():
            for standing in numbers.values():
                if rank in standing:
                    standing[rank] = None

    def clear(self, required: Iterable[int]) -> None:
        """Forget everything: another job begins."""
        self.required, self.gone, self.lost = set(required), {}, set()
        self.released.clear()
        self.open.clear()
        self.hasty.clear()

    def check(self, alive: set[int]) -> None:
        """Assert the invariants; ``alive`` are the ranks that may be waiting."""
        assert len(self.open.keys() | self.released.keys()) <= NAMES_MAX, "too many names"
        assert self.hasty <= self.open.keys() | self.released.keys(), "a name that nobody uses"
        assert self.lost <= self.required, "lost, but not required"
        for name, numbers in self.open.items():
            assert 0 < len(numbers) <= OPEN_MAX, f"{name} is open at {len(numbers)} numbers"
            for number, standing in numbers.items():
                assert number > self.released.get(name, -1), f"{name} {number} was passed"
                assert standing, f"nobody stands at {name} {number}"
                needed = self._needed(name)
                assert not standing.keys() >= needed, f"{name} {number} is complete"
                assert self.gone.keys() & needed <= standing.keys(), f"{name} {number} is hopeless"
                waiting = {rank for rank, waiter in standing.items() if waiter}
                assert waiting <= alive, f"{waiting - alive} wait at {name} {number}, but ended"


def _shown(store: str, name: str) -> str:
    return f"{name!r:.60} of store {store!r:.60}"
