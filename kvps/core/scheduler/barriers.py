"""Barriers: points that a worker passes when all the workers have reached them.

Theory of operation
-------------------
A barrier has a store, a name and a number; the numbers of one (store, name) are passed in
order::

    number  0 … released | open …
            passed at once | ranks that wait there, and ranks still required

A number is passed when every *required* rank stands there: all ranks but those that left (they need nothing
any more) and those that are gone. A lost rank is required, since its replacement will come by; how long to
wait for that is up to the workers. A rank that is gone and does not stand there cannot come by, so the ranks
that wait for it get an error. A store whose rounds do not wait for the lost says so, and its barriers wait
for neither.

A worker that was *added* to a job that runs is required in a store from its first RESUME there on.

Ranks are counted, never requests: a request that is sent again takes the place of its
predecessor, and the standing of a rank survives its process. What is kept of the past is one
number per (store, name), and after how many rounds that barrier came.

A replacement does not know the numbers. It *resumes* after some round, and has all barriers behind it that
come after no more rounds than that: no rank waits for it there, and it passes them. Its first barrier behind
them is the first that comes after as many rounds as its own; if no rank stands there yet, it *floats*
until a rank does.

At a barrier with *traits*, ranks compare what they have made, such as a model. All are told what differs. A
replacement is told at once: the others may have compared long ago.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from kvps.core.effects import Route
from kvps.core.limits import TABLE, remedy
from kvps.core.refusals import Attempt, RefusedCall
from kvps.core.traits import not_the_same
from kvps.errors import (
    BY_CODE,
    REFUSED,
    ConfigError,
    KvpsError,
    Mismatch,
    Overload,
    ProtocolError,
    WorkerLost,
)
from kvps.protocol.envelope import Message
from kvps.protocol.membership import Barrier, Error, Released, Trait

NAME_MAX = 256
"""Characters of one name."""
CLOSED_MAX = 4096
"""Stores of which it is known that a rank has closed them."""
OPEN_MAX = 64
"""Numbers of one name at which ranks may wait at the same time."""

Name = tuple[str, str]
"""A store, and a name within it."""
Traits = tuple[Trait, ...]


class Float(NamedTuple):
    """The ranks that wait at a barrier whose number is not known yet."""

    waiter: Waiter | None
    after: int


class Passed(NamedTuple):
    """The highest number of a name that was passed, and after how many rounds it came."""

    number: int
    after: int


class Waiter(NamedTuple):
    """Where the answer goes, and which request it answers."""

    route: Route
    seq: int
    is_new: bool = False
    """It has taken another's place, and has to be told the number."""
    what: str = ""
    """The call that it makes here."""

    def released(self, number: int) -> RoutedMessage:
        """Return the answer to a rank that waited at ``number``."""
        return RoutedMessage(self.route, Released(self.seq, number if self.is_new else None))


class RoutedMessage(NamedTuple):
    """A message that is due along a route."""

    route: Route
    message: Message


Standing = dict[int, Waiter | None]
"""The ranks at one number of one name; None for a rank that ended while it waited."""


class Barriers:
    """The ranks at each barrier, and the barriers that were passed."""

    def __init__(self, required: Iterable[int], names_max: int = TABLE["barrier_names"].default) -> None:
        self.required = set(required)
        self._names_max = names_max
        self.lost: set[int] = set()
        """Those of the required whose replacement may come."""
        self.gone: dict[int, str] = {}
        """The ranks that will not come, and why."""
        self.added: set[int] = set()
        """The ranks that are required only in stores in which they have resumed."""
        self.released: dict[Name, int] = {}
        """The highest number that was passed."""
        self.open: dict[Name, dict[int, Standing]] = {}
        self.hasty: set[Name] = set()
        """The stores in which no rank waits for lost or gone ranks."""
        self.after: dict[Name, dict[int, int]] = {}
        """By number, after how many rounds it comes: of those that are open, and of the last passed."""
        self.resumed: dict[tuple[str, int], int] = {}
        """By store and rank, after how many rounds it took its predecessor's place."""
        self.floating: dict[Name, dict[int, Float]] = {}
        self.closed: dict[str, set[int]] = {}
        """By store, the ranks that have closed it; nobody asks for its barriers any more if all have."""
        self.refused: dict[Name, RefusedCall] = {}
        """Barriers that are not passed, as the call that all make there has failed."""
        self.compared: dict[Name, tuple[int, Traits]] = {}
        """By barrier, the rank that came last, and its traits, which are those of all that stand there."""

    def stand(self, rank: int, waiter: Waiter, at: Barrier) -> list[RoutedMessage]:
        """Let a rank stand at a barrier; return the answers that are due by that."""
        name = (at.store, at.name)
        if at.resumed and at.after <= self.resumed.get((at.store, rank), -1):
            return [RoutedMessage(waiter.route, Released(waiter.seq))]
        number = self._number(at)
        if number is not None and number <= self.released.get(name, -1):
            return [waiter.released(number)]
        if (refused := self._refuse(rank, waiter, at, number)) is not None:
            return refused
        standing = {} if number is None else self._standing(name, number)
        absent = self._hopeless_ranks(name, at.after, standing) if self.gone else set()
        if at.waits and absent:
            raise self._hopeless(at.store, at.name, at.number, absent)
        if not standing:
            self._admit(name, len(self.open.get(name, {})))
        if not at.waits:
            self.hasty.add(name)
        waiter = waiter._replace(what=at.what)
        if at.traits:
            self.compared[name] = rank, at.traits
        if number is None:
            self.floating.setdefault(name, {})[rank] = Float(waiter, at.after)
        else:
            standing[rank] = waiter
            self.open.setdefault(name, {})[number] = standing
            self.after.setdefault(name, {}).setdefault(number, at.after)
        return self._look_at(name) if number is None else self._land(name, number)

    def compare(self, rank: int, waiter: Waiter, at: Barrier) -> list[RoutedMessage]:
        """Let the replacement of a lost rank compare, and go on: the others may have been here, or
        be yet to come."""
        name = (at.store, at.name)
        other = self.compared.get(name)
        # Its own predecessor, which nobody has met, may have had another model.
        counts = other is not None and (other[0] != rank or name in self.released)
        if other is not None and counts and other[1] != at.traits:
            raise Mismatch(_differs(at, rank, *other))
        self.compared[name] = rank, at.traits
        answers = [RoutedMessage(waiter.route, Released(waiter.seq))]
        open_ = self.open.get(name, {})
        number = next((turn for turn in sorted(open_) if rank not in open_[turn]), None)
        if number is None:
            if open_ or name in self.released:
                return answers
            self._admit(name, 0)
            number = at.number
        if not at.waits:
            self.hasty.add(name)
        self.open.setdefault(name, {}).setdefault(number, {})[rank] = None
        self.after.setdefault(name, {}).setdefault(number, at.after)
        return answers + self._look_at(name)

    def _refuse(
        self, rank: int, waiter: Waiter, at: Barrier, number: int | None
    ) -> list[RoutedMessage] | None:
        """Return the answers to a rank at a barrier that has failed, or fails by its arrival; else None."""
        name, attempt = (at.store, at.name), Attempt(0 if number is None else number, at.refused)
        known = self.refused.get(name)
        if known is not None and number is not None and known.concerns(attempt):
            return [RoutedMessage(waiter.route, Error(waiter.seq, known.code, known.text))]
        standing = {} if number is None else self._standing(name, number)
        code, text = at.code, at.text
        other = next(
            (
                (its_rank, waiter.what)
                for its_rank, waiter in standing.items()
                if waiter and its_rank != rank and at.what and waiter.what not in ("", at.what)
            ),
            None,
        )
        met = self.compared.get(name) if standing else None
        if not code and met is not None and met[0] != rank and met[1] != at.traits:
            code, text = Mismatch.code, _differs(at, rank, *met)
        if not code and other is not None:
            code = Mismatch.code
            text = (
                f"store {at.store!r:.60}: worker {rank} called {at.what:.600}, and worker {other[0]} "
                f"called {other[1]:.600}; every worker must make the same call. Nothing was done"
            )
        if not code:
            return None
        if BY_CODE.get(code) not in REFUSED:
            raise ProtocolError(f"a collective call cannot fail with code {code}")
        waiters = [(rank, waiter)]
        if number is not None:
            self._admit(name, 0)
            self.refused[name] = RefusedCall(attempt, code, text)
            waiters += [(one_rank, waiter) for one_rank, waiter in standing.items() if waiter]
            waiters = list(dict(reversed(waiters)).items())  # who stood here before, too
            if standing:
                for _ in self._take(name, number):
                    pass
            if name not in self.open.keys() | self.released.keys():
                self.hasty.discard(name)
        return [RoutedMessage(answered.route, Error(answered.seq, code, text)) for _, answered in waiters]

    def resume(self, rank: int, store: str, pushed: int) -> list[RoutedMessage]:
        """A rank goes on after so many rounds of a store; return the answers that are due by that."""
        self.resumed[store, rank] = pushed
        return [answer for name in list(self.open) if name[0] == store for answer in self._look_at(name)]

    def begin(self, rank: int) -> None:
        """A worker that was added has this rank: it has resumed nowhere yet."""
        self.added.add(rank)
        self.resumed = {place: after for place, after in self.resumed.items() if place[1] != rank}

    def close(self, rank: int, stores: Iterable[str]) -> None:
        """A rank has closed stores. Their barriers are forgotten when there is no room for others."""
        for store in stores:
            self.closed.setdefault(store, set()).add(rank)
        while len(self.closed) > CLOSED_MAX:
            del self.closed[next(iter(self.closed))]

    def _forget_closed(self) -> None:
        """Forget the barriers of stores that all ranks have closed."""
        ended = {store for store, ranks in self.closed.items() if ranks >= self.required}
        for names in (self.released, self.after, self.floating, self.refused, self.compared):
            for name in [entry for entry in names if entry[0] in ended and entry not in self.open]:
                del names[name]
        self.hasty = {name for name in self.hasty if name[0] not in ended or name in self.open}
        for store, rank in [entry for entry in self.resumed if entry[0] in ended]:
            del self.resumed[store, rank]
        for store in ended:
            del self.closed[store]

    def next_numbers(self, rank: int, store: str) -> dict[str, int]:
        """Return which barriers of a store a rank has to stand at next, by name."""
        numbers = {name: number + 1 for name, number in self.released.items() if name[0] == store}
        for name, open_ in self.open.items():
            stood = [number + 1 for number, standing in open_.items() if rank in standing]
            if stood and name[0] == store:
                numbers[name] = max(*stood, numbers.get(name, 0))
        return {name: number for (_, name), number in numbers.items()}

    def missing(self, rank: int, at: Barrier) -> tuple[int, ...]:
        """Return the ranks that a rank at a barrier waits for; empty if it is not there."""
        name, number = (at.store, at.name), self._number(at)
        if rank in (floating := self.floating.get(name, {})) and at.resumed:
            return tuple(sorted(self._needed(name, at.after) - floating.keys()))
        standing = {} if number is None else self._standing(name, number)
        if rank not in standing:
            return ()
        return tuple(sorted(self._needed(name, at.after) - standing.keys()))

    def lacking(self, rank: int) -> tuple[int, ...]:
        """Return the ranks without which a rank that waits at a barrier cannot go on; none if it
        waits at none."""
        for name, numbers in self.open.items():
            for number, standing in numbers.items():
                if standing.get(rank) is not None:
                    needed = self._needed(name, self.after[name][number])
                    return tuple(sorted(needed - standing.keys()))
        return ()

    # --- those who do not know the number -----------------------------------------------------

    def _number(self, at: Barrier) -> int | None:
        """Return the barrier that a request means; None if that cannot be known yet."""
        return self._number_after((at.store, at.name), at.after) if at.resumed else at.number

    def _number_after(self, name: Name, after: int) -> int | None:
        """Return the first barrier that is known to come after so many rounds."""
        known = self.after.get(name, {})
        return min((number for number, rounds in known.items() if rounds >= after), default=None)

    def _land(self, name: Name, number: int) -> list[RoutedMessage]:
        """Give floating ranks the number that is open now, if it is theirs."""
        floating = self.floating.get(name, {})
        for rank, arrival in list(floating.items()):
            if self._number_after(name, arrival.after) == number:
                self.open[name][number][rank] = arrival.waiter
                del floating[rank]
        if not floating:
            self.floating.pop(name, None)
        return self._release(name, number)

    def _land_together(self, name: Name) -> list[RoutedMessage]:
        """If all required ranks float, none of them knows the number: it is the next."""
        floating = self.floating.get(name, {})
        if not floating or name in self.open:
            return []
        after = min(arrival.after for arrival in floating.values())
        here = {rank for rank, arrival in floating.items() if arrival.after == after}
        if not here >= self._needed(name, after):
            return []
        number = self.released.get(name, -1) + 1
        self.open[name] = {number: {}}
        self.after.setdefault(name, {})[number] = after
        return self._land(name, number)

    def _admit(self, name: Name, numbers: int) -> None:
        if len(name[1]) > NAME_MAX:
            raise ConfigError(f"the name of a barrier has at most {NAME_MAX} characters")
        if numbers >= OPEN_MAX:
            raise Overload(
                f"barrier {_shown(*name)} already has {OPEN_MAX} open waits; wait for these before the next",
                limit="barriers",
            )
        known = self._known()
        if name not in known and len(known) >= self._names_max:
            self._forget_closed()
            known = self._known()
        if name not in known and len(known) >= self._names_max:
            raise Overload(
                f"the job already has {self._names_max} names of barriers; reuse a name instead of "
                f"{_shown(*name)} (barriers of one name are numbered), or {remedy('barrier_names')}",
                limit="barrier_names",
            )

    def _known(self) -> set[Name]:
        return {*self.open, *self.released, *self.floating, *self.refused}

    def require(
        self,
        required: Iterable[int],
        gone: dict[int, str],
        lost: Iterable[int] = (),
        added: Iterable[int] = (),
    ) -> list[RoutedMessage]:
        """Set the required ranks, and those of them that count only where they have resumed, and the gone
        ranks; return the answers that become due."""
        self.required, self.gone, self.lost, self.added = set(required), gone, set(lost), set(added)
        names = dict.fromkeys([*self.open, *self.floating])
        return [answer for name in names for answer in self._look_at(name)]

    def _look_at(self, name: Name) -> list[RoutedMessage]:
        """Release or fail what can be, from the last number on."""
        answers = self._land_together(name)
        for number in sorted(self.open.get(name, {}), reverse=True):
            answers += self._release(name, number)
            answers += self._fail(name, number)
        return answers

    def _release(self, name: Name, number: int) -> list[RoutedMessage]:
        """Let them pass if the set is complete; earlier numbers are then passed, too."""
        standing = self._standing(name, number).keys()
        # The lengths are compared first, so that N workers cost N steps and not N * N.
        excused = len(self.lost) + len(self.resumed) + len(self.added)
        if not standing or len(standing) < len(self.required) - excused:
            return []
        if not standing >= self._needed(name, self.after[name][number]):
            return []
        if name in self.refused and self.refused[name].attempt.number <= number:
            del self.refused[name]
        self.released[name], after = number, self.after[name][number]
        passed = [turn for turn in sorted(self.open[name]) if turn <= number]
        answers = [waiter.released(turn) for turn in passed for waiter in self._take(name, turn)]
        for earlier in [turn for turn in self.after[name] if turn < number]:  # the one before
            del self.after[name][earlier]
        self.after[name][number] = after
        return answers

    def _needed(self, name: Name, after: int) -> set[int]:
        """The ranks that have to stand at a barrier of this name that comes after so many rounds."""
        here = self.required - self.lost if name in self.hasty else self.required | self.gone.keys()
        first = dict.fromkeys(self.added, math.inf)
        return {rank for rank in here if self.resumed.get((name[0], rank), first.get(rank, -1)) < after}

    def _hopeless_ranks(self, name: Name, after: int, standing: Standing) -> set[int]:
        """The ranks without which a barrier cannot be passed, and that will not come."""
        return (self.gone.keys() & self._needed(name, after)) - standing.keys()

    def _fail(self, name: Name, number: int) -> list[RoutedMessage]:
        """Answer the waiting ranks of barriers that can never complete."""
        standing = self._standing(name, number)
        if not standing:
            return []
        absent = self._hopeless_ranks(name, self.after[name][number], standing)
        if not absent:
            return []
        error = self._hopeless(*name, number, absent)
        return [
            RoutedMessage(waiter.route, Error(waiter.seq, error.code, str(error)))
            for waiter in self._take(name, number)
        ]

    def _standing(self, name: Name, number: int) -> Standing:
        return self.open.get(name, {}).get(number, {})

    def _take(self, name: Name, number: int) -> Iterator[Waiter]:
        standing = self.open[name].pop(number)
        del self.after[name][number]
        if not self.open[name]:
            del self.open[name]
        return filter(None, standing.values())

    def _hopeless(self, store: str, name: str, number: int, absent: set[int]) -> KvpsError:
        who = ", ".join(f"worker {rank} ({self.gone[rank]})" for rank in sorted(absent)[:8])
        return WorkerLost(
            f"barrier {_shown(store, name)} number {number} can never complete without {who}; "
            "start the job again"
        )

    @property
    def passed(self) -> dict[Name, Passed]:
        """The passed barriers, kept across a restart: a worker that asks again is let through."""
        return {name: Passed(number, self.after[name][number]) for name, number in self.released.items()}

    def restore(self, passed: dict[Name, Passed], resumed: dict[tuple[str, int], int]) -> None:
        """Continue from the state of an earlier scheduler; waiting ranks ask again."""
        self.released = {name: last.number for name, last in passed.items()}
        self.after = {name: {last.number: last.after} for name, last in passed.items()}
        self.resumed = resumed

    def withdraw(self, rank: int) -> None:
        """The process of this rank ended: it stood where it stood, and is answered no more."""
        for numbers in self.open.values():
            for standing in numbers.values():
                if rank in standing:
                    standing[rank] = None
        for floating in self.floating.values():  # its successor finds its place anew
            floating.pop(rank, None)

    def clear(self, required: Iterable[int]) -> None:
        """Forget everything: another job begins."""
        self.required, self.gone, self.lost, self.added = set(required), {}, set(), set()
        self.released.clear()
        self.hasty.clear()
        for kept in (self.open, self.after, self.resumed, self.floating, self.refused):
            kept.clear()
        self.compared.clear()
        self.closed.clear()

    def check(self, alive: set[int]) -> None:
        """Assert the invariants; ``alive`` are the ranks that may be waiting."""
        assert len(self.open.keys() | self.released.keys()) <= self._names_max, "too many names"
        assert self.hasty <= self.open.keys() | self.released.keys(), "a name that nobody uses"
        assert self.lost <= self.required, "lost, but not required"
        assert self.released.keys() <= self.after.keys(), "passed after nobody knows what"
        for name, known in self.after.items():
            passed = {number for number in known if number <= self.released.get(name, -1)}
            assert known.keys() - passed == self.open.get(name, {}).keys(), f"{name}: {known}"
            assert passed <= {self.released.get(name)}, f"{name}: {known} passed"
        for name, numbers in self.open.items():
            assert 0 < len(numbers) <= OPEN_MAX, f"{name} is open at {len(numbers)} numbers"
            for number, standing in numbers.items():
                assert number > self.released.get(name, -1), f"{name} {number} was passed"
                assert standing, f"nobody stands at {name} {number}"
                needed = self._needed(name, self.after[name][number])
                assert not standing.keys() >= needed, f"{name} {number} is complete"
                assert self.gone.keys() & needed <= standing.keys(), f"{name} {number} is hopeless"
                waiting = {rank for rank, waiter in standing.items() if waiter}
                assert waiting <= alive, f"{waiting - alive} wait at {name} {number}, but ended"


def _shown(store: str, name: str) -> str:
    return f"{name!r:.60} of store {store!r:.60}"


def _differs(at: Barrier, rank: int, other: int, traits: Traits) -> str:
    """Say what two ranks do not have in common."""
    (first, firsts), (second, seconds) = sorted([(rank, at.traits), (other, traits)])
    return not_the_same(at.store, at.what, first, dict(firsts), second, dict(seconds))
