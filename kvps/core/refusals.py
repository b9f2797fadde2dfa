"""Refusals of collective calls: what one rank was refused, kept as the answer for all.

Where the k-th call of one rank meets the k-th of another, and one of them cannot be done, the ranks that wait
for it get the same error, and so does a rank that arrives later. A call that is made again after that has the
same number, and is the next *attempt*: each rank counts what it was refused.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from kvps.errors import KvpsError, from_code

KEPT_MAX = 4096
"""How many refusals are kept of one store."""


class Attempt(NamedTuple):
    """The number of a call of its kind, and how often it was refused before."""

    number: int
    refused: int


class RefusedCall(NamedTuple):
    """Why a call of all ranks cannot be done."""

    attempt: Attempt
    code: int
    text: str

    def concerns(self, attempt: Attempt) -> bool:
        """Whether an attempt is refused, too."""
        return attempt.number == self.attempt.number and attempt.refused <= self.attempt.refused


class RefusedCalls:
    """The newest refusal of each kind of call of one store."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, RefusedCall] = {}

    def keep(self, kind: Hashable, attempt: Attempt, error: KvpsError) -> None:
        """Refuse this attempt to everybody by ``error``."""
        self._kept.pop(kind, None)
        self._kept[kind] = RefusedCall(attempt, error.code, str(error))
        if len(self._kept) > KEPT_MAX:
            del self._kept[next(iter(self._kept))]

    def check(self, kind: Hashable, attempt: Attempt) -> None:
        """Raise what this attempt was refused with, if it was.

        Raises:
            KvpsError: then.
        """
        refused = self._kept.get(kind)
        if refused is not None and refused.concerns(attempt):
            raise from_code(refused.code, refused.text)

    def forget(self, kind: Hashable) -> None:
        """Forget a failure after the call has succeeded: later callers have no part in it."""
        self._kept.pop(kind, None)

    def kept(self, most: int) -> list[tuple[Hashable, RefusedCall]]:
        """Return the newest refusals."""
        return list(self._kept.items())[-most:]

    def put(self, kind: Hashable, refused: RefusedCall) -> None:
        """Keep what another server has refused."""
        self._kept[kind] = refused


class Attempts:
    """The collective calls of one store that were refused for this rank."""

    def __init__(self) -> None:
        self._refused: dict[Hashable, Attempt] = {}

    def count(self, kind: Hashable, number: int) -> int:
        """Return how often this call was refused."""
        last = self._refused.get(kind)
        return last.refused if last is not None and last.number == number else 0

    def refuse(self, kind: Hashable, number: int) -> None:
        """This call was refused."""
        self._refused[kind] = Attempt(number, self.count(kind, number) + 1)

    def clear(self) -> None:
        """Numbers mean nothing any more."""
        self._refused.clear()
