"""Validation of the JSON in a checkpoint, as strict as the validation of a peer's messages.

A file may have been cut short, edited, or written by something else. Each check returns the value
it was given, or raises a ``ValueError`` that says what was expected; readers of a file turn
it into a :class:`~kvps.errors.StorageError` with the file's name.
"""

from __future__ import annotations

import json
import math
import reprlib
from contextlib import suppress
from typing import NoReturn, cast

from kvps.protocol.envelope import KEY_MAX

INT_MAX = 2**63 - 1
RANK_MAX = 2**32 - 1


def unlike(expected: str, value: object) -> ValueError:
    """Return the error for an unexpected value."""
    return ValueError(f"expected {expected}, got {reprlib.repr(value)}")


def parsed(text: str) -> object:
    """Return what JSON says; NaN and infinity, which are no JSON, are refused.

    Raises:
        ValueError: if it is no JSON.
    """
    try:
        found: object = json.loads(text, parse_constant=_constant)
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None
    return found


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number in JSON")


def natural(what: str, value: object, most: int = INT_MAX) -> int:
    """Return ``value``, a whole number from 0 to ``most``."""
    if type(value) is not int or not 0 <= value <= most:
        raise unlike(f"for {what} a whole number from 0 to {most}", value)
    return value


def finite(what: str, value: object) -> float:
    """Return ``value``, a number that is neither NaN nor infinite."""
    if type(value) in (float, int):
        with suppress(OverflowError):  # a whole number beyond all floats
            number = float(cast("float", value))
            if math.isfinite(number):
                return number
    raise unlike(f"for {what} a finite number", value)


def flag(what: str, value: object) -> bool:
    """Return ``value``, true or false."""
    if type(value) is not bool:
        raise unlike(f"for {what} true or false", value)
    return value


def text(what: str, value: object, least: int = 0) -> str:
    """Return ``value``, a text of ``least`` to 256 printable characters."""
    if type(value) is not str or not least <= len(value) <= KEY_MAX or not value.isprintable():
        raise unlike(f"for {what} {least} to {KEY_MAX} printable characters", value)
    return value


def octets(what: str, value: object, count: int) -> bytes:
    """Return the ``count`` bytes that ``value`` is in lower-case hexadecimal digits."""
    if type(value) is str and len(value) == 2 * count and set(value) <= set("0123456789abcdef"):
        return bytes.fromhex(value)
    raise unlike(f"for {what} {2 * count} lower-case hexadecimal digits", value)


def array(what: str, value: object, length: int | None = None) -> list[object]:
    """Return ``value``, an array, if ``length`` is given of that many."""
    if type(value) is not list or (length is not None and len(value) != length):
        size = "an array" if length is None else f"an array of {length}"
        raise unlike(f"for {what} {size}", value)
    return value


def table(what: str, value: object) -> dict[str, object]:
    """Return ``value``, an object of JSON."""
    if type(value) is not dict:
        raise unlike(f"for {what} an object", value)
    return value


def record(what: str, value: object, *names: str) -> dict[str, object]:
    """Return ``value``, an object that has exactly the entries ``names``."""
    found = table(what, value)
    for name in names:
        if name not in found:
            raise ValueError(f"{what} has no {name!r}")
    for name in found:
        if name not in names:
            raise ValueError(f"{what} has {reprlib.repr(name)}, which is not known here")
    return found
