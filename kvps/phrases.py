"""Phrases that error texts and logs have in common: lists cut short, ranks, keys that do not exist."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

RANKS_MAX = 20
"""Ranks that one text names."""
NAMES_MAX = 5
"""Parameters that one text names."""
COMING = "the workers of this job come and go (it was started with N:MAX workers)"


def and_more(count: int, what: str = "") -> str:
    """Return the end of a list that leaves ``count`` entries out; empty if it leaves out none.

    Example:
        >>> and_more(2), and_more(1, "keys"), and_more(0)
        (' and 2 more', ' and 1 more keys', '')
    """
    return f" and {count} more{' ' * bool(what)}{what}" if count > 0 else ""


def some_of(entries: Sequence[str], limit: int, what: str = "") -> str:
    """Return the first ``limit`` of some texts, and how many more there are.

    Example:
        >>> some_of(["'a'", "'b'", "'c'"], 2)
        "'a', 'b' and 1 more"
    """
    return ", ".join(entries[:limit]) + and_more(len(entries) - limit, what)


def names_in_words(names: Sequence[str]) -> str:
    """Return names as quoted texts, not too many."""
    return some_of([repr(name) for name in names], NAMES_MAX)


def ranks_in_words(ranks: Iterable[int], describe: Callable[[int], str] = lambda rank: "") -> str:
    """Return ``rank 3`` or ``ranks 1, 3``, each with the text that ``describe`` returns; not too many."""
    numbers = list(ranks)
    described = [(rank, describe(rank)) for rank in numbers[:RANKS_MAX]]
    named = [f"{rank} ({words})" if words else f"{rank}" for rank, words in described]
    more = and_more(len(numbers) - RANKS_MAX)
    return f"rank{'s' * (len(numbers) != 1)} {', '.join(named)}{more}"


def never_initialised(key: str, store: str = "") -> str:
    """Return the text of a KeyNotFound.

    Args:
        key: the key that is not there.
        store: the store that lacks it, where the caller cannot know which that is.
    """
    place = f" of store {store!r}" if store else ""
    return f"key {key!r}{place} was never initialised; call init({key!r}, value) on every worker first"


def bytes_in_words(size: int) -> str:
    """Return a number of bytes for people.

    Example:
        >>> bytes_in_words(1_288_490_189), bytes_in_words(512)
        ('1.2 GiB', '512 B')
    """
    amount = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1000:
            return f"{size} B" if unit == "B" else f"{amount:.3g} {unit}"
        amount /= 1024
    return f"{amount:.4g} TiB"
