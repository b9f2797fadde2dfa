"""The judgement of a job: whether it goes on, and if not, which worker waits for which, since when, and what to do.

``kvps status``, ``kvps top``, ``kvps doctor`` and the dashboard show what is found here. All of it follows from the answer
to LOOK, in which waits have their age: no clock is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from kvps.phrases import and_more, ranks_in_words
from kvps.protocol.envelope import Role
from kvps.protocol.membership import OldRound, Seen, Wait

CIRCLE_S, STUCK_S = 5.0, 10.0
"""Seconds after which workers that wait for each other are named; and any other wait, or an open round."""
KEY_SHOWN, SHOWN_MAX = 40, 3
"""Characters of a key, and waits of a kind, that are shown."""


class Problem(NamedTuple):
    """A reason why a job does not go on."""

    is_certain: bool
    """The job cannot go on by itself; else it may be slow."""
    text: str
    """The ranks, their calls, and since when."""
    advice: str
    ranks: tuple[int, ...]
    """Those to look at."""


def judge(
    waits: Sequence[Wait],
    rounds: Sequence[OldRound],
    presence: Callable[[int], str] = lambda rank: "",
) -> list[Problem]:
    """Return why a job does not go on, the gravest first; nothing where it does.

    Args:
        waits: the calls in which workers wait.
        rounds: the oldest open rounds.
        presence: returns how a worker stands, in words.

    Example:
        >>> circle = [Wait(0, "push()", 9.0, (1,)), Wait(1, "barrier()", 8.0, (0,))]
        >>> judge(circle, [])[0].text
        'worker 0 has waited in push() for worker 1 for 9 s; worker 1 has waited in barrier() for worker 0 for 8 s'
    """
    by_rank = {wait.rank: wait for wait in waits}
    circle = _circle({rank: wait for rank, wait in by_rank.items() if wait.waited_s >= CIRCLE_S})
    if circle:
        told = [_told(by_rank[rank]) for rank in circle[:SHOWN_MAX]]
        return [
            Problem(
                True,
                "; ".join(told) + and_more(len(circle) - SHOWN_MAX),
                "they wait for each other, and none can go on: every worker must make the same calls in the same order. "
                "Look at these calls in the script, and start the job again",
                tuple(circle),
            )
        ]
    found = [
        _of_round(round_, presence)
        for round_ in rounds
        if round_.age_s >= STUCK_S and round_.missing
    ]
    named = {rank for problem in found for rank in problem.ranks}
    rest = [
        wait for wait in waits if wait.waited_s >= STUCK_S and not named.intersection(wait.ranks)
    ]
    for longest in sorted(rest, key=lambda wait: -wait.waited_s)[:SHOWN_MAX]:
        if not longest.ranks and found:
            continue  # for that round, in all likelihood
        who = ranks_in_words(longest.ranks, presence) if longest.ranks else ""
        found.append(
            Problem(
                False,
                f"worker {longest.rank} has waited in {longest.call} for {longest.waited_s:.0f} s"
                f"{f', for {who}' * bool(who)}",
                "look at the scripts, hosts and links of these workers, or at the servers if none is named",
                longest.ranks or (longest.rank,),
            )
        )
    return found


def problems_of(seen: Seen) -> list[Problem]:
    """Return why a job does not go on, by the answer to LOOK."""
    presence = {
        member.rank: member.presence for member in seen.members if member.role == Role.WORKER
    }
    return judge(seen.waits, seen.rounds, lambda rank: presence.get(rank, ""))


def _of_round(round_: OldRound, presence: Callable[[int], str]) -> Problem:
    who = ranks_in_words(round_.missing, presence)
    return Problem(
        False,
        f"round {round_.number} of key {round_.key[:KEY_SHOWN]!r} of store {round_.store!r} has been open for {round_.age_s:.0f} s, and "
        f"waits for {who}",
        "look at the script, the host and the link of what it waits for",
        round_.missing,
    )


def _told(wait: Wait) -> str:
    who = f"worker{'s' * (len(wait.ranks) != 1)} {', '.join(map(str, wait.ranks[:SHOWN_MAX]))}"
    more = and_more(len(wait.ranks) - SHOWN_MAX)
    return f"worker {wait.rank} has waited in {wait.call} for {who}{more} for {wait.waited_s:.0f} s"


def _circle(waits: Mapping[int, Wait]) -> list[int]:
    """Return workers each of which waits for the next, and the last for the first; none where there is no such circle."""
    over: set[int] = set()
    for start in sorted(waits):
        path, left = [start], [iter(waits[start].ranks)]
        while path:
            rank = next(left[-1], None)
            if rank is None:
                over.add(path.pop())
                left.pop()
            elif rank in path:
                return path[path.index(rank) :]
            elif rank in waits and rank not in over:
                path.append(rank)
                left.append(iter(waits[rank].ranks))
    return []
