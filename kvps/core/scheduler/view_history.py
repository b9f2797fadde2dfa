"""The history of views: at which view each seat has changed last, so that a view need not name all seats.

A member that has an older view is told of the seats that changed since. This module knows only what was shown
since it began: a member with a view from before that, as after a restart of the scheduler, gets a whole view.
"""

from __future__ import annotations

import math
from itertools import zip_longest

from kvps.protocol.membership import Member, View, ViewChanges

Shown = tuple[tuple[object, ...], str]
"""A seat without its time, and its key."""


class ViewHistory:
    """The seats as the newest view shows them, and the view in which each has changed last."""

    def __init__(self) -> None:
        self._shown: list[Shown] = []
        self._changed_in: list[int] = []
        self._first: float = math.inf
        """The oldest view since which all changes are known."""

    def note(self, view: View) -> None:
        """Take in a view that is newer than all before."""
        shown = [(_timeless(member), key) for member, key in _rows(view)]
        if [row[:2] for row, _ in shown] != [row[:2] for row, _ in self._shown]:  # other seats
            self._first, self._changed_in = view.number, [view.number] * len(shown)
        else:
            for at, (row, before) in enumerate(zip(shown, self._shown, strict=True)):
                if row != before:
                    self._changed_in[at] = view.number
        self._shown = shown

    def since(self, base: int, view: View) -> View | ViewChanges:
        """Return what tells a member whose newest view is ``base`` of ``view``, which was noted.

        All of it where it is not known what changed, or where most of it did.
        """
        if base < self._first:
            return view
        rows = [row for row, number in zip(_rows(view), self._changed_in, strict=True) if number > base]
        if 2 * len(rows) > len(view.members):
            return view
        return ViewChanges(
            view.number,
            base,
            view.phase,
            view.reason,
            tuple([member for member, _ in rows]),
            view.epoch,
            view.since,
            view.cut,
            tuple([key for _, key in rows]) if view.keys else (),
            view.lines,
        )


def _rows(view: View) -> list[tuple[Member, str]]:
    """Return each seat and its key."""
    return list(zip_longest(view.members, view.keys, fillvalue=""))  # type: ignore[arg-type]


def _timeless(member: Member) -> tuple[object, ...]:
    """Return a seat without the time since its loss, which a member counts for itself."""
    return (*member[:6], *member[7:])
