"""Traits: what must be the same on every worker, as it travels, and the text that says where two
workers differ."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from kvps.phrases import and_more
from kvps.protocol.membership import Trait

TRAITS_MAX, NAME_MAX, VALUE_MAX = 2000, 256, 128
"""Traits that travel, and characters of each; a digest stands for the others."""
SHOWN_MAX = 5
"""Differences that a text names."""


def traits_of(found: Mapping[str, str]) -> tuple[Trait, ...]:
    """Return traits as they travel: in one order, and not too many.

    Example:
        >>> traits_of({"parameter 'w'": "float32[2]"})
        (Trait(name="parameter 'w'", value='float32[2]'),)
    """
    ordered = sorted(found.items())
    shown = tuple([Trait(name[:NAME_MAX], value[:VALUE_MAX]) for name, value in ordered])
    if len(shown) <= TRAITS_MAX and all(map(tuple.__eq__, shown, ordered)):
        return shown
    digest = hashlib.sha256(repr(ordered).encode()).hexdigest()[:16]
    return (*shown[:TRAITS_MAX], Trait("the whole", f"{len(ordered)} names [{digest}]"))


def differences(first: int, firsts: Mapping[str, str], second: int, seconds: Mapping[str, str]) -> str:
    """Say what two workers do not have in common.

    Args:
        first, second: the ranks.
        firsts, seconds: their traits.

    Example:
        >>> differences(0, {"parameter 'w'": "float32[2]"}, 1, {"parameter 'w'": "float32[3]"})
        "parameter 'w' is float32[2] on worker 0, and float32[3] on worker 1"
    """
    found = []
    for name in sorted(firsts.keys() | seconds.keys()):
        trait, other = firsts.get(name), seconds.get(name)
        if trait is None or other is None:
            has, lacks = (first, second) if other is None else (second, first)
            found.append(f"worker {has} has {name} ({trait or other}), and worker {lacks} does not")
        elif trait != other:
            found.append(f"{name} is {trait} on worker {first}, and {other} on worker {second}")
    return "; ".join(found[:SHOWN_MAX]) + and_more(len(found) - SHOWN_MAX)


def not_the_same(
    store: str, what: str, first: int, firsts: Mapping[str, str], second: int, seconds: Mapping[str, str]
) -> str:
    """Return the text of the error by which all workers learn that two are about to make different things."""
    found = differences(first, firsts, second, seconds)
    return (
        f"{what:.200} of store {store!r:.60} is not the same on every worker: {found}. Nothing was sent. "
        "Give every worker the same model and options"
    )
