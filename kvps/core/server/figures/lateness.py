"""The lateness of each rank at a server: by how much its pushes come after the first push of their round.

It tells which worker is slow, whatever the others do meanwhile: the rank that is first has 0. It is a moving mean,
so that a worker that was slow once is soon forgotten, and one that is slow always is found within some rounds.
"""

from __future__ import annotations

from collections.abc import Iterable

SMOOTHING = 8
"""Pushes after which a change shows by two thirds."""


class Lateness:
    """The lateness of the ranks that push to one store on one server, in seconds."""

    def __init__(self) -> None:
        self._means: dict[int, float] = {}
        self._is_news = False

    def note(self, ranks: Iterable[int], seconds: float) -> None:
        """A push of these ranks came so long after the first of its round."""
        self._is_news = True
        for rank in ranks:
            mean = self._means.get(rank)
            self._means[rank] = seconds if mean is None else mean + (seconds - mean) / SMOOTHING

    def take_news(self) -> bool:
        """Return whether there were pushes since this was asked last."""
        is_news, self._is_news = self._is_news, False
        return is_news

    def means(self) -> dict[int, float]:
        """Return a copy of the means, by rank."""
        return dict(self._means)


def most_late(stores: Iterable[Lateness], limit: int) -> dict[str, float]:
    """Return by rank the largest mean of several stores, of the ranks that are latest.

    Args:
        stores: of one server.
        limit: how many ranks to return at most.
    """
    largest: dict[int, float] = {}
    for store in stores:
        for rank, seconds in store.means().items():
            largest[rank] = max(seconds, largest.get(rank, 0.0))
    latest = sorted(largest.items(), key=lambda one: (-one[1], one[0]))[:limit]
    return {str(rank): seconds for rank, seconds in latest}
