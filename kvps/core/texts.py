"""Texts of peers, made safe for a log, a screen, or the environment of a command.

A text that others only show is made harmless by :func:`shown`. One that is used as it is (the name of a host,
an address) is refused by :func:`demand_printable` or :func:`demand_address` if a correct peer
cannot have sent it.
"""

from __future__ import annotations

import re

from kvps.errors import ProtocolError

PORT_MAX = 65535
TAG_MAX = 64
TAG_RULE = (
    f"use 1 to {TAG_MAX} of the characters A-Z, a-z, 0-9, '.', '_' and '-', not beginning with '.' or '-'"
)
"""The tags of checkpoints: words for command lines and file names."""
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*", re.ASCII)


def shown(text: str) -> str:
    """Return ``text`` without what would begin a new line, or command a terminal.

    Example:
        >>> shown("lost\\x1b[2J")
        'lost?[2J'
    """
    if text.isprintable():
        return text
    return "".join(
        [character if character.isprintable() else " " if character.isspace() else "?" for character in text]
    )


def is_tag(text: str) -> bool:
    """Whether ``text`` may be the tag of a checkpoint.

    Example:
        >>> is_tag("epoch-3"), is_tag("../etc"), is_tag("")
        (True, False, False)
    """
    return len(text) <= TAG_MAX and _TAG.fullmatch(text) is not None


def demand_printable(what: str, text: str) -> None:
    """Refuse a text that holds other than printable characters.

    Raises:
        ProtocolError: naming ``what`` it is.
    """
    if not text.isprintable():
        raise ProtocolError(f"{what} {text!r:.60} has characters that cannot be printed")


def demand_address(what: str, text: str) -> None:
    """Refuse an address that cannot be connected to.

    Raises:
        ProtocolError: unless it reads ``tcp://HOST:PORT``.
    """
    scheme, _, place = text.partition("://")
    host, _, port = place.rpartition(":")
    is_port = port.isascii() and port.isdecimal() and len(port) <= 5 and 1 <= int(port) <= PORT_MAX
    if scheme != "tcp" or not host or not is_port or any(character in host for character in " /?#@;,"):
        raise ProtocolError(f"{what} {text!r:.60} is not an address; write it as tcp://HOST:PORT")
