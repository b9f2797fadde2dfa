"""The log of one rank's collectives in one group, and its comparison with the log of another rank.

Collectives have no names: the k-th of one rank meets the k-th of every other. So each rank numbers
its calls, and keeps the last of them as text: the operation, the reduction or root, the element
type and the shape. Each entry carries a digest of itself and all entries before it. Two logs with
the same digest at one number are the same up to there, however much of their beginning has been forgotten.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from kvps.phrases import ranks_in_words
from kvps.tensors import NAMES

EXCHANGED_MAX = 32
"""The largest group whose logs hold the parts of an all_to_all."""
KEPT = 48
"""The number of calls that a log remembers."""
SHAPES_SHOWN = 8
"""The number of different shapes of one call that its text names; the others are in a digest."""
TEXT_MAX = 300
"""Characters of a refusal that other ranks are shown."""
REFUSED = "refused"
"""The digest of a call that its own rank was refused: whatever the reason, it equals that of other
ranks' refusals."""


class LoggedCall(NamedTuple):
    """One call."""

    number: int
    digest: str
    """The digest of this call and all before it."""
    text: str
    sends: Sequence[int] = ()
    """Values for each rank, where their numbers differ between ranks: in an all_to_all of a small group."""
    receives: Sequence[int] = ()
    """Values from each rank."""


class CallLog:
    """The calls of one rank, the newest last; any thread may add to it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: deque[LoggedCall] = deque(maxlen=KEPT)
        self.count = 0
        """The number of calls so far."""
        self.last_refused = 0
        """The number of the last call that was refused; 0 if none was."""
        self._digest = ""

    def add(self, text: str) -> None:
        """Add a call that begins."""
        self._add(text, text)

    def add_exchange(self, text: str, sends: Sequence[int], receives: Sequence[int]) -> None:
        """Add an all_to_all: what one rank sends to another, the other must receive."""
        if len(sends) > EXCHANGED_MAX:
            self._add(text, text)
        else:
            detailed = f"{text} that sends {list(sends)} and receives {list(receives)} values"
            self._add(detailed, text, sends, receives)

    def add_refused(self, error: BaseException) -> None:
        """Add a call that this rank was refused before anything was sent."""
        self._add(f"a call that was refused ({str(error)[:TEXT_MAX]})", REFUSED)
        self.last_refused = self.count

    def _add(self, text: str, digested: str, sends: Sequence[int] = (), receives: Sequence[int] = ()) -> None:
        with self._lock:
            self.count += 1
            chained = f"{self._digest} {digested}".encode()
            self._digest = hashlib.blake2b(chained, digest_size=8).hexdigest()
            self._calls.append(LoggedCall(self.count, self._digest, text, list(sends), list(receives)))

    def calls(self) -> list[LoggedCall]:
        """Return the calls that are remembered."""
        with self._lock:
            return list(self._calls)


def to_page(calls: Sequence[LoggedCall]) -> str:
    """Return calls as other ranks read them."""
    return json.dumps(calls)


def from_page(page: str) -> list[LoggedCall]:
    """Return the calls of a page."""
    return [LoggedCall(*call) for call in json.loads(page)]


def first_difference(mine: Sequence[LoggedCall], theirs: Sequence[LoggedCall]) -> int | None:
    """Return the number of the first call that two logs differ in, if they do where both remember.

    Example:
        >>> log, other = CallLog(), CallLog()
        >>> log.add("barrier"); other.add("barrier"); log.add("barrier")
        >>> first_difference(log.calls(), other.calls())
        >>> other.add("all_reduce(SUM) of float32[4]")
        >>> first_difference(log.calls(), other.calls())
        2
    """
    digests = {call.number: call.digest for call in theirs}
    for call in mine:
        if digests.get(call.number, call.digest) != call.digest:
            return call.number
    return None


def exchange_difference(
    mine: Sequence[LoggedCall], theirs: Sequence[LoggedCall], rank: int, other: int
) -> int | None:
    """Return the number of the first all_to_all in which one rank sends the other more or less
    than that receives.

    Args:
        mine: the calls of the rank at place ``rank`` of the group.
        theirs: the calls of the rank at place ``other``.
    """
    numbered = {call.number: call for call in theirs}
    for call in mine:
        met = numbered.get(call.number)
        if met is None or not call.sends or not met.sends:
            continue
        is_sent = call.sends[other] == met.receives[rank]
        if not is_sent or call.receives[other] != met.sends[rank]:
            return call.number
    return None


def in_words(title: str, number: int, logs: Mapping[int, Sequence[LoggedCall]]) -> str:
    """Say which ranks made which call.

    Args:
        title: the ranks, and the thing that they did not agree on.
        number: the number of the call that differs.
        logs: rank of the job -> its calls, as far as they are known.
    """
    ranks: dict[str, list[int]] = {}
    for rank, calls in sorted(logs.items()):
        for call in calls:
            if call.number == number:
                ranks.setdefault(call.text, []).append(rank)
    made = "; ".join(f"{text} on {ranks_in_words(some)}" for text, some in ranks.items())
    is_known = len(ranks) > 1
    which = f"Number {number} is {made}" if is_known else f"They differed before number {number}"
    return (
        f"{title}. {which}. All ranks must make the same collectives in the same order, with the same "
        "shapes, types, reductions and roots. The group cannot be used any more: mend the script, and "
        "create the group again"
    )


def described(tensors: Sequence[torch.Tensor]) -> str:
    """Return the types and shapes of tensors as text; other text for others.

    Example:
        >>> described([torch.zeros(4, 5)])
        'float32[4, 5]'
        >>> described([torch.zeros(2), torch.zeros(2)])
        '2 x float32[2]'
    """
    if len(tensors) == 1:
        return _described(tensors[0])
    texts = [_described(tensor) for tensor in tensors]
    different = list(dict.fromkeys(texts))
    if len(different) == 1:
        return f"{len(texts)} x {texts[0]}"
    shown = ", ".join(texts[:SHAPES_SHOWN])
    if len(texts) <= SHAPES_SHOWN:
        return shown
    digest = hashlib.blake2b("\n".join(texts).encode(), digest_size=4).hexdigest()
    return f"{shown} and {len(texts) - SHAPES_SHOWN} more [{digest}]"


def _described(tensor: torch.Tensor) -> str:
    return f"{type_name(tensor.dtype)}{list(tensor.shape)}"


def type_name(dtype: torch.dtype) -> str:
    """Return the name of an element type, without ``torch.``."""
    return NAMES.get(dtype) or str(dtype).removeprefix("torch.")
